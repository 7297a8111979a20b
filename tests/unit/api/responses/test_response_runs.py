"""Responses that do not depend on their connection: the store has what was streamed, whenever they are stopped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from front_end import FrontEnd, says
from penstock.api.responses.rows import NewResponse, ResponseState
from penstock.api.responses.store import SqliteStore
from penstock.config.front_end import Limits, ResumeLimits
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Delta, Fault, Finish, Submit
from sqlite_file import sql

OWNER = "nobody"


class HeldStore(SqliteStore):
    """A store whose chosen writes wait until the test lets them go."""

    def __init__(self, path: Path, held: str) -> None:
        super().__init__(path)
        self._held = held
        self.is_asked = asyncio.Event()
        self.may_write = asyncio.Event()

    async def begin(self, response: NewResponse, state: ResponseState) -> None:
        await self._wait("begin")
        await super().begin(response, state)

    async def put(self, response: NewResponse, state: ResponseState) -> None:
        await self._wait("end")
        await super().put(response, state)

    async def finish(self, response: NewResponse, state: ResponseState) -> None:
        await self._wait("end")
        await super().finish(response, state)

    async def _wait(self, write: str) -> None:
        if write == self._held:
            self.is_asked.set()
            await self.may_write.wait()


class FullStore(SqliteStore):
    """A store that can only be read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked = 0

    async def begin(self, response: NewResponse, state: ResponseState) -> None:
        self.asked += 1
        raise RequestError("full", code="store_unavailable", status=503)

    async def put(self, response: NewResponse, state: ResponseState) -> None:
        self.asked += 1
        raise RequestError("full", code="store_unavailable", status=503)


async def never_ends(_: Submit, mailbox: Mailbox) -> None:
    mailbox.put(Delta(0, tuple(b"so far")))
    await asyncio.Event().wait()


async def create(front_end: FrontEnd, **fields: Any) -> None:
    await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": "x", **fields}).encode())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def names(front_end: FrontEnd) -> list[str]:
    return [event["type"].removeprefix("response.") for event in front_end.events]


async def test_the_stored_response_equals_the_streamed_one(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello ", "wor", "ld"), responses=store)
        await create(front_end, stream=True)
        streamed = front_end.events[-1]["response"]
        assert streamed["status"] == "completed"
        await front_end.send("GET", f"/v1/responses/{streamed['id']}")
        assert front_end.json == streamed
        await create(front_end, previous_response_id=streamed["id"])
        assert front_end.status == 200, "what follows it finds it"


async def test_the_answer_repeats_the_tool_choice(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        tool = {"type": "function", "name": "look", "parameters": None, "strict": None}
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
        for choice, repeated in [(None, "auto"), ("none", "none"), (allowed, allowed)]:
            await create(front_end, tools=[tool], tool_choice=choice)
            assert front_end.json["tool_choice"] == repeated
            assert [shown["name"] for shown in front_end.json["tools"]] == ["look"]


@pytest.mark.parametrize("how", ["cancel", "delete"])
async def test_a_response_stopped_while_its_end_is_stored(tmp_path: Path, how: str) -> None:
    async with HeldStore(tmp_path / "r.db", "end") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        await create(front_end, background=True)
        response_id = front_end.json["id"]
        await until(store.is_asked.is_set)
        run = front_end.detached.find(OWNER, response_id)
        assert run is not None
        method, path = ("POST", "/cancel") if how == "cancel" else ("DELETE", "")
        stopping = asyncio.create_task(front_end.send(method, f"/v1/responses/{response_id}{path}"))
        await until(lambda: run.cancelled)
        store.may_write.set()
        async with asyncio.timeout(10):
            await stopping
        assert front_end.status == 200
        assert b"response.completed" in run.recording.events[-1]
        assert len(front_end.detached) == 0
        await front_end.send("GET", f"/v1/responses/{response_id}")
        if how == "cancel":
            assert front_end.json["status"] == "completed", "it came too late"
            assert front_end.json["output"][0]["content"][0]["text"] == "hello"
        else:
            assert front_end.status == 404


async def test_the_end_is_not_shown_before_it_is_stored(tmp_path: Path) -> None:
    async with HeldStore(tmp_path / "r.db", "end") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        await create(front_end, background=True)
        response_id = front_end.json["id"]
        await until(store.is_asked.is_set)
        asking = asyncio.create_task(front_end.send("GET", f"/v1/responses/{response_id}"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not asking.done()
        store.may_write.set()
        async with asyncio.timeout(10):
            await asking
        assert front_end.json["status"] == "completed"


async def test_the_reader_leaves_while_the_start_is_stored(tmp_path: Path) -> None:
    async with HeldStore(tmp_path / "r.db", "begin") as store:
        front_end = FrontEnd(never_ends, responses=store, resume=ResumeLimits(grace=0.0))
        connection = asyncio.create_task(create(front_end, stream=True))
        await until(store.is_asked.is_set)
        (run,) = front_end.detached._runs.values()
        front_end.gone.set()
        await connection
        await until(lambda: run.cancelled)
        store.may_write.set()
        async with asyncio.timeout(10):
            await run.ended()
        found = await store.get(OWNER, run.id)
        assert found is not None
        assert found.body.status == "cancelled"
        assert not found.is_here
        assert (front_end.detached.bytes, len(front_end.detached)) == (0, 0)


async def test_a_stream_whose_start_cannot_be_stored_tries_once(tmp_path: Path) -> None:
    async with FullStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says(*"hello"), responses=store)
        await create(front_end, stream=True)
        assert names(front_end)[-1] == "failed"
        assert names(front_end).count("output_text.delta") > 1
        assert store.asked == 2, "at its beginning and at its end"
        await front_end.detached.close()


async def test_a_stream_whose_start_could_not_be_stored_sees_the_shutdown(tmp_path: Path) -> None:
    async with FullStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(never_ends, responses=store)
        connection = asyncio.create_task(create(front_end, stream=True))
        await until(lambda: bool(front_end.sent) and "output_text.delta" in names(front_end))
        await front_end.detached.close()
        async with asyncio.timeout(10):
            await connection
        assert names(front_end)[-1] == "failed"


async def test_a_response_that_is_not_admitted_is_not_stored(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("x"), limits=Limits(max_generations=0), responses=store)
        for fields in ({"background": True}, {"background": True, "stream": True}, {"stream": True}, {}):
            await create(front_end, **fields)
            assert front_end.status == 429
            assert (front_end.detached.bytes, len(front_end.detached)) == (0, 0)
        assert sql(tmp_path / "r.db", "SELECT COUNT(*) FROM responses") == [(0,)]


async def test_a_background_response_stops_when_its_creator_is_cancelled(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def produce(submit: Submit, mailbox: Mailbox) -> None:
        begun.set()
        await never_ends(submit, mailbox)

    async with HeldStore(tmp_path / "r.db", "begin") as store:
        store.may_write.set()
        front_end = FrontEnd(produce, responses=store)
        creating = asyncio.create_task(create(front_end, background=True))
        await until(store.is_asked.is_set)
        await until(lambda: len(front_end.detached) == 1)
        creating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert (front_end.detached.bytes, len(front_end.detached)) == (0, 0)
        assert front_end.admission.idle.is_set()
        assert sql(tmp_path / "r.db", "SELECT id FROM responses") == []


async def test_a_background_response_needs_no_reader(tmp_path: Path) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def produce(_: Submit, mailbox: Mailbox) -> None:
        begun.set()
        await may_end.wait()
        mailbox.put(Delta(0, tuple(b"hello")))
        mailbox.end(Finish("stop"))

    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(produce, responses=store, resume=ResumeLimits(grace=0.0))
        await create(front_end, background=True)
        run = front_end.detached.find(OWNER, front_end.json["id"])
        assert run is not None
        await until(begun.is_set)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not run.cancelled
        may_end.set()
        await run.ended()
        found = await store.get(OWNER, run.id)
        assert found is not None
        assert found.body.status == "completed"


async def lost(_: Submit, mailbox: Mailbox) -> None:
    raise GenerationFault(Fault("worker_lost", "the worker is gone"))


async def test_a_fault_before_the_first_event_is_a_status_and_nothing_is_stored(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(lost, responses=store)
        await create(front_end, stream=True)
        assert front_end.status == 503
        assert sql(tmp_path / "r.db", "SELECT COUNT(*) FROM responses") == [(0,)]


async def test_a_fault_in_the_background_is_stored(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(lost, responses=store)
        await create(front_end, background=True)
        assert front_end.status == 200
        response_id = front_end.json["id"]
        run = front_end.detached.find(OWNER, response_id)
        if run is not None:
            await run.ended()
        await front_end.send("GET", f"/v1/responses/{response_id}")
        assert front_end.json["status"] == "failed"
        assert "worker_lost" in front_end.json["error"]["message"]
        await front_end.send("GET", f"/v1/responses/{response_id}?stream=true")
        assert names(front_end) == ["created", "queued", "failed"]


async def test_a_response_whose_end_could_not_be_stored_has_failed(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        may_end = asyncio.Event()

        async def produce(_: Submit, mailbox: Mailbox) -> None:
            mailbox.put(Delta(0, tuple(b"hello")))
            await may_end.wait()
            mailbox.end(Finish("stop"))

        front_end = FrontEnd(produce, responses=store)
        connection = asyncio.create_task(create(front_end, stream=True))
        await until(lambda: bool(front_end.sent) and "output_text.delta" in names(front_end))
        response_id = front_end.events[0]["response"]["id"]
        sql(tmp_path / "r.db", "ALTER TABLE items RENAME TO hidden")
        may_end.set()
        await connection
        assert names(front_end)[-1] == "failed"
        sql(tmp_path / "r.db", "ALTER TABLE hidden RENAME TO items")
        await front_end.send("GET", f"/v1/responses/{response_id}")
        assert front_end.json["status"] == "failed"
        front_end.detached.forget(response_id)
        await front_end.send("GET", f"/v1/responses/{response_id}")
        assert front_end.json["status"] == "failed", "also when nothing but the store knows it"
        await create(front_end, previous_response_id=response_id)
        assert front_end.status == 400


async def test_a_stream_whose_store_breaks_unexpectedly_ends_as_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class BrokenStore(SqliteStore):
        async def finish(self, response: NewResponse, state: ResponseState) -> None:
            raise ZeroDivisionError

    async with BrokenStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        await create(front_end, stream=True)
        numbers = [event["sequence_number"] for event in front_end.events]
        assert names(front_end)[-1] == "failed"
        assert "completed" not in names(front_end)
        assert numbers == list(range(len(numbers))), "what was rendered and not sent has no number"
        assert front_end.events[-1]["response"]["error"]["message"] == "internal_error: internal error"
        assert "ZeroDivisionError" in caplog.text
        await front_end.send("GET", f"/v1/responses/{front_end.events[0]['response']['id']}?stream=true&starting_after={numbers[-2]}")
        assert names(front_end) == ["failed"]
        await front_end.detached.close()


async def test_only_background_responses_can_be_cancelled(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        await create(front_end)
        await front_end.send("POST", f"/v1/responses/{front_end.json['id']}/cancel")
        assert front_end.status == 400
        assert front_end.json["error"]["code"] == "not_cancellable"


@pytest.mark.parametrize("fields", [{}, {"store": False}])
async def test_a_worker_that_finds_the_prompt_too_long_ends_the_stream(tmp_path: Path, fields: dict[str, Any]) -> None:
    async def refuses(_: Submit, mailbox: Mailbox) -> None:
        mailbox.end(Fault("context_length_exceeded", "too long"))

    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(refuses, responses=store)
        await create(front_end, stream=True, **fields)
        assert [event["type"] for event in front_end.events] == ["response.created", "response.failed"]
        assert front_end.events[-1]["response"]["error"] == {"code": "context_length_exceeded", "message": "too long"}
        await create(front_end, **fields)
        assert (front_end.status, front_end.json["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_stream_whose_prompt_is_too_long_counts_as_refused() -> None:
    front_end = FrontEnd(says("x"))
    await create(front_end, stream=True, input="x" * 1500)
    assert [event["type"] for event in front_end.events] == ["response.created", "response.failed"]
    assert front_end.tally.requests["responses", "refused_400"] == 1
    assert front_end.tally.limits_reached["context_length",] == 1


@pytest.mark.parametrize("field", ["user", "safety_identifier"])
async def test_what_every_response_repeats_is_limited(field: str) -> None:
    front_end = FrontEnd(says("hi"))
    for length, status in ((4096, 200), (4097, 400)):
        await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": "x", field: "u" * length}).encode())
        assert front_end.status == status
    assert front_end.json["error"]["param"] == field
