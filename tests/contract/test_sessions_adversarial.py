"""Turns, closes and expiries at random moments, with two front ends and a slow store: no token is lost, no lease is left."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from penstock.router.affinity import Binding, Claim, MemoryStore
from penstock.router.policy import Hints, SessionWish
from workers import FrontEnd, Worker, expected, submit, until


class Slow(MemoryStore):
    """Every call takes a while, before and after it is carried out, as over a network."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    async def _pause(self) -> None:
        await asyncio.sleep(self._random.random() * 0.004)

    async def get(self, key: str) -> Binding | None:
        await self._pause()
        found = await super().get(key)
        await self._pause()
        return found

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        await self._pause()
        claimed = await super().claim(key, binding, seconds, owner, quota)
        await self._pause()
        return claimed

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        await self._pause()
        bound = await super().rebind(key, old_epoch, binding, seconds, owner)
        await self._pause()
        return bound

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        await self._pause()
        renewed = await super().renew(key, epoch, seconds)
        await self._pause()
        return renewed

    async def release(self, key: str, epoch: int) -> bool:
        await self._pause()
        released = await super().release(key, epoch)
        await self._pause()
        return released


class Clients:
    """What many agents do, drawn at random."""

    def __init__(self, front_ends: list[FrontEnd], workers: list[Worker], seed: int) -> None:
        """Links are broken to these workers."""
        self._front_ends = front_ends
        self._workers = workers
        self._random = random.Random(seed)
        self._number = 0

    async def act(self) -> None:
        what = self._random.random()
        if what < 0.7:
            await self._turn()
        elif what < 0.85:
            await self._broken_off()
        elif what < 0.95:
            await self._front_end().sessions.close_session("somebody", self._session())
        elif self._workers:
            self._random.choice(self._workers).break_links()

    def _front_end(self) -> FrontEnd:
        return self._random.choice(self._front_ends)

    def _session(self) -> str:
        return f"agent-{self._random.randrange(12)}"

    async def _turn(self) -> None:
        self._number += 1
        number, count = self._number, self._random.choice((1, 5, 40, 150))
        action: Any = self._random.choice(("open", "open", "continue", "close"))
        hints = Hints(session=SessionWish(self._session(), action, self._random.choice((0.05, 0.4))))
        _, reader = await self._front_end().run(submit(number, count, prompt=self._random.choice((20, 100))), hints)
        assert reader.tokens == expected(number, count)

    async def _broken_off(self) -> None:
        task = asyncio.create_task(self._turn())
        await asyncio.sleep(self._random.random() * 0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def pause(self) -> None:
        await asyncio.sleep(self._random.random() * 0.012)


@pytest.mark.parametrize("seed", range(4))
async def test_no_token_is_lost_and_no_lease_is_left(tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    store = Slow(seed)
    links_break = seed % 2 == 0
    # Where a link is broken nobody can give a lease back, and the worker's own timer ends it. Elsewhere that would not come in time:
    # there every lease must have been given back.
    settings: Any = {"session_grace": 0.5 if links_break else 300.0, "max_sessions": 6}
    async with Worker(tmp_path, "a", **settings) as a, Worker(tmp_path, "b", **settings) as b, Worker(tmp_path, "c", **settings) as c:
        workers = [a, b, c]
        async with FrontEnd(workers, store=store, quota=8) as one, FrontEnd(workers, store=store, quota=8, name="two") as two:
            clients = Clients([one, two], workers if links_break else [], seed)
            tasks = []
            for _ in range(200):
                tasks.append(asyncio.create_task(clients.act()))
                await clients.pause()
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
            for front_end in (one, two):
                await until(lambda: len(front_end.sessions) == 0 and front_end.sessions.is_idle)  # noqa: B023
                assert front_end.dispatcher.queued == 0
                await until(lambda: all(front_end.router.load_of(name) == 0 for name in "abc"))  # noqa: B023
            await until(lambda: [worker.simulator.stats().sessions for worker in workers] == [0, 0, 0])
            assert [worker.simulator.stats().kv_blocks_leased for worker in workers] == [0, 0, 0]
            await MemoryStore.get(store, "")
            if links_break:
                # What a broken link kept from being given back goes with its time.
                async with asyncio.timeout(10):
                    while len(store):
                        await MemoryStore.get(store, "")
                        await asyncio.sleep(0.01)
            store.check_integrity()
            assert len(store) == 0
    assert not [record.message for record in caplog.records if record.levelname == "ERROR"]
