"""How engines are asked over HTTP, and how their answers are read: what the dialects of all routes have in common. Pure.

Every number that decides about sampling is sent, the default ones, too: servers fill in their own for those that are missing. Answers
with the prompt's logprobs come whole, for no server streams those; all others come as events.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, Protocol

from msgspec import structs

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest
from penstock.wire.messages import Fault

MOST_MESSAGE = 500

Body = dict[str, Any]


class Reader(Protocol):
    """Reads the answer to one request, event by event."""

    is_over: bool
    """The engine makes no more of it: there is nothing left to stop."""

    @property
    def is_finished(self) -> bool:
        """The last chunk is known."""

    def read(self, event: bytes) -> Chunk | None:
        """What this event adds, but for the last chunk. Raises EngineRefused for an error, or for what cannot be read without loss."""

    def last(self) -> Chunk:
        """The chunk with the finish, once all events have been read: what is told of the prompt may come after the finish."""


class Dialect(Protocol):
    """One route of one server."""

    @property
    def path(self) -> str: ...

    def body(self, request: EngineRequest) -> Body:
        """What is posted. Raises EngineRefused for what this route cannot do."""

    def reader(self, request: EngineRequest) -> Reader: ...

    def abort(self, request_id: str) -> tuple[str, Body] | None:
        """What to post, and where, to end a request; None where a closed connection is all that the server understands."""


def refused(message: str, status: int) -> EngineRefused:
    """An engine's no, by the status that it has, or would have. What another engine may do better can be tried again there; so can what is
    no answer to the request: that our key is not taken, or that the server has moved."""
    told = f"the engine answered {status}: {message[:MOST_MESSAGE]}"
    if status == 429:
        return EngineRefused(Fault("queue_full", told, retryable=True))
    if status >= 500 or status < 400 or status in (401, 403):
        return EngineRefused(Fault("engine_failed", told, retryable=True))
    return EngineRefused(Fault("engine_refused", told))


def lost(message: str) -> EngineRefused:
    """The answer broke off, or cannot be read on; what was read of it is right, and another engine can go on from there."""
    return EngineRefused(Fault("engine_lost", message[:MOST_MESSAGE], retryable=True))


def message_in(content: object) -> str:
    """What an error's body says, in any of the shapes that servers have for it."""
    for name in ("error", "detail", "message"):
        if isinstance(content, dict) and content.get(name):
            return message_in(content[name])
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def unsupported(what: str) -> EngineRefused:
    return EngineRefused(Fault("unsupported", f"the engine behind this route cannot do that: {what}"))


def raise_error(error: object) -> NoReturn:
    """Raises what an event says that went wrong. Servers have begun their answer by then, so the status is in its code, if anywhere."""
    code = error.get("code") or error.get("status_code") if isinstance(error, dict) else None
    raise refused(message_in(error), code if isinstance(code, int) and 400 <= code < 600 else 500)


class BaseReader:
    """What the readers of all dialects share: the last chunk waits for what comes after it."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._last: Chunk | None = None
        self._cached_tokens: int | None = None
        self.is_over = False

    @property
    def is_finished(self) -> bool:
        return self._last is not None

    def last(self) -> Chunk:
        assert self._last is not None
        return structs.replace(self._last, cached_tokens=self._cached_tokens)

    def _hold_last(self, chunk: Chunk) -> Chunk | None:
        if self._last is not None:
            raise lost("the stream went on after its finish")
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
            raise lost(f"the engine told {len(chunk.logprobs)} logprobs of {len(chunk.token_ids)} tokens")
        self._cached_tokens = self._cached_tokens if chunk.cached_tokens is None else chunk.cached_tokens
        if chunk.finish is not None:
            self._last = chunk
            return None
        return chunk if chunk.token_ids else None
