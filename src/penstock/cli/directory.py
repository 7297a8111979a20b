"""The sessions as the API shows them: what the store and the workers know of them, put together."""

from __future__ import annotations

from penstock.api.models import Models
from penstock.api.sessions import SessionDescription
from penstock.cluster.sessions.sessions import SessionListing, Sessions


class Directory:
    """See `http.sessions.SessionDirectory`."""

    def __init__(self, sessions: Sessions, models: Models) -> None:
        self._sessions = sessions
        self._models = models

    async def list_sessions(self, owner: str, limit: int, after: str | None) -> list[SessionDescription]:
        return [self._described(listing) for listing in await self._sessions.list_sessions(owner, limit, after or "")]

    async def get_session(self, owner: str, session_id: str) -> SessionDescription | None:
        listing = await self._sessions.get_session(owner, session_id)
        return None if listing is None else self._described(listing)

    async def close_session(self, owner: str, session_id: str) -> bool:
        return await self._sessions.close_session(owner, session_id)

    def _described(self, listing: SessionListing) -> SessionDescription:
        binding, report = listing.binding, listing.report
        blocks = 0 if report is None else report.kv_blocks
        block_size = next((model.info.block_size for model in self._models.all() if model.info.name == binding.model), 0)
        return SessionDescription(
            id=binding.session,
            worker=binding.worker,
            model=binding.model,
            turns=0 if report is None else report.turns,
            active_turns=0 if report is None else report.active_turns,
            kv_blocks=blocks,
            kv_tokens=blocks * block_size,
            prompt_tokens=0 if report is None else report.prompt_tokens,
            cached_tokens=0 if report is None else report.cached_tokens,
            timeout=binding.timeout,
            expires_in=None if report is None else report.expires_in,
        )
