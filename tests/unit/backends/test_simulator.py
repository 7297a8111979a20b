"""The simulator: predictable tokens, a sound cache, nothing held after the end."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.simulator import Simulator, Vocabulary, natural_length, run_of_tokens, tokens_between
from penstock.config.engines import SimulatorConfig
from penstock.kv.blocks import block_hashes
from penstock.stream.slot import merge
from penstock.wire.codec import unpack_logprobs
from penstock.wire.messages import (
    Delta,
    Fault,
    Finish,
    KvEvents,
    ModelInfo,
    PromptReport,
    Segment,
    SessionAction,
    SessionTurn,
    Submit,
    Terminal,
    TransferReport,
)
from replayed_events import apply_events

WORDS = range(300, 1800)
END = 1
# More ids than there are words: the prompts here are made of any numbers.
MODEL = ModelInfo("simulator", "simulator", "words", 1_000_000, 100_000, 16)


class Collector:
    """Takes what the simulator emits, and lets a test wait for it. `cached` is what the events alone tell."""

    def __init__(self) -> None:
        self.deltas: dict[bytes, list[Delta]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self.cached: set[bytes] = set()
        self.next_number = 0
        self.history = {0: frozenset[bytes]()}
        self._changed = asyncio.Event()

    def __call__(self, segments: Sequence[Segment], events: KvEvents | None, _: Sequence[TransferReport] = ()) -> None:
        if events is not None:
            assert events.first == self.next_number, "a gap"
            for event in events.events:
                apply_events(self.cached, [event])
                self.next_number += 1
                self.history[self.next_number] = frozenset(self.cached)
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

    def report(self, name: int) -> PromptReport:
        report = self.deltas[name.to_bytes(16)][0].prompt
        assert report is not None
        return report

    async def step(self) -> None:
        self._changed.clear()
        async with asyncio.timeout(20):
            await self._changed.wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.step()


async def check_events(simulator: Simulator, collector: Collector) -> None:
    """The events up to a snapshot, of which some may still be to come, tell exactly what is in it."""
    snapshot, cached = await simulator.snapshot(), set[bytes]()
    assert snapshot is not None
    apply_events(cached, snapshot.events)
    await collector.until(lambda: snapshot.next_number in collector.history)
    assert cached == collector.history[snapshot.next_number]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def running(clock: Clock | None = None, **config: float) -> AsyncIterator[tuple[Simulator, Collector]]:
    """With a small pool: the check looks at every block of it."""
    settings = SimulatorConfig(**{"step_ms": 0.0, "prefill_rate": 1e9, "kv_blocks": 4096, **config})  # type: ignore[arg-type]
    simulator, collector = Simulator(settings, MODEL, Vocabulary(WORDS, END), clock or time.monotonic), Collector()
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


async def test_a_repeated_prompt_is_cached_but_for_its_last_block() -> None:
    async with running() as (simulator, collector):
        prompt = range(64)
        cached = []
        for name in (1, 2):
            simulator.submit(submit(name, prompt))
            await collector.until_ended(name.to_bytes(16))
            cached.append(collector.report(name).cached_tokens)
        assert cached == [0, 48], "the last block is computed again: its logits are needed"
        assert (simulator.stats().prompt_tokens, simulator.stats().prompt_tokens_cached) == (128, 48)


async def test_a_second_turn_finds_what_the_first_generated() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, range(32), 33))
        await collector.until_ended((1).to_bytes(16))
        simulator.submit(submit(2, [*range(32), *collector.tokens((1).to_bytes(16)), 5, 6, 7], 4))
        await collector.until_ended((2).to_bytes(16))
        assert collector.report(2).cached_tokens == 64


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
        assert simulator.stats().preemptions > 0
        await check_events(simulator, collector)


async def test_what_can_never_fit_is_refused_with_the_reason() -> None:
    async with running(kv_blocks=4) as (simulator, collector):
        simulator.submit(submit(1, range(40), 100))
        await collector.until_ended((1).to_bytes(16))
        fault = collector.terminals[(1).to_bytes(16)]
        assert isinstance(fault, Fault)
        assert fault.message == "the request needs 9 KV pages and the worker has 4"


async def test_nothing_to_generate_still_reports_on_the_prompt() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, range(5), 0, logprobs=2, prompt_logprobs=True))
        await collector.until_ended((1).to_bytes(16))
        (delta,) = collector.deltas[(1).to_bytes(16)]
        assert delta.token_ids == ()
        assert delta.prompt is not None
        assert delta.prompt.logprobs is not None
        (piece,) = map(unpack_logprobs, delta.prompt.logprobs)
        assert len(piece) == 5
        assert piece[0] is None


async def test_logprobs_come_with_every_token_and_differ() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, max_tokens=40, logprobs=3))
        await collector.until_ended((1).to_bytes(16))
        whole = merge(collector.deltas[(1).to_bytes(16)])
        assert whole.logprobs is not None
        assert [entry.top[0][0] for entry in whole.logprobs] == list(whole.token_ids)
        assert all(len(entry.top) == 3 for entry in whole.logprobs)
        assert len({entry.logprob for entry in whole.logprobs}) > 30


@pytest.mark.parametrize("slow", [{"step_ms": 50.0}, {"prefill_rate": 500.0}])
async def test_steps_and_prefill_take_time(slow: dict[str, Any]) -> None:
    """At least 200 ms for five steps, or for a prompt of 100 tokens. A simulator that starts later, without them, ends first."""
    async with running(**slow) as (simulator, collector), running() as (fast, quick):
        simulator.submit(submit(1, range(100), 5))
        fast.submit(submit(2, range(100), 5))
        await quick.until_ended((2).to_bytes(16))
        assert (1).to_bytes(16) not in collector.terminals
        await collector.until_ended((1).to_bytes(16))


@pytest.mark.parametrize(("offset", "max_tokens", "expected"), [(8, 8, Finish("length")), (2000, 5000, Finish("stop"))])
async def test_what_was_complete_elsewhere_only_ends(offset: int, max_tokens: int, expected: Finish) -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, range(20 + offset), max_tokens, offset=offset))
        await collector.until_ended((1).to_bytes(16))
        assert collector.terminals[(1).to_bytes(16)] == expected
        assert [delta.token_ids for delta in collector.deltas[(1).to_bytes(16)]] == [()]


async def test_siblings_compute_their_prompt_once_and_let_others_pass() -> None:
    async with running() as (simulator, collector):
        for name in range(8):
            simulator.submit(submit(name, range(200), 8))
        simulator.submit(submit(9, range(500, 530), 8))
        await collector.step()
        assert sorted(collector.deltas) == [(0).to_bytes(16), (9).to_bytes(16)]
        await collector.until_ended(*(name.to_bytes(16) for name in (*range(8), 9)))
        assert [collector.report(name).cached_tokens for name in range(8)] == [0] + [192] * 7


async def test_blocks_are_named_as_a_router_names_them() -> None:
    async with running() as (simulator, collector):
        simulator.submit(submit(1, range(40), 42))
        await collector.until_ended((1).to_bytes(16))
        whole = [*range(40), *collector.tokens((1).to_bytes(16))]
        # The last token was not computed any further, so it has no KV: five blocks of the 82 tokens are full.
        assert collector.cached == set(block_hashes(whole[:-1], 16))
        await check_events(simulator, collector)


async def test_prompt_blocks_are_told_while_it_generates_and_generated_ones_at_the_end() -> None:
    async with running(step_ms=1.0) as (simulator, collector):
        simulator.submit(submit(1, range(33), 10_000, ignore_eos=True))
        await collector.until(lambda: len(collector.deltas.get((1).to_bytes(16), [])) >= 40)
        assert collector.cached == set(block_hashes(range(33), 16))
        simulator.cancel((1).to_bytes(16))
        await collector.step()
        assert len(collector.cached) >= (33 + 39) // 16, "nobody else asked for a step"
        await check_events(simulator, collector)


@pytest.mark.parametrize("block_size", [1, 16, 512])
async def test_blocks_of_any_size(block_size: int) -> None:
    async with running(block_size=block_size, kv_blocks=6000 // block_size + 2) as (simulator, collector):
        names = range(6)
        for name in names:
            simulator.submit(submit(name, range(name * 2000, name * 2000 + 700), 900, ignore_eos=True))
        await collector.until_ended(*(name.to_bytes(16) for name in names))
        for name in names:
            assert collector.tokens(name.to_bytes(16)) == tuple(tokens_between(name, 0, 900, WORDS))
        assert simulator.stats().preemptions > 0
        await check_events(simulator, collector)
        simulator.submit(submit(9, [*range(700), *collector.tokens((0).to_bytes(16))], 1))
        await collector.until_ended((9).to_bytes(16))
        assert collector.report(9).cached_tokens % block_size == 0


# Sessions.


def turn(name: int, session: str, action: SessionAction = "continue", prompt: Sequence[int] = range(64), **fields: Any) -> Submit:
    # A prompt of 64 tokens and 4 generated ones, of which the last has no KV: four full blocks.
    timeout, epoch = fields.pop("timeout", 300.0), fields.pop("epoch", 1)
    return submit(name, prompt, fields.pop("max_tokens", 4), session=SessionTurn(session, action, timeout, epoch), **fields)


async def run_turn(simulator: Simulator, collector: Collector, request: Submit) -> PromptReport:
    simulator.submit(request)
    await collector.until_ended(request.id)
    return collector.report(int.from_bytes(request.id))


async def test_a_session_from_its_opening_to_its_close() -> None:
    async with running() as (simulator, collector):
        assert (await run_turn(simulator, collector, turn(1, "a", "open"))).session == "open"
        assert (simulator.stats().sessions, simulator.stats().kv_blocks_leased) == (1, 4)
        report = await run_turn(simulator, collector, turn(2, "a", prompt=[*range(64), *collector.tokens((1).to_bytes(16)), *range(30)]))
        assert (report.session, report.cached_tokens) == ("open", 64)
        (told,) = await simulator.describe_sessions(["a", "nobody"])
        assert (told.kv_blocks, told.turns, told.active_turns, told.prompt_tokens) == (6, 2, 0, 64 + 98)
        assert (told.cached_tokens, told.generated_tokens) == (64, 8)
        assert told.expires_in is not None
        assert 290 < told.expires_in <= 300, "the grace is the worker's own"
        simulator.close_session("a", 1)
        await collector.until(lambda: not collector.cached)
        stats = simulator.stats()
        assert (stats.sessions, stats.kv_blocks_leased, stats.kv_blocks_cached) == (0, 0, 0), "an idle engine acts at once"
        assert (await run_turn(simulator, collector, turn(3, "a"))).session == "unknown"
        assert (await run_turn(simulator, collector, submit(4))).session is None


async def test_over_quota_is_served_and_says_so() -> None:
    async with running(max_sessions=1) as (simulator, collector):
        states = [(await run_turn(simulator, collector, turn(number, name, "open"))).session for number, name in enumerate("aba")]
        assert states == ["open", "over_quota", "open"]


async def test_a_close_waits_for_the_last_turn_and_leaves_shared_blocks() -> None:
    async with running(step_ms=1.0) as (simulator, collector):
        await run_turn(simulator, collector, submit(1, range(33)))
        simulator.submit(turn(2, "a", "open", max_tokens=10_000, ignore_eos=True))
        await collector.until(lambda: len(collector.cached) == 4)
        simulator.close_session("a", 1)
        (told,) = await simulator.describe_sessions(["a"])
        assert (told.active_turns, told.expires_in) == (1, None)
        simulator.cancel((2).to_bytes(16))
        await collector.step()
        assert simulator.stats().sessions == 0
        assert collector.cached == set(block_hashes(range(33), 16))
        await check_events(simulator, collector)


async def test_an_idle_session_expires_by_itself() -> None:
    async with running(session_grace=0.01) as (simulator, collector):
        for epoch in range(3):
            await run_turn(simulator, collector, turn(epoch, "a", "open", timeout=0.02, epoch=epoch))
            await collector.until(lambda: not simulator.stats().sessions)
            assert simulator.stats().kv_blocks_leased == 0, "nobody asked; its lease ran out"
            assert collector.cached, "it stays cached while there is room"
            await check_events(simulator, collector)


async def test_a_late_close_of_an_earlier_incarnation_is_ignored() -> None:
    async with running() as (simulator, collector):
        await run_turn(simulator, collector, turn(1, "a", "open", epoch=1))
        await run_turn(simulator, collector, turn(2, "a", "open", epoch=2))
        simulator.close_session("a", 1)
        assert [report.epoch for report in await simulator.describe_sessions(["a"])] == [2]
        assert (await run_turn(simulator, collector, turn(3, "a", epoch=1))).session == "unknown"


@pytest.mark.parametrize("kept", ["session", "retention", "nothing"])
async def test_a_lease_protects_from_one_off_pressure(kept: str) -> None:
    clock = Clock()
    async with running(clock, kv_blocks=32) as (simulator, collector):
        fields = {"session": SessionTurn("a", "open"), "retention": None, "nothing": None}[kept]
        simulator.submit(submit(0, range(64), 4, session=fields, retention_seconds=60.0 if kept == "retention" else 0.0))
        await collector.until_ended((0).to_bytes(16))
        for number in range(1, 10):
            await run_turn(simulator, collector, submit(number, range(number * 100, number * 100 + 80), 4))
        assert simulator.stats().kv_blocks_evicted > 0
        report = await run_turn(simulator, collector, submit(20, range(65), 1))
        assert report.cached_tokens == (0 if kept == "nothing" else 64)
        await check_events(simulator, collector)
        clock.now += 61.0
        await run_turn(simulator, collector, submit(21, range(2000, 2010), 1))
        assert simulator.stats().kv_blocks_leased == (4 if kept == "session" else 0)


async def test_priority_outlives_age() -> None:
    async with running(kv_blocks=32) as (simulator, collector):
        await run_turn(simulator, collector, submit(0, range(64), 4, priority=1))
        for number in range(1, 10):
            await run_turn(simulator, collector, submit(number, range(number * 100, number * 100 + 80), 4))
        assert (await run_turn(simulator, collector, submit(20, range(65), 1))).cached_tokens == 64


@pytest.mark.parametrize("seed", range(4))
async def test_events_tell_exactly_what_is_cached_whatever_happens(seed: int) -> None:
    """Turns of many sessions on a pool that holds few, closed, expired, aborted and preempted."""
    chance, clock = random.Random(seed), Clock()
    async with running(clock, kv_blocks=60, max_sessions=12, lease_share=chance.choice([0.2, 0.5, 1.0])) as (simulator, collector):
        for name in range(150):
            who = chance.randrange(20)
            prompt = [*range(32), *range(who * 100, who * 100 + chance.randrange(80))]
            action = chance.choice(["open", "continue", "close"])
            session = SessionTurn(f"session {who}", action, chance.choice([1.0, 20.0]), name // 40)  # type: ignore[arg-type]
            fields = {"retention_seconds": chance.choice([0.0, 5.0]), "priority": chance.randrange(2)}
            simulator.submit(submit(name, prompt, chance.randrange(60), session=chance.choice([None, session]), **fields))
            if chance.random() < 0.2:
                simulator.cancel(chance.randrange(name + 1).to_bytes(16))
            if chance.random() < 0.2:
                simulator.close_session(f"session {chance.randrange(20)}", name // 40)
            clock.now += chance.choice([0.0, 0.1, 40.0])
            await collector.step()
            simulator.check_integrity()
            await check_events(simulator, collector)
        await collector.until(lambda: (simulator.stats().running, simulator.stats().queued) == (0, 0))
        assert simulator.stats().kv_blocks_evicted > 50
        clock.now += 1000.0
        simulator.submit(submit(1000, range(5), 1))
        await collector.until_ended((1000).to_bytes(16))
        await check_events(simulator, collector)
        assert (simulator.stats().sessions, simulator.stats().kv_blocks_leased) == (0, 0)


async def test_a_check_that_finds_what_is_wrong() -> None:
    async with running(step_ms=1.0) as (simulator, collector):
        simulator.submit(submit(1, range(40), 10_000, ignore_eos=True))
        await collector.until(lambda: bool(collector.cached))
        (sequence,) = simulator._scheduler.decoding.values()
        page = sequence.tail.pop()
        with pytest.raises(AssertionError):
            simulator.check_integrity()
        sequence.tail.append(page)
