"""No client sees the end of a response before it is stored."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from front_end import response_object
from penstock.api.pipeline.detached import Recorder, Recording
from penstock.api.pipeline.dialect import Answer, ChoiceDelta, Ending, Usage
from penstock.api.responses.create import SavingSink
from penstock.api.responses.dialect import ResponseDialect
from penstock.api.responses.rows import NewResponse, ResponseState
from penstock.api.responses.store import SqliteStore
from penstock.wire.errors import RequestError
from sqlite_file import sql

USAGE = Usage(1, 1, 0)
RESPONSE = NewResponse(id="resp_1", owner="ann", root="resp_1", input=[])


class HeldStore(SqliteStore):
    """A store whose writes wait until the test lets them go."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.may_write = asyncio.Event()

    async def begin(self, response: NewResponse, state: ResponseState) -> None:
        await self.may_write.wait()
        await super().begin(response, state)

    async def finish(self, response: NewResponse, state: ResponseState) -> None:
        await self.may_write.wait()
        await super().finish(response, state)


class Wire:
    """A response that is streamed into a recording."""

    def __init__(self, store: SqliteStore) -> None:
        self.dialect = ResponseDialect(response_object(), lambda _: b"")
        self.recording = Recording()
        recorder = Recorder(self.recording, numbered=False, on_growth=lambda _: None)
        self.sink = SavingSink(recorder, store, RESPONSE, self.dialect, self.recording.events)

    @property
    def names(self) -> list[str]:
        return [event.split(b"\n")[0].decode().removeprefix("event: response.") for event in self.recording.events]

    async def send(self, events: bytes, last: bool = False) -> None:
        await self.sink.send_events(events, last)


async def test_events_wait_for_the_store_at_both_ends(tmp_path: Path) -> None:
    async with HeldStore(tmp_path / "r.db") as store:
        wire = Wire(store)
        first = asyncio.create_task(wire.send(wire.dialect.begin(USAGE)))
        await asyncio.sleep(0)
        assert wire.recording.events == []
        store.may_write.set()
        await first
        assert wire.names == ["created", "in_progress"]
        found = await store.get("ann", "resp_1")
        assert found is not None
        assert found.body.status == "in_progress"
        store.may_write.clear()
        await wire.send(wire.dialect.event(0, ChoiceDelta(["Hi"])))
        assert wire.names[-1] == "output_text.delta", "in between, nothing waits"
        end = wire.dialect.event(0, ChoiceDelta((), ending=Ending("stop"))) + wire.dialect.end(USAGE)
        last = asyncio.create_task(wire.send(end, last=True))
        await asyncio.sleep(0)
        assert "completed" not in wire.names
        store.may_write.set()
        await last
        assert wire.names[-1] == "completed"
        assert await store.events("ann", "resp_1") == wire.recording.events


async def test_a_stream_of_one_write_is_stored_once(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        wire = Wire(store)
        whole = wire.dialect.begin(USAGE) + wire.dialect.event(0, ChoiceDelta(["Hi"], ending=Ending("stop"))) + wire.dialect.end(USAGE)
        await wire.send(whole, last=True)
        assert await store.events("ann", "resp_1") == wire.recording.events
        assert wire.sink.is_stored


async def test_an_end_that_cannot_be_stored_is_sent_as_a_failure(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        wire = Wire(store)
        await wire.send(wire.dialect.begin(USAGE))
        sql(tmp_path / "r.db", "ALTER TABLE responses RENAME TO hidden")
        await wire.send(wire.dialect.event(0, ChoiceDelta(["Hi"], ending=Ending("stop"))) + wire.dialect.end(USAGE), last=True)
        assert wire.names[-1] == "failed"
        assert "completed" not in wire.names
        assert not wire.sink.is_stored
        sql(tmp_path / "r.db", "ALTER TABLE hidden RENAME TO responses")


async def test_a_whole_answer_that_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        wire = Wire(store)
        body = b"".join(wire.dialect.body([Answer(["Hi"], [], Ending("stop"))], USAGE, None))
        sql(tmp_path / "r.db", "ALTER TABLE responses RENAME TO hidden")
        with pytest.raises(RequestError, match="not available"):
            await wire.sink.send_whole(200, body)
        assert wire.recording.body is None
        sql(tmp_path / "r.db", "ALTER TABLE hidden RENAME TO responses")
        await wire.sink.send_whole(200, body)
        found = await store.get("ann", "resp_1")
        assert found is not None
        assert found.body == wire.dialect.snapshot()


async def test_a_response_that_no_client_has_seen_is_not_stored(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        wire = Wire(store)
        await wire.sink.cancel()
        await wire.sink.fail(RequestError("no"))
        assert wire.recording.events == []
        assert await store.get("ann", "resp_1") is None


async def test_a_finished_response_is_not_ended_again(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        wire = Wire(store)
        await wire.send(wire.dialect.begin(USAGE))
        await wire.sink.cancel()
        await wire.sink.fail(RequestError("no"))
        assert wire.names == ["created", "in_progress", "incomplete"]
        found = await store.get("ann", "resp_1")
        assert found is not None
        assert found.body.status == "cancelled"
