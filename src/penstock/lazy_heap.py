"""A priority queue whose items can be moved and removed."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any, Generic, Protocol, TypeVar

# Removed entries that are kept besides the live ones, so that a small queue is not rebuilt all the time.
SLACK = 64


class _Ordered(Protocol):
    def __lt__(self, other: Any, /) -> bool: ...


Item = TypeVar("Item", bound=Hashable)
Priority = TypeVar("Priority", bound=_Ordered)


class LazyHeap(Generic[Item, Priority]):
    """Each item is in it once, with one priority. The least priority comes first; equal ones in the order of their `put`.

    Removal is lazy: an outdated entry stays in the heap until it comes first. When more than half of the entries are outdated, the heap is
    rebuilt. So `put`, `discard` and `pop` take O(log n) on average, and memory is at most 2n + SLACK entries.
    """

    __slots__ = ("_entries", "_heap", "_puts")

    def __init__(self) -> None:
        self._entries: dict[Item, tuple[Priority, int, Item]] = {}
        self._heap: list[tuple[Priority, int, Item]] = []
        self._puts = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: Item) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        """All items, in no order."""
        return iter(self._entries)

    def put(self, item: Item, priority: Priority) -> None:
        """Adds the item, or moves it to this priority."""
        self._puts += 1
        entry = self._entries[item] = (priority, self._puts, item)
        heapq.heappush(self._heap, entry)
        self._compact()

    def discard(self, item: Item) -> bool:
        """Removes the item. Returns whether it was there."""
        if self._entries.pop(item, None) is None:
            return False
        self._compact()
        return True

    def priority(self, item: Item) -> Priority:
        """Raises KeyError for an unknown item."""
        return self._entries[item][0]

    def least(self) -> tuple[Priority, Item] | None:
        """The least priority and its item; None when empty."""
        heap, entries = self._heap, self._entries
        while heap:
            entry = heap[0]
            if entries.get(entry[2]) is entry:
                return entry[0], entry[2]
            heapq.heappop(heap)
        return None

    def pop(self) -> Item:
        """Removes and returns the first item. Raises IndexError when empty."""
        least = self.least()
        if least is None:
            raise IndexError("pop from an empty heap")
        heapq.heappop(self._heap)
        del self._entries[least[1]]
        self._compact()
        return least[1]

    def pop_due(self, limit: Priority) -> Item | None:
        """Removes and returns the first item if its priority is not above `limit`; else None."""
        least = self.least()
        return None if least is None or limit < least[0] else self.pop()

    def reorder(self, priority: Callable[[Item], Priority]) -> None:
        """Gives every item a new priority."""
        self._entries = {item: (priority(item), number, item) for _, number, item in self._entries.values()}
        self._rebuild()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every item can be found and memory is bounded."""
        live = [entry for entry in self._heap if self._entries.get(entry[2]) is entry]
        assert len(live) == len(self._entries)
        assert len(self._heap) <= 2 * len(self._entries) + SLACK

    def _compact(self) -> None:
        if len(self._heap) > 2 * len(self._entries) + SLACK:
            self._rebuild()

    def _rebuild(self) -> None:
        self._heap = list(self._entries.values())
        heapq.heapify(self._heap)
