"""The source's side: exports to other workers, and the connections of those that pull."""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

from penstock.cluster.kv.connection import Connection, check_message
from penstock.cluster.kv.faults import Fate, Faults
from penstock.cluster.kv.frames import (
    MAX_BLOCKS_PER_MESSAGE,
    MAX_OPEN_PULLS,
    MAX_REASON_CHARACTERS,
    PIECE_BYTES,
    SESSION_BYTES,
    Blocks,
    Ended,
    Join,
    KvMessage,
    Pull,
    Stop,
    Waiting,
    encode,
)
from penstock.kv.blocks import NAME_BYTES
from penstock.kv.moving import KvEngine
from penstock.wire.errors import FrameMalformed, LinkBroken, LinkError

log = logging.getLogger(__name__)

MAX_REMEMBERED = 16_384
"""Ids of transfers that were pulled. The same id is not exported twice, else the engine could mean the first."""


class Export:
    """One chain of blocks that another worker pulls. Its engine says in which slots they are, in order."""

    def __init__(self, session: Session, asked: Pull, fate: Fate) -> None:
        self.session = session
        self.number = asked.number
        self.transfer = asked.transfer
        self.names = asked.names
        self.blocks = asked.blocks
        self.slots: list[int] = []
        self.sent = 0
        self.in_flight = 0
        """Messages with its blocks that are being written to sockets."""
        self.is_last = self.is_told = False
        self.fate = fate
        self.is_stalled = self.is_queued = False

    @property
    def is_over(self) -> bool:
        """Whether all that will be exported is sent."""
        return self.sent == len(self.slots) and (self.is_last or self.sent == self.blocks) and not self.in_flight


class Session:
    """One puller: its connections, and what it pulls. Exports with blocks to send take turns."""

    def __init__(self) -> None:
        self.connections: list[SourceConnection] = []
        self.exports: dict[int, Export] = {}
        self.turns: deque[Export] = deque()
        self.leaving: set[int] = set()
        """Pulls whose blocks are all in the kernel, and not yet at the puller. It says when they are."""

    def wake(self, export: Export) -> None:
        if not export.is_queued and export.sent < len(export.slots) and not export.is_stalled:
            export.is_queued = True
            self.turns.append(export)
        for connection in self.connections:
            connection.wake()


class Source:
    """Answers pullers. All in the transport's thread."""

    def __init__(self, engine: KvEngine, faults: Faults, on_pull: Callable[[], None]) -> None:
        self.bytes_sent = 0
        self.connections: set[SourceConnection] = set()
        self._engine = engine
        self._faults = faults
        self._on_pull = on_pull
        self._layout = engine.memory.layout
        self._sessions: dict[bytes, Session] = {}
        self._exports: dict[bytes, Export] = {}
        self._remembered: dict[bytes, None] = {}

    @property
    def is_idle(self) -> bool:
        return not self._exports and not any(session.leaving for session in self._sessions.values())

    def connected(self, connection: socket.socket, *, is_shared: bool) -> None:
        """A puller has proved itself."""
        self.connections.add(SourceConnection(self, connection, is_shared=is_shared))

    def join(self, connection: SourceConnection, name: bytes) -> Session:
        session = self._sessions.setdefault(name, Session())
        session.connections.insert(0 if connection.only_messages else len(session.connections), connection)
        connection.wake()
        return session

    def leave(self, name: bytes, error: LinkError) -> None:
        """One connection of a session is lost: all of it ends."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        for export in list(session.exports.values()):
            self._end(export)
        for connection in session.connections:
            connection.close(error)

    def pull(self, session: Session, asked: Pull) -> None:
        asked.check()
        if asked.number in session.exports:
            raise FrameMalformed(f"pull {asked.number} is open already")
        if len(session.exports) + len(session.leaving) >= MAX_OPEN_PULLS:
            session.connections[0].send(Ended(asked.number, f"{MAX_OPEN_PULLS:,} other pulls are open, the maximum"))
            return
        if asked.transfer in self._remembered:
            session.connections[0].send(Ended(asked.number, "this transfer was pulled before"))
            return
        self._remember(asked.transfer)
        export = Export(session, asked, self._faults.draw(asked.blocks))
        session.exports[asked.number] = self._exports[asked.transfer] = export
        names = [asked.names[start : start + NAME_BYTES] for start in range(0, len(asked.names), NAME_BYTES)]
        self._engine.export(asked.transfer, names, waits=asked.waits)
        self._on_pull()

    def stop(self, session: Session, number: int) -> None:
        session.leaving.discard(number)
        if export := session.exports.get(number):
            self._end(export)

    def exported(self, transfer: bytes, first: int, slots: Sequence[int], is_last: bool) -> None:
        """From the engine. Ignored when the export has ended."""
        export = self._exports.get(transfer)
        if export is None:
            return
        if first != len(export.slots) or first + len(slots) > export.blocks:
            log.error("the engine exported blocks %d to %d, expected %d to %d", first, first + len(slots), len(export.slots), export.blocks)
            self._end(export, "its engine made an error")
            return
        export.slots += slots
        export.is_last |= is_last
        export.session.wake(export)
        self._finish(export)

    def withdraw(self, transfer: bytes) -> None:
        if export := self._exports.get(transfer):
            self._end(export, "the source took it back")

    def next_blocks(self, session: Session, *, is_shared: bool) -> tuple[Export, bytes, Sequence[memoryview]] | None:
        """The next blocks of the export whose turn it is."""
        while session.turns:
            export = session.turns.popleft()
            export.is_queued = False
            count = self._next_count(export)
            if not count:
                continue
            piece = self._piece(export, count, is_shared=is_shared)
            session.wake(export)
            if is_shared:
                self._finish(export)
            return piece
        return None

    def sent(self, export: Export, size: int) -> None:
        """All of its bytes are in the kernel."""
        self.bytes_sent += size
        export.in_flight -= 1
        self._finish(export)

    def keep_alive(self) -> None:
        """Tells pullers which of their pulls go on, and notices those whose host is gone."""
        for session in list(self._sessions.values()):
            numbers = [*session.leaving, *[number for number, export in session.exports.items() if not export.is_stalled]]
            if (session.exports or session.leaving) and not session.connections[0].has_unsent_messages:
                session.connections[0].send(Waiting(tuple(numbers)))
            for connection in list(session.connections):
                if connection.is_host_gone():
                    connection.close(LinkBroken("its host acknowledges nothing"))

    def close(self, error: LinkError) -> None:
        for connection in list(self.connections):
            connection.close(error)

    def check_integrity(self) -> None:
        open_exports = [export for session in self._sessions.values() for export in session.exports.values()]
        assert {export.transfer for export in open_exports} == set(self._exports)
        for export in open_exports:
            assert export.sent <= len(export.slots) <= export.blocks

    def _next_count(self, export: Export) -> int:
        """How many blocks are sent next. An injected fault may end that."""
        if export.session.exports.get(export.number) is not export:
            return 0
        most = max(1, min(PIECE_BYTES // self._layout.slot_bytes, MAX_BLOCKS_PER_MESSAGE))
        count = min(most, len(export.slots) - export.sent)
        fate = export.fate
        if fate.kind is None or not export.sent <= fate.block < export.sent + count:
            return count
        if fate.block > export.sent:
            return fate.block - export.sent
        match fate.kind:
            case "kill":
                self._faults.kill()
            case "stall":
                export.is_stalled = True
            case "drop":
                self._end(export, "an injected fault")
            case "corrupt":
                return 1
        return 0

    def _piece(self, export: Export, count: int, *, is_shared: bool) -> tuple[Export, bytes, Sequence[memoryview]]:
        memory, first = self._engine.memory, export.sent
        slots = export.slots[first : first + count]
        blocks = [memory.views(slot) for slot in slots]
        checksums = [memory.checksum(strips) for strips in blocks]
        if export.fate.kind == "corrupt" and export.fate.block == first:
            checksums[0] ^= 1
        names = export.names[first * NAME_BYTES : (first + count) * NAME_BYTES]
        export.sent += count
        if is_shared:
            self.bytes_sent += count * self._layout.slot_bytes
            return export, encode(Blocks(export.number, first, names, tuple(checksums), tuple(slots))), ()
        export.in_flight += 1
        return export, encode(Blocks(export.number, first, names, tuple(checksums))), [strip for strips in blocks for strip in strips]

    def _finish(self, export: Export) -> None:
        """Ends it when nothing is left to send. Blocks in shared memory are held until the puller stops."""
        if not export.is_over or self._exports.get(export.transfer) is not export:
            return
        if export.sent < export.blocks and not export.is_told:
            export.is_told = True
            reason = f"the source has {export.sent} of {export.blocks} blocks"
            export.session.connections[0].send(Ended(export.number, reason, export.sent))
        if not export.session.connections[0].is_shared:
            export.session.leaving.add(export.number)
            self._end(export)

    def _end(self, export: Export, reason: str = "") -> None:
        """Nothing reads its slots from here on."""
        session = export.session
        del session.exports[export.number], self._exports[export.transfer]
        for connection in session.connections:
            connection.forget(export)
        if reason and session.connections:
            session.connections[0].send(Ended(export.number, reason[:MAX_REASON_CHARACTERS]))
        self._engine.release(export.transfer)

    def _remember(self, transfer: bytes) -> None:
        self._remembered[transfer] = None
        if len(self._remembered) > MAX_REMEMBERED:
            del self._remembered[next(iter(self._remembered))]


class SourceConnection(Connection):
    """A connection that a puller has opened."""

    def __init__(self, source: Source, connection: socket.socket, *, is_shared: bool) -> None:
        super().__init__(connection)
        self.is_shared = is_shared
        self._source = source
        self._name = b""
        self._session: Session | None = None
        self.only_messages = False
        self._sending: Export | None = None
        self._sending_bytes = 0

    def received(self, message: KvMessage) -> Sequence[memoryview]:
        session = self._session
        match message:
            case Join() if session is None and len(message.session) == SESSION_BYTES:
                self._name, self.only_messages = message.session, message.only_messages
                self._session = self._source.join(self, message.session)
            case Pull() if session is not None:
                self._source.pull(session, message)
            case Stop() if session is not None:
                self._source.stop(session, message.number)
            case _:
                raise check_message(message, "a request of a puller")
        return ()

    def next_blocks(self) -> tuple[bytes, Sequence[memoryview]] | None:
        if self._session is None or self.only_messages:
            return None
        found = self._source.next_blocks(self._session, is_shared=self.is_shared)
        if found is None:
            return None
        export, message, views = found
        if views:
            self._sending, self._sending_bytes = export, sum(map(len, views))
        return message, views

    def blocks_sent(self) -> None:
        export, self._sending = self._sending, None
        if export is not None:
            self._source.sent(export, self._sending_bytes)

    def forget(self, export: Export) -> None:
        """Its memory must not be read any more."""
        if self._sending is export:
            self._sending = None
            self.blank()

    def lost(self, error: LinkError) -> None:
        self._source.connections.discard(self)
        self._source.leave(self._name, error)
