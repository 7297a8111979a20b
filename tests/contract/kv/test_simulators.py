"""Two simulators over the real transport: KV moves while it is computed, and whatever breaks, the tokens are right and nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.simulator import Simulator, Vocabulary, tokens_between
from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.puller import Patience
from penstock.cluster.kv.transport import SocketTransport
from penstock.config.engines import SimulatorConfig, TransferFaults
from penstock.stream.slot import merge
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.messages import BlocksStored, Delta, Export, Fetch, KvEvents, KvSource, Segment, Submit, Terminal, TransferReport
from workers import SECRET, WORDS, make_model

QUICK = Patience(look_seconds=0.02, silent_looks=10, retry_seconds=0.05)
PROMPT = tuple(tokens_between(77, 0, 2000, WORDS))
BLOCKS = len(PROMPT) // 16
TRANSFER = (1).to_bytes(16)
TOKENS = tuple(tokens_between(5, 0, 24, WORDS))
FAST: dict[str, Any] = {"step_ms": 1.0, "prefill_rate": 1e6, "kv_blocks": 4096}


class Worker:
    """A simulator with its transport. It takes what the simulator emits."""

    def __init__(self, address: Address, config: dict[str, Any], faults: Faults | None = None) -> None:
        self.failures = 0
        self.simulator = Simulator(SimulatorConfig(**config), make_model(), Vocabulary(WORDS, 1), on_failure=self._fail)
        self.transport = SocketTransport(self.simulator.kv, Credentials("worker", SECRET), address, patience=QUICK, faults=faults)
        self.deltas: dict[bytes, list[Delta]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self.reports: dict[bytes, TransferReport] = {}
        self.stored = 0

    def _fail(self) -> None:
        self.failures += 1

    def __call__(self, segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = (), /) -> None:
        if events is not None:
            self.stored += sum(len(event.blocks) for event in events.events if isinstance(event, BlocksStored))
        for segment in segments:
            if segment.delta is not None:
                self.deltas.setdefault(segment.id, []).append(segment.delta)
            if segment.terminal is not None:
                self.terminals[segment.id] = segment.terminal
        for report in transfers:
            assert report.id not in self.reports
            self.reports[report.id] = report

    @property
    def is_clean(self) -> bool:
        stats = self.simulator.stats()
        return not (stats.running or stats.queued or stats.exports or stats.imports or stats.kv_blocks_used)

    def tokens(self, number: int) -> tuple[int, ...]:
        return merge(self.deltas[number.to_bytes(16)]).token_ids

    def cached(self, number: int) -> int:
        report = self.deltas[number.to_bytes(16)][0].prompt
        assert report is not None
        return report.cached_tokens

    async def ended(self, number: int) -> None:
        await until(lambda: number.to_bytes(16) in self.terminals)

    async def reported(self) -> TransferReport:
        await until(lambda: TRANSFER in self.reports)
        return self.reports[TRANSFER]

    async def break_off(self) -> None:
        await asyncio.to_thread(self.transport.close)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


@asynccontextmanager
async def pair(
    folder: Path, kind: str = "unix", faults: Faults | None = None, slow: bool = False, **config: Any
) -> AsyncIterator[tuple[Worker, Worker]]:
    """The source, then the target. `slow`: the source takes 0.4 s for the prompt, in steps of 80 tokens. At the end both hold nothing."""
    places: list[Address] = [UnixAddress(str(folder / f"{name}.kv")) if kind == "unix" else TcpAddress("127.0.0.1", 0) for name in "ab"]
    pace = {"prefill_rate": 5000.0, "prefill_budget": 80} if slow else {}
    workers = Worker(places[0], {**FAST, **pace, **config}, faults), Worker(places[1], {**FAST, **config})
    async with contextlib.AsyncExitStack() as stack:
        for worker in workers:
            await worker.simulator.start(worker)
            stack.push_async_callback(worker.simulator.close)
            worker.transport.start()
            stack.push_async_callback(worker.break_off)
            worker.simulator.kv.connect(worker.transport)
        yield workers
        for worker in workers:
            worker.simulator.end_transfer(TRANSFER)
            await until(lambda: worker.is_clean)  # noqa: B023 - called at once
            worker.simulator.check_integrity()
            assert worker.failures == 0


def submit(number: int, prompt: Sequence[int] = PROMPT, max_tokens: int = 24, **fields: Any) -> Submit:
    return Submit(number.to_bytes(16), tuple(prompt), max_tokens, seed=5, ignore_eos=True, **fields)


def source_of(worker: Worker, *, waits: bool = False) -> KvSource:
    return KvSource(TRANSFER, str(worker.transport.address), waits)


def fetch_from(worker: Worker, *, waits: bool = False) -> Fetch:
    return Fetch(source_of(worker, waits=waits), PROMPT, 10.0)


async def compute(worker: Worker) -> None:
    """The source has the prompt's KV."""
    worker.simulator.submit(submit(1, max_tokens=1))
    await worker.ended(1)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_prompt_computed_on_one_worker_continues_on_another(tmp_path: Path, kind: str) -> None:
    async with pair(tmp_path, kind, slow=True) as (source, target):
        source.simulator.submit(submit(1, max_tokens=1, export=Export(TRANSFER, 10.0)))
        target.simulator.fetch(fetch_from(source, waits=True))
        await until(lambda: target.stored > 20)
        assert not source.terminals, "nothing came before the whole prompt was computed"
        await source.ended(1)
        target.simulator.submit(submit(2, (*PROMPT, *source.tokens(1)), offset=1, source=source_of(source, waits=True)))
        await target.ended(2)
        assert source.tokens(1) + target.tokens(2) == TOKENS
        assert target.cached(2) == BLOCKS * 16
        report = target.reports[TRANSFER]
        assert (report.outcome, report.blocks, report.size) == ("done", BLOCKS, BLOCKS * 16 * 128 * 1024)


async def test_a_submit_pulls_by_itself_and_only_what_is_missing(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, target):
        await compute(source)
        target.simulator.submit(submit(3, PROMPT[:1000], 1))
        await target.ended(3)
        target.simulator.submit(submit(2, source=source_of(source)))
        await target.ended(2)
        assert target.tokens(2) == TOKENS
        # The last block is not pulled: the first token comes from its logits.
        assert (await target.reported()).blocks == BLOCKS - 1 - 1000 // 16
        assert target.cached(2) == (BLOCKS - 1) * 16


@pytest.mark.parametrize("fault", ["drop", "stall", "corrupt"])
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_a_spoiled_transfer_is_computed(tmp_path: Path, kind: str, fault: str) -> None:
    chances = TransferFaults(**{fault: 1.0}, seed=3)
    async with pair(tmp_path, kind, Faults(chances)) as (source, target):
        await compute(source)
        target.simulator.submit(submit(2, source=source_of(source)))
        await target.ended(2)
        assert target.tokens(2) == TOKENS
        report = await target.reported()
        assert report.outcome == "failed"
        assert report.blocks < BLOCKS - 1
        # What has come before is used.
        assert target.cached(2) == report.blocks * 16


async def test_a_source_that_is_gone_in_the_middle_costs_the_rest(tmp_path: Path) -> None:
    async with pair(tmp_path, slow=True) as (source, target):
        source.simulator.submit(submit(1, max_tokens=1, export=Export(TRANSFER, 10.0)))
        target.simulator.submit(submit(2, source=source_of(source, waits=True)))
        await until(lambda: target.stored > 20)
        await source.break_off()
        await target.ended(2)
        assert target.tokens(2) == TOKENS
        assert (await target.reported()).outcome == "failed"
        assert 20 * 16 <= target.cached(2) < BLOCKS * 16
        await source.ended(1)


async def test_a_source_that_was_never_there_costs_nothing_but_the_prompt(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, target):
        await source.break_off()
        target.simulator.submit(submit(2, source=source_of(source)))
        await target.ended(2)
        assert target.tokens(2) == TOKENS
        assert target.cached(2) == 0


PHASES: dict[str, Callable[[Worker, Worker], bool]] = {
    "before anything came": lambda source, target: True,
    "while blocks come": lambda source, target: target.stored > 20,
    "when the source has ended": lambda source, target: bool(source.terminals),
    "when all has come": lambda source, target: TRANSFER in target.reports,
    "while tokens come": lambda source, target: (2).to_bytes(16) in target.deltas,
}


@pytest.mark.parametrize(
    ("phase", "is_submitted"), [*[(phase, True) for phase in PHASES], *[(phase, False) for phase in list(PHASES)[:-1]]]
)
async def test_a_cancel_in_any_phase_leaves_nothing(tmp_path: Path, phase: str, is_submitted: bool) -> None:
    """As the front end does it: cancels on both workers, then the end of the transfer on both. That nothing is left, `pair` checks."""
    async with pair(tmp_path, slow=True) as (source, target):
        source.simulator.submit(submit(1, max_tokens=1, export=Export(TRANSFER, 10.0)))
        target.simulator.fetch(fetch_from(source, waits=True))
        if is_submitted:
            target.simulator.submit(submit(2, max_tokens=10_000, source=source_of(source, waits=True)))
        await until(lambda: PHASES[phase](source, target))
        for worker in (source, target):
            worker.simulator.cancel((1).to_bytes(16))
            worker.simulator.cancel((2).to_bytes(16))


async def test_the_lease_of_an_export_ends_by_itself(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, _):
        source.simulator.submit(submit(1, max_tokens=1, export=Export(TRANSFER, 0.05)))
        assert (await source.reported()).outcome == "expired"
        await until(lambda: source.is_clean)


async def test_pages_that_run_short_end_an_import_before_a_generation(tmp_path: Path) -> None:
    """Decoding needs every page of the target: the import gives its pages back and is computed later."""
    async with pair(tmp_path, kv_blocks=160) as (source, target):
        await compute(source)
        target.simulator.submit(submit(3, tokens_between(99, 0, 480, WORDS), 400))
        await until(lambda: (3).to_bytes(16) in target.deltas)
        target.simulator.submit(submit(2, source=source_of(source)))
        await target.ended(3)
        await target.ended(2)
        assert target.tokens(2) == TOKENS
        assert target.tokens(3) == tuple(tokens_between(5, 0, 400, WORDS))
        assert target.simulator.stats().preemptions <= 1


class LyingTransport:
    """Says that blocks have come which it did not copy."""

    pull_rate = 0.0

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    def pull(self, source: KvSource, names: Sequence[bytes], _: Sequence[int]) -> None:
        self.worker.simulator.kv.arrived(source.transfer, len(names))

    def stop(self, transfer: bytes) -> None: ...

    def exported(self, transfer: bytes, first: int, slots: Sequence[int], *, is_last: bool) -> None: ...

    def withdraw(self, transfer: bytes) -> None: ...


async def test_a_block_that_is_wrong_in_its_slot_stops_the_worker(tmp_path: Path) -> None:
    worker = Worker(UnixAddress(str(tmp_path / "kv")), FAST)
    await worker.simulator.start(worker)
    worker.simulator.kv.connect(LyingTransport(worker))
    worker.simulator.submit(submit(2, source=KvSource(TRANSFER, "unix:/nowhere")))
    await until(lambda: worker.failures > 0)
    await worker.simulator.close()
    assert not worker.terminals


async def test_a_page_that_was_overwritten_is_found(tmp_path: Path) -> None:
    async with pair(tmp_path) as (source, target):
        await compute(source)
        target.simulator.fetch(fetch_from(source))
        await target.reported()
        target.simulator.check_integrity()
        memory = target.simulator.kv.memory
        used = [slot for slot in range(FAST["kv_blocks"]) if any(memory.views(slot)[0])]
        assert len(used) == BLOCKS
        memory.views(used[7])[0][3] ^= 1
        with pytest.raises(AssertionError, match=f"page {used[7]} does not hold block"):
            target.simulator.check_integrity()
        memory.views(used[7])[0][3] ^= 1
