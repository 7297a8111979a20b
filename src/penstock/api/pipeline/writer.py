"""The writer of a stream: from a wake-up to the socket without a task switch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from penstock.api.pipeline.response import Sink
from penstock.stream.fanin import all_done

Render = Callable[[], tuple[bytes, str | None]]
"""Takes all that has arrived: its events, and, when these are the last, the outcome of the stream."""


class EventWriter:
    """Sends what arrives as events: one write a wake-up, in the wake-up itself.

    Resuming a task costs more than rendering its event, so `wake` renders and sends from a plain callback. Only when the client's
    socket is full is there a task that waits for it; until it has room nothing is rendered, and what comes merges in the mailboxes.
    """

    def __init__(self, response: Sink, render: Render) -> None:
        self._loop = asyncio.get_running_loop()
        self._response = response
        self._render = render
        self._finished: asyncio.Future[str] = self._loop.create_future()
        self._sending: asyncio.Task[None] | None = None

    async def run(self) -> str:
        """Writes until the stream is over, and returns its outcome. Raises what `render` or `stop` raises."""
        self.wake()
        try:
            return await self._finished
        finally:
            if self._sending is not None:
                self._sending.cancel()
                await all_done([self._sending])
            # What it rendered from holds it in turn: nothing of a request is to wait for the garbage collector, which comes rarely.
            self._render = _nothing

    def wake(self) -> None:
        """Something has arrived."""
        if self._sending is not None or self._finished.done():
            return
        try:
            events, outcome = self._render()
            waiting = _begin(self._response.send_events(events, last=outcome is not None)) if events or outcome else None
        except Exception as error:  # noqa: BLE001, raised again where `run` is awaited
            self.stop(error)
            return
        if waiting is None:
            self._sent(outcome)
        else:
            self._sending = self._loop.create_task(self._wait(waiting, outcome))

    def stop(self, error: Exception) -> None:
        """Ends the stream now: `run` raises this."""
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


def _nothing() -> tuple[bytes, str | None]:
    return b"", None


def _begin(awaitable: Awaitable[None]) -> Awaitable[None] | None:
    """Runs it as far as it goes without waiting. None when that is to its end, else what is still to be awaited."""
    steps = awaitable.__await__()
    try:
        waiting_for = next(steps)
    except StopIteration:
        return None
    return _Begun(steps, waiting_for)


class _Begun:
    """The rest of an awaitable that was begun outside a task."""

    def __init__(self, steps: Generator[Any, Any, None], waiting_for: Any) -> None:
        self._steps = steps
        self._waiting_for = waiting_for

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waiting_for
        yield from self._steps
