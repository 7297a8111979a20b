"""GET /v1/sessions, GET and DELETE /v1/sessions/{id}: a client lists, reads and ends its sessions."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request
from starlette.routing import Route

from penstock.api.auth.gate import TENANT
from penstock.api.handlers import handled
from penstock.api.models import Models
from penstock.api.openai.answers import DeletedSession, Session, SessionList
from penstock.cluster.sessions.sessions import Sessions
from penstock.router.affinity import Binding
from penstock.wire.errors import RequestError
from penstock.wire.messages import SessionReport

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
# For a session whose worker is gone or does not answer.
NO_REPORT = SessionReport("", 0, 0, 0, 0, 0, 0, 0)


def session_routes(sessions: Sessions, models: Models) -> list[Route]:
    """Lists, shows and ends sessions. A tenant sees and ends only its own."""

    def shown(binding: Binding, report: SessionReport | None) -> Session:
        sizes = [model.info.block_size for model in models.all() if model.info.name == binding.model]
        return _shown(binding, report or NO_REPORT, sizes[0] if sizes else 0)

    async def list_sessions(request: Request) -> object:
        limit, after = _page(request.query_params)
        # One more than is shown tells whether there are more.
        found = await sessions.list_sessions(_owner(request), limit + 1, after)
        return SessionList(data=[shown(binding, report) for binding, report in found[:limit]], has_more=len(found) > limit)

    async def get_session(request: Request) -> object:
        session_id = request.path_params["id"]
        found = await sessions.get_session(_owner(request), session_id)
        if found is None:
            raise _not_found(session_id)
        return shown(*found)

    async def close_session(request: Request) -> object:
        session_id = request.path_params["id"]
        if not await sessions.close_session(_owner(request), session_id):
            raise _not_found(session_id)
        return DeletedSession(id=session_id)

    return [
        Route("/v1/sessions", handled({"GET": list_sessions})),
        # The ids of subagents contain slashes.
        Route("/v1/sessions/{id:path}", handled({"GET": get_session, "DELETE": close_session})),
    ]


def _owner(request: Request) -> str:
    owner: str = request.scope[TENANT].owner
    return owner


def _page(query: Mapping[str, str]) -> tuple[int, str]:
    for name in query:
        if name not in ("limit", "after"):
            raise RequestError(f"unknown parameter `{name}`: expected limit or after", param=name, code="unknown_field")
    limit = query.get("limit", str(DEFAULT_LIMIT))
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LIMIT)) and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestError(f"`limit` is {limit[:80]!r}: expected a number from 1 to {MAX_LIMIT}", param="limit")
    return int(limit), query.get("after", "")


def _shown(binding: Binding, report: SessionReport, block_size: int) -> Session:
    return Session(
        id=binding.session,
        worker=binding.worker,
        model=binding.model,
        turns=report.turns,
        active_turns=report.active_turns,
        kv_blocks=report.kv_blocks,
        kv_tokens=report.kv_blocks * block_size,
        prompt_tokens=report.prompt_tokens,
        cached_tokens=report.cached_tokens,
        hit_rate=report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0,
        timeout=binding.timeout,
        expires_in=report.expires_in,
    )


def _not_found(session_id: str) -> RequestError:
    """The same answer whether another key has this session or nobody does: ids cannot be guessed."""
    return RequestError(f"there is no session `{session_id[:256]}`", param="id", code="session_not_found", status=404)
