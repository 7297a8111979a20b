"""Sessions over real links: open, continue, close, expire, move, divert, over quota."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from penstock.cluster.sessions.sessions import ACTIVE_MARGIN_SECONDS
from penstock.router.affinity import Binding, Claim, MemoryStore, session_key
from penstock.router.policy import Hints, SessionWish
from penstock.wire.messages import Submit
from workers import FrontEnd, Worker, expected, make_model, submit, until


@asynccontextmanager
async def three_workers(tmp_path: Path) -> AsyncIterator[list[Worker]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}", session_grace=5.0)) for number in range(3)]


def wish(action: str = "continue", session: str = "agent", timeout: float = 60.0, parent: str | None = None) -> Hints:
    return Hints(session=SessionWish(session, action, timeout, parent))  # type: ignore[arg-type]


def held(workers: list[Worker]) -> int:
    return sum(worker.simulator.stats().sessions for worker in workers)


def leased(workers: list[Worker]) -> int:
    return sum(worker.simulator.stats().kv_blocks_leased for worker in workers)


def cached(workers: list[Worker]) -> int:
    return sum(worker.simulator.stats().kv_blocks_cached for worker in workers)


def longer(request: Submit, number: int) -> Submit:
    """The next turn: the transcript so far, and a new message."""
    answer = expected(request.seed, request.max_tokens)
    following = submit(number)
    return Submit(following.id, request.token_ids + answer + following.token_ids, 16, seed=number, ignore_eos=True)


async def test_a_session_stays_with_its_worker_and_its_kv(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        request = submit(1, prompt=200)
        turn, _ = await front_end.run(request, wish("open"))
        home = turn.worker
        told = turn.describe_session()
        assert told is not None
        assert told.pop("retained_until") == pytest.approx(time.time() + 60, abs=10)
        assert told == {"id": "agent", "state": "open", "worker": home, "cached_tokens": 0, "expires_in": 60.0, "tier": "device"}
        for number in range(2, 6):
            left = len(request.token_ids) + request.max_tokens
            request = longer(request, number)
            turn, _ = await front_end.run(request, wish())
            assert (turn.state, turn.worker, turn.decisions[0][1].reason) == ("open", home, "session")
            assert turn.cached_tokens >= left - 17
        assert held(workers) == 1
        listing = await front_end.sessions.get_session("somebody", "agent")
        assert listing is not None
        binding, report = listing
        assert report is not None
        assert (binding.worker, report.turns, report.active_turns) == (home, 5, 0)
        assert report.kv_blocks == leased(workers) > 0
        assert report.expires_in is not None
        assert 55 < report.expires_in <= 60


async def test_open_is_bound_only_when_the_worker_has_granted_it(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        turn = front_end.turn(wish("open"))
        await front_end.sessions.begin(turn, "simulator")
        key = session_key("somebody", "simulator", "agent")
        assert await front_end.store.get(key) is None
        _, task = front_end.start(submit(1, 400), turn)
        await until(lambda: turn.worker is not None)
        binding = await front_end.store.get(key)
        assert binding is not None
        assert binding.worker == turn.worker
        task.cancel()
        front_end.sessions.end(turn)


async def test_overlapping_turns_share_one_session(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        both = await asyncio.gather(*[front_end.run(submit(number, 50), wish("open")) for number in (1, 2, 3)])
        assert len({turn.worker for turn, _ in both}) == 1
        assert [reader.tokens for _, reader in both] == [expected(number, 50) for number in (1, 2, 3)]
        assert held(workers) == 1


async def test_close_frees_what_only_the_session_holds(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        request = submit(1, prompt=200)
        turn, _ = await front_end.run(request, wish("open"))
        worker = next(worker for worker in workers if worker.name == turn.worker)
        assert worker.simulator.stats().kv_blocks_cached == 13
        turn, _ = await front_end.run(longer(request, 2), wish("close"))
        assert (turn.state, turn.describe_session()) == ("closed", {**(turn.describe_session() or {}), "expires_in": 0.0})
        await until(lambda: held(workers) == 0)
        assert worker.simulator.stats().kv_blocks_cached == 0
        await until(lambda: len(front_end.sessions) == 0)
        assert await front_end.sessions.get_session("somebody", "agent") is None
        turn, _ = await front_end.run(submit(3), wish())
        assert turn.state == "unknown"
        assert len(front_end.ended) == 1


async def test_a_close_waits_for_the_turns_that_run(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        await front_end.run(submit(1), wish("open"))
        running = asyncio.create_task(front_end.run(submit(2, 300), wish()))
        await until(lambda: sum(worker.simulator.stats().running for worker in workers) == 1)
        await front_end.run(submit(3, 2), wish("close"))
        assert held(workers) == 1
        assert await front_end.sessions.get_session("somebody", "agent") is not None
        _, reader = await running
        assert reader.tokens == expected(2, 300)
        await until(lambda: held(workers) == 0 and len(front_end.sessions) == 0)


async def test_delete_closes_at_once_for_new_turns(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        await front_end.run(submit(1), wish("open"))
        running = asyncio.create_task(front_end.run(submit(2, 300), wish()))
        await until(lambda: sum(worker.simulator.stats().running for worker in workers) == 1)
        assert await front_end.sessions.close_session("somebody", "agent")
        assert not await front_end.sessions.close_session("somebody", "agent")
        turn, _ = await front_end.run(submit(3), wish())
        assert turn.state == "unknown"
        _, reader = await running
        assert reader.tokens == expected(2, 300)
        await until(lambda: held(workers) == 0 and len(front_end.sessions) == 0)


async def test_one_owner_does_not_see_the_others(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        await front_end.run(submit(1), wish("open"), owner="one")
        turn, _ = await front_end.run(submit(2), wish(), owner="two")
        assert turn.state == "unknown"
        assert await front_end.sessions.get_session("two", "agent") is None
        assert not await front_end.sessions.close_session("two", "agent")
        assert await front_end.sessions.list_sessions("two", 10, "") == []
        assert [binding.session for binding, _ in await front_end.sessions.list_sessions("one", 10, "")] == ["agent"]
        await front_end.run(submit(3), wish("open"), owner="two")
        assert held(workers) == 2


async def test_a_session_expires_after_the_end_of_its_last_turn(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        await front_end.run(submit(1), wish("open", timeout=0.2))
        await front_end.run(submit(4), wish("open", "idle", timeout=0.2))
        running = asyncio.create_task(front_end.run(submit(2, 1500), wish()))
        await until(lambda: front_end.sessions.counts["expired"] == 1)
        assert not running.done(), "a session without a turn has expired by now"
        turn, _ = await running
        assert turn.state == "open"
        assert held(workers) == 1
        kept = cached(workers)
        await until(lambda: held(workers) == 0)
        assert front_end.sessions.counts["expired"] == 2
        assert leased(workers) == 0
        assert cached(workers) == kept, "expiry takes the lease and frees nothing"
        turn, _ = await front_end.run(submit(3), wish())
        assert turn.state == "unknown"
        assert leased(workers) == 0


async def test_the_worker_ends_the_sessions_of_a_dead_front_end(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", session_grace=0.1) as worker:
        async with FrontEnd([worker]) as front_end:
            await front_end.run(submit(1), wish("open", timeout=0.3))
            assert worker.simulator.stats().sessions == 1
        await until(lambda: worker.simulator.stats().sessions == 0)
        assert worker.simulator.stats().kv_blocks_leased == 0


async def test_over_the_quota_of_a_key_a_turn_is_served_and_says_so(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers, quota=2) as front_end:
        for name in ("one", "two"):
            await front_end.run(submit(1), wish("open", name))
        turn, reader = await front_end.run(submit(3), wish("open", "three"))
        assert reader.tokens == expected(3, 16)
        assert turn.state == "over_quota"
        await until(lambda: held(workers) == 2)
        other, _ = await front_end.run(submit(4), wish("open", "three"), owner="another")
        assert other.state == "open"
        await front_end.run(submit(5), wish("close", "one"))
        await until(lambda: held(workers) == 2)
        turn, _ = await front_end.run(submit(6), wish("open", "three"))
        assert turn.state == "open"


async def test_over_the_quota_of_a_worker_a_turn_is_served_and_says_so(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", max_sessions=1) as worker, FrontEnd([worker]) as front_end:
        await front_end.run(submit(1), wish("open", "one"))
        turn, reader = await front_end.run(submit(2), wish("open", "two"))
        assert (turn.state, reader.tokens) == ("over_quota", expected(2, 16))
        await until(lambda: len(front_end.sessions) == 1)


async def test_a_session_whose_worker_is_gone_moves(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(2)]
        front_end = await stack.enter_async_context(FrontEnd(workers))
        request = submit(1, prompt=200)
        turn, _ = await front_end.run(request, wish("open"))
        (home,) = [worker for worker in workers if worker.name == turn.worker]
        (other,) = [worker for worker in workers if worker is not home]
        await home.server.close()
        await until(lambda: len(front_end.pool.members) == 1)
        turn, reader = await front_end.run(longer(request, 2), wish())
        assert (turn.state, turn.worker, turn.cached_tokens) == ("moved", other.name, 0)
        assert reader.tokens == expected(2, 16)
        turn, _ = await front_end.run(longer(longer(request, 2), 3), wish())
        assert (turn.state, turn.worker) == ("open", other.name)
        assert turn.cached_tokens > 200
        assert other.simulator.stats().sessions == 1


async def test_a_session_that_gets_no_lease_on_its_new_worker_keeps_its_timeout_and_moves_later(tmp_path: Path) -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}", max_sessions=1)) for number in range(2)]
        front_end = await stack.enter_async_context(FrontEnd(workers, store=store))
        turn, _ = await front_end.run(submit(1), wish("open"))
        (home,) = [worker for worker in workers if worker.name == turn.worker]
        (other,) = [worker for worker in workers if worker is not home]
        await home.server.close()
        await until(lambda: len(front_end.pool.members) == 1)
        await front_end.run(submit(2), wish("open", "another"))
        for number, asked in [(3, wish()), (4, wish("open", timeout=62.0))]:
            turn, reader = await front_end.run(submit(number), asked)
            assert (turn.state, turn.worker, reader.tokens) == ("over_quota", other.name, expected(number, 16))
        await front_end.sessions.close_session("somebody", "another")
        await until(lambda: other.simulator.stats().sessions == 0)
        now = 30.0
        turn, _ = await front_end.run(submit(5), wish())
        assert (turn.state, turn.worker) == ("open", other.name)
        listing = await front_end.sessions.get_session("somebody", "agent")
        assert listing is not None
        assert (listing[0].worker, other.simulator.stats().sessions) == (other.name, 1)
        # Even without a lease it ends after its timeout, without the margin of a running turn.
        await other.server.close()
        await until(lambda: not front_end.pool.members)
        async with Worker(tmp_path, home.name, max_sessions=0) as full:
            await until(lambda: len(front_end.pool.members) == 1)
            turn, _ = await front_end.run(submit(6), wish())
            assert (turn.state, turn.worker) == ("over_quota", full.name)
            await until(lambda: front_end.sessions.is_idle)
            key = session_key("somebody", "simulator", "agent")
            now = 91.0
            assert await store.get(key) is not None
            now = 93.0
            assert await store.get(key) is None


async def test_a_turn_that_migrates_takes_its_session_along(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(2)]
        front_end = await stack.enter_async_context(FrontEnd(workers))
        turn, _ = await front_end.run(submit(1), wish("open"))
        (home,) = [worker for worker in workers if worker.name == turn.worker]
        running = asyncio.create_task(front_end.run(submit(2, 400), wish()))
        await until(lambda: home.simulator.stats().running == 1)
        await home.server.close()
        turn, reader = await running
        assert reader.tokens == expected(2, 400)
        assert turn.state == "moved"
        listing = await front_end.sessions.get_session("somebody", "agent")
        assert listing is not None
        assert listing[0].worker == turn.worker != home.name


async def test_a_worker_that_forgot_the_session_gives_it_a_new_lease(tmp_path: Path) -> None:
    first = Worker(tmp_path, "a")
    async with first, FrontEnd([first]) as front_end:
        await front_end.run(submit(1), wish("open"))
        await first.server.close()
        async with Worker(tmp_path, "a") as again:
            await until(lambda: len(front_end.pool.members) == 1)
            turn, _ = await front_end.run(submit(2), wish())
            assert turn.state == "open"
            assert again.simulator.stats().sessions == 1


async def test_a_turn_goes_elsewhere_when_its_worker_is_overloaded(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        model = make_model(max_batch=1)
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}", model, max_batch=1)) for number in range(2)]
        front_end = await stack.enter_async_context(FrontEnd(workers, worker_queue=1))
        turn, _ = await front_end.run(submit(1), wish("open"))
        home = turn.worker
        blocking = [asyncio.create_task(front_end.run(submit(2, 5000), wish()))]
        await until(lambda: [member.link.unbegun for member in front_end.pool.members if member.link.active] == [0])
        blocking.append(asyncio.create_task(front_end.run(submit(3, 5000), wish())))
        await until(lambda: [worker.simulator.stats().queued for worker in workers if worker.name == home] == [1])
        turn, reader = await front_end.run(submit(4), wish())
        assert (turn.state, reader.tokens) == ("diverted", expected(4, 16))
        assert turn.worker != home
        listing = await front_end.sessions.get_session("somebody", "agent")
        assert listing is not None
        assert listing[0].worker == home, "a detour moves nobody"
        for task in blocking:
            task.cancel()
        await asyncio.gather(*blocking, return_exceptions=True)


async def test_a_subagent_goes_to_its_parents_worker(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        for number in range(4):
            parent, _ = await front_end.run(submit(number, prompt=100), wish("open", f"parent-{number}"))
            child, _ = await front_end.run(submit(100 + number), wish("open", f"parent-{number}/child", parent=f"parent-{number}"))
            assert child.decisions[0][1].reason == "parent"
            assert child.worker == parent.worker
        assert held(workers) == 8


async def test_an_affinity_key_goes_to_its_last_worker_and_has_no_lease(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        first, _ = await front_end.run(submit(1), Hints(affinity="app"))
        for number in range(2, 6):
            turn, _ = await front_end.run(submit(number), Hints(affinity="app"))
            assert (turn.worker, turn.decisions[0][1].reason) == (first.worker, "affinity")
        assert turn.describe_session() is None
        assert held(workers) == 0


async def test_a_turn_that_ends_before_its_grant_leaves_no_session(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", step_ms=50.0) as worker, FrontEnd([worker]) as front_end:
        running = asyncio.create_task(front_end.run(submit(1), wish("open")))
        await until(lambda: worker.simulator.stats().sessions == 1)
        running.cancel()
        await until(lambda: worker.simulator.stats().sessions == 0)
        await until(lambda: len(front_end.sessions) == 0)


async def test_a_late_close_of_an_earlier_incarnation_is_ignored(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers) as front_end:
        turn, _ = await front_end.run(submit(1), wish("open"))
        assert turn.session is not None
        old = turn.session.key, turn.session.binding.epoch
        await front_end.run(submit(2), wish("close"))
        await until(lambda: held(workers) == 0)
        turn, _ = await front_end.run(submit(3), wish("open"))
        member = front_end.pool.find(turn.worker or "")
        assert member is not None
        member.link.close_session(*old, frees=True)
        await front_end.run(submit(4), wish())
        assert held(workers) == 1


async def test_two_front_ends_on_one_store_agree(tmp_path: Path) -> None:
    store = MemoryStore()
    async with three_workers(tmp_path) as workers, FrontEnd(workers, store=store) as one, FrontEnd(workers, store=store, name="two") as two:
        first, _ = await one.run(submit(1), wish("open"))
        for number, front_end in enumerate((two, one, two, one, two), 2):
            turn, _ = await front_end.run(submit(number), wish())
            assert (turn.worker, turn.state) == (first.worker, "open")
        assert await two.sessions.close_session("somebody", "agent")
        turn, _ = await one.run(submit(9), wish())
        assert turn.state == "unknown"
        await until(lambda: held(workers) == 0 and len(one.sessions) == len(two.sessions) == 0)


async def test_a_session_opened_on_two_front_ends_at_once_has_one_worker(tmp_path: Path) -> None:
    store = MemoryStore()
    async with three_workers(tmp_path) as workers, FrontEnd(workers, store=store) as one, FrontEnd(workers, store=store, name="two") as two:
        for number in range(10):
            session = f"race-{number}"
            # Different prompts, so that nothing but the claim brings them together.
            await asyncio.gather(
                one.run(submit(2 * number, prompt=100), wish("open", session)),
                two.run(submit(2 * number + 1, prompt=100), wish("open", session)),
            )
            binding = await store.get(session_key("somebody", "simulator", session))
            assert binding is not None
            for front_end in (one, two):
                turn, _ = await front_end.run(submit(500 + number), wish("continue", session))
                assert (turn.worker, turn.state) == (binding.worker, "open")
        await until(lambda: held(workers) == 10)


async def test_many_sessions_leave_nothing_behind(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", max_sessions=10_000) as worker, FrontEnd([worker], quota=10_000) as front_end:
        for number in range(300):
            await front_end.run(submit(number, 1, prompt=20), wish("open", f"agent-{number}", timeout=0.05 if number % 2 else 60.0))
            if not number % 2:
                assert await front_end.sessions.close_session("somebody", f"agent-{number}")
        await until(lambda: worker.simulator.stats().sessions == 0 and len(front_end.sessions) == 0)
        store = front_end.store
        assert isinstance(store, MemoryStore)
        await store.get("")
        store.check_integrity()
        assert len(store) == 0
        assert worker.simulator.stats().kv_blocks_leased == 0
        await until(lambda: front_end.sessions.is_idle)


class SlowStore(MemoryStore):
    """A store whose writes wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.may_write = asyncio.Event()
        self.waiting = 0

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        self.waiting += 1
        await self.may_write.wait()
        return await super().claim(key, binding, seconds, owner, quota)

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        self.waiting += 1
        await self.may_write.wait()
        return await super().rebind(key, old_epoch, binding, seconds, owner)


async def test_a_session_that_moves_during_its_binding_is_bound_to_its_new_worker(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(2)]
        store = SlowStore()
        front_end = await stack.enter_async_context(FrontEnd(workers, store=store))
        running = asyncio.create_task(front_end.run(submit(1, 400), wish("open")))
        await until(lambda: store.waiting == 1)
        (home,) = [worker for worker in workers if worker.simulator.stats().running]
        await home.server.close()
        (other,) = [worker for worker in workers if worker is not home]
        await until(lambda: other.simulator.stats().sessions == 1)
        store.may_write.set()
        turn, reader = await running
        assert reader.tokens == expected(1, 400)
        listing = await front_end.sessions.get_session("somebody", "agent")
        assert listing is not None
        assert listing[0].worker == other.name == turn.worker
        assert listing[1] is not None


async def test_a_session_that_is_closed_while_it_moves_stays_closed(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(2)]
        store = SlowStore()
        store.may_write.set()
        front_end = await stack.enter_async_context(FrontEnd(workers, store=store))
        turn, _ = await front_end.run(submit(1), wish("open"))
        store.may_write.clear()
        store.waiting = 0
        running = asyncio.create_task(front_end.run(submit(2, 400), wish()))
        (home,) = [worker for worker in workers if worker.name == turn.worker]
        await until(lambda: home.simulator.stats().running == 1)
        await home.server.close()
        await until(lambda: store.waiting == 1)
        assert await front_end.sessions.close_session("somebody", "agent")
        store.may_write.set()
        _, reader = await running
        assert reader.tokens == expected(2, 400)
        await until(lambda: len(store) == 0 and front_end.sessions.is_idle)
        (other,) = [worker for worker in workers if worker is not home]
        assert other.simulator.stats().sessions == 0


class HeldRenewals(MemoryStore):
    """A store in which the renewals of running turns wait for the test."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self.may_renew = asyncio.Event()
        self.waiting = 0

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        if seconds > 60.0:
            self.waiting += 1
            await self.may_renew.wait()
            self.waiting -= 1
        return await super().renew(key, epoch, seconds)


class CountedRenewals(MemoryStore):
    """A store that counts the renewals of running turns."""

    renewals = 0

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        self.renewals += seconds > 60.0
        return await super().renew(key, epoch, seconds)


async def test_a_turn_of_any_length_keeps_its_session(tmp_path: Path) -> None:
    now = 0.0
    store = CountedRenewals(clock=lambda: now)
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker], store=store, keep_alive_seconds=0.01) as front_end:
        turn = front_end.turn(wish("open"))
        await front_end.sessions.begin(turn, "simulator")
        _, task = front_end.start(submit(1, 50_000), turn)
        await until(lambda: turn.worker is not None and turn.settling is None)
        for _ in range(4):
            # Just within the time that one renewal gives.
            now += 60.0 + ACTIVE_MARGIN_SECONDS - 1
            seen = store.renewals
            await until(lambda: store.renewals > seen)  # noqa: B023
        assert await store.get(session_key("somebody", "simulator", "agent")) is not None
        task.cancel()
        front_end.sessions.end(turn)
        await until(lambda: front_end.sessions.is_idle)


async def test_a_renewal_after_the_end_of_the_last_turn_prolongs_nothing(tmp_path: Path) -> None:
    now = 0.0
    store = HeldRenewals(clock=lambda: now)
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker], store=store, keep_alive_seconds=0.01) as front_end:
        running = asyncio.create_task(front_end.run(submit(1, 200), wish("open")))
        await until(lambda: store.waiting == 1)
        await running
        await until(lambda: front_end.sessions.is_idle)
        store.may_renew.set()
        await until(lambda: store.waiting == 0)
        key = session_key("somebody", "simulator", "agent")
        assert await store.get(key) is not None
        now = 61.0
        assert await store.get(key) is None


class HeldReaper(MemoryStore):
    """A store in which the reaper and the end of a turn wait for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.may_reap, self.may_settle = asyncio.Event(), asyncio.Event()
        self.reaps, self.settles = 0, 0

    async def get(self, key: str) -> Binding | None:
        task = asyncio.current_task()
        if task is None or task.get_name() != "session reaper":
            return await super().get(key)
        self.reaps += 1
        await self.may_reap.wait()
        self.reaps += 1
        return await super().get(key)

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        is_renewed = await super().renew(key, epoch, seconds)
        if seconds == 60.0:
            self.settles += 1
            await self.may_settle.wait()
        return is_renewed


@pytest.mark.parametrize("first", ["the turn's end", "the reaper"])
async def test_a_turn_that_begins_while_the_reaper_asks_keeps_its_session(tmp_path: Path, first: str) -> None:
    store = HeldReaper()
    key = session_key("somebody", "simulator", "agent")
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker], store=store) as front_end:
        await front_end.run(submit(1), wish("open", timeout=0.3))
        await until(lambda: front_end.sessions.is_idle)
        binding = await store.get(key)
        assert binding is not None
        # Another front end has it, too.
        await MemoryStore.renew(store, key, binding.epoch, 60.0)
        await until(lambda: store.reaps == 1)
        await front_end.run(submit(2), wish("open", timeout=60.0))
        await until(lambda: store.settles == 1)
        gates = [store.may_settle, store.may_reap] if first == "the turn's end" else [store.may_reap, store.may_settle]
        for gate in gates:
            gate.set()
            await until(lambda: front_end.sessions.is_idle if store.may_settle.is_set() else store.reaps == 2)
        await until(lambda: store.reaps == 2)
        assert len(front_end.sessions) == 1
        assert await front_end.sessions.close_session("somebody", "agent")
        await until(lambda: worker.simulator.stats().sessions == 0)
        assert len(front_end.sessions) == 0


async def test_a_lost_claim_gives_its_lease_back(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers:
        store = SlowStore()
        async with FrontEnd(workers, store=store) as front_end:
            key = session_key("somebody", "simulator", "agent")
            running = asyncio.create_task(front_end.run(submit(1, 300), wish("open")))
            await until(lambda: store.waiting == 1)
            (home,) = [worker for worker in workers if worker.simulator.stats().running]
            elsewhere = next(worker.name for worker in workers if worker is not home)
            theirs = Binding("agent", elsewhere, "simulator", 2**62, 60.0, 0.0)
            store.may_write.set()
            await MemoryStore.claim(store, key, theirs, 60.0, "somebody")
            await running
            await until(lambda: home.simulator.stats().sessions == 0)
            turn, _ = await front_end.run(submit(2), wish())
            assert (turn.worker, turn.state) == (elsewhere, "open")


async def test_turns_of_a_session_over_quota_end_in_any_order(tmp_path: Path) -> None:
    async with three_workers(tmp_path) as workers, FrontEnd(workers, quota=0) as front_end:
        long = asyncio.create_task(front_end.run(submit(1, 300), wish("open")))
        await until(lambda: front_end.sessions.counts["over_quota"] == 1)
        for number in range(2, 5):
            turn, _ = await front_end.run(submit(number), wish("open"))
            assert turn.state == "over_quota"
        turn, reader = await long
        assert (turn.state, reader.tokens) == ("over_quota", expected(1, 300))
        await until(lambda: held(workers) == 0 and len(front_end.sessions) == 0 and front_end.sessions.is_idle)
