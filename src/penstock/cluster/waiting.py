"""The queue of one model: generations that wait until a worker has room."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Hashable
from itertools import islice
from typing import Protocol

from penstock.fairness import FairQueue, may_take
from penstock.lazy_heap import LazyHeap
from penstock.wire.messages import Fault, Submit

# One step of priority is worth this many seconds of waiting. So low priorities are overtaken for a while and never starve.
SECONDS_PER_PRIORITY = 10.0
# Generations that lost their worker and may not go to the same workers: this many are tried each time.
MAX_TRIED = 16


class Waiter(Protocol):
    """A generation that waits."""

    def __hash__(self) -> int: ...

    def try_send(self) -> bool:
        """Sends it if a worker has room for it. Returns whether it need not wait any more."""

    @property
    def cost(self) -> int:
        """After it was sent: what it costs its tenant. See `fairness.cost_of`."""

    @property
    def avoids(self) -> Hashable:
        """Where it may not go, since it lost its worker. If one that avoids the same finds no room, it finds none."""

    def fail(self, fault: Fault) -> None:
        """Ends it: no worker has come for it."""


class WaitingQueue:
    """Waiters of all tenants, in turn by weight; those of one tenant by priority and arrival.

    Generations that lost their worker go before all new ones. They may not go everywhere: if one of them finds no room, those that may go
    elsewhere do not wait for it, nor do new ones.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiters: FairQueue[Waiter] = FairQueue()
        self._since: dict[Waiter, float] = {}
        # Those that lost their worker, by what they avoid; each heap in order of arrival.
        self._lost: dict[Hashable, LazyHeap[Waiter, float]] = {}
        self._avoided: dict[Waiter, Hashable] = {}

    def __len__(self) -> int:
        return len(self._since)

    @property
    def has_new(self) -> bool:
        """Whether generations wait for their first worker."""
        return len(self._waiters) > 0

    @property
    def has_lost(self) -> bool:
        """Whether generations wait that lost their worker."""
        return bool(self._lost)

    def add(self, waiter: Waiter, request: Submit, *, is_new: bool) -> None:
        now = self._since[waiter] = self._clock()
        if is_new:
            self._waiters.put(waiter, request.lane, request.weight, now - request.priority * SECONDS_PER_PRIORITY)
        else:
            avoided = self._avoided[waiter] = waiter.avoids
            self._lost.setdefault(avoided, LazyHeap()).put(waiter, now)

    def count(self, lane: str) -> int:
        """How many of a tenant wait for their first worker."""
        return self._waiters.count(lane)

    def weight_without(self, request: Submit) -> float:
        """The weight of all other tenants that wait."""
        return self._waiters.weight - (request.weight if self.count(request.lane) else 0)

    def discard(self, waiter: Waiter) -> None:
        """Forgets a waiter: it is never sent. Does nothing when it does not wait here."""
        if self._since.pop(waiter, None) is None:
            return
        if waiter in self._avoided:
            self._discard_lost(waiter)
        else:
            self._waiters.discard(waiter)

    def _discard_lost(self, waiter: Waiter) -> None:
        avoided = self._avoided.pop(waiter)
        self._lost[avoided].discard(waiter)
        if not self._lost[avoided]:
            del self._lost[avoided]

    def send(self, limit: int = sys.maxsize) -> bool:
        """Sends at most `limit` waiters in order, until no worker has room for the next one. Returns whether the limit ended it."""
        sent = self._send_lost(limit)
        while sent < limit and (first := self._waiters.first()) is not None and first.try_send():
            self._served(first)
            sent += 1
        return sent == limit

    def _send_lost(self, limit: int) -> int:
        """Sends those that lost their worker. Returns how many."""
        sent = 0
        tried = list(islice(self._lost, MAX_TRIED))
        for avoided in tried:
            while sent < limit and (first := self._first_lost(avoided)) is not None and first.try_send():
                self.discard(first)
                sent += 1
        if sent < limit and len(self._lost) > MAX_TRIED:
            # The others are next.
            for avoided in tried:
                if avoided in self._lost:
                    self._lost[avoided] = self._lost.pop(avoided)
        return sent

    def _first_lost(self, avoided: Hashable) -> Waiter | None:
        least = self._lost[avoided].least() if avoided in self._lost else None
        return None if least is None else least[1]

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
        assert {*self._waiters, *self._avoided} == self._since.keys()
        assert len(self._waiters) + len(self._avoided) == len(self._since)
        assert all(self._lost.values())
        assert {waiter: avoided for avoided, heap in self._lost.items() for waiter in heap} == self._avoided


def may_wait(queues: Collection[WaitingQueue], request: Submit, limit: int, waiting: int) -> bool:
    """Whether this tenant may wait, too, where at most `limit` do. `queues` are those of all models, of which `waiting` are taken."""
    if not request.lane:
        return waiting < limit
    own = sum([queue.count(request.lane) for queue in queues])
    others = sum([queue.weight_without(request) for queue in queues])
    return may_take(1, limit=limit, used=waiting, own=own, weight=request.weight, others=others)
