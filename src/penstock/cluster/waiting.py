"""The queue of one model: generations that wait until a worker has room."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import Protocol

from penstock.fairness import FairQueue, may_take
from penstock.wire.messages import Fault, Submit

# One step of priority is worth this many seconds of waiting. So low priorities are overtaken for a while and never starve.
SECONDS_PER_PRIORITY = 10.0


class Waiter(Protocol):
    """A generation that waits."""

    def __hash__(self) -> int: ...

    def try_send(self) -> bool:
        """Sends it if a worker has room for it. Returns whether it need not wait any more."""

    @property
    def cost(self) -> int:
        """After it was sent: what it costs its tenant. See `fairness.cost_of`."""

    def fail(self, fault: Fault) -> None:
        """Ends it: no worker has come for it."""


class WaitingQueue:
    """Waiters of all tenants, in turn by weight; those of one tenant by priority and arrival.

    Generations that lost their worker go before all new ones. They may not go everywhere, so if the first of them finds no room, new ones
    do not wait for it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiters: FairQueue[Waiter] = FairQueue()
        self._since: dict[Waiter, float] = {}

    def __len__(self) -> int:
        return len(self._since)

    @property
    def has_lost(self) -> bool:
        """Whether generations wait that lost their worker."""
        return self._waiters.has_urgent

    def add(self, waiter: Waiter, request: Submit, *, is_new: bool) -> None:
        now = self._since[waiter] = self._clock()
        if is_new:
            self._waiters.put(waiter, request.lane, request.weight, now - request.priority * SECONDS_PER_PRIORITY)
        else:
            self._waiters.put_first(waiter)

    def count(self, lane: str) -> int:
        """How many of a tenant wait for their first worker."""
        return self._waiters.count(lane)

    def weight_without(self, request: Submit) -> float:
        """The weight of all other tenants that wait."""
        return self._waiters.weight - (request.weight if self.count(request.lane) else 0)

    def discard(self, waiter: Waiter) -> None:
        """Forgets a waiter: it is never sent. Does nothing when it does not wait here."""
        if self._since.pop(waiter, None) is not None:
            self._waiters.discard(waiter)

    def send(self, limit: int = sys.maxsize) -> bool:
        """Sends at most `limit` waiters in order, until a worker has no room for the first one. Returns whether the limit ended it."""
        sent = self._send(self._waiters.first, limit)
        if sent < limit and self.has_lost:
            sent += self._send(self._waiters.first_in_turn, limit - sent)
        return sent == limit

    def _send(self, first_of: Callable[[], Waiter | None], limit: int) -> int:
        """Returns how many were sent."""
        for sent in range(limit):
            first = first_of()
            if first is None or not first.try_send():
                return sent
            self._served(first)
        return limit

    def send_first_of(self, lane: str) -> bool:
        """Sends the first waiter of a tenant, though it may not be its turn. Returns whether it was sent, or none waits."""
        first = self._waiters.first_of(lane)
        if first is None:
            return True
        if not first.try_send():
            return False
        self._served(first)
        return True

    def _served(self, waiter: Waiter) -> None:
        self._waiters.serve(waiter, waiter.cost)
        self._since.pop(waiter, None)

    def fail(self, before: float, fault: Fault) -> None:
        """Ends the wait of everyone who came before this time."""
        for waiter in [waiter for waiter, since in self._since.items() if since < before]:
            self.discard(waiter)
            waiter.fail(fault)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every waiter is in the queue, and memory is bounded by their number."""
        self._waiters.check_integrity()
        assert set(self._waiters) == self._since.keys()


def may_wait(queues: Collection[WaitingQueue], request: Submit, limit: int, waiting: int) -> bool:
    """Whether this tenant may wait, too, where at most `limit` do. `queues` are those of all models, of which `waiting` are taken."""
    if not request.lane:
        return waiting < limit
    own = sum([queue.count(request.lane) for queue in queues])
    others = sum([queue.weight_without(request) for queue in queues])
    return may_take(1, limit=limit, used=waiting, own=own, weight=request.weight, others=others)
