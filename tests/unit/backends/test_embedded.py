"""The embedded engine behind the Backend protocol: a real engine in a real thread, with a tiny model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.backends.embedded import EmbeddedBackend
from penstock.engine.engine import Engine
from penstock.wire.messages import Fault, Finish, ModelInfo, Segment, SessionTurn, Terminal
from tiny_models import generation_id, make_engine, make_submit, random_prompt, reference_tokens

MODEL = ModelInfo("tiny", "embedded", "none", 300, 512, 16)


class Receiver:
    """What a worker runtime would get, and when."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, list[int]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self._news = asyncio.Event()

    def __call__(self, segments: Sequence[Segment]) -> None:
        for segment in segments:
            assert segment.id not in self.terminals
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
async def started(**settings: Any) -> AsyncIterator[tuple[EmbeddedBackend, Receiver, list[Engine]]]:
    engines: list[Engine] = []
    failures: list[None] = []

    def make() -> Engine:
        engines.append(make_engine(**settings))
        return engines[0]

    receiver = Receiver()
    backend = EmbeddedBackend(MODEL, make, lambda: failures.append(None))
    await backend.start(receiver)
    try:
        yield backend, receiver, engines
    finally:
        await backend.close()
        engines[0].check_integrity()
        assert not failures


async def test_generations_run_and_end() -> None:
    async with started() as (backend, receiver, _):
        prompts = [random_prompt(number, 10 + number) for number in range(8)]
        for number, prompt in enumerate(prompts):
            backend.submit(make_submit(number, prompt, 20))
        await receiver.until(lambda: len(receiver.terminals) == 8)
        assert all(terminal == Finish("length") for terminal in receiver.terminals.values())
        for number, prompt in enumerate(prompts):
            assert receiver.tokens[generation_id(number)] == reference_tokens("llama", prompt, 20)
        stats = backend.stats()
        assert (stats.running, stats.queued, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.kv_blocks_total == 64


async def test_cancelling_frees_and_tells_so() -> None:
    async with started(max_batch=1) as (backend, receiver, _):
        for number in range(3):
            backend.submit(make_submit(number, random_prompt(number, 30), 400))
        await receiver.until(lambda: generation_id(0) in receiver.tokens)
        for number in range(3):
            backend.cancel(generation_id(number))
        backend.cancel(b"unknown")
        await receiver.until(lambda: (backend.stats().running, backend.stats().queued, backend.stats().kv_blocks_used) == (0, 0, 0))
        assert not receiver.terminals
        assert backend.stats().kv_blocks_cached > 0


async def test_it_wakes_from_idleness_for_work_and_for_the_end_of_a_lease() -> None:
    async with started(clock=time.monotonic) as (backend, receiver, _):
        for number in range(3):
            session = SessionTurn("a", "open", timeout=0.05, epoch=number)
            backend.submit(make_submit(number, random_prompt(1, 40), 3, session=session))
            await receiver.until(lambda number=number: generation_id(number) in receiver.terminals)  # type: ignore[misc]
            await receiver.until(lambda: backend.stats().sessions == 0)
            assert backend.stats().kv_blocks_cached == 0, "nobody asked; its lease ran out"


async def test_closing_while_it_runs_does_not_hang() -> None:
    async with started() as (backend, receiver, _):
        backend.submit(make_submit(0, random_prompt(0, 30), 400))
        await receiver.until(lambda: generation_id(0) in receiver.tokens)


async def test_an_engine_that_breaks_faults_every_generation() -> None:
    class Broken(Exception):
        pass

    engine = make_engine(max_batch=2)
    whole_step = engine.step
    steps: list[None] = []

    def step() -> list[Segment]:
        steps.append(None)
        if len(steps) > 5 and engine.has_work:
            raise Broken
        return whole_step()

    engine.step = step  # type: ignore[method-assign]
    failed = asyncio.Event()
    receiver = Receiver()
    backend = EmbeddedBackend(MODEL, lambda: engine, failed.set)
    await backend.start(receiver)
    try:
        for number in range(4):
            backend.submit(make_submit(number, random_prompt(number, 30), 400))
        await asyncio.wait_for(failed.wait(), 30)
        assert len(receiver.terminals) == 4
        for terminal in receiver.terminals.values():
            assert isinstance(terminal, Fault)
            assert (terminal.code, terminal.retryable) == ("engine_failed", True)
        backend.submit(make_submit(9, [1, 2], 4))
        assert isinstance(receiver.terminals[generation_id(9)], Fault)
    finally:
        await backend.close()


async def test_a_model_that_cannot_be_loaded_is_told_at_the_start() -> None:
    def make() -> Engine:
        raise RuntimeError("no such weights")

    backend = EmbeddedBackend(MODEL, make, lambda: None)
    with pytest.raises(RuntimeError, match="no such weights"):
        await backend.start(Receiver())
    await backend.close()
