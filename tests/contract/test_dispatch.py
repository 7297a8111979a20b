"""Generations survive their workers, wait for room, and are never sent after their client left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Self

import pytest

from penstock.backends.embedded import EmbeddedBackend
from penstock.backends.simulator import Simulator, Vocabulary
from penstock.cluster import dispatch, suspects
from penstock.cluster.dispatch import MAX_SENT_AT_ONCE
from penstock.cluster.links.link import LinkProtocol
from penstock.cluster.links.security import Handshake
from penstock.cluster.links.worker_server import WorkerServer
from penstock.cluster.pool import QUIET_LOOKS
from penstock.cluster.sessions.turn import Turn
from penstock.config.engines import SimulatorConfig
from penstock.config.front_end import RouterSettings
from penstock.engine.engine import Engine
from penstock.kv.blocks import block_hashes, tenant_root
from penstock.media.families.simulator import make_rules
from penstock.router.policy import Hints, Preference, SessionWish
from penstock.wire import codec
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import (
    PROTOCOL_VERSION,
    BlocksStored,
    Challenge,
    Fault,
    Finish,
    Hello,
    Message,
    ModelInfo,
    Ping,
    Pong,
    Segment,
    Submit,
    Welcome,
)
from penstock.worker.runtime import WorkerRuntime
from tiny_models import make_engine
from workers import SECRET, WORDS, FrontEnd, Reader, Worker, expected, fault_of, make_model, submit, until


class Mute(LinkProtocol):
    """A worker that accepts links and then does nothing, or breaks every link on which it gets work."""

    def __init__(self, name: str, breaks: bool, answers: bool = False) -> None:
        super().__init__()
        self._name = name
        self._answers = answers
        self._breaks = breaks
        self.submits: list[Submit] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(Challenge(PROTOCOL_VERSION, b"n" * 32))

    def messages_received(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, Hello):
                self.established()
                proof = Handshake.of(b"n" * 32, message).proof(SECRET, "worker", self._name)
                self.send(Welcome(self._name, proof, make_model()))
            elif isinstance(message, Ping) and self._answers:
                self.send(Pong())
            elif isinstance(message, Submit):
                self.submits.append(message)
                if self._breaks:
                    self.abort()

    def link_lost(self, reason: Exception) -> None:
        pass


class MuteWorker(Worker):
    """Stands in for a worker whose process hangs, or dies with every request."""

    answers = False
    """Whether it answers the heartbeat."""

    def __init__(self, folder: Path, name: str, breaks: bool = False) -> None:
        super().__init__(folder, name)
        self.links: list[Mute] = []
        self._breaks = breaks
        self._listening: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._listening = await asyncio.get_running_loop().create_unix_server(self._accept, self.address.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listening is not None
        self._listening.close()
        for link in self.links:
            link.abort()

    def _accept(self) -> Mute:
        self.links.append(Mute(self.name, self._breaks, self.answers))
        return self.links[-1]

    @property
    def submits(self) -> list[Submit]:
        return [request for link in self.links for request in link.submits]


async def test_a_lost_worker_loses_no_token(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(3)]
        # Workers that die whenever the slowest stream has made 40 tokens more look as if that stream killed them.
        front_end = await stack.enter_async_context(FrontEnd(workers, trial_seconds=0.0))
        started = [front_end.start(submit(number, 300, logprobs=2)) for number in range(30)]
        for round_number in range(5):
            await until(lambda: min(len(reader.tokens) for reader, _ in started) > 40 * (round_number + 1))  # noqa: B023
            workers[round_number % 3].break_links()
        async with asyncio.timeout(30):
            await asyncio.gather(*[task for _, task in started])
        assert sum(front_end.dispatcher.migrations.values()) >= 30
        calm = [front_end.start(submit(number, 300, logprobs=2)) for number in range(30)]
        await asyncio.gather(*[task for _, task in calm])
        for number, ((reader, _), (undisturbed, _)) in enumerate(zip(started, calm, strict=True)):
            assert reader.tokens == expected(number, 300)
            delta, terminal = reader.read()
            same, _ = undisturbed.read()
            assert terminal == Finish("length")
            assert delta is not None
            assert same is not None
            assert delta.logprobs == same.logprobs
            assert delta.prompt is not None
            assert delta.prompt.cached_tokens == 0, "the prompt is reported once, as the first worker found it"


@pytest.mark.parametrize("trial_seconds", [0.0, 30.0], ids=["go on", "suspects"])
async def test_many_that_lost_their_worker_go_on_in_pieces(tmp_path: Path, trial_seconds: float) -> None:
    """Others have the event loop meanwhile."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, name, prefill_rate=1e9)) for name in "ab"]
        front_end = await stack.enter_async_context(
            FrontEnd(workers, trial_seconds=trial_seconds, worker_queue=1000, router=RouterSettings(policy="round-robin"))
        )
        started = [front_end.start(submit(number, 400, 16)) for number in range(400)]
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 0)
        loop, gone_on = asyncio.get_running_loop(), [0]

        def look() -> None:
            gone_on.append(front_end.dispatcher.migrations.total())
            if gone_on[-1] < 200:
                loop.call_soon(look)

        look()
        workers[0].break_links()
        await until(lambda: gone_on[-1] == 200)
        assert max(after - before for before, after in pairwise(gone_on)) <= MAX_SENT_AT_ONCE
        for _, task in started:
            task.cancel()


async def test_those_who_lost_their_worker_share_the_others(tmp_path: Path) -> None:
    """A worker that owed nothing has not spoken for long. It gets its part all the same, not one to see whether it lives."""
    async with AsyncExitStack() as stack:
        lost, busy, idle = [await stack.enter_async_context(Worker(tmp_path, name)) for name in "abc"]
        front_end = await stack.enter_async_context(FrontEnd([lost], trial_seconds=0.0))
        started = [front_end.start(submit(number, 1000)) for number in range(30)]
        front_end.pool.discovered([busy.address])
        await until(lambda: front_end.pool.find("b") is not None)
        _, other = front_end.start(submit(100, 4000))
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 5)
        front_end.pool.discovered([busy.address, idle.address])
        await until(lambda: front_end.pool.find("c") is not None)
        made = len(started[0][0].tokens)
        await until(lambda: len(started[0][0].tokens) > made + 200)
        lost.break_links()
        await until(lambda: front_end.dispatcher.migrations["worker_lost"] == 30)
        active = {member.name: member.link.active for member in front_end.pool.members}
        async with asyncio.timeout(20):
            await asyncio.gather(*[task for _, task in started])
        assert [reader.tokens for reader, _ in started] == [expected(number, 1000) for number in range(30)]
        assert min(active["b"], active["c"]) >= 10, active
        other.cancel()


async def test_generations_leave_a_worker_that_hands_over(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as old, Worker(tmp_path, "b") as new, FrontEnd([old, new]) as front_end:
        started = [front_end.start(submit(number, 400)) for number in range(10)]
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 20)
        old.runtime.drain()
        fresh = front_end.start(submit(100, 50))
        old.runtime.hand_over()
        old.runtime.flush()
        async with asyncio.timeout(20):
            await asyncio.gather(*[task for _, task in [*started, fresh]])
        assert all(reader.tokens == expected(number, 400) for number, (reader, _) in enumerate(started))
        assert fresh[0].tokens == expected(100, 50)
        assert set(front_end.dispatcher.migrations) <= {"draining"}
        assert old.simulator.stats().running == 0


async def test_a_stalled_worker_is_given_up(tmp_path: Path) -> None:
    async with MuteWorker(tmp_path, "mute") as mute, FrontEnd([mute], stall_seconds=0.2) as front_end:
        reader, task = front_end.start(submit(1, 50))
        await until(lambda: len(mute.submits) == 1)
        async with Worker(tmp_path, "sound") as sound:
            front_end.pool.discovered([sound.address])
            async with asyncio.timeout(10):
                await task
        assert reader.tokens == expected(1, 50)
        assert front_end.pool.stalls >= 1


async def test_a_worker_in_a_long_step_is_busy_not_stalled(tmp_path: Path) -> None:
    """The step that computes the prompt takes three times as long as a worker may be silent."""
    async with Worker(tmp_path, "slow", prefill_rate=10.0) as slow, FrontEnd([slow], stall_seconds=2.0) as front_end:
        reader, task = front_end.start(submit(1, 5, prompt=60))
        link = front_end.pool.members[0].link
        async with asyncio.timeout(30):
            await task
        assert reader.tokens == expected(1, 5)
        assert (front_end.pool.stalls, front_end.dispatcher.migrations) == (0, {})
        assert link.frames >= 4, "it has sent frames without tokens"


class StuckWorker(Worker):
    """The embedded engine, in a step that never ends."""

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.is_freed = threading.Event()
        self.runtime = WorkerRuntime(EmbeddedBackend(make_model(), self._make_engine, lambda: None))
        self.server = WorkerServer(self.runtime, name, self.address, SECRET)

    def _make_engine(self) -> Engine:
        engine = make_engine()
        whole_step = engine.step

        def step() -> list[Segment]:
            if engine.has_work:
                self.is_freed.wait(30)
            return whole_step()

        engine.step = step  # type: ignore[method-assign]
        return engine


async def test_an_engine_that_is_stuck_in_a_step_is_given_up(tmp_path: Path) -> None:
    async with StuckWorker(tmp_path, "stuck") as stuck, FrontEnd([stuck], stall_seconds=2.0) as front_end:
        reader, task = front_end.start(submit(1, 50))
        await until(lambda: front_end.pool.stalls == 1)
        async with Worker(tmp_path, "sound") as sound:
            front_end.pool.discovered([sound.address])
            async with asyncio.timeout(10):
                await task
        stuck.is_freed.set()
        assert reader.tokens == expected(1, 50)


async def test_a_worker_that_owes_nothing_may_be_silent(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker]) as front_end:
        _, task = front_end.start(submit(1, 5))
        await task
        link = front_end.pool.members[0].link
        for _ in range(100):
            link.tick()
        assert link.silent_ticks == 0


class SickSimulator(Simulator):
    """Fails every generation with a retryable fault, as long as it is sick."""

    is_sick = True

    def submit(self, request: Submit) -> None:
        if not self.is_sick:
            super().submit(request)
            return
        self._refused.append(Segment(request.id, None, Fault("engine_failed", "sick", retryable=True)))
        self._asked.set()


class SickWorker(Worker):
    simulator: SickSimulator

    def __init__(self, folder: Path, name: str) -> None:
        super().__init__(folder, name)
        self.simulator = SickSimulator(SimulatorConfig(step_ms=1.0), make_model(), Vocabulary(WORDS, 1))
        self.runtime = WorkerRuntime(self.simulator)
        self.server = WorkerServer(self.runtime, name, self.address, SECRET)


async def test_a_failing_worker_fails_no_generation_while_there_is_another(tmp_path: Path) -> None:
    """It has the least load and the expected prefixes, because it fails everything at once. Still it is not asked again."""
    async with SickWorker(tmp_path, "a") as sick, Worker(tmp_path, "b") as sound, FrontEnd([sick, sound]) as front_end:
        started = [front_end.start(submit(number, 20, prompt=320)) for number in range(40)]
        async with asyncio.timeout(20):
            await asyncio.gather(*[task for _, task in started])
        assert [reader.tokens for reader, _ in started] == [expected(number, 20) for number in range(40)]
        assert front_end.dispatcher.migrations["engine_failed"] >= 10, "many of them came to it first"
        session = Hints(session=SessionWish("agent", "open"))
        for number in range(40, 45):
            turn, reader = await front_end.run(submit(number), session)
            assert (turn.worker, reader.tokens) == ("b", expected(number, 16))
        assert all(front_end.router.load_of(name) == 0 for name in "ab"), "what has ended weighs nothing"


@asynccontextmanager
async def one_waits_for_a_full_worker(folder: Path) -> AsyncIterator[tuple[FrontEnd, list[Reader], SickWorker]]:
    """One generation fills a worker that does not go on. Another one was failed by the second worker, which is sound and idle now, so it
    waits for the first."""
    workers = MuteWorker(folder, "full"), SickWorker(folder, "idle")
    async with workers[0] as full, workers[1] as idle, FrontEnd([*workers], worker_queue=1, stall_seconds=300.0) as front_end:
        started = [front_end.start(submit(number)) for number in (1, 2)]
        await until(lambda: front_end.dispatcher.queued == 1)
        assert (len(full.submits), front_end.dispatcher.migrations) == (1, {"engine_failed": 1})
        idle.simulator.is_sick = False
        yield front_end, [reader for reader, _ in started], idle
        for _, task in started:
            task.cancel()
        await asyncio.gather(*[task for _, task in started], return_exceptions=True)


async def test_new_generations_do_not_wait_for_one_that_has_no_place_to_go(tmp_path: Path) -> None:
    """They come when the idle worker has nothing to say, so no frame of a worker has them sent."""
    async with one_waits_for_a_full_worker(tmp_path) as (front_end, _, _):
        for number in (3, 4):
            assert (await front_end.run(submit(number)))[1].tokens == expected(number, 16)
            assert front_end.dispatcher.queued == 1


async def test_a_generation_goes_back_to_a_worker_that_failed_it_if_all_others_are_silent(tmp_path: Path) -> None:
    async with one_waits_for_a_full_worker(tmp_path) as (front_end, readers, _):
        silence(front_end, "full")
        await until(lambda: any(reader.mailbox.done.done() for reader in readers))
        assert sorted(reader.tokens for reader in readers) in ([(), expected(number, 16)] for number in (1, 2))


async def test_no_generation_fails_while_a_worker_that_has_not_failed_it_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That worker may be in a long step."""
    monkeypatch.setattr(dispatch, "PAUSE_SECONDS", 0.001)
    async with one_waits_for_a_full_worker(tmp_path) as (front_end, readers, sick):
        sick.simulator.is_sick = True
        silence(front_end, "full")
        failures = 1 + 2 * dispatch.MAX_FRUITLESS_MIGRATIONS
        await until(
            lambda: front_end.dispatcher.migrations["engine_failed"] > failures or any(each.mailbox.done.done() for each in readers)
        )
        sick.simulator.is_sick = False
        await until(lambda: any(reader.mailbox.done.done() for reader in readers))
        assert sorted(reader.tokens for reader in readers) in ([(), expected(number, 16)] for number in (1, 2))


def silence(front_end: FrontEnd, name: str) -> None:
    member = front_end.pool.find(name)
    assert member is not None
    for _ in range(QUIET_LOOKS):
        member.link.tick()


async def test_a_silent_worker_gets_no_new_generation(tmp_path: Path) -> None:
    async with MuteWorker(tmp_path, "mute") as mute, FrontEnd([mute], stall_seconds=4.0) as front_end:
        _, stuck = front_end.start(submit(1))
        await until(lambda: front_end.pool.members[0].is_quiet)
        _, waiting = front_end.start(submit(2))
        assert front_end.dispatcher.queued == 1
        async with Worker(tmp_path, "sound") as sound:
            front_end.pool.discovered([sound.address])
            async with asyncio.timeout(2):
                await waiting
        assert len(mute.submits) == 1
        assert front_end.pool.stalls == 0
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)


async def test_prefill_counts_as_load_until_the_first_token(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", step_ms=5.0) as one, Worker(tmp_path, "b", step_ms=5.0) as two, FrontEnd([one, two]) as front_end:
        reader, task = front_end.start(submit(1, 300, prompt=640))
        assert sum(front_end.router.load_of(name) for name in "ab") == 80, "forty blocks to prefill, and as many to hold"
        await until(lambda: len(reader.tokens) > 2)
        assert 40 <= sum(front_end.router.load_of(name) for name in "ab") < 45
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: one.simulator.stats().running + two.simulator.stats().running == 0)
        await until(lambda: sum(front_end.router.load_of(name) for name in "ab") == 0)


async def test_missed_events_are_replaced_by_a_snapshot(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as one, Worker(tmp_path, "b") as two, FrontEnd([one, two]) as front_end:
        for worker in (one, two):
            for port in worker.runtime.ports:
                port.events.max_blocks = 10
        for number in range(6):
            await front_end.run(submit(number, 2, prompt=320))
        for worker in (one, two):
            held = partial(front_end.router.index.held, worker.name)
            await until(lambda: held()[0] == worker.simulator.stats().kv_blocks_cached > 0)  # noqa: B023


async def test_a_request_that_kills_every_worker_ends_with_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "HOLD_SECONDS", 0.2)
    deadly = MuteWorker(tmp_path, "deadly", breaks=True)
    deadly.answers = True
    async with deadly, FrontEnd([deadly]) as front_end:
        _, task = front_end.start(submit(1, 50))
        with pytest.raises(GenerationFault) as caught:
            async with asyncio.timeout(10):
                await task
        assert fault_of(caught).code == "kills_workers"
        assert not fault_of(caught).retryable
        assert len(deadly.submits) == 2, "the first time, and once more, alone"
        assert len({request.id for request in deadly.submits}) == 2


async def test_without_a_worker_a_generation_waits_and_then_fails(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "a")
    async with worker, FrontEnd([worker], worker_wait=0.3) as front_end:
        reader, task = front_end.start(submit(1, 100_000 // 2))
        await until(lambda: len(reader.tokens) > 10)
        await worker.server.close()
        with pytest.raises(GenerationFault) as caught:
            async with asyncio.timeout(10):
                await task
        assert fault_of(caught) == Fault("no_worker", "no worker for model 'simulator' came within 0.3 s")


async def test_a_worker_that_comes_in_time_continues_the_generation(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker]) as front_end:
        reader, task = front_end.start(submit(1, 300))
        await until(lambda: len(reader.tokens) > 10)
        await worker.server.close()
        await until(lambda: front_end.dispatcher.queued == 1)
        async with Worker(tmp_path, "a"), asyncio.timeout(20):
            await task
        assert reader.tokens == expected(1, 300)


async def test_a_generation_that_changes_its_worker_keeps_its_root(tmp_path: Path) -> None:
    """What the second worker caches is found under the same root, and under no other."""
    root = tenant_root("alice")
    async with Worker(tmp_path, "a") as first, Worker(tmp_path, "b") as second, FrontEnd([first, second]) as front_end:
        reader, task = front_end.start(submit(1, 300, root=root))
        await until(lambda: len(reader.tokens) > 10)
        begun, other = (first, second) if first.simulator.stats().running else (second, first)
        await begun.server.close()
        async with asyncio.timeout(20):
            await task
        assert reader.tokens == expected(1, 300)
        snapshot = await other.simulator.snapshot()
        assert snapshot is not None
        cached = {name for event in snapshot.events if isinstance(event, BlocksStored) for name in event.blocks}
        whole = (*submit(1).token_ids, *reader.tokens)
        assert set(block_hashes(whole[:-1], 16, root)) == cached


async def test_each_model_has_its_own_workers(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(Worker(tmp_path, "a", make_model("one")))
        two = await stack.enter_async_context(Worker(tmp_path, "b", make_model("two")))
        front_end = await stack.enter_async_context(FrontEnd([one, two]))
        started = [front_end.start(submit(number, 3000), model="two") for number in range(4)]
        await until(lambda: two.simulator.stats().running == 4)
        assert one.simulator.stats().running == 0
        for _, task in started:
            task.cancel()


async def test_a_worker_with_another_model_of_the_same_name_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(Worker(tmp_path, "a"))
        front_end = await stack.enter_async_context(FrontEnd([one]))
        twin = await stack.enter_async_context(Worker(tmp_path, "b", make_model(max_batch=7)))
        other = await stack.enter_async_context(Worker(tmp_path, "c", ModelInfo("simulator", "simulator", "words", 1842, 50_000, 16)))
        reader = await stack.enter_async_context(Worker(tmp_path, "d", make_model(images=make_rules())))
        front_end.pool.discovered([twin.address, other.address, reader.address])
        await until(lambda: "c cannot be used" in caplog.text and "d cannot be used" in caplog.text)
        assert "'images': ImageRules(family='simulator'" in caplog.text
        assert "its model 'simulator' differs from the one that" in caplog.text
        await until(lambda: len(front_end.pool.members) == 2)
        assert {member.name for member in front_end.pool.members} == {"a", "b"}


async def test_a_second_worker_of_the_same_name_waits_until_the_first_has_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    async with Worker(tmp_path, "a") as first, Worker(elsewhere, "a") as second, FrontEnd([first]) as front_end:
        front_end.pool.discovered([second.address])
        await until(lambda: "there is a worker named 'a' already; give each its own --name" in caplog.text)
        (before,) = front_end.pool.members
        await first.server.close()
        await until(lambda: front_end.pool.members not in ([], [before]))
        _, reader = await front_end.run(submit(1))
        assert reader.tokens == expected(1, 16)
        assert second.simulator.stats().prompt_tokens == 40


async def test_generations_without_room_wait_in_order_of_priority(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", make_model(max_batch=1), max_batch=1) as worker, FrontEnd([worker], worker_queue=1) as front_end:
        first, running = front_end.start(submit(1, 200))
        await until(lambda: len(first.tokens) > 0)
        _, at_worker = front_end.start(submit(2, 2))
        order: list[int] = []
        tasks = []
        for number, priority in ((3, 0), (4, -1), (5, 2), (6, 2), (7, 0)):
            _, task = front_end.start(submit(number, 2, priority=priority))
            task.add_done_callback(partial(_note, order, number))
            tasks.append(task)
        assert front_end.dispatcher.queued == 5
        async with asyncio.timeout(20):
            await asyncio.gather(running, at_worker, *tasks)
        assert order == [5, 6, 3, 7, 4]


def _note(order: list[int], number: int, _: object) -> None:
    order.append(number)


async def test_a_request_whose_client_left_is_never_sent(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a", make_model(max_batch=1), max_batch=1) as worker, FrontEnd([worker], worker_queue=1) as front_end:
        first, running = front_end.start(submit(1, 100))
        await until(lambda: len(first.tokens) > 0)
        _, at_worker = front_end.start(submit(2, 2))
        _, left = front_end.start(submit(3, 2))
        _, stays = front_end.start(submit(4, 2))
        await asyncio.sleep(0)
        assert front_end.dispatcher.queued == 2
        left.cancel()
        await asyncio.gather(running, at_worker, stays)
        assert left.cancelled()
        assert front_end.dispatcher.queued == 0
        assert worker.simulator.stats().prompt_tokens == 3 * 40, "three prompts were computed, and not the fourth"


async def test_a_client_that_leaves_stops_its_generation_on_the_worker(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker]) as front_end:
        reader, task = front_end.start(submit(1, 90_000))
        await until(lambda: len(reader.tokens) > 0)
        await leave(task)
        await until(lambda: worker.simulator.stats().running == 0)


async def test_a_generation_whose_client_left_weighs_nothing_and_is_not_sent_again(tmp_path: Path) -> None:
    """Its worker says nothing more, and is lost with it."""
    async with MuteWorker(tmp_path, "mute") as mute, FrontEnd([mute]) as front_end:
        _, task = front_end.start(submit(1))
        await until(lambda: len(mute.submits) == 1)
        await leave(task)
        assert front_end.router.load_of("mute") == 0
        mute.links[0].abort()
        await until(lambda: len(mute.links) == 2 and front_end.pool.find("mute") is not None)
        _, next_one = front_end.start(submit(2))
        await until(lambda: len(mute.submits) == 2)
        assert [request.id for request in mute.submits] == [submit(1).id, submit(2).id]
        assert not front_end.dispatcher.migrations
        await leave(next_one)


async def test_a_client_that_leaves_after_its_worker_was_lost(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker]) as front_end:
        reader, task = front_end.start(submit(1, 50_000))
        await until(lambda: len(reader.tokens) > 0)
        await worker.server.close()
        await until(lambda: front_end.dispatcher.queued == 1)
        await leave(task)
        assert front_end.dispatcher.queued == 0


async def test_a_client_that_leaves_in_the_pause_before_an_attempt(tmp_path: Path) -> None:
    async with SickWorker(tmp_path, "sick") as sick, FrontEnd([sick]) as front_end:
        _, task = front_end.start(submit(1))
        await until(lambda: front_end.dispatcher.migrations.total() == 1)
        await leave(task)
        _, other = front_end.start(submit(2))
        with pytest.raises(GenerationFault, match="4 attempts in a row"):
            await other
        assert front_end.dispatcher.migrations.total() == 1 + 3, "the other one has had all its pauses meanwhile"


class Confused(Turn):
    """Can say only once where it wants to go."""

    @property
    def preference(self) -> tuple[str | None, Preference]:
        if self.decisions:
            raise ZeroDivisionError
        return super().preference


async def test_an_error_of_ours_in_the_queue_ends_its_generation_and_no_link(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker]) as front_end:
        reader, confused = front_end.start(submit(1, 50_000), Confused(front_end.sessions, "somebody", Hints()))
        await until(lambda: len(reader.tokens) > 10)
        await worker.server.close()
        await until(lambda: front_end.dispatcher.queued == 1)
        async with Worker(tmp_path, "a"):
            with pytest.raises(GenerationFault, match="ZeroDivisionError while generating"):
                async with asyncio.timeout(10):
                    await confused
            assert (await front_end.run(submit(2)))[1].tokens == expected(2, 16)


async def test_an_error_of_ours_after_a_pause_ends_its_generation(tmp_path: Path) -> None:
    async with SickWorker(tmp_path, "sick") as sick, FrontEnd([sick]) as front_end:
        _, confused = front_end.start(submit(1), Confused(front_end.sessions, "somebody", Hints()))
        with pytest.raises(GenerationFault, match="ZeroDivisionError while generating"):
            async with asyncio.timeout(10):
                await confused


async def leave(task: asyncio.Task[None]) -> None:
    """The client of this generation leaves."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_request_that_no_frame_holds_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent at once or from the queue: the link and what waits behind it go on, and it counts as nobody's load."""
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 4000)
    async with Worker(tmp_path, "a", make_model(max_batch=1), max_batch=1) as worker, FrontEnd([worker], worker_queue=1) as front_end:
        _, at_once = front_end.start(submit(1, 2, prompt=5000))
        _, running = front_end.start(submit(2, 100))
        _, too_large = front_end.start(submit(3, 2, prompt=5000))
        _, behind = front_end.start(submit(4, 2))
        assert front_end.dispatcher.queued == 2
        async with asyncio.timeout(20):
            await asyncio.gather(running, behind)
            for task in (at_once, too_large):
                with pytest.raises(GenerationFault) as caught:
                    await task
                assert fault_of(caught).code == "FrameTooLarge"
        assert front_end.pool.links_lost == 0
        assert front_end.router.load_of("a") == 0


async def test_a_full_queue_refuses_with_the_reason(tmp_path: Path) -> None:
    worker = Worker(tmp_path, "a", make_model(max_batch=1), max_batch=1)
    async with worker, FrontEnd([worker], worker_queue=1, max_queued=2) as front_end:
        tasks = [front_end.start(submit(number, 5000))[1] for number in range(3)]
        with pytest.raises(GenerationFault) as caught:
            front_end.start(submit(9))
        assert fault_of(caught).code == "queue_full"
        assert fault_of(caught).message == "the queue is full: at most 2 generations wait for a worker (--max-queued)"
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_prompts_go_where_their_prefix_is(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(4)]
        front_end = await stack.enter_async_context(FrontEnd(workers))
        for number in range(8):
            await front_end.run(submit(number, 4, prompt=320))
        assert len([worker for worker in workers if worker.simulator.stats().kv_blocks_cached]) == 4, "different prompts spread"
        before = [worker.simulator.stats().prompt_tokens_cached for worker in workers]
        for number in range(8):
            turn, _ = await front_end.run(submit(number, 4, prompt=320))
            assert turn.decisions[0][1].reason == "prefix"
            assert turn.cached_tokens >= 304
        after = [worker.simulator.stats().prompt_tokens_cached for worker in workers]
        assert sum(after) - sum(before) >= 8 * 304


async def test_a_second_front_end_learns_what_is_cached_from_a_snapshot(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(2)]
        first = await stack.enter_async_context(FrontEnd(workers))
        placed = {}
        for number in range(6):
            turn, _ = await first.run(submit(number, 4, prompt=320))
            placed[number] = turn.worker
        second = await stack.enter_async_context(FrontEnd(workers, name="second"))
        held = [worker.simulator.stats().kv_blocks_cached for worker in workers]
        await until(lambda: [second.router.index.held(worker.name)[0] for worker in workers] == held)
        for number in range(6):
            turn, _ = await second.run(submit(number, 4, prompt=320))
            assert turn.worker == placed[number]


async def test_requests_with_the_same_new_prefix_go_to_one_worker(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}", step_ms=5.0)) for number in range(4)]
        front_end = await stack.enter_async_context(FrontEnd(workers))
        prefix = submit(1, prompt=640).token_ids
        requests = [submit(number, 20) for number in range(10, 60)]
        turns = [front_end.turn() for _ in requests]
        tasks = [
            front_end.start(Submit(request.id, prefix + request.token_ids, 20, seed=request.seed), turn)[1]
            for request, turn in zip(requests, turns, strict=True)
        ]
        await asyncio.gather(*tasks)
        assert len({turn.worker for turn in turns}) == 1


async def test_the_router_can_be_overridden_for_one_request(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(tmp_path, f"worker-{number}")) for number in range(2)]
        front_end = await stack.enter_async_context(FrontEnd(workers, router=RouterSettings(policy="kv")))
        seen = [(await front_end.run(submit(1, 2, prompt=320), Hints(router="round-robin")))[0] for _ in range(4)]
        assert len({turn.worker for turn in seen}) == 2
        assert {turn.decisions[0][1].reason for turn in seen} == {"round_robin"}


async def test_a_draining_worker_gets_no_new_generation(tmp_path: Path) -> None:
    async with Worker(tmp_path, "a") as old, Worker(tmp_path, "b") as new, FrontEnd([old, new]) as front_end:
        old.runtime.drain()
        await until(lambda: len(front_end.pool.usable("simulator")) == 1)
        for number in range(5):
            turn, _ = await front_end.run(submit(number, 2))
            assert turn.worker == "b"


async def test_tenants_of_several_front_ends_take_turns_in_a_worker(tmp_path: Path) -> None:
    """The flood is in the worker, sent ahead by another front end: nobody but the worker can be fair."""
    ended: list[str] = []

    async def run(front_end: FrontEnd, number: int, lane: str) -> None:
        _, task = front_end.start(submit(number, 8, lane=lane))
        await task
        ended.append(lane)

    async with Worker(tmp_path, "w", max_batch=1) as worker, FrontEnd([worker], name="one") as one, FrontEnd([worker], name="two") as two:
        async with asyncio.timeout(30):
            flood = [asyncio.create_task(run(one, number, "a")) for number in range(60)]
            await until(lambda: worker.simulator.stats().queued >= 50)
            others = [asyncio.create_task(run(two, number, "b")) for number in range(1000, 1005)]
            await until(lambda: worker.simulator.stats().queued + len(ended) >= 60 + 4)
            before = len(ended)
            await asyncio.gather(*others)
            served = ended[before:]
            await asyncio.gather(*flood)
    assert len(served) <= 5 + 5 + 2, "one of the flood for each of the others, and those that ended in the same step"


async def test_a_tenant_gets_places_though_another_fills_the_batch_and_the_worker_s_queue(tmp_path: Path) -> None:
    """Its generations must reach the worker: nobody but the worker can take a place back."""
    model = make_model(max_batch=8)
    async with Worker(tmp_path, "w", model, max_batch=8) as worker, FrontEnd([worker], worker_queue=1) as front_end:
        flood = [front_end.start(submit(number, 50_000, lane="a"))[1] for number in range(30)]
        await until(lambda: worker.simulator.stats().running == 8 and front_end.dispatcher.queued == 21)
        others = [front_end.start(submit(number, 4, lane=lane))[1] for number, lane in enumerate("bbbcb", 100)]
        async with asyncio.timeout(20):
            await asyncio.gather(*others)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)


async def test_a_tenant_sends_one_generation_ahead_to_a_worker_without_room(tmp_path: Path) -> None:
    async with MuteWorker(tmp_path, "w") as worker, FrontEnd([worker], worker_queue=2) as front_end:
        tasks = [front_end.start(submit(number, 4, lane=lane))[1] for number, lane in enumerate("aaaabbbb")]
        await until(lambda: len(worker.submits) == 3)
        assert [request.lane for request in worker.submits] == ["a", "a", "b"]
        assert front_end.dispatcher.queued == 5
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
