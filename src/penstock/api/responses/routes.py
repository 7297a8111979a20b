"""The routes of /v1/responses and /v1/conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

from penstock.api.document.route import EXAMPLE_MODEL, HINTS, READS, Handler, Method, Parameter, Route, limit_parameter
from penstock.api.pipeline.request import Answer, Incoming
from penstock.api.responses import answers
from penstock.api.responses.create import CreateResponse
from penstock.api.responses.parse import ResponseParser
from penstock.api.responses.schema import (
    ITEMS,
    Asked,
    ConversationCreate,
    ConversationItems,
    ConversationUpdate,
    CustomTool,
    FunctionTool,
    ImagePart,
    NamespaceTool,
    Order,
    OutputPart,
    ResponseRequest,
    TextPart,
)
from penstock.api.responses.store import SqliteStore
from penstock.api.responses.stored import DEFAULT_LIMIT, MAX_LIMIT, Conversations, StoredResponses
from penstock.wire.errors import RequestError

if TYPE_CHECKING:
    from penstock.api.app import Services


def _create(services: Services) -> Answer:
    return CreateResponse(_parser(services), services.runner, services.detached)


async def _count_tokens(services: Services, incoming: Incoming) -> answers.ResponseTokenCount:
    return answers.ResponseTokenCount(input_tokens=await _parser(services).count(incoming))


def _get(services: Services) -> Answer:
    return lambda incoming, receive, response: _stored(services).get(incoming, receive, response)


def _parser(services: Services) -> ResponseParser:
    return ResponseParser(services.context, services.responses)


def _stored(services: Services) -> StoredResponses:
    return StoredResponses(_store(services), services.detached, services.metrics.tally)


def _store(services: Services) -> SqliteStore:
    """Raises RequestError when the server stores nothing."""
    if services.responses is None:
        raise RequestError("this server does not store responses (--response-store none)", code="store_disabled", status=404)
    return services.responses


_EXAMPLE = {"model": EXAMPLE_MODEL, "input": "What is a penstock?"}
_PARTS = {
    "MessageItem.content": (TextPart, ImagePart),
    "FunctionCallOutputItem.output": (OutputPart, ImagePart),
    "CustomToolCallOutputItem.output": (OutputPart, ImagePart),
}
_ELEMENTS = {
    "input": tuple(ITEMS.values()),
    "tools": (FunctionTool, CustomTool, NamespaceTool),
    "NamespaceTool.tools": (FunctionTool, CustomTool),
    **_PARTS,
}
_EXAMPLE_ITEM = {"type": "message", "role": "user", "content": "What is a penstock?"}
_EXAMPLE_METADATA = {"metadata": {"topic": "water"}}
_ITEMS = {"items": tuple(kind for name, kind in ITEMS.items() if name != "item_reference"), **_PARTS}
_PAGE = (
    limit_parameter(DEFAULT_LIMIT, MAX_LIMIT),
    Parameter("order", "query", "Oldest or newest first.", {"type": "string", "enum": list(get_args(Order)), "default": "desc"}),
    Parameter("after", "query", "Return only items after the item with this id.", {"type": "string"}),
)
_STREAM = (
    Parameter("stream", "query", "Send the response's events instead.", {"type": "string", "enum": ["true", "false"]}),
    Parameter("starting_after", "query", "The number of the last event received.", {"type": "string", "pattern": "^[0-9]{1,15}$"}),
)
_CONFLICTS = (*READS, 409)
_WRITES = (*READS, 507)
_MEMBERS, _MEMBER = "/{id}/items", "/{id}/items/{item_id}"


def _response(
    method: Method, path: str, summary: str, handle: Callable[[StoredResponses, Incoming], Awaitable[Any]], metric: str, **more: Any
) -> Route:
    more = {"errors": READS, **more}
    handler: Handler = lambda services, incoming: handle(_stored(services), incoming)  # noqa: E731
    return Route(method, f"/v1/responses/{{id}}{path}", "Responses", summary, handler=handler, metric=f"response_{metric}", **more)


def _conversation(
    method: Method, path: str, summary: str, handle: Callable[[Conversations, Incoming], Awaitable[Any]], metric: str, **more: Any
) -> Route:
    more = {"errors": READS, **more}
    handler: Handler = lambda services, incoming: handle(Conversations(_store(services), services.context), incoming)  # noqa: E731
    return Route(method, f"/v1/conversations{path}", "Responses", summary, handler=handler, metric=f"conversation_{metric}", **more)


RESPONSE_ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        "Responses",
        "Create a response",
        description="The input may continue an earlier response or a conversation. With `stream`, events arrive as tokens are generated; "
        "each has a type and a number. With `background`, the response is made even if the client leaves.",
        stream=_create,
        metric="responses",
        body=ResponseRequest,
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
        parameters=HINTS,
        errors=_CONFLICTS,
        example={**_EXAMPLE, "max_output_tokens": 64},
        elements=_ELEMENTS,
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        "Responses",
        "Count the tokens of a response's prompt",
        handler=_count_tokens,
        metric="response_tokens",
        body=Asked,
        answer=answers.ResponseTokenCount,
        errors=_CONFLICTS,
        example=_EXAMPLE,
        elements=_ELEMENTS,
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        "Responses",
        "Get a response, finished or not",
        stream=_get,
        metric="response_get",
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
        parameters=_STREAM,
        errors=_CONFLICTS,
    ),
    _response("DELETE", "", "Delete a response", StoredResponses.delete, "delete", answer=answers.DeletedResponse),
    _response(
        "POST",
        "/cancel",
        "Cancel a background response",
        StoredResponses.cancel,
        "cancel",
        answer=answers.ResponseObject,
        errors=_CONFLICTS,
    ),
    _response(
        "GET",
        "/input_items",
        "List the input items of a response",
        StoredResponses.input_items,
        "input_items",
        answer=answers.ItemList,
        parameters=_PAGE,
    ),
    _conversation(
        "POST",
        "",
        "Create a conversation",
        Conversations.create,
        "create",
        answer=answers.Conversation,
        body=ConversationCreate,
        errors=_WRITES,
        example={"items": [_EXAMPLE_ITEM], **_EXAMPLE_METADATA},
        elements=_ITEMS,
    ),
    _conversation("GET", "/{id}", "Get a conversation", Conversations.get, "get", answer=answers.Conversation),
    _conversation(
        "POST",
        "/{id}",
        "Replace the metadata of a conversation",
        Conversations.update,
        "update",
        answer=answers.Conversation,
        body=ConversationUpdate,
        errors=_WRITES,
        example=_EXAMPLE_METADATA,
    ),
    _conversation(
        "DELETE", "/{id}", "Delete a conversation and its items", Conversations.delete, "delete", answer=answers.DeletedConversation
    ),
    _conversation(
        "GET", _MEMBERS, "List the items of a conversation", Conversations.list_items, "items", answer=answers.ItemList, parameters=_PAGE
    ),
    _conversation(
        "POST",
        _MEMBERS,
        "Add items to a conversation",
        Conversations.add_items,
        "add_items",
        answer=answers.ItemList,
        body=ConversationItems,
        errors=_WRITES,
        example={"items": [_EXAMPLE_ITEM]},
        elements=_ITEMS,
    ),
    _conversation("GET", _MEMBER, "Get an item of a conversation", Conversations.get_item, "item_get", answer=answers.AnyItem),
    _conversation(
        "DELETE",
        _MEMBER,
        "Delete an item of a conversation, and get the conversation",
        Conversations.delete_item,
        "item_delete",
        answer=answers.Conversation,
    ),
)
