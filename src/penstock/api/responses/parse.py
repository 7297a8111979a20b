"""Parses POST /v1/responses: from the body, and what was said before, to a plan."""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from penstock.api.openai.chat import template_arguments
from penstock.api.openai.schema import Common, JsonSchemaFormat, Marked, PromptRequest, ResponseFormat
from penstock.api.pipeline.hints import read_hints
from penstock.api.pipeline.images import TOO_MANY
from penstock.api.pipeline.plan import Chat, Plan, encode_prompt, plan_chat, wanted_grammar
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.api.responses.answers import ResponseObject
from penstock.api.responses.dialect import TOO_LONG, ResponseDialect
from penstock.api.responses.items import FILE, Item, Messages, check_depth, check_outputs, cuts, images_of, read_items
from penstock.api.responses.rows import NewResponse
from penstock.api.responses.schema import (
    MAX_ITEMS,
    RESPONSE_CHOICES,
    UNSUPPORTED_RESPONSE,
    Asked,
    ResponseRequest,
    TextFormat,
)
from penstock.api.responses.store import SqliteStore
from penstock.api.responses.tools import Tools, read_tools
from penstock.media.picture import ImageRef
from penstock.router.policy import Hints, SessionWish
from penstock.text.encoding import Encoder
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.text.transcript import Memo
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


MAX_FETCHED_BYTES = 32 * 2**20
"""Of images that a response is stored with. It is as much as a request may have itself, by default."""

Read = Callable[..., Awaitable[Any]]
"""Calls a function that reads a part of the request: at once, or in a thread if the request or its history is long."""


@dataclass(frozen=True)
class ParsedResponse:
    """A parsed request: what to run, how to render it, and what to store, if anything."""

    plan: Plan
    dialect: ResponseDialect
    kept: NewResponse | None
    is_stream: bool
    is_background: bool


@dataclass(frozen=True)
class TooLong:
    """A request for a stream whose prompt does not fit the model's context. The stream itself says so."""

    dialect: ResponseDialect
    error: RequestError


@dataclass(frozen=True)
class ResponseParser:
    """Parses requests. Without a store nothing is stored, and no request can continue another."""

    prompts: PromptContext
    store: SqliteStore | None

    async def parse(self, incoming: Incoming) -> ParsedResponse | TooLong:
        """Raises RequestError that names the field, its value and what is expected."""
        request = await decode_body(incoming.body, _DECODER, UNSUPPORTED_RESPONSE, RESPONSE_CHOICES, turn=incoming.turn)
        is_kept = self._is_kept(request)
        context, read = await read_context(request, incoming, self.store, self.prompts.transcripts.encoder)
        tools = await read(read_tools, request.tools, request.tool_choice)
        response_id = f"resp_{secrets.token_hex(24)}"
        chat = await read(_chat, request, context, tools)
        common = _common(request, chat.marked)
        hints = _tied(read_hints(common, incoming.headers), context, response_id if is_kept else None)
        if is_kept and await self._fetch(request, context, incoming, read):
            chat = await read(_chat, request, context, tools)
        memo: Memo | None = {} if request.truncation == "auto" else None

        async def plan(chat: Chat, is_trial: bool) -> Plan:
            return await plan_chat(common, chat, hints, incoming.tenant, self.prompts, memo, is_trial)

        token_bytes = self.prompts.models.find(request.model).tokenizer.token_bytes
        dialect = ResponseDialect(_response_object(response_id, request, tools, is_kept), token_bytes, tools.called)
        try:
            made = await _fitted(chat, request.truncation == "auto", plan)
        except RequestError as error:
            if error.code != TOO_LONG or not request.stream:
                raise
            return TooLong(dialect, error)
        kept = _kept(request, context, response_id, incoming.owner) if is_kept else None
        return ParsedResponse(made, dialect, kept, bool(request.stream), bool(request.background))

    async def count(self, incoming: Incoming) -> int:
        """The number of tokens of the prompt."""
        asked = await decode_body(incoming.body, _COUNT_DECODER, UNSUPPORTED_RESPONSE, RESPONSE_CHOICES, turn=incoming.turn)
        context, read = await read_context(asked, incoming, self.store, self.prompts.transcripts.encoder)
        model = self.prompts.models.find(asked.model)
        tools = await read(read_tools, asked.tools, asked.tool_choice)
        return len(await encode_prompt(model, await read(_base_chat, asked, context, tools), incoming.tenant, self.prompts))

    async def _fetch(self, request: ResponseRequest, context: Context, incoming: Incoming, read: Read) -> bool:
        """Puts the files of images that are on other servers into the items, which are stored with them: by the next turn such a server may
        have another picture there, or none. Returns whether there are any."""
        media, tenant = self.prompts.media, incoming.tenant
        if media is None or self.prompts.models.find(request.model).info.images is None:
            return False
        # Of more images, truncation drops the oldest, whatever their files are.
        refs, remote = await read(_remote_images, context.input, media.max_images if request.truncation == "auto" else None)
        if not remote:
            return False
        media.check_number(refs)
        files = await media.fetch([ref for _, ref in remote], tenant.lane, tenant.weight, _check_fetched)
        await incoming.take(sum(map(len, files.values())))
        for image, ref in remote:
            image[FILE] = files[ref.url]
        return True

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


def _common(request: ResponseRequest, marked: Sequence[Marked]) -> PromptRequest:
    shared = {name: getattr(request, name) for name in _SHARED}
    # A background response runs as a stream, because a reader may come later.
    return PromptRequest(**shared, stream=bool(request.stream or request.background), marked=list(marked))


def _tied(hints: Hints, context: Context, kept_id: str | None) -> Hints:
    """Makes the request a turn of its chain's or conversation's session, unless the client names another one."""
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


async def _fitted(chat: Chat, may_drop: bool, plan: Callable[[Chat, bool], Awaitable[Plan]]) -> Plan:
    """The plan of the chat. With `may_drop`, as many of its oldest messages are dropped as necessary."""
    if not may_drop:
        return await plan(chat, False)
    whole = await _planned(chat, plan, is_trial=False)
    if whole is not None:
        return whole
    left_out = cuts(chat.prompt.messages)
    low, high = 0, len(left_out)
    while low < high:
        middle = (low + high) // 2
        if await _planned(_without(chat, left_out[middle]), plan, is_trial=True) is None:
            low = middle + 1
        else:
            high = middle
    # In a session, answers keep the tokens that were generated: these can be a few more than in the trial.
    for cut in left_out[low:]:
        fitting = await _planned(_without(chat, cut), plan, is_trial=False)
        if fitting is not None:
            return fitting
    return await plan(chat, False)


def _without(chat: Chat, left_out: slice) -> Chat:
    messages, fields = list(chat.prompt.messages), list(chat.fields)
    del messages[left_out], fields[left_out]
    return structs.replace(chat, prompt=structs.replace(chat.prompt, messages=messages), fields=fields, left_out=left_out)


async def _planned(chat: Chat, plan: Callable[[Chat, bool], Awaitable[Plan]], is_trial: bool) -> Plan | None:
    """None when the chat is too long, or has too many images."""
    try:
        return await plan(chat, is_trial)
    except RequestError as error:
        if error.code not in (TOO_LONG, TOO_MANY):
            raise
        return None


def _chat(request: ResponseRequest, context: Context, tools: Tools) -> Chat:
    grammar_field, grammar = _grammar(request)
    return structs.replace(
        _base_chat(request, context, tools),
        max_tokens=request.max_output_tokens,
        logprobs=(request.top_logprobs or 0) if request.top_logprobs or LOGPROBS in (request.include or ()) else None,
        tool_choice=tools.choice,
        parallel_calls=request.parallel_tool_calls is not False,
        grammar=grammar,
        grammar_field=grammar_field,
    )


def _base_chat(asked: Asked, context: Context, tools: Tools) -> Chat:
    chat = Messages(asked.instructions, tools.names)
    chat.add(context.items, context.fields)
    if not chat.messages:
        raise RequestError("`input` has no text: expected a string, or at least one item with text", param="input", code="empty_prompt")
    arguments = template_arguments(asked.chat_template_kwargs, None if asked.reasoning is None else asked.reasoning.effort)
    prompt = ChatPrompt(messages=chat.messages, tools=tools.offered, arguments=arguments)
    return Chat(prompt=prompt, fields=chat.fields, marked=chat.marked, images=chat.images)


def _grammar(request: ResponseRequest) -> tuple[str | None, Grammar | None]:
    wanted = None if request.text is None else request.text.format
    if wanted is None or wanted.type == "text":
        return wanted_grammar(request.structured_outputs, None)
    if request.structured_outputs is not None:
        raise RequestError("`structured_outputs` and `text.format` cannot be combined", param="structured_outputs")
    _, grammar = wanted_grammar(None, _response_format(wanted))
    return "text.format", grammar


def _response_format(wanted: TextFormat) -> ResponseFormat:
    """The format in the form of the chat endpoint."""
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
        status="queued",
        output=[],
        completed_at=None,
        error=None,
        incomplete_details=None,
        usage=None,
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
        service_tier="default",
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


@dataclass(frozen=True)
class Context:
    """The items of a prompt: `before` from earlier turns, `input` from this one. `root` is the first response of the chain.

    `session` is the session that chain or conversation make; None for a first response.
    """

    input: list[Item]
    before: list[Item] = field(default_factory=list)
    before_field: str = "input"
    session: str | None = None
    root: str | None = None

    @property
    def items(self) -> list[Item]:
        return [*self.before, *self.input]

    @property
    def fields(self) -> list[str]:
        """The field of the request that each item comes from."""
        return [*[self.before_field] * len(self.before), *(f"input[{index}]" for index in range(len(self.input)))]


async def read_context(asked: Asked, incoming: Incoming, store: SqliteStore | None, encoder: Encoder) -> tuple[Context, Read]:
    """The context, and what reads more of it: beside the event loop if there is much in the body or in the store.

    Takes memory for what is stored. Raises RequestError: 404 for a response, conversation or item that the owner does not have."""
    if asked.previous_response_id is not None and asked.conversation is not None:
        message = "`previous_response_id` and `conversation` cannot be combined"
        raise RequestError(message, param="previous_response_id", code="mutually_exclusive")
    owner, size, read = incoming.owner, len(incoming.body), partial(encoder.read, incoming.tenant.lane)
    given = [] if asked.input is None else await read(size, read_items, "input", asked.input, True)
    references = [item["id"] for item in given if item["type"] == "item_reference"]
    if store is not None and (asked.previous_response_id or asked.conversation_id or references):
        stored = await store.size_of(owner, asked.previous_response_id, asked.conversation_id, references)
        await incoming.take(stored)
        size += stored
    added = await _resolved(given, references, owner, store)
    if asked.previous_response_id is not None:
        context = await _chain(asked.previous_response_id, added, owner, store)
    elif asked.conversation_id is not None:
        context = await _conversation(asked.conversation_id, added, owner, store)
    else:
        context = Context(added)
    if not context.items and asked.instructions is None:
        raise RequestError("`input` is required", param="input", code="missing_field")
    if len(context.items) > MAX_ITEMS:
        message = f"`input` and the earlier turns have {len(context.items):,} items: the limit is {MAX_ITEMS:,}"
        raise RequestError(message, param="input", code="too_long")
    await read(size, check_outputs, context.items, context.fields)
    return context, partial(read, size)


async def _resolved(given: Sequence[Item], references: Sequence[str], owner: str, store: SqliteStore | None) -> list[Item]:
    """The items, with each reference replaced by its item."""
    if not references:
        return list(given)
    found = {} if store is None else await store.find_items(owner, references)
    resolved: list[Item] = []
    for index, item in enumerate(given):
        if item["type"] == "item_reference" and item["id"] not in found:
            message = f"`input[{index}].id` is {item['id'][:80]!r}: there is no such item"
            raise RequestError(message, param=f"input[{index}].id", code="item_not_found", status=404)
        resolved.append(found[item["id"]] if item["type"] == "item_reference" else item)
    return resolved


async def _chain(previous: str, added: list[Item], owner: str, store: SqliteStore | None) -> Context:
    chain = None if store is None else await store.chain(owner, previous)
    if chain is None:
        raise _not_found("previous_response_id", "response", previous, "previous_response_not_found")
    if chain.missing is not None:
        message = f"`previous_response_id` {previous!r} follows {chain.missing!r}, which was deleted"
        raise RequestError(message, param="previous_response_id", code="previous_response_not_found", status=404)
    if chain.status not in ("completed", "incomplete"):
        message = f"`previous_response_id` {previous!r} is {chain.status}: expected one that is completed or incomplete"
        raise RequestError(message, param="previous_response_id", code="previous_response_not_over")
    return Context(added, chain.items, "previous_response_id", chain.root, chain.root)


async def _conversation(conversation: str, added: list[Item], owner: str, store: SqliteStore | None) -> Context:
    items = None if store is None else await store.conversation_items(owner, conversation)
    if items is None:
        raise _not_found("conversation", "conversation", conversation, "conversation_not_found")
    return Context(added, items, "conversation", conversation)


def _not_found(name: str, kind: str, given: str, code: str) -> RequestError:
    """The same answer whether another key has it or nobody does: ids cannot be guessed."""
    return RequestError(f"`{name}` is {given!r}: there is no such {kind}", param=name, code=code, status=404)


def _remote_images(items: Sequence[Item], most: int | None) -> tuple[list[ImageRef], list[tuple[dict[str, Any], ImageRef]]]:
    """The images, at most the last `most`; and those of them that are on other servers, each with its part. A stored file stays."""
    images = list(images_of(items))
    images = images if most is None else images[-most:]
    refs = [ImageRef(f"input{place}", "" if FILE in image else image["image_url"]) for place, image in images]
    return refs, [(image, ref) for (_, image), ref in zip(images, refs, strict=True) if ref.is_remote]


def _check_fetched(size: int) -> None:
    if size > MAX_FETCHED_BYTES:
        message = (
            f"the server would store over {MAX_FETCHED_BYTES:,} bytes of images that `input` names by URL, the limit of a response: "
            "send smaller images, or set `store` to false"
        )
        raise RequestError(message, param="input", code="too_long", limit="fetched_bytes")
