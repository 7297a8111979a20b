"""Whatever ZMQ drops, repeats or garbles: the feed never reports a block that the engine does not have."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from penstock.backends.external import zmq_events
from penstock.backends.external.engine import EventEndpoints
from penstock.backends.external.zmq_events import KvEventFeed
from penstock.kv.blocks import block_hashes
from penstock.wire.errors import ConfigError
from penstock.wire.messages import BlocksCleared, KvEvents
from replayed_events import apply_events

SIZE = 2
END = (-1).to_bytes(8, "big", signed=True)


def tokens(sequence: int, blocks: int) -> list[int]:
    return [1000 * sequence + position for position in range(SIZE * blocks)]


def names(sequence: int, blocks: int = 1) -> set[bytes]:
    return set(block_hashes(tokens(sequence, blocks), SIZE))


def stored(sequence: int, start: int = 0, blocks: int = 1) -> dict[str, object]:
    """Blocks of one of many sequences, each with its own hash."""
    return {
        "type": "BlockStored",
        "block_hashes": [1000 * sequence + index for index in range(start, start + blocks)],
        "parent_block_hash": 1000 * sequence + start - 1 if start else None,
        "token_ids": tokens(sequence, start + blocks)[SIZE * start :],
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
    }


def removed(sequence: int, index: int = 0) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": [1000 * sequence + index], "medium": "GPU"}


class Engine:
    """Publishes as the engines do: XPUB, which also reports subscribers, and ROUTER with a buffer of published messages."""

    def __init__(self, directory: Path, topic: bytes = b"", buffered: int = 100) -> None:
        self.endpoints = EventEndpoints(f"ipc://{directory}/pub", f"ipc://{directory}/replay")
        self.topic = topic
        self.buffered = buffered
        self.number = 0
        self.kept: list[tuple[int, bytes]] = []
        self.asked: list[int] = []
        self.answers_with_topic = True
        self.is_mute = False
        # Numbers that the replay drops, once.
        self.dropped: set[int] = set()
        self._answered = asyncio.Event()

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.bind(self.endpoints.publisher)
        self._router = self._context.socket(zmq.ROUTER)
        assert self.endpoints.replay is not None
        self._router.bind(self.endpoints.replay)
        self._serving = asyncio.create_task(self._serve())

    async def stop(self) -> None:
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._context.destroy(linger=0)

    async def subscribed(self) -> None:
        """Returns when a feed has subscribed. From then on it receives what is published."""
        while not (await self._publisher.recv()).startswith(b"\x01"):
            """An earlier one has ended."""

    async def followed(self) -> None:
        """Like `subscribed`, and also answers the first replay. Later messages come only by subscription."""
        await self.subscribed()
        await self._answered.wait()

    def make(self, *events: object, rank: int | None = 0) -> tuple[int, bytes]:
        """The next message: kept for replays, but not published yet."""
        message = (self.number, msgspec.msgpack.encode([1.5, list(events), rank]))
        self.number += 1
        self.kept = [*self.kept, message][-self.buffered :]
        return message

    async def publish(self, *events: object, rank: int | None = 0) -> None:
        await self.send(*self.make(*events, rank=rank))

    async def send(self, number: int, payload: bytes) -> None:
        await self._publisher.send_multipart((self.topic, number.to_bytes(8, "big"), payload))

    async def send_raw(self, *frames: bytes) -> None:
        await self._publisher.send_multipart(frames)

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            assert empty == b""
            self.asked.append(int.from_bytes(start, "big"))
            if self.is_mute:
                continue
            topic = (self.topic,) if self.answers_with_topic else ()
            for number, payload in self.kept:
                if number in self.dropped:
                    self.dropped.remove(number)
                elif number >= self.asked[-1]:
                    await self._router.send_multipart((client, b"", *topic, number.to_bytes(8, "big"), payload))
            await self._router.send_multipart((client, b"", *(b"" for _ in topic), END, b""))
            self._answered.set()


class Listener:
    """Receives the events of a feed, and can wait for a state."""

    def __init__(self) -> None:
        self.calls: list[KvEvents] = []
        self.blocks: set[bytes] = set()
        self.next_number = 0
        self._heard = asyncio.Event()

    def __call__(self, told: KvEvents) -> None:
        assert told.events
        assert told.first == self.next_number
        self.next_number += len(told.events)
        apply_events(self.blocks, told.events)
        self.calls.append(told)
        self._heard.set()

    @property
    def clears(self) -> int:
        return sum(isinstance(event, BlocksCleared) for call in self.calls for event in call.events)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(8):
            while not is_so():
                self._heard.clear()
                await self._heard.wait()

    async def until_told(self, expected: set[bytes]) -> None:
        await self.until(lambda: self.blocks == expected)


@contextlib.asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        yield


@contextlib.asynccontextmanager
async def following(endpoints: EventEndpoints, replay_seconds: float = 10.0) -> AsyncIterator[tuple[KvEventFeed, Listener]]:
    listener = Listener()
    feed = KvEventFeed(endpoints, SIZE, listener, replay_seconds=replay_seconds)
    await feed.start()
    try:
        yield feed, listener
    finally:
        await feed.close()
    from_nothing: set[bytes] = set()
    snapshot = feed.mirror.snapshot()
    apply_events(from_nothing, snapshot.events)
    assert from_nothing == listener.blocks
    assert snapshot.next_number == listener.next_number
    assert feed.mirror.cached == len(listener.blocks)


def without_replay(engine: Engine) -> EventEndpoints:
    return EventEndpoints(engine.endpoints.publisher)


async def test_published_events_arrive(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1, blocks=3))
        await engine.publish(stored(1, start=3), stored(2))
        await engine.publish(removed(1, 3))
        await listener.until(lambda: feed.mirror.removed == 1)
        assert listener.blocks == names(1, 3) | names(2)
        await engine.publish({"type": "AllBlocksCleared"})
        await listener.until_told(set())
        assert (feed.gaps, feed.malformed, listener.clears) == (0, 0, 1)


@pytest.mark.parametrize("answers_with_topic", [True, False])
async def test_events_from_before_the_subscription_are_replayed(tmp_path: Path, answers_with_topic: bool) -> None:
    """Some versions answer without the topic that they publish with."""
    engine = Engine(tmp_path)
    engine.answers_with_topic = answers_with_topic
    engine.make(stored(1, blocks=2))
    engine.make(stored(1, start=2))
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await listener.until_told(names(1, 3))
        await engine.followed()
        await engine.publish(stored(1, start=3))
        await listener.until_told(names(1, 4))
        assert feed.gaps == 0
        assert engine.asked == [0]


async def test_dropped_messages_are_replayed_while_new_ones_wait(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        engine.make(stored(1, start=1))
        engine.make(stored(2), removed(2))
        waiting = [engine.make(stored(1, start=2)), engine.make(stored(3)), engine.make(removed(3))]
        for message in waiting:
            await engine.send(*message)
        await engine.publish(stored(1, start=3))
        await listener.until_told(names(1, 4))
        assert (feed.gaps, listener.clears) == (0, 0)
        # What the replay had in it is not asked for again, and not taken twice.
        assert engine.asked == [0, 1]
        await engine.publish(stored(4))
        await listener.until_told(names(1, 4) | names(4))
        assert feed.mirror.removed == 2


async def test_a_gap_that_no_replay_fills_clears_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path, buffered=2)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1, blocks=2))
        await listener.until_told(names(1, 2))
        engine.make(removed(1, 1))
        engine.make(stored(2))
        await engine.publish(stored(3), stored(1, start=2))
        # Of what was before the oldest message nothing is known, nor what is behind it.
        await listener.until_told(names(2) | names(3))
        assert (feed.gaps, listener.clears) == (1, 1)


async def test_a_short_buffer_at_the_start_is_a_gap(tmp_path: Path) -> None:
    engine = Engine(tmp_path, buffered=1)
    engine.make(stored(1))
    engine.make(stored(1, start=1), stored(2))
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await listener.until_told(names(2))
        assert feed.gaps == 1


async def test_without_replay_a_gap_clears_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(without_replay(engine)) as (feed, listener):
        await engine.subscribed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        engine.make(removed(1))
        await engine.publish(stored(2))
        await listener.until_told(names(2))
        await engine.publish(stored(3))
        await listener.until_told(names(2) | names(3))
        assert (feed.gaps, listener.clears) == (1, 1)
        assert engine.asked == []


async def test_a_missing_replay_times_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path)
    engine.is_mute = True
    engine.make(stored(1))
    async with running(engine), following(engine.endpoints, replay_seconds=0.05) as (feed, listener):
        await engine.subscribed()
        await engine.publish(stored(2))
        await listener.until_told(names(2))
        assert feed.gaps == 1
    assert "does not answer" in caplog.text


async def test_messages_dropped_by_a_replay_are_requested_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    for sequence in range(1, 9):
        engine.make(stored(sequence))
    engine.dropped = {3, 4, 6}
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await listener.until_told(set().union(*[names(sequence) for sequence in range(1, 9)]))
        assert (feed.gaps, engine.asked) == (0, [0, 3])
        assert not engine.dropped


async def test_a_replay_may_have_holes_and_no_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        engine.make(stored(2))
        engine.make(removed(1))
        engine.make(stored(3))
        last = engine.make(stored(4))
        del engine.kept[-3], engine.kept[-1]
        await engine.send(*last)
        await listener.until_told(names(3) | names(4))
        assert feed.gaps == 1


async def test_numbers_that_start_again_mean_another_engine(tmp_path: Path) -> None:
    """Behind a proxy, which keeps the connection."""
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        await engine.publish(stored(2))
        await listener.until_told(names(1) | names(2))
        engine.number, engine.kept = 0, []
        engine.make(stored(3))
        await engine.publish(stored(4))
        await listener.until_told(names(3) | names(4))
        assert (feed.gaps, listener.clears) == (1, 1)
        assert engine.asked[-1] == 0


async def test_the_end_of_the_engine_clears_all(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with following(engine.endpoints) as (feed, listener):
        async with running(engine):
            await engine.followed()
            await engine.publish(stored(1))
            await listener.until_told(names(1))
        await listener.until_told(set())
        assert feed.gaps == 1


async def test_a_restarted_engine_is_followed_from_its_start(tmp_path: Path) -> None:
    """Even if its numbers continue where those of the old one ended."""
    first, second = Engine(tmp_path), Engine(tmp_path)
    async with following(first.endpoints) as (feed, listener):
        async with running(first):
            await first.followed()
            await first.publish(stored(1))
            await first.publish(stored(2))
            await listener.until_told(names(1) | names(2))
        second.make(stored(3))
        second.make(stored(4))
        async with running(second):
            await second.followed()
            await second.publish(stored(5))
            await listener.until_told(names(3) | names(4) | names(5))
            assert (feed.gaps, listener.clears) == (1, 1)
        await listener.until_told(set())


async def test_the_pause_grows_while_nobody_publishes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """For example an HTTP server: every connection ends at once, without events."""
    monkeypatch.setattr(zmq_events, "RECONNECT_SECONDS", 0.001)
    monkeypatch.setattr(zmq_events, "MAX_RECONNECT_SECONDS", 0.006)
    connections, often_enough = 0, asyncio.Event()

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        if connections == 6:
            often_enough.set()
        writer.close()

    server = await asyncio.start_server(close, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server, following(EventEndpoints(f"tcp://{host}:{port}")) as (feed, listener):
        async with asyncio.timeout(8):
            await often_enough.wait()
        assert (feed.gaps, listener.calls) == (0, [])
    told = [record.args for record in caplog.records if "publishes no KV events" in record.message]
    assert told[:5] == [(f"tcp://{host}:{port}", pause) for pause in (0.001, 0.002, 0.004, 0.006, 0.006)]


async def test_noise_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        await engine.send_raw(b"")
        await engine.send_raw(b"", b"seven b", b"payload")
        await engine.send_raw(b"", b"payload")
        await engine.publish(stored(2))
        await listener.until_told(names(1) | names(2))
        assert (feed.gaps, feed.malformed) == (0, 3)
    assert caplog.text.count("cannot be decoded") == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode([1.0, [{"type": "BlockPainted"}], 0])])
async def test_a_message_that_cannot_be_decoded_is_a_gap(tmp_path: Path, payload: bytes, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        for sequence in (2, 3):
            number, _ = engine.make(removed(1))
            engine.kept[-1] = number, payload
            await engine.send(number, payload)
            await engine.publish(stored(1, start=1), stored(sequence))
            await listener.until_told(names(sequence))
        assert (feed.gaps, feed.malformed, listener.clears) == (2, 2, 2)
    assert caplog.text.count("cannot be decoded") == 1


async def test_the_largest_number_does_not_stop_the_feed(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        await engine.send(2**64 - 1, b"the end, of which only replays have one")
        await engine.send(2**64 - 2, b"noise")
        await listener.until_told(set())
        await engine.publish(stored(2))
        await listener.until_told(names(1) | names(2))
        assert feed.malformed == 2


async def test_a_message_over_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_events, "MAX_MESSAGE_BYTES", 2000)
    engine = Engine(tmp_path)
    async with running(engine), following(engine.endpoints, replay_seconds=0.05) as (feed, listener):
        await engine.followed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        await engine.publish(stored(2, blocks=400))
        # ZMQ ends the connection over it, and makes another one.
        await engine.subscribed()
        await engine.publish(stored(3))
        await listener.until_told(names(3))
        assert feed.gaps >= 1


async def test_only_its_own_topic_is_followed(tmp_path: Path) -> None:
    engine = Engine(tmp_path, topic=b"kv")
    endpoints = EventEndpoints(engine.endpoints.publisher, engine.endpoints.replay, topic="kv")
    async with running(engine), following(endpoints) as (feed, listener):
        await engine.followed()
        await engine.send_raw(b"kv-too", (0).to_bytes(8, "big"), engine.make(stored(8))[1])
        await engine.send_raw(b"other", (0).to_bytes(8, "big"), b"")
        engine.number, engine.kept = 0, []
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        assert (feed.gaps, feed.malformed) == (0, 0)


async def test_one_replica_is_followed(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with running(engine), following(without_replay(engine)) as (feed, listener):
        await engine.subscribed()
        await engine.publish(stored(1), rank=3)
        for number in range(3):
            await engine.send(number, msgspec.msgpack.encode([1.5, [stored(7 + number), removed(1)], 0]))
        await engine.publish(stored(2), rank=3)
        await listener.until_told(names(1) | names(2))
        assert feed.gaps == 0


async def test_waiting_messages_are_reported_together(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    clock = [0.0]
    listener = Listener()
    for sequence in range(50):
        engine.make(stored(sequence))
    feed = KvEventFeed(engine.endpoints, SIZE, listener, clock=lambda: clock[0])
    async with running(engine):
        await feed.start()
        await listener.until(lambda: len(listener.blocks) == 50)
        assert len(listener.calls) == 1
        await feed.close()


async def test_many_messages_do_not_block_the_loop(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    time_passed = [0.0]
    listener = Listener()
    for sequence in range(50):
        engine.make(stored(sequence))

    def clock() -> float:
        time_passed[0] += zmq_events.BUSY_SECONDS / 10
        return time_passed[0]

    feed = KvEventFeed(engine.endpoints, SIZE, listener, clock=clock)
    async with running(engine):
        await feed.start()
        await listener.until(lambda: len(listener.blocks) == 50)
        assert 5 <= len(listener.calls) <= 10
        await feed.close()


async def test_a_feed_can_be_closed_while_it_waits_for_a_replay(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.is_mute = True
    async with running(engine), following(engine.endpoints, replay_seconds=1000.0) as (feed, listener):
        await engine.subscribed()
        await engine.publish(stored(1))
        async with asyncio.timeout(5):
            await feed.close()
        assert listener.calls == []
        await feed.close()


async def test_an_engine_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    async with following(engine.endpoints) as (feed, listener), running(engine):
        await engine.followed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        assert feed.gaps == 0
        await feed.close()


async def test_a_failing_feed_clears_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path)
    listener = Listener()

    def fragile(told: KvEvents) -> None:
        listener(told)
        if names(2) <= listener.blocks:
            raise RuntimeError("on purpose")

    feed = KvEventFeed(engine.endpoints, SIZE, fragile)
    async with running(engine):
        await feed.start()
        await engine.followed()
        await engine.publish(stored(1))
        await listener.until_told(names(1))
        await engine.publish(stored(2))
        await listener.until(lambda: listener.clears == 1)
        assert listener.blocks == set()
        await feed.close()
    assert "KV events failed" in caplog.text


@pytest.mark.parametrize("endpoints", [EventEndpoints("nonsense"), EventEndpoints("ipc:///tmp/x", "http://there")])
async def test_a_wrong_address_fails_at_the_start(endpoints: EventEndpoints) -> None:
    feed = KvEventFeed(endpoints, SIZE, Listener())
    with pytest.raises(ConfigError, match=r"nonsense|http://there"):
        await feed.start()
    await feed.close()
