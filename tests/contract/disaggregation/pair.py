"""Two real engines in one process, one that prefills and one that decodes, and what a front end would do with them."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import psutil

from chat_model import chat_model, random_prompt
from contract.backends.judges import ModelJudge
from contract.backends.rig import GREEDY, Generation
from contract.backends.setups import SETUPS, Setup
from penstock.cli.engines import make_backend
from penstock.cli.main import load
from penstock.config.commands import WorkerSettings
from penstock.wire.messages import BlocksCleared, Export, KvEvents, KvSource, Role, Segment, Submit, TransferReport
from penstock.worker.backend import Backend

PAIRS = Path(__file__).parents[2] / "engines" / "pairs"
ON_LOOPBACK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo"}
"""As between machines: over shared memory, an engine would read the KV even of one that is frozen."""
PATIENCE = "6"
"""For machines that are slow: an engine's first steps take seconds."""


class Side:
    """One of the two: its backend, and everything that it emitted."""

    process: psutil.Process

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.generations: dict[bytes, Generation] = {}
        self.reports: list[TransferReport] = []
        self.cached: set[bytes] = set()
        self.failures = 0

    def emit(self, segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = ()) -> None:
        self.reports += transfers
        for segment in segments:
            self.generations[segment.id].take(segment)
        for event in () if events is None else events.events:
            if isinstance(event, BlocksCleared):
                self.cached.clear()
            elif event.tier == "device":
                (self.cached.update if hasattr(event, "parent") else self.cached.difference_update)(event.blocks)

    def freeze(self) -> None:
        """The engine and its helpers, one of which has the KV."""
        for process in (self.process, *self.process.children(recursive=True)):
            process.suspend()

    def thaw(self) -> None:
        for process in (self.process, *self.process.children(recursive=True)):
            process.resume()

    def fail(self) -> None:
        self.failures += 1

    def report(self, transfer: bytes, is_wanted: Callable[[TransferReport], bool] = lambda _: True) -> TransferReport | None:
        return next((report for report in self.reports if report.id == transfer and is_wanted(report)), None)


class Pair:
    def __init__(self, setup: Setup, prefill: Side, decode: Side) -> None:
        self.setup, self.prefill, self.decode = setup, prefill, decode
        self.judge = ModelJudge(chat_model())
        self._begun = 0

    def prompt(self, name: str, length: int) -> tuple[int, ...]:
        return random_prompt(name, length)

    def request(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Submit:
        self._begun += 1
        return Submit(os.urandom(16), tuple(prompt), max_tokens, seed=self._begun, sampling=GREEDY, ignore_eos=True, **fields)

    def begin(self, side: Side, request: Submit) -> Generation:
        generation = side.generations[request.id] = Generation(request)
        side.backend.submit(request)
        return generation

    async def finish(self, side: Side, request: Submit) -> Generation:
        generation = self.begin(side, request)
        await self.until(lambda: generation.terminal is not None)
        return generation

    async def ticket(self, prompt: Sequence[int], transfer: bytes, **fields: Any) -> bytes:
        """The prefill engine computes the prompt."""
        (await self.finish(self.prefill, self.request(prompt, 0, export=Export(transfer, 10.0), **fields))).check(count=0)
        await self.until(lambda: self.prefill.report(transfer) is not None)
        report = self.prefill.report(transfer)
        assert report is not None
        assert report.ticket, report
        return report.ticket

    def decoded(self, prompt: Sequence[int], max_tokens: int, transfer: bytes, ticket: bytes, **fields: Any) -> Submit:
        return self.request(prompt, max_tokens, source=KvSource(transfer, "", ticket=ticket), **fields)

    def outcome(self, transfer: bytes) -> str | None:
        found = self.decode.report(transfer)
        return None if found is None else found.outcome

    def failure(self, transfer: bytes) -> str:
        found = self.decode.report(transfer)
        assert found is not None
        assert found.outcome == "failed"
        return found.reason

    def is_right(self, generation: Generation) -> bool:
        return list(generation.tokens) == self.judge.expected(generation.request, generation.tokens)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(self.setup.patience):
            while not condition():
                await asyncio.sleep(0.001)


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


async def _start(setup: Setup, role: Role, folder: str, number: int, flags: Sequence[str]) -> Side:
    """Each on a core of its own."""
    patience = () if "--kv-patience" in flags else ("--kv-patience", PATIENCE)
    arguments = setup.arguments(chat_model(), "--listen", f"unix:{folder}/{role}.sock", "--role", role, *patience, *flags)
    settings = cast(WorkerSettings, load(arguments, {}).settings)
    side: Side
    backend, _ = make_backend(settings, lambda: side.fail())
    side = Side(backend)
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    with _environment(VLLM_CPU_OMP_THREADS_BIND=str(number % (os.cpu_count() or 1))):
        await backend.start(side.emit)
    assert setup.process is not None
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    (side.process,) = [child for child in children if setup.process in " ".join([child.name(), *child.cmdline()])]
    return side


@asynccontextmanager
async def running_pair(engine: str, *flags: str) -> AsyncIterator[Pair]:
    setup = SETUPS[engine]
    setup = replace(setup, environment={**setup.environment, **ON_LOOPBACK}, import_path=setup.import_path or PAIRS)
    setup.prepare()
    sides: list[Side] = []
    with tempfile.TemporaryDirectory(prefix="pair-") as folder:
        try:
            for number, role in enumerate(("prefill", "decode")):
                sides.append(await _start(setup, cast(Role, role), folder, number, flags))
            yield Pair(setup, *sides)
        finally:
            for side in sides:
                await side.backend.close()
