"""Routes that answer at once: a handler a method, whose value is the body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.errors import ErrorShape, OpenAIErrors, error_headers
from penstock.wire.errors import RequestError

Handler = Callable[[Request], Awaitable[object]]
"""Its value is the body, as JSON, unless it is a response already. May raise RequestError."""


class Methods:
    """One path: an application a method. The wrong ones are refused as the rest of the API does, not as the router would."""

    def __init__(self, applications: Mapping[str, ASGIApp], errors: ErrorShape | None = None) -> None:
        self._applications = dict(applications)
        self._errors = errors or OpenAIErrors()
        self.names = frozenset(applications)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        application = self._applications.get(scope["method"])
        if application is None:
            allowed = ", ".join(sorted(self._applications))
            message = f"{scope['path']} takes {allowed}, not {scope['method']}"
            application = refusal(RequestError(message, code="method_not_allowed", status=405), self._errors, {"allow": allowed})
        await application(scope, receive, send)


def handled(handlers: Mapping[str, Handler], errors: ErrorShape | None = None) -> Methods:
    """A path with a handler a method. Whoever can be asked with GET can be asked with HEAD."""
    shape = errors or OpenAIErrors()
    applications: dict[str, ASGIApp] = {method: _Handled(handler, shape) for method, handler in handlers.items()}
    if "GET" in applications:
        applications["HEAD"] = applications["GET"]
    return Methods(applications, shape)


def refusal(error: RequestError, errors: ErrorShape, headers: Mapping[str, str] | None = None) -> Response:
    """The answer to a request that is wrong."""
    shape = errors.fresh()
    status = shape.request_status(error)
    told = {name.decode(): value.decode() for name, value in [*error_headers(status, error.retry_after), *shape.headers]}
    return Response(shape.of_request(error), status, {**told, **(headers or {})})


class _Handled:
    def __init__(self, handler: Handler, errors: ErrorShape) -> None:
        self._handler = handler
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            value = await self._handler(Request(scope, receive))
        except RequestError as error:
            value = refusal(error, self._errors)
        response = value if isinstance(value, Response) else Response(msgspec.json.encode(value), media_type="application/json")
        await response(scope, receive, send)
