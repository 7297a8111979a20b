"""The ASGI application: its routes, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.http.admission import Admission
from penstock.http.body import ClientGone, read_body
from penstock.http.chat import parse_chat
from penstock.http.completions import parse_completion
from penstock.http.dialect import Dialect
from penstock.http.errors import error_body, fault_body, fault_status, request_error_body
from penstock.http.exchange import Exchange, Producer
from penstock.http.models import Models, ServedModel
from penstock.http.plan import Plan
from penstock.http.response import Response
from penstock.metrics.frontend import CONTENT_TYPE, FrontEndMetrics
from penstock.stream.fanin import ReaderLeft
from penstock.wire.errors import GenerationFault, RequestError

log = logging.getLogger(__name__)

Parse = Callable[[bytes, Models], tuple[Plan, Dialect]]


class GenerationEndpoint:
    """A POST that generates. It speaks ASGI itself: nothing stands between the stream and the server."""

    def __init__(
        self, route: str, parse: Parse, models: Models, producer: Producer, admission: Admission, metrics: FrontEndMetrics
    ) -> None:
        self._route = route
        self._parse = parse
        self._models = models
        self._producer = producer
        self._admission = admission
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(send, self._metrics.tally)
        outcome = "failed"
        try:
            outcome = await self._answer(scope, receive, response)
        except RequestError as error:
            outcome = f"refused_{error.status}"
            await response.send_error(error.status, request_error_body(error))
        except (ReaderLeft, ClientGone):
            outcome = "client_left"
            self._metrics.tally.clients_left += 1
        except asyncio.CancelledError:
            # Raising leaves the response unfinished, so that its client cannot take it for a whole one.
            outcome = "stalled" if response.stalled else "cancelled"
            raise
        except Exception:
            log.exception("a request failed")
            if not response.started:
                await response.send_error(500, error_body("internal error", "server_error", None, "internal_error"))
            raise
        finally:
            self._metrics.tally.requests[self._route, outcome] += 1

    async def _answer(self, scope: Scope, receive: Receive, response: Response) -> str:
        limits = self._admission.limits
        body = await read_body(scope, receive, limits.max_body_bytes, limits.stall_seconds)
        plan, dialect = self._parse(body, self._models)
        try:
            with self._admission.admit(len(plan.submits), response) as ticket:
                exchange = Exchange(plan, dialect, self._producer, response, self._metrics)
                return await exchange.run(receive, ticket)
        except GenerationFault as error:
            await response.send_error(fault_status(error.fault), fault_body(error.fault, plan.grammar_field))
            return "fault"


def make_app(models: Models, producer: Producer, admission: Admission, metrics: FrontEndMetrics) -> ASGIApp:
    """The front end's routes."""

    def endpoint(route: str, parse: Parse) -> GenerationEndpoint:
        return GenerationEndpoint(route, parse, models, producer, admission, metrics)

    async def list_models(_: Request) -> StarletteResponse:
        return _json(200, {"object": "list", "data": [_described(model) for model in models.all()]})

    async def live(_: Request) -> StarletteResponse:
        return _json(200, {"status": "live"})

    async def ready(_: Request) -> StarletteResponse:
        if admission.is_draining:
            return _json(503, {"status": "draining"})
        served = [model.info.name for model in models.all()]
        return _json(200 if served else 503, {"status": "ready" if served else "no worker is ready", "models": served})

    async def show_metrics(_: Request) -> StarletteResponse:
        return StarletteResponse(metrics.render(), media_type=CONTENT_TYPE)

    generating = {
        "/v1/completions": endpoint("completions", parse_completion),
        "/v1/chat/completions": endpoint("chat", parse_chat),
    }
    router = Router(
        [
            Route("/v1/models", list_models),
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", show_metrics),
        ],
        default=_not_found,
    )

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        # The router does the same, at a cost that shows when thousands of requests come at once.
        application = generating.get(scope["path"])
        if application is None:
            await router(scope, receive, send)
        elif scope["method"] == "POST":
            await application(scope, receive, send)
        else:
            await _refuse(scope, receive, send, 405, f"{scope['path']} takes POST, not {scope['method']}", "method_not_allowed")

    return app


def _described(model: ServedModel) -> dict[str, object]:
    info = model.info
    details = {"engine": info.engine, "tokenizer": info.tokenizer, "context_length": info.context_length}
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "penstock", "penstock": details}


def _json(status: int, content: object) -> StarletteResponse:
    return StarletteResponse(msgspec.json.encode(content), status, media_type="application/json")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _refuse(scope, receive, send, 404, f"there is no {scope['path']} here", "not_found")


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str, code: str) -> None:
    body = error_body(message, "invalid_request_error", None, code)
    await StarletteResponse(body, status, media_type="application/json")(scope, receive, send)
