"""The routes of responses and conversations, as the API's document tells of them."""

from __future__ import annotations

from typing import get_args

from penstock.api.document.operation import EXAMPLE_MODEL, GENERATES, HINTS, READS, Operation, Parameter, path_id
from penstock.api.responses import answers
from penstock.api.responses.paging import DEFAULT_LIMIT, MAX_LIMIT
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

_EXAMPLE = {"model": EXAMPLE_MODEL, "input": "What is a penstock?"}
_ELEMENTS = {"input": tuple(ITEMS.values()), "tools": (FunctionTool, CustomTool)}
_ITEMS = {"items": tuple(kind for name, kind in ITEMS.items() if name != "item_reference")}
_EXAMPLE_ITEM = {"type": "message", "role": "user", "content": "What is a penstock?"}
_RESPONSE = path_id("The response's id.")
_CONVERSATION = path_id("The conversation's id.")
_ITEM = Parameter("item_id", "path", "The item's id.", {"type": "string", "minLength": 1})
_PAGE = (
    Parameter("limit", "query", "How many at most.", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT, "default": DEFAULT_LIMIT}),
    Parameter("order", "query", "The oldest first, or the newest.", {"type": "string", "enum": list(get_args(Order)), "default": "desc"}),
    Parameter("after", "query", "Those that come after the item of this id.", {"type": "string"}),
)
_FOUND = (400, 404, 408, 413, 503)

RESPONSE_OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/responses",
        tag="Responses",
        summary="A response to items, which may follow those of another response or of a conversation",
        description="With `stream` its events come as they are generated; each has a type and a number. With `background` it is made "
        "whether its client waits or not.",
        body=ResponseRequest,
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
        parameters=HINTS,
        errors=(*GENERATES, 409),
        example={**_EXAMPLE, "max_output_tokens": 64},
        elements=_ELEMENTS,
    ),
    Operation(
        method="POST",
        path="/v1/responses/input_tokens",
        tag="Responses",
        summary="How many tokens the prompt of a response has",
        body=Asked,
        answer=answers.ResponseTokenCount,
        errors=(*READS, 409),
        example=_EXAMPLE,
        elements=_ELEMENTS,
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}",
        tag="Responses",
        summary="A response that was made before, or is being made",
        answer=answers.ResponseObject,
        event=answers.ResponseEvent,
        parameters=(
            _RESPONSE,
            Parameter("stream", "query", "Whether to send its events instead.", {"type": "string", "enum": ["true", "false"]}),
            Parameter(
                "starting_after", "query", "The number of the last event that came through.", {"type": "string", "pattern": "^[0-9]{1,15}$"}
            ),
        ),
        errors=(*_FOUND, 409),
    ),
    Operation(
        method="DELETE",
        path="/v1/responses/{id}",
        tag="Responses",
        summary="Forgets a response",
        answer=answers.DeletedResponse,
        parameters=(_RESPONSE,),
        errors=_FOUND,
    ),
    Operation(
        method="POST",
        path="/v1/responses/{id}/cancel",
        tag="Responses",
        summary="Stops a response that is made in the background",
        answer=answers.ResponseObject,
        parameters=(_RESPONSE,),
        errors=(*_FOUND, 409),
    ),
    Operation(
        method="GET",
        path="/v1/responses/{id}/input_items",
        tag="Responses",
        summary="The items that a response was made from",
        answer=answers.ItemList,
        parameters=(_RESPONSE, *_PAGE),
        errors=_FOUND,
    ),
    Operation(
        method="POST",
        path="/v1/conversations",
        tag="Responses",
        summary="A new conversation",
        body=ConversationCreate,
        answer=answers.Conversation,
        errors=_FOUND,
        example={"items": [_EXAMPLE_ITEM], "metadata": {"topic": "water"}},
        elements=_ITEMS,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}",
        tag="Responses",
        summary="One conversation",
        answer=answers.Conversation,
        parameters=(_CONVERSATION,),
        errors=_FOUND,
    ),
    Operation(
        method="POST",
        path="/v1/conversations/{id}",
        tag="Responses",
        summary="Changes what is noted of a conversation",
        body=ConversationUpdate,
        answer=answers.Conversation,
        parameters=(_CONVERSATION,),
        errors=_FOUND,
        example={"metadata": {"topic": "water"}},
    ),
    Operation(
        method="DELETE",
        path="/v1/conversations/{id}",
        tag="Responses",
        summary="Forgets a conversation and its items",
        answer=answers.DeletedConversation,
        parameters=(_CONVERSATION,),
        errors=_FOUND,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/items",
        tag="Responses",
        summary="The items of a conversation",
        answer=answers.ItemList,
        parameters=(_CONVERSATION, *_PAGE),
        errors=_FOUND,
    ),
    Operation(
        method="POST",
        path="/v1/conversations/{id}/items",
        tag="Responses",
        summary="Adds items to a conversation",
        body=ConversationItems,
        answer=answers.ItemList,
        parameters=(_CONVERSATION,),
        errors=_FOUND,
        example={"items": [_EXAMPLE_ITEM]},
        elements=_ITEMS,
    ),
    Operation(
        method="GET",
        path="/v1/conversations/{id}/items/{item_id}",
        tag="Responses",
        summary="One item of a conversation",
        answer=answers.AnyItem,
        parameters=(_CONVERSATION, _ITEM),
        errors=_FOUND,
    ),
    Operation(
        method="DELETE",
        path="/v1/conversations/{id}/items/{item_id}",
        tag="Responses",
        summary="Takes an item out of a conversation, which is the answer",
        answer=answers.Conversation,
        parameters=(_CONVERSATION, _ITEM),
        errors=_FOUND,
    ),
)
