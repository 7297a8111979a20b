"""The puller's side: the workers that this one pulls from, and the pulls that are under way."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

from penstock.cluster.kv.connection import BUFFER_BYTES, Connection, check_message, repeated
from penstock.cluster.kv.frames import MAX_BLOCKS_PER_MESSAGE, SESSION_BYTES, Blocks, Ended, Join, KvMessage, Pull, Stop, Waiting
from penstock.cluster.kv.handshake import Credentials, reach_source
from penstock.cluster.kv.lookups import Lookups
from penstock.cluster.kv.shared_memory import PeerSlots
from penstock.kv.blocks import NAME_BYTES
from penstock.kv.moving import KvEngine, SlotLayout
from penstock.kv.rates import Rate
from penstock.wire.address import Address, UnixAddress, parse_address
from penstock.wire.errors import FrameMalformed, HandshakeRefused, LinkBroken, LinkError
from penstock.wire.messages import KvSource

log = logging.getLogger(__name__)

PAUSE_SECONDS = 0.02
MAX_NOT_NAMED = 3
"""A pull that is not among those of which the source says that they go on, this many times in a row, has failed. The first may have been
sent before the source knew of it."""


@dataclass(frozen=True)
class Patience:
    """How long a puller waits. It looks every `look_seconds`, and counts looks: a worker that was itself busy starts anew."""

    look_seconds: float = 0.1
    silent_looks: int = 10
    """A pull of which nothing was heard at this many looks has failed."""
    connect_seconds: float = 1.0
    retry_seconds: float = 0.2
    max_retry_seconds: float = 5.0
    """After a failed connection the next one is tried this much later, up to the second value. Pulls fail at once meanwhile."""
    idle_seconds: float = 60.0
    """A connection without pulls is closed after this time."""


class ActivePull:
    """One pull: which blocks are announced and which are in their slots."""

    def __init__(self, number: int, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        self.number = number
        self.transfer = source.transfer
        self.waits = source.waits
        self.names = b"".join(names)
        self.slots = slots
        self.blocks = self.limit = len(slots)
        self.reason = ""
        """Why the source sends only blocks up to the limit."""
        self.arrived = 0
        """Without a gap, from the first."""
        self.announced = bytearray(self.blocks)
        self.checked = bytearray(self.blocks)
        self.offers: deque[Blocks] = deque()
        """In the source's slots, to be copied."""
        self.silent_looks = self.not_named = 0

    def heard(self) -> None:
        """Its source goes on."""
        self.silent_looks = self.not_named = 0

    def announce(self, message: Blocks) -> None:
        """Raises FrameMalformed for blocks that were not asked for, or come twice."""
        end = message.first + len(message.checksums)
        if not 0 <= message.first < end <= self.blocks or any(self.announced[message.first : end]):
            raise FrameMalformed(f"the source sent blocks {message.first} to {end} of {self.blocks}, or sent some twice")
        if message.names != self.names[message.first * NAME_BYTES : end * NAME_BYTES]:
            raise FrameMalformed(f"the source sent blocks {message.first} to {end} under other names")
        self.announced[message.first : end] = b"\1" * (end - message.first)

    def check(self, block: int) -> None:
        """This block is in its slot."""
        self.checked[block] = 1
        while self.arrived < self.blocks and self.checked[self.arrived]:
            self.arrived += 1


class Peer:
    """A worker that this one pulls from: its connections, one session for all. When one connection is lost, all pulls end."""

    def __init__(self, address: Address, puller: Puller) -> None:
        self.address = address
        self.pulls: dict[int, ActivePull] = {}
        self.connections: list[PullerConnection] = []
        self.slots: PeerSlots | None = None
        self._puller = puller
        self._session = b""
        self._connecting = False
        self._failures = 0
        self._retry_at = 0.0
        self._copying: deque[ActivePull] = deque()
        self._idle: asyncio.TimerHandle | None = None

    def add(self, pull: ActivePull) -> None:
        self.pulls[pull.number] = pull
        if self._idle is not None:
            self._idle.cancel()
        if self._connecting:
            return
        if self.connections:
            self._ask(pull)
        else:
            self._connect()

    def end(self, pull: ActivePull, failure: str) -> None:
        """Nothing is written into its slots from here on."""
        del self.pulls[pull.number]
        pull.offers.clear()
        for connection in self.connections:
            connection.forget(pull)
        if self.connections:
            self.connections[0].send(Stop(pull.number))
        if not self.pulls:
            self._idle = self._puller.loop.call_later(self._puller.patience.idle_seconds, self._leave)
        self._puller.ended(pull, failure)

    def look(self) -> None:
        """One look at whether the source is silent."""
        silent_looks = self._puller.patience.silent_looks
        for connection in self.connections:
            connection.silent_looks = 0 if connection.has_heard or not self.pulls else connection.silent_looks + 1
            connection.has_heard = False
        if self.connections and all(connection.silent_looks >= silent_looks for connection in self.connections):
            self.lose(LinkBroken("the source is silent"))
        for pull in list(self.pulls.values()):
            pull.silent_looks += 1
            if pull.silent_looks > silent_looks:
                self.end(pull, "the source is silent")

    def hear(self, numbers: Sequence[int]) -> None:
        """The source says which pulls go on."""
        named = set(numbers)
        for number, pull in list(self.pulls.items()):
            if number in named:
                pull.heard()
                continue
            pull.not_named += 1
            if pull.not_named >= MAX_NOT_NAMED:
                self.end(pull, "the source is silent")

    def lose(self, error: LinkError) -> None:
        """Its connections are gone, or useless. The next pull connects again."""
        connections, self.connections = self.connections, []
        for connection in connections:
            connection.close(error)
        if self.slots is not None:
            self.slots.close()
            self.slots = None
        for pull in list(self.pulls.values()):
            self.end(pull, str(error))

    def offer(self, pull: ActivePull, message: Blocks) -> None:
        """These blocks can be copied from the source's slots."""
        if self.slots is None:
            raise FrameMalformed("the source names slots, but has not shared them")
        if not pull.offers:
            self._copying.append(pull)
            if len(self._copying) == 1:
                self._puller.loop.call_soon(self._copy)
        pull.offers.append(message)

    def arrived(self, pull: ActivePull, message: Blocks, position: int) -> bool:
        """Checks one block that is in its slot. Returns whether it is right; else the pull has ended."""
        block = message.first + position
        memory = self._puller.engine.memory
        if memory.checksum(memory.views(pull.slots[block])) != message.checksums[position]:
            self.end(pull, f"block {block} was corrupted on its way")
            return False
        pull.check(block)
        return True

    def report(self, pull: ActivePull, before: int) -> None:
        """Tells the engine about new blocks."""
        if pull.arrived > before:
            self._puller.engine.arrived(pull.transfer, pull.arrived)
        if pull.arrived >= pull.limit:
            self.end(pull, pull.reason)

    def _copy(self) -> None:
        """Copies some blocks of the pull whose turn it is."""
        pull = self._copying.popleft()
        if pull.offers and self.slots is not None:
            message = pull.offers.popleft()
            try:
                self._copy_blocks(self.slots, pull, message)
            except (LinkError, OSError) as error:
                self.lose(error if isinstance(error, LinkError) else LinkBroken(f"its slots cannot be read: {error.strerror}"))
        if pull.offers:
            self._copying.append(pull)
        if self._copying:
            self._puller.loop.call_soon(self._copy)

    def _copy_blocks(self, slots: PeerSlots, pull: ActivePull, message: Blocks) -> None:
        before, memory = pull.arrived, self._puller.engine.memory
        self._puller.begin_blocks()
        for position, slot in enumerate(message.slots):
            slots.copy(slot, memory.views(pull.slots[message.first + position]))
            if not self.arrived(pull, message, position):
                return
        self._puller.count_blocks(len(message.slots))
        self.report(pull, before)

    def _ask(self, pull: ActivePull) -> None:
        pull.heard()
        self.connections[0].send(Pull(pull.number, pull.transfer, pull.names, pull.waits))

    def _connect(self) -> None:
        now = self._puller.loop.time()
        if now < self._retry_at:
            self._fail(f"the last connection to {self.address} failed; the next is tried in {self._retry_at - now:.1f} s")
            return
        self._connecting = True
        self._puller.begin(self._open())

    async def _open(self) -> None:
        """The first connection, for messages only if there are several; one for blocks; then the others."""
        patience = self._puller.patience
        self._session = secrets.token_bytes(SESSION_BYTES)
        streams = 1 if isinstance(self.address, UnixAddress) else self._puller.streams
        try:
            await self._join(only_messages=streams > 1)
            if streams > 1 and self.connections:
                await self._join()
        except LinkError as error:
            self.lose(error)
            self._failures += 1
            self._retry_at = self._puller.loop.time() + min(patience.max_retry_seconds, patience.retry_seconds * 2 ** (self._failures - 1))
            log.warning("KV cannot be pulled from %s: %s", self.address, error)
            self._fail(str(error))
            return
        finally:
            self._connecting = False
        if not self.connections:
            self._fail("the connection was lost")
            return
        self._failures = 0
        log.info("KV is pulled from %s", self.address)
        for pull in list(self.pulls.values()):
            self._ask(pull)
        await self._open_more(streams - 2)

    async def _open_more(self, count: int) -> None:
        session = self._session
        for _ in range(count):
            if not self.connections or session != self._session:
                return
            try:
                await self._join()
            except LinkError as error:
                log.warning("KV comes from %s on %d connections: %s", self.address, len(self.connections), error)
                return

    async def _join(self, *, only_messages: bool = False) -> None:
        """Opens one more connection of this session. Raises LinkError."""
        seconds, session = self._puller.patience.connect_seconds, self._session
        try:
            async with asyncio.timeout(seconds):
                dialog, welcome = await reach_source(self.address, self._puller.credentials, self._puller.lookups)
        except TimeoutError as error:
            raise HandshakeRefused(f"{self.address} did not finish its handshake within {seconds:g} s") from error
        try:
            self._puller.check(welcome.fingerprint, welcome.layout)
            if dialog.files:
                self.slots = PeerSlots(dialog.files.pop(), welcome.layout)
                self.slots.open()
        except LinkError as error:
            dialog.refuse(error)
            self.lose(error)
            raise
        if session != self._session or self._puller.is_closed:
            dialog.close()
            return
        connection = PullerConnection(self, dialog.socket, self._puller)
        self.connections.append(connection)
        connection.send(Join(session, only_messages))

    def _fail(self, failure: str) -> None:
        for pull in list(self.pulls.values()):
            self.end(pull, failure)

    def _leave(self) -> None:
        self.lose(LinkError("it is not needed"))
        self._puller.forget(self)


class PullerConnection(Connection):
    """A connection to a source."""

    def __init__(self, peer: Peer, connection: socket.socket, puller: Puller) -> None:
        super().__init__(connection)
        self.silent_looks = 0
        self._peer = peer
        self._puller = puller
        self._slot_bytes = puller.engine.memory.layout.slot_bytes
        self._coming: tuple[ActivePull, Blocks] | None = None

    def received(self, message: KvMessage) -> Sequence[memoryview]:
        match message:
            case Blocks():
                return self._blocks(message)
            case Ended():
                if pull := self._peer.pulls.get(message.number):
                    pull.limit, pull.reason = message.blocks, message.reason or "the source ended it"
                    self._peer.report(pull, pull.arrived)
            case Waiting():
                self._peer.hear(message.numbers)
            case _:
                raise check_message(message, "blocks")
        return ()

    def _blocks(self, message: Blocks) -> Sequence[memoryview]:
        count = len(message.checksums)
        if not 0 < count <= MAX_BLOCKS_PER_MESSAGE or len(message.names) != count * NAME_BYTES or len(message.slots) not in (0, count):
            raise FrameMalformed(f"the source sent a message with {count} blocks whose parts do not fit together")
        pull = self._peer.pulls.get(message.number)
        if pull is not None:
            pull.announce(message)
            pull.heard()
        if message.slots:
            if pull is not None:
                self._peer.offer(pull, message)
            return ()
        size = count * self._slot_bytes
        if pull is None:
            return list(repeated(memoryview(bytearray(min(size, BUFFER_BYTES))), size))
        self._coming = pull, message
        self._puller.begin_blocks()
        memory = self._puller.engine.memory
        return [strip for slot in pull.slots[message.first : message.first + count] for strip in memory.views(slot)]

    def bytes_received(self) -> None:
        if self._coming is not None:
            self._coming[0].heard()

    def blocks_received(self) -> None:
        if self._coming is None:
            return
        (pull, message), self._coming = self._coming, None
        count = len(message.checksums)
        self._puller.count_blocks(count)
        before = pull.arrived
        if all(self._peer.arrived(pull, message, position) for position in range(count)):
            self._peer.report(pull, before)

    def forget(self, pull: ActivePull) -> None:
        """Nothing is written into its slots any more."""
        if self._coming is not None and self._coming[0] is pull:
            self._coming = None
            self.discard()

    def lost(self, error: LinkError) -> None:
        self._coming = None
        if self in self._peer.connections:
            self._peer.lose(error)


class Puller:
    """All pulls of this worker. All in the transport's thread."""

    def __init__(self, engine: KvEngine, credentials: Credentials, patience: Patience, streams: int) -> None:
        self.engine = engine
        self.credentials = credentials
        self.patience = patience
        self.streams = streams
        self.loop = asyncio.get_running_loop()
        self.lookups = Lookups()
        self.rate = Rate()
        self.bytes_pulled, self.seconds_pulling = 0, 0.0
        self._moved_at = 0.0
        self.is_closed = False
        self._peers: dict[Address, Peer] = {}
        self._pulls: dict[bytes, tuple[Peer, ActivePull]] = {}
        self._next_number = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._pulls

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        if refusal := self._refusal(source, names, slots):
            self.engine.pull_ended(source.transfer, refusal)
            return
        assert source.transfer not in self._pulls, "a transfer is pulled once at a time"
        address = parse_address(source.address)
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(address, self)
        self._next_number += 1
        pull = ActivePull(self._next_number, source, names, slots)
        self._pulls[source.transfer] = peer, pull
        peer.add(pull)

    def stop(self, transfer: bytes, reason: str = "stopped") -> None:
        if found := self._pulls.get(transfer):
            peer, pull = found
            peer.end(pull, reason)

    def look(self) -> None:
        for peer in list(self._peers.values()):
            peer.look()

    def ended(self, pull: ActivePull, failure: str) -> None:
        del self._pulls[pull.transfer]
        self.engine.pull_ended(pull.transfer, failure)

    def begin_blocks(self) -> None:
        """Blocks are announced. A long pause before them is not counted: nothing was being sent."""
        now = self.loop.time()
        if now - self._moved_at > PAUSE_SECONDS:
            self._moved_at = now

    def count_blocks(self, count: int) -> None:
        """They are here. Measures the rate of all transfers together."""
        size, now = count * self.engine.memory.layout.slot_bytes, self.loop.time()
        seconds, self._moved_at = now - self._moved_at, now
        self.bytes_pulled += size
        self.seconds_pulling += seconds
        self.rate.measure(size, seconds, now)

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer.address, None)

    def check(self, fingerprint: bytes, layout: SlotLayout) -> None:
        """Raises HandshakeRefused unless the source's blocks mean the same here."""
        own = self.engine.memory.layout
        if fingerprint != self.engine.fingerprint:
            raise HandshakeRefused("its KV has another fingerprint: the model, its weights or its layout differ")
        if (layout.strip_bytes, len(layout.starts)) != (own.strip_bytes, len(own.starts)):
            raise HandshakeRefused(f"its slots have {len(layout.starts)} strips of {layout.strip_bytes:,} bytes, which do not fit here")

    def begin(self, work: Coroutine[None, None, None]) -> None:
        task = self.loop.create_task(work, name="connecting for KV")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, error: LinkError) -> None:
        self.is_closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for peer in list(self._peers.values()):
            peer.lose(error)
        self._peers.clear()

    def check_integrity(self) -> None:
        of_peers = {pull.transfer: pull for peer in self._peers.values() for pull in peer.pulls.values()}
        assert of_peers == {transfer: pull for transfer, (_, pull) in self._pulls.items()}

    def _refusal(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> str:
        if self.is_closed:
            return "this worker is stopping"
        if len(names) != len(slots) or not names:
            return f"{len(names)} blocks into {len(slots)} slots"
        try:
            parse_address(source.address)
        except ValueError as error:
            return f"the source is at {source.address!r}: {error}"
        return ""
