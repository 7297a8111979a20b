"""Two embedded engines, each in its thread, move KV over real sockets: the answer is that of one engine alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kv_peers import SECRET
from penstock.backends.embedded import EmbeddedBackend
from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.config.engines import TransferFaults
from penstock.engine.engine import Engine
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.messages import Export, Fetch, KvEvents, KvSource, ModelInfo, Sampling, Segment, Submit, Terminal, TransferReport
from tiny_models import make_engine, make_submit, random_prompt, run

MODEL = ModelInfo("tiny", "embedded", "none", 300, 512, 16)
MOVE = (77).to_bytes(16)
SAMPLED = Sampling(temperature=0.9, top_p=0.95)


class Worker:
    """An engine behind its backend, with a transport of its own, and what it has said."""

    def __init__(self, **settings: Any) -> None:
        self.engines: list[Engine] = []
        self.tokens: dict[bytes, list[int]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self.reports: list[TransferReport] = []
        self.failures: list[None] = []
        self._settings = settings
        self._news = asyncio.Event()
        self.backend = EmbeddedBackend(MODEL, self._make, lambda: self.failures.append(None))

    def _make(self) -> Engine:
        self.engines.append(make_engine(**self._settings))
        return self.engines[0]

    async def start(self, name: str, address: Address, faults: Faults | None) -> None:
        await self.backend.start(self._take)
        assert self.backend.kv is not None
        self.transport = SocketTransport(self.backend.kv, Credentials(name, SECRET), address, faults=faults)
        self.address = str(self.transport.start())
        self.backend.kv.connect(self.transport)

    async def close(self) -> None:
        await asyncio.to_thread(self.transport.close)
        await self.backend.close()
        for engine in self.engines:
            engine.check_integrity()
        assert not self.failures

    def _take(self, segments: Sequence[Segment], _: KvEvents | None, reports: Sequence[TransferReport] = ()) -> None:
        self.reports += reports
        for segment in segments:
            if segment.delta is not None:
                self.tokens.setdefault(segment.id, []).extend(segment.delta.token_ids)
            if segment.terminal is not None:
                self.terminals[segment.id] = segment.terminal
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def two_workers(kind: str, directory: Path, faults: Faults | None = None, **settings: Any) -> AsyncIterator[tuple[Worker, Worker]]:
    workers = Worker(**settings), Worker(**settings)
    for name, worker in zip("pd", workers, strict=True):
        await worker.start(name, UnixAddress(str(directory / f"{name}.kv")) if kind == "unix" else TcpAddress("127.0.0.1", 0), faults)
    try:
        yield workers
    finally:
        for worker in workers:
            await worker.close()


async def generate(p: Worker, d: Worker, request: Submit) -> list[int]:
    """What a front end does: the first token from `p`, the rest from `d`, which pulls meanwhile."""
    source = KvSource(MOVE, p.address, waits=True)
    d.backend.fetch(Fetch(source, request.token_ids, 5.0))
    p.backend.submit(msgspec.structs.replace(request, max_tokens=1, export=Export(MOVE, 5.0)))
    await p.until(lambda: request.id in p.terminals)
    first = p.tokens[request.id]
    d.backend.submit(msgspec.structs.replace(request, token_ids=(*request.token_ids, *first), offset=1, source=source))
    await d.until(lambda: request.id in d.terminals)
    return [*first, *d.tokens[request.id]]


async def settle(*workers: Worker) -> None:
    """The front end ends the transfer. Nothing is left of it."""
    for worker in workers:
        worker.backend.end_transfer(MOVE)
    for worker in workers:
        await worker.until(lambda worker=worker: not worker.backend.stats().imports + worker.backend.stats().exports)  # type: ignore[misc]
        assert worker.backend.stats().kv_blocks_used == 0


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("sampling", [{}, {"sampling": SAMPLED, "seed": 5}], ids=["greedy", "sampled"])
async def test_the_tokens_are_those_of_one_engine_alone(kind: str, sampling: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {"token_budget": 48, "kv_pages": 128}
    request = make_submit(1, random_prompt(3, 341), 30, **sampling)
    expected = run(make_engine(**settings), [request]).tokens[request.id]
    async with two_workers(kind, tmp_path, **settings) as (p, d):
        assert await generate(p, d, request) == expected
        (report,) = d.reports
        assert (report.id, report.outcome, report.blocks) == (MOVE, "done", 21)
        assert d.transport.bytes_pulled == report.size
        assert d.backend.stats().prompt_tokens_cached == 336
        await settle(p, d)


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_damaged_blocks_are_computed(kind: str, tmp_path: Path) -> None:
    request = make_submit(1, random_prompt(3, 141), 12)
    expected = run(make_engine(), [request]).tokens[request.id]
    async with two_workers(kind, tmp_path, Faults(TransferFaults(corrupt=1.0))) as (p, d):
        assert await generate(p, d, request) == expected
        assert [report.outcome for report in d.reports] == ["failed"]
        await settle(p, d)


async def test_a_source_that_is_gone(tmp_path: Path) -> None:
    request = make_submit(1, random_prompt(3, 141), 12)
    expected = run(make_engine(), [request]).tokens[request.id]
    async with two_workers("unix", tmp_path) as (p, d):
        await asyncio.to_thread(p.transport.close)
        d.backend.submit(msgspec.structs.replace(request, source=KvSource(MOVE, p.address)))
        await d.until(lambda: request.id in d.terminals)
        assert d.tokens[request.id] == expected
        assert [report.outcome for report in d.reports] == ["failed"]
        await settle(d)
