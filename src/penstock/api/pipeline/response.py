"""One HTTP response: bytes out through ASGI, back-pressure in, and whether its client is still there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from starlette.types import Receive, Send

from penstock.api.auth.quota import HeaderList
from penstock.api.errors import error_headers
from penstock.metrics.frontend import Tally
from penstock.stream.mailbox import ReaderLeft, all_done
from penstock.wire.errors import PenstockError

log = logging.getLogger(__name__)

_SSE_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_JSON_HEADERS = [(b"content-type", b"application/json")]
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: every reader of server-sent events drops it."""

WATCH_AFTER_SECONDS = 0.1
REMIND_SECONDS = 0.5
"""How often the shared timer looks for clients that have heard nothing, unless they have less patience."""

MAX_REMINDED_AT_ONCE = 64
"""Clients that something is sent to in one go: 1 to 2 ms."""

# What is larger is sent in pieces. The server's send waits only between pieces, however large they are.
MAX_PIECE_BYTES = 64 * 1024

Render = Callable[[], tuple[bytes, str | None]]
"""Takes all that has arrived. Returns its events and, with the last of them, the outcome of the stream."""


Body = bytes | Sequence[bytes]
"""A whole body, or its pieces: joining hundreds of megabytes would take too long."""


class BrokenOff(PenstockError):
    """A fault after the headers of a whole answer: the status is sent. Raised to leave the answer unfinished, so clients try again."""


class Sink(Protocol):
    """Where an answer goes: to a client, or into a recording.

    `sending_since` is the time since when the client takes nothing. `stalled`: it was cut off for that.
    """

    sending_since: float | None
    stalled: bool

    async def send_whole(self, status: int, body: Body) -> None: ...

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Sends these events in one write. The caller awaits it, then resets `sending_since`."""

    def send_idle(self, content: bytes) -> Awaitable[None]:
        """Sends a keep-alive, such as a comment, to a client that waits. Awaited as `send_events`."""

    async def send_blank(self) -> None:
        """Sends white space before a whole answer. From now on the status is 200."""


Reading = Callable[[Sink, int], AbstractContextManager[object]]
"""Makes a context in which a reader that takes nothing is cut off, and for which a server that stops waits. The number is the size of
the answer. Raises RequestError when the server has no room for it."""


class Response:
    """Sends a whole body, or a stream of events.

    Sending waits while the client's socket is full; meanwhile a slow reader's events grow. `sending_since` is the time at which the
    wait began, so that a reader that takes nothing can be found. What fits into the buffers of the server and the kernel, some hundred
    kilobytes, counts as taken.
    """

    __slots__ = ("_has_left", "_more_headers", "_reading", "_receive", "_send", "_tally", "sending_since", "stalled", "started")

    def __init__(self, send: Send, receive: Receive, tally: Tally, reading: Reading, more_headers: Callable[[], HeaderList] = list) -> None:
        """`more_headers` is called when the answer starts: its values may change until then."""
        self._send = send
        self._receive = receive
        self._tally = tally
        self._reading = reading
        self._more_headers = more_headers
        self._has_left = False
        self.started = False
        self.stalled = False
        self.sending_since: float | None = None

    async def send_error(self, status: int, body: bytes, retry_after: float | None = None) -> None:
        """After the headers of a whole answer the status is 200, whatever the error. Then the body alone tells an error that no other
        attempt would mend. For the others BrokenOff is raised."""
        if self.started and (status >= 500 or status == 429):
            log.warning(
                "an answer in one piece is broken off: it failed after its headers were sent, with status %d: %s", status, body[:300]
            )
            raise BrokenOff(f"status {status} after the headers")
        await self.send_whole(status, body, error_headers(status, retry_after))

    async def send_whole(self, status: int, body: Body, headers: HeaderList = _JSON_HEADERS) -> None:
        """Returns when the client has taken it. Raises ReaderLeft when the client leaves before that. Nobody else may call `receive`."""
        pieces = (body,) if isinstance(body, bytes) else body
        size = sum(map(len, pieces))
        if size > MAX_PIECE_BYTES:
            with self._reading(self, size):
                if not self.started:
                    await self._start(status, [*headers, _length(size)])
                await self._send_watched(pieces)
            pieces = ()
        elif not self.started:
            await self._start(status, [*headers, _length(size)])
        await self._send({"type": "http.response.body", "body": b"".join(pieces), "more_body": False})

    def _start(self, status: int, headers: HeaderList) -> Awaitable[None]:
        self.started = True
        return self._send({"type": "http.response.start", "status": status, "headers": [*headers, *self._more_headers()]})

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        """Sends these events in one write; the first one also sends the headers."""
        self._tally.writes += 1
        self.sending_since = time.monotonic()
        if not self.started or len(events) > MAX_PIECE_BYTES:
            return self._send_more(events, last)
        return self._send({"type": "http.response.body", "body": events, "more_body": not last})

    def send_idle(self, content: bytes) -> Awaitable[None]:
        self._tally.keep_alives += 1
        self.sending_since = time.monotonic()
        return self._send_more(content, last=False)

    async def send_blank(self) -> None:
        self._tally.keep_alives += 1
        self.sending_since = time.monotonic()
        await self._send_more(b"\n", last=False, headers=_JSON_HEADERS)
        self.sending_since = None

    async def _send_more(self, events: bytes, last: bool, headers: HeaderList = _SSE_HEADERS) -> None:
        """`send_events` for those that need several messages."""
        if not self.started:
            await self._start(200, headers)
        if len(events) > MAX_PIECE_BYTES:
            await self._send_pieces((events,))
            events = b""
        if events or last:
            await self._send({"type": "http.response.body", "body": events, "more_body": not last})

    async def _send_watched(self, pieces: Sequence[bytes]) -> None:
        watch = ClientWatch(self._receive, self._leave)
        watch.start()
        try:
            await self._send_pieces(pieces)
        finally:
            self.sending_since = None
            watch.close()

    async def _send_pieces(self, pieces: Sequence[bytes]) -> None:
        for piece in regrouped(pieces):
            # A send to a client that has gone raises nothing. Not asked after the last piece: it may leave once it has that.
            if self._has_left:
                raise ReaderLeft
            self.sending_since = time.monotonic()
            await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    def _leave(self) -> None:
        self._has_left = True


def _length(size: int) -> tuple[bytes, bytes]:
    return b"content-length", str(size).encode()


def regrouped(pieces: Sequence[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of MAX_PIECE_BYTES; the last one may be shorter."""
    parts: list[bytes] = []
    room = MAX_PIECE_BYTES
    for piece in pieces:
        start = 0
        while start < len(piece):
            part = piece[start : start + room]
            parts.append(part)
            start += len(part)
            room -= len(part)
            if not room:
                yield b"".join(parts)
                parts, room = [], MAX_PIECE_BYTES
    if parts:
        yield b"".join(parts)


class EventWriter:
    """Sends what arrives as events: one write per wake-up, in the wake-up itself.

    Resuming a task costs more than rendering an event, so `wake` renders and sends in a plain callback. While the client's
    socket is full, a task waits for it; nothing is rendered, and new tokens merge in the mailboxes.

    `has_spoken`: something was sent since somebody set it to False.
    """

    def __init__(self, response: Sink, render: Render) -> None:
        self._loop = asyncio.get_running_loop()
        self._response = response
        self._render = render
        self._finished: asyncio.Future[str] = self._loop.create_future()
        self._sending: asyncio.Task[None] | None = None
        self.has_spoken = False

    async def run(self) -> str:
        """Writes until the stream ends, and returns its outcome. Raises what `render` or `stop` raises."""
        self.wake()
        try:
            return await self._finished
        finally:
            if self._sending is not None:
                self._sending.cancel()
                await all_done([self._sending])
            # Breaks a reference cycle: a request is freed at its end, not by the garbage collector, which runs rarely.
            self._render = _nothing

    def wake(self) -> None:
        """Something has arrived."""
        self.write(self._render)

    def write(self, render: Render) -> None:
        """Sends what this renders, unless the client has not taken what was sent before."""
        if self._sending is not None or self._finished.done():
            return
        try:
            events, outcome = render()
            waiting = None
            if events or outcome:
                self.has_spoken = True
                waiting = _start(self._response.send_events(events, last=outcome is not None))
        except Exception as error:  # noqa: BLE001, raised again where `run` is awaited
            self.stop(error)
            return
        self._await(waiting, outcome)

    def send_idle(self, content: bytes) -> None:
        """Sends a keep-alive, unless the client has not taken what was sent before."""
        if self._sending is not None or self._finished.done():
            return
        self.has_spoken = True
        try:
            waiting = _start(self._response.send_idle(content))
        except Exception as error:  # noqa: BLE001, raised again where `run` is awaited
            self.stop(error)
            return
        self._await(waiting, None)

    def _await(self, waiting: Awaitable[None] | None, outcome: str | None) -> None:
        if waiting is None:
            self._sent(outcome)
        else:
            self._sending = self._loop.create_task(self._wait(waiting, outcome))

    def stop(self, error: Exception) -> None:
        """Ends the stream now: `run` raises this error."""
        if not self._finished.done():
            self._finished.set_exception(error)

    async def _wait(self, waiting: Awaitable[None], outcome: str | None) -> None:
        try:
            await waiting
        except Exception as error:  # noqa: BLE001, raised again where `run` is awaited
            self.stop(error)
        self._sending = None
        self._sent(outcome)
        self.wake()

    def _sent(self, outcome: str | None) -> None:
        self._response.sending_since = None
        if outcome is not None and not self._finished.done():
            self._finished.set_result(outcome)


class ClientWatch:
    """Calls `on_leave` when the client goes away, from `start` to `close`. It drives `receive` by callbacks: a task costs more.

    `on_wait` is called when the client has waited for `patience` seconds, and returns the next patience; 0: never.
    """

    __slots__ = ("_future", "_on_leave", "_on_wait", "_receive", "_steps", "due", "patience")

    def __init__(self, receive: Receive, on_leave: Callable[[], None], patience: float = 0.0, on_wait: Callable[[], float] = float) -> None:
        self._receive: Receive | None = receive
        self._on_leave = on_leave
        self._on_wait = on_wait
        self.patience = patience
        self.due = 0.0
        self._future: asyncio.Future[Any] | None = None
        self._steps: Generator[Any, Any, Any] | None = None

    def start(self) -> None:
        """Does nothing after `close`."""
        if self._receive is not None:
            self._steps = self._receive().__await__()
            self._advance()

    def close(self) -> None:
        """From now on neither `on_leave` nor `on_wait` is called."""
        self._receive = None
        # It may wait to be started or reminded, and must not keep its request alive.
        self._on_leave = _ignore
        self._on_wait = float
        self.patience = 0.0
        steps, self._steps = self._steps, None
        if steps is not None and self._future is not None:
            self._future.remove_done_callback(self._advance)
            # The server's own awaitables are futures, not generators.
            (getattr(steps, "close", None) or self._future.cancel)()

    def remind(self, now: float) -> None:
        """The client has waited for long."""
        # Also if the call fails.
        self.due = now + self.patience
        self.patience = self._on_wait()
        self.due = now + self.patience

    def _advance(self, _: object = None) -> None:
        while self._steps is not None and self._receive is not None:
            try:
                self._future = next(self._steps)
            except StopIteration as ended:
                if ended.value["type"] == "http.disconnect":
                    self._steps = None
                    self._on_leave()
                else:
                    self._steps = self._receive().__await__()
                continue
            if self._future is None:
                asyncio.get_running_loop().call_soon(self._advance)
            else:
                self._future.add_done_callback(self._advance)
            return


class ClientWatches:
    """Starts watches late: between WATCH_AFTER_SECONDS and twice that. Short requests end before, and are not watched at all.

    A watch costs the server a message between threads. A client that leaves earlier is noticed when its watch starts. The same timer, one
    for all, then reminds each watch when its client has waited for long.
    """

    def __init__(self) -> None:
        self._new: list[ClientWatch] = []
        self._older: list[ClientWatch] = []
        self._started: list[ClientWatch] = []
        self._look_seconds = REMIND_SECONDS
        self._next_look = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, watch: ClientWatch) -> None:
        self._new.append(watch)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._tick)

    def _tick(self) -> None:
        older, self._older, self._new = self._older, self._new, []
        loop = asyncio.get_running_loop()
        now = loop.time()
        for watch in older:
            # Each by itself: one that fails must not stop the others.
            loop.call_soon(watch.start)
            if watch.patience:
                watch.due = now + watch.patience
                self._look_seconds = min(self._look_seconds, watch.patience)
                self._started.append(watch)
        if self._started and now >= self._next_look:
            self._next_look = now + self._look_seconds
            self._started = [watch for watch in self._started if watch.patience]
            self._remind([watch for watch in self._started if watch.due <= now], now)
        self._timer = loop.call_later(WATCH_AFTER_SECONDS, self._tick) if self._older or self._started else None

    def _remind(self, due: list[ClientWatch], now: float) -> None:
        """If there are many, others go on meanwhile."""
        loop = asyncio.get_running_loop()
        for watch in due[:MAX_REMINDED_AT_ONCE]:
            loop.call_soon(watch.remind, now)
        if rest := due[MAX_REMINDED_AT_ONCE:]:
            loop.call_soon(self._remind, rest, now)


def _ignore() -> None:
    pass


def _nothing() -> tuple[bytes, str | None]:
    return b"", None


def _start(awaitable: Awaitable[None]) -> Awaitable[None] | None:
    """Runs it until it would wait. Returns None if it ended; else the rest, to be awaited."""
    steps = awaitable.__await__()
    try:
        waiting_for = next(steps)
    except StopIteration:
        return None
    return _Rest(steps, waiting_for)


class _Rest:
    """The rest of an awaitable that was started outside a task."""

    def __init__(self, steps: Generator[Any, Any, None], waiting_for: Any) -> None:
        self._steps = steps
        self._waiting_for = waiting_for

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waiting_for
        yield from self._steps
