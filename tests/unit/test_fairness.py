"""Fairness between tenants: the order of a fair queue, and who may take the last places of a limit."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from penstock.fairness import MAX_ANSWER_COST, FairQueue, Places, cost_of, may_take


class Flood:
    """A queue with items named after their lane and number. `serve` returns the lanes in the order in which they are served."""

    def __init__(self, **waiting: int) -> None:
        self.queue: FairQueue[tuple[str, int]] = FairQueue()
        self.weights = dict.fromkeys(waiting, 1)
        self._count = 0
        for lane, count in waiting.items():
            self.add(lane, count)

    def add(self, lane: str, count: int = 1) -> None:
        for _ in range(count):
            self._count += 1
            self.queue.put((lane, self._count), lane, self.weights.get(lane, 1), self._count)

    def serve(self, count: int, cost: float = 1) -> str:
        served = ""
        for _ in range(count):
            first = self.queue.first()
            assert first is not None
            self.queue.serve(first, cost)
            self.queue.check_integrity()
            served += first[0]
        return served


def test_lanes_that_wait_are_served_in_turn() -> None:
    flood = Flood(a=100)
    assert flood.serve(10) == "a" * 10
    flood.add("b", 3)
    assert flood.serve(8) == "bababaaa"


def test_a_late_tenant_waits_for_at_most_one_item_of_every_other() -> None:
    flood = Flood(a=50, b=50, c=50)
    flood.serve(31)
    flood.add("late")
    assert "late" in flood.serve(4)


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 5, "b": 2, "c": 1}])
def test_served_counts_follow_the_weights_within_one(weights: dict[str, int]) -> None:
    flood = Flood()
    flood.weights = weights
    for lane in weights:
        flood.add(lane, 200)
    served: Counter[str] = Counter()
    for number in range(1, 151):
        served.update(flood.serve(1))
        for lane, weight in weights.items():
            fair = number * weight / sum(weights.values())
            assert abs(served[lane] - fair) <= 1 + weight / sum(weights.values()) * len(weights), (number, served)


def test_dear_items_count_more() -> None:
    flood = Flood(dear=10, cheap=100)
    served: Counter[str] = Counter()
    for _ in range(44):
        first = flood.queue.first()
        assert first is not None
        flood.queue.serve(first, 10 if first[0] == "dear" else 1)
        served[first[0]] += 1
    assert served == {"dear": 4, "cheap": 40}


def test_a_tenant_that_sends_one_at_a_time_does_not_go_first_every_time() -> None:
    flood = Flood(b=10, a=1)
    served = ""
    for _ in range(12):
        if flood.queue.count("a") == 0:
            flood.add("a")
        served += flood.serve(1)
    assert served == "ba" * 6


def test_waiting_for_nothing_gives_no_credit() -> None:
    flood = Flood(a=100, b=1)
    flood.serve(51)
    flood.add("b", 50)
    assert flood.serve(10) == "ba" * 5


def test_a_tenant_that_is_ahead_is_remembered_however_many_come_and_go() -> None:
    flood = Flood(b=500, dear=1)
    flood.serve(1)
    assert flood.serve(1, cost=1000) == "dear"
    for number in range(200):
        flood.add(f"visitor {number}")
        flood.serve(2)
    flood.add("dear")
    assert "dear" not in flood.serve(100)


def test_nobody_starves_whatever_comes_and_goes() -> None:
    draw = random.Random(9)
    flood = Flood(steady=40)
    waited = 0
    for step in range(2000):
        for _ in range(draw.randrange(3)):
            flood.add(f"x{draw.randrange(20)}", draw.randrange(1, 5))
        if draw.random() < 0.3:
            flood.queue.discard(next(item for item in flood.queue if item[0] != "steady" or step > 1900))
        served = flood.serve(1)
        waited = 0 if served == "steady" or not flood.queue.count("steady") else waited + 1
        assert waited <= 21
    assert not flood.queue.count("steady")


def test_urgent_items_come_first_and_cost_nothing() -> None:
    flood = Flood(a=2, b=2)
    flood.queue.put_first(("urgent", 0))
    assert flood.serve(5) == "urgentabab"


def test_within_a_lane_the_least_order_comes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, order in [("later", 5.0), ("first", -3.0), ("middle", 0.0)]:
        queue.put(name, "", 1, order)
    found = []
    while (item := queue.first()) is not None:
        found.append(item)
        queue.serve(item, 7)
    assert found == ["first", "middle", "later"]


def test_discarded_items_are_gone_and_cost_nothing() -> None:
    flood = Flood(a=3, b=3)
    assert flood.queue.discard(("a", 1))
    assert not flood.queue.discard(("a", 1))
    assert ("a", 1) not in flood.queue
    assert len(flood.queue) == 5
    assert flood.serve(5) == "ababb"
    assert flood.queue.first() is None


def test_memory_follows_the_lanes_that_wait() -> None:
    flood = Flood(stays=400)
    for number in range(400):
        flood.add(f"visitor {number}")
        flood.serve(2)  # checks the number of lanes, too
    assert flood.queue.count("stays") == 0


def test_a_changed_weight_counts_from_the_next_item_on() -> None:
    flood = Flood(a=1, b=100)
    flood.weights["a"] = 3
    flood.add("a", 99)
    assert Counter(flood.serve(40)) == {"a": 30, "b": 10}


def test_the_cost_of_a_generation_is_bounded_for_its_answer() -> None:
    assert cost_of(100, 20) == 120
    assert cost_of(100, 1_000_000) == 100 + MAX_ANSWER_COST


def test_one_tenant_leaves_the_last_places_to_others() -> None:
    places = Places(16)
    assert [places.take(1, "a") for _ in range(16)] == [True] * 14 + [False] * 2
    assert places.take(1, "b")
    assert places.take(1, "c")
    assert not places.take(1, "d")  # full
    places.give_back(1, "a")
    assert not places.take(1, "a")  # over its share
    assert places.take(1, "d")


def test_a_tenant_below_its_share_gets_what_the_flood_gives_back() -> None:
    places = Places(16)
    while places.take(1, "flood"):
        pass
    while places.take(1, "other"):
        pass
    for _ in range(100):
        if places.own("flood"):
            places.give_back(1, "flood")
        if not places.take(1, "flood"):
            places.take(1, "other")
    assert places.own("other") >= 16 // 3


def test_a_server_without_tenants_uses_every_place() -> None:
    places = Places(16)
    assert [places.take(1) for _ in range(17)] == [True] * 16 + [False]
    places.give_back(1)
    assert places.take(1)


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8, 100])
def test_for_every_limit_a_second_tenant_finds_a_place(limit: int) -> None:
    places = Places(limit)
    while places.take(1, "a"):
        pass
    assert places.own("a") >= 1
    assert places.take(1, "b") == (limit > 1)


def test_a_request_for_many_places_is_admitted_while_they_are_free() -> None:
    assert may_take(4, limit=8, used=4, own=0, weight=1, others=1)
    assert not may_take(4, limit=8, used=4, own=1, weight=1, others=1)
    assert not may_take(5, limit=8, used=4, own=0, weight=1, others=1)


def test_weights_decide_how_much_of_the_last_places_a_tenant_gets() -> None:
    places = Places(80)
    for _ in range(70):
        assert places.take(1, "heavy", 6)
    # Its share is 80 * 6 / (6 + 1).
    assert not places.take(1, "heavy", 6)
    places.give_back(10, "heavy")
    assert [places.take(1, "other", 1) for _ in range(10)] == [True] * 10
    assert places.take(1, "other", 1) == (11 <= 80 / 8)


def test_places_forget_tenants_that_have_none() -> None:
    places = Places(100)
    for number in range(1000):
        assert places.take(3, f"tenant {number}")
        places.give_back(3, f"tenant {number}")
    assert places.used == 0
    assert places.take(60, "one")
    assert places.take(30, "two")
