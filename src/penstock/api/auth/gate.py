"""The gate before the application: which requests are let in, and which web pages may send them. It reads no body."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Awaitable, Iterable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.anthropic.errors import AnthropicErrors
from penstock.api.auth.keys import Keyring, Tenant, presented_key
from penstock.api.auth.quota import HeaderList
from penstock.api.errors import ErrorShape, OpenAIErrors, refusal
from penstock.config.front_end import ANY_ORIGIN, Limits
from penstock.metrics.frontend import Tally
from penstock.wire.errors import RequestError

TENANT = "penstock.tenant"
"""The key of the request's Tenant in the scope."""

OPEN_PATHS = frozenset({"/live", "/ready", "/metrics", "/docs", "/openapi.json"})
"""Paths that need no key."""

DISCARD_BYTES = 8 * 1024 * 1024
DISCARD_SECONDS = 5.0
_ANTHROPIC = "/v1/messages"
_METHODS = "GET, HEAD, POST, DELETE"
_PREFLIGHT_SECONDS = "600"
# A list of header names, without anything that could start another header.
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")
_EXPOSED = b", ".join(
    [
        b"x-request-id",
        b"request-id",
        b"retry-after",
        *(b"x-ratelimit-%s-%s" % (what, of) for of in (b"requests", b"tokens") for what in (b"limit", b"remaining", b"reset")),
    ]
)
_HINT = "send one as `Authorization: Bearer KEY` or `x-api-key: KEY`"
_MESSAGES = {
    "missing": f"an API key is needed: {_HINT}",
    "unknown": f"the API key is unknown: {_HINT}",
}


class Gate:
    """Passes requests with a known key to the application, with their tenant in the scope. Without any keys it passes all requests.

    Other requests get 401. Before that, a request that announces too large a body gets 413. Answers get CORS headers only for the
    configured origins. OPTIONS needs no key and never reaches the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        tally: Tally,
        cors_origins: Iterable[str] = (),
        max_body_bytes: int = Limits.max_body_bytes,
    ) -> None:
        self._app = app
        self._keyring = keyring
        self._tally = tally
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._max_body_bytes = max_body_bytes

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._origins:
            origin = _header(scope, b"origin")
            if origin is not None:
                send = _adding(send, self._cors_headers(origin))
        if scope["method"] == "OPTIONS":
            return self._answer_to_options(scope)(scope, receive, send)
        if (announced_length(scope) or 0) > self._max_body_bytes:
            return self._refuse_size(scope)(scope, receive, send)
        tenant: Tenant | None = self._keyring.nobody
        if scope["path"] not in OPEN_PATHS:
            key = presented_key(scope["headers"])
            tenant = self._keyring.tenant_of(key)
            if tenant is None:
                return self._refuse(scope, receive, send, "unknown" if key else "missing")
        scope[TENANT] = tenant
        return self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, reason: str) -> None:
        self._tally.failed_authentications[reason,] += 1
        await discard_body(receive)
        error = RequestError(_MESSAGES[reason], code="invalid_api_key", status=401)
        await _refusal(scope["path"], error, {"www-authenticate": "Bearer"})(scope, receive, send)

    def _refuse_size(self, scope: Scope) -> Response:
        error = too_large(self._max_body_bytes)
        self._tally.limits_reached[error.limit or "",] += 1
        return _refusal(scope["path"], error, {})

    def _answer_to_options(self, scope: Scope) -> Response:
        """Answers a browser's preflight. Without configured origins, OPTIONS is not allowed."""
        path = scope["path"]
        if not self._origins:
            message = f"{path} does not take OPTIONS: web pages of other origins are not allowed (--cors-origin)"
            return _refusal(path, RequestError(message, code="method_not_allowed", status=405), {"allow": _METHODS})
        headers = {"access-control-allow-methods": _METHODS, "access-control-max-age": _PREFLIGHT_SECONDS, "allow": _METHODS}
        names = _header(scope, b"access-control-request-headers")
        if names is not None and _NAMES.fullmatch(names):
            # Each by its name: `*` does not include Authorization.
            headers["access-control-allow-headers"] = names.decode()
        return Response(status_code=204, headers={**headers, "vary": "access-control-request-headers"})

    def _cors_headers(self, origin: bytes) -> HeaderList:
        """Without the first of these headers, a browser hides the answer from its page."""
        if ANY_ORIGIN.encode() in self._origins:
            allowed = ANY_ORIGIN.encode()
        elif origin in self._origins:
            allowed = origin
        else:
            return [(b"vary", b"origin")]
        return [
            (b"access-control-allow-origin", allowed),
            (b"access-control-expose-headers", _EXPOSED),
            (b"vary", b"origin"),
        ]


def announced_length(scope: Scope) -> int | None:
    """The length of the body, if the client says it."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None


def too_large(limit: int) -> RequestError:
    return RequestError(f"the body is over the limit of {limit:,} bytes", code="body_too_large", status=413, limit="max_body_bytes")


async def discard_body(receive: Receive) -> None:
    """Reads the body, within bounds, and drops it: some clients read no answer before they have sent everything."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while size < DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _adding(send: Send, headers: HeaderList) -> Send:
    """A `send` that adds these headers to the answer. It is not a coroutine: streams send often."""

    def send_with(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            # A new list: answers may share the application's.
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        return send(message)

    return send_with


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for found, value in scope["headers"] if found == name), None)


def _refusal(path: str, error: RequestError, headers: Mapping[str, str]) -> Response:
    """The answer in the shape of the path's API, with a new request id."""
    shape: ErrorShape = AnthropicErrors() if path.startswith(_ANTHROPIC) else OpenAIErrors()
    response = refusal(error, shape, headers)
    response.headers["x-request-id"] = response.headers.get("request-id") or f"req_{uuid.uuid4().hex}"
    return response
