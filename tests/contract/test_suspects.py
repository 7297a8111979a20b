"""A request that kills its workers is stopped after the second. Those that were with it go on, and so do those that were only unlucky."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from penstock.backends.simulator import Simulator, Vocabulary
from penstock.cluster import suspects
from penstock.cluster.links.worker_server import WorkerServer
from penstock.config.engines import SimulatorConfig
from penstock.wire.address import UnixAddress
from penstock.wire.errors import GenerationFault
from penstock.worker.runtime import WorkerRuntime
from proxy import Proxy
from workers import SECRET, WORDS, FrontEnd, Reader, Worker, expected, fault_of, make_model, submit, until

POISON = 777
TOKENS = 300

Started = tuple[Reader, asyncio.Task[None]]


class Mortal(Simulator):
    """Dies of a poisoned request as its process would: all links break, and nothing is left."""

    worker: MortalWorker

    def die(self) -> None:
        self.worker.deaths += 1
        self.worker.break_links()


class AtPosition(Mortal):
    """Dies when it makes the token at a certain place, on whatever worker that is."""

    position = 30

    def check_fatal(self) -> None:
        if any(each.request.seed == POISON and each.position >= self.position for each in self._scheduler.decoding.values()):
            self.die()


class MortalWorker(Worker):
    def __init__(self, folder: Path, name: str, kind: type[Mortal] = Mortal, **config: Any) -> None:
        super().__init__(folder, name)
        self.deaths = 0
        simulator = kind(SimulatorConfig(**{"step_ms": 1.0, "fatal_seed": POISON, **config}), make_model(), Vocabulary(WORDS, 1))
        simulator.worker = self
        self.simulator = simulator
        self.runtime = WorkerRuntime(simulator)
        self.server = WorkerServer(self.runtime, name, self.address, SECRET)


@asynccontextmanager
async def cluster(folder: Path, count: int = 4, trial_seconds: float = 60.0, **config: Any) -> AsyncIterator[tuple[FrontEnd, list[Any]]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(MortalWorker(folder, f"worker-{number}", **config)) for number in range(count)]
        yield await stack.enter_async_context(FrontEnd(list(workers), trial_seconds=trial_seconds)), workers


@pytest.fixture(autouse=True)
def short_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "HOLD_SECONDS", 0.5)


async def finish(bystanders: list[Started]) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*[task for _, task in bystanders])
    assert [reader.tokens for reader, _ in bystanders] == [expected(number, TOKENS) for number in range(len(bystanders))]


async def stopped(poison: Started) -> str:
    with pytest.raises(GenerationFault) as caught:
        async with asyncio.timeout(30):
            await poison[1]
    assert fault_of(caught).code == "kills_workers"
    assert not fault_of(caught).retryable
    return fault_of(caught).message


@pytest.mark.parametrize(
    "config", [{"fatal_tokens": 0}, {"fatal_tokens": 1}, {"fatal_tokens": 5}, {"fatal_tokens": 25}, {"kind": AtPosition}], ids=str
)
async def test_two_workers_die_for_one_request_among_a_hundred(tmp_path: Path, config: dict[str, Any]) -> None:
    """All begin at once, so nothing but the trial tells the guilty from the others."""
    async with cluster(tmp_path, **config) as (front_end, workers):
        bystanders = [front_end.start(submit(number, TOKENS)) for number in range(50)]
        poison = front_end.start(submit(POISON, TOKENS))
        bystanders += [front_end.start(submit(number, TOKENS)) for number in range(50, 100)]
        message = await stopped(poison)
        await finish(bystanders)
        assert sum(worker.deaths for worker in workers) == 2
        assert "2 workers died while they ran this request" in message
        assert front_end.dispatcher.suspects.stopped == 1
        assert len(front_end.dispatcher.suspects) == 0


async def test_the_choices_of_one_request_count_together(tmp_path: Path) -> None:
    """Four choices, one after the other in the same trial queue: the second death ends them all."""
    async with cluster(tmp_path, 1, fatal_tokens=3) as (front_end, workers):
        turn = front_end.turn()
        requests = [structs.replace(submit(POISON, TOKENS), id=bytes([number]) * 16) for number in range(4)]
        started = [front_end.start(request, turn) for request in requests]
        async with asyncio.timeout(30):
            await asyncio.wait([task for _, task in started], return_when=asyncio.FIRST_COMPLETED)
        for _, task in started:
            task.cancel()
        await asyncio.gather(*[task for _, task in started], return_exceptions=True)
        assert workers[0].deaths == 2


async def test_two_requests_that_kill_are_both_stopped(tmp_path: Path) -> None:
    async with cluster(tmp_path, fatal_tokens=1) as (front_end, workers):
        bystanders = [front_end.start(submit(number, TOKENS)) for number in range(40)]
        first = front_end.start(submit(POISON, TOKENS))
        await stopped(first)
        second = front_end.start(structs.replace(submit(POISON, TOKENS), id=b"2" * 16))
        await stopped(second)
        await finish(bystanders)
        assert sum(worker.deaths for worker in workers) == 4


@pytest.mark.parametrize("tokens", [0, 3, 50])
async def test_several_that_kill_at_once_are_all_stopped(tmp_path: Path, tokens: int) -> None:
    """Each has workers die without it, for the others' sake. That frees none of them for ever."""
    async with cluster(tmp_path, fatal_tokens=tokens, step_ms=2.0) as (front_end, workers):
        bystanders = [front_end.start(submit(number, TOKENS)) for number in range(20)]
        poisons = [front_end.start(structs.replace(submit(POISON, 20_000), id=bytes([number]) * 16)) for number in range(1, 4)]
        for poison in poisons:
            await stopped(poison)
        await finish(bystanders)
        assert sum(worker.deaths for worker in workers) <= 10 * len(poisons), "some die of two at once, which accuses neither"
        assert front_end.dispatcher.suspects.stopped == 3


@pytest.mark.parametrize("tokens", [0, 3, 25])
async def test_a_request_of_another_front_end_convicts_hardly_anybody_here(tmp_path: Path, tokens: int) -> None:
    """Each front end tries its own suspects, on the same workers, and knows nothing of the others' trials. The guilty one costs a worker
    or two more; of fifty others, one may have been on trial wherever it struck."""
    async with AsyncExitStack() as stack:
        config: dict[str, Any] = {"fatal_tokens": tokens, "step_ms": 5.0}
        workers = [await stack.enter_async_context(MortalWorker(tmp_path, f"worker-{number}", **config)) for number in range(4)]
        made = [FrontEnd([*workers], name=f"{number}", trial_seconds=60.0) for number in range(3)]
        first, *others = [await stack.enter_async_context(front_end) for front_end in made]
        requests = [structs.replace(submit(number, TOKENS), id=bytes([number]) * 16) for number in range(1, 51)]
        bystanders = [others[number % 2].start(request) for number, request in enumerate(requests)]
        await until(lambda: min(len(reader.tokens) for reader, _ in bystanders) > 20)
        await stopped(first.start(submit(POISON, TOKENS)))
        async with asyncio.timeout(60):
            ends = await asyncio.gather(*[task for _, task in bystanders], return_exceptions=True)
        wrong = [end for end in ends if isinstance(end, BaseException)]
        assert all(isinstance(error, GenerationFault) and error.fault.code == "kills_workers" for error in wrong), wrong
        assert len(wrong) <= 1
        for number, ((reader, _), end) in enumerate(zip(bystanders, ends, strict=True), 1):
            if not isinstance(end, BaseException):
                assert reader.tokens == expected(number, TOKENS)
        assert sum(worker.deaths for worker in workers) <= 5


async def behind_proxies(stack: AsyncExitStack, workers: list[MortalWorker]) -> list[Proxy]:
    proxies = [Proxy(worker.address.path, f"{worker.address.path}.proxy") for worker in workers]
    for worker, proxy in zip(workers, proxies, strict=True):
        await stack.enter_async_context(worker)
        await stack.enter_async_context(proxy)
        worker.address = UnixAddress(proxy.path)
    return proxies


async def test_a_worker_that_was_dead_before_accuses_nobody(tmp_path: Path) -> None:
    """Two workers lose their host. The second is idle, so its death is noticed later: after the trial was sent there."""
    async with AsyncExitStack() as stack:
        workers = [MortalWorker(tmp_path, name) for name in "abc"]
        proxies = await behind_proxies(stack, workers)
        front_end = await stack.enter_async_context(FrontEnd([*workers[:1]], trial_seconds=60.0))
        reader, task = front_end.start(submit(0, 3000))
        await until(lambda: len(reader.tokens) > 0)
        front_end.pool.discovered([workers[1].address])
        await until(lambda: len(front_end.pool.members) == 2)
        proxies[1].delay = 60.0
        sent = proxies[1].bytes_forward
        await proxies[0].__aexit__()
        await until(lambda: proxies[1].bytes_forward > sent + 40)
        front_end.pool.discovered([workers[2].address])
        await proxies[1].__aexit__()
        async with asyncio.timeout(20):
            await task
        assert reader.tokens == expected(0, 3000)
        assert front_end.dispatcher.suspects.deaths == 2
        assert front_end.dispatcher.suspects.stopped == 0


async def test_a_trial_ends_with_the_link_of_a_worker_that_leaves(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2, step_ms=20.0) as (front_end, workers):
        reader, task = front_end.start(submit(0, TOKENS))
        await until(lambda: len(reader.tokens) > 8)
        first = busy(workers)
        links = [member.link for member in front_end.pool.members]
        first.break_links()
        await until(lambda: not all(front_end.dispatcher.suspects.is_free(link) for link in links))
        second = next(worker for worker in workers if worker is not first)
        await second.server.close()
        await finish([(reader, task)])
        assert all(front_end.dispatcher.suspects.is_free(link) for link in links)


async def test_workers_that_die_without_it_free_the_accused(tmp_path: Path) -> None:
    """An operator kills the worker that tries it, and then another one: that was not the request."""
    async with cluster(tmp_path, 3, step_ms=40.0) as (front_end, workers):
        alone = front_end.start(submit(0, 50_000))
        killed: list[Any] = []
        for round_number in range(2):
            await until(lambda: busy(workers) is not None)
            killed.append(busy(workers))
            killed[-1].break_links()
            await until(lambda: front_end.dispatcher.migrations.total() == round_number + 1)  # noqa: B023
        await asyncio.sleep(0)
        assert busy(workers) is None, "it is held"
        next(worker for worker in workers if worker not in killed).break_links()
        before = len(alone[0].tokens)
        await until(lambda: len(alone[0].tokens) > before + 10)
        assert front_end.dispatcher.suspects.deaths == 3
        assert front_end.dispatcher.suspects.stopped == 0
        alone[1].cancel()
        await asyncio.gather(alone[1], return_exceptions=True)


def busy(workers: list[Any]) -> Any:
    """A worker that runs something."""
    return next((worker for worker in workers if worker.simulator.stats().running), None)


async def test_clients_that_leave_while_they_wait_or_are_held(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as (front_end, workers):
        started = [front_end.start(submit(number, 50_000)) for number in range(20)]
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 0)
        workers[0].break_links()
        await until(lambda: len(front_end.dispatcher.suspects) > 5)
        for _, task in started:
            task.cancel()
        await asyncio.gather(*[task for _, task in started], return_exceptions=True)
        assert len(front_end.dispatcher.suspects) == 0
        poison = front_end.start(submit(POISON, TOKENS))
        await until(lambda: workers[0].deaths == 2)
        poison[1].cancel()
        await asyncio.gather(poison[1], return_exceptions=True)
        assert front_end.dispatcher.queued == 0
        assert (await front_end.run(submit(3, 16)))[1].tokens == expected(3, 16)


async def test_after_the_time_for_trials_all_go_on_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1, trial_seconds=0.3) as (front_end, workers):
        bystanders = [front_end.start(submit(number, TOKENS)) for number in range(400)]
        await until(lambda: min(len(reader.tokens) for reader, _ in bystanders) > 40)
        workers[0].break_links()
        await finish(bystanders)
        assert front_end.dispatcher.suspects.stopped == 0


async def test_without_trials_nobody_waits(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2, trial_seconds=0.0) as (front_end, workers):
        bystanders = [front_end.start(submit(number, TOKENS)) for number in range(20)]
        await until(lambda: min(len(reader.tokens) for reader, _ in bystanders) > 10)
        workers[0].break_links()
        await until(lambda: front_end.dispatcher.migrations.total() > 0)
        assert len(front_end.dispatcher.suspects) == 0
        await finish(bystanders)


async def test_a_suspect_whose_workers_do_not_come_back_fails(tmp_path: Path) -> None:
    """Its socket is a proxy's, which ends without a word and does not come back."""
    async with MortalWorker(tmp_path, "a") as worker:
        proxy = Proxy(worker.address.path, tmp_path / "proxy")
        async with proxy:
            worker.address = UnixAddress(proxy.path)
            front_end = FrontEnd([worker], worker_wait=0.3, trial_seconds=60.0)
            await front_end.__aenter__()
            _, task = front_end.start(submit(1, 50_000))
            await until(lambda: worker.simulator.stats().running == 1)
        with pytest.raises(GenerationFault, match="no worker for model"):
            async with asyncio.timeout(10):
                await task
        await front_end.__aexit__()
