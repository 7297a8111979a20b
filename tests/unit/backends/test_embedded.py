"""The embedded engine behind the Backend protocol: a real engine in a real thread, with a tiny model."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.backends.embedded import EmbeddedBackend
from penstock.engine.engine import Engine
from penstock.wire.messages import (
    Fault,
    Finish,
    KvEvents,
    ModelInfo,
    Segment,
    SessionReport,
    SessionTurn,
    Snapshot,
    Terminal,
    TransferReport,
)
from replayed_events import apply_events
from tiny_models import generation_id, make_engine, make_submit, random_prompt, reference_tokens

MODEL = ModelInfo("tiny", "embedded", "none", 300, 512, 16)


class Receiver:
    """What a worker runtime would get, and when."""

    def __init__(self) -> None:
        self.calls = 0
        self.tokens: dict[bytes, list[int]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self.cached: set[bytes] = set()
        self.next_number = 0
        self.history = {0: frozenset[bytes]()}
        self._news = asyncio.Event()

    def __call__(self, segments: Sequence[Segment], events: KvEvents | None, _: Sequence[TransferReport] = ()) -> None:
        self.calls += 1
        if events is not None:
            assert events.first == self.next_number, "a gap"
            for event in events.events:
                apply_events(self.cached, [event])
                self.next_number += 1
                self.history[self.next_number] = frozenset(self.cached)
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


async def check_events(backend: EmbeddedBackend, receiver: Receiver) -> Snapshot:
    """The events up to a snapshot, of which some may still be to come, tell exactly what is in it."""
    snapshot, cached = await backend.snapshot(), set[bytes]()
    assert snapshot is not None
    apply_events(cached, snapshot.events)
    await receiver.until(lambda: snapshot.next_number in receiver.history)
    assert cached == receiver.history[snapshot.next_number]
    return snapshot


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
            assert backend.stats().kv_blocks_leased == 0, "nobody asked; its lease ran out"


async def test_an_idle_engine_closes_a_session_at_once_and_tells_so() -> None:
    async with started(clock=time.monotonic) as (backend, receiver, _):
        backend.submit(make_submit(0, random_prompt(1, 64), 3, session=SessionTurn("a", "open", epoch=5)))
        await receiver.until(lambda: generation_id(0) in receiver.terminals and backend.stats().running == 0)
        (told,) = await backend.describe_sessions(["a", "nobody"])
        assert (told.id, told.epoch, told.kv_blocks, told.turns, told.active_turns, told.generated_tokens) == ("a", 5, 4, 1, 0, 3)
        assert len(receiver.cached) == 4
        backend.close_session("a", 4)
        assert len(await backend.describe_sessions(["a"])) == 1, "another incarnation was meant"
        backend.close_session("a", 5)
        await receiver.until(lambda: not receiver.cached and backend.stats().sessions == 0)
        assert await backend.describe_sessions(["a"]) == []


async def test_events_tell_exactly_what_is_cached_whatever_happens() -> None:
    """Turns of many sessions on a pool that holds few, closed, expired, aborted and preempted."""
    chance = random.Random(1)
    async with started(clock=time.monotonic, kv_pages=30, session_grace=0.0) as (backend, receiver, _):
        for number in range(80):
            who = chance.randrange(12)
            session = SessionTurn(f"session {who}", chance.choice(["open", "continue", "close"]), 0.05, 1)
            prompt = [*random_prompt(0, 16), *random_prompt(who + 1, 50)]
            backend.submit(make_submit(number, prompt, chance.randrange(1, 12), session=chance.choice([None, session])))
            if chance.random() < 0.2:
                backend.cancel(generation_id(chance.randrange(number + 1)))
            if chance.random() < 0.2:
                backend.close_session(f"session {chance.randrange(12)}", 1)
            if chance.random() < 0.5:
                await check_events(backend, receiver)
        await receiver.until(lambda: (backend.stats().running, backend.stats().queued, backend.stats().sessions) == (0, 0, 0))
        snapshot = await check_events(backend, receiver)
        assert snapshot.next_number == receiver.next_number
        assert backend.stats().kv_blocks_evicted > 0


async def test_questions_do_not_outlive_the_backend() -> None:
    """Asked while the engine is in a step that does not end before the close."""
    engine = make_engine()
    whole_step, held, asked = engine.step, threading.Event(), threading.Event()

    def step() -> list[Segment]:
        if held.is_set():
            asked.wait(30)
        return whole_step()

    engine.step = step  # type: ignore[method-assign]
    backend = EmbeddedBackend(MODEL, lambda: engine, lambda: None)
    await backend.start(Receiver())
    held.set()
    backend.submit(make_submit(0, [1, 2, 3], 4))
    while backend._asked:
        await asyncio.sleep(0)
    questions = [asyncio.create_task(backend.snapshot()), asyncio.create_task(backend.describe_sessions(["a"]))]
    while len(backend._questions) < 2:
        await asyncio.sleep(0)
    closing = asyncio.create_task(backend.close())
    while not backend._stopping:
        await asyncio.sleep(0)
    asked.set()
    async with asyncio.timeout(30):
        assert await asyncio.gather(*questions) == [None, []]
        await closing
        assert (await backend.snapshot(), await backend.describe_sessions(["a"])) == (None, [])


async def test_questions_to_an_engine_that_breaks_get_an_empty_answer() -> None:
    engine = make_engine()

    def broken(_: Sequence[str]) -> list[SessionReport]:
        raise RuntimeError

    engine.describe_sessions = broken  # type: ignore[method-assign, assignment]
    failed = asyncio.Event()
    backend = EmbeddedBackend(MODEL, lambda: engine, failed.set)
    await backend.start(Receiver())
    try:
        async with asyncio.timeout(30):
            reports, snapshot = await asyncio.gather(backend.describe_sessions(["a"]), backend.snapshot())
            assert (reports, snapshot) == ([], None)
            await failed.wait()
            assert (await backend.snapshot(), await backend.describe_sessions(["a"])) == (None, [])
    finally:
        await backend.close()


async def test_a_long_step_says_that_it_goes_on() -> None:
    """The model is slow, and says so between its layers."""
    engine = make_engine()
    whole_step, enough, receiver = engine.step, threading.Event(), Receiver()

    def step() -> list[Segment]:
        while engine.has_work and not enough.wait(0.01):
            engine.model.on_progress()
        return whole_step()

    engine.step = step  # type: ignore[method-assign]
    backend = EmbeddedBackend(MODEL, lambda: engine, lambda: None)
    await backend.start(receiver)
    try:
        backend.submit(make_submit(0, [1, 2, 3], 4))
        before = receiver.calls
        await receiver.until(lambda: receiver.calls >= before + 3)
        assert not receiver.tokens
        enough.set()
        await receiver.until(lambda: generation_id(0) in receiver.terminals)
    finally:
        enough.set()
        await backend.close()


async def test_a_model_tells_of_its_progress_at_least_once_per_layer() -> None:
    engine, layers = make_engine(), list[None]()
    engine.model.on_progress = lambda: layers.append(None)
    engine.submit(make_submit(0, [1, 2, 3], 1))
    engine.step()
    assert len(layers) > engine.model.shape.layers


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
