"""The metrics on an address of their own: a small HTTP server for one application whose requests have no body."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, Self

from starlette.types import ASGIApp, Message

from penstock.wire.address import TcpAddress
from penstock.wire.errors import ConfigError

MAX_HEAD_BYTES = 16 * 1024
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 10.0
"""For one request, from its first byte to the last of its answer. Each connection has one request."""


class MetricsServer:
    """Serves until its context is left. Then it waits for nobody."""

    def __init__(self, app: ASGIApp, address: TcpAddress) -> None:
        self._app = app
        self._address = address
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Raises ConfigError when the address is not available."""
        try:
            self._server = await asyncio.start_server(self._accept, self._address.host, self._address.port, limit=MAX_HEAD_BYTES)
        except OSError as error:
            shown = str(self._address).removeprefix("tcp://")
            raise ConfigError(f"cannot listen on --metrics-address {shown}: {error.strerror or error}") from error
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(TcpAddress(host, port)).replace("tcp://", "http://") + "/metrics"

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="metrics request")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                answer = await self._answer(await reader.readuntil(b"\r\n\r\n"))
                writer.write(answer)
                await writer.drain()
                writer.write_eof()
                # Closing while bytes are unread would reset the connection, and the client might lose the answer.
                await reader.read(MAX_HEAD_BYTES)
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            writer.transport.abort()
        finally:
            writer.close()

    async def _answer(self, head: bytes) -> bytes:
        scope = _scope(head)
        if scope is None:
            return b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        status = HTTPStatus(sent[0]["status"])
        body = b"".join(message.get("body", b"") for message in sent[1:])
        lines = [b"HTTP/1.1 %d %s" % (status, status.phrase.encode()), b"connection: close"]
        headers: dict[bytes, bytes] = {b"content-length": b"%d" % len(body), **dict(sent[0]["headers"])}
        lines += [b"%s: %s" % pair for pair in headers.items()]
        return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if scope["method"] == "HEAD" else body)


def _scope(head: bytes) -> dict[str, Any] | None:
    """The ASGI scope of a request. None if it is not HTTP/1."""
    request, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = request.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return None
    path, _, query = words[1].partition("?")
    fields = [line.partition(":") for line in lines]
    headers = [(name.strip().lower().encode("latin-1"), value.strip().encode("latin-1")) for name, _, value in fields]
    return {"type": "http", "method": words[0], "path": path, "query_string": query.encode("latin-1"), "headers": headers}
