"""The request types of the OpenAI endpoints. A field of type `None` exists in OpenAI's API and is not supported here."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple, get_args

from msgspec import Meta, Struct, structs

from penstock.config.front_end import MAX_PRIORITY, MIN_PRIORITY
from penstock.media.picture import Detail
from penstock.wire.errors import RequestError

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]
FormatType = Literal["text", "json_object", "json_schema"]
SessionControlAction = Literal["open", "close"]
EphemeralTtl = Literal["5m", "1h"]
BreakpointTtl = Literal["30m", "12h"]
BreakpointMode = Literal["implicit", "explicit"]
Retention = Literal["in_memory", "in-memory", "24h"]
ExtraField = Literal["route", "worker_id", "timing", "routed_experts", "engine_data", "stop_reason"]

ToolType = Literal["function"]
ToolChoiceMode = Literal["none", "auto", "required"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority"]

CHOICES = {
    "messages.role": get_args(Role),
    "messages.tool_calls.type": get_args(ToolType),
    "tools.type": get_args(ToolType),
    "tool_choice": (*get_args(ToolChoiceMode), "or an object that names a function"),
    "tool_choice.type": get_args(ToolType),
    "reasoning_effort": get_args(ReasoningEffort),
    "service_tier": get_args(ServiceTier),
    "messages.content.type": ("text", "image_url"),
    "messages.content.detail": get_args(Detail),
    "messages.content.image_url.detail": get_args(Detail),
    "messages.content.cache_control.type": ("ephemeral",),
    "messages.content.cache_control.ttl": get_args(EphemeralTtl),
    "messages.content.prompt_cache_breakpoint.ttl": get_args(BreakpointTtl),
    "response_format.type": get_args(FormatType),
    "cache_control.type": ("ephemeral",),
    "cache_control.ttl": get_args(EphemeralTtl),
    "prompt_cache_retention": get_args(Retention),
    "prompt_cache_options.mode": get_args(BreakpointMode),
    "prompt_cache_options.ttl": get_args(BreakpointTtl),
    "nvext.session_control.action": get_args(SessionControlAction),
    "nvext.cache_control.type": ("ephemeral",),
    "nvext.extra_fields": get_args(ExtraField),
}
"""The allowed values of the field with this path, for error messages."""

# Larger than any real count, and still exact in other languages and in tensors.
NonNegative = Annotated[int, Meta(ge=0, le=2**53)]
Text = Annotated[str, Meta(min_length=1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Metadata = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)] | None
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
StopText = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = StopText | Annotated[list[StopText], Meta(max_length=MAX_STOPS)] | None
MAX_SECONDS = 86_400
Seconds = Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
MAX_MESSAGES = 16_384
MAX_TOOLS = 1024
MAX_PARTS = 16_384
"""Parts of the content of one message."""
CacheSalt = Annotated[str, Meta(min_length=1, max_length=128)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.:/-]{1,256}$")]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """With `resumable`, every event has an id, and a client that lost its connection can resume with `Last-Event-ID`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None
    resumable: bool | None = None


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """The format of the text: exactly one of these. `json` may also be a schema as a JSON string."""

    json: dict[str, Any] | Text | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Annotated[list[Text], Meta(min_length=1)] | None = None
    grammar: Text | None = None


class CacheControl(Struct, forbid_unknown_fields=True, frozen=True):
    """Anthropic's mark: keep the prompt up to here in the cache. `scope` is ignored."""

    type: Literal["ephemeral"]
    ttl: EphemeralTtl | None = None
    scope: str | None = None


class PromptCacheBreakpoint(Struct, forbid_unknown_fields=True, frozen=True):
    """OpenAI's mark: keep the prompt up to here in the cache."""

    mode: Literal["explicit"]
    ttl: BreakpointTtl | None = None


class Marked(NamedTuple):
    """A mark for the cache behind the first `characters` of the content of a message. `field` has the mark."""

    message: int
    characters: int
    control: CacheControl | None = None
    breakpoint: PromptCacheBreakpoint | None = None
    field: str = ""


class PromptCacheOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """OpenAI's cache options of a request. With `mode` `explicit`, only the marked parts are kept in the cache."""

    mode: BreakpointMode | None = None
    ttl: BreakpointTtl | None = None


class SessionControl(Struct, forbid_unknown_fields=True, frozen=True):
    """The session that a request is a turn of. Without `action` the session continues."""

    # Ids are checked in hints.py, like those in headers.
    session_id: str
    action: SessionControlAction | None = None
    timeout: Seconds | None = None


class NvextCacheControl(Struct, forbid_unknown_fields=True, frozen=True):
    """How long to keep the prompt in the cache. `ttl` is seconds, or a string such as `90s`, `5m` or `1h`."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: Seconds | str | None = None
    retention_seconds: Seconds | None = None


class AgentHints(Struct, forbid_unknown_fields=True, frozen=True):
    """Only `priority` has an effect. Clients of Dynamo send the others; they do not change the answer and are ignored."""

    priority: Annotated[int, Meta(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None
    strict_priority: NonNegative | None = None
    osl: NonNegative | None = None
    speculative_prefill: bool | None = None
    latency_sensitivity: float | None = None
    prefix_id: str | None = None
    total_requests: NonNegative | None = None
    iat: NonNegative | None = None


class Nvext(Struct, forbid_unknown_fields=True, frozen=True):
    """NVIDIA's extension object, as Dynamo documents it, and our `retention_seconds`.

    Members after `cache_salt` are ignored if they only affect routing, speed or extra information. They are errors if they would
    change the answer.
    """

    session_control: SessionControl | None = None
    cache_control: NvextCacheControl | None = None
    retention_seconds: Seconds | None = None
    agent_hints: AgentHints | None = None
    extra_fields: Annotated[list[ExtraField], Meta(max_length=64)] | None = None
    cache_salt: CacheSalt | None = None
    agent_context: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    annotations: Annotated[list[str], Meta(max_length=64)] | None = None
    backend_instance_id: NonNegative | None = None
    prefill_worker_id: NonNegative | None = None
    decode_worker_id: NonNegative | None = None
    dp_rank: NonNegative | None = None
    prefill_dp_rank: NonNegative | None = None
    request_timestamp_ms: float | None = None
    max_thinking_tokens: NonNegative | None = None
    greed_sampling: Literal[False] | None = None
    use_raw_prompt: Literal[False] | None = None
    token_data: None = None


def refused_fields(kind: type[Struct], prefix: str = "") -> frozenset[str]:
    """The fields of type `None`. `prefix` is the path to them."""
    return frozenset(prefix + field.name for field in structs.fields(kind) if field.type is type(None))


UNSUPPORTED_NVEXT = refused_fields(Nvext, "nvext.") | {"nvext.greed_sampling", "nvext.use_raw_prompt"}


class Common(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that chats and completions share."""

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
    metadata: Metadata = None
    service_tier: ServiceTier | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    # Sessions, caching, priority and routing, in all their spellings: read in hints.py.
    nvext: Nvext | None = None
    cache_control: CacheControl | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: Retention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    cache_salt: CacheSalt | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def resumable(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.resumable)


class PromptRequest(Common, kw_only=True):
    """What the requests of other APIs have in common with chats. `marked` has the marks for the cache in their messages."""

    marked: list[Marked] = []


class CompletionRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/completions."""

    # Strings or token ids: checked in completions.py, where the error can name the element.
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None


class MessagePart(Struct, tag_field="type", kw_only=True):
    """A part of a message. Any part can be marked for the cache."""

    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class ContentPart(MessagePart, forbid_unknown_fields=True, tag="text"):
    text: str


class ImageUrl(Struct):
    """Where an image is: a data URL, or the address of a host that the server allows. Members that are not known are ignored."""

    url: str
    detail: Detail | None = None


class ImagePart(MessagePart, tag="image_url"):
    """An image. Some clients send its URL without the object around it."""

    image_url: ImageUrl | str
    detail: Detail | None = None

    @property
    def text(self) -> str:
        raise AssertionError("images are taken out of messages before their text is read")


class InputImagePart(ImagePart, tag="input_image"):
    """An image in the spelling of the Responses API, which some clients use in chats."""


class MediaPart(MessagePart):
    """Neither text nor an image. It is refused in the last message, unless that is a tool's result. Elsewhere a placeholder stands for
    it."""

    @property
    def kind(self) -> str:
        return str(type(self).__struct_config__.tag)

    @property
    def text(self) -> str:
        return placeholder(MEDIA[self.kind])


class AudioPart(MediaPart, tag="input_audio"):
    pass


class AudioUrlPart(MediaPart, tag="audio_url"):
    pass


class VideoPart(MediaPart, tag="video_url"):
    pass


class InputVideoPart(MediaPart, tag="input_video"):
    pass


class FilePart(MediaPart, tag="file"):
    pass


MEDIA = {
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "input_video": "video",
    "file": "file",
    "input_file": "file",
}
"""What a part of this type is, in words."""


def placeholder(kind: str) -> str:
    """What the model reads in place of a part that none reads here, such as audio. Refused, such a part would end an agent's session: it
    stays in its history."""
    return f"[{kind} left out: this model cannot read it]"


def unreadable(field: str, kind: str) -> RequestError:
    """The refusal of a part with this type."""
    field = f"{field}.type"
    what = {"audio": "audio is"}.get(MEDIA[kind], f"{MEDIA[kind]}s are")
    return RequestError(f"`{field}` is {kind}: {what} not supported by this model", param=field, code="unsupported_field")


class AnswerText(MessagePart, tag="text"):
    """A part of an answer that comes back."""

    text: str


class AnswerRefusal(MessagePart, tag="refusal"):
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class FunctionCall(Struct):
    """A function that the assistant called. The arguments are JSON, as the model wrote them."""

    name: str
    arguments: str = "{}"


class MessageToolCall(Struct):
    id: str
    function: FunctionCall
    type: ToolType = "function"


Part = ContentPart | ImagePart | InputImagePart | AudioPart | AudioUrlPart | VideoPart | InputVideoPart | FilePart


class _Message(Struct, tag_field="role", forbid_unknown_fields=True):
    """What messages of all roles share. A mark for the cache may stand at the message as well as at its parts."""

    role: ClassVar[Role]
    content: str | Annotated[list[Part], Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[Any], Meta(max_length=MAX_PARTS)] | None = None
    cache_control: CacheControl | None = None
    function_call: None = None
    audio: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or self.refusal or ""


class SystemMessage(_Message, tag="system"):
    role: ClassVar[Role] = "system"


class DeveloperMessage(_Message, tag="developer"):
    role: ClassVar[Role] = "developer"


class UserMessage(_Message, tag="user"):
    role: ClassVar[Role] = "user"


class ToolMessage(_Message, tag="tool"):
    role: ClassVar[Role] = "tool"


class FunctionMessage(_Message, tag="function"):
    role: ClassVar[Role] = "function"


class AssistantMessage(_Message, tag="assistant", forbid_unknown_fields=False):
    """An answer that comes back. Clients send what they got, and more: members that are not known here, in its parts and in its calls are
    ignored."""

    role: ClassVar[Role] = "assistant"
    # Its parts are of other types, but have the same attributes.
    content: str | Annotated[list[AnswerText | AnswerRefusal], Meta(max_length=MAX_PARTS)] | None = None  # type: ignore[assignment]
    annotations: Any = None


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage | FunctionMessage


class FunctionDefinition(Struct, forbid_unknown_fields=True):
    """`parameters` is the JSON schema of the arguments; without it, there are none. `strict` is ignored: forced calls always follow it."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, forbid_unknown_fields=True):
    type: ToolType
    function: FunctionDefinition
    cache_control: CacheControl | None = None


class NamedFunction(Struct, forbid_unknown_fields=True):
    name: str


class NamedToolChoice(Struct, forbid_unknown_fields=True):
    type: ToolType
    function: NamedFunction


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """The answer always follows the schema, with or without `strict`. `name` and `description` are for the client."""

    name: Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    type: FormatType
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(Common, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: NonNegative | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoiceMode | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # How the chat template is rendered.
    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    chat_template: Text | None = None
    documents: Annotated[list[dict[str, Any]], Meta(max_length=1024)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Accepted because it does not change the answer: a prediction only makes some servers faster.
    prediction: dict[str, Any] | None = None
    safety_identifier: str | None = None
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None
    moderation: None = None
    functions: None = None
    function_call: None = None
    audio: None = None
    web_search_options: None = None


UNSUPPORTED_COMPLETION = UNSUPPORTED_NVEXT
UNSUPPORTED_CHAT = (
    UNSUPPORTED_NVEXT | refused_fields(ChatRequest) | refused_fields(AssistantMessage, "messages.") | {"modalities", "store", "verbosity"}
)
