"""How each server is asked over HTTP and how its answers are read: what all dialects share, and SGLang's `/generate`. Pure.

Every sampling value is sent, also the default ones: servers fill in their own for missing values. Answers with prompt logprobs come whole,
because no server streams those. All others come as events.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import msgspec

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest, PromptImages
from penstock.backends.sglang.requests import ChunkReader, PriorityUse, as_parameters, image_parameters
from penstock.wire.messages import Fault

MAX_MESSAGE_CHARACTERS = 500
# What vLLM, SGLang, llama.cpp and OpenAI say of a prompt that does not fit.
_OVERFLOW = re.compile(
    r"(?i)maximum context length|maximum model length|model's context length|available context size|context window|context_length_exceeded"
)

Body = dict[str, Any]


class Reader(ABC):
    """Reads the answer to one request, event by event. The last chunk is held back for what may come after it."""

    is_over = False
    """The engine has ended the request: there is nothing left to abort."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self._last: Chunk | None = None
        self._cached_tokens: int | None = None

    @property
    def is_finished(self) -> bool:
        """The last chunk was read."""
        return self._last is not None

    @abstractmethod
    def read(self, event: bytes) -> Chunk | None:
        """The new part, except for the last chunk. Raises EngineRefused for an error, and for events that cannot be read without loss."""

    def last(self) -> Chunk:
        """The chunk with the finish. Call it after all events: the number of cached tokens may come after the finish."""
        assert self._last is not None
        return msgspec.structs.replace(self._last, cached_tokens=self._cached_tokens)

    def _hold_last(self, chunk: Chunk) -> Chunk | None:
        if self._last is not None:
            raise lost("the stream continued after its finish")
        if chunk.logprobs is not None and len(chunk.logprobs) != len(chunk.token_ids):
            raise lost(f"the engine sent {len(chunk.logprobs)} logprobs for {len(chunk.token_ids)} tokens")
        self._cached_tokens = self._cached_tokens if chunk.cached_tokens is None else chunk.cached_tokens
        if chunk.finish is not None:
            self._last = chunk
            return None
        return chunk if chunk.token_ids else None


class Dialect(ABC):
    """One route of one server."""

    path: ClassVar[str]
    reads_images: ClassVar[bool] = False

    def image_fields(self, images: PromptImages, urls: Sequence[str]) -> Body:  # noqa: ARG002, for subclasses
        """What the body of a prompt with images has besides, or instead. `urls` are data URLs of its pictures."""
        raise unsupported("images")

    @abstractmethod
    def body(self, request: EngineRequest) -> Body:
        """The body of the POST. Raises EngineRefused for what this route cannot do."""

    @abstractmethod
    def reader(self, request: EngineRequest) -> Reader: ...

    def abort(self, request_id: str) -> tuple[str, Body] | None:  # noqa: ARG002, for subclasses
        """Path and body of a POST that ends a request. None if the server only notices a closed connection."""
        return None


def refused(message: str, status: int) -> EngineRefused:
    """The fault for an error status. It can be retried on another engine if it is not about the request itself: the engine is busy or
    broken, rejects our key, or redirects."""
    text = f"the engine answered {status}: {message[:MAX_MESSAGE_CHARACTERS]}"
    if status == 429:
        return EngineRefused(Fault("queue_full", text, retryable=True))
    if status >= 500 or status < 400 or status in (401, 403):
        return EngineRefused(Fault("engine_failed", text, retryable=True))
    return EngineRefused(Fault("context_length_exceeded" if _OVERFLOW.search(message) else "engine_refused", text))


def lost(message: str) -> EngineRefused:
    """The answer broke off or cannot be read further. What was read is right, and another engine can continue from there."""
    return EngineRefused(Fault("engine_lost", message[:MAX_MESSAGE_CHARACTERS], retryable=True))


def message_in(content: object) -> str:
    """The message in the body of an error, in any format that servers use."""
    for name in ("error", "detail", "message"):
        if isinstance(content, dict) and content.get(name):
            return message_in(content[name])
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)


def unsupported(what: str) -> EngineRefused:
    return EngineRefused(Fault("unsupported", f"the engine behind --engine-url does not support {what}"))


def raise_error(error: object) -> NoReturn:
    """Raises the error of an event. The answer has begun with status 200, so the real status can only be in the error: a number in its
    code, or the type that OpenAI gives every refusal of a request (a Penstock behind this one has names as codes)."""
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code") or fields.get("status_code")
    status = 400 if fields.get("type") == "invalid_request_error" else 500
    raise refused(message_in(error), code if isinstance(code, int) and 400 <= code < 600 else status)


@dataclass(frozen=True)
class SglangTraits:
    """How an SGLang server was started. `is_incremental`: events have only the new tokens."""

    is_incremental: bool
    has_grammar: bool = False
    has_sessions: bool = False
    priority: PriorityUse = "none"


@dataclass(frozen=True)
class SglangDialect(Dialect):
    """SGLang's own route: token ids in, token ids out."""

    path = "/generate"
    reads_images = True
    traits: SglangTraits

    def body(self, request: EngineRequest) -> Body:
        if request.lark is not None and not self.traits.has_grammar:
            raise unsupported("grammars: start SGLang with --grammar-backend llguidance")
        body = as_parameters(request, None, tags_sessions=self.traits.has_sessions, priority=self.traits.priority)
        return body | {"stream": not request.prompt_logprobs}

    def image_fields(self, images: PromptImages, urls: Sequence[str]) -> Body:
        return image_parameters(images, urls)

    def reader(self, request: EngineRequest) -> Reader:
        return _SglangReader(request, self.traits.is_incremental)

    def abort(self, request_id: str) -> tuple[str, Body] | None:
        return "/abort_request", {"rid": request_id}


class _SglangReader(Reader):
    def __init__(self, request: EngineRequest, is_incremental: bool) -> None:
        super().__init__(request)
        # A whole answer is read right in both modes.
        self._chunks = ChunkReader(request, is_incremental=is_incremental)

    def read(self, event: bytes) -> Chunk | None:
        try:
            answer: dict[str, Any] = msgspec.json.decode(event, type=dict)
            if (error := answer.get("error")) is not None:
                raise_error(error)
            self.is_over = answer["meta_info"]["finish_reason"] is not None
            chunk = self._chunks.read(answer)
        except (ValueError, RecursionError, AssertionError, AttributeError, IndexError, KeyError, TypeError) as error:
            raise lost(f"an event of SGLang cannot be read: {type(error).__name__}: {error}") from error
        return self._hold_last(chunk)
