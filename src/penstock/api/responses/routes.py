"""Where responses and conversations are found."""

from __future__ import annotations

from typing import Protocol

from starlette.requests import Request
from starlette.routing import Route

from penstock.api.errors import ErrorShape, OpenAIErrors
from penstock.api.handlers import Methods, handled
from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.endpoint import Answer, Endpoint
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.runner import Run
from penstock.api.responses.conversations import Conversations
from penstock.api.responses.create import CountTokens, CreateResponse
from penstock.api.responses.reading import Reader
from penstock.api.responses.retrieve import StoredResponses
from penstock.api.responses.store import ResponseStore
from penstock.metrics.frontend import FrontEndMetrics
from penstock.wire.errors import RequestError


class Services(Protocol):
    """What the endpoints work with."""

    @property
    def library(self) -> PromptContext: ...
    @property
    def runner(self) -> Run: ...
    @property
    def detached(self) -> DetachedRuns: ...
    @property
    def metrics(self) -> FrontEndMetrics: ...

    def endpoint(self, route: str, answer: Answer, errors: ErrorShape) -> Endpoint: ...


def response_endpoints(services: Services, store: ResponseStore | None) -> dict[str, Endpoint]:
    """What is asked with POST, by its path: making a response, and counting the tokens of one."""
    reader = Reader(services.library, store)
    return {
        "/v1/responses": services.endpoint("responses", CreateResponse(reader, services.runner, services.detached), OpenAIErrors()),
        "/v1/responses/input_tokens": services.endpoint("response_tokens", CountTokens(reader), OpenAIErrors()),
    }


def response_routes(services: Services, store: ResponseStore | None) -> list[Route]:
    """The routes over what is kept. Without a store they say that nothing is."""
    if store is None:
        return [Route(path, handled({"GET": _refuse, "POST": _refuse, "DELETE": _refuse})) for path in _PATHS]

    def answering(route: str, answer: Answer) -> Endpoint:
        return services.endpoint(route, answer, OpenAIErrors())

    responses = StoredResponses(store, services.detached, services.metrics.tally)
    conversations = Conversations(store)
    one, cancel, inputs, all_conversations, conversation, items, item = _PATHS
    return [
        Route(
            one,
            Methods({"GET": answering("response_get", responses.get), "DELETE": answering("response_delete", responses.delete)}),
        ),
        Route(cancel, Methods({"POST": answering("response_cancel", responses.cancel)})),
        Route(inputs, Methods({"GET": answering("response_input_items", responses.input_items)})),
        Route(all_conversations, Methods({"POST": answering("conversation_create", conversations.create)})),
        Route(
            conversation,
            Methods(
                {
                    "GET": answering("conversation_get", conversations.get),
                    "POST": answering("conversation_update", conversations.update),
                    "DELETE": answering("conversation_delete", conversations.delete),
                }
            ),
        ),
        Route(
            items,
            Methods(
                {
                    "GET": answering("conversation_items", conversations.list_items),
                    "POST": answering("conversation_add_items", conversations.add_items),
                }
            ),
        ),
        Route(
            item,
            Methods(
                {
                    "GET": answering("conversation_item_get", conversations.get_item),
                    "DELETE": answering("conversation_item_delete", conversations.delete_item),
                }
            ),
        ),
    ]


_PATHS = (
    "/v1/responses/{id}",
    "/v1/responses/{id}/cancel",
    "/v1/responses/{id}/input_items",
    "/v1/conversations",
    "/v1/conversations/{id}",
    "/v1/conversations/{id}/items",
    "/v1/conversations/{id}/items/{item_id}",
)


async def _refuse(_: Request) -> object:
    raise RequestError("this server keeps no responses (--response-store none)", code="store_disabled", status=404)
