"""The queue of one model: generations that wait until a worker has room."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import NamedTuple

from penstock.cluster.links.worker_link import Generation
from penstock.cluster.pool import Member
from penstock.lazy_heap import LazyHeap
from penstock.router.load import Assignment

# One step of priority is worth this many seconds of waiting. So low priorities are overtaken for a while and never starve.
SECONDS_PER_PRIORITY = 10.0


class Attempt(NamedTuple):
    """A generation that was sent to one worker."""

    member: Member
    id: bytes
    generation: Generation
    assignment: Assignment

    def cancel(self) -> None:
        """Stops the generation on its worker."""
        self.member.link.cancel(self.id)
        self.assignment.ended()


class Waiter:
    """One generation in the queue. `sent` holds the attempt once there is one, or the error that ended the wait."""

    __slots__ = ("sent", "since", "try_send")

    def __init__(self, try_send: Callable[[], Attempt | None], since: float) -> None:
        self.try_send = try_send
        self.since = since
        self.sent: asyncio.Future[Attempt] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Attempt:
        """Returns once the generation is sent. If the wait is cancelled it is never sent; if it was sent just then, it is stopped."""
        try:
            return await self.sent
        except asyncio.CancelledError:
            if self.sent.done() and not self.sent.cancelled() and self.sent.exception() is None:
                self.sent.result().cancel()
            else:
                self.sent.cancel()
            raise


class WaitingQueue:
    """Waiters by priority and arrival. Generations that lost their worker go before all new ones.

    A cancelled waiter is never sent. It leaves the queue in the next turn of the event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiters: LazyHeap[Waiter, float] = LazyHeap()

    def __len__(self) -> int:
        return len(self._waiters)

    def add(self, try_send: Callable[[], Attempt | None], priority: int, *, is_new: bool) -> Waiter:
        waiter = Waiter(try_send, self._clock())
        waiter.sent.add_done_callback(lambda _: self._waiters.discard(waiter))
        self._waiters.put(waiter, waiter.since - priority * SECONDS_PER_PRIORITY if is_new else -math.inf)
        return waiter

    def send(self) -> None:
        """Sends waiters in order, until a worker has no room for the first one."""
        while (first := self._waiters.least()) is not None:
            _, waiter = first
            if not waiter.sent.done():
                attempt = waiter.try_send()
                if attempt is None:
                    return
                waiter.sent.set_result(attempt)
            self._waiters.discard(waiter)

    def fail(self, before: float, make_error: Callable[[], Exception]) -> None:
        """Ends the wait of everyone who came before this time. Each gets its own error."""
        for waiter in list(self._waiters):
            if waiter.since < before and not waiter.sent.done():
                waiter.sent.set_exception(make_error())
                self._waiters.discard(waiter)

    def check_integrity(self) -> None:
        """Raises AssertionError unless memory is bounded by the number of waiters."""
        self._waiters.check_integrity()
