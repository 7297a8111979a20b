"""The HTTP client for one engine's server. Only this file knows aiohttp.

Redirects are not followed and cookies are not kept: a request goes to the configured address or nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import aiohttp
import msgspec

from penstock.backends.http.dialects import Body, message_in
from penstock.backends.http.sse import DONE, EventReader, EventTooLarge
from penstock.config.engines import HttpEngineSettings
from penstock.wire.errors import PenstockError

MIB = 2**20
MAX_ERROR_BYTES = 64 * 1024
MAX_ANSWER_BYTES = 64 * MIB
# Most servers close idle connections after five seconds. A connection that is about to be closed must not be used.
KEEPALIVE_SECONDS = 2.0
# How long to wait for the end of an answer after its last token, so that its connection can be used again.
ENDING_SECONDS = 2.0


class Unreachable(PenstockError):
    """Connecting failed. The message says why."""


class Broken(PenstockError):
    """The connection broke, the server went silent, or the answer cannot be read. The message says which."""


class Silent(Broken):
    """The server is connected, but sends nothing."""


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes

    @property
    def json(self) -> object:
        """The decoded body. None if it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> str:
        """The error message of the body."""
        content = self.json
        return message_in(content) if content else self.body[:200].decode("utf-8", "replace").strip() or "nothing"


class Stream:
    """An answer that comes as events, or whole. `refusal` is an error answer instead."""

    def __init__(self, response: aiohttp.ClientResponse, refusal: Answer | None) -> None:
        self._response = response
        self.refusal = refusal
        self._ends_at: float | None = None

    def end_soon(self) -> None:
        """Limits the time for the rest of the answer, of which nothing is needed."""
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + ENDING_SECONDS

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event, without the final `[DONE]`. A whole answer counts as one event. Raises Broken."""
        if self._response.content_type != "text/event-stream":
            yield await _read(self._response, MAX_ANSWER_BYTES)
            return
        reader, is_done = EventReader(MAX_ANSWER_BYTES), False
        while data := await self._next():
            try:
                events = reader.feed(data)
            except EventTooLarge as error:
                raise Broken(str(error)) from error
            for event in events:
                if event == DONE:
                    is_done = True
                    self.end_soon()
                if not is_done:
                    yield event

    async def _next(self) -> bytes:
        """The bytes received since the last call. Empty at the end."""
        with _translated():
            try:
                async with asyncio.timeout_at(self._ends_at):
                    return await self._response.content.readany()
            except TimeoutError:
                if self._ends_at is not None:
                    return b""
                raise


class EngineClient:
    """Connections to one server: one per generation, kept for KEEPALIVE_SECONDS afterwards."""

    def __init__(self, settings: HttpEngineSettings) -> None:
        self._url = settings.url
        self._headers = {"Accept-Encoding": "identity", "User-Agent": "penstock"}
        if settings.api_key is not None:
            self._headers["Authorization"] = f"Bearer {settings.api_key}"
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_seconds, sock_read=settings.idle_seconds)
        self._session: aiohttp.ClientSession | None = None

    def open(self) -> None:
        """Must be called on the event loop."""
        tracing = aiohttp.TraceConfig()
        tracing.on_connection_reuseconn.append(_note_reuse)
        self._session = aiohttp.ClientSession(
            trace_configs=[tracing],
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            timeout=self._timeout,
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ask(self, path: str, body: Body | None, seconds: float) -> Answer:
        """For short answers: a GET, or a POST with a body. Raises Unreachable or Broken."""
        with _translated():
            async with asyncio.timeout(seconds), await self._send(path, body) as response:
                return Answer(response.status, response.content_type, await _read(response, MAX_ANSWER_BYTES))

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Body) -> AsyncGenerator[Stream, None]:
        """For long answers. Leaving the context before the end of the answer closes the connection. Raises Unreachable or Broken."""
        with _translated():
            response = await self._send(path, body)
        try:
            refusal = None
            if response.status != 200:
                refusal = Answer(response.status, response.content_type, await _read_start(response, MAX_ERROR_BYTES))
            yield Stream(response, refusal)
        finally:
            # Keeps the connection if the answer was read to its end, else closes it.
            response.release()

    async def _send(self, path: str, body: Body | None) -> aiohttp.ClientResponse:
        assert self._session is not None
        request: dict[str, Any] = {"url": self._url + path, "allow_redirects": False}
        if body is None:
            return await self._session.get(**request)
        request |= {"data": msgspec.json.encode(body), "headers": {"Content-Type": "application/json"}}
        while True:
            use = _Use()
            try:
                return await self._session.post(**request, trace_request_ctx=use)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # On a kept connection: the server closed it before it read the request, so it is sent again. On a new connection the
                # server may have begun the request, which must not run twice.
                if not use.is_reused:
                    raise


class _Use:
    """Whether a request used a kept connection."""

    is_reused = False


async def _note_reuse(_session: aiohttp.ClientSession, context: Any, _params: aiohttp.TraceConnectionReuseconnParams) -> None:
    if isinstance(context.trace_request_ctx, _Use):
        context.trace_request_ctx.is_reused = True


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body. Raises Broken if it is longer."""
    body = await _read_start(response, max_bytes + 1)
    if len(body) > max_bytes:
        raise Broken(f"the answer is longer than {max_bytes:,} bytes")
    return body


async def _read_start(response: aiohttp.ClientResponse, enough_bytes: int) -> bytes:
    """At least `enough_bytes` of the body, if it has them. Error bodies may repeat a whole request."""
    parts, size = [], 0
    with _translated():
        while size < enough_bytes and (part := await response.content.readany()):
            size += len(part)
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def _translated() -> Generator[None, None, None]:
    """Translates errors of aiohttp and of sockets."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
        raise Unreachable(describe_error(error)) from error
    except TimeoutError as error:
        raise Silent(describe_error(error)) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # aiohttp raises ValueError for header lines that are too long.
        raise Broken(describe_error(error)) from error


def describe_error(error: Exception) -> str:
    """What went wrong with a connection, in words."""
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return f"cannot connect: {error.os_error if hasattr(error, 'os_error') else error}"
        case aiohttp.ClientConnectorError():
            return f"cannot connect: {os.strerror(error.errno) if error.errno and error.errno > 0 else error.os_error}"
        case aiohttp.ConnectionTimeoutError():
            return "cannot connect: no answer in time"
        case aiohttp.InvalidURL():
            return "expected an address such as http://127.0.0.1:8000"
        case TimeoutError():
            return "the server was silent for too long"
        case aiohttp.ServerDisconnectedError():
            return "the connection was closed before the answer"
        case aiohttp.ClientPayloadError() | ConnectionError():
            return "the connection broke during the answer"
        case _:
            return f"{type(error).__name__}: {error}"
