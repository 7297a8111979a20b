"""Workers register themselves in the store, and front ends discover them there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Self

from penstock.cluster.redis_store import RedisStore
from penstock.wire.address import Address, parse_address

log = logging.getLogger(__name__)

MEMBER_SECONDS = 10.0
RENEW_SECONDS = 3.0
POLL_SECONDS = 1.0


@dataclass(eq=False)
class Registration:
    """Keeps a worker registered from entering the context until `leave`, also in a store that lost its data."""

    store: RedisStore
    name: str
    address: Address
    renew_seconds: float = RENEW_SECONDS
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        await self._register()
        self._task = asyncio.create_task(self._keep(), name=f"registration of {self.name}")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def leave(self) -> None:
        """For a worker that takes no new work. Further calls do nothing."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await self.store.deregister(self.name, str(self.address))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.renew_seconds)
            await self._register()

    async def _register(self) -> None:
        await self.store.register(self.name, str(self.address), MEMBER_SECONDS)


@dataclass(eq=False)
class Discovery:
    """Asks `members` for the addresses by worker name, None while the store cannot be reached.

    Calls `on_change` with the addresses of all workers: once on entering, then after every change. `on_change` must not raise.

    A worker that is no longer registered stays for `linger_seconds`, counted while the store can be reached. So if the store loses its
    data, the front end keeps its workers until they have registered again. The link to a worker shows whether it is alive.
    """

    members: Callable[[], Awaitable[dict[str, str] | None]]
    on_change: Callable[[frozenset[Address]], None]
    poll_seconds: float = POLL_SECONDS
    linger_seconds: float = MEMBER_SECONDS
    clock: Callable[[], float] = time.monotonic
    # By name: the address, and when it was last registered.
    _known: dict[str, tuple[Address, float]] = field(default_factory=dict, init=False)
    _refused: dict[str, str] = field(default_factory=dict, init=False)
    _told: frozenset[Address] | None = field(default=None, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)

    async def __aenter__(self) -> Self:
        await self._poll()
        self._task = asyncio.create_task(self._keep(), name="discovery of workers")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self.poll_seconds)
            await self._poll()

    async def _poll(self) -> None:
        members = await self.members()
        now = self.clock()
        if members is None:
            # The store cannot be reached: keep the known workers.
            self._known = {name: (address, now) for name, (address, _) in self._known.items()}
        else:
            self._known |= {name: (address, now) for name, address in self._parsed(members).items()}
        self._known = {name: (address, seen) for name, (address, seen) in self._known.items() if now - seen <= self.linger_seconds}
        self._tell(frozenset(address for address, _ in self._known.values()))

    def _parsed(self, members: dict[str, str]) -> dict[str, Address]:
        """Members with a valid address. Wrong ones are logged once."""
        parsed: dict[str, Address] = {}
        refused: dict[str, str] = {}
        for name, address in members.items():
            try:
                parsed[name] = parse_address(address)
            except ValueError as error:
                refused[name] = address
                if self._refused.get(name) != address:
                    log.error("worker %s cannot be used: its address is %r: %s", name, address, error)  # noqa: TRY400, the message is enough
        self._refused = refused
        return parsed

    def _tell(self, addresses: frozenset[Address]) -> None:
        if addresses != self._told:
            self._told = addresses
            self.on_change(addresses)
