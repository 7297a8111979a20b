"""The answers of the Anthropic endpoints. Messages are written by hand for speed; their types are for the API's document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class AnthropicErrorDetails(Struct):
    type: str
    message: str


class AnthropicError(Struct):
    type: Literal["error"]
    error: AnthropicErrorDetails
    request_id: str


class AnsweredText(Struct, tag_field="type", tag="text"):
    text: str


class AnsweredThinking(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class AnsweredToolUse(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class CacheCreation(Struct):
    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


class OutputTokensDetails(Struct):
    thinking_tokens: int


class MessageUsage(Struct):
    """Each token of the prompt is counted once: as read from the cache, as written to it, or as input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: str


class AnthropicMessage(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    nvext: dict[str, Any] | None = None


class MessageEvent(Struct):
    """One event of a stream. Its other members depend on its type."""

    type: Literal[
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class AnthropicModel(Struct):
    """`capabilities` has Anthropic's names, each with `supported`."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int
    capabilities: dict[str, dict[str, Any]]


class AnthropicModelList(Struct):
    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class TokenCount(Struct):
    input_tokens: int
