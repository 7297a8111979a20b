"""vLLM's two routes, and the completions of all that speak OpenAI's language. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from penstock.backends.external.engine import Chunk, EngineRefused, EngineRequest
from penstock.backends.http.dialects import BaseReader, Body, Reader, lost, raise_error, unsupported
from penstock.backends.http.text import TextTokens, Unwritable
from penstock.backends.vllm.requests import sampling_arguments
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.messages import Fault, FinishReason, TokenLogprob

# What servers write for a probability of zero, which JSON has no number for.
LEAST_LOGPROB = -9999.0
# vLLM's limit on alternatives, unless it was started with another.
MOST_ALTERNATIVES = 20
# Lark for llguidance and nothing else: so no other library tries its hand at a grammar that was written for that one.
_DIRECTIVE = "%llguidance"
FOR_LLGUIDANCE = f"{_DIRECTIVE} {{}}\n"
ID_MARK = "token_id:"


class VllmDialect:
    """vLLM's token-level route: tokens in, tokens out, no text at all."""

    path = "/inference/v1/generate"

    def __init__(self, model: str, has_grammar: bool = False) -> None:
        self._model = model
        self._has_grammar = has_grammar

    def body(self, request: EngineRequest) -> Body:
        params = _common(request) | {"detokenize": False}
        if request.lark is not None:
            params["structured_outputs"] = _structured(request.lark, self._has_grammar, FOR_LLGUIDANCE)
        if request.logprobs:
            # The token itself takes one of the places, so that of the likeliest ones the last would be missing.
            params["logprobs"] = max(request.logprobs, min(request.logprobs + 1, MOST_ALTERNATIVES))
        return {
            "model": self._model,
            "request_id": request.id,
            "token_ids": request.token_ids,
            "sampling_params": params,
            **_streamed(request),
        }

    def reader(self, request: EngineRequest) -> Reader:
        return _TokensReader(request)

    def abort(self, request_id: str) -> tuple[str, Body] | None:
        return "/inference/v1/abort_requests", {"request_ids": [f"generate-tokens-{request_id}"]}


class CompletionsDialect:
    """`/v1/completions` of a server that tells the tokens of its text: vLLM, or Penstock. `tells_ids`: logprobs, too, have token ids.
    `grammar_prefix` is what the server needs before a grammar."""

    path = "/v1/completions"

    def __init__(self, model: str, tells_ids: bool, has_grammar: bool = False, grammar_prefix: str = FOR_LLGUIDANCE) -> None:
        self._model = model
        self._tells_ids = tells_ids
        self._has_grammar = has_grammar
        self._grammar_prefix = grammar_prefix

    def body(self, request: EngineRequest) -> Body:
        if (request.logprobs is not None or request.prompt_logprobs) and not self._tells_ids:
            raise unsupported("logprobs: the server tells no token ids with them")
        params = _common(request) | {"return_token_ids": True}
        if request.logprobs is not None:
            params["return_tokens_as_token_ids"] = True
        if request.lark is not None:
            params["structured_outputs"] = _structured(request.lark, self._has_grammar, self._grammar_prefix)
        return {"model": self._model, "prompt": request.token_ids, **params, **_streamed(request)}

    def reader(self, request: EngineRequest) -> Reader:
        return _TokensReader(request)

    def abort(self, request_id: str) -> tuple[str, Body] | None:  # noqa: ARG002
        return None


class TextDialect:
    """`/v1/completions` of any server: text comes back, and is made tokens again.

    Beyond what OpenAI's API has, a field is sent only where the request needs it: strict servers refuse those that they do not know.
    """

    path = "/v1/completions"

    def __init__(self, model: str, tokenizer: Tokenizer, of_bytes: Mapping[int, int]) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._of_bytes = of_bytes

    def body(self, request: EngineRequest) -> Body:
        _check_text_can(request)
        sampling = request.sampling
        body: Body = {
            "model": self._model,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stream": True,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        if request.logit_bias:
            body["logit_bias"] = _biases(request)
        if sampling.repetition_penalty != 1.0:
            body["repetition_penalty"] = sampling.repetition_penalty
        own: Body = {
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "min_tokens": request.min_tokens,
            "ignore_eos": request.ignore_eos,
            "stop_token_ids": request.stop_ids,
        }
        return body | {name: value for name, value in own.items() if value}

    def reader(self, request: EngineRequest) -> Reader:
        return _TextReader(request, TextTokens(self._tokenizer, self._of_bytes), self._tokenizer.end_id)

    def abort(self, request_id: str) -> tuple[str, Body] | None:  # noqa: ARG002
        return None


def _common(request: EngineRequest) -> Body:
    """What both of vLLM's routes call the same."""
    if request.bootstrap is not None:
        raise unsupported("prefill and decode apart from each other")
    return sampling_arguments(request)


def _biases(request: EngineRequest) -> Body:
    return {str(token): bias for token, bias in request.logit_bias}


def _streamed(request: EngineRequest) -> Body:
    if request.prompt_logprobs:
        return {"stream": False}
    return {"stream": True, "stream_options": {"include_usage": True}}


def _structured(lark: str, has_grammar: bool, prefix: str) -> Body:
    if not has_grammar:
        raise unsupported("a grammar: the server is not known to follow those of llguidance")
    return {"grammar": lark if lark.startswith(_DIRECTIVE) else prefix + lark}


def _check_text_can(request: EngineRequest) -> None:
    for is_wanted, what in (
        (request.logprobs is not None, "logprobs"),
        (request.prompt_logprobs, "logprobs of the prompt"),
        (request.lark is not None, "a grammar"),
        (request.bootstrap is not None, "prefill and decode apart from each other"),
    ):
        if is_wanted:
            raise unsupported(f"{what}: it gives text only")


class _Logprob(Struct):
    logprob: float | None = None
    token_id: int = -1


class _Content(_Logprob):
    top_logprobs: list[_Logprob] = []


class _Logprobs(Struct):
    """Both shapes: that of the token route, and that of completions."""

    content: list[_Content] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float | None] | None] | None = None


class _Choice(Struct):
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
    """One event, or the whole answer, of vLLM's token route or of completions."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_logprobs: list[dict[int, _Logprob] | None] | None = None
    error: Any = None


_EVENTS = msgspec.json.Decoder(CompletionEvent)


def read_event(event: bytes) -> CompletionEvent:
    """Raises EngineRefused for what cannot be read."""
    try:
        return _EVENTS.decode(event)
    except (ValueError, RecursionError) as error:
        raise lost(f"an event cannot be read: {error}") from error


def _read_leniently(event: bytes) -> CompletionEvent:
    """Servers that count in UTF-16 may cut a character in two, and write its halves, which strict JSON does not have."""
    try:
        return read_event(event)
    except EngineRefused:
        try:
            return msgspec.convert(json.loads(event), CompletionEvent)
        except (ValueError, RecursionError):
            # It is wrong in another way, which the first attempt has told.
            pass
        raise


class _TokensReader(BaseReader):
    """Reads vLLM's token route, and completions with token ids."""

    def read(self, event: bytes) -> Chunk | None:
        told = read_event(event)
        if told.error is not None:
            raise_error(told.error)
        self._cached_tokens = _cached(told, self._cached_tokens)
        if not told.choices:
            return None
        choice, request = told.choices[0], self._request
        self.is_over = choice.finish_reason is not None
        if choice.token_ids is None and choice.text:
            raise lost("the server sent text without its tokens")
        prompt_logprobs = told.prompt_logprobs if choice.prompt_logprobs is None else choice.prompt_logprobs
        return self._hold_last(
            Chunk(
                tuple(choice.token_ids or ()),
                None if request.logprobs is None else _read_logprobs(choice.logprobs, request.logprobs),
                _finish(choice.finish_reason),
                prompt_logprobs=_read_prompt(prompt_logprobs, request) if request.prompt_logprobs else None,
            )
        )


class _TextReader(BaseReader):
    def __init__(self, request: EngineRequest, tokens: TextTokens, end_id: int) -> None:
        super().__init__(request)
        self._tokens = tokens
        self._end_id = end_id

    def read(self, event: bytes) -> Chunk | None:
        told = _read_leniently(event)
        if told.error is not None:
            raise_error(told.error)
        self._cached_tokens = _cached(told, self._cached_tokens)
        if not told.choices:
            return None
        choice = told.choices[0]
        self.is_over = choice.finish_reason is not None
        finish = _finish(choice.finish_reason)
        token_ids = self._written(choice.text or "", is_last=finish is not None)
        # The token that ended the text has no text of its own.
        return self._hold_last(Chunk((*token_ids, self._end_id) if finish == "stop" else token_ids, None, finish))

    def _written(self, text: str, is_last: bool) -> tuple[int, ...]:
        try:
            token_ids = self._tokens.feed(text)
            return token_ids + self._tokens.finish() if is_last else token_ids
        except Unwritable as error:
            raise EngineRefused(Fault("engine_failed", str(error))) from error


def _cached(told: CompletionEvent, before: int | None) -> int | None:
    details = None if told.usage is None else told.usage.prompt_tokens_details
    return before if details is None or details.cached_tokens is None else details.cached_tokens


def _finish(reason: str | None) -> FinishReason | None:
    match reason:
        case None:
            return None
        case "length":
            return "length"
        case "abort" | "error":
            raise lost(f"the engine gave the generation up: its finish_reason is {reason}")
        case _:
            return "stop"


def _read_logprobs(told: _Logprobs | None, count: int) -> tuple[TokenLogprob, ...]:
    if told is None:
        return ()
    if told.content is not None:
        return tuple([_logprob(entry.logprob, {top.token_id: top.logprob for top in entry.top_logprobs}, count) for entry in told.content])
    tops = told.top_logprobs or [None] * len(told.token_logprobs)
    return tuple(
        [
            _logprob(logprob, {_marked_id(token): value for token, value in (top or {}).items()}, count)
            for logprob, top in zip(told.token_logprobs, tops, strict=False)
        ]
    )


def _logprob(logprob: float | None, alternatives: Mapping[int, float | None], count: int) -> TokenLogprob:
    """Of the alternatives the likeliest: servers add the token itself where it is not among these."""
    numbers = [(token, _number(value)) for token, value in alternatives.items()]
    return TokenLogprob(_number(logprob), tuple(sorted(numbers, key=lambda entry: -entry[1])[:count]))


def _number(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None else logprob


def _marked_id(token: str) -> int:
    try:
        return int(token.removeprefix(ID_MARK))
    except ValueError as error:
        raise lost(f"a logprob is told of {token[:40]!r}: expected a token's id") from error


def _read_prompt(told: Sequence[Mapping[int, _Logprob] | None] | None, request: EngineRequest) -> tuple[TokenLogprob | None, ...]:
    if told is None or len(told) != len(request.token_ids):
        raise lost(f"the engine told logprobs of {len(told or ())} tokens; the prompt has {len(request.token_ids)}")
    read: list[TokenLogprob | None] = []
    for token, entry in zip(request.token_ids, told, strict=True):
        numbers = {other: entry[other].logprob for other in entry} if entry else {}
        read.append(_logprob(numbers.get(token), numbers, request.logprobs or 0) if numbers else None)
    return tuple(read)
