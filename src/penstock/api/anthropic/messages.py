"""POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from penstock.api.anthropic.answers import TokenCount
from penstock.api.anthropic.conversion import check_thinking, longest_mark, read_chat, read_common
from penstock.api.anthropic.dialect import MessagesDialect
from penstock.api.anthropic.schema import CHOICES, UNSUPPORTED, CountRequest, MessagesRequest, ThinkingAdaptive, ThinkingEnabled
from penstock.api.openai.schema import Common
from penstock.api.pipeline.hints import read_hints
from penstock.api.pipeline.plan import Plan, count_tokens, plan_chat
from penstock.api.pipeline.request import Incoming, PromptContext, decode_body
from penstock.router.affinity import session_key
from penstock.wire.errors import RequestError

T = TypeVar("T")

_MESSAGES_DECODER = msgspec.json.Decoder(MessagesRequest)
_COUNT_DECODER = msgspec.json.Decoder(CountRequest)


async def parse_messages(incoming: Incoming, context: PromptContext) -> tuple[Plan, MessagesDialect]:
    """Raises RequestError, which names the field."""
    request = _decode(incoming.body, _MESSAGES_DECODER)
    check_thinking(request, incoming.headers)
    common = read_common(request)
    hints = read_hints(common, incoming.headers)
    chat = msgspec.structs.replace(read_chat(request), max_tokens=request.max_tokens, clips=True)
    plan = await plan_chat(common, chat, hints, incoming.tenant, context)
    dialect = MessagesDialect(
        plan,
        cache_ttl=None if common.cache_control is None else common.cache_control.ttl,
        shows_thinking=not (isinstance(request.thinking, ThinkingEnabled | ThinkingAdaptive) and request.thinking.display == "omitted"),
        fills_window=request.max_tokens > plan.submits[0].max_tokens,
    )
    return plan, dialect


async def count_message_tokens(incoming: Incoming, context: PromptContext) -> TokenCount:
    """Counts the tokens of a message's prompt: the sum of the three input counts in the message's usage."""
    request = _decode(incoming.body, _COUNT_DECODER)
    common = Common(model=request.model, nvext=request.nvext, cache_control=longest_mark(request))
    session = read_hints(common, incoming.headers).session
    model = context.models.find(request.model)
    # In a session, what the model has said keeps the tokens that it said it with.
    key = None if session is None else session_key(incoming.tenant.owner, model.info.name, session.id)
    return TokenCount(await count_tokens(model, read_chat(request), context, key))


def _decode(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    try:
        return decode_body(body, decoder, UNSUPPORTED, CHOICES)
    except RequestError as error:
        if error.param is not None and error.param.startswith("tools["):
            _refuse_hosted(msgspec.json.decode(body).get("tools"))
        raise


def _refuse_hosted(tools: Any) -> None:
    """Raises RequestError for the first tool that is Anthropic's own: it has no schema here, and nobody who runs it."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "custom":
            field = f"tools[{index}].type"
            message = f"`{field}` is {kind[:80]!r}: this server has no tools of its own; expected a tool with `name` and `input_schema`"
            raise RequestError(message, param=field, code="unsupported_tool")
