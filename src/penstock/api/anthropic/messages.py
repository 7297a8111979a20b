"""POST /v1/messages and POST /v1/messages/count_tokens: from Anthropic's request to a plan."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from penstock.api.anthropic.answers import TokenCount
from penstock.api.anthropic.conversation import Conversation, unreadable
from penstock.api.anthropic.dialect import MessagesDialect
from penstock.api.anthropic.schema import (
    CHOICES,
    UNSUPPORTED,
    AnyChoice,
    CountRequest,
    MessagesRequest,
    NamedChoice,
    NoChoice,
    Prompted,
    ThinkingAdaptive,
    ThinkingEnabled,
)
from penstock.api.auth.keys import Headers
from penstock.api.openai.schema import CacheControl, Common, Marked, PromptRequest
from penstock.api.pipeline.hints import read_hints, ttl_seconds
from penstock.api.pipeline.plan import Chat, Plan, ToolChoice, encode_prompt, plan_chat, schema_grammar
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.router.affinity import session_key
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt
from penstock.wire.errors import RequestError
from penstock.wire.messages import Grammar

T = TypeVar("T")

_MESSAGES_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountRequest)
BETA_HEADER = b"anthropic-beta"
_INTERLEAVED = b"interleaved-thinking"
MAX_MARKS = 4
# Chat templates know these three efforts.
_TEMPLATE_EFFORT = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


async def parse_messages(incoming: Incoming, context: PromptContext) -> tuple[Plan, MessagesDialect]:
    """Raises RequestError that names the field."""
    request = await _decode(incoming, _MESSAGES_DECODER)
    check_thinking(request, incoming.headers)
    chat = msgspec.structs.replace(await context.read(incoming, read_chat, request), max_tokens=request.max_tokens, clips=True)
    common = read_common(request, chat.marked)
    hints = read_hints(common, incoming.headers)
    plan = await _or_told(chat, plan_chat(common, chat, hints, incoming.tenant, context))
    dialect = MessagesDialect(
        plan,
        shows_thinking=not (isinstance(request.thinking, ThinkingEnabled | ThinkingAdaptive) and request.thinking.display == "omitted"),
        fills_window=request.max_tokens > plan.submits[0].max_tokens,
    )
    return plan, dialect


async def count_message_tokens(incoming: Incoming, context: PromptContext) -> TokenCount:
    """Counts the tokens of a message's prompt: the sum of the three input counts in the message's usage."""
    request = await _decode(incoming, _COUNT_DECODER)
    common = Common(model=request.model, nvext=request.nvext, cache_salt=request.cache_salt)
    hints = read_hints(common, incoming.headers)
    model, session = context.models.find(request.model), hints.session
    # In a session, earlier answers keep the tokens that were generated.
    key = None if session is None else session_key(incoming.tenant.owner, model.info.name, session.id)
    chat = await context.read(incoming, read_chat, request)
    return TokenCount(len(await _or_told(chat, encode_prompt(model, chat, incoming.tenant, context, key, hints.cache_salt))))


async def _or_told(chat: Chat, work: Coroutine[Any, Any, T]) -> T:
    """The result of this work. What is wrong with an image is told in Anthropic's words."""
    try:
        return await work
    except RequestError as error:
        if error.status != 400 or all(error.param != image.field for image in chat.images):
            raise
        raise unreadable(f"{error.param}.image", "image", error.message, error.code) from error


async def _decode(incoming: Incoming, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return await decode_body(incoming.body, decoder, UNSUPPORTED, CHOICES, incoming.turn)
    except RequestError as error:
        if error.param is not None and error.param.startswith("tools["):
            _refuse_hosted(msgspec.json.decode(incoming.body).get("tools"))
        raise


def _refuse_hosted(tools: Any) -> None:
    """Raises RequestError for the first tool that only Anthropic's own servers run."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in CHOICES["tools.type"]:
            field = f"tools[{index}].type"
            message = f"`{field}` is {kind[:80]!r}: this server has no tools of its own; expected a tool with `name` and `input_schema`"
            raise RequestError(message, param=field, code="unsupported_tool")


def read_chat(request: Prompted) -> Chat:
    """Raises RequestError that names the field."""
    conversation = Conversation(request)
    if request.context_management is not None:
        conversation.clear_thinking(request.context_management.edits or ())
    messages, fields = conversation.messages, conversation.fields
    continues = _continues(messages, fields)
    if not messages:
        raise RequestError("`messages` has nothing to answer: expected a user message with content", param="messages")
    check_marks(conversation.marked, request.cache_control)
    tools = conversation.tools
    choice = _tool_choice(request, has_tools=bool(tools.head or tools.later))
    field, grammar = _grammar(request)
    if continues and grammar is not None:
        raise RequestError(
            f"`{field}` needs a user message at the end of `messages`: an assistant message there is the start of the answer", param=field
        )
    prompt = ChatPrompt(
        messages=messages,
        # With the choice `none`, the prompt does not mention the tools.
        tools=[] if choice.mode == "none" else tools.head or list(tools.later.values()),
        arguments=_template_arguments(request),
        begins_answer=not continues,
        continues=continues,
    )
    parallel = not (request.tool_choice is not None and request.tool_choice.disable_parallel_tool_use)
    return Chat(
        prompt=prompt,
        fields=fields,
        images=conversation.images,
        later_tools=list(tools.later.values()) if tools.head else (),
        removed_tools=frozenset(tools.removed),
        tool_choice=choice,
        parallel_calls=parallel,
        grammar=grammar,
        grammar_field=field,
        marked=conversation.marked,
    )


def read_common(request: MessagesRequest, marked: Sequence[Marked] = ()) -> Common:
    """What all requests have in common."""
    return PromptRequest(
        model=request.model,
        stream=request.stream,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        nvext=request.nvext,
        cache_salt=request.cache_salt,
        cache_control=request.cache_control,
        marked=list(marked),
    )


def check_marks(marked: Sequence[Marked], whole: CacheControl | None) -> None:
    """As at Anthropic: there are at most four marks, and none lasts longer than one before it. The mark on the request is the last. Where
    the order of marks with a scope matters is not documented: it is not checked."""
    last = [] if whole is None else [Marked(0, 0, whole, None, "cache_control")]
    marks = [(mark.field, mark.control) for mark in (*marked, *last) if mark.control is not None]
    if len(marks) > MAX_MARKS:
        field = marks[MAX_MARKS][0]
        raise RequestError(f"A maximum of {MAX_MARKS} blocks with cache_control may be provided. Found {len(marks)}.", param=field)
    for (earlier, before), (field, control) in pairwise([mark for mark in marks if mark[1].scope is None]):
        if ttl_seconds(control) > ttl_seconds(before):
            message = (
                f"`{field}.ttl` is {control.ttl!r}: expected at most {before.ttl or '5m'!r}, the ttl of the earlier `{earlier}`. "
                "Blocks come in the order tools, system, messages"
            )
            raise RequestError(message, param=f"{field}.ttl")


def check_thinking(request: MessagesRequest, headers: Headers) -> None:
    """The budget must be below `max_tokens`. With interleaved thinking it may be above: it covers all requests of a turn."""
    thinking = request.thinking
    if not isinstance(thinking, ThinkingEnabled) or thinking.budget_tokens < request.max_tokens:
        return
    if not any(name == BETA_HEADER and _INTERLEAVED in value for name, value in headers):
        field = "thinking.budget_tokens"
        message = f"`{field}` is {thinking.budget_tokens}: expected less than `max_tokens`, which is {request.max_tokens}"
        raise RequestError(message, param=field)


def _continues(messages: list[ChatMessage], fields: list[str]) -> bool:
    """Whether the last message is the beginning of the answer. An empty one is removed."""
    if not messages or messages[-1]["role"] != "assistant":
        return False
    last, field = messages[-1], fields[-1]
    if last.get("tool_calls"):
        raise RequestError(f"`{field}` ends with a tool_use: expected a user message with its tool_result next", param=field)
    if not last["content"]:
        messages.pop()
        fields.pop()
        return False
    if last["content"] != last["content"].rstrip():
        message = (
            f"`{field}.content` ends with whitespace, which is not allowed in a last message of the assistant: the answer continues it"
        )
        raise RequestError(message, param=f"{field}.content")
    return True


def _tool_choice(request: Prompted, has_tools: bool) -> ToolChoice:
    choice = request.tool_choice
    if isinstance(choice, NoChoice):
        return ToolChoice("none")
    if isinstance(choice, AnyChoice | NamedChoice) and not has_tools:
        raise RequestError("`tool_choice` asks for a call, but there are no `tools`", param="tool_choice")
    if isinstance(choice, NamedChoice):
        return ToolChoice("named", choice.name)
    return ToolChoice("required" if isinstance(choice, AnyChoice) else "auto")


def _grammar(request: Prompted) -> tuple[str | None, Grammar | None]:
    configured = None if request.output_config is None else request.output_config.format
    if configured is not None and request.output_format is not None:
        raise RequestError("`output_format` and `output_config.format` cannot be combined", param="output_format")
    wanted = configured or request.output_format
    if wanted is None:
        return None, None
    field = "output_format.schema" if configured is None else "output_config.format.schema"
    return field, schema_grammar(field, wanted.schema)


def _template_arguments(request: Prompted) -> dict[str, Any]:
    """As at Anthropic, a model thinks only when it is asked to."""
    arguments: dict[str, Any] = {"enable_thinking": isinstance(request.thinking, ThinkingEnabled | ThinkingAdaptive)}
    if request.output_config is not None and request.output_config.effort is not None:
        arguments["reasoning_effort"] = _TEMPLATE_EFFORT[request.output_config.effort]
    return arguments
