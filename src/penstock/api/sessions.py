"""GET /v1/sessions, GET and DELETE /v1/sessions/{id}: a client lists, reads and closes its sessions, and only its own."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from penstock.api.openai.answers import DeletedSession, Session, SessionList
from penstock.api.pipeline.request import Incoming, check_query, read_limit
from penstock.router.affinity import Binding
from penstock.wire.errors import RequestError
from penstock.wire.messages import SessionReport

if TYPE_CHECKING:
    from penstock.api.app import Services

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
# For a session whose worker is gone or does not answer.
NO_REPORT = SessionReport("", 0, 0, 0, 0, 0, 0, 0)


async def list_sessions(services: Services, incoming: Incoming) -> SessionList:
    check_query(incoming.query, ("limit", "after"))
    limit = read_limit(incoming.query, DEFAULT_LIMIT, MAX_LIMIT)
    # One more than the limit tells whether there are more.
    found = await services.sessions.list_sessions(incoming.owner, limit + 1, incoming.query.get("after", ""))
    return SessionList(data=[_shown(services, *one) for one in found[:limit]], has_more=len(found) > limit)


async def get_session(services: Services, incoming: Incoming) -> Session:
    found = await services.sessions.get_session(incoming.owner, incoming.path["id"])
    if found is None:
        raise _not_found(incoming.path["id"])
    return _shown(services, *found)


async def close_session(services: Services, incoming: Incoming) -> DeletedSession:
    if not await services.sessions.close_session(incoming.owner, incoming.path["id"]):
        raise _not_found(incoming.path["id"])
    return DeletedSession(id=incoming.path["id"], deleted=True)


def _shown(services: Services, binding: Binding, report: SessionReport | None) -> Session:
    report = report or NO_REPORT
    block_size = next((model.info.block_size for model in services.context.models.all() if model.info.name == binding.model), 0)
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
        retained_until=None if report.expires_in is None or report.tier is None else int(time.time() + report.expires_in),
        tier=report.tier,
    )


def _not_found(session_id: str) -> RequestError:
    """The same answer whether another key has this session or nobody does: ids cannot be guessed."""
    return RequestError(f"there is no session `{session_id[:256]}`", param="id", code="session_not_found", status=404)
