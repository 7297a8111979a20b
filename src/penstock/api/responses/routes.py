"""The routes of /v1/responses and /v1/conversations."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, get_args

from starlette.types import Receive

from penstock.api.document.route import EXAMPLE_MODEL, GENERATES, HINTS, READS, Handler, Method, Parameter, Route, limit_parameter
from penstock.api.pipeline.request import Answer, Incoming
from penstock.api.pipeline.response import Response
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
    Order,
    ResponseRequest,
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
    async def get(incoming: Incoming, receive: Receive, response: Response) -> str:
        return await _stored(services).get(incoming, receive, response)

    return get


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
_ELEMENTS = {"input": tuple(ITEMS.values()), "tools": (FunctionTool, CustomTool)}
_EXAMPLE_ITEM = {"type": "message", "role": "user", "content": "What is a penstock?"}
_EXAMPLE_METADATA = {"metadata": {"topic": "water"}}
_ITEMS = {"items": tuple(kind for name, kind in ITEMS.items() if name != "item_reference")}
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


def _route(method: Method, path: str, summary: str, handler: Handler, metric: str, answer: Any, **more: Any) -> Route:
    return Route(method, path, "Responses", summary, handler=handler, metric=metric, answer=answer, **{"errors": READS, **more})


def _responses(handle: Callable[[StoredResponses, Incoming], Awaitable[Any]]) -> Handler:
    return lambda services, incoming: handle(_stored(services), incoming)


def _conversations(handle: Callable[[Conversations, Incoming], Awaitable[Any]]) -> Handler:
    return lambda services, incoming: handle(Conversations(_store(services)), incoming)


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
        errors=(*GENERATES, 409),
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
    _route(
        "DELETE", "/v1/responses/{id}", "Delete a response", _responses(StoredResponses.delete), "response_delete", answers.DeletedResponse
    ),
    _route(
        "POST",
        "/v1/responses/{id}/cancel",
        "Cancel a background response",
        _responses(StoredResponses.cancel),
        "response_cancel",
        answers.ResponseObject,
        errors=_CONFLICTS,
    ),
    _route(
        "GET",
        "/v1/responses/{id}/input_items",
        "List the input items of a response",
        _responses(StoredResponses.input_items),
        "response_input_items",
        answers.ItemList,
        parameters=_PAGE,
    ),
    _route(
        "POST",
        "/v1/conversations",
        "Create a conversation",
        _conversations(Conversations.create),
        "conversation_create",
        answers.Conversation,
        body=ConversationCreate,
        example={"items": [_EXAMPLE_ITEM], **_EXAMPLE_METADATA},
        elements=_ITEMS,
    ),
    _route(
        "GET", "/v1/conversations/{id}", "Get a conversation", _conversations(Conversations.get), "conversation_get", answers.Conversation
    ),
    _route(
        "POST",
        "/v1/conversations/{id}",
        "Replace the metadata of a conversation",
        _conversations(Conversations.update),
        "conversation_update",
        answers.Conversation,
        body=ConversationUpdate,
        example=_EXAMPLE_METADATA,
    ),
    _route(
        "DELETE",
        "/v1/conversations/{id}",
        "Delete a conversation and its items",
        _conversations(Conversations.delete),
        "conversation_delete",
        answers.DeletedConversation,
    ),
    _route(
        "GET",
        "/v1/conversations/{id}/items",
        "List the items of a conversation",
        _conversations(Conversations.list_items),
        "conversation_items",
        answers.ItemList,
        parameters=_PAGE,
    ),
    _route(
        "POST",
        "/v1/conversations/{id}/items",
        "Add items to a conversation",
        _conversations(Conversations.add_items),
        "conversation_add_items",
        answers.ItemList,
        body=ConversationItems,
        example={"items": [_EXAMPLE_ITEM]},
        elements=_ITEMS,
    ),
    _route(
        "GET",
        "/v1/conversations/{id}/items/{item_id}",
        "Get an item of a conversation",
        _conversations(Conversations.get_item),
        "conversation_item_get",
        answers.AnyItem,
    ),
    _route(
        "DELETE",
        "/v1/conversations/{id}/items/{item_id}",
        "Delete an item of a conversation, and get the conversation",
        _conversations(Conversations.delete_item),
        "conversation_item_delete",
        answers.Conversation,
    ),
)
