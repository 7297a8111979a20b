"""SGLang's streaming sessions: they hold their KV, run one turn at a time, and only grow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from penstock.backends.external.engine import EngineRequest


@dataclass(slots=True)
class _SessionState:
    """What the engine has of one session. `tokens` are all tokens up to the end of the last turn, None if unknown.

    `may_be_open`: the engine was asked to open it, perhaps without an answer yet.
    """

    is_busy: bool = False
    may_be_open: bool = False
    tokens: tuple[int, ...] | None = None


class Turn:
    """One turn that runs in a session of the engine. `new` are the tokens that the engine appends.

    The engine keeps a turn that ended and drops an aborted one. If nobody read the end, it is unknown which.
    """

    __slots__ = ("_generated", "_state", "_token_ids", "new")

    def __init__(self, state: _SessionState, token_ids: tuple[int, ...], known: int) -> None:
        state.is_busy = True
        self._state = state
        self._token_ids = token_ids
        self._generated: list[int] = []
        self.new = token_ids[known:]

    def take(self, token_ids: tuple[int, ...], *, is_last: bool) -> None:
        self._generated += token_ids
        if is_last:
            self._state.tokens = (*self._token_ids, *self._generated)

    def end(self) -> None:
        self._state.is_busy = False


class StreamingSessions:
    """Decides which turns run in a session of the engine. SGLang refuses a turn while another one of the session runs, and a turn that
    does not continue the last one. So a parallel turn runs without the session, and a session is opened again if its tokens changed or are
    unknown.

    `open_session` returns whether the engine opened it. `start_id` is the token that begins a text: SGLang drops it from appended tokens.
    """

    def __init__(
        self, open_session: Callable[[str], Awaitable[bool]], close_session: Callable[[str], Awaitable[None]], start_id: int | None
    ) -> None:
        self._open = open_session
        self._close = close_session
        self._start_id = start_id
        self._sessions: dict[str, _SessionState] = {}

    async def begin(self, request: EngineRequest) -> Turn | None:
        """The turn; the caller ends it. None for a request that runs without a session of the engine."""
        session_id = request.session_id
        # `ChunkReader` ends such a text at a stop token that SGLang ignores, so the engine would have more tokens than we know.
        is_cut_here = request.ignore_eos and request.stop_ids
        if session_id is None or request.prompt_logprobs or request.export or request.source or request.images or is_cut_here:
            return None
        state = self._sessions.setdefault(session_id, _SessionState())
        if state.is_busy:
            return None
        # The tokens are known again only when the end of this turn was read.
        known, state.tokens = state.tokens, None
        state.is_busy = True
        try:
            if known is None or not self._continues(known, request.token_ids):
                known = await self._reopen(session_id, state)
        finally:
            state.is_busy = False
        return None if known is None else Turn(state, request.token_ids, len(known))

    async def close_session(self, session_id: str) -> None:
        state = self._sessions.pop(session_id, None)
        if state is not None and state.may_be_open:
            await self._close(session_id)

    async def _reopen(self, session_id: str, state: _SessionState) -> tuple[int, ...] | None:
        """Opens the session without any tokens. None if the engine refuses."""
        if state.may_be_open:
            await self._close(session_id)
        # Set first: this may be cancelled before the engine answers.
        state.may_be_open = True
        state.may_be_open = await self._open(session_id)
        return () if state.may_be_open else None

    def _continues(self, known: tuple[int, ...], token_ids: tuple[int, ...]) -> bool:
        count = len(known)
        return len(token_ids) > count and token_ids[:count] == known and token_ids[count] != self._start_id
