"""The gate before the whole application: who may come in, and which web pages may ask."""

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
from penstock.config.front_end import ANY_ORIGIN
from penstock.metrics.frontend import Tally
from penstock.wire.errors import RequestError

TENANT = "penstock.tenant"
"""Where a scope has the Tenant of its request."""

OPEN_PATHS = frozenset({"/live", "/ready", "/metrics", "/docs", "/openapi.json"})
"""What needs no key."""

DISCARD_BYTES = 8 * 1024 * 1024
DISCARD_SECONDS = 5.0
_ANTHROPIC = "/v1/messages"
_METHODS = "GET, HEAD, POST, DELETE"
_PREFLIGHT_SECONDS = "600"
# A list of header names, and nothing that could begin another header.
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
    "unknown": f"the API key is not known here: {_HINT}",
}


class Gate:
    """Lets requests with a known key through to the application, their tenant in the scope; all of them where no key is needed.

    The others get 401. Answers for web pages of other origins get what browsers ask for only where such origins were named. An
    OPTIONS needs no key and never reaches the application.
    """

    def __init__(self, app: ASGIApp, keyring: Keyring, tally: Tally, cors_origins: Iterable[str] = ()) -> None:
        self._app = app
        self._keyring = keyring
        self._tally = tally
        self._origins = frozenset(origin.encode() for origin in cors_origins)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._origins:
            origin = _header(scope, b"origin")
            if origin is not None:
                send = _adding(send, self._cors_headers(origin))
        if scope["method"] == "OPTIONS":
            return self._answer_to_options(scope)(scope, receive, send)
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
        await _discard_body(receive)
        response = _refusal(scope["path"], _MESSAGES[reason], 401, "invalid_api_key", {"www-authenticate": "Bearer"})
        await response(scope, receive, send)

    def _answer_to_options(self, scope: Scope) -> Response:
        """To a browser's preflight, whether its page may ask; to others, that there is no such method."""
        path = scope["path"]
        if not self._origins:
            message = f"{path} does not take OPTIONS: web pages of other origins are not let in (--cors-origin)"
            return _refusal(path, message, 405, "method_not_allowed", {"allow": _METHODS})
        headers = {"access-control-allow-methods": _METHODS, "access-control-max-age": _PREFLIGHT_SECONDS, "allow": _METHODS}
        names = _header(scope, b"access-control-request-headers")
        if names is not None and _NAMES.fullmatch(names):
            # Named one by one: `*` would not stand for Authorization.
            headers["access-control-allow-headers"] = names.decode()
        return Response(status_code=204, headers={**headers, "vary": "access-control-request-headers"})

    def _cors_headers(self, origin: bytes) -> HeaderList:
        """Without the first of them, a browser does not show an answer to its page."""
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


async def _discard_body(receive: Receive) -> None:
    """Takes what comes, within bounds, and keeps nothing: a client that cannot send its body to the end does not read the answer."""
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DISCARD_SECONDS):
            while size < DISCARD_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return


def _adding(send: Send, headers: HeaderList) -> Send:
    """Sends through, and adds the headers to the answer's. No coroutine of its own: streams send a lot."""

    def send_with(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            # A new list: that of the application may be of many answers.
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        return send(message)

    return send_with


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for found, value in scope["headers"] if found == name), None)


def _refusal(path: str, message: str, status: int, code: str, headers: Mapping[str, str]) -> Response:
    """In the shape of the API that the path belongs to, with an id of its own."""
    shape: ErrorShape = AnthropicErrors() if path.startswith(_ANTHROPIC) else OpenAIErrors()
    response = refusal(RequestError(message, code=code, status=status), shape, headers)
    response.headers["x-request-id"] = response.headers.get("request-id") or f"req_{uuid.uuid4().hex}"
    return response
