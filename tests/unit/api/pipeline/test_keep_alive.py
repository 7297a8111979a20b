"""Clients that wait: each hears something before the first token, on every route, and the answer is the same as without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from front_end import FrontEnd
from penstock.api.pipeline.response import KEEP_ALIVE, MAX_REMINDED_AT_ONCE, BrokenOff, ClientWatch, ClientWatches
from penstock.api.responses.store import SqliteStore
from penstock.config.front_end import Limits
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import Delta, Fault, Finish, Submit

OFTEN = Limits(keep_alive=0.01, whole_keep_alive=0.01)
NEVER = Limits(keep_alive=0)
LOST = Fault("worker_lost", "the worker is gone")
REFUSED = Fault("engine_refused", "no engine can do that")
PING = b'event: ping\ndata: {"type":"ping"}\n\n'

Route = tuple[str, dict[str, Any], dict[str, Any]]
"""The path, the body, and more of the body."""

CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
TEXT: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "x"})
MESSAGES: tuple[str, dict[str, Any]] = ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10})
RESPONSES: tuple[str, dict[str, Any]] = ("/v1/responses", {"input": "x", "instructions": "be brief"})
RESUMABLE: dict[str, Any] = {"stream_options": {"resumable": True}}

COMMENTED: dict[str, Route] = {
    "chat": (*CHAT, {}),
    "completions": (*TEXT, {}),
    "resumable chat": (*CHAT, RESUMABLE),
    "resumable completions": (*TEXT, RESUMABLE),
}
IN_PROGRESS: dict[str, Route] = {
    "responses": (*RESPONSES, {"store": False}),
    "stored responses": (*RESPONSES, {}),
    "background responses": (*RESPONSES, {"background": True}),
}
ROUTES: dict[str, Route] = {**COMMENTED, "messages": (*MESSAGES, {}), **IN_PROGRESS}


class Prefill:
    """A generation that begins when the test says so."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.fault: Fault | None = None
        self.mailbox: Mailbox | None = None

    async def produce(self, _: Submit, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.begun.set()
        try:
            await self.may_go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.fault is not None:
            raise GenerationFault(self.fault)
        mailbox.put(Delta(0, tuple(b"hi")))
        mailbox.end(Finish("stop"))


@asynccontextmanager
async def serving(prefill: Prefill, limits: Limits, folder: Path) -> AsyncIterator[FrontEnd]:
    """A front end that stores responses."""
    async with SqliteStore(folder / "r.db") as store:
        front_end = FrontEnd(prefill.produce, limits, responses=store)
        yield front_end
        await front_end.detached.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def send(front_end: FrontEnd, route: Route, stream: bool = True) -> asyncio.Task[None]:
    path, body, more = route
    content = json.dumps({"model": "m", **body, **more, "stream": stream}).encode()
    return asyncio.create_task(front_end.send("POST", path, content))


def normal(body: bytes) -> list[Any]:
    """The events of a stream, without what differs between two answers."""
    text = body.decode()
    events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
    for event in events:
        for holder in (event, event.get("response", {}), event.get("message", {}), event.get("item", {})):
            for field in ("id", "created", "created_at", "completed_at", "item_id", "output"):
                holder.pop(field, None)
    return events


@pytest.mark.parametrize("name", ROUTES)
async def test_something_is_sent_before_the_first_token_and_the_answer_is_the_same(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, OFTEN, tmp_path) as front_end:
        answering = send(front_end, ROUTES[name])
        await until(lambda: front_end.tally.keep_alives >= 3)
        early, keep_alives = front_end.body, front_end.tally.keep_alives
        assert front_end.sent[0]["status"] == 200
        assert dict(front_end.sent[0]["headers"])[b"content-type"].startswith(b"text/event-stream")
        prefill.may_go.set()
        await answering
        late = front_end.body[len(early) :]
        if name in COMMENTED:
            assert early == KEEP_ALIVE * keep_alives
            answer = late
        elif name == "messages":
            assert early == PING * keep_alives
            answer = late
        else:
            repeated = [event for event in normal(early) if event["type"] == "response.in_progress"]
            assert len(repeated) == keep_alives + 1
            assert {event["sequence_number"] for event in repeated} == {repeated[0]["sequence_number"]}
            assert repeated[0]["response"]["instructions"] == "be brief"
            # What repeats is what a client has: it comes before the first event of its own.
            answer = early[: early.index(b"\n\n", early.index(b"event: response.in_progress")) + 2] + late
    (tmp_path / "quiet").mkdir()
    async with serving(prefill, NEVER, tmp_path / "quiet") as quiet:
        await send(quiet, ROUTES[name])
        assert normal(answer) == normal(quiet.body)
        assert quiet.tally.keep_alives == 0


@pytest.mark.parametrize("name", ROUTES)
async def test_a_fault_after_the_headers_is_an_event_of_the_api(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    prefill.fault = LOST
    async with serving(prefill, OFTEN, tmp_path) as front_end:
        answering = send(front_end, ROUTES[name])
        await until(lambda: front_end.tally.keep_alives >= 1)
        prefill.may_go.set()
        await answering
        assert front_end.status == 200
        last = front_end.events[-1]
        if name in IN_PROGRESS:
            assert last["type"] == "response.failed"
            assert last["response"]["error"] == {"code": "server_error", "message": "worker_lost: the worker is gone"}
        elif name == "messages":
            assert last == {"type": "error", "error": {"type": "overloaded_error", "message": "the worker is gone"}}
        else:
            assert last["error"]["code"] == "worker_lost"
            assert b"[DONE]" not in front_end.body
        assert front_end.sent[-1]["more_body"] is False
        assert sum(count for (_, outcome), count in front_end.tally.requests.items() if outcome == "broken_off") == 1


@pytest.mark.parametrize("name", [name for name in ROUTES if name != "background responses"])
async def test_a_fault_that_is_known_at_once_is_a_status(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    prefill.fault = LOST
    prefill.may_go.set()
    async with serving(prefill, Limits(), tmp_path) as front_end:
        await send(front_end, ROUTES[name])
        assert front_end.status == (529 if name == "messages" else 503)


@pytest.mark.parametrize("name", ["chat", "messages", "responses"])
async def test_a_client_that_leaves_after_the_headers_cancels_its_generation(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, OFTEN, tmp_path) as front_end:
        answering = send(front_end, ROUTES[name])
        await until(lambda: front_end.tally.keep_alives >= 1)
        front_end.gone.set()
        await answering
        assert prefill.cancelled.is_set()
        assert front_end.tally.clients_left == 1


@pytest.mark.parametrize("name", ROUTES)
async def test_a_server_that_stops_tells_a_client_that_waits(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, OFTEN, tmp_path) as front_end:
        answering = send(front_end, ROUTES[name])
        await until(lambda: front_end.tally.keep_alives >= 1)
        front_end.admission.expel()
        await answering
        assert b"shutting down" in front_end.body
        assert front_end.sent[-1]["more_body"] is False


@pytest.mark.parametrize("name", ["resumable chat", "stored responses"])
async def test_an_answer_that_is_aborted_tells_a_client_that_waits(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, OFTEN, tmp_path) as front_end:
        answering = send(front_end, ROUTES[name])
        await until(lambda: front_end.tally.keep_alives >= 1)
        await front_end.detached.close()
        await answering
        assert b"shutting down" in front_end.body


async def test_a_client_that_takes_nothing_is_cut_off_while_it_waits_for_the_first_token() -> None:
    prefill = Prefill()
    front_end = FrontEnd(prefill.produce, Limits(stall_seconds=0.05, keep_alive=0.01))
    watching = asyncio.create_task(front_end.admission.watch_stalls())
    front_end.socket_open.clear()
    answering = send(front_end, ROUTES["chat"])
    await asyncio.wait([answering], timeout=20)
    assert answering.cancelled()
    assert front_end.tally.readers_stalled == 1
    assert front_end.tally.keep_alives == 1, "nothing more is sent to a full socket"
    watching.cancel()
    await asyncio.wait([watching])


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("more", [{}, {"store": False}])
async def test_a_client_that_takes_no_white_space_is_cut_off(more: dict[str, Any], is_answered: bool, tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, Limits(stall_seconds=0.05, keep_alive=0.01, whole_keep_alive=0.01), tmp_path) as front_end:
        watching = asyncio.create_task(front_end.admission.watch_stalls())
        front_end.socket_open.clear()
        answering = send(front_end, (*RESPONSES, more), stream=False)
        await until(lambda: front_end.tally.keep_alives >= 1)
        if is_answered:
            prefill.may_go.set()
        await asyncio.wait([answering], timeout=20)
        assert answering.cancelled()
        assert front_end.tally.readers_stalled == 1
        assert [outcome for _, outcome in front_end.tally.requests] == ["stalled"]
        watching.cancel()
        await asyncio.wait([watching])


async def test_keep_alives_also_fill_a_gap_between_tokens() -> None:
    prefill = Prefill()
    front_end = FrontEnd(prefill.produce, OFTEN)
    answering = send(front_end, ROUTES["chat"])
    await prefill.begun.wait()
    assert prefill.mailbox is not None
    prefill.mailbox.put(Delta(0, tuple(b"hi")))
    await until(lambda: front_end.tally.keep_alives >= 2)
    assert front_end.body.endswith(KEEP_ALIVE * 2)
    prefill.mailbox.end(Finish("stop"))
    await answering
    assert front_end.body.endswith(b"data: [DONE]\n\n")


async def test_a_response_with_output_gets_comments_in_a_gap() -> None:
    prefill = Prefill()
    front_end = FrontEnd(prefill.produce, OFTEN)
    answering = send(front_end, ROUTES["responses"])
    await prefill.begun.wait()
    assert prefill.mailbox is not None
    prefill.mailbox.put(Delta(0, tuple(b"hi")))
    await until(lambda: front_end.tally.keep_alives >= 1)
    assert front_end.body.endswith(KEEP_ALIVE)
    prefill.mailbox.end(Finish("stop"))
    await answering
    numbers = [event["sequence_number"] for event in front_end.events]
    assert numbers == list(range(len(numbers)))


async def test_keep_alives_are_not_recorded() -> None:
    prefill = Prefill()
    front_end = FrontEnd(prefill.produce, OFTEN)
    answering = send(front_end, ROUTES["resumable chat"])
    await until(lambda: front_end.tally.keep_alives >= 2)
    prefill.may_go.set()
    await answering
    answer = front_end.body.replace(KEEP_ALIVE, b"")
    await front_end.send("GET", f"/v1/chat/completions/{front_end.events[0]['id']}")
    assert front_end.body == answer
    assert front_end.body.startswith(b"id: 0\n")


@pytest.mark.parametrize("name", ["stored responses", "background responses"])
async def test_a_follower_that_has_every_event_gets_its_headers_at_once(name: str, tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, Limits(keep_alive=0.01), tmp_path) as first:
        answering = send(first, ROUTES[name])
        await until(lambda: first.tally.keep_alives >= 1)
        seen = first.events
        created, newest = seen[0]["response"]["id"], seen[-1]["sequence_number"]
        first.gone.set()
        await answering
        first.gone.clear()
        first.sent, before = [], first.tally.keep_alives
        following = asyncio.create_task(first.send("GET", f"/v1/responses/{created}?stream=true&starting_after={newest}"))
        await until(lambda: bool(first.body))
        assert first.sent[0]["status"] == 200
        assert first.body.startswith(KEEP_ALIVE), "not the next reminder of the response, which is an event"
        await until(lambda: first.tally.keep_alives > before + 1)
        prefill.may_go.set()
        await following
        own = [event for event in first.events if event["type"] != "response.in_progress"]
        assert [event["sequence_number"] for event in own] == list(range(newest + 1, newest + 1 + len(own)))
        assert own[-1]["type"] == "response.completed"


@pytest.mark.parametrize("route", [CHAT, TEXT, MESSAGES, RESPONSES, (RESPONSES[0], {**RESPONSES[1], "store": False})])
async def test_a_whole_answer_may_begin_with_white_space(route: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    prefill = Prefill()
    async with serving(prefill, OFTEN, tmp_path) as front_end:
        answering = send(front_end, (*route, {}), stream=False)
        await until(lambda: front_end.tally.keep_alives >= 2)
        assert dict(front_end.sent[0]["headers"])[b"content-type"] == b"application/json"
        assert b"content-length" not in dict(front_end.sent[0]["headers"])
        assert front_end.body.isspace()
        prefill.may_go.set()
        await answering
        assert "hi" in json.dumps(front_end.json)
        assert front_end.sent[-1]["more_body"] is False


async def test_a_whole_answer_waits_longer_than_a_stream_before_its_status_is_fixed() -> None:
    prefill = Prefill()
    front_end = FrontEnd(prefill.produce, Limits(keep_alive=0.01))
    whole, stream = send(front_end, (*CHAT, {}), stream=False), send(FrontEnd(prefill.produce, OFTEN), ROUTES["chat"])
    await prefill.begun.wait()
    assert Limits().whole_keep_alive > 30, "later than a model without a worker is given up: --worker-wait"
    prefill.fault = LOST
    prefill.may_go.set()
    await asyncio.gather(whole, stream)
    assert front_end.status == 503


@pytest.mark.parametrize("fault", [LOST, REFUSED])
async def test_a_whole_answer_that_fails_after_its_headers_is_no_success(fault: Fault) -> None:
    prefill = Prefill()
    prefill.fault = fault
    front_end = FrontEnd(prefill.produce, OFTEN)
    answering = send(front_end, (*CHAT, {}), stream=False)
    await until(lambda: front_end.tally.keep_alives >= 1)
    prefill.may_go.set()
    if fault is LOST:
        with pytest.raises(BrokenOff):
            await answering
        assert front_end.sent[-1]["more_body"] is True, "it is left unfinished, so clients try again"
    else:
        await answering
        assert front_end.json["error"]["code"] == "engine_refused", "another attempt would not mend it"


async def test_a_client_that_leaves_before_a_whole_answer_cancels_it() -> None:
    prefill = Prefill()
    front_end = FrontEnd(prefill.produce, OFTEN)
    front_end.socket_open.clear()
    answering = send(front_end, (*CHAT, {}), stream=False)
    await until(lambda: front_end.tally.keep_alives >= 1)
    front_end.gone.set()
    await answering
    assert prefill.cancelled.is_set()


async def test_many_clients_are_reminded_in_turns_of_the_loop() -> None:
    """Thousands may wait for the same worker."""
    watches, turn, turns = ClientWatches(), 0, list[int]()

    async def never() -> Any:
        await asyncio.Event().wait()

    def remind() -> float:
        turns.append(turn)
        return 0.0

    for _ in range(3 * MAX_REMINDED_AT_ONCE):
        watches.add(ClientWatch(never, lambda: None, 0.01, remind))
    async with asyncio.timeout(20):
        while len(turns) < 3 * MAX_REMINDED_AT_ONCE:
            turn += 1
            await asyncio.sleep(0)
    assert max(turns.count(each) for each in set(turns)) == MAX_REMINDED_AT_ONCE


async def test_a_client_that_cannot_be_reminded_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    watches, reminded = ClientWatches(), 0

    async def never() -> Any:
        await asyncio.Event().wait()

    def fails() -> float:
        raise OSError("no such socket")

    def remind() -> float:
        nonlocal reminded
        reminded += 1
        return 0.01

    for each in (fails, remind):
        watches.add(ClientWatch(never, lambda: None, 0.01, each))
    await until(lambda: reminded >= 2)
    assert "no such socket" in caplog.text
