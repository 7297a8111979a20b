"""One HTTP response, sent through ASGI by hand: bytes out, back-pressure in."""

from __future__ import annotations

import time
from collections.abc import Awaitable

from starlette.types import Send

from penstock.http.errors import error_headers
from penstock.metrics.frontend import Tally

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]


class Response:
    """Sends a whole body, or a stream of events.

    Sending waits while the client's socket is full: that is what makes a slow reader's events larger. `sending_since` is then
    the time at which it began to wait, so that a reader that takes nothing can be found.
    """

    __slots__ = ("_send", "_tally", "sending_since", "stalled", "started")

    def __init__(self, send: Send, tally: Tally) -> None:
        self._send = send
        self._tally = tally
        self.started = False
        self.stalled = False
        self.sending_since: float | None = None

    async def send_whole(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        self.started = True
        headers = [*(headers or [(b"content-type", b"application/json")]), (b"content-length", str(len(body)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_error(self, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
        await self.send_whole(status, body, error_headers(status) + (headers or []))

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Sends these events in one write, the first with the headers. Whoever awaits it resets `sending_since` afterwards."""
        self._tally.writes += 1
        self.sending_since = time.monotonic()
        if not self.started:
            return self._start_with(events, last)
        return self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def _start_with(self, events: bytes, last: bool) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS})
        await self._send({"type": "http.response.body", "body": events, "more_body": not last})
