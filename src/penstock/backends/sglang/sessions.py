"""SGLang's streaming sessions: they hold their KV, take one turn at a time, and only ever grow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.backends.external.engine import EngineRequest


class _Story:
    """What the engine has of one session. `tokens` goes up to the end of its last turn; None where that is not known.

    A session may be open though nobody waited for the answer.
    """

    __slots__ = ("is_busy", "may_be_open", "tokens")

    def __init__(self) -> None:
        self.is_busy = False
        self.may_be_open = False
        self.tokens: tuple[int, ...] | None = None


class Turn:
    """One turn of a session that is the engine's, too. `new` is what the engine is to append to what it has.

    The engine keeps a turn that ended and drops one that was aborted; what it does with one whose end nobody read cannot be told.
    """

    __slots__ = ("_generated", "_story", "_token_ids", "new")

    def __init__(self, story: _Story, token_ids: tuple[int, ...], known: int) -> None:
        story.is_busy = True
        self._story = story
        self._token_ids = token_ids
        self._generated: list[int] = []
        self.new = token_ids[known:]

    def take(self, token_ids: tuple[int, ...], *, is_last: bool) -> None:
        self._generated += token_ids
        if is_last:
            self._story.tokens = (*self._token_ids, *self._generated)

    def end(self) -> None:
        self._story.is_busy = False


class StreamingSessions:
    """Decides which turns are the engine's sessions' own. SGLang refuses a second turn beside the first, and every turn that does not
    go on from the last one: the second runs without the session, and a session whose story has changed, or is not known, begins anew.

    `open_session` returns whether the engine did. `start_id` is the token that begins a text, which SGLang leaves out of what it appends.
    """

    def __init__(
        self,
        open_session: Callable[[str], Awaitable[bool]],
        close_session: Callable[[str], Awaitable[None]],
        start_id: int | None,
    ) -> None:
        self._open = open_session
        self._close = close_session
        self._start_id = start_id
        self._stories: dict[str, _Story] = {}

    async def begin(self, request: EngineRequest) -> Turn | None:
        """The turn, to be ended; None for a request that runs without a session of the engine's."""
        session_id = request.session_id
        # What ends at a token that SGLang is told to ignore is cut here: the engine would have more of it.
        is_cut_here = request.ignore_eos and request.stop_ids
        if session_id is None or request.prompt_logprobs or request.bootstrap is not None or is_cut_here:
            return None
        story = self._stories.setdefault(session_id, _Story())
        if story.is_busy:
            return None
        # Whatever becomes of this turn, the story is known again only when its end was read.
        known, story.tokens = story.tokens, None
        story.is_busy = True
        try:
            if known is None or not self._goes_on(known, request.token_ids):
                known = await self._begin_anew(session_id, story)
        finally:
            story.is_busy = False
        return None if known is None else Turn(story, request.token_ids, len(known))

    async def close_session(self, session_id: str) -> None:
        story = self._stories.pop(session_id, None)
        if story is not None and story.may_be_open:
            await self._close(session_id)

    async def _begin_anew(self, session_id: str, story: _Story) -> tuple[int, ...] | None:
        """What the engine has of it then, which is nothing; None where it opens none."""
        if story.may_be_open:
            await self._close(session_id)
        # Also where this is cancelled before the engine has answered.
        story.may_be_open = True
        story.may_be_open = await self._open(session_id)
        return () if story.may_be_open else None

    def _goes_on(self, known: tuple[int, ...], token_ids: tuple[int, ...]) -> bool:
        count = len(known)
        return len(token_ids) > count and token_ids[:count] == known and token_ids[count] != self._start_id
