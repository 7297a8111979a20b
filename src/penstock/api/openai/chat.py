"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec

from penstock.api.openai.schema import (
    UNSUPPORTED_CHAT,
    AssistantMessage,
    ChatRequest,
    ContentPart,
    ImagePart,
    ImageUrl,
    MediaPart,
    Message,
    MessagePart,
    NamedToolChoice,
    Tool,
    unreadable,
)
from penstock.api.pipeline.dialect import ChoiceDelta, OpenAIDialect, token_logprobs
from penstock.api.pipeline.hints import prompt_text, read_hints
from penstock.api.pipeline.json_cost import is_slow
from penstock.api.pipeline.plan import Chat, Plan, ToolChoice, check_names, described_tool, plan_chat, wanted_grammar
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.media.picture import ImageRef
from penstock.text.images import image_mark
from penstock.text.output import CallArguments, CallBegin, CallBroken, Part, Reasoning
from penstock.text.tokenizers.tokenizer import ChatMessage, ChatPrompt, ToolCall
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta

_DECODER = msgspec.json.Decoder(ChatRequest)
NOTHING_MORE = ChoiceDelta(())


async def parse_chat(incoming: Incoming, context: PromptContext) -> tuple[Plan, ChatDialect]:
    request = await decode_body(incoming.body, _DECODER, UNSUPPORTED_CHAT, turn=incoming.turn)
    chat = await context.read(incoming, read_chat, request)
    hints = await context.read(incoming, read_hints, request, incoming.headers)
    plan = await plan_chat(request, chat, hints, incoming.tenant, context)
    return plan, ChatDialect(plan)


class ChatDialect(OpenAIDialect):
    """Renders `chat.completion.chunk` and `chat.completion` objects."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", plan)
        self._has_role = [False] * len(plan.submits)

    def logprobs(self, index: int, delta: Delta, tokens: int) -> object:  # noqa: ARG002
        content = token_logprobs(self._tokenizer.token_bytes, delta, tokens)
        return None if content is None else {"content": content, "refusal": None}

    def event(self, index: int, added: ChoiceDelta) -> bytes:
        parts = added.parts
        if self._has_role[index]:
            if not parts:
                content = b',"delta":{}'
            elif len(parts) == 1 and type(parts[0]) is str:
                content = b',"delta":{"content":' + msgspec.json.encode(parts[0]) + b"}"
            else:
                return self._events(index, _delta(parts), added)
        else:
            # The role comes with the first text: a separate event would be another write.
            self._has_role[index] = True
            return self._events(index, {"role": "assistant", "content": "", **_delta(parts)}, added)
        return self._framed(index, content, added)

    def _events(self, index: int, delta: dict[str, Any], added: ChoiceDelta) -> bytes:
        """One event, or one for each tool call: OpenAI never sends two in one, and some clients read only the first."""
        calls = delta.get("tool_calls", ())
        deltas = [{**delta, "tool_calls": calls[:1]}, *({"tool_calls": [call]} for call in calls[1:])] if len(calls) > 1 else [delta]
        encoded = [b',"delta":' + msgspec.json.encode(each) for each in deltas]
        earlier = [self._framed(index, content, NOTHING_MORE) for content in encoded[:-1]]
        return b"".join([*earlier, self._framed(index, encoded[-1], added)])

    def _content(self, parts: Sequence[Part]) -> dict[str, object]:
        return {"message": {"role": "assistant", "refusal": None, **_message(parts)}}


def _delta(parts: Sequence[Part]) -> dict[str, Any]:
    """Everything new in one delta: text, reasoning, calls."""
    delta = _texts(parts)
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin):
            calls[part.index] = {"index": part.index, **_call(part)}
        elif isinstance(part, CallArguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def _message(parts: Sequence[Part]) -> dict[str, Any]:
    """A whole answer. A broken call is text, not a call."""
    broken = {part.index for part in parts if isinstance(part, CallBroken)}
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        if isinstance(part, CallBegin) and part.index not in broken:
            calls[part.index] = _call(part)
        elif isinstance(part, CallArguments) and part.index in calls:
            calls[part.index]["function"]["arguments"] += part.text
    message = {"content": None if calls else "", **_texts(parts)}
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def _texts(parts: Iterable[Part]) -> dict[str, Any]:
    texts: dict[str, Any] = {}
    for part in parts:
        if isinstance(part, str | CallBroken):
            texts["content"] = texts.get("content", "") + (part if isinstance(part, str) else part.text)
        elif isinstance(part, Reasoning):
            texts["reasoning_content"] = texts.get("reasoning_content", "") + part.text
    return texts


def _call(begin: CallBegin) -> dict[str, Any]:
    call_id = begin.id or f"call_{secrets.token_hex(12)}"
    return {"id": call_id, "type": "function", "function": {"name": begin.name, "arguments": ""}}


def read_chat(request: ChatRequest) -> Chat:
    """Raises RequestError that names the field."""
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if max_tokens == 0:
        raise RequestError("`max_tokens` is 0: expected at least 1", param="max_tokens")
    field, grammar = wanted_grammar(request.structured_outputs, request.response_format)
    images = take_images(request.messages)
    return Chat(
        prompt=_chat_prompt(request),
        images=images,
        fields=[f"messages[{index}]" for index in range(len(request.messages))],
        max_tokens=max_tokens,
        logprobs=_wanted_logprobs(request),
        tool_choice=_tool_choice(request.tool_choice),
        parallel_calls=request.parallel_tool_calls is not False,
        grammar=grammar,
        grammar_field=field,
    )


def take_images(messages: Sequence[Message]) -> list[ImageRef]:
    """Takes the images out of the messages; a mark stays in the place of each. Nothing else then holds their bytes."""
    found: list[ImageRef] = []
    for number, message in enumerate(messages):
        if isinstance(message, AssistantMessage) or not isinstance(message.content, list):
            continue
        # Clients keep a message that was refused in their history, and agents the results of their tools.
        is_old = number < len(messages) - 1 or message.role in ("tool", "function")
        for index, part in enumerate(message.content):
            if isinstance(part, ImagePart):
                marked = ContentPart(text=image_mark(len(found)))
                marked.cache_control, marked.prompt_cache_breakpoint = part.cache_control, part.prompt_cache_breakpoint
                message.content[index] = marked
                found.append(_image(f"messages[{number}].content[{index}]", part, is_old))
    return found


def _image(field: str, part: ImagePart, is_old: bool) -> ImageRef:
    url = part.image_url if isinstance(part.image_url, ImageUrl) else ImageUrl(part.image_url)
    return ImageRef(field, url.url, detail=url.detail or part.detail or "auto", is_old=is_old)


def _chat_prompt(request: ChatRequest) -> ChatPrompt:
    """What the chat template is rendered with, after `take_images`. Raises RequestError when messages or tools contradict each other."""
    continues = bool(request.continue_final_message)
    begins_answer = request.add_generation_prompt if request.add_generation_prompt is not None else not continues
    return ChatPrompt(
        messages=[_for_template(index, message, index == len(request.messages) - 1) for index, message in enumerate(request.messages)],
        # With the choice `none`, the prompt does not mention the tools.
        tools=[] if request.tool_choice == "none" else _tools(request.tools or []),
        documents=request.documents or [],
        arguments=template_arguments(request.chat_template_kwargs, request.reasoning_effort),
        template=request.chat_template,
        begins_answer=begins_answer,
        continues=continues,
    )


def template_arguments(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """The arguments of the chat template. `given` counts more than the effort."""
    of_effort = {} if effort is None else {"reasoning_effort": effort}
    return {**of_effort, **({"enable_thinking": False} if effort == "none" else {}), **(given or {})}


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    functions = [tool.function for tool in tools]
    check_names([function.name for function in functions], "tools[{}].function.name")
    return [described_tool(function.name, function.description, function.parameters) for function in functions]


def _for_template(index: int, message: Message, is_last: bool) -> ChatMessage:
    # Only the last message is refused. Clients keep a refused message in their history: there a placeholder stands for the part.
    if is_last and isinstance(message.content, list) and message.role not in ("tool", "function"):
        _refuse_media(f"messages[{index}].content", message.content)
    rendered = ChatMessage(role=message.role, content=prompt_text(message))
    if message.name is not None:
        rendered["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    if reasoning is not None:
        rendered["reasoning_content"] = reasoning
    if message.tool_calls:
        if message.role != "assistant":
            field = f"messages[{index}].tool_calls"
            raise RequestError(f"`{field}` is only allowed in a message of the role assistant, not {message.role}", param=field)
        rendered["tool_calls"] = [tool_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls]
    if message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    elif message.role == "tool":
        field = f"messages[{index}].tool_call_id"
        raise RequestError(f"`{field}` is required in a message of the role tool", param=field, code="missing_field")
    return rendered


def _refuse_media(field: str, parts: Sequence[MessagePart]) -> None:
    for index, part in enumerate(parts):
        if isinstance(part, MediaPart):
            raise unreadable(f"{field}[{index}]", part.kind)


def tool_call(call_id: str, name: str, arguments: str) -> ToolCall:
    """A call as chat templates expect it: with its arguments as an object, if they are one and can be decoded in time."""
    try:
        decoded = None if is_slow(arguments) else msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        decoded = None
    value: dict[str, Any] | str = decoded if isinstance(decoded, dict) else arguments
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}


def _tool_choice(choice: str | NamedToolChoice | None) -> ToolChoice:
    if isinstance(choice, NamedToolChoice):
        return ToolChoice("named", choice.function.name)
    return ToolChoice() if choice is None else ToolChoice(cast(Any, choice))


def _wanted_logprobs(request: ChatRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise RequestError("`top_logprobs` needs `logprobs` to be true", param="top_logprobs")
    return None
