"""The KV events that an engine publishes over ZMQ, followed without a gap."""

from __future__ import annotations

import asyncio
import logging
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.backends.external.engine import EventEndpoints
from penstock.backends.external.kv_events import BlockMirror, EngineEvent, decode_batch
from penstock.wire.errors import ConfigError
from penstock.wire.messages import KvEvent, KvEvents, Snapshot

if TYPE_CHECKING:
    import zmq
    import zmq.asyncio

log = logging.getLogger(__name__)

# A step that stores a million tokens is some five megabytes.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
# Messages that may wait in a socket; what is beyond them is dropped, and the numbers show it. A replay comes as fast as it can be sent.
MOST_WAITING = 10_000
MOST_REPLAYED = 100_000
REPLAY_SECONDS = 5.0
# How long the loop is kept from everything else by events that wait.
BUSY_SECONDS = 0.005
HEARTBEAT_SECONDS = 10.0
# After a connection that ended. Where nobody ever speaks ZMQ, the wait grows.
RECONNECT_SECONDS = 0.1
MOST_RECONNECT_SECONDS = 10.0

_NUMBER = struct.Struct(">Q")
_END_OF_REPLAY = 2**64 - 1


class _Message(Struct, frozen=True):
    """What one step did, numbered by the engine. `events` is None where they cannot be understood, and `problem` says why."""

    number: int
    events: list[EngineEvent] | None
    problem: str = ""


class KvEventFeed:
    """Follows one publisher, and tells what its engine has cached, as numbered events, through `on_events`.

    The engine numbers its messages from 0. Those that were missed, also before the subscription, are asked for at `endpoints.replay`,
    while new ones wait in the socket. One that nobody has any more, or that cannot be understood, is a gap: all is forgotten, which is
    told, and known anew from the oldest message that has all newer ones behind it. A connection that broke is a gap, too: behind the same
    address there may be another engine, whose numbers say nothing of the old one's.

    A publisher speaks for one cache: data-parallel replicas publish at an address each, and need a feed each. Should several speak at one
    address, the one heard first is followed and the others are ignored, for their numbers count different things, and a block that one of
    them has is of no use to a request that another one gets.

    `on_events` is called on the event loop, once for all messages that were ready, or for those that a few milliseconds sufficed for.
    It must not raise.
    """

    def __init__(
        self,
        endpoints: EventEndpoints,
        block_size: int,
        on_events: Callable[[KvEvents], None],
        *,
        replay_seconds: float = REPLAY_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.gaps = 0
        self.malformed = 0
        self._endpoints = endpoints
        self._mirror = BlockMirror(block_size)
        self._on_events = on_events
        self._replay_seconds = replay_seconds
        self._clock = clock
        self._topic = endpoints.topic.encode()
        self._context: zmq.asyncio.Context | None = None
        self._following: asyncio.Task[None] | None = None
        self._rank: int | None = None
        self._has_rank = False
        # The number of the next message to take, and that of the newest that was published to us.
        self._expected = 0
        self._newest = -1
        self._untold: list[KvEvent] = []
        self._untold_first = 0
        self._busy_until = 0.0

    @property
    def cached(self) -> int:
        """Blocks that the engine has, as far as is known."""
        return self._mirror.cached

    @property
    def removed(self) -> int:
        """Blocks that the engine has evicted since the start, of those that were known."""
        return self._mirror.removed

    def snapshot(self) -> Snapshot:
        """All that the engine has, as far as is known."""
        return self._mirror.snapshot()

    async def start(self) -> None:
        """Begins to follow; an engine that is not there yet is waited for. Raises ConfigError without ZMQ, and for what is no endpoint."""
        try:
            # An extra: only other people's engines speak it.
            import zmq
            import zmq.asyncio
        except ImportError as missing:
            raise ConfigError(f"KV events of an engine need the package {missing.name!r}: pip install pyzmq") from missing
        self._context = zmq.asyncio.Context()
        try:
            subscriber = self._subscribe()
            if self._endpoints.replay is not None:
                # What is no endpoint is found now, and not at the first gap.
                with self._open(zmq.DEALER, 1) as unused:
                    _connect(unused, self._endpoints.replay)
        except ConfigError:
            await self.close()
            raise
        self._following = asyncio.create_task(self._follow(subscriber), name="KV events")

    async def close(self) -> None:
        """Tells nothing more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _open(self, kind: int, most_waiting: int) -> zmq.asyncio.Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = most_waiting
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        # Else a machine that vanished would never be missed.
        socket.heartbeat_ivl = round(1000 * HEARTBEAT_SECONDS)
        return socket

    def _subscribe(self) -> zmq.asyncio.Socket:
        import zmq

        subscriber = self._open(zmq.SUB, MOST_WAITING)
        subscriber.subscribe(self._topic)
        # Before it connects: the first connection must be seen.
        subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        _connect(subscriber, self._endpoints.publisher)
        return subscriber

    async def _follow(self, subscriber: zmq.asyncio.Socket) -> None:
        """A socket a connection: what still waits in that of the last one may be of an engine that is gone. And ZMQ itself does not connect
        again after a message that was too large."""
        pause = RECONNECT_SECONDS
        try:
            while True:
                with subscriber, subscriber.get_monitor_socket() as monitor:
                    was_there = await self._follow_connection(subscriber, monitor)
                if was_there:
                    log.warning("the engine's publisher of KV events at %s is gone", self._endpoints.publisher)
                    self._lose()
                    self._tell()
                    self._expected, self._newest, self._has_rank = 0, -1, False
                    pause = RECONNECT_SECONDS
                else:
                    log.warning("what listens at %s publishes no KV events; asking again in %.1f s", self._endpoints.publisher, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_RECONNECT_SECONDS)
                subscriber = self._subscribe()
        except Exception:
            # Nobody hears of removals from here on.
            log.exception("the KV events of the engine are not followed any more")
            self._lose()
            self._tell()
            raise

    async def _follow_connection(self, subscriber: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> bool:
        """Returns when it has ended: whether there was a publisher at its other end."""
        import zmq.asyncio
        from zmq.utils.monitor import parse_monitor_message

        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        was_there = False
        while True:
            await poller.poll()
            self._busy_until = self._clock() + BUSY_SECONDS
            while (frames := await _receive(monitor)) is not None:
                if parse_monitor_message(frames)["event"] == zmq.EVENT_DISCONNECTED:
                    return was_there
                was_there = True
                await self._replay()
            while (frames := await _receive(subscriber)) is not None:
                await self._on_frames(frames)
                await self._breathe()
            self._tell()
            # The next wait may be none.
            await asyncio.sleep(0)

    async def _on_frames(self, frames: list[bytes]) -> None:
        """A message that was published. Within a connection they come in order, so that a number that is not new is of another engine."""
        if self._topic and frames[0] != self._topic:
            # A subscription takes whatever begins like its topic.
            return
        message = self._read(frames)
        if message is None:
            return
        if message.number <= self._newest:
            log.warning("the engine numbers its KV events anew")
            self._lose()
            self._expected = 0
        self._newest = message.number
        if message.number > self._expected:
            await self._replay()
        self._take(message)

    async def _replay(self) -> None:
        """Takes what was missed, as far as the engine still has it. Its socket drops what we are too slow for, so what came without an end,
        or with a hole, is asked for again from there on."""
        if self._endpoints.replay is None:
            return
        self._tell()
        start = -1
        while self._expected > start:
            start = self._expected
            if await self._replay_from(start, self._endpoints.replay):
                return

    async def _replay_from(self, start: int, endpoint: str) -> bool:
        """Whether all came. Over a socket of its own, so that no late answer is taken for one to a later question."""
        import zmq

        with self._open(zmq.DEALER, MOST_REPLAYED) as socket:
            _connect(socket, endpoint)
            await socket.send_multipart((b"", _NUMBER.pack(start)))
            while True:
                frames = await _receive(socket)
                if frames is None:
                    if await socket.poll(round(1000 * self._replay_seconds)):
                        continue
                    log.warning("the engine does not answer at %s: KV events that were missed may stay so", endpoint)
                    return False
                if _is_end(frames):
                    return True
                message = self._read(frames)
                if message is not None:
                    if message.number > self._expected > start:
                        return False
                    self._take(message)
                await self._breathe()

    def _read(self, frames: list[bytes]) -> _Message | None:
        """None for what is no message, and for one of another replica. Noise has no number: if it was a message, the next one shows it."""
        if len(frames) < 2 or len(frames[-2]) != _NUMBER.size:
            self._note_malformed("a message without a number")
            return None
        (number,) = _NUMBER.unpack(frames[-2])
        try:
            batch = decode_batch(frames[-1])
        except ValueError as error:
            return _Message(number, None, str(error))
        if not self._has_rank:
            self._rank, self._has_rank = batch.rank, True
        return _Message(number, batch.events) if batch.rank == self._rank else None

    def _take(self, message: _Message) -> None:
        """Takes it, unless it was taken already."""
        if message.number < self._expected:
            return
        if message.number > self._expected or message.events is None:
            self._lose()
        self._expected = message.number + 1
        if message.events is None:
            self._note_malformed(message.problem)
        else:
            self._add(self._mirror.apply(message.events))

    def _lose(self) -> None:
        self.gaps += 1
        self._add(self._mirror.forget())

    def _add(self, new: KvEvents) -> None:
        if not self._untold:
            self._untold_first = new.first
        self._untold += new.events

    def _tell(self) -> None:
        if self._untold:
            events, self._untold = tuple(self._untold), []
            self._on_events(KvEvents(self._untold_first, events))

    async def _breathe(self) -> None:
        """Lets others run when the loop was kept long enough."""
        if self._clock() >= self._busy_until:
            self._tell()
            await asyncio.sleep(0)
            self._busy_until = self._clock() + BUSY_SECONDS

    def _note_malformed(self, reason: str) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.warning("the engine sent KV events that are not understood: %s", reason)


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Raises ConfigError for what is no endpoint. One where nobody is yet will do."""
    import zmq

    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"KV events cannot be had from {endpoint!r}: {error}") from error


async def _receive(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """What is there already."""
    import zmq

    try:
        return await socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


def _is_end(frames: list[bytes]) -> bool:
    return len(frames) >= 2 and len(frames[-2]) == _NUMBER.size and _NUMBER.unpack(frames[-2])[0] == _END_OF_REPLAY
