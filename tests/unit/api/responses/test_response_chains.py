"""Requests that continue a response or a conversation: their context, their session, and errors."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from front_end import FrontEnd, says
from penstock.api.responses.store import SqliteStore
from penstock.stream.mailbox import Mailbox
from penstock.wire.messages import Submit

USER = {"role": "user", "content": "hi"}


async def create(front_end: FrontEnd, **fields: Any) -> Any:
    await front_end.send("POST", "/v1/responses", json.dumps({"model": "m", "input": "x", **fields}).encode())
    async with asyncio.timeout(10):
        while any("session" in task.get_name() for task in asyncio.all_tasks()):
            # No worker has granted a lease: the session is closed behind the answer.
            await asyncio.sleep(0)
    return front_end.json


async def never_ends(_: Submit, mailbox: Mailbox) -> None:
    await asyncio.Event().wait()


async def test_a_chain_is_a_session_on_the_worker_of_its_first_response(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        first = await create(front_end)
        wishes = front_end.turn.hints
        assert (wishes.session, wishes.affinity) == (None, first["id"])
        previous = first["id"]
        for _ in range(2):
            previous = (await create(front_end, previous_response_id=previous))["id"]
            session = front_end.turn.hints.session
            assert session is not None
            assert session.id == first["id"]
            assert front_end.turn.hints.affinity == first["id"]
        await create(front_end, store=False)
        assert front_end.turn.hints.affinity is None, "nothing can follow it"


async def test_a_conversation_is_a_session(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        await front_end.send("POST", "/v1/conversations", b"{}")
        conversation = front_end.json["id"]
        await create(front_end, conversation=conversation)
        session = front_end.turn.hints.session
        assert session is not None
        assert session.id == conversation
        await front_end.send("GET", f"/v1/conversations/{conversation}/items?order=asc")
        assert [item["role"] for item in front_end.json["data"]] == ["user", "assistant"]


async def test_a_chain_with_a_deleted_response_is_refused(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        first = await create(front_end)
        second = await create(front_end, previous_response_id=first["id"])
        await front_end.send("DELETE", f"/v1/responses/{first['id']}")
        refused = await create(front_end, previous_response_id=second["id"])
        assert front_end.status == 404
        assert refused["error"]["code"] == "previous_response_not_found"
        assert first["id"] in refused["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True, "store": False}, "background"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c1", "output": "x"}]}, "input[1].call_id"),
        ({"previous_response_id": "resp_1", "conversation": "conv_1"}, "previous_response_id"),
        ({"stream_options": {}}, "stream_options"),
    ],
)
async def test_contradictory_fields_are_refused(tmp_path: Path, fields: dict[str, Any], param: str) -> None:
    async with SqliteStore(tmp_path / "r.db") as store:
        front_end = FrontEnd(says("hello"), responses=store)
        refused = await create(front_end, **fields)
        assert (front_end.status, refused["error"]["param"]) == (400, param)


async def test_a_response_of_another_front_end_cannot_be_cancelled_here(tmp_path: Path) -> None:
    async with SqliteStore(tmp_path / "r.db") as mine, SqliteStore(tmp_path / "r.db") as theirs:
        made = FrontEnd(never_ends, responses=theirs)
        response_id = (await create(made, background=True))["id"]
        front_end = FrontEnd(says("hello"), responses=mine)
        await front_end.send("POST", f"/v1/responses/{response_id}/cancel")
        assert (front_end.status, front_end.json["error"]["code"]) == (409, "response_elsewhere")
        await front_end.send("GET", f"/v1/responses/{response_id}")
        assert front_end.json["status"] == "queued"
        await made.send("POST", f"/v1/responses/{response_id}/cancel")
        assert made.json["status"] == "cancelled"
        await front_end.send("GET", f"/v1/responses/{response_id}")
        assert front_end.json["status"] == "cancelled"
