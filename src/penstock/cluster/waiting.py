"""The queue of one model: generations that no worker has room for yet."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Sent = TypeVar("Sent")

# What one class of priority is worth: so many seconds of waiting. So a lower class is overtaken for a while, and never starves.
SECONDS_A_CLASS = 10.0


class Waiter(Generic[Sent]):
    """One generation in the queue. `sent` gets what its sending gave, or the error that ended its waiting."""

    __slots__ = ("_try_send", "place", "sent", "since")

    def __init__(self, try_send: Callable[[], Sent | None], place: tuple[float, int], since: float) -> None:
        self._try_send = try_send
        self.place = place
        self.since = since
        self.sent: asyncio.Future[Sent] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: Waiter[Sent]) -> bool:
        return self.place < other.place

    def try_send(self) -> bool:
        """Whether it need not wait any longer."""
        if self.sent.done():
            return True
        sent = self._try_send()
        if sent is not None:
            self.sent.set_result(sent)
        return sent is not None


class WaitingQueue(Generic[Sent]):
    """Ordered by priority and arrival. What has been running already, and lost its worker, goes before all that is new.

    A waiter that is cancelled is never sent: it is skipped when its turn comes, and does not count as waiting.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._heap: list[Waiter[Sent]] = []
        self._arrivals = 0
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def add(self, try_send: Callable[[], Sent | None], priority: int, *, is_new: bool) -> Waiter[Sent]:
        now = self._clock()
        self._arrivals += 1
        order = now - priority * SECONDS_A_CLASS if is_new else float("-inf")
        waiter = Waiter(try_send, (order, self._arrivals), now)
        waiter.sent.add_done_callback(self._left)
        self._waiting += 1
        heapq.heappush(self._heap, waiter)
        return waiter

    def send(self) -> None:
        """Sends the first ones, as long as there is room for the first."""
        while self._heap and self._heap[0].try_send():
            heapq.heappop(self._heap)

    def fail(self, before: float, make_error: Callable[[], Exception]) -> None:
        """Ends the waiting of those who came before this time, each with an error of its own."""
        for waiter in self._heap:
            if waiter.since < before and not waiter.sent.done():
                waiter.sent.set_exception(make_error())
        self._heap = [waiter for waiter in self._heap if not waiter.sent.done()]
        heapq.heapify(self._heap)

    def _left(self, _: asyncio.Future[Sent]) -> None:
        self._waiting -= 1
        if len(self._heap) > 2 * self._waiting + 64:
            self._heap = [waiter for waiter in self._heap if not waiter.sent.done()]
            heapq.heapify(self._heap)
