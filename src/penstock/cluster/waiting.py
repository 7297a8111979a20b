"""The queue of one model: generations that wait until a worker has room."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

from penstock.lazy_heap import LazyHeap
from penstock.wire.messages import Fault

# One step of priority is worth this many seconds of waiting. So low priorities are overtaken for a while and never starve.
SECONDS_PER_PRIORITY = 10.0


class Waiter(Protocol):
    """A generation that waits."""

    def __hash__(self) -> int: ...

    def try_send(self) -> bool:
        """Sends it if a worker has room for it. Returns whether it need not wait any more."""

    def fail(self, fault: Fault) -> None:
        """Ends it: no worker has come for it."""


class WaitingQueue:
    """Waiters by priority and arrival. Generations that lost their worker go before all new ones."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiters: LazyHeap[Waiter, float] = LazyHeap()
        self._since: dict[Waiter, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, waiter: Waiter, priority: int, *, is_new: bool) -> None:
        now = self._since[waiter] = self._clock()
        self._waiters.put(waiter, now - priority * SECONDS_PER_PRIORITY if is_new else -math.inf)

    def discard(self, waiter: Waiter) -> None:
        """Forgets a waiter: it is never sent. Does nothing when it does not wait here."""
        if self._since.pop(waiter, None) is not None:
            self._waiters.discard(waiter)

    def send(self) -> None:
        """Sends waiters in order, until a worker has no room for the first one."""
        while (first := self._waiters.least()) is not None and first[1].try_send():
            self.discard(first[1])

    def fail(self, before: float, fault: Fault) -> None:
        """Ends the wait of everyone who came before this time."""
        for waiter in [waiter for waiter, since in self._since.items() if since < before]:
            self.discard(waiter)
            waiter.fail(fault)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every waiter is in the heap, and memory is bounded by their number."""
        self._waiters.check_integrity()
        assert set(self._waiters) == self._since.keys()
