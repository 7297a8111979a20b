"""The ASGI application: one table declares every route, for the server and for the API's document."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import msgspec
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.anthropic import answers as anthropic
from penstock.api.anthropic.errors import OVERLOADED, AnthropicErrors
from penstock.api.anthropic.messages import count_message_tokens, parse_messages
from penstock.api.anthropic.schema import CountRequest, MessagesRequest
from penstock.api.auth.gate import METRICS
from penstock.api.document.docs import ApiDocument
from penstock.api.document.route import EXAMPLE_MODEL, HINTS, READS, Content, Parameter, Route, limit_parameter
from penstock.api.errors import OpenAIErrors, refusal
from penstock.api.models import get_model, list_models
from penstock.api.openai import answers
from penstock.api.openai.chat import parse_chat
from penstock.api.openai.completions import parse_completion
from penstock.api.openai.schema import ChatRequest, CompletionRequest
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.detached import LAST_EVENT_ID, DetachedRuns, Resume
from penstock.api.pipeline.request import Answer, Endpoint, Incoming, PromptContext
from penstock.api.pipeline.response import Response
from penstock.api.pipeline.runner import Parse, Runner
from penstock.api.responses.routes import RESPONSE_ROUTES
from penstock.api.responses.store import SqliteStore
from penstock.api.sessions import DEFAULT_LIMIT, MAX_LIMIT, close_session, get_session, list_sessions
from penstock.api.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest, detokenize, tokenize
from penstock.cluster.sessions.sessions import Sessions
from penstock.metrics.frontend import CONTENT_TYPE, FrontEndMetrics
from penstock.wire.errors import RequestError


@dataclass(frozen=True)
class Services:
    """What the handlers work with. Without `responses`, no response is stored."""

    context: PromptContext
    runner: Runner
    detached: DetachedRuns
    sessions: Sessions
    admission: Admission
    metrics: FrontEndMetrics
    responses: SqliteStore | None = None
    shows_keys: bool = False
    """Whether the metrics have those of each API key."""

    def generate(self, parse: Parse) -> Answer:
        return partial(self.runner.answer, parse)

    @cached_property
    def document(self) -> ApiDocument:
        return ApiDocument(ROUTES)


def make_app(services: Services, has_metrics: bool = True) -> Application:
    """The front end's application, with every route of the table; without the metrics if they are elsewhere."""
    return Application([route for route in ROUTES if has_metrics or route.path != METRICS], services)


def make_metrics_app(services: Services) -> Application:
    """The metrics alone, with those of each API key."""
    return Application([route for route in ROUTES if route.path == METRICS], replace(services, shows_keys=True))


class Application:
    """Finds the endpoint of a request.

    Paths without parameters, which include all that generate, are found with one lookup: trying one pattern after the other costs too
    much when thousands of requests arrive at once.
    """

    def __init__(self, routes: Iterable[Route], services: Services) -> None:
        self._fixed: dict[str, dict[str, Endpoint]] = {}
        patterns: dict[str, dict[str, Endpoint]] = {}
        for route in routes:
            endpoint = _make_endpoint(route, services)
            methods = (patterns if "{" in route.path else self._fixed).setdefault(route.path, {})
            methods[route.method] = endpoint
            if route.method == "GET" and route.event is None:
                methods["HEAD"] = endpoint
        self._patterns = [(compile_path(path)[0], methods) for path, methods in patterns.items()]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        methods = self._fixed.get(scope["path"]) or self._match(scope)
        application: ASGIApp = methods.get(scope["method"]) or _refuse(scope, methods)
        return application(scope, receive, send)

    def _match(self, scope: Scope) -> Mapping[str, Endpoint]:
        """The endpoints of a path with parameters, by method; the parameters are put into the scope. Empty when there is no such path."""
        for pattern, methods in self._patterns:
            if found := pattern.match(scope["path"]):
                scope["path_params"] = found.groupdict()
                return methods
        return {}


def _refuse(scope: Scope, methods: Mapping[str, Endpoint]) -> ASGIApp:
    """The answer where no endpoint takes the request."""
    path = scope["path"][:256]
    if not methods:
        error = RequestError(f"unknown path {path}", code="not_found", status=404)
        return refusal(error, AnthropicErrors() if path.startswith("/v1/messages/") else OpenAIErrors())
    allowed = ", ".join(sorted(methods))
    if dict(scope["headers"]).get(b"upgrade", b"").lower() == b"websocket":
        # Codex then goes on over HTTP at once. After a 405 it tries again for seconds.
        error = RequestError(f"{path} has no WebSocket: send {allowed} over HTTP", code="upgrade_required", status=426)
        return refusal(error, next(iter(methods.values())).errors(), {"upgrade": "HTTP/1.1", "allow": allowed})
    error = RequestError(f"{path} takes {allowed}, not {scope['method']}", code="method_not_allowed", status=405)
    return refusal(error, next(iter(methods.values())).errors(), {"allow": allowed})


def _make_endpoint(route: Route, services: Services) -> Endpoint:
    if route.stream is not None:
        answer = route.stream(services)
    else:
        assert route.handler is not None, f"{route.name} has neither a handler nor a stream"
        answer = _answer_of(partial(route.handler, services))
    generates = route.is_charged and route.stream is not None
    return Endpoint(route.metric, answer, services.admission, services.metrics, route.shape, route.is_charged, generates)


def _answer_of(handler: Callable[[Incoming], Awaitable[Any]]) -> Answer:
    """Sends what the handler returns."""

    async def answer(incoming: Incoming, _: Receive, response: Response) -> str:
        value = await handler(incoming)
        content = value if isinstance(value, Content) else Content(msgspec.json.encode(value))
        headers = [(name.encode(), text.encode()) for name, text in content.headers.items()]
        await response.send_whole(content.status, content.body, [(b"content-type", content.media_type.encode()), *headers])
        return "ok"

    return answer


async def _live(_: Services, __: Incoming) -> answers.Liveness:
    return answers.Liveness("live")


async def _ready(services: Services, _: Incoming) -> Content:
    served = [model.info.name for model in services.context.models.all()]
    if services.admission.is_draining:
        return Content(msgspec.json.encode(answers.Readiness("draining")), status=503)
    if not served:
        return Content(msgspec.json.encode(answers.Readiness("no worker is ready", [])), status=503)
    return Content(msgspec.json.encode(answers.Readiness("ready", served)))


async def _show_metrics(services: Services, _: Incoming) -> Content:
    return Content(services.metrics.render(services.shows_keys), CONTENT_TYPE)


async def _openapi(services: Services, _: Incoming) -> Content:
    return services.document.openapi


async def _docs(services: Services, _: Incoming) -> Content:
    return services.document.page


def _resume(path: str, what: str, event: Any) -> Route:
    last_event = Parameter(
        LAST_EVENT_ID.decode(),
        "header",
        "The id of the last event received. Without it, all events are sent.",
        {"type": "string", "pattern": "^[0-9]{1,15}$"},
    )
    return Route(
        "GET",
        path,
        "OpenAI",
        f"Resume the stream of a {what} after a lost connection",
        description="Only for streams requested with `stream_options.resumable`.",
        stream=lambda services: Resume(services.detached, services.metrics.tally),
        metric="resume",
        event=event,
        parameters=(last_event,),
        errors=READS,
    )


_STREAMS = "With `stream`, events arrive as tokens are generated; the last one is `[DONE]`."
_CHAT = {"model": EXAMPLE_MODEL, "messages": [{"role": "user", "content": "What is a penstock?"}]}
_VERSION = Parameter("anthropic-version", "header", "Any version: the client speaks Anthropic's API.", {"type": "string"})
_IN_ANTHROPICS_FORM = "With the header `anthropic-version`, in the form of Anthropic's API."
_ANTHROPIC_READS = (400, 404, 408, 413, OVERLOADED)

ROUTES: tuple[Route, ...] = (
    Route(
        "POST",
        "/v1/chat/completions",
        "OpenAI",
        "Generate the next message of a chat",
        stream=lambda services: services.generate(parse_chat),
        metric="chat",
        description=_STREAMS,
        body=ChatRequest,
        answer=answers.ChatCompletion,
        event=answers.ChatCompletionChunk,
        parameters=HINTS,
        errors=READS,
        example={**_CHAT, "max_tokens": 64},
    ),
    _resume("/v1/chat/completions/{id}", "chat", answers.ChatCompletionChunk),
    Route(
        "POST",
        "/v1/completions",
        "OpenAI",
        "Continue a text",
        stream=lambda services: services.generate(parse_completion),
        metric="completions",
        description=_STREAMS,
        body=CompletionRequest,
        answer=answers.Completion,
        event=answers.Completion,
        parameters=HINTS,
        errors=READS,
        example={"model": EXAMPLE_MODEL, "prompt": "A penstock is", "max_tokens": 32},
    ),
    _resume("/v1/completions/{id}", "completion", answers.Completion),
    *RESPONSE_ROUTES,
    Route(
        "POST",
        "/v1/messages",
        "Anthropic",
        "Generate the next message of a chat, in Anthropic's format",
        stream=lambda services: services.generate(parse_messages),
        metric="messages",
        description="With `stream`, events arrive as tokens are generated, from `message_start` to `message_stop`.",
        body=MessagesRequest,
        answer=anthropic.AnthropicMessage,
        event=anthropic.MessageEvent,
        parameters=HINTS,
        errors=_ANTHROPIC_READS,
        shape=AnthropicErrors,
        example={**_CHAT, "max_tokens": 64},
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        "Anthropic",
        "Count the tokens of a message's prompt",
        handler=lambda services, incoming: count_message_tokens(incoming, services.context),
        metric="count_tokens",
        body=CountRequest,
        answer=anthropic.TokenCount,
        parameters=HINTS,
        errors=_ANTHROPIC_READS,
        shape=AnthropicErrors,
        example=_CHAT,
    ),
    Route(
        "GET",
        "/v1/models",
        "Models",
        "List the models that are available now",
        description=_IN_ANTHROPICS_FORM,
        handler=list_models,
        answer=(answers.ModelList, anthropic.AnthropicModelList),
        parameters=(_VERSION,),
    ),
    Route(
        "GET",
        "/v1/models/{id:path}",
        "Models",
        "Get one model",
        description=_IN_ANTHROPICS_FORM,
        handler=get_model,
        answer=(answers.Model, anthropic.AnthropicModel),
        parameters=(_VERSION,),
        errors=(404, 503),
    ),
    Route(
        "GET",
        "/v1/sessions",
        "Sessions",
        "List the sessions of this API key",
        handler=list_sessions,
        answer=answers.SessionList,
        parameters=(
            limit_parameter(DEFAULT_LIMIT, MAX_LIMIT),
            Parameter("after", "query", "Return only ids that sort after this one.", {"type": "string"}),
        ),
        errors=(400,),
    ),
    Route("GET", "/v1/sessions/{id:path}", "Sessions", "Get one session", handler=get_session, answer=answers.Session, errors=(404,)),
    Route(
        "DELETE",
        "/v1/sessions/{id:path}",
        "Sessions",
        "Close a session, now or when its last running turn ends",
        handler=close_session,
        answer=answers.DeletedSession,
        errors=(404,),
    ),
    Route(
        "POST",
        "/tokenize",
        "Tokens",
        "Get the tokens of a prompt or a chat",
        handler=tokenize,
        metric="tokenize",
        body=TokenizeRequest,
        answer=TokenizeAnswer,
        errors=READS,
        example={"model": EXAMPLE_MODEL, "prompt": "A penstock is", "return_token_strs": True},
    ),
    Route(
        "POST",
        "/detokenize",
        "Tokens",
        "Get the text of tokens",
        handler=detokenize,
        metric="detokenize",
        body=DetokenizeRequest,
        answer=DetokenizeAnswer,
        errors=READS,
        example={"model": EXAMPLE_MODEL, "tokens": [49, 50, 51]},
    ),
    Route("GET", "/live", "Operation", "Check that the process runs", handler=_live, answer=answers.Liveness, needs_key=False),
    Route(
        "GET",
        "/ready",
        "Operation",
        "Check that requests can be answered: 503 without a worker and while the server shuts down",
        handler=_ready,
        answer=answers.Readiness,
        failure=answers.Readiness,
        errors=(503,),
        needs_key=False,
    ),
    Route(
        "GET",
        "/health",
        "Operation",
        "The same as `/ready`, under the name that other servers use",
        handler=_ready,
        answer=answers.Readiness,
        failure=answers.Readiness,
        errors=(503,),
        needs_key=False,
    ),
    Route("GET", METRICS, "Operation", "Get the metrics, for Prometheus", handler=_show_metrics, media_type="text/plain", needs_key=False),
    Route("GET", "/openapi.json", "Operation", "Get this document", handler=_openapi, media_type="application/json", needs_key=False),
    Route("GET", "/docs", "Operation", "Read this document as a page", handler=_docs, media_type="text/html", needs_key=False),
)
