"""The request types of /v1/responses and /v1/conversations. A field of type `None` exists in OpenAI's API and is not supported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, Struct

from penstock.api.openai.schema import (
    CHOICES,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_TOOLS,
    UNSUPPORTED_NVEXT,
    CacheControl,
    CacheSalt,
    FunctionName,
    ImageUrl,
    Metadata,
    NonNegative,
    Nvext,
    Penalty,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    ReasoningEffort,
    Retention,
    Seed,
    Stop,
    StructuredOutputs,
    refused_fields,
)
from penstock.media.picture import Detail

Role = Literal["user", "assistant", "system", "developer"]
Status = Literal["in_progress", "completed", "incomplete"]
TextPartType = Literal["input_text", "output_text", "text", "refusal"]
OutputPartType = Literal["input_text", "output_text", "text"]
Truncation = Literal["auto", "disabled"]
FormatType = Literal["text", "json_object", "json_schema"]
Summary = Literal["auto", "concise", "detailed"]
Tier = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]
Order = Literal["asc", "desc"]

Id = Annotated[str, Meta(min_length=1, max_length=256)]
# Every event with the Response object repeats it.
UserName = Annotated[str, Meta(max_length=4096)]
MAX_ITEMS = MAX_MESSAGES
MAX_ADDED_ITEMS = 1024
"""Items in one request that adds to a conversation."""

HOSTED_TOOLS = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
"""Tools that OpenAI runs, or that only its models know. Agents send them even if they do not need them."""

RESPONSE_CHOICES = {
    **{path: choices for path, choices in CHOICES.items() if not path.startswith("messages")},
    "text.format.type": get_args(FormatType),
    "reasoning.effort": get_args(ReasoningEffort),
    "reasoning.summary": get_args(Summary),
    "reasoning.generate_summary": get_args(Summary),
    "service_tier": get_args(Tier),
    "truncation": get_args(Truncation),
    "include": get_args(Includable),
}
ITEM_CHOICES = {
    "role": get_args(Role),
    "status": get_args(Status),
    "content.type": (*get_args(TextPartType), "input_image"),
    "output.type": (*get_args(OutputPartType), "input_image"),
    "detail": get_args(Detail),
    "image_url.detail": get_args(Detail),
    "format.type": ("text", "grammar"),
    "format.syntax": ("lark", "regex"),
    "mode": ("auto", "required"),
}
"""The allowed values of the members of one item, tool or choice."""


class TextFormat(Struct, forbid_unknown_fields=True):
    """The answer always follows the schema, with or without `strict`."""

    type: FormatType
    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")] | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningConfig(Struct, forbid_unknown_fields=True):
    """The answer shows the reasoning itself, so a summary is never made."""

    effort: ReasoningEffort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """Nothing here changes the stream. Clients of the chat endpoint also send its options: the last event always has the usage."""

    include_obfuscation: bool | None = None
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ConversationReference(Struct, forbid_unknown_fields=True):
    id: Id


class Asked(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that make the prompt."""

    # Items, tools and tool choices are read one by one, in items.py.
    model: str
    input: str | Annotated[list[dict[str, Any]], Meta(max_length=MAX_ITEMS)] | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    conversation: Id | ConversationReference | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    truncation: Truncation | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    personality: None = None

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationReference) else self.conversation


class ResponseRequest(Asked, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/responses."""

    background: bool | None = None
    include: Annotated[list[Includable], Meta(max_length=64)] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    # It counts only OpenAI's own tools.
    max_tool_calls: NonNegative | None = None
    metadata: Metadata = None
    safety_identifier: UserName | None = None
    # Codex describes itself here.
    client_metadata: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    user: UserName | None = None
    service_tier: Tier | None = None
    nvext: Nvext | None = None
    cache_control: CacheControl | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    cache_salt: CacheSalt | None = None
    # Extensions, as on the other endpoints.
    stop: Stop = None
    seed: Seed | None = None
    top_k: NonNegative | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=2)] | None = None
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, Any], Meta(max_length=1024)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt: None = None
    moderation: None = None
    context_management: None = None
    access_programs: None = None
    image: None = None


UNSUPPORTED_RESPONSE = UNSUPPORTED_NVEXT | refused_fields(ResponseRequest) | {"text.verbosity", "reasoning.context", "reasoning.mode"}


class TextPart(Struct, forbid_unknown_fields=True):
    """A part of a message. Clients send the parts of an answer back; `annotations` and `logprobs` are then ignored."""

    type: TextPartType
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class AnswerPart(TextPart, forbid_unknown_fields=False):
    """A part of an answer that comes back. What clients add to the items of an answer is ignored."""


class OutputPart(Struct, forbid_unknown_fields=True):
    """A part of a tool's output."""

    type: OutputPartType
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ImagePart(Struct, forbid_unknown_fields=True):
    """An image in a message or in a tool's output. `image_url` is a data URL, or the address of a host that the server allows; some clients
    send it in an object, as in chats."""

    type: Literal["input_image"]
    image_url: str | ImageUrl | None = None
    file_id: str | None = None
    detail: Detail | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class _Item(Struct, forbid_unknown_fields=True, kw_only=True):
    id: Id | None = None
    status: Status | None = None


class _CallItem(_Item, kw_only=True):
    call_id: Id
    caller: dict[str, Any] | None = None


class MessageItem(_Item, kw_only=True):
    type: Literal["message"] = "message"
    role: Role
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]
    phase: str | None = None
    end_turn: bool | None = None


class AnswerItem(MessageItem, kw_only=True, forbid_unknown_fields=False):
    content: str | Annotated[list[AnswerPart], Meta(max_length=MAX_PARTS)]  # type: ignore[assignment]


class FunctionCallItem(_CallItem, kw_only=True, forbid_unknown_fields=False):
    type: Literal["function_call"]
    name: Id
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(_CallItem, kw_only=True):
    type: Literal["function_call_output"]
    output: str | Annotated[list[OutputPart], Meta(max_length=MAX_PARTS)]
    name: str | None = None
    namespace: str | None = None


class CustomToolCallItem(_CallItem, kw_only=True, forbid_unknown_fields=False):
    type: Literal["custom_tool_call"]
    name: Id
    input: str
    namespace: str | None = None


class CustomToolCallOutputItem(_CallItem, kw_only=True):
    type: Literal["custom_tool_call_output"]
    output: str | Annotated[list[OutputPart], Meta(max_length=MAX_PARTS)]
    name: str | None = None


class ReasoningPart(Struct):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item, kw_only=True, forbid_unknown_fields=False):
    """`encrypted_content` comes from another server and is ignored."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None


class ItemReference(Struct, forbid_unknown_fields=True):
    id: Id
    type: Literal["item_reference"] | None = None


ITEMS: dict[str, type[Struct]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionCallOutputItem,
    "custom_tool_call": CustomToolCallItem,
    "custom_tool_call_output": CustomToolCallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


class FunctionTool(Struct, forbid_unknown_fields=True):
    """`parameters` is the JSON schema of the arguments; without it, there are none. `strict` is ignored: forced calls always follow it.

    With `defer_loading`, OpenAI's models search for the tool. The models here see it at once.
    """

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    output_schema: dict[str, Any] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    cache_control: CacheControl | None = None


class CustomFormat(Struct, forbid_unknown_fields=True):
    """The format of a custom tool's input. The model sees a grammar but is not forced to follow it."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class CustomTool(Struct, forbid_unknown_fields=True):
    """A tool whose input is any text."""

    type: Literal["custom"]
    name: FunctionName
    description: str | None = None
    format: CustomFormat | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class NamespaceTool(Struct, forbid_unknown_fields=True):
    """Tools under a common name, such as those of an MCP server. The model knows each by both names with `__` between them; a call of it
    has the two apart, as `namespace` and `name`."""

    type: Literal["namespace"]
    name: FunctionName
    # Each is read like a tool outside.
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]
    description: str | None = None


class NamedChoice(Struct, forbid_unknown_fields=True):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedTools(Struct, forbid_unknown_fields=True):
    """The model may call only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)]


class ConversationCreate(Struct, forbid_unknown_fields=True):
    """POST /v1/conversations."""

    items: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ADDED_ITEMS)] | None = None
    metadata: Metadata = None


class ConversationUpdate(Struct, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}."""

    metadata: Metadata


class ConversationItems(Struct, forbid_unknown_fields=True):
    """POST /v1/conversations/{id}/items."""

    items: Annotated[list[dict[str, Any]], Meta(max_length=MAX_ADDED_ITEMS)]
