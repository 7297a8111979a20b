"""GET /v1/sessions, GET and DELETE /v1/sessions/{id}: what a client can see of its sessions, and end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route

from penstock.api.handlers import handled
from penstock.api.pipeline.hints import owner
from penstock.wire.errors import RequestError

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


class SessionDescription(Struct, frozen=True, kw_only=True):
    """One session as its owner may see it. `expires_in` is None while a turn is active: then the time does not run."""

    id: str
    worker: str
    turns: int
    active_turns: int
    kv_blocks: int
    kv_tokens: int
    prompt_tokens: int
    cached_tokens: int
    timeout: float
    expires_in: float | None
    model: str | None = None

    @property
    def hit_rate(self) -> float:
        """The share of its prompt tokens that needed no prefill."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class SessionDirectory(Protocol):
    """Who knows the sessions. One owner never sees, or ends, those of another."""

    async def list_sessions(self, owner: str, limit: int, after: str | None) -> Sequence[SessionDescription]:
        """At most `limit` of this owner's sessions, in the order of their ids, from the first that is greater than `after`."""

    async def get_session(self, owner: str, session_id: str) -> SessionDescription | None: ...

    async def close_session(self, owner: str, session_id: str) -> bool:
        """Ends it, now or when its last active turn ends. Returns whether there was one."""


def session_routes(directory: SessionDirectory) -> list[Route]:
    """The routes over `directory`."""

    async def list_sessions(request: Request) -> object:
        limit, after = _page(request.query_params)
        # One more than is shown tells whether there are more.
        found = await directory.list_sessions(owner(request.scope["headers"]), limit + 1, after)
        return {"object": "list", "data": [_rendered(session) for session in found[:limit]], "has_more": len(found) > limit}

    async def get_session(request: Request) -> object:
        session_id = request.path_params["id"]
        session = await directory.get_session(owner(request.scope["headers"]), session_id)
        if session is None:
            raise _not_found(session_id)
        return _rendered(session)

    async def close_session(request: Request) -> object:
        session_id = request.path_params["id"]
        if not await directory.close_session(owner(request.scope["headers"]), session_id):
            raise _not_found(session_id)
        return {"id": session_id, "object": "session", "deleted": True}

    return [
        Route("/v1/sessions", handled({"GET": list_sessions})),
        # The ids of subagents have slashes.
        Route("/v1/sessions/{id:path}", handled({"GET": get_session, "DELETE": close_session})),
    ]


def _page(query: Mapping[str, str]) -> tuple[int, str | None]:
    for name in query:
        if name not in ("limit", "after"):
            raise RequestError(f"unknown parameter `{name}`: expected limit or after", param=name, code="unknown_field")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LIMIT)) and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestError(f"`limit` is {limit[:80]!r}: expected a number from 1 to {MAX_LIMIT}", param="limit")
    return int(limit), query.get("after")


def _rendered(session: SessionDescription) -> dict[str, Any]:
    fields = {"object": "session", **msgspec.structs.asdict(session), "hit_rate": session.hit_rate}
    if session.model is None:
        del fields["model"]
    return fields


def _not_found(session_id: str) -> RequestError:
    """The same whether another key has such a session or nobody: ids are not to be guessed."""
    return RequestError(f"there is no session `{session_id[:256]}`", param="id", code="session_not_found", status=404)
