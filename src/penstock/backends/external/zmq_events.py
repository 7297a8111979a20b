"""Follows the KV events that an engine publishes over ZMQ, without a gap."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import zmq
import zmq.asyncio
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from penstock.backends.external.engine import EventEndpoints
from penstock.backends.external.kv_events import BlockMirror, EngineEvent, decode_batch
from penstock.wire.errors import ConfigError
from penstock.wire.messages import KvEvent, KvEvents

log = logging.getLogger(__name__)

# A step that stores a million tokens has about five megabytes.
MAX_MESSAGE_BYTES = 32 * 1024 * 1024
# Messages that may wait in a socket. Further ones are dropped, and their numbers show it. A replay comes as fast as it can be sent.
MAX_WAITING = 10_000
MAX_REPLAYED = 100_000
REPLAY_SECONDS = 5.0
# Waiting events block the event loop for at most this time.
BUSY_SECONDS = 0.005
HEARTBEAT_SECONDS = 10.0
# The pause after a lost connection. It grows while nobody answers in ZMQ.
RECONNECT_SECONDS = 0.1
MAX_RECONNECT_SECONDS = 10.0

NUMBER_BYTES = 8
_END_OF_REPLAY = 2**64 - 1


class _Message(Struct, frozen=True):
    """The events of one step, numbered by the engine. `events` is None if they cannot be decoded; `problem` says why."""

    number: int
    events: list[EngineEvent] | None
    problem: str = ""


class KvEventFeed:
    """Follows one publisher and reports what its engine has cached, as our own numbered events, through `on_events`.

    The engine numbers its messages from 0. Missed messages, and those from before the subscription, are requested at
    `endpoints.replay`, while new ones wait in the socket. If a message is lost or cannot be decoded, all blocks are forgotten and reported
    as cleared; later messages report blocks anew. The same happens when the connection breaks: another engine may answer at the same
    address, with other numbers.

    A publisher stands for one cache: data-parallel replicas have one address and one feed each. If several publish at one address, the
    first is followed and the others are ignored: their numbers are unrelated, and their blocks are of no use to each other's requests.

    `on_events` is called on the event loop, once for all messages that are ready, or every BUSY_SECONDS. It must not raise.
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
        self.mirror = BlockMirror(block_size, images=endpoints.images)
        self._on_events = on_events
        self._replay_seconds = replay_seconds
        self._clock = clock
        self._topic = endpoints.topic.encode()
        self._context: zmq.asyncio.Context | None = None
        self._following: asyncio.Task[None] | None = None
        self._rank: int | None = None
        self._has_rank = False
        # The number of the next message to apply, and of the newest published one.
        self._expected = 0
        self._newest = -1
        self._pending: list[KvEvent] = []
        self._pending_first = 0
        self._busy_until = 0.0

    async def start(self) -> None:
        """Begins to follow, also an engine that is not there yet. Raises ConfigError for a wrong address."""
        self._context = zmq.asyncio.Context()
        try:
            subscriber = self._subscribe()
            if self._endpoints.replay is not None:
                # A wrong address is found now, not at the first gap.
                with self._open(zmq.DEALER, 1) as unused:
                    _connect(unused, self._endpoints.replay)
        except ConfigError:
            await self.close()
            raise
        self._following = asyncio.create_task(self._follow(subscriber), name="KV events")

    async def close(self) -> None:
        """Stops. `on_events` is not called afterwards."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
            self._following = None
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    def _open(self, kind: int, max_waiting: int) -> zmq.asyncio.Socket:
        assert self._context is not None
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.rcvhwm = max_waiting
        socket.maxmsgsize = MAX_MESSAGE_BYTES
        # Without it, the loss of a machine is never noticed.
        socket.heartbeat_ivl = round(1000 * HEARTBEAT_SECONDS)
        return socket

    def _subscribe(self) -> zmq.asyncio.Socket:
        subscriber = self._open(zmq.SUB, MAX_WAITING)
        subscriber.subscribe(self._topic)
        # Before the connect, so that the monitor sees the first connection.
        subscriber.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        _connect(subscriber, self._endpoints.publisher)
        return subscriber

    async def _follow(self, subscriber: zmq.asyncio.Socket) -> None:
        """Uses one socket per connection: what still waits in the old socket may come from an engine that is gone. And ZMQ itself does not
        reconnect after a message that was too large."""
        pause = RECONNECT_SECONDS
        try:
            while True:
                with subscriber, subscriber.get_monitor_socket() as monitor:
                    was_there = await self._follow_connection(subscriber, monitor)
                if was_there:
                    log.warning("the publisher of KV events at %s is gone", self._endpoints.publisher)
                    self._lose()
                    self._tell()
                    self._expected, self._newest, self._has_rank = 0, -1, False
                    pause = RECONNECT_SECONDS
                else:
                    log.warning("the server at %s publishes no KV events; trying again in %.1f s", self._endpoints.publisher, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RECONNECT_SECONDS)
                subscriber = self._subscribe()
        except Exception:
            # Removals are not seen from here on.
            log.exception("following the engine's KV events failed")
            self._lose()
            self._tell()
            raise

    async def _follow_connection(self, subscriber: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket) -> bool:
        """Returns when the connection has ended: whether there was a publisher."""
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
            # The next poll may return at once.
            await asyncio.sleep(0)

    async def _on_frames(self, frames: list[bytes]) -> None:
        """Takes a published message. Messages of a connection come in order, so an old number means another engine."""
        if self._topic and frames[0] != self._topic:
            # ZMQ matches every topic with this prefix.
            return
        message = self._read(frames)
        if message is None:
            return
        if message.number <= self._newest:
            log.warning("the engine numbers its KV events from the start again")
            self._lose()
            self._expected = 0
        self._newest = message.number
        if message.number > self._expected:
            await self._replay()
        self._take(message)

    async def _replay(self) -> None:
        """Takes missed messages, as far as the engine still has them. Its socket drops messages if we are too slow, so a replay without an
        end, or with a hole, is requested again from there."""
        if self._endpoints.replay is None:
            return
        self._tell()
        start = -1
        while self._expected > start:
            start = self._expected
            if await self._replay_from(start, self._endpoints.replay):
                return

    async def _replay_from(self, start: int, endpoint: str) -> bool:
        """Whether the replay was complete. Uses its own socket, so that no late answer is mixed with a later replay."""
        with self._open(zmq.DEALER, MAX_REPLAYED) as socket:
            _connect(socket, endpoint)
            await socket.send_multipart((b"", start.to_bytes(NUMBER_BYTES, "big")))
            while True:
                frames = await _receive(socket)
                if frames is None:
                    if await socket.poll(round(1000 * self._replay_seconds)):
                        continue
                    log.warning("the engine does not answer at %s: missed KV events may be lost", endpoint)
                    return False
                if _number(frames) == _END_OF_REPLAY:
                    return True
                message = self._read(frames)
                if message is not None:
                    if message.number > self._expected > start:
                        return False
                    self._take(message)
                await self._breathe()

    def _read(self, frames: list[bytes]) -> _Message | None:
        """None for bytes that are not a message, and for a message of another replica. If a message was lost, the next number shows it."""
        number = _number(frames)
        if number is None:
            self._note_malformed("a message without a number")
            return None
        try:
            batch = decode_batch(frames[-1])
        except ValueError as error:
            return _Message(number, None, str(error))
        if not self._has_rank:
            self._rank, self._has_rank = batch.rank, True
        return _Message(number, batch.events) if batch.rank == self._rank else None

    def _take(self, message: _Message) -> None:
        """Applies the message, unless that was done already."""
        if message.number < self._expected:
            return
        if message.number > self._expected or message.events is None:
            self._lose()
        self._expected = message.number + 1
        if message.events is None:
            self._note_malformed(message.problem)
        else:
            self._add(self.mirror.apply(message.events))

    def _lose(self) -> None:
        self.gaps += 1
        self._add(self.mirror.forget())

    def _add(self, new: KvEvents) -> None:
        if not self._pending:
            self._pending_first = new.first
        self._pending += new.events

    def _tell(self) -> None:
        if self._pending:
            events, self._pending = tuple(self._pending), []
            self._on_events(KvEvents(self._pending_first, events))

    async def _breathe(self) -> None:
        """Lets other tasks run every BUSY_SECONDS."""
        if self._clock() >= self._busy_until:
            self._tell()
            await asyncio.sleep(0)
            self._busy_until = self._clock() + BUSY_SECONDS

    def _note_malformed(self, reason: str) -> None:
        self.malformed += 1
        if self.malformed == 1:
            log.warning("the engine sent KV events that cannot be decoded: %s", reason)


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    """Raises ConfigError for a wrong address. Nobody needs to listen there yet."""
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"KV events cannot be read from {endpoint!r}: {error}") from error


async def _receive(socket: zmq.asyncio.Socket) -> list[bytes] | None:
    """A message that has arrived. None if there is none."""
    try:
        return await socket.recv_multipart(zmq.DONTWAIT)
    except zmq.Again:
        return None


def _number(frames: list[bytes]) -> int | None:
    return int.from_bytes(frames[-2], "big") if len(frames) >= 2 and len(frames[-2]) == NUMBER_BYTES else None
