"""The routes of sessions: a key sees its own, and errors look the same as everywhere else."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.types import Message

from penstock.api.app import Services, make_app
from penstock.api.auth.gate import TENANT
from penstock.api.auth.keys import Keyring
from penstock.api.models import Models
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.runner import Runner
from penstock.config.front_end import KeySettings, Limits, ResumeLimits
from penstock.metrics.frontend import FrontEndMetrics, Tally
from penstock.router.affinity import Binding, session_key
from penstock.router.policy import Hints, SessionWish
from penstock.text.transcript import Transcripts
from workers import FrontEnd, Worker, submit

KEYRING = Keyring(KeySettings(), Tally())
KEY, OTHER_KEY, NO_KEY = b"sk-1", b"sk-2", b""


def owner(key: bytes) -> str:
    tenant = KEYRING.tenant_of(key)
    assert tenant is not None
    return tenant.owner


async def open_sessions(front_end: FrontEnd, key: bytes, *session_ids: str) -> None:
    """Writes sessions into the store, as if another front end had opened them on a worker that is gone."""
    for session_id in session_ids:
        binding = Binding(session_id, "gone", "simulator", 1, 300.0, 0.0)
        await front_end.store.claim(session_key(owner(key), "simulator", session_id), binding, 300.0, owner(key))


class Client:
    def __init__(self, front_end: FrontEnd) -> None:
        models = Models()
        models.live = [member.model for member in front_end.pool.members]
        self.front_end = front_end
        self.models = models
        metrics = FrontEndMetrics(Tally())
        admission = Admission(Limits(), metrics.tally)
        context = PromptContext(models, Transcripts(0))
        detached = DetachedRuns(ResumeLimits(), admission, metrics.tally)
        runner = Runner(context, front_end.sessions, front_end.dispatcher.produce, admission, metrics.tally, detached)
        self._app = make_app(Services(context, runner, detached, front_end.sessions, admission, metrics))
        self.headers: dict[bytes, bytes] = {}

    async def ask(self, method: str, target: str, key: bytes = KEY, headers: Sequence[tuple[bytes, bytes]] = ()) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode()}
        sent: list[Message] = []
        messages: list[Message] = [{"type": "http.request", "body": b""}]

        async def receive() -> Message:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app({**scope, "headers": list(headers), "server": ("localhost", 8000), TENANT: KEYRING.tenant_of(key)}, receive, send)
        self.headers = dict(sent[0]["headers"])
        assert self.headers[b"content-type"] == b"application/json"
        return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Client]:
    """A front end with one worker; five sessions of KEY, one of OTHER_KEY, one of no key."""
    async with Worker(folder, "worker-0") as worker, FrontEnd([worker]) as front_end:
        await open_sessions(front_end, KEY, *[f"agent-{number}" for number in range(5)])
        await open_sessions(front_end, OTHER_KEY, "theirs")
        await open_sessions(front_end, NO_KEY, "free")
        client = Client(front_end)
        for member in front_end.pool.members:
            await client.models.prepare(member.model)
        yield client


async def test_one_session(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        front_end = client.front_end
        for _ in range(2):
            await front_end.run(submit(1, prompt=40), Hints(session=SessionWish("mine", timeout=300.0)), owner(KEY))
        status, body = await client.ask("GET", "/v1/sessions/mine")
        assert status == 200
        assert 290 < body.pop("expires_in") <= 300
        assert 280 < body.pop("retained_until") - time.time() <= 300
        assert body == {
            "object": "session",
            "id": "mine",
            "worker": "worker-0",
            "model": "simulator",
            "turns": 2,
            "active_turns": 0,
            "kv_blocks": 3,
            "kv_tokens": 48,
            "prompt_tokens": 80,
            "cached_tokens": 32,
            "hit_rate": 0.4,
            "timeout": 300.0,
            "tier": "device",
        }


async def test_a_session_whose_worker_is_gone(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        _, body = await client.ask("GET", "/v1/sessions/agent-0")
        assert (body["worker"], body["timeout"], body["expires_in"]) == ("gone", 300.0, None)
        assert (body["turns"], body["kv_tokens"], body["hit_rate"]) == (0, 0, 0.0)


async def test_ids_with_slashes_and_escapes(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await open_sessions(client.front_end, KEY, "s1/a 1", "s1", "100%")
        for target, session_id in [("s1/a%201", "s1/a 1"), ("s1%2Fa%201", "s1/a 1"), ("s1", "s1"), ("100%25", "100%")]:
            status, body = await client.ask("GET", f"/v1/sessions/{target}")
            assert (status, body["id"]) == (200, session_id)
        assert await client.ask("DELETE", "/v1/sessions/s1%2Fa%201") == (200, {"id": "s1/a 1", "object": "session", "deleted": True})
        assert (await client.ask("GET", "/v1/sessions/s1"))[0] == 200, "the main session is another one"


async def test_delete(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        assert await client.ask("DELETE", "/v1/sessions/agent-0") == (200, {"id": "agent-0", "object": "session", "deleted": True})
        assert (await client.ask("GET", "/v1/sessions/agent-0"))[0] == 404
        assert (await client.ask("DELETE", "/v1/sessions/agent-0"))[0] == 404


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_session_of_another_key_does_not_exist(method: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        status, theirs = await client.ask(method, "/v1/sessions/theirs")
        assert status == 404
        assert theirs["error"]["code"] == "session_not_found"
        assert "`theirs`" in theirs["error"]["message"]
        _, absent = await client.ask(method, "/v1/sessions/absent")
        assert json.dumps(theirs).replace("theirs", "absent") == json.dumps(absent)
        assert (await client.ask("GET", "/v1/sessions/theirs", OTHER_KEY))[0] == 200, "and it is still there"
        assert (await client.ask("GET", "/v1/sessions/free", NO_KEY))[0] == 200
        assert (await client.ask("GET", "/v1/sessions/free"))[0] == 404


async def test_two_keys_of_one_tenant_see_the_same_sessions(tmp_path: Path) -> None:
    """The owner of a session is the request's tenant. The key itself is not looked at."""
    async with serving(tmp_path) as client:
        for header in (b"Bearer sk-1", b"Bearer sk-rotated"):
            _, body = await client.ask("GET", "/v1/sessions", headers=[(b"authorization", header)])
            assert len(body["data"]) == 5
            assert (await client.ask("GET", "/v1/sessions/agent-0", headers=[(b"authorization", header)]))[0] == 200
        assert (await client.ask("DELETE", "/v1/sessions/agent-0", headers=[(b"authorization", b"Bearer sk-rotated")]))[0] == 200


async def test_list_page_by_page(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        seen: list[str] = []
        target, has_more = "/v1/sessions?limit=2", True
        while has_more:
            status, body = await client.ask("GET", target)
            assert (status, body["object"]) == (200, "list")
            seen += [session["id"] for session in body["data"]]
            target, has_more = f"/v1/sessions?limit=2&after={seen[-1]}", body["has_more"]
        assert seen == [f"agent-{number}" for number in range(5)]
        assert len((await client.ask("GET", "/v1/sessions?limit=5"))[1]["data"]) == 5
        assert (await client.ask("GET", "/v1/sessions?limit=5"))[1]["has_more"] is False
        assert (await client.ask("GET", "/v1/sessions", b"new"))[1] == {"object": "list", "data": [], "has_more": False}


async def test_default_limit(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        await open_sessions(client.front_end, KEY, *[f"{number:04}" for number in range(1001)])
        _, body = await client.ask("GET", "/v1/sessions")
        assert (len(body["data"]), body["has_more"]) == (100, True)
        _, body = await client.ask("GET", "/v1/sessions?limit=1000")
        assert (len(body["data"]), body["has_more"]) == (1000, True)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "ten", "", "1.5", "%D9%A1", "9" * 5000])
async def test_wrong_limit(limit: str, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        status, body = await client.ask("GET", f"/v1/sessions?limit={limit}")
        assert (status, body["error"]["param"]) == (400, "limit")


async def test_unknown_parameter(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        status, body = await client.ask("GET", "/v1/sessions?order=desc")
        assert (status, body["error"]["param"]) == (400, "order")


@pytest.mark.parametrize(
    ("method", "target", "allow"),
    [
        ("POST", "/v1/sessions", b"GET, HEAD"),
        ("DELETE", "/v1/sessions", b"GET, HEAD"),
        ("POST", "/v1/sessions/agent-0", b"DELETE, GET, HEAD"),
        ("PATCH", "/v1/sessions/agent-0", b"DELETE, GET, HEAD"),
    ],
)
async def test_wrong_method(method: str, target: str, allow: bytes, tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        status, body = await client.ask(method, target)
        assert (status, body["error"]["code"]) == (405, "method_not_allowed")
        assert client.headers[b"allow"] == allow
        assert (await client.ask("GET", "/v1/sessions/agent-0"))[0] == 200


async def test_head(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        assert (await client.ask("HEAD", "/v1/sessions/agent-0"))[0] == 200
