"""HTTP to one engine's server: the one file here that knows aiohttp.

No redirect is followed and no cookie kept: a request goes to the address that was given, or nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Generator
from typing import Any, NamedTuple

import msgspec

from penstock.backends.http.dialects import Body, message_in
from penstock.backends.http.settings import HttpEngineSettings
from penstock.backends.http.sse_lines import DONE, EventLines, EventTooLarge
from penstock.wire.errors import ConfigError, PenstockError

try:
    import aiohttp
except ImportError as missing:
    raise ConfigError(f"--engine http needs the package {missing.name!r}: pip install 'penstock[http]'") from missing

MIB = 2**20
MOST_ERROR_BYTES = 64 * 1024
MOST_ANSWER_BYTES = 64 * MIB
# Servers close connections that have been idle for five seconds, most of them; one that is about to be closed must not be used.
KEEPALIVE_SECONDS = 2.0
# After the last token: how long the end of the answer may take to come, so that its connection can be used again.
ENDING_SECONDS = 2.0


class Unreachable(PenstockError):
    """No connection could be made. The message says why."""


class Broken(PenstockError):
    """The connection broke before the answer's end, the server fell silent, or it sent what is no answer. The message says which."""


class Silent(Broken):
    """The server is there, and says nothing."""


class Answer(NamedTuple):
    status: int
    content_type: str
    body: bytes

    @property
    def json(self) -> object:
        """What the body says; None where it is no JSON."""
        try:
            return msgspec.json.decode(self.body)
        except (ValueError, RecursionError):
            return None

    @property
    def message(self) -> str:
        """What it says went wrong."""
        content = self.json
        return message_in(content) if content else self.body[:200].decode("utf-8", "replace").strip() or "nothing"


class Stream:
    """An answer that comes as events, or whole. `refusal` is what came instead."""

    def __init__(self, response: aiohttp.ClientResponse, refusal: Answer | None) -> None:
        self._response = response
        self.refusal = refusal
        self._ends_at: float | None = None

    def end_soon(self) -> None:
        """All that matters has come; what is left may not take long, whatever it is."""
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + ENDING_SECONDS

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The data of each event but the one that says that there are no more; a whole answer is one event. Raises Broken."""
        if self._response.content_type != "text/event-stream":
            yield await _read(self._response, MOST_ANSWER_BYTES)
            return
        lines, is_done = EventLines(MOST_ANSWER_BYTES), False
        while data := await self._next():
            try:
                events = lines.feed(data)
            except EventTooLarge as error:
                raise Broken(str(error)) from error
            for event in events:
                if event == DONE:
                    is_done = True
                    self.end_soon()
                if not is_done:
                    yield event

    async def _next(self) -> bytes:
        """What has come meanwhile; nothing at the end."""
        with _translated():
            try:
                async with asyncio.timeout_at(self._ends_at):
                    return await self._response.content.readany()
            except TimeoutError:
                if self._ends_at is not None:
                    return b""
                raise


class EngineClient:
    """Connections to one server, as many as there are generations, kept a moment for the next one."""

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
        tracing.on_connection_reuseconn.append(_note_kept)
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

    async def get(self, path: str, seconds: float) -> Answer:
        """Raises Unreachable or Broken."""
        assert self._session is not None
        with _translated():
            async with asyncio.timeout(seconds), self._session.get(self._url + path, allow_redirects=False) as response:
                return Answer(response.status, response.content_type, await _read(response, MOST_ANSWER_BYTES))

    async def post(self, path: str, body: Body, seconds: float) -> Answer:
        """For answers that come soon. Raises Unreachable or Broken."""
        assert self._session is not None
        with _translated():
            async with asyncio.timeout(seconds), await self._send(path, body) as response:
                return Answer(response.status, response.content_type, await _read(response, MOST_ANSWER_BYTES))

    @contextlib.asynccontextmanager
    async def stream(self, path: str, body: Body) -> AsyncGenerator[Stream, None]:
        """For answers that take their time. Leaving it before the end of the answer closes the connection. Raises Unreachable or Broken."""
        with _translated():
            response = await self._send(path, body)
        try:
            refusal = None
            if response.status != 200:
                refusal = Answer(response.status, response.content_type, await _read_beginning(response, MOST_ERROR_BYTES))
            yield Stream(response, refusal)
        finally:
            # Keeps the connection if the answer was read to its end, and closes it otherwise.
            response.release()

    async def _send(self, path: str, body: Body) -> aiohttp.ClientResponse:
        assert self._session is not None
        content, headers = msgspec.json.encode(body), {"Content-Type": "application/json"}
        while True:
            use = _Use()
            try:
                return await self._session.post(
                    self._url + path, data=content, headers=headers, allow_redirects=False, trace_request_ctx=use
                )
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # A connection that was kept, and that the server closed or reset as this was on its way: nobody has read it. Of a new one
                # that is not known, and what has been begun must not be begun again.
                if not use.is_of_kept:
                    raise


class _Use:
    """Whether a request went over a connection that had been kept."""

    is_of_kept = False


async def _note_kept(_session: aiohttp.ClientSession, context: Any, _params: aiohttp.TraceConnectionReuseconnParams) -> None:
    if isinstance(context.trace_request_ctx, _Use):
        context.trace_request_ctx.is_of_kept = True


async def _read(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """The body. One that is longer than that is no answer."""
    parts, size = [], 0
    with _translated():
        while part := await response.content.readany():
            size += len(part)
            if size > most_bytes:
                raise Broken(f"the answer is longer than {most_bytes:,} bytes")
            parts.append(part)
    return b"".join(parts)


async def _read_beginning(response: aiohttp.ClientResponse, enough_bytes: int) -> bytes:
    """So much of the body, or a little more: servers that say what was wrong with a request may repeat it."""
    parts, size = [], 0
    with _translated():
        while size < enough_bytes and (part := await response.content.readany()):
            size += len(part)
            parts.append(part)
    return b"".join(parts)


@contextlib.contextmanager
def _translated() -> Generator[None, None, None]:
    """Errors of aiohttp and of sockets as our own."""
    try:
        yield
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
        raise Unreachable(_reason(error)) from error
    except TimeoutError as error:
        raise Silent(_reason(error)) from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # aiohttp has ValueError for lines of a header that are too long.
        raise Broken(_reason(error)) from error


def _reason(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return f"cannot connect: {error.os_error if hasattr(error, 'os_error') else error}"
        case aiohttp.ClientConnectorError():
            return f"cannot connect: {os.strerror(error.errno) if error.errno and error.errno > 0 else error.os_error}"
        case aiohttp.ConnectionTimeoutError():
            return "cannot connect: no answer in time"
        case TimeoutError():
            return "the server was silent for too long"
        case aiohttp.ServerDisconnectedError():
            return "the connection was closed before the answer"
        case aiohttp.ClientPayloadError() | ConnectionError():
            return "the connection broke in mid-answer"
        case _:
            return f"{type(error).__name__}: {error}"
