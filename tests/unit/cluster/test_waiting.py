"""The queue of generations that wait for a worker: order, priority, cancellation, memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.cluster.waiting import SECONDS_PER_PRIORITY, Attempt, WaitingQueue
from penstock.router.load import WorkerLoad

NOWHERE: Any = cast("Any", None)


class Room:
    """Workers with room for some generations. `sent` names those that were sent, in their order."""

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self.sent: list[str] = []

    def sender(self, name: str) -> Callable[[], Attempt | None]:
        def try_send() -> Attempt | None:
            if not self.count:
                return None
            self.count -= 1
            self.sent.append(name)
            return Attempt(NOWHERE, name.encode(), NOWHERE, WorkerLoad().begin(0))

        return try_send


async def test_nothing_is_sent_without_room_and_all_in_order_with_it() -> None:
    room, queue = Room(), WaitingQueue()
    waiters = [queue.add(room.sender(name), 0, is_new=True) for name in "abc"]
    queue.send()
    assert (room.sent, len(queue)) == ([], 3)
    room.count = 2
    queue.send()
    assert (room.sent, len(queue)) == (["a", "b"], 1)
    assert [(await waiter.wait()).id for waiter in waiters[:2]] == [b"a", b"b"]
    assert not waiters[2].sent.done()


async def test_one_step_of_priority_is_worth_its_seconds() -> None:
    now = 100.0
    room, queue = Room(10), WaitingQueue(lambda: now)
    queue.add(room.sender("low"), 0, is_new=True)
    now += SECONDS_PER_PRIORITY - 1
    queue.add(room.sender("high"), 1, is_new=True)
    now += 2
    queue.add(room.sender("late"), 1, is_new=True)
    queue.add(room.sender("lost its worker"), -5, is_new=False)
    queue.send()
    assert room.sent == ["lost its worker", "high", "low", "late"]


async def test_a_cancelled_waiter_is_never_sent_and_takes_no_room() -> None:
    room, queue = Room(1), WaitingQueue()
    first = asyncio.create_task(queue.add(room.sender("first"), 0, is_new=True).wait())
    queue.add(room.sender("second"), 0, is_new=True)
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    queue.send()
    assert room.sent == ["second"]
    assert len(queue) == 0


async def test_memory_follows_the_waiters_that_are_left() -> None:
    room, queue = Room(), WaitingQueue()
    queue.add(room.sender("stays"), 0, is_new=True)
    for _ in range(1000):
        queue.add(room.sender("leaves"), 0, is_new=True).sent.cancel()
        await asyncio.sleep(0)
        assert len(queue) == 1
        queue.check_integrity()


async def test_only_those_who_waited_too_long_fail_each_with_its_own_error() -> None:
    now = 0.0
    room, queue = Room(), WaitingQueue(lambda: now)
    old = [queue.add(room.sender(name), 0, is_new=True) for name in "ab"]
    now = 10.0
    new = queue.add(room.sender("new"), 0, is_new=True)
    queue.fail(10.0, lambda: LookupError("no worker"))
    errors = [waiter.sent.exception() for waiter in old]
    assert [str(error) for error in errors] == ["no worker", "no worker"]
    assert errors[0] is not errors[1]
    assert not new.sent.done()
    assert len(queue) == 1


async def test_a_waiter_that_is_cancelled_in_the_moment_it_is_sent_is_stopped_on_its_worker() -> None:
    cancelled: list[bytes] = []

    class Link:
        def cancel(self, generation_id: bytes) -> None:
            cancelled.append(generation_id)

    class Worker:
        link = Link()

    load, queue = WorkerLoad(), WaitingQueue()
    attempt = Attempt(cast("Any", Worker()), b"id", NOWHERE, load.begin(3))
    waiting = asyncio.create_task(queue.add(lambda: attempt, 0, is_new=True).wait())
    await asyncio.sleep(0)
    queue.send()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert cancelled == [b"id"]
    assert (load.active, load.held) == (0, 0)
