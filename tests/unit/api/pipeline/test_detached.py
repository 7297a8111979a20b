"""Streams that outlive their connection: a client that was cut off gets exactly what it missed."""

from __future__ import annotations

import asyncio
import gc
import json
import re

import pytest

from front_end import FrontEnd, says
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.openai.completions import CompletionDialect
from penstock.config.front_end import KeySettings, Limits, ResumeLimits, read_key
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import Delta, Fault, Finish, Submit

RESUMABLE = {"stream": True, "stream_options": {"resumable": True}}
FLOOD, OTHER = "psk-that-floods", "psk-of-somebody-else"
LOST = Fault("worker_lost", "the worker is gone", retryable=True)


class Stepwise:
    """A generation whose letters come when the test says so."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.ended = asyncio.Event()
        self._mailbox: Mailbox | None = None
        self._made = 0

    async def produce(self, _: Submit, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self.begun.set()
        try:
            await self.ended.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def make(self, count: int) -> None:
        assert self._mailbox is not None
        for _ in range(count):
            self._mailbox.put(Delta(self._made, (ord(self.text[self._made]),)))
            self._made += 1

    def finish(self) -> None:
        assert self._mailbox is not None
        self._mailbox.end(Finish("stop"))
        self.ended.set()


async def until_sent(front_end: FrontEnd, text: str) -> None:
    async with asyncio.timeout(10):
        while text not in "".join(event["choices"][0]["text"] for event in front_end.events):
            await asyncio.sleep(0)


def ids(front_end: FrontEnd) -> list[int]:
    return [int(found) for found in re.findall(rb"^id: (\d+)$", front_end.body, re.MULTILINE)]


def texts(front_end: FrontEnd) -> str:
    return "".join(event["choices"][0]["text"] for event in front_end.events)


async def cut(front_end: FrontEnd, connection: asyncio.Task[None]) -> None:
    """The client's connection is gone."""
    front_end.gone.set()
    await connection
    front_end.gone.clear()


async def test_a_stream_goes_on_where_it_was_cut() -> None:
    text = "the quick brown fox jumps over the lazy dog"
    steps = Stepwise(text)
    front_end = FrontEnd(steps.produce)
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    seen, last, made = "", -1, 0
    for size in (1, 7, 2, 5, 3):
        steps.make(size)
        made += size
        await until_sent(front_end, text[len(seen) : made])
        await cut(front_end, connection)
        seen += texts(front_end)
        stream_id = front_end.events[0]["id"]
        assert ids(front_end) == list(range(last + 1, last + 1 + len(ids(front_end))))
        last = ids(front_end)[-1]
        # While nobody reads, more is made.
        steps.make(2)
        made += 2
        resumed = front_end.send("GET", f"/v1/completions/{stream_id}", headers={"last-event-id": str(last)})
        connection = asyncio.create_task(resumed)
        await until_sent(front_end, text[len(seen) : made])
    steps.make(len(text) - made)
    steps.finish()
    await connection
    assert seen + texts(front_end) == text
    assert front_end.body.endswith(b"data: [DONE]\n\n")
    assert not steps.cancelled.is_set()
    assert front_end.tally.streams_resumed == 5
    # It can be read once more, as a whole.
    await front_end.send("GET", f"/v1/completions/{stream_id}")
    assert texts(front_end) == text
    await front_end.detached.close()


async def test_a_stream_that_nobody_comes_back_to_is_cancelled() -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce, resume=ResumeLimits(grace=0.01))
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    steps.make(1)
    await until_sent(front_end, "a")
    await cut(front_end, connection)
    async with asyncio.timeout(10):
        await steps.cancelled.wait()
    # Who comes back sees that, and does not wait for more.
    await front_end.send("GET", f"/v1/completions/{front_end.events[0]['id']}", headers={"last-event-id": "0"})
    (error,) = front_end.events
    assert error["error"]["code"] == "cancelled"
    assert "--resume-grace" in error["error"]["message"]
    assert ids(front_end) == [1]
    assert front_end.tally.requests["resume", "cancelled"] == 1
    await front_end.detached.close()


async def test_a_stream_that_fails_unexpectedly_ends_in_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce)
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    steps.make(1)
    await until_sent(front_end, "a")

    def event(*_: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(CompletionDialect, "event", event)
    steps.make(1)
    await connection
    text, error = front_end.events
    assert (text["choices"][0]["text"], error["error"]["code"]) == ("a", "internal_error")
    assert b"[DONE]" not in front_end.body
    assert front_end.tally.requests["completions", "failed"] == 1
    assert "ZeroDivisionError" in caplog.text
    await front_end.send("GET", f"/v1/completions/{text['id']}", headers={"last-event-id": "0"})
    assert front_end.events == [error]
    await front_end.detached.close()


async def test_a_server_that_stops_ends_what_is_followed() -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce)
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    steps.make(1)
    await until_sent(front_end, "a")
    await front_end.detached.close()
    await connection
    assert [event.get("error", {}).get("code") for event in front_end.events] == [None, "shutting_down"]
    assert ids(front_end) == [0, 1]


async def test_a_stream_that_is_aborted_before_its_first_event_is_a_status() -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce)
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    await front_end.detached.close()
    await connection
    assert (front_end.status, front_end.json["error"]["code"]) == (503, "shutting_down")


async def test_a_plain_stream_is_cancelled_with_its_connection_and_has_no_ids() -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce)
    connection = asyncio.create_task(front_end.post(stream=True))
    await steps.begun.wait()
    steps.make(1)
    await until_sent(front_end, "a")
    await cut(front_end, connection)
    assert steps.cancelled.is_set()
    assert not ids(front_end)
    await front_end.send("GET", f"/v1/completions/{front_end.events[0]['id']}")
    assert front_end.status == 404


async def test_another_key_does_not_find_it() -> None:
    front_end = FrontEnd(says("abc"))
    await front_end.post(**RESUMABLE)
    stream_id = front_end.events[0]["id"]
    for path in (f"/v1/completions/{stream_id}", f"/v1/chat/completions/{stream_id}"):
        await front_end.send("GET", path, headers={"authorization": "Bearer another"})
        assert front_end.status == 404
        assert front_end.json["error"]["code"] == "stream_not_found"
    await front_end.detached.close()


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "99", "9" * 20])
async def test_a_wrong_position_is_refused(value: str) -> None:
    front_end = FrontEnd(says("abc"))
    await front_end.post(**RESUMABLE)
    await front_end.send("GET", f"/v1/completions/{front_end.events[0]['id']}", headers={"last-event-id": value})
    assert front_end.status == 400
    assert front_end.json["error"]["param"] == "Last-Event-ID"
    await front_end.detached.close()


async def test_a_fault_before_the_first_event_is_a_status() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        raise GenerationFault(LOST)

    front_end = FrontEnd(produce)
    await front_end.post(**RESUMABLE)
    assert front_end.status == 503
    await front_end.detached.close()


async def test_a_fault_in_mid_stream_can_be_read_again() -> None:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        mailbox.put(Delta(0, (ord("a"),)))
        raise GenerationFault(LOST)

    front_end = FrontEnd(produce)
    await front_end.post(**RESUMABLE)
    text, error = front_end.events
    assert (text["choices"][0]["text"], error["error"]["code"]) == ("a", "worker_lost")
    await front_end.send("GET", f"/v1/completions/{text['id']}", headers={"last-event-id": "0"})
    assert front_end.events == [error]
    assert front_end.tally.requests["completions", "broken_off"] == 1
    await front_end.detached.close()


async def test_a_reader_that_comes_back_holds_no_copy_of_all_events() -> None:
    front_end = FrontEnd(says(*["x" * 10_000] * 100))
    await front_end.post(**RESUMABLE)
    stream_id, text = front_end.events[0]["id"], texts(front_end)
    writes = front_end.tally.writes
    await front_end.send("GET", f"/v1/completions/{stream_id}")
    assert texts(front_end) == text
    assert len(text) == 1_000_000
    assert front_end.body.endswith(b"data: [DONE]\n\n")
    assert front_end.tally.writes - writes > 10
    await front_end.detached.close()


async def test_what_is_over_makes_room_for_what_comes() -> None:
    front_end = FrontEnd(says("abc"), resume=ResumeLimits(memory=2000))
    streams = []
    for _ in range(8):
        await front_end.post(**RESUMABLE)
        assert front_end.status == 200
        streams.append(front_end.events[0]["id"])
        assert front_end.detached.bytes <= 2000
    await front_end.send("GET", f"/v1/completions/{streams[0]}")
    assert front_end.status == 404
    await front_end.send("GET", f"/v1/completions/{streams[-1]}")
    assert front_end.status == 200
    await front_end.detached.close()
    assert (front_end.detached.bytes, len(front_end.detached)) == (0, 0)


def with_two_keys(front_end: FrontEnd) -> FrontEnd:
    keyring = Keyring(KeySettings(given=tuple(map(read_key, [FLOOD, OTHER]))), front_end.tally)
    front_end.app = Gate(front_end.application, keyring, front_end.tally)
    return front_end


async def resumable(front_end: FrontEnd, key: str) -> int:
    body = json.dumps({"model": "m", "prompt": "x", **RESUMABLE}).encode()
    await front_end.send("POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})
    return front_end.status


async def test_a_key_that_records_much_drops_only_its_own() -> None:
    front_end = with_two_keys(FrontEnd(says("abc"), resume=ResumeLimits(memory=4000)))
    streams = []
    for key in (OTHER, *[FLOOD] * 12):
        assert await resumable(front_end, key) == 200
        streams.append(front_end.events[0]["id"])
        assert front_end.detached.bytes <= 4000
    found = []
    for key, stream in ((OTHER, streams[0]), (FLOOD, streams[1]), (FLOOD, streams[-1])):
        await front_end.send("GET", f"/v1/completions/{stream}", headers={"authorization": f"Bearer {key}"})
        found.append(front_end.status)
    assert found == [200, 404, 200]
    assert front_end.tally.streams_evicted == 13 - len(front_end.detached)
    await front_end.detached.close()
    assert (front_end.detached.bytes, len(front_end.detached)) == (0, 0)


async def test_a_key_below_its_share_begins_though_another_has_filled_the_memory() -> None:
    steps = Stepwise("abcdefgh")
    front_end = with_two_keys(FrontEnd(steps.produce, resume=ResumeLimits(memory=100)))
    connection = asyncio.create_task(resumable(front_end, FLOOD))
    await steps.begun.wait()
    steps.make(4)
    await until_sent(front_end, "abcd")
    assert await resumable(front_end, FLOOD) == 429
    steps.begun.clear()
    second = asyncio.create_task(resumable(front_end, OTHER))
    async with asyncio.timeout(10):
        await steps.begun.wait()
    assert len(front_end.detached) == 2
    front_end.gone.set()
    await asyncio.wait([connection, second])
    await front_end.detached.close()
    assert (front_end.detached.bytes, len(front_end.detached)) == (0, 0)


async def test_without_memory_nothing_more_is_begun() -> None:
    steps = Stepwise("abcdefgh")
    front_end = FrontEnd(steps.produce, resume=ResumeLimits(memory=100))
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    steps.make(4)
    await until_sent(front_end, "abcd")
    first = front_end.sent
    await front_end.post(**RESUMABLE)
    assert front_end.status == 429
    front_end.sent = first
    steps.finish()
    await connection
    await front_end.detached.close()


async def test_what_is_over_keeps_its_events_and_not_its_prompt() -> None:
    # Other tests leave some. Asking objects of other libraries what they are may raise their warnings.
    before = [each for each in gc.get_objects() if type(each) is CompletionDialect]
    front_end = FrontEnd(says("x"))
    await front_end.post(**RESUMABLE, echo=True)
    assert len(front_end.detached) == 1
    assert {id(each) for each in gc.get_objects() if type(each) is CompletionDialect} == set(map(id, before))


async def test_what_failed_before_its_first_event_is_not_kept() -> None:
    front_end = FrontEnd(says("abc"), limits=Limits(max_generations=0))
    await front_end.post(**RESUMABLE)
    assert front_end.status == 429
    assert len(front_end.detached) == 0


async def test_a_position_behind_the_last_event_is_refused() -> None:
    front_end = FrontEnd(says("abc"))
    await front_end.post(**RESUMABLE)
    stream_id, count = front_end.events[0]["id"], len(ids(front_end))
    await front_end.send("GET", f"/v1/completions/{stream_id}", headers={"last-event-id": str(count - 1)})
    assert (front_end.status, front_end.body) == (200, b"")
    await front_end.send("GET", f"/v1/completions/{stream_id}", headers={"last-event-id": str(count)})
    assert front_end.status == 400
    await front_end.detached.close()


async def test_a_reader_is_inside_until_it_has_left() -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce)
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    steps.make(1)
    await until_sent(front_end, "a")
    assert len(front_end.admission._tickets) == 2, "the answer, and who reads it"
    stream_id = front_end.events[0]["id"]
    (run,) = front_end.detached._runs.values()
    await cut(front_end, connection)
    assert len(front_end.admission._tickets) == 1
    assert not run.recording.readers
    front_end.admission.is_draining = True
    await front_end.send("GET", f"/v1/completions/{stream_id}")
    assert front_end.status == 503
    await front_end.detached.close()
    assert front_end.admission.idle.is_set()


async def test_a_reader_that_takes_nothing_is_cut_off_and_the_answer_goes_on() -> None:
    steps = Stepwise("abc")
    front_end = FrontEnd(steps.produce, limits=Limits(stall_seconds=0.01))
    watch = asyncio.create_task(front_end.admission.watch_stalls())
    front_end.socket_open.clear()
    connection = asyncio.create_task(front_end.post(**RESUMABLE))
    await steps.begun.wait()
    steps.make(1)
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(10):
            await connection
    assert front_end.tally.readers_stalled == 1
    (run,) = front_end.detached._runs.values()
    assert not run.is_over
    assert not steps.cancelled.is_set()
    steps.make(2)
    steps.finish()
    await run.ended()
    front_end.socket_open.set()
    await front_end.send("GET", f"/v1/completions/{run.id}")
    assert texts(front_end) == "abc"
    watch.cancel()
    await asyncio.wait([watch])
    await front_end.detached.close()
