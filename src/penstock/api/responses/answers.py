"""The answers of /v1/responses and /v1/conversations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ResponseFailure(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class CacheWriteTokensDetails(Struct):
    ttl_30m_tokens: int
    ttl_12h_tokens: int


class InputTokensDetails(Struct, omit_defaults=True):
    cached_tokens: int
    cache_write_tokens: int
    cache_write_tokens_details: CacheWriteTokensDetails | None = None


class ReasoningTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class ResponseObject(Struct, kw_only=True, tag_field="object", tag="response"):
    """A response as it is now. The members after `usage` repeat the request."""

    id: str
    created_at: int
    status: ResponseStatus
    model: str
    output: list[dict[str, Any]]
    completed_at: int | None
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    usage: ResponseUsage | None
    background: bool
    conversation: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    user: str | None
    nvext: dict[str, Any] | UnsetType = UNSET

    @property
    def is_running(self) -> bool:
        return self.status in ("queued", "in_progress")


class ResponseEvent(Struct):
    """One event of a stream, such as `response.output_text.delta`. Its other members depend on its type. Numbers start at 0."""

    type: str
    sequence_number: int


class ResponseTokenCount(Struct, kw_only=True, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


class DeletedResponse(Struct, kw_only=True, tag_field="object", tag="response"):
    id: str
    deleted: bool


class Conversation(Struct, kw_only=True, tag_field="object", tag="conversation"):
    id: str
    created_at: int
    metadata: Mapping[str, str]


class DeletedConversation(Struct, kw_only=True, tag_field="object", tag="conversation.deleted"):
    id: str
    deleted: bool


class ItemList(Struct, kw_only=True, tag_field="object", tag="list"):
    """A page of items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class AnyItem(Struct):
    """One item. Its other members depend on its type."""

    id: str
    type: str
