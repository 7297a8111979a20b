"""The ASGI application: its routes, and what becomes of their errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from penstock.api.anthropic.errors import AnthropicErrors
from penstock.api.anthropic.messages import CountTokens, parse_messages
from penstock.api.document.docs import document_routes
from penstock.api.errors import ErrorShape, OpenAIErrors
from penstock.api.handlers import Methods, handled, refusal
from penstock.api.model_routes import model_routes
from penstock.api.openai.chat import parse_chat
from penstock.api.openai.completions import parse_completion
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.detached import DetachedRuns, Resume
from penstock.api.pipeline.endpoint import Answer, Endpoint, Generate, Parse
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.runner import Run
from penstock.api.responses.routes import response_endpoints, response_routes
from penstock.api.responses.store import ResponseStore
from penstock.api.sessions import session_routes
from penstock.api.tokenize import Detokenize, Tokenize
from penstock.cluster.sessions.sessions import Sessions
from penstock.metrics.frontend import CONTENT_TYPE, FrontEndMetrics
from penstock.wire.errors import RequestError


@dataclass(frozen=True)
class Services:
    """What the endpoints work with."""

    library: PromptContext
    runner: Run
    detached: DetachedRuns
    sessions: Sessions
    admission: Admission
    metrics: FrontEndMetrics
    responses: ResponseStore | None = None
    """Where responses are kept, if they are."""

    def endpoint(self, route: str, answer: Answer, errors: ErrorShape) -> Endpoint:
        return Endpoint(route, answer, self.admission.limits, self.metrics, errors)

    def generate(self, parse: Parse) -> Generate:
        return Generate(parse, self.library, self.runner, self.detached)


def make_app(services: Services) -> Application:
    """The front end's routes."""
    models, admission, metrics = services.library.models, services.admission, services.metrics

    async def live(_: Request) -> object:
        return {"status": "live"}

    async def ready(_: Request) -> object:
        if admission.is_draining:
            return _json(503, {"status": "draining"})
        served = [model.info.name for model in models.all()]
        return _json(200 if served else 503, {"status": "ready" if served else "no worker is ready", "models": served})

    async def show_metrics(_: Request) -> object:
        return StarletteResponse(metrics.render(), media_type=CONTENT_TYPE)

    generating = {
        "/v1/completions": services.endpoint("completions", services.generate(parse_completion), OpenAIErrors()),
        "/v1/chat/completions": services.endpoint("chat", services.generate(parse_chat), OpenAIErrors()),
        "/v1/messages": services.endpoint("messages", services.generate(parse_messages), AnthropicErrors()),
        "/v1/messages/count_tokens": services.endpoint("count_tokens", CountTokens(services.library), AnthropicErrors()),
        **response_endpoints(services, services.responses),
        "/tokenize": services.endpoint("tokenize", Tokenize(services.library), OpenAIErrors()),
        "/detokenize": services.endpoint("detokenize", Detokenize(services.library), OpenAIErrors()),
    }
    resume = services.endpoint("resume", Resume(services.detached, metrics.tally), OpenAIErrors())
    router = Router(
        [
            Route("/live", handled({"GET": live})),
            Route("/ready", handled({"GET": ready})),
            Route("/metrics", handled({"GET": show_metrics})),
            *document_routes(),
            *model_routes(models),
            *session_routes(services.sessions, models),
            *response_routes(services, services.responses),
            Route("/v1/chat/completions/{id}", Methods({"GET": resume})),
            Route("/v1/completions/{id}", Methods({"GET": resume})),
        ],
        default=_not_found,
    )

    return Application(generating, router)


class Application:
    """The routes. Those that generate, all with POST, are found without the router, whose cost shows when thousands come at once."""

    def __init__(self, generating: Mapping[str, Endpoint], router: Router) -> None:
        self._generating = {path: Methods({"POST": endpoint}, endpoint.errors) for path, endpoint in generating.items()}
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        application = self._generating.get(scope["path"], self._router)
        await application(scope, receive, send)

    @property
    def operations(self) -> set[tuple[str, str]]:
        """Every method and path that is answered, with the names of the path's parameters in braces."""
        found = {("POST", path) for path in self._generating}
        for route in self._router.routes:
            assert isinstance(route, Route)
            assert isinstance(route.endpoint, Methods), f"{route.path} takes any method"
            found |= {(method, route.path_format) for method in route.endpoint.names}
        return found


def _json(status: int, content: object) -> StarletteResponse:
    return StarletteResponse(msgspec.json.encode(content), status, media_type="application/json")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    error = RequestError(f"there is no {scope['path'][:256]} here", code="not_found", status=404)
    errors = AnthropicErrors() if scope["path"].startswith("/v1/messages/") else OpenAIErrors()
    await refusal(error, errors)(scope, receive, send)
