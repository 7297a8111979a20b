"""What the OpenAI endpoints accept, as types. A field typed `None` is documented by OpenAI and not supported yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

Role = Literal["system", "developer", "user", "assistant"]
PartType = Literal["text"]
FormatType = Literal["text", "json_object", "json_schema"]

CHOICES = {
    "messages.role": get_args(Role),
    "messages.content.type": get_args(PartType),
    "response_format.type": get_args(FormatType),
}
"""What the field with this path may be, for the error message."""

NonNegative = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Text | Annotated[list[Text], Meta(max_length=16)] | None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """What the text must be: exactly one of these. A schema may also come as a string that has it as JSON."""

    json: dict[str, Any] | Text | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Text | None = None


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints have."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: Stop = None
    seed: Seed | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: NonNegative | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None
    # Checked in plan.py, where the error can name the token.
    logit_bias: Annotated[dict[str, Any], Meta(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    # Strings or token ids: told apart, and checked, in completions.py, where the error can name the element.
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: None = None
    best_of: None = None


class ContentPart(Struct, forbid_unknown_fields=True):
    """A part of a message. Only text so far."""

    type: PartType
    text: str


class Message(Struct, forbid_unknown_fields=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: None = None
    audio: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """A schema, which is always kept to, `strict` or not. Name and description are the client's own."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: FormatType
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    tools: None = None
    tool_choice: None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    prediction: None = None
    reasoning_effort: None = None
    verbosity: None = None
    web_search_options: None = None


UNSUPPORTED_COMPLETION = frozenset({"suffix", "best_of"})
UNSUPPORTED_CHAT = frozenset(
    {
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "modalities",
        "store",
        "service_tier",
    }
)
