"""The routes of sessions: one key sees its own, and what is wrong is said as everywhere else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import pytest
from starlette.routing import Router
from starlette.types import Message

from penstock.api.pipeline.hints import NOBODY, owner
from penstock.api.sessions import SessionDescription, session_routes

KEY = [(b"authorization", b"Bearer sk-1")]
OTHER_KEY = [(b"authorization", b"Bearer sk-2")]


def description(
    session_id: str, *, model: str | None = "tiny", prompt_tokens: int = 200, expires_in: float | None = 12.5
) -> SessionDescription:
    return SessionDescription(
        id=session_id,
        worker="worker-0",
        model=model,
        turns=3,
        active_turns=0 if expires_in is not None else 1,
        kv_blocks=4,
        kv_tokens=64,
        prompt_tokens=prompt_tokens,
        cached_tokens=prompt_tokens // 4,
        timeout=300.0,
        expires_in=expires_in,
    )


class Directory:
    """Sessions in a dictionary, by owner and id."""

    def __init__(self, sessions: dict[str, list[SessionDescription]]) -> None:
        self.sessions = {name: {session.id: session for session in described} for name, described in sessions.items()}

    async def list_sessions(self, owner: str, limit: int, after: str | None) -> Sequence[SessionDescription]:
        own = sorted(self.sessions.get(owner, {}).items())
        return [session for session_id, session in own if after is None or session_id > after][:limit]

    async def get_session(self, owner: str, session_id: str) -> SessionDescription | None:
        return self.sessions.get(owner, {}).get(session_id)

    async def close_session(self, owner: str, session_id: str) -> bool:
        return self.sessions.get(owner, {}).pop(session_id, None) is not None


class Client:
    def __init__(self, directory: Directory) -> None:
        self._router = Router(session_routes(directory))
        self.headers: dict[bytes, bytes] = {}

    async def ask(self, method: str, target: str, key: list[tuple[bytes, bytes]] = KEY) -> tuple[int, Any]:
        path, _, query = target.partition("?")
        scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "query_string": query.encode()}
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b""}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._router({**scope, "headers": key, "server": ("localhost", 8000)}, receive, send)
        self.headers = dict(sent[0]["headers"])
        assert self.headers[b"content-type"] == b"application/json"
        return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.fixture
def directory() -> Directory:
    own = [description(f"agent-{number}") for number in range(5)]
    return Directory({owner(KEY): own, owner(OTHER_KEY): [description("theirs")], NOBODY: [description("free")]})


async def test_one_session(directory: Directory) -> None:
    status, body = await Client(directory).ask("GET", "/v1/sessions/agent-0")
    assert status == 200
    assert body == {
        "object": "session",
        "id": "agent-0",
        "worker": "worker-0",
        "model": "tiny",
        "turns": 3,
        "active_turns": 0,
        "kv_blocks": 4,
        "kv_tokens": 64,
        "prompt_tokens": 200,
        "cached_tokens": 50,
        "hit_rate": 0.25,
        "timeout": 300.0,
        "expires_in": 12.5,
    }


async def test_what_is_not_known() -> None:
    directory = Directory({owner(KEY): [description("new", model=None, prompt_tokens=0, expires_in=None)]})
    _, body = await Client(directory).ask("GET", "/v1/sessions/new")
    assert "model" not in body
    assert body["hit_rate"] == 0.0
    assert body["expires_in"] is None
    assert body["active_turns"] == 1


async def test_ids_with_slashes_and_escapes() -> None:
    client = Client(Directory({owner(KEY): [description("s1/a 1"), description("s1"), description("100%")]}))
    for target, session_id in [("s1/a%201", "s1/a 1"), ("s1%2Fa%201", "s1/a 1"), ("s1", "s1"), ("100%25", "100%")]:
        status, body = await client.ask("GET", f"/v1/sessions/{target}")
        assert (status, body["id"]) == (200, session_id)
    assert await client.ask("DELETE", "/v1/sessions/s1%2Fa%201") == (200, {"id": "s1/a 1", "object": "session", "deleted": True})
    assert (await client.ask("GET", "/v1/sessions/s1"))[0] == 200, "the main session is another one"


async def test_delete(directory: Directory) -> None:
    client = Client(directory)
    assert await client.ask("DELETE", "/v1/sessions/agent-0") == (200, {"id": "agent-0", "object": "session", "deleted": True})
    assert (await client.ask("GET", "/v1/sessions/agent-0"))[0] == 404
    assert (await client.ask("DELETE", "/v1/sessions/agent-0"))[0] == 404


@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_another_keys_session_is_as_absent_as_nobodys(method: str, directory: Directory) -> None:
    client = Client(directory)
    status, theirs = await client.ask(method, "/v1/sessions/theirs")
    assert status == 404
    assert theirs["error"]["code"] == "session_not_found"
    assert "`theirs`" in theirs["error"]["message"]
    _, absent = await client.ask(method, "/v1/sessions/absent")
    assert json.dumps(theirs).replace("theirs", "absent") == json.dumps(absent)
    assert (await client.ask("GET", "/v1/sessions/theirs", OTHER_KEY))[0] == 200, "and it is still there"
    assert (await client.ask("GET", "/v1/sessions/free", []))[0] == 200
    assert (await client.ask("GET", "/v1/sessions/free"))[0] == 404


async def test_list_page_by_page(directory: Directory) -> None:
    client = Client(directory)
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
    assert (await client.ask("GET", "/v1/sessions", [(b"x-api-key", b"new")]))[1] == {"object": "list", "data": [], "has_more": False}


async def test_default_limit() -> None:
    client = Client(Directory({owner(KEY): [description(f"{number:04}") for number in range(1001)]}))
    _, body = await client.ask("GET", "/v1/sessions")
    assert (len(body["data"]), body["has_more"]) == (100, True)
    _, body = await client.ask("GET", "/v1/sessions?limit=1000")
    assert (len(body["data"]), body["has_more"]) == (1000, True)


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "ten", "", "1.5", "%D9%A1", "9" * 5000])
async def test_wrong_limit(limit: str, directory: Directory) -> None:
    status, body = await Client(directory).ask("GET", f"/v1/sessions?limit={limit}")
    assert (status, body["error"]["param"]) == (400, "limit")


async def test_unknown_parameter(directory: Directory) -> None:
    status, body = await Client(directory).ask("GET", "/v1/sessions?order=desc")
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
async def test_wrong_method(method: str, target: str, allow: bytes, directory: Directory) -> None:
    client = Client(directory)
    status, body = await client.ask(method, target)
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")
    assert client.headers[b"allow"] == allow
    assert (await client.ask("GET", "/v1/sessions/agent-0"))[0] == 200


async def test_head(directory: Directory) -> None:
    assert (await Client(directory).ask("HEAD", "/v1/sessions/agent-0"))[0] == 200
