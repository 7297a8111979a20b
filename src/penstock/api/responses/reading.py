"""From the body of a POST to what is to be run, and kept."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from penstock.api.openai.schema import Common, JsonSchemaFormat, ResponseFormat
from penstock.api.pipeline.hints import read_hints
from penstock.api.pipeline.plan import Chat, Plan, count_tokens, plan_chat, wanted_grammar
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.api.responses.answers import ResponseObject
from penstock.api.responses.context import Context, read_context
from penstock.api.responses.dialect import ResponseDialect
from penstock.api.responses.items import Messages, Tools, check_depth, cuts, marked_parts, read_tools
from penstock.api.responses.rows import NewResponse
from penstock.api.responses.schema import RESPONSE_CHOICES, UNSUPPORTED_RESPONSE, Asked, PromptRequest, ResponseRequest, TextFormat
from penstock.api.responses.store import SqliteStore
from penstock.router.policy import Hints, SessionWish
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.wire.errors import RequestError
from penstock.wire.messages import Grammar

LOGPROBS = "message.output_text.logprobs"
_DECODER = msgspec.json.Decoder(ResponseRequest)
_COUNT_DECODER = msgspec.json.Decoder(Asked)
_SHARED = tuple(
    name
    for name in Common.__struct_fields__
    if name in ResponseRequest.__struct_fields__ and name not in ("stream", "stream_options", "service_tier")
)


@dataclass(frozen=True)
class ParsedResponse:
    """One request, read: its plan, how its answer looks, and what is kept of it, if it is."""

    plan: Plan
    dialect: ResponseDialect
    kept: NewResponse | None
    is_stream: bool
    is_background: bool


@dataclass(frozen=True)
class Reader:
    """Reads requests. Without a store nothing is kept, and nothing can be referred to."""

    library: PromptContext
    store: SqliteStore | None

    async def read(self, incoming: Incoming) -> ParsedResponse:
        """Raises RequestError that names the field, its value and what would be right."""
        request = decode_body(incoming.body, _DECODER, UNSUPPORTED_RESPONSE, RESPONSE_CHOICES)
        is_kept = self._is_kept(request)
        context = await read_context(request, incoming.owner, self.store)
        tools = read_tools(request.tools, request.tool_choice)
        response_id = f"resp_{secrets.token_hex(24)}"
        common = _common(request)
        hints = _tied(read_hints(common, incoming.headers), context, response_id if is_kept else None)

        async def plan(chat: Chat) -> Plan:
            return await plan_chat(common, chat, hints, incoming.tenant, self.library)

        made = await _fitted(_chat(request, context, tools), request.truncation == "auto", plan)
        kept = _kept(request, context, response_id, incoming.owner) if is_kept else None
        dialect = ResponseDialect(_response_object(response_id, request, tools, is_kept), made.model.tokenizer.token_bytes, tools.custom)
        return ParsedResponse(made, dialect, kept, bool(request.stream), bool(request.background))

    async def count(self, incoming: Incoming) -> int:
        """How many tokens the prompt of such a request has."""
        asked = decode_body(incoming.body, _COUNT_DECODER, UNSUPPORTED_RESPONSE, RESPONSE_CHOICES)
        context = await read_context(asked, incoming.owner, self.store)
        model = self.library.models.find(asked.model)
        return await count_tokens(model, _base_chat(asked, context, read_tools(asked.tools, asked.tool_choice)), self.library)

    def _is_kept(self, request: ResponseRequest) -> bool:
        if request.stream_options is not None and not request.stream:
            raise RequestError("`stream_options` needs `stream` to be true", param="stream_options")
        if self.store is None and request.store:
            message = "`store` is true: this server does not store responses (--response-store none)"
            raise RequestError(message, param="store", code="unsupported_field")
        is_kept = self.store is not None and request.store is not False
        if request.background and not is_kept:
            message = "`background` needs `store` to be true and a server that stores responses"
            raise RequestError(message, param="background")
        return is_kept


def _common(request: ResponseRequest) -> PromptRequest:
    shared = {name: getattr(request, name) for name in _SHARED}
    # What runs in the background is made as a stream, whoever may come to read it.
    return PromptRequest(**shared, stream=bool(request.stream or request.background), marked=marked_parts(request.input))


def _tied(hints: Hints, context: Context, kept_id: str | None) -> Hints:
    """The request as a turn of the session that its chain or its conversation is, unless the client names another."""
    session = hints.session
    if session is None and context.session is not None:
        session = SessionWish(context.session)
    affinity = hints.affinity if hints.affinity is not None else context.root or kept_id
    return msgspec.structs.replace(hints, session=session, affinity=affinity)


def _kept(request: ResponseRequest, context: Context, response_id: str, owner: str) -> NewResponse:
    return NewResponse(
        id=response_id,
        owner=owner,
        root=context.root or response_id,
        input=context.input,
        previous=request.previous_response_id,
        conversation=request.conversation_id,
        is_background=bool(request.background),
    )


async def _fitted(chat: Chat, may_drop: bool, plan: Callable[[Chat], Awaitable[Plan]]) -> Plan:
    """The plan of the chat; if it may, without as many of its oldest messages as do not fit."""
    whole = await _planned(chat, plan, must_fit=not may_drop)
    if whole is not None:
        return whole
    left_out = cuts(chat.prompt.messages, chat.fields)
    fitting: Plan | None = None
    low, high = 0, len(left_out)
    while low < high:
        middle = (low + high) // 2
        tried = await _planned(_without(chat, left_out[middle]), plan, must_fit=False)
        if tried is None:
            low = middle + 1
        else:
            fitting, high = tried, middle
    return fitting or await plan(chat)


def _without(chat: Chat, left_out: slice) -> Chat:
    messages, fields = list(chat.prompt.messages), list(chat.fields)
    del messages[left_out], fields[left_out]
    return structs.replace(chat, prompt=replace(chat.prompt, messages=messages), fields=fields)


async def _planned(chat: Chat, plan: Callable[[Chat], Awaitable[Plan]], must_fit: bool) -> Plan | None:
    """None where it does not fit, unless it must."""
    try:
        return await plan(chat)
    except RequestError as error:
        if must_fit or error.code != "context_length_exceeded":
            raise
        return None


def _chat(request: ResponseRequest, context: Context, tools: Tools) -> Chat:
    field, grammar = _grammar(request)
    return structs.replace(
        _base_chat(request, context, tools),
        max_tokens=request.max_output_tokens,
        logprobs=(request.top_logprobs or 0) if request.top_logprobs or LOGPROBS in (request.include or ()) else None,
        tool_choice=tools.choice,
        parallel_calls=request.parallel_tool_calls is not False,
        grammar=grammar,
        grammar_field=field,
    )


def _base_chat(asked: Asked, context: Context, tools: Tools) -> Chat:
    chat = Messages(asked.instructions)
    chat.add(context.items, context.fields)
    if not chat.messages:
        raise RequestError(
            "`input` has nothing to answer: expected a text, or at least one item with one", param="input", code="empty_prompt"
        )
    arguments = dict(asked.chat_template_kwargs or {})
    effort = None if asked.reasoning is None else asked.reasoning.effort
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
        if effort == "none":
            arguments.setdefault("enable_thinking", False)
    prompt = ChatPrompt(messages=chat.messages, tools=tools.offered, arguments=arguments)
    return Chat(prompt=prompt, fields=chat.fields)


def _grammar(request: ResponseRequest) -> tuple[str | None, Grammar | None]:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type == "text":
        return wanted_grammar(request.structured_outputs, None)
    if request.structured_outputs is not None:
        raise RequestError("`structured_outputs` and `text.format` exclude each other", param="structured_outputs")
    _, grammar = wanted_grammar(None, _response_format(wanted))
    return "text.format", grammar


def _response_format(wanted: TextFormat) -> ResponseFormat:
    """The same format as the chat endpoint has it."""
    if wanted.type != "json_schema":
        if wanted.schema is not None:
            raise RequestError("`text.format.schema` needs `text.format.type` json_schema", param="text.format.schema")
        return ResponseFormat(wanted.type)
    for name in ("name", "schema"):
        if getattr(wanted, name) is None:
            raise RequestError(f"`text.format.{name}` is required with json_schema", param=f"text.format.{name}", code="missing_field")
    check_depth("text.format.schema", wanted.schema)
    return ResponseFormat("json_schema", JsonSchemaFormat(wanted.name or "", wanted.schema or {}))


def _response_object(response_id: str, request: ResponseRequest, tools: Tools, is_kept: bool) -> ResponseObject:
    """The Response object before anything is generated. It repeats the request, with the defaults that apply."""
    reasoning, text = request.reasoning, request.text
    wanted = None if text is None else text.format
    shown_format = {"type": "text"} if wanted is None else {k: v for k, v in msgspec.to_builtins(wanted).items() if v is not None}
    conversation = request.conversation_id
    summary = None if reasoning is None else reasoning.summary or reasoning.generate_summary
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        background=bool(request.background),
        conversation=None if conversation is None else {"id": conversation},
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=request.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_retention=request.prompt_cache_retention,
        reasoning={"effort": None if reasoning is None else reasoning.effort, "summary": summary},
        safety_identifier=request.safety_identifier,
        store=is_kept,
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": shown_format, "verbosity": "medium"},
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=tools.shown,
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
    )
