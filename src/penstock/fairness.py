"""Fairness between tenants: whose turn it is in a queue, and who may take the last places of a limit."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

from penstock.lazy_heap import SLACK, LazyHeap

RESERVED_PART = 8
"""One eighth of the places of a limit is for tenants below their share."""

MAX_ANSWER_COST = 512

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
            least = None if turn is None else self._lanes[turn[1]].items.least()
        return None if least is None else least[1]

    def serve(self, item: Item, cost: float) -> None:
        """Removes an item and charges its lane."""
        name = self._lane_of.get(item)
        if name is not None:
            lane = self._lanes[name]
            self._served = lane.tag
            lane.tag += cost / lane.weight
            self._turns.put(name, lane.tag)
        self.discard(item)

    def discard(self, item: Item) -> bool:
        """Removes an item; its lane pays nothing. Returns whether it was there."""
        if item not in self._lane_of:
            return False
        name = self._lane_of.pop(item)
        if name is None:
            self._urgent.discard(item)
        else:
            lane = self._lanes[name]
            lane.items.discard(item)
            if not lane.items:
                self.weight -= lane.weight
                self._turns.discard(name)
                self._forget_lanes()
        return True

    def count(self, lane: str) -> int:
        """Items of this lane that wait."""
        found = self._lanes.get(lane)
        return 0 if found is None else len(found.items)

    def _forget_lanes(self) -> None:
        """A lane without items is forgotten when its tag is not ahead any more. When nothing waits, all start anew."""
        if not self._turns:
            self._lanes.clear()
            self._served = self.weight = 0.0
        elif len(self._lanes) > 2 * len(self._turns) + SLACK:
            self._lanes = {name: lane for name, lane in self._lanes.items() if lane.items or lane.tag > self._served}

    def check_integrity(self) -> None:
        """Raises AssertionError unless every item is in its lane, lanes with items have a turn, and memory is bounded."""
        self._turns.check_integrity()
        for heap in (self._urgent, *(lane.items for lane in self._lanes.values())):
            heap.check_integrity()
        assert set(self._turns) == {name for name, lane in self._lanes.items() if lane.items}
        behind = [lane for lane in self._lanes.values() if not lane.items and lane.tag <= self._served]
        assert len(behind) <= 2 * len(self._turns) + SLACK
        found = [(item, name) for name, lane in self._lanes.items() for item in lane.items]
        assert dict(found) | dict.fromkeys(self._urgent) == self._lane_of
        assert len(found) + len(self._urgent) == len(self._lane_of)
        assert abs(self.weight - sum(lane.weight for lane in self._lanes.values() if lane.items)) < 1e-6


def may_take(wanted: int, *, limit: int, used: int, own: int, weight: float, others: float) -> bool:
    """Whether a tenant that has `own` of the `used` places may take `wanted` more. `others` is the weight of all others with places.

    The last eighth of the places, at least one, is for tenants below their share. A share is what each would have by its weight if one
    more tenant of weight 1 came. A tenant without any place may take whatever is free.
    """
    if used + wanted <= limit - max(1, limit // RESERVED_PART):
        return True
    return used + wanted <= limit and (not own or own + wanted <= limit * weight / (others + weight + 1))


class Places:
    """The places of one limit, and how many each tenant has. The lane `""` belongs to a server without tenants: it may take all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
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
        if not may_take(wanted, limit=self.limit, used=self.used, own=own, weight=weight, others=others):
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
