"""The queue of generations that wait for a worker: order, priority, cancellation, memory."""

from __future__ import annotations

import pytest

from penstock.cluster.waiting import MAX_TRIED, SECONDS_PER_PRIORITY, WaitingQueue, may_wait
from penstock.wire.messages import Fault, Submit


def wish(priority: int = 0, lane: str = "", weight: int = 1) -> Submit:
    return Submit(b"", (1,), 1, 0, priority=priority, lane=lane, weight=weight)


class Room:
    """Workers with room for some generations. `sent` names those that were sent, in their order."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.tries = 0
        self.sent: list[str] = []

    def waiter(self, name: str) -> Waiting:
        return Waiting(self, name)


class Waiting:
    """A generation that is sent where there is room."""

    cost = 1

    def __init__(self, room: Room, name: str) -> None:
        self._room = self.avoids = room
        self._name = name
        self.fault: Fault | None = None

    def try_send(self) -> bool:
        self._room.tries += 1
        if not self._room.count:
            return False
        self._room.count -= 1
        self._room.sent.append(self._name)
        return True

    def fail(self, fault: Fault) -> None:
        self.fault = fault


def test_nothing_is_sent_without_room_and_all_in_order_with_it() -> None:
    room, queue = Room(), WaitingQueue()
    for name in "abc":
        queue.add(room.waiter(name), wish(), is_new=True)
    queue.send()
    assert (room.sent, len(queue)) == ([], 3)
    room.count = 2
    queue.send()
    assert (room.sent, len(queue)) == (["a", "b"], 1)


def test_one_that_no_worker_takes_again_stops_no_other() -> None:
    nowhere, room, queue = Room(), Room(2), WaitingQueue()
    for name in "abc":
        queue.add(room.waiter(name), wish(), is_new=True)
    queue.add(nowhere.waiter("lost"), wish(), is_new=False)
    assert queue.has_lost
    assert not queue.send(3)
    assert (room.sent, len(queue)) == (["a", "b"], 2)
    nowhere.count = room.count = 1
    assert queue.send(2)
    assert (nowhere.sent, room.sent, len(queue), queue.has_lost) == (["lost"], ["a", "b", "c"], 0, False)
    queue.check_integrity()


def test_one_that_no_worker_takes_again_stops_no_other_that_lost_its_worker() -> None:
    """And those that have room are not overtaken by new ones."""
    nowhere, room, queue = Room(), Room(4), WaitingQueue()
    for name in ("lost a", "lost b"):
        queue.add(nowhere.waiter(name), wish(), is_new=False)
    for name in ("lost c", "lost d", "lost e"):
        queue.add(room.waiter(name), wish(), is_new=False)
    for name in ("new f", "new g"):
        queue.add(room.waiter(name), wish(), is_new=True)
    assert queue.send(2)
    assert room.sent == ["lost c", "lost d"]
    assert not queue.send(3)
    assert (room.sent, len(queue), queue.has_lost) == (["lost c", "lost d", "lost e", "new f"], 3, True)
    assert nowhere.tries == 2, "one each time: the others would find no room either"
    queue.check_integrity()


def test_of_many_that_may_go_to_different_workers_some_are_tried_each_time() -> None:
    rooms, queue = [Room() for _ in range(3 * MAX_TRIED)], WaitingQueue()
    for room in rooms:
        queue.add(room.waiter("lost"), wish(), is_new=False)
    for tried in (MAX_TRIED, 2 * MAX_TRIED, 3 * MAX_TRIED):
        assert not queue.send()
        assert sum(room.tries for room in rooms) == tried
    assert [room.tries for room in rooms] == [1] * len(rooms)
    queue.check_integrity()


def test_many_waiters_are_sent_in_pieces() -> None:
    room, queue = Room(5), WaitingQueue()
    for name in "abcde":
        queue.add(room.waiter(name), wish(), is_new=True)
    assert queue.send(3)
    assert room.sent == ["a", "b", "c"]
    assert not queue.send(3)
    assert (room.sent, len(queue)) == (["a", "b", "c", "d", "e"], 0)


def test_one_step_of_priority_is_worth_its_seconds() -> None:
    now = 100.0
    room, queue = Room(10), WaitingQueue(lambda: now)
    queue.add(room.waiter("low"), wish(), is_new=True)
    now += SECONDS_PER_PRIORITY - 1
    queue.add(room.waiter("high"), wish(1), is_new=True)
    now += 2
    queue.add(room.waiter("late"), wish(1), is_new=True)
    queue.add(room.waiter("lost its worker"), wish(-5), is_new=False)
    queue.send()
    assert room.sent == ["lost its worker", "high", "low", "late"]


@pytest.mark.parametrize("is_new", [True, False])
def test_a_discarded_waiter_is_never_sent_and_takes_no_room(is_new: bool) -> None:
    room, queue = Room(1), WaitingQueue()
    first = room.waiter("first")
    queue.add(first, wish(), is_new=is_new)
    queue.add(room.waiter("second"), wish(), is_new=is_new)
    queue.discard(first)
    queue.discard(first)
    queue.send()
    assert room.sent == ["second"]
    assert (len(queue), queue.has_lost) == (0, False)
    queue.check_integrity()


def test_memory_follows_the_waiters_that_are_left() -> None:
    room, queue = Room(), WaitingQueue()
    queue.add(room.waiter("stays"), wish(), is_new=True)
    for _ in range(1000):
        leaves = room.waiter("leaves")
        queue.add(leaves, wish(), is_new=True)
        queue.discard(leaves)
        assert len(queue) == 1
        queue.check_integrity()


def test_only_those_who_waited_too_long_fail() -> None:
    now = 0.0
    room, queue = Room(), WaitingQueue(lambda: now)
    old, new = room.waiter("old"), room.waiter("new")
    queue.add(old, wish(), is_new=True)
    now = 10.0
    queue.add(new, wish(), is_new=True)
    queue.fail(10.0, Fault("no_worker", "none came"))
    assert old.fault == Fault("no_worker", "none came")
    assert new.fault is None
    assert len(queue) == 1


def test_a_flood_of_one_tenant_leaves_every_other_turn_to_another() -> None:
    room, queue = Room(), WaitingQueue()
    for _ in range(100):
        queue.add(room.waiter("flood"), wish(lane="a"), is_new=True)
    for number in range(3):
        queue.add(room.waiter(f"other {number}"), wish(lane="b"), is_new=True)
    room.count = 6
    queue.send()
    assert room.sent == ["flood", "other 0", "flood", "other 1", "flood", "other 2"]
    queue.check_integrity()


def test_a_tenant_of_twice_the_weight_is_sent_twice_as_often() -> None:
    room, queue = Room(9), WaitingQueue()
    for _ in range(9):
        queue.add(room.waiter("heavy"), wish(lane="a", weight=2), is_new=True)
        queue.add(room.waiter("light"), wish(lane="b"), is_new=True)
    queue.send()
    assert (room.sent.count("heavy"), room.sent.count("light")) == (6, 3)


def test_priority_orders_only_what_one_tenant_waits_for() -> None:
    room, queue = Room(10), WaitingQueue()
    for number in range(3):
        queue.add(room.waiter(f"a{number}"), wish(lane="a", priority=10), is_new=True)
    queue.add(room.waiter("b low"), wish(lane="b", priority=-10), is_new=True)
    queue.add(room.waiter("b high"), wish(lane="b", priority=10), is_new=True)
    queue.send()
    assert room.sent == ["a0", "b high", "a1", "b low", "a2"]


def test_a_flood_does_not_take_the_last_places_of_the_queue() -> None:
    room, queue = Room(), WaitingQueue()
    while may_wait([queue], wish(lane="a"), 16, len(queue)):
        queue.add(room.waiter("flood"), wish(lane="a"), is_new=True)
    assert len(queue) == 14
    assert may_wait([queue], wish(lane="b"), 16, len(queue))
    assert not may_wait([queue], wish(lane="b"), 16, 16)
    assert [may_wait([queue], wish(), limit, len(queue)) for limit in (14, 15)] == [False, True]


def test_a_flood_for_several_models_does_not_take_the_last_places_either() -> None:
    room, queues = Room(), [WaitingQueue() for _ in range(3)]
    for queue in queues:
        while may_wait(queues, wish(lane="a"), 16, sum(map(len, queues))):
            queue.add(room.waiter("flood"), wish(lane="a"), is_new=True)
    assert [len(queue) for queue in queues] == [14, 0, 0]
    assert may_wait(queues, wish(lane="b"), 16, 14)
