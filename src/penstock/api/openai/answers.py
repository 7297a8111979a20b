"""The answers of the OpenAI endpoints, and of models, sessions and health checks.

Chats and completions are written by hand for speed. Their types are for the API's document, and tests compare both.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from penstock.wire.messages import Tier

FinishReason = Literal["stop", "length", "tool_calls", "cancelled"]


class ErrorDetails(Struct):
    """`param` names the wrong field. `code` is stable."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Struct):
    error: ErrorDetails


class PromptTokensDetails(Struct):
    """`cached_tokens` were read from the cache. `cache_write_tokens` are kept there now, because the request asked for it."""

    cached_tokens: int
    cache_write_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ChosenTokenLogprob]
    refusal: None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(Struct):
    """`arguments` is JSON, as the model wrote it."""

    name: str
    arguments: str


class AnsweredToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AnsweredMessage(Struct):
    """`content` is null when there are only tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[AnsweredToolCall] | None = None
    reasoning_content: str | None = None


class ChatChoice(Struct):
    index: int
    message: AnsweredMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(Struct, kw_only=True):
    """What chats and completions share. `nvext` has the state of the session and, on request, how the worker was chosen."""

    id: str
    created: int
    model: str
    usage: Usage | None = None
    service_tier: str | None = None
    prompt_token_ids: list[int] | None = None
    nvext: dict[str, Any] | None = None


class ChatCompletion(_Answer, kw_only=True):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class FunctionDelta(Struct):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Struct):
    """More of the call with this index: its id, type and name come first, then its arguments piece by piece."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionDelta | None = None


class ChatDelta(Struct):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None


class ChatCompletionChunk(_Answer, kw_only=True):
    """One event of a stream."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class CompletionChoice(Struct):
    """In a stream, `finish_reason` is null except in the last event."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Completion(_Answer, kw_only=True):
    """A whole answer, or one event of a stream. In a stream only the last event has a usage, on request."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelDetails(Struct):
    """What the workers of a model report."""

    engine: str
    tokenizer: str
    context_length: int
    workers: int
    roles: list[str]
    capabilities: list[str]
    tool_parser: str | None
    reasoning_parser: str | None


class Model(Struct):
    """`input_modalities` has `image` for a model that reads images."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    penstock: ModelDetails
    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class ModelList(Struct):
    object: Literal["list"]
    data: list[Model]


class Session(Struct, kw_only=True, tag_field="object", tag="session"):
    """`hit_rate` is the share of prompt tokens that needed no prefill. `expires_in` is null while a turn is active: the timeout starts when
    the last turn ends. `retained_until` is the same as Unix time, and null if the engine cannot tell what it keeps. `tier` is the slowest
    memory that has a part of the session's KV."""

    id: str
    worker: str
    model: str
    turns: int
    active_turns: int
    kv_blocks: int
    kv_tokens: int
    prompt_tokens: int
    cached_tokens: int
    hit_rate: float
    timeout: float
    expires_in: float | None
    retained_until: int | None
    tier: Tier | None


class SessionList(Struct, kw_only=True, tag_field="object", tag="list"):
    data: list[Session]
    has_more: bool


class DeletedSession(Struct, kw_only=True, tag_field="object", tag="session"):
    id: str
    deleted: bool


class Liveness(Struct):
    status: Literal["live"]


class Readiness(Struct, omit_defaults=True):
    status: str
    models: list[str] | None = None
