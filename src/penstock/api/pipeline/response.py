"""One HTTP response, sent through ASGI by hand: bytes out, back-pressure in."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from starlette.types import Send

from penstock.api.errors import error_headers
from penstock.metrics.frontend import Tally

Headers = list[tuple[bytes, bytes]]

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_JSON_HEADERS = [(b"content-type", b"application/json")]


class Sink(Protocol):
    """Where an answer goes: to a client, or into a recording.

    `sending_since` is the time since when a client takes nothing, and `stalled` whether it was cut off for that.
    """

    sending_since: float | None
    stalled: bool

    async def send_whole(self, status: int, body: bytes) -> None: ...

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Sends these events in one write. Whoever awaits it resets `sending_since` afterwards."""


class Response:
    """Sends a whole body, or a stream of events.

    Sending waits while the client's socket is full: that is what makes a slow reader's events larger. `sending_since` is then
    the time at which it began to wait, so that a reader that takes nothing can be found.
    """

    __slots__ = ("_more_headers", "_send", "_tally", "sending_since", "stalled", "started")

    def __init__(self, send: Send, tally: Tally, more_headers: Callable[[], Headers] = list) -> None:
        """`more_headers` is asked when the answer begins: what it says may change until then."""
        self._send = send
        self._tally = tally
        self._more_headers = more_headers
        self.started = False
        self.stalled = False
        self.sending_since: float | None = None

    async def send_whole(self, status: int, body: bytes, headers: Headers = _JSON_HEADERS) -> None:
        await self._send_body(status, body, headers)

    async def send_error(self, status: int, body: bytes, retry_after: float | None = None) -> None:
        await self._send_body(status, body, error_headers(status, retry_after))

    async def _send_body(self, status: int, body: bytes, headers: Headers) -> None:
        self.started = True
        headers = [*headers, *self._more_headers(), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Sends these events in one write, the first with the headers. Whoever awaits it resets `sending_since` afterwards."""
        self._tally.writes += 1
        self.sending_since = time.monotonic()
        if not self.started:
            return self._start_with(events, last)
        return self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def _start_with(self, events: bytes, last: bool) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": [*_SSE_HEADERS, *self._more_headers()]})
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})
