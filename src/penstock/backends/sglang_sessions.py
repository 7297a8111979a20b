"""SGLang's streaming sessions: they hold their KV, take one turn at a time, and only ever grow."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from penstock.backends.driver import EngineRequest


class _Story:
    """What the engine has of one session: the tokens up to the end of its last turn that ended well."""

    __slots__ = ("is_busy", "is_open", "tokens")

    def __init__(self) -> None:
        self.is_busy = False
        self.is_open = False
        self.tokens: tuple[int, ...] = ()


class Turn:
    """One turn of a session that is the engine's, too. `new` is what the engine is to append to what it has."""

    __slots__ = ("_generated", "_story", "_token_ids", "new")

    def __init__(self, story: _Story, token_ids: tuple[int, ...]) -> None:
        self._story = story
        self._token_ids = token_ids
        self._generated: list[int] = []
        self.new = token_ids[len(story.tokens) :]

    def take(self, token_ids: tuple[int, ...], *, is_last: bool) -> None:
        """A turn that does not come to its end leaves the story as it was, as the engine does."""
        self._generated += token_ids
        if is_last:
            self._story.tokens = (*self._token_ids, *self._generated)

    def end(self) -> None:
        self._story.is_busy = False


class StreamingSessions:
    """Decides which turns are the engine's sessions' own. SGLang refuses a second turn beside the first, and every turn that does not
    go on from the last one: the second runs without the session, and a session whose story has changed begins anew.

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
        if session_id is None or request.prompt_logprobs or request.bootstrap is not None:
            return None
        story = self._stories.setdefault(session_id, _Story())
        if story.is_busy:
            return None
        story.is_busy = True
        try:
            if story.is_open and not self._goes_on(story, request.token_ids):
                story.is_open, story.tokens = False, ()
                await self._close(session_id)
            if not story.is_open:
                story.is_open = await self._open(session_id)
        finally:
            story.is_busy = story.is_open
        return Turn(story, request.token_ids) if story.is_open else None

    async def close_session(self, session_id: str) -> None:
        story = self._stories.pop(session_id, None)
        if story is not None and story.is_open:
            await self._close(session_id)

    def _goes_on(self, story: _Story, token_ids: tuple[int, ...]) -> bool:
        known = len(story.tokens)
        is_longer = len(token_ids) > known and token_ids[:known] == story.tokens
        return is_longer and (not known or token_ids[known] != self._start_id)
