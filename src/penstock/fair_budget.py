"""A budget of what is used for a while, such as bytes or threads, shared fairly between tenants."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import NamedTuple


class Share:
    """What one request has taken of a budget. Whoever makes it releases it, however the request ends."""

    __slots__ = ("held", "is_under_way", "tenant")

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.held = 0
        self.is_under_way = False
        """It has taken something and does not wait for more."""


class _Waiter(NamedTuple):
    share: Share
    amount: int
    granted: asyncio.Future[None]


class FairBudget:
    """At most `total` is in use at a time, with one exception that keeps tenants apart.

    A tenant alone may use it all. A tenant with nothing under way never waits: it may overdraw the budget. So however much one tenant
    holds, and for how long, another one can always do one thing after the other. What else does not fit waits. Waiting shares are served
    in turns, one of each tenant; those of one tenant in the order of their arrival. For one event loop.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.used = 0
        self._under_way: dict[str, int] = {}
        """The number of shares, by tenant. Tenants without one are not in it."""
        self._lines: dict[str, deque[_Waiter]] = {}
        """Who waits, by tenant. The tenant that was served longest ago comes first."""

    @property
    def waiting(self) -> int:
        """The number of shares that wait."""
        return sum(map(len, self._lines.values()))

    def take(self, share: Share, amount: int) -> bool:
        """Takes more, if it need not wait for it."""
        if (self._lines or self.used + amount > self.total) and self._under_way.get(share.tenant, 0) > share.is_under_way:
            return False
        self._grant(share, amount)
        return True

    async def wait(self, share: Share, amount: int, seconds: float | None = None) -> None:
        """Takes more when its turn comes, after `take` was refused. Raises TimeoutError; then it has taken nothing more."""
        waiter = _Waiter(share, amount, asyncio.get_running_loop().create_future())
        self._lines.setdefault(share.tenant, deque()).append(waiter)
        self._rest(share)
        try:
            async with asyncio.timeout(seconds):
                await waiter.granted
        except BaseException:
            self._give_up(waiter)
            raise

    def release(self, share: Share) -> None:
        """Gives everything back. May be called again."""
        self.used -= share.held
        share.held = 0
        self._rest(share)
        if self._lines:
            self._serve(share.tenant)

    def check_integrity(self) -> None:
        """Asserts that no tenant waits of which nothing is under way, and that nothing is kept for tenants that have left."""
        assert self.used >= 0
        assert all(self._under_way.values())
        assert all(self._lines.values())
        assert self._lines.keys() <= self._under_way.keys()

    def _grant(self, share: Share, amount: int) -> None:
        self.used += amount
        share.held += amount
        if not share.is_under_way:
            share.is_under_way = True
            self._under_way[share.tenant] = self._under_way.get(share.tenant, 0) + 1

    def _rest(self, share: Share) -> None:
        if share.is_under_way:
            share.is_under_way = False
            self._under_way[share.tenant] -= 1
            if not self._under_way[share.tenant]:
                del self._under_way[share.tenant]

    def _give_up(self, waiter: _Waiter) -> None:
        share, line = waiter.share, self._lines.get(waiter.share.tenant, ())
        if not waiter.granted.cancelled():
            # Its caller was cancelled when it was just served.
            self.used -= waiter.amount
            share.held -= waiter.amount
        elif waiter in line:
            self._lines[share.tenant].remove(waiter)
            if not line:
                del self._lines[share.tenant]
        self._serve(share.tenant)

    def _serve(self, tenant: str) -> None:
        """Serves the tenant if nothing of it is under way, then all in turns, as long as the next one fits."""
        while tenant in self._lines and tenant not in self._under_way:
            self._serve_first(tenant)
        while self._lines:
            following = next(iter(self._lines))
            if self.used + self._lines[following][0].amount > self.total:
                return
            self._serve_first(following)

    def _serve_first(self, tenant: str) -> None:
        line = self._lines.pop(tenant)
        waiter = line.popleft()
        if line:
            self._lines[tenant] = line
        if not waiter.granted.cancelled():
            self._grant(waiter.share, waiter.amount)
            waiter.granted.set_result(None)
