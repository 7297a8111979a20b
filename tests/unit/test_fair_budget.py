"""A budget that tenants share: nobody waits for nothing, nobody is kept out, and nothing is lost when a waiter leaves."""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress

import pytest

from penstock.fairness import FairBudget, Share


class Tenants:
    """Requests of several tenants, by name; and the order in which those that had to wait were served."""

    def __init__(self, total: int, *, has_shares: bool = False) -> None:
        self.budget = FairBudget(total, has_shares=has_shares)
        self.served: list[str] = []
        self.shares: list[Share] = []

    def share(self, tenant: str, amount: int) -> Share:
        share = Share(tenant)
        assert self.budget.take(share, amount)
        return share

    async def ask(self, tenant: str, amount: int, seconds: float | None = None) -> Share:
        """Waits, and then holds it until somebody releases it."""
        share = Share(tenant)
        assert not self.budget.take(share, amount)
        try:
            await self.budget.wait(share, amount, seconds)
        except BaseException:
            assert share.held == 0
            self.budget.release(share)
            raise
        self.served.append(tenant)
        self.shares.append(share)
        return share

    async def start(self, tenant: str, amount: int) -> asyncio.Task[Share]:
        task = asyncio.create_task(self.ask(tenant, amount))
        await asyncio.sleep(0)
        return task

    async def release(self, share: Share) -> None:
        self.budget.release(share)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.budget.check_integrity()


async def test_a_tenant_alone_may_use_it_all() -> None:
    tenants = Tenants(10)
    shares = [tenants.share("a", 1) for _ in range(10)]
    assert not tenants.budget.take(Share("a"), 1)
    for share in shares:
        await tenants.release(share)
    assert tenants.budget.used == 0


async def test_a_tenant_with_nothing_under_way_never_waits() -> None:
    tenants = Tenants(10)
    hoard = tenants.share("a", 10)
    await tenants.start("a", 5)
    other = tenants.share("b", 3)
    assert tenants.budget.used == 13
    assert not tenants.budget.take(Share("b"), 1), "but only one thing after the other"
    assert tenants.budget.take(other, 30), "a share that is the only one of its tenant may grow"
    await tenants.release(other)
    await tenants.release(tenants.share("b", 1))
    await tenants.release(hoard)
    assert tenants.served == ["a"]


async def test_what_is_larger_than_the_whole_budget_runs_alone() -> None:
    tenants = Tenants(10)
    large = tenants.share("a", 50)
    second = await tenants.start("a", 50)
    await tenants.release(large)
    assert second.done()


async def test_who_waits_is_served_in_turns_of_the_tenants() -> None:
    """One tenant floods. Another one, which comes later, is served with every second grant."""
    tenants = Tenants(2)
    holders = [tenants.share("flood", 1), tenants.share("flood", 1)]
    waiters = [await tenants.start("flood", 1) for _ in range(100)]
    holders.append(tenants.share("late", 1))
    waiters += [await tenants.start("late", 1) for _ in range(3)]
    for share in holders:
        await tenants.release(share)
    while tenants.served.count("late") < 3:
        await tenants.release(tenants.shares[len(tenants.served) - 2])
    assert tenants.served[:6].count("late") == 3
    for task in waiters:
        if not task.done():
            task.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)


async def test_a_large_one_is_not_passed_by_small_ones_for_ever() -> None:
    tenants = Tenants(10)
    shares = [tenants.share("small", 1) for _ in range(9)] + [tenants.share("large", 1)]
    large = await tenants.start("large", 8)
    small = [await tenants.start("small", 1) for _ in range(20)]
    for share in shares[:8]:
        await tenants.release(share)
    assert large.done()
    for task in small:
        task.cancel()
    await asyncio.gather(*small, return_exceptions=True)


async def test_shares_that_grow_do_not_block_each_other() -> None:
    """Bodies that are half read fill the budget. One of each tenant can still be read to its end."""
    tenants = Tenants(10)
    halves = [tenants.share("a", 5), tenants.share("a", 5)]
    assert not tenants.budget.take(halves[0], 5)
    growing = asyncio.create_task(tenants.budget.wait(halves[0], 5))
    await asyncio.sleep(0)
    assert tenants.budget.take(halves[1], 5), "the other one waits, so this one is the only one under way"
    assert not growing.done()
    await tenants.release(halves[1])
    await growing
    assert (halves[0].held, tenants.budget.used) == (10, 10)
    await tenants.release(halves[0])
    assert tenants.budget.used == 0


async def test_a_waiter_that_is_cancelled_leaves_its_place() -> None:
    tenants = Tenants(1)
    holder = tenants.share("a", 1)
    first, second = await tenants.start("a", 1), await tenants.start("a", 1)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert tenants.budget.waiting == 1
    await tenants.release(holder)
    assert second.done()
    await tenants.release(second.result())
    assert (tenants.budget.used, tenants.budget.waiting) == (0, 0)


async def test_a_waiter_that_is_cancelled_when_it_is_served_passes_it_on() -> None:
    tenants = Tenants(1)
    holder = tenants.share("a", 1)
    first, second = await tenants.start("a", 1), await tenants.start("a", 1)
    tenants.budget.release(holder)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await second
    assert tenants.budget.used == 1
    await tenants.release(second.result())
    assert tenants.budget.used == 0


async def test_waiting_has_an_end() -> None:
    tenants = Tenants(1)
    holder = tenants.share("a", 1)
    with pytest.raises(TimeoutError):
        await tenants.ask("a", 1, 0.01)
    assert (tenants.budget.used, tenants.budget.waiting) == (1, 0)
    await tenants.release(holder)
    tenants.budget.check_integrity()


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_events_leaves_nothing_behind(seed: int) -> None:
    numbers = random.Random(seed)
    budget = FairBudget(20)
    most = 0

    async def request() -> None:
        nonlocal most
        share = Share(numbers.choice("abc"))
        try:
            for _ in range(numbers.randint(1, 3)):
                amount = numbers.randint(0, 8)
                if not budget.take(share, amount):
                    await budget.wait(share, amount)
                most = max(most, budget.used)
                budget.check_integrity()
                for _ in range(numbers.randint(0, 3)):
                    await asyncio.sleep(0)
        finally:
            budget.release(share)

    tasks = [asyncio.create_task(request()) for _ in range(60)]
    for _ in range(30):
        await asyncio.sleep(0)
        numbers.choice(tasks).cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    budget.check_integrity()
    assert (budget.used, budget.waiting) == (0, 0)
    assert most <= 20 + 3 * 24, "a tenant overdraws by at most what it takes at once"


async def test_a_tenant_below_its_share_never_waits() -> None:
    """Of two tenants each may have a third: there may be one more."""
    tenants = Tenants(90, has_shares=True)
    hoard = tenants.share("a", 90)
    waiting = await tenants.start("a", 1)
    shares = [tenants.share("b", 10) for _ in range(3)]
    assert not tenants.budget.take(Share("b"), 1)
    assert tenants.budget.used == 120
    await tenants.release(shares.pop())
    shares.append(tenants.share("b", 10))
    await tenants.release(hoard)
    await waiting
    for share in (*shares, *tenants.shares):
        await tenants.release(share)
    assert tenants.budget.used == 0
