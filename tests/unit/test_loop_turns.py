"""Turns on the event loop."""

from __future__ import annotations

import asyncio
import time

from penstock.fairness import MAX_REST_SECONDS, LoopTurns, rest_after


def hold(seconds: float) -> None:
    """Keeps the event loop from everything else."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def test_others_go_on_between_the_pieces_of_many() -> None:
    """A hundred pieces that are ready at once. Without turns the loop would run all of them before anything else."""
    turns = LoopTurns()
    done = 0

    async def piece() -> None:
        nonlocal done
        await turns.take("hostile", 1)
        hold(0.001)
        done += 1

    at_once = []

    async def watch() -> None:
        """How many pieces ran between two of its own turns."""
        while done < 100:
            before = done
            await asyncio.sleep(0)
            at_once.append(done - before)

    await asyncio.gather(watch(), *[piece() for _ in range(100)])
    assert max(at_once) == 1
    assert at_once.count(0) >= 50, "the loop is free after a piece"


async def test_tenants_take_turns() -> None:
    turns = LoopTurns()
    order: list[str] = []

    async def piece(lane: str) -> None:
        await turns.take(lane, 1)
        order.append(lane)

    await asyncio.gather(*[piece("many") for _ in range(50)], *[piece("few") for _ in range(3)])
    assert len(order) == 53
    assert [index for index, lane in enumerate(order) if lane == "few"][-1] <= 7


async def test_one_that_is_cancelled_leaves_its_turn_to_the_next() -> None:
    turns = LoopTurns()
    await turns.take("a", 1)
    waiting = [asyncio.ensure_future(turns.take("a", 1)) for _ in range(4)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    while not waiting[1].done():
        await asyncio.sleep(0)
    waiting[2].cancel()
    async with asyncio.timeout(10):
        await waiting[3]
        # Afterwards the loop is free again.
        await turns.take("b", 1)


async def test_one_that_is_cancelled_when_its_turn_has_come() -> None:
    turns = LoopTurns()
    await turns.take("a", 1)
    first, second = (asyncio.ensure_future(turns.take("a", 1)) for _ in range(2))
    # The third task is next when it sees the first one served.
    while not first.done():
        first.cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        await second


def test_the_more_wait_the_longer_the_others_have_the_loop() -> None:
    """One long prompt of an agent goes on soon. A flood of them takes a small part of the loop."""
    assert 0 < rest_after(0.001, 0) < rest_after(0.001, 1) < rest_after(0.001, 3) == rest_after(0.001, 1000)
    assert rest_after(5.0, 1000) == MAX_REST_SECONDS
