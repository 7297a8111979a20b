"""The routes of /v1/responses and /v1/conversations."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from starlette.types import Receive

from penstock.api.document.route import EXAMPLE_MODEL, GENERATES, HINTS, READS, Parameter, Route, limit_parameter, path_id
from penstock.api.pipeline.endpoint import Answer
from penstock.api.pipeline.request import Incoming
from penstock.api.pipeline.response import Response
from penstock.api.responses import answers
from penstock.api.responses.create import CreateResponse
from penstock.api.responses.reading import Reader
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
    return CreateResponse(_reader(services), services.runner, services.detached)


async def _count_tokens(services: Services, incoming: Incoming) -> answers.ResponseTokenCount:
    return answers.ResponseTokenCount(input_tokens=await _reader(services).count(incoming))


def _get(services: Services) -> Answer:
    async def get(incoming: Incoming, receive: Receive, response: Response) -> str:
        return await _responses(services).get(incoming, receive, response)

    return get


def _reader(services: Services) -> Reader:
    return Reader(services.context, services.responses)


def _responses(services: Services) -> StoredResponses:
    return StoredResponses(_store(services), services.detached, services.metrics.tally)


def _conversations(services: Services) -> Conversations:
    return Conversations(_store(services))


def _store(services: Services) -> SqliteStore:
    """Raises RequestError when the server stores nothing."""
    if services.responses is None:
        raise RequestError("this server does not store responses (--response-store none)", code="store_disabled", status=404)
    return services.responses


_EXAMPLE = {"model": EXAMPLE_MODEL, "input": "What is a penstock?"}
_ELEMENTS = {"input": tuple(ITEMS.values()), "tools": (FunctionTool, CustomTool)}
_ITEMS = {"items": tuple(kind for name, kind in ITEMS.items() if name != "item_reference")}
_EXAMPLE_ITEM = {"type": "message", "role": "user", "content": "What is a penstock?"}
_RESPONSE = path_id("The response's id.")
_CONVERSATION = path_id("The conversation's id.")
_ITEM = path_id("The item's id.", "item_id")
_PAGE = (
    limit_parameter(DEFAULT_LIMIT, MAX_LIMIT),
    Parameter("order", "query", "Oldest or newest first.", {"type": "string", "enum": list(get_args(Order)), "default": "desc"}),
    Parameter("after", "query", "Return only items after the item with this id.", {"type": "string"}),
)
_STREAM = (
    Parameter("stream", "query", "Send the response's events instead.", {"type": "string", "enum": ["true", "false"]}),
    Parameter("starting_after", "query", "The number of the last event received.", {"type": "string", "pattern": "^[0-9]{1,15}$"}),
)

RESPONSE_ROUTES = (
    Route(
        method="POST",
        path="/v1/responses",
        stream=_create,
        metric="responses",
        tag="Responses",
        summary="Create a response",
        description="The input may continue an earlier response or a conversation. With `stream`, events arrive as tokens are generated; "
        "each has a type and a number. With `background`, the response is made even if the client leaves.",
        body=ResponseRequest,
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
        parameters=HINTS,
        errors=(*GENERATES, 409),
        example={**_EXAMPLE, "max_output_tokens": 64},
        elements=_ELEMENTS,
    ),
    Route(
        method="POST",
        path="/v1/responses/input_tokens",
        handler=_count_tokens,
        metric="response_tokens",
        tag="Responses",
        summary="Count the tokens of a response's prompt",
        body=Asked,
        answer=answers.ResponseTokenCount,
        errors=(*READS, 409),
        example=_EXAMPLE,
        elements=_ELEMENTS,
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}",
        stream=_get,
        metric="response_get",
        tag="Responses",
        summary="Get a response, finished or not",
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
        parameters=(_RESPONSE, *_STREAM),
        errors=(*READS, 409),
    ),
    Route(
        method="DELETE",
        path="/v1/responses/{id}",
        handler=lambda services, incoming: _responses(services).delete(incoming),
        metric="response_delete",
        tag="Responses",
        summary="Delete a response",
        answer=answers.DeletedResponse,
        parameters=(_RESPONSE,),
        errors=READS,
    ),
    Route(
        method="POST",
        path="/v1/responses/{id}/cancel",
        handler=lambda services, incoming: _responses(services).cancel(incoming),
        metric="response_cancel",
        tag="Responses",
        summary="Cancel a background response",
        answer=answers.ResponseObject,
        parameters=(_RESPONSE,),
        errors=(*READS, 409),
    ),
    Route(
        method="GET",
        path="/v1/responses/{id}/input_items",
        handler=lambda services, incoming: _responses(services).input_items(incoming),
        metric="response_input_items",
        tag="Responses",
        summary="List the input items of a response",
        answer=answers.ItemList,
        parameters=(_RESPONSE, *_PAGE),
        errors=READS,
    ),
    Route(
        method="POST",
        path="/v1/conversations",
        handler=lambda services, incoming: _conversations(services).create(incoming),
        metric="conversation_create",
        tag="Responses",
        summary="Create a conversation",
        body=ConversationCreate,
        answer=answers.Conversation,
        errors=READS,
        example={"items": [_EXAMPLE_ITEM], "metadata": {"topic": "water"}},
        elements=_ITEMS,
    ),
    Route(
        method="GET",
        path="/v1/conversations/{id}",
        handler=lambda services, incoming: _conversations(services).get(incoming),
        metric="conversation_get",
        tag="Responses",
        summary="Get a conversation",
        answer=answers.Conversation,
        parameters=(_CONVERSATION,),
        errors=READS,
    ),
    Route(
        method="POST",
        path="/v1/conversations/{id}",
        handler=lambda services, incoming: _conversations(services).update(incoming),
        metric="conversation_update",
        tag="Responses",
        summary="Replace the metadata of a conversation",
        body=ConversationUpdate,
        answer=answers.Conversation,
        parameters=(_CONVERSATION,),
        errors=READS,
        example={"metadata": {"topic": "water"}},
    ),
    Route(
        method="DELETE",
        path="/v1/conversations/{id}",
        handler=lambda services, incoming: _conversations(services).delete(incoming),
        metric="conversation_delete",
        tag="Responses",
        summary="Delete a conversation and its items",
        answer=answers.DeletedConversation,
        parameters=(_CONVERSATION,),
        errors=READS,
    ),
    Route(
        method="GET",
        path="/v1/conversations/{id}/items",
        handler=lambda services, incoming: _conversations(services).list_items(incoming),
        metric="conversation_items",
        tag="Responses",
        summary="List the items of a conversation",
        answer=answers.ItemList,
        parameters=(_CONVERSATION, *_PAGE),
        errors=READS,
    ),
    Route(
        method="POST",
        path="/v1/conversations/{id}/items",
        handler=lambda services, incoming: _conversations(services).add_items(incoming),
        metric="conversation_add_items",
        tag="Responses",
        summary="Add items to a conversation",
        body=ConversationItems,
        answer=answers.ItemList,
        parameters=(_CONVERSATION,),
        errors=READS,
        example={"items": [_EXAMPLE_ITEM]},
        elements=_ITEMS,
    ),
    Route(
        method="GET",
        path="/v1/conversations/{id}/items/{item_id}",
        handler=lambda services, incoming: _conversations(services).get_item(incoming),
        metric="conversation_item_get",
        tag="Responses",
        summary="Get an item of a conversation",
        answer=answers.AnyItem,
        parameters=(_CONVERSATION, _ITEM),
        errors=READS,
    ),
    Route(
        method="DELETE",
        path="/v1/conversations/{id}/items/{item_id}",
        handler=lambda services, incoming: _conversations(services).delete_item(incoming),
        metric="conversation_item_delete",
        tag="Responses",
        summary="Delete an item of a conversation, and get the conversation",
        answer=answers.Conversation,
        parameters=(_CONVERSATION, _ITEM),
        errors=READS,
    ),
)
