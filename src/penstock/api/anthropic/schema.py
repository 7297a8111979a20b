"""The request types of `/v1/messages` and `/v1/messages/count_tokens`. A field of type `None` exists in the API but is not supported."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from msgspec import Meta, Struct

from penstock.api.openai.schema import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_STOPS,
    MAX_TOOLS,
    UNSUPPORTED_NVEXT,
    CacheControl,
    CacheSalt,
    FunctionName,
    NonNegative,
    Nvext,
    StopText,
    Text,
    refused_fields,
)

MAX_BLOCKS = MAX_PARTS
MIN_THINKING_TOKENS = 1024

Role = Literal["user", "assistant", "system"]
Effort = Literal["low", "medium", "high", "xhigh", "max"]
ImageType = Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
SearchTool = Literal["tool_search_tool_regex", "tool_search_tool_regex_20251119", "tool_search_tool_bm25", "tool_search_tool_bm25_20251119"]
Display = Literal["summarized", "omitted", "updates"]
"""How thinking is shown. `summarized` and `updates` both show all of it: there is no other model to shorten it."""

CHOICES: dict[str, tuple[str, ...]] = {
    "messages.role": ("user", "assistant", "system"),
    "messages.content.type": (
        "text",
        "thinking",
        "redacted_thinking",
        "tool_use",
        "tool_result",
        "document",
        "image",
        "tool_addition",
        "tool_removal",
    ),
    "messages.content.content.type": ("text", "document", "image", "tool_reference"),
    "messages.content.tool.type": ("tool_reference", "tool_definition"),
    "messages.content.source.content.type": ("text",),
    "messages.content.source.type": ("text or content in a document", "base64 or url in an image"),
    "messages.content.content.source.type": ("text or content in a document", "base64 or url in an image"),
    "messages.content.source.media_type": get_args(ImageType),
    "messages.content.content.source.media_type": get_args(ImageType),
    "system.type": ("text",),
    "tools.type": ("custom", *get_args(SearchTool)),
    "tool_choice.type": ("auto", "any", "tool", "none"),
    "thinking.type": ("enabled", "adaptive", "disabled"),
    "thinking.display": ("summarized", "omitted", "updates"),
    "output_config.effort": ("low", "medium", "high", "xhigh", "max"),
    "output_config.format.type": ("json_schema",),
    "output_format.type": ("json_schema",),
    "context_management.edits.type": ("clear_thinking_20251015",),
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard", "fast"),
    "messages.clear_at": ("never", "next_user_message"),
}
"""The allowed values of the field with this path, for error messages."""


class Block(Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """A block of a message's content. Any block can be marked for the cache."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text"):
    """Clients may send the `citations` of an answer back; the model does not see them."""

    text: str
    citations: list[Any] | None = None


class AnswerTextBlock(TextBlock, tag="text", forbid_unknown_fields=False):
    """Text of an earlier answer. What clients add to the blocks of an answer is ignored."""


class ThinkingBlock(Block, tag="thinking", forbid_unknown_fields=False):
    """The thinking of an earlier answer. If its text was omitted, the signature has it."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(Block, tag="redacted_thinking", forbid_unknown_fields=False):
    """Encrypted thinking of another server. It is ignored."""

    data: str


class ToolUseBlock(Block, tag="tool_use", forbid_unknown_fields=False):
    """A tool call of the model."""

    id: Text
    name: Text
    input: dict[str, Any]
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class PlainTextSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] = "text/plain"


class ContentSource(Struct, forbid_unknown_fields=True, tag_field="type", tag="content"):
    content: str | Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]


class Base64Source(Struct, tag_field="type", tag="base64"):
    """Not supported: only text can be read."""


class UrlSource(Struct, tag_field="type", tag="url"):
    pass


class FileSource(Struct, tag_field="type", tag="file"):
    pass


Source = PlainTextSource | ContentSource | Base64Source | UrlSource | FileSource


class CitationsConfig(Struct, forbid_unknown_fields=True):
    enabled: bool | None = None


class DocumentBlock(Block, tag="document"):
    """A document. Only text can be read: another one is refused in the user's last message; elsewhere a placeholder stands for it."""

    source: Source
    title: str | None = None
    context: str | None = None
    citations: CitationsConfig | None = None


class ImageData(Struct, forbid_unknown_fields=True, tag_field="type", tag="base64"):
    """What the file is, its bytes say: Anthropic's clients are often wrong about `media_type`."""

    data: str
    media_type: ImageType


class ImageAddress(Struct, forbid_unknown_fields=True, tag_field="type", tag="url"):
    url: str


class ImageFile(Struct, tag_field="type", tag="file"):
    """Not supported: there are no files here."""

    file_id: str = ""


class ImageBlock(Block, tag="image"):
    """An image. A model that reads only text refuses it in the user's last message; elsewhere it gets a note in its place."""

    source: ImageData | ImageAddress | ImageFile


class ToolReferenceBlock(Block, tag="tool_reference"):
    """A tool that the client's search has found. A deferred tool is described here, where it is first named."""

    tool_name: str


class ToolResultBlock(Block, tag="tool_result"):
    """The result of a tool call."""

    tool_use_id: Text
    content: str | Annotated[list[TextBlock | DocumentBlock | ImageBlock | ToolReferenceBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    toolset_name: None = None


class Tool(Struct, forbid_unknown_fields=True):
    """A tool that the client runs. With `defer_loading` it is described where a message first names it, not before all messages.

    `eager_input_streaming` is ignored: every input is streamed. The search for tools that Anthropic's servers run has no `input_schema`. It
    is not needed here: the model sees every tool.
    """

    name: FunctionName
    input_schema: dict[str, Any] | None = None
    type: Literal["custom"] | SearchTool | None = None
    description: str | None = None
    input_examples: Annotated[list[dict[str, Any]], Meta(max_length=64)] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    cache_control: CacheControl | None = None


class NamedTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_reference"):
    name: str


class DefinedTool(Struct, forbid_unknown_fields=True, tag_field="type", tag="tool_definition"):
    definition: Tool


class ToolAdditionBlock(Block, tag="tool_addition"):
    """From here on the model can call this tool: one of `tools`, or a new one."""

    tool: NamedTool | DefinedTool


class ToolRemovalBlock(Block, tag="tool_removal"):
    """From here on the model cannot call this tool."""

    tool: NamedTool


_OtherBlock = (
    ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | DocumentBlock
    | ImageBlock
    | ToolAdditionBlock
    | ToolRemovalBlock
)
ContentBlock = TextBlock | _OtherBlock


class _Message(Struct, forbid_unknown_fields=True, tag_field="role"):
    """One message. A system message may be anywhere; with `clear_at` `next_user_message` it applies until the next user message."""

    role: ClassVar[Role]
    content: str | Annotated[list[ContentBlock], Meta(max_length=MAX_BLOCKS)]
    clear_at: Literal["never", "next_user_message"] | None = None


class UserMessage(_Message, tag="user"):
    role: ClassVar[Role] = "user"


class SystemMessage(_Message, tag="system"):
    role: ClassVar[Role] = "system"


class AssistantMessage(_Message, tag="assistant", forbid_unknown_fields=False):
    """An answer that comes back. Members that are not known are ignored."""

    role: ClassVar[Role] = "assistant"
    content: str | Annotated[list[AnswerTextBlock | _OtherBlock], Meta(max_length=MAX_BLOCKS)]  # type: ignore[assignment]


Message = UserMessage | AssistantMessage | SystemMessage


class Choice(Struct, forbid_unknown_fields=True, tag_field="type", kw_only=True):
    """Which tools the model may or must call."""

    disable_parallel_tool_use: bool | None = None


class AutoChoice(Choice, tag="auto"):
    pass


class AnyChoice(Choice, tag="any"):
    pass


class NamedChoice(Choice, tag="tool"):
    name: str


class NoChoice(Choice, tag="none"):
    pass


class ThinkingEnabled(Struct, forbid_unknown_fields=True, tag_field="type", tag="enabled"):
    """The budget is validated but not enforced: a model may think up to `max_tokens`."""

    budget_tokens: Annotated[int, Meta(ge=MIN_THINKING_TOKENS)]
    display: Display | None = None


class ThinkingAdaptive(Struct, forbid_unknown_fields=True, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(Struct, forbid_unknown_fields=True, tag_field="type", tag="disabled"):
    display: Display | None = None


class OutputFormat(Struct, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]


class OutputConfig(Struct, forbid_unknown_fields=True):
    """`task_budget` is ignored: it is for models that are trained to read it."""

    effort: Effort | None = None
    format: OutputFormat | None = None
    task_budget: dict[str, Any] | None = None


class ThinkingTurns(Struct, forbid_unknown_fields=True, tag_field="type", tag="thinking_turns"):
    value: Annotated[int, Meta(ge=1)]


class AllTurns(Struct, forbid_unknown_fields=True, tag_field="type", tag="all"):
    pass


class ClearThinking(Struct, forbid_unknown_fields=True, tag_field="type", tag="clear_thinking_20251015"):
    """Which thinking of earlier turns stays in the prompt; by default, only the thinking of the last turn."""

    keep: Literal["all"] | ThinkingTurns | AllTurns | None = None


class ContextManagement(Struct, forbid_unknown_fields=True):
    edits: Annotated[list[ClearThinking], Meta(max_length=16)] | None = None


class MessageMetadata(Struct):
    """For the client's own use; ignored."""

    user_id: str | None = None


class Prompted(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that make the prompt, whose tokens can be counted. The fields after `nvext` are ignored."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: AutoChoice | AnyChoice | NamedChoice | NoChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    cache_salt: CacheSalt | None = None
    nvext: Nvext | None = None
    speed: Literal["standard", "fast"] | None = None
    diagnostics: dict[str, Any] | None = None
    # This server's models refuse nothing, so there is nothing to fall back from.
    fallbacks: Any = None
    fallback_credit_token: Any = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    container: None = None
    inference_geo: None = None
    compaction: None = None
    thread: None = None


class CountRequest(Prompted, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages/count_tokens. It accepts every field of POST /v1/messages, so that clients can send the same body."""

    max_tokens: NonNegative | None = None
    metadata: MessageMetadata | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    service_tier: str | None = None


class MessagesRequest(Prompted, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/messages. With `max_tokens` 0 the prompt is computed and nothing is generated."""

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    stop_sequences: Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: NonNegative | None = None
    metadata: MessageMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


UNSUPPORTED = UNSUPPORTED_NVEXT | refused_fields(Prompted) | {"mcp_servers"}
