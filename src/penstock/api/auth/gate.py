"""The gate before the application: which requests are let in, and which web pages may send them. It reads no body."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import re
import uuid
from collections.abc import Awaitable, Iterable, Mapping

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.anthropic.errors import AnthropicErrors
from penstock.api.auth.keys import Keyring, Tenant, presented_key
from penstock.api.auth.quota import HeaderList
from penstock.api.errors import ErrorShape, OpenAIErrors, refusal
from penstock.config.front_end import ANY_HOST, ANY_ORIGIN, Key, Limits, key_digest
from penstock.metrics.frontend import Tally
from penstock.wire.address import is_loopback
from penstock.wire.errors import RequestError

TENANT = "penstock.tenant"
"""The key of the request's Tenant in the scope."""

METRICS = "/metrics"
OPEN_PATHS = frozenset({"/live", "/ready", "/health", METRICS, "/docs", "/openapi.json"})
"""Paths that need no API key. The metrics may need a key of their own."""

DISCARD_BYTES = 8 * 1024 * 1024
DISCARD_SECONDS = 5.0
_ANTHROPIC = "/v1/messages"
_METHODS = "GET, HEAD, POST, DELETE"
_PREFLIGHT_SECONDS = "600"
# A list of header names, without anything that could start another header.
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,4096}")
_JSON = b"application/json"
# The port of a Host.
_NAME_OF_HOST = re.compile(r":[0-9]*\Z")
# Values of Host that are remembered as good, if they are not longer than this. Clients can invent more.
MAX_ACCEPTED = 1024
MAX_HOST_BYTES = 256
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

    Other requests get 401. Requests that a web page may have made get 403 or 415: see `PageGuard`. A request that announces too large a
    body gets 413, before its key is checked. Answers get CORS headers only for the configured origins. OPTIONS needs no key and never
    reaches the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        keyring: Keyring,
        tally: Tally,
        cors_origins: Iterable[str] = (),
        max_body_bytes: int = Limits.max_body_bytes,
        hosts: Iterable[str] | None = None,
        metrics_key: Key | None = None,
    ) -> None:
        """`hosts` are names by which clients may reach the server; None: any. `metrics_key` is the one that /metrics needs."""
        self._app = app
        self._keyring = keyring
        self._tally = tally
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._max_body_bytes = max_body_bytes
        self._metrics_key = metrics_key
        self._guard = None if hosts is None else PageGuard(hosts, self._origins, keyring.is_open)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if self._origins:
            origin = _header(scope, b"origin")
            if origin is not None:
                send = _adding(send, self._cors_headers(origin))
        if self._guard is not None and (error := self._guard.refusal(scope)) is not None:
            return self._refuse_page(scope, receive, send, error)
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
        elif self._metrics_key is not None and scope["path"] == METRICS:
            key = presented_key(scope["headers"])
            if not hmac.compare_digest(key_digest(key), self._metrics_key.digest):
                return self._refuse(scope, receive, send, "unknown" if key else "missing")
        scope[TENANT] = tenant
        return self._app(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, reason: str) -> None:
        self._tally.failed_authentications[reason,] += 1
        await discard_body(receive)
        error = RequestError(_MESSAGES[reason], code="invalid_api_key", status=401)
        await _refusal(scope["path"], error, {"www-authenticate": "Bearer"})(scope, receive, send)

    async def _refuse_page(self, scope: Scope, receive: Receive, send: Send, error: RequestError) -> None:
        self._tally.pages_refused[error.code,] += 1
        await discard_body(receive)
        await _refusal(scope["path"], error, {})(scope, receive, send)

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


class PageGuard:
    """Finds requests that a web page makes through its visitor's browser, which can reach servers that the page's owner cannot.

    - DNS rebinding makes the page's host name mean this machine. Then `Host` is that name. An IP address cannot be rebound, and browsers
      resolve `localhost` themselves.
    - A request of any other page has the page's `Origin`, unless the page is this server's own.
    - A form, or a page's request without CORS, has one of three content types, none of them JSON. Programs may leave out the content
      type; a browser that leaves it out sends an `Origin`.

    With keys only `Host` is checked: a page does not know the key.
    """

    def __init__(self, hosts: Iterable[str], origins: frozenset[bytes], is_open: bool) -> None:
        self._hosts = frozenset(hosts)
        self._origins = origins
        self._is_open = is_open
        self._accepted: set[bytes] = set()

    def refusal(self, scope: Scope) -> RequestError | None:
        host = origin = content_type = None
        for name, value in scope["headers"]:
            if name == b"host":
                # Empty: granian's word for a request without. Programs may leave it out, browsers never do.
                host = value or None
            elif name == b"origin":
                origin = value
            elif name == b"content-type":
                content_type = value
        if host is not None and host not in self._accepted and not self._accepts(host):
            return _unknown_host(host)
        if self._is_open and scope["method"] != "OPTIONS":
            if origin is not None and not self._allows(origin, host):
                return _foreign_origin(origin)
            if content_type is not None and content_type != _JSON and scope["method"] == "POST" and not _is_json(content_type):
                return _wrong_content_type(content_type)
        return None

    def _accepts(self, host: bytes) -> bool:
        name = _NAME_OF_HOST.sub("", host.decode("latin-1").lower()).removesuffix(".")
        if not (ANY_HOST in self._hosts or name in self._hosts or _is_address(name) or is_loopback(name)):
            return False
        if len(self._accepted) < MAX_ACCEPTED and len(host) <= MAX_HOST_BYTES:
            self._accepted.add(host)
        return True

    def _allows(self, origin: bytes, host: bytes | None) -> bool:
        is_own = host is not None and origin.partition(b"://")[2] == host.lower()
        return is_own or origin in self._origins or ANY_ORIGIN.encode() in self._origins


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _is_json(content_type: bytes) -> bool:
    kind = content_type.partition(b";")[0].strip().lower()
    return kind == _JSON or (kind.startswith(b"application/") and kind.endswith(b"+json"))


def _unknown_host(host: bytes) -> RequestError:
    shown = host[:80].decode("latin-1")
    name = _NAME_OF_HOST.sub("", shown)
    message = f"`Host` is {shown!r}, a name that is not allowed: use the IP address, or start the server with --allowed-host {name}"
    return RequestError(message, code="host_not_allowed", status=403)


def _foreign_origin(origin: bytes) -> RequestError:
    shown = origin[:80].decode("latin-1")
    message = f"a web page of origin {shown!r} may not use this server: start it with --cors-origin {shown}, or with API keys"
    return RequestError(message, code="origin_not_allowed", status=403)


def _wrong_content_type(content_type: bytes) -> RequestError:
    shown = content_type[:80].decode("latin-1")
    message = f"the content type is {shown!r}: expected application/json (with curl: -H 'content-type: application/json')"
    return RequestError(message, code="unsupported_media_type", status=415)


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
