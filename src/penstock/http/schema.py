"""What the OpenAI endpoints accept, as types. A field typed `None` is documented by OpenAI and not supported yet."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

Role = Literal["system", "developer", "user", "assistant"]
PartType = Literal["text"]

CHOICES = {"role": get_args(Role), "type": get_args(PartType)}
"""What a field of this name may be, for the error message."""

NonNegative = Annotated[int, Meta(ge=0)]
Text = Annotated[str, Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Text | Annotated[list[Text], Meta(max_length=16)] | None


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


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
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    max_tokens: NonNegative | None = None
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None
    logit_bias: None = None
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


class TextFormat(Struct, forbid_unknown_fields=True):
    type: Literal["text"]


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: TextFormat | None = None
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


UNSUPPORTED_COMPLETION = frozenset({"suffix", "best_of", "logit_bias"})
UNSUPPORTED_CHAT = frozenset(
    {
        "logit_bias",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "audio",
        "prediction",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
        "response_format",
        "modalities",
        "store",
        "service_tier",
    }
)
