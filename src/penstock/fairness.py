"""Fairness between tenants: whose turn it is in a queue or on the event loop, who may take the last places of a limit, and a budget that
all use."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.lazy_heap import SLACK, LazyHeap

RESERVED_PART = 8
"""One eighth of the places of a limit is for tenants below their share."""

MAX_ANSWER_COST = 512

REST = 3
"""After a piece of long work, the event loop is left to all others for this many times the time of the piece."""

MAX_CROWD = 3
"""Each piece that waits, up to this many, makes the rest as long again: one long prompt goes on quickly, a flood of them does not."""

MAX_REST_SECONDS = 0.15
"""The longest rest. A piece takes some milliseconds, but the process may be stopped meanwhile."""

Item = TypeVar("Item", bound=Hashable)


def cost_of(prompt_tokens: int, max_tokens: int) -> int:
    """What a generation costs its tenant, in tokens: what is computed of its prompt, and its answer, whose length nobody knows yet."""
    return prompt_tokens + min(max_tokens, MAX_ANSWER_COST)


class _Lane(Generic[Item]):
    """What waits of one tenant. `tag` is the virtual time of its next turn."""

    __slots__ = ("items", "tag", "weight")

    def __init__(self, tag: float) -> None:
        self.items: LazyHeap[Item, float] = LazyHeap()
        self.tag = tag
        self.weight = 1.0


class FairQueue(Generic[Item]):
    """Items of several tenants, each in a lane of its own, served in turn: start-time fair queueing.

    The lane with the least tag is served. Then its tag grows by the item's cost divided by the lane's weight, so lanes that wait are
    served in proportion to their weights. A lane that comes starts at the tag that was served last: it waits for at most one item of
    every other lane, and has no credit for the time before. Within a lane the least `order` comes first. Urgent items come before all.

    Each call takes O(log n) on average. A lane without items is remembered while its tag is ahead of the others.
    """

    def __init__(self) -> None:
        self._lane_of: dict[Item, str | None] = {}
        self._lanes: dict[str, _Lane[Item]] = {}
        self._turns: LazyHeap[str, float] = LazyHeap()
        self._urgent: LazyHeap[Item, float] = LazyHeap()
        self._served = 0.0
        # More lanes than this are looked through for those to forget.
        self._max_lanes = SLACK
        self.weight = 0.0
        """Of all lanes with items."""

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, item: Item) -> bool:
        return item in self._lane_of

    def __iter__(self) -> Iterator[Item]:
        """All items, in no order."""
        return iter(self._lane_of)

    def put(self, item: Item, lane: str, weight: float, order: float) -> None:
        """Adds an item that is not in the queue."""
        found = self._lanes.get(lane)
        if found is None:
            found = self._lanes[lane] = _Lane(self._served)
        if found.items:
            self.weight -= found.weight
        else:
            found.tag = max(found.tag, self._served)
            self._turns.put(lane, found.tag)
        found.weight = weight
        self.weight += weight
        found.items.put(item, order)
        self._lane_of[item] = lane

    def put_first(self, item: Item, order: float = 0.0) -> None:
        """Adds an item that goes before all lanes and costs its tenant nothing."""
        self._urgent.put(item, order)
        self._lane_of[item] = None

    def first(self) -> Item | None:
        """The item whose turn it is; None when empty."""
        least = self._urgent.least()
        if least is None:
            turn = self._turns.least()
            return None if turn is None else self.first_of(turn[1])
        return least[1]

    def first_of(self, lane: str) -> Item | None:
        """The first item of this lane; None when it has none."""
        found = self._lanes.get(lane)
        least = None if found is None else found.items.least()
        return None if least is None else least[1]

    def first_of_each(self, lanes: Iterable[str]) -> Iterator[Item]:
        """The first item of each of these lanes that has one, in the order of their turns."""
        for lane in sorted([lane for lane in lanes if lane in self._turns], key=self._turns.priority):
            if (first := self.first_of(lane)) is not None:
                yield first

    def serve(self, item: Item, cost: float) -> None:
        """Removes an item and charges its lane."""
        name = self._lane_of.get(item)
        if name is None:
            self.discard(item)
            return
        lane = self._lanes[name]
        if self._turns.least() == (lane.tag, name):
            self._served = lane.tag
        lane.tag += cost / lane.weight
        self._remove(item, name, lane)
        if lane.items:
            self._turns.put(name, lane.tag)

    def hurry(self, lane: str) -> None:
        """The next turn is this lane's, which has items. It pays as for any other."""
        self._turns.put(lane, -math.inf)

    def is_hurried(self, lane: str) -> bool:
        return lane in self._turns and self._turns.priority(lane) == -math.inf

    def discard(self, item: Item) -> bool:
        """Removes an item; its lane pays nothing. Returns whether it was there."""
        if item not in self._lane_of:
            return False
        name = self._lane_of[item]
        if name is None:
            del self._lane_of[item]
            self._urgent.discard(item)
        else:
            self._remove(item, name, self._lanes[name])
        return True

    @property
    def lanes(self) -> LazyHeap[str, float]:
        """Those with items that are not urgent."""
        return self._turns

    def count(self, lane: str) -> int:
        """Items of this lane that wait."""
        found = self._lanes.get(lane)
        return 0 if found is None else len(found.items)

    def _remove(self, item: Item, name: str, lane: _Lane[Item]) -> None:
        del self._lane_of[item]
        lane.items.discard(item)
        if not lane.items:
            self.weight -= lane.weight
            self._turns.discard(name)
            self._forget_lanes()

    def _forget_lanes(self) -> None:
        """A lane without items is forgotten when its tag is not ahead any more."""
        if len(self._lanes) > self._max_lanes:
            self._lanes = {name: lane for name, lane in self._lanes.items() if lane.items or lane.tag > self._served}
            self._max_lanes = 2 * len(self._lanes) + SLACK

    def check_integrity(self) -> None:
        """Raises AssertionError unless every item is in its lane, lanes with items have a turn, and memory is bounded."""
        self._turns.check_integrity()
        for heap in (self._urgent, *(lane.items for lane in self._lanes.values())):
            heap.check_integrity()
        assert set(self._turns) == {name for name, lane in self._lanes.items() if lane.items}
        assert len(self._lanes) <= self._max_lanes + len(self._turns)
        found = [(item, name) for name, lane in self._lanes.items() for item in lane.items]
        assert dict(found) | dict.fromkeys(self._urgent) == self._lane_of
        assert len(found) + len(self._urgent) == len(self._lane_of)
        assert abs(self.weight - sum(lane.weight for lane in self._lanes.values() if lane.items)) < 1e-6


def may_take(wanted: int, *, limit: int, used: int, own: int, weight: float, others: float) -> bool:
    """Whether a tenant that has `own` of the `used` places may take `wanted` more. `others` is the weight of all others with places.

    The last eighth of the places, at least one, is for tenants below their share. A share is what each would have by its weight if one
    more tenant of weight 1 came. A tenant without any place may take whatever is free.
    """
    if used + wanted <= _unreserved(limit):
        return True
    return used + wanted <= limit and (not own or own + wanted <= limit * weight / (others + weight + 1))


def _unreserved(limit: int) -> int:
    return limit - max(1, limit // RESERVED_PART)


class Places:
    """The places of one limit, and how many each tenant has. The lane `""` belongs to a server without tenants: it may take all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._unreserved = _unreserved(limit)
        self._own: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._weight = 0.0

    def own(self, lane: str) -> int:
        return self._own.get(lane, 0)

    def take(self, wanted: int, lane: str = "", weight: float = 1.0) -> bool:
        """Takes places if there are enough for this tenant. Returns whether."""
        if not lane:
            if self.used + wanted > self.limit:
                return False
            self.used += wanted
            return True
        own, counted = self._own.get(lane, 0), self._weights.get(lane, 0.0)
        others = self._weight - counted
        if self.used + wanted > self._unreserved and not may_take(
            wanted, limit=self.limit, used=self.used, own=own, weight=weight, others=others
        ):
            return False
        self.used += wanted
        self._own[lane] = own + wanted
        if counted != weight:
            self._weights[lane] = weight
            self._weight = others + weight
        return True

    def give_back(self, count: int, lane: str = "") -> None:
        self.used -= count
        if not lane:
            return
        left = self._own[lane] - count
        if left:
            self._own[lane] = left
        else:
            del self._own[lane]
            self._weight -= self._weights.pop(lane)


class Share:
    """What one request has taken of a budget. Whoever makes it releases it, however the request ends."""

    __slots__ = ("held", "is_under_way", "lane", "weight")

    def __init__(self, lane: str = "", weight: float = 1.0) -> None:
        self.lane = lane
        self.weight = weight
        self.held = 0
        self.is_under_way = False
        """It has taken something and does not wait for more."""


@dataclass(eq=False, slots=True)
class _Waiter:
    share: Share
    amount: int
    granted: asyncio.Future[None]


class FairBudget:
    """A budget for what is used for a while, such as bytes or threads. At most `total` is in use, with two exceptions.

    One tenant alone may use all of it. A tenant with nothing under way never waits. With `has_shares`, a tenant below its share does not
    wait either; the share is what each tenant would have if one more came. Both may overdraw the budget, the second by less than `total`.
    So others go on, however much one tenant holds and for how long. Everything else waits for room, in turn. For one event loop.
    """

    def __init__(self, total: int, *, has_shares: bool = False) -> None:
        self.total = total
        self._has_shares = has_shares
        self.used = 0
        self._held: dict[str, int] = {}
        """By lane. Lanes with nothing are not in it."""
        self._under_way: dict[str, int] = {}
        """The number of shares, by lane. Lanes without one are not in it."""
        self._waiting: FairQueue[_Waiter] = FairQueue()
        self._arrivals = 0

    @property
    def waiting(self) -> int:
        """The number of shares that wait."""
        return len(self._waiting)

    def take(self, share: Share, amount: int) -> bool:
        """Takes more, if it need not wait for it."""
        if (
            (self.used + amount > self.total or self._waiting)
            and self._under_way.get(share.lane, 0) > share.is_under_way
            and not (self._has_shares and self._held.get(share.lane, 0) + amount <= self.total // (len(self._under_way) + 1))
        ):
            return False
        self._grant(share, amount)
        return True

    async def wait(self, share: Share, amount: int, seconds: float | None = None) -> None:
        """Takes more when its turn comes, after `take` was refused. Raises TimeoutError; then it has taken nothing more."""
        waiter = _Waiter(share, amount, asyncio.get_running_loop().create_future())
        self._arrivals += 1
        self._waiting.put(waiter, share.lane, share.weight, self._arrivals)
        self._rest(share)
        try:
            async with asyncio.timeout(seconds):
                await waiter.granted
        except BaseException:
            self._give_up(waiter)
            raise

    def settle(self, share: Share, amount: int) -> None:
        """Makes a share that is under way hold this much, without waiting: what it took was an estimate."""
        if amount > share.held:
            self._grant(share, amount - share.held)
        else:
            self._take_back(share, share.held - amount)
            if self._waiting:
                self._serve(share.lane)

    def release(self, share: Share) -> None:
        """Gives everything back. May be called again."""
        self._take_back(share, share.held)
        self._rest(share)
        if self._waiting:
            self._serve(share.lane)

    def check_integrity(self) -> None:
        """Raises AssertionError when a tenant waits of which nothing is under way, or something is kept for one that has left."""
        self._waiting.check_integrity()
        assert self.used == sum(self._held.values())
        assert all(held > 0 for held in self._held.values())
        assert all(self._under_way.values())
        assert {waiter.share.lane for waiter in self._waiting} <= self._under_way.keys()

    def _grant(self, share: Share, amount: int) -> None:
        self.used += amount
        share.held += amount
        if amount:
            self._held[share.lane] = self._held.get(share.lane, 0) + amount
        if not share.is_under_way:
            share.is_under_way = True
            self._under_way[share.lane] = self._under_way.get(share.lane, 0) + 1

    def _take_back(self, share: Share, amount: int) -> None:
        self.used -= amount
        share.held -= amount
        if amount:
            left = self._held[share.lane] - amount
            if left:
                self._held[share.lane] = left
            else:
                del self._held[share.lane]

    def _rest(self, share: Share) -> None:
        if share.is_under_way:
            share.is_under_way = False
            self._under_way[share.lane] -= 1
            if not self._under_way[share.lane]:
                del self._under_way[share.lane]

    def _give_up(self, waiter: _Waiter) -> None:
        if waiter.granted.cancelled():
            self._waiting.discard(waiter)
        else:
            # Its caller was cancelled when it was just served.
            self._take_back(waiter.share, waiter.amount)
        self._serve(waiter.share.lane)

    def _serve(self, lane: str) -> None:
        """Serves this lane if nothing of it is under way, then all in turn, as long as the next one fits."""
        while lane not in self._under_way and (waiter := self._waiting.first_of(lane)) is not None:
            self._serve_one(waiter)
        while (waiter := self._waiting.first()) is not None and self.used + waiter.amount <= self.total:
            self._serve_one(waiter)

    def _serve_one(self, waiter: _Waiter) -> None:
        self._waiting.serve(waiter, waiter.amount)
        if not waiter.granted.cancelled():
            self._grant(waiter.share, waiter.amount)
            waiter.granted.set_result(None)


class LoopTurns:
    """Long work on one event loop: one piece at a time, of one tenant after the other.

    A piece holds the loop for some milliseconds. The pieces of a hundred requests would hold it for a second if all were run at once. So
    each waits for its turn, and after a piece the loop is left to everything else for a while: see REST and MAX_CROWD.
    """

    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._arrivals = 0
        self._is_taken = False
        self._began = 0.0

    async def take(self, lane: str, weight: float) -> None:
        """The caller's piece of work begins when this returns, and ends when the caller awaits something."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            self._begin()
            loop.call_soon(self._end)
            return
        turn = loop.create_future()
        self._arrivals += 1
        self._waiting.put(turn, lane, weight, self._arrivals)
        try:
            await turn
        finally:
            # Does nothing unless the caller was cancelled.
            self._waiting.discard(turn)

    def _begin(self) -> None:
        self._began = time.monotonic()

    def _end(self) -> None:
        rest = rest_after(time.monotonic() - self._began, len(self._waiting))
        asyncio.get_running_loop().call_later(rest, self._serve)

    def _serve(self) -> None:
        turn = self._waiting.first()
        if turn is None:
            self._is_taken = False
            return
        self._waiting.serve(turn, 1)
        # The three run one after the other, so that only the piece is measured.
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)
        if not turn.done():
            turn.set_result(None)
        loop.call_soon(self._end)


def rest_after(seconds: float, waiting: int) -> float:
    """How long the event loop is left to others after a piece of long work, if `waiting` other pieces wait."""
    return min(REST * (1 + min(waiting, MAX_CROWD)) * seconds, MAX_REST_SECONDS)
