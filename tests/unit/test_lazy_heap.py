"""The lazy heap does what a sorted list does, and its memory is bounded."""

from __future__ import annotations

import random

import pytest

from penstock.lazy_heap import SLACK, LazyHeap


class SortedList:
    """The same queue, plainly: a list that is sorted at every question."""

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, str]] = []
        self.puts = 0

    def put(self, item: str, priority: int) -> None:
        self.discard(item)
        self.puts += 1
        self.entries.append((priority, self.puts, item))
        self.entries.sort()

    def discard(self, item: str) -> bool:
        kept = [entry for entry in self.entries if entry[2] != item]
        was_there = len(kept) < len(self.entries)
        self.entries = kept
        return was_there

    def pop_due(self, limit: int) -> str | None:
        return self.entries.pop(0)[2] if self.entries and self.entries[0][0] <= limit else None

    def reorder(self, bits: int) -> None:
        self.entries = sorted((priority ^ bits, number, item) for priority, number, item in self.entries)


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_sorted_list_does(seed: int) -> None:
    numbers = random.Random(seed)
    heap: LazyHeap[str, int] = LazyHeap()
    model = SortedList()
    names = [f"item {number}" for number in range(numbers.choice([3, 40, 200]))]
    for _ in range(2000):
        name, priority = numbers.choice(names), numbers.randrange(16)
        match numbers.choice(["put", "put", "put", "discard", "pop", "pop_due", "reorder"]):
            case "put":
                heap.put(name, priority)
                model.put(name, priority)
                assert heap.priority(name) == priority
            case "discard":
                assert heap.discard(name) == model.discard(name)
            case "pop" if model.entries:
                assert heap.pop() == model.entries.pop(0)[2]
            case "pop_due":
                assert heap.pop_due(priority) == model.pop_due(priority)
            case "reorder" if numbers.random() < 0.1:
                heap.reorder(lambda item: heap.priority(item) ^ priority)  # noqa: B023, it is called at once
                model.reorder(priority)
        assert heap.least() == next(((entry[0], entry[2]) for entry in model.entries), None)
        assert set(heap) == {entry[2] for entry in model.entries}
        assert len(heap) == len(model.entries)
        assert (name in heap) == any(entry[2] == name for entry in model.entries)
        heap.check_integrity()


def test_items_of_equal_priority_come_in_the_order_they_were_put() -> None:
    heap: LazyHeap[str, float] = LazyHeap()
    for name in "abc":
        heap.put(name, 1.0)
    heap.put("a", 1.0)
    assert [heap.pop() for _ in range(3)] == ["b", "c", "a"]


def test_an_empty_heap_has_nothing_to_pop() -> None:
    heap: LazyHeap[str, float] = LazyHeap()
    assert heap.least() is None
    assert heap.pop_due(1.0) is None
    with pytest.raises(IndexError):
        heap.pop()
    with pytest.raises(KeyError):
        heap.priority("nobody")


def test_removed_items_are_forgotten() -> None:
    """An item that is moved or removed many times leaves a bounded number of entries behind."""

    class Item:
        alive = 0

        def __init__(self) -> None:
            Item.alive += 1

        def __del__(self) -> None:
            Item.alive -= 1

    heap: LazyHeap[Item, int] = LazyHeap()
    for number in range(10_000):
        item = Item()
        heap.put(item, -number)
        heap.put(item, number)
        heap.discard(item)
    assert Item.alive <= SLACK + 2


def test_memory_is_bounded_when_the_live_items_are_popped() -> None:
    heap: LazyHeap[int, int] = LazyHeap()
    for number in range(300):
        heap.put(number, number)
    for number in range(120, 300):
        heap.discard(number)
    heap.check_integrity()
    for number in range(120):
        assert heap.pop() == number
        heap.check_integrity()
