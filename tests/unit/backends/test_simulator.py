"""The simulator: predictable tokens, a sound cache, nothing held after the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.simulated_cache import BLOCK_SIZE, SimulatedCache
from penstock.backends.simulated_tokens import natural_length, run_of_tokens, tokens_between
from penstock.backends.simulator import Simulator, SimulatorConfig, Vocabulary
from penstock.stream.merge import merge
from penstock.wire.blocks import block_hashes
from penstock.wire.messages import Delta, Fault, Finish, ModelInfo, Segment, Submit, Terminal

WORDS = range(300, 1800)
END = 1
MODEL = ModelInfo("simulator", "simulator", "words", 1842, 100_000, BLOCK_SIZE)


class Collector:
    """Takes what the simulator emits, and lets a test wait for it."""

    def __init__(self) -> None:
        self.deltas: dict[bytes, list[Delta]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self.steps = 0
        self._changed = asyncio.Event()

    def __call__(self, segments: Sequence[Segment]) -> None:
        self.steps += 1
        for segment in segments:
            assert segment.id not in self.terminals, "something came after the terminal"
            if segment.delta is not None:
                self.deltas.setdefault(segment.id, []).append(segment.delta)
            if segment.terminal is not None:
                self.terminals[segment.id] = segment.terminal
        self._changed.set()

    def tokens(self, generation: bytes) -> tuple[int, ...]:
        return merge(self.deltas[generation]).token_ids

    async def until_ended(self, *generations: bytes) -> None:
        while not all(generation in self.terminals for generation in generations):
            await self.step()

    async def step(self) -> None:
        self._changed.clear()
        async with asyncio.timeout(20):
            await self._changed.wait()


@asynccontextmanager
async def running(**config: float) -> AsyncIterator[tuple[Simulator, Collector]]:
    settings = SimulatorConfig(**{"step_ms": 0.0, "prefill_rate": 1e9, **config})  # type: ignore[arg-type]
    simulator, collector = Simulator(settings, MODEL, Vocabulary(WORDS, END)), Collector()
    await simulator.start(collector)
    try:
        yield simulator, collector
        simulator.check_integrity()
    finally:
        await simulator.close()


def submit(name: int, prompt: Sequence[int] = range(20), max_tokens: int = 8, **rest: object) -> Submit:
    return Submit(id=name.to_bytes(16), token_ids=tuple(prompt), max_tokens=max_tokens, seed=name, **rest)  # type: ignore[arg-type]


@given(st.integers(0, 2**64 - 1), st.integers(0, 200), st.integers(0, 60))
def test_tokens_are_a_function_of_seed_and_position(seed: int, start: int, count: int) -> None:
    whole = tokens_between(seed, 0, start + count, WORDS)
    assert tokens_between(seed, start, start + count, WORDS) == whole[start:]
    assert all(token in WORDS for token in whole)
    assert run_of_tokens(seed, 1, WORDS) == tokens_between(seed, 16, 32, WORDS)


def test_seeds_and_positions_differ() -> None:
    assert tokens_between(1, 0, 50, WORDS) != tokens_between(2, 0, 50, WORDS)
    assert len(set(tokens_between(1, 0, 50, WORDS))) > 25


async def test_a_generation_has_its_predicted_tokens_and_frees_its_blocks() -> None:
    async with running() as (simulator, collector):
        for name in range(1, 6):
            simulator.submit(submit(name, range(name, name + 30), 50))
        await collector.until_ended(*(name.to_bytes(16) for name in range(1, 6)))
        for name in range(1, 6):
            assert collector.tokens(name.to_bytes(16)) == tuple(tokens_between(name, 0, 50, WORDS))
            assert collector.terminals[name.to_bytes(16)] == Finish("length")
        stats = simulator.stats()
        assert (stats.running, stats.queued, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.kv_blocks_cached > 0


async def test_one_token_a_step() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, max_tokens=40))
        await collector.until_ended((1).to_bytes(16))
        assert [len(delta.token_ids) for delta in collector.deltas[(1).to_bytes(16)]] == [1] * 40


async def test_it_ends_by_itself_with_the_end_token() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, max_tokens=5000))
        simulator.submit(submit(2, max_tokens=5000, min_tokens=1500))
        simulator.submit(submit(3, max_tokens=1200, ignore_eos=True))
        await collector.until_ended(*(name.to_bytes(16) for name in (1, 2, 3)))
        tokens = collector.tokens((1).to_bytes(16))
        assert len(tokens) == natural_length(1) + 1
        assert tokens[-1] == END
        assert END not in tokens[:-1]
        assert len(collector.tokens((2).to_bytes(16))) == 1501
        assert len(collector.tokens((3).to_bytes(16))) == 1200
        assert [collector.terminals[name.to_bytes(16)] for name in (1, 2, 3)] == [Finish("stop"), Finish("stop"), Finish("length")]


async def test_going_on_from_the_middle_gives_the_same_tokens() -> None:
    async with running() as (simulator, collector):
        before = tokens_between(7, 0, 21, WORDS)
        simulator.submit(submit(7, [*range(20), *before], 60, offset=21))
        await collector.until_ended((7).to_bytes(16))
        assert collector.deltas[(7).to_bytes(16)][0].offset == 21
        assert collector.tokens((7).to_bytes(16)) == tuple(tokens_between(7, 21, 60, WORDS))


async def test_a_repeated_prompt_is_cached_but_for_its_last_token() -> None:
    async with running() as (simulator, collector):
        prompt = range(64)
        cached = []
        for name in (1, 2):
            simulator.submit(submit(name, prompt))
            await collector.until_ended(name.to_bytes(16))
            report = collector.deltas[name.to_bytes(16)][0].prompt
            assert report is not None
            cached.append(report.cached_tokens)
        assert cached == [0, 63]


async def test_a_second_turn_finds_what_the_first_generated() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, range(32), 33))
        await collector.until_ended((1).to_bytes(16))
        simulator.submit(submit(2, [*range(32), *collector.tokens((1).to_bytes(16)), 5, 6, 7], 4))
        await collector.until_ended((2).to_bytes(16))
        report = collector.deltas[(2).to_bytes(16)][0].prompt
        assert report is not None
        assert report.cached_tokens == 64


async def test_cancelling_frees_at_once_in_any_state() -> None:
    async with running(step_ms=1.0, max_batch=4, prefill_budget=50) as (simulator, collector):
        for name in range(8):
            simulator.submit(submit(name, range(name * 100, name * 100 + 40), 10_000, ignore_eos=True))
        while simulator.stats().running < 4:
            await collector.step()
        assert simulator.stats().queued == 4
        for name in range(8):
            simulator.cancel(name.to_bytes(16))
            simulator.check_integrity()
        stats = simulator.stats()
        assert (stats.running, stats.queued, stats.kv_blocks_used) == (0, 0, 0)
        simulator.cancel((99).to_bytes(16))


async def test_a_short_cache_preempts_and_stays_exact() -> None:
    async with running(kv_blocks=24) as (simulator, collector):
        names = range(12)
        for name in names:
            simulator.submit(submit(name, range(name * 100, name * 100 + 20), 100, logprobs=1 if name % 2 else None))
        while len(collector.terminals) < len(names):
            await collector.step()
            simulator.check_integrity()
        for name in names:
            assert collector.tokens(name.to_bytes(16)) == tuple(tokens_between(name, 0, 100, WORDS))


async def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    async with running(kv_blocks=4) as (simulator, collector):
        simulator.submit(submit(1, range(40), 100))
        await collector.until_ended((1).to_bytes(16))
        fault = collector.terminals[(1).to_bytes(16)]
        assert isinstance(fault, Fault)
        assert fault.message == "the request needs 9 KV blocks and the worker has 4"


async def test_nothing_to_generate_still_reports_on_the_prompt() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, range(5), 0, logprobs=2, prompt_logprobs=True))
        await collector.until_ended((1).to_bytes(16))
        (delta,) = collector.deltas[(1).to_bytes(16)]
        assert delta.token_ids == ()
        assert delta.prompt is not None
        assert delta.prompt.logprobs is not None
        assert len(delta.prompt.logprobs) == 5
        assert delta.prompt.logprobs[0] is None


async def test_logprobs_come_with_every_token_and_differ() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, max_tokens=40, logprobs=3))
        await collector.until_ended((1).to_bytes(16))
        whole = merge(collector.deltas[(1).to_bytes(16)])
        assert whole.logprobs is not None
        assert [entry.top[0][0] for entry in whole.logprobs] == list(whole.token_ids)
        assert all(len(entry.top) == 3 for entry in whole.logprobs)
        assert len({entry.logprob for entry in whole.logprobs}) > 30


async def test_a_step_takes_its_time() -> None:
    async with running(step_ms=10.0, prefill_rate=1000.0) as (simulator, collector):
        began = asyncio.get_running_loop().time()
        simulator.submit(submit(1, range(100), 5))
        await collector.until_ended((1).to_bytes(16))
        # Five steps of 10 ms, and 100 ms for the prompt. Only the lower bound holds on a busy machine.
        assert asyncio.get_running_loop().time() - began >= 0.145


@given(st.lists(st.lists(st.integers(0, 3), min_size=0, max_size=80), min_size=1, max_size=12), st.integers(3, 12), st.data())
def test_the_cache_stays_sound(prompts: list[list[int]], total: int, data: st.DataObject) -> None:
    cache = SimulatedCache(total)
    held: list[tuple[list[bytes], int]] = []
    for prompt in prompts:
        hashes = block_hashes(prompt, BLOCK_SIZE)
        if cache.can_allocate(hashes, 1):
            cache.allocate(hashes, 1)
            held.append((hashes, 1))
            assert cache.matched(hashes) == len(hashes)
        elif held:
            hashes, private = held.pop(data.draw(st.integers(0, len(held) - 1)))
            cache.release(hashes, block_hashes(range(BLOCK_SIZE), BLOCK_SIZE, hashes[-1] if hashes else b"")[:private], private)
        cache.check_integrity()
        assert cache.used == len({block for hashes, _ in held for block in hashes}) + len(held)
    for hashes, private in held:
        cache.release(hashes, [], private)
    cache.check_integrity()
    assert cache.used == 0


def test_the_cache_check_finds_what_is_wrong() -> None:
    cache = SimulatedCache(4)
    cache.allocate(block_hashes(range(32), BLOCK_SIZE), 1)
    cache._private = -1
    with pytest.raises(AssertionError):
        cache.check_integrity()
