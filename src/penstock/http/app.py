"""The ASGI application: its routes, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response as StarletteResponse
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.http.admission import Admission, Ticket
from penstock.http.body import ClientGone, read_body
from penstock.http.chat import parse_chat
from penstock.http.completions import parse_completion
from penstock.http.dialect import Dialect
from penstock.http.errors import error_body, fault_body, fault_status, request_error_body
from penstock.http.exchange import Exchange, Producer, Turn
from penstock.http.hints import Headers, Hints
from penstock.http.models import Models, ServedModel
from penstock.http.plan import Plan
from penstock.http.response import Response
from penstock.http.sessions import SessionDirectory, session_routes
from penstock.metrics.frontend import CONTENT_TYPE, FrontEndMetrics
from penstock.stream.fanin import ReaderLeft
from penstock.text.transcript import Transcripts
from penstock.wire.errors import GenerationFault, RequestError

log = logging.getLogger(__name__)

Parse = Callable[[bytes, Headers, Models, Transcripts], tuple[Plan, Dialect]]
TurnType = TypeVar("TurnType", bound=Turn)


class Turns(Protocol[TurnType]):
    """Who knows where a request would like to go, because of the session, or the key, that it comes with."""

    def turn(self, owner: str, hints: Hints) -> TurnType: ...

    async def begin(self, turn: TurnType, model: str) -> None:
        """Looks up what the turn's session or key is bound to. To be followed by `end`."""

    def end(self, turn: TurnType) -> None:
        """The turn is over, however it went."""


@dataclass(frozen=True)
class Services(Generic[TurnType]):
    """What the endpoints work with."""

    models: Models
    transcripts: Transcripts
    turns: Turns[TurnType]
    producer: Producer[TurnType]
    sessions: SessionDirectory
    admission: Admission
    metrics: FrontEndMetrics


class GenerationEndpoint(Generic[TurnType]):
    """A POST that generates. It speaks ASGI itself: nothing stands between the stream and the server."""

    def __init__(self, route: str, parse: Parse, services: Services[TurnType]) -> None:
        self._route = route
        self._parse = parse
        self._services = services
        self._admission = services.admission
        self._metrics = services.metrics

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
        plan, dialect = self._parse(body, scope["headers"], self._services.models, self._services.transcripts)
        try:
            with self._admission.admit(len(plan.submits), response) as ticket:
                return await self._take_turn(plan, dialect, receive, response, ticket)
        except GenerationFault as error:
            await response.send_error(fault_status(error.fault), fault_body(error.fault, plan.grammar_field))
            return "fault"

    async def _take_turn(self, plan: Plan, dialect: Dialect, receive: Receive, response: Response, ticket: Ticket) -> str:
        services, hints = self._services, plan.hints
        turn = services.turns.turn(plan.owner, hints)
        if hints.session is None and hints.affinity is None:
            return await Exchange(plan, dialect, services.producer, turn, response, self._metrics).run(receive, ticket)
        try:
            await services.turns.begin(turn, plan.model.info.name)
            exchange = Exchange(plan, dialect, services.producer, turn, response, self._metrics)
            outcome = await exchange.run(receive, ticket)
            if plan.chat is not None:
                for token_ids in exchange.answers:
                    services.transcripts.record(plan.chat, token_ids)
            return outcome
        finally:
            services.turns.end(turn)


def make_app(services: Services[TurnType]) -> ASGIApp:
    """The front end's routes."""
    models, admission, metrics = services.models, services.admission, services.metrics

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
        "/v1/completions": GenerationEndpoint("completions", parse_completion, services),
        "/v1/chat/completions": GenerationEndpoint("chat", parse_chat, services),
    }
    router = Router(
        [
            Route("/v1/models", list_models),
            Route("/live", live),
            Route("/ready", ready),
            Route("/metrics", show_metrics),
            *session_routes(services.sessions),
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
    details = {
        "engine": info.engine,
        "tokenizer": info.tokenizer,
        "context_length": info.context_length,
        "workers": model.workers,
        "roles": info.roles,
        "parsers": info.parsers,
        "capabilities": info.capabilities,
    }
    return {"id": info.name, "object": "model", "created": info.created, "owned_by": "penstock", "penstock": details}


def _json(status: int, content: object) -> StarletteResponse:
    return StarletteResponse(msgspec.json.encode(content), status, media_type="application/json")


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    await _refuse(scope, receive, send, 404, f"there is no {scope['path']} here", "not_found")


async def _refuse(scope: Scope, receive: Receive, send: Send, status: int, message: str, code: str) -> None:
    body = error_body(message, "invalid_request_error", None, code)
    await StarletteResponse(body, status, media_type="application/json")(scope, receive, send)
