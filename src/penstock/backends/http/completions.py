"""Routes that answer with token ids: vLLM's own, and OpenAI's completions of vLLM and Penstock. Pure."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from penstock.backends.external.engine import Chunk, EngineRequest, PromptImages
from penstock.backends.external.image_events import image_uuid
from penstock.backends.http.dialects import Body, Dialect, Reader, lost, raise_error, unsupported
from penstock.backends.vllm.requests import check_expanded, sampling_arguments
from penstock.wire.messages import FinishReason, TokenLogprob

# What servers write for the logarithm of zero, which JSON cannot express.
MIN_LOGPROB = -9999.0
# vLLM's default limit on alternatives.
MAX_ALTERNATIVES = 20
# Marks a grammar as Lark for llguidance, so that no other library reads it.
_DIRECTIVE = "%llguidance"
FOR_LLGUIDANCE = f"{_DIRECTIVE} {{}}\n"
ID_MARK = "token_id:"


@dataclass(frozen=True)
class VllmDialect(Dialect):
    """vLLM's token-level route: tokens in, tokens out, no text."""

    path = "/inference/v1/generate"
    reads_images = True
    model: str
    has_grammar: bool = False

    def body(self, request: EngineRequest) -> Body:
        params = sampling_arguments(request) | {"detokenize": False}
        if request.lark is not None:
            params["structured_outputs"] = _structured(request.lark, self.has_grammar, FOR_LLGUIDANCE)
        if request.logprobs:
            # vLLM counts the token itself, so without one more the last alternative would be missing.
            params["logprobs"] = max(request.logprobs, min(request.logprobs + 1, MAX_ALTERNATIVES))
        return {
            "model": self.model,
            "request_id": request.id,
            "token_ids": request.token_ids,
            "sampling_params": params,
            **_streamed(request),
        }

    def image_fields(self, images: PromptImages, urls: Sequence[str]) -> Body:
        """vLLM puts a picture in place of each placeholder, and tells what the prompt has become."""
        named = zip(images.pictures, urls, strict=True)
        parts = [{"type": "image_url", "url": url, "uuid": image_uuid(picture.name)} for picture, url in named]
        return {"token_ids": images.token_ids, "content_parts": parts, "return_token_ids": True}

    def reader(self, request: EngineRequest) -> Reader:
        return _TokensReader(request)

    def abort(self, request_id: str) -> tuple[str, Body] | None:
        return "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}


@dataclass(frozen=True)
class CompletionsDialect(Dialect):
    """`/v1/completions` of a server that sends token ids with its text: vLLM or Penstock. `has_logprob_ids`: also with logprobs.
    `grammar_prefix` is what the server needs before a grammar."""

    path = "/v1/completions"
    model: str
    has_logprob_ids: bool
    has_grammar: bool = False
    grammar_prefix: str = FOR_LLGUIDANCE

    def body(self, request: EngineRequest) -> Body:
        if (request.logprobs is not None or request.prompt_logprobs) and not self.has_logprob_ids:
            raise unsupported("logprobs: the server sends them without token ids")
        params = sampling_arguments(request) | {"return_token_ids": True}
        if request.logprobs is not None:
            params["return_tokens_as_token_ids"] = True
        if request.lark is not None:
            params["structured_outputs"] = _structured(request.lark, self.has_grammar, self.grammar_prefix)
        return {"model": self.model, "prompt": request.token_ids, **params, **_streamed(request)}

    def reader(self, request: EngineRequest) -> Reader:
        return _TokensReader(request)


def _streamed(request: EngineRequest) -> Body:
    """How the answer comes, and what it shares."""
    salt = {} if request.salt is None else {"cache_salt": request.salt}
    if request.prompt_logprobs:
        return {"stream": False, **salt}
    return {"stream": True, "stream_options": {"include_usage": True}, **salt}


def _structured(lark: str, has_grammar: bool, prefix: str) -> Body:
    if not has_grammar:
        raise unsupported("grammars: the server does not use llguidance")
    return {"grammar": lark if lark.startswith(_DIRECTIVE) else prefix + lark}


class _Logprob(Struct):
    logprob: float | None = None
    token_id: int = -1


class _Content(_Logprob):
    top_logprobs: list[_Logprob] = []


class _Logprobs(Struct):
    """Both formats: of the token route, and of completions."""

    content: list[_Content] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class Choice(Struct):
    text: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens_details: _PromptDetails | None = None


class CompletionEvent(Struct):
    """One event or a whole answer of vLLM's token route or of completions."""

    choices: list[Choice] = []
    usage: _Usage | None = None
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(CompletionEvent)


def read_event(event: bytes) -> CompletionEvent:
    """Raises EngineRefused for an event that cannot be read."""
    try:
        return _EVENTS.decode(event)
    except (ValueError, RecursionError) as error:
        raise lost(f"an event cannot be read: {error}") from error


class CompletionReader(Reader):
    """Reads answers in the format of completions, which vLLM's token route shares."""

    def read(self, event: bytes) -> Chunk | None:
        answer = self._decode(event)
        if answer.error is not None:
            raise_error(answer.error)
        details = None if answer.usage is None else answer.usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self._cached_tokens = details.cached_tokens
        if not answer.choices:
            return None
        self.is_over = answer.choices[0].finish_reason is not None
        return self._hold_last(self._chunk(answer, answer.choices[0]))

    def _decode(self, event: bytes) -> CompletionEvent:
        return read_event(event)

    @abstractmethod
    def _chunk(self, answer: CompletionEvent, choice: Choice) -> Chunk: ...


class _TokensReader(CompletionReader):
    _is_checked = False

    def _chunk(self, answer: CompletionEvent, choice: Choice) -> Chunk:
        if choice.token_ids is None and choice.text:
            raise lost("the server sent text without its token ids")
        request = self._request
        if request.images is not None and not self._is_checked:
            self._is_checked = True
            check_expanded(answer, request)
        prompt_logprobs = answer.prompt_logprobs if choice.prompt_logprobs is None else choice.prompt_logprobs
        return Chunk(
            tuple(choice.token_ids or ()),
            None if request.logprobs is None else _read_logprobs(choice.logprobs, request.logprobs),
            finish_of(choice.finish_reason),
            prompt_logprobs=_read_prompt(prompt_logprobs, request) if request.prompt_logprobs else None,
        )


def finish_of(reason: str | None) -> FinishReason | None:
    match reason:
        case None:
            return None
        case "length":
            return "length"
        case "abort" | "error":
            raise lost(f"the engine gave up the generation: its finish_reason is {reason}")
        case _:
            return "stop"


def _read_logprobs(logprobs: _Logprobs | None, count: int) -> tuple[TokenLogprob, ...]:
    if logprobs is None:
        return ()
    if logprobs.content is not None:
        return tuple(
            [_logprob(entry.logprob, {top.token_id: top.logprob for top in entry.top_logprobs}, count) for entry in logprobs.content]
        )
    tops = logprobs.top_logprobs or [None] * len(logprobs.token_logprobs)
    by_id = [{_marked_id(token): value for token, value in (top or {}).items()} for top in tops]
    return tuple([_logprob(logprob, top, count) for logprob, top in zip(logprobs.token_logprobs, by_id, strict=False)])


def _logprob(logprob: float | None, alternatives: Mapping[int, float | None], count: int) -> TokenLogprob:
    """Keeps the `count` most likely alternatives: servers add the token itself if it is not among these."""
    numbers = [(token, _number(value)) for token, value in alternatives.items()]
    return TokenLogprob(_number(logprob), tuple(sorted(numbers, key=lambda entry: -entry[1])[:count]))


def _number(logprob: float | None) -> float:
    return MIN_LOGPROB if logprob is None else logprob


def _marked_id(token: str) -> int:
    try:
        return int(token.removeprefix(ID_MARK))
    except ValueError as error:
        raise lost(f"a logprob has the token {token[:40]!r}: expected a token id") from error


def _read_prompt(entries: Sequence[Mapping[int, _Logprob] | None] | None, request: EngineRequest) -> tuple[TokenLogprob | None, ...]:
    if entries is None or len(entries) != len(request.token_ids):
        raise lost(f"the engine sent {len(entries or ())} prompt logprobs; the prompt has {len(request.token_ids)} tokens")
    read: list[TokenLogprob | None] = []
    for token, entry in zip(request.token_ids, entries, strict=True):
        numbers = {other: entry[other].logprob for other in entry} if entry else {}
        read.append(_logprob(numbers.get(token), numbers, request.logprobs or 0) if numbers else None)
    return tuple(read)
