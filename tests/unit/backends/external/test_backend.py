"""What the backend adds to an external engine. The engine here is written by hand: a test decides its output."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from penstock.backends.external import backend as external_backend
from penstock.backends.external.backend import ExternalBackend
from penstock.backends.external.engine import Chunk, EngineDied, EngineFacts, EngineRefused, EngineRequest, EventEndpoints, KvMoves
from penstock.backends.external.handover import Ticket
from penstock.backends.external.kv_events import BlockMirror, EngineRemoved, EngineStored
from penstock.grammar.compile_queue import CompileQueue
from penstock.wire.codec import pack_logprobs
from penstock.wire.errors import GrammarError
from penstock.wire.messages import (
    BlocksStored,
    Delta,
    Export,
    Fault,
    Finish,
    Grammar,
    KvEvents,
    KvSource,
    Mark,
    ModelInfo,
    PromptReport,
    Segment,
    SessionTurn,
    Submit,
    Terminal,
    TokenLogprob,
    TransferReport,
    WorkerStats,
)

MODEL = ModelInfo("tiny", "byhand", "words", 100, 1, 1)
FACTS = EngineFacts(context_length=64, block_size=4, kv_blocks=32, max_batch=8)


class EngineByHand:
    """Every generation has a queue of output. `stopped` has those that were closed or cancelled."""

    def __init__(self, facts: EngineFacts = FACTS) -> None:
        self.facts = facts
        self.requests: list[EngineRequest] = []
        self.queues: dict[str, asyncio.Queue[Chunk | Exception | None]] = {}
        self.begun = asyncio.Event()
        self.stopped: list[str] = []
        self.closed_sessions: list[str] = []
        self.may_close_sessions = asyncio.Event()
        self.may_close_sessions.set()
        self.pings = 0
        self.ping_error: Exception | None = None
        self.is_closed = False
        self.pulled = 0
        self.when_cancelled: Chunk | Exception | None = None
        self.on_death: Callable[[str], None] = lambda reason: None

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        self.on_death = on_death
        return self.facts

    def pulled_bytes(self) -> int:
        return self.pulled

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        queue = self.queues[request.id] = asyncio.Queue()
        self.begun.set()
        try:
            while (said := await queue.get()) is not None:
                if isinstance(said, Exception):
                    raise said
                yield said
        except asyncio.CancelledError:
            if isinstance(self.when_cancelled, Exception):
                raise self.when_cancelled from None
            if self.when_cancelled is not None:
                yield self.when_cancelled
            raise
        finally:
            self.stopped.append(request.id)

    async def ping(self) -> None:
        self.pings += 1
        if self.ping_error is not None:
            raise self.ping_error

    async def close_session(self, session_id: str) -> None:
        await self.may_close_sessions.wait()
        self.closed_sessions.append(session_id)

    async def close(self) -> None:
        self.is_closed = True


def to_lark(grammar: Grammar) -> str:
    if grammar.source == "wrong":
        raise GrammarError("`$.type`: wrong")
    return f"start: /{grammar.source}/"


class Feed:
    """A feed of events without an engine. Of five blocks, two have been evicted."""

    def __init__(self, endpoints: EventEndpoints, block_size: int, on_events: Callable[[KvEvents], None]) -> None:
        self.mirror = BlockMirror(block_size)
        self.mirror.apply([EngineStored([1, 2, 3, 4, 5], None, [*range(5 * block_size)], block_size), EngineRemoved([4, 5])])
        self.made_with = endpoints, block_size
        self.on_events = on_events
        self.is_open = False

    async def start(self) -> None:
        self.is_open = True

    async def close(self) -> None:
        self.is_open = False


class Rig:
    """A backend on the engine above, and everything that it emitted."""

    def __init__(self, facts: EngineFacts = FACTS, **settings: Any) -> None:
        self.engine = EngineByHand(facts)
        self.failures = 0
        self.segments: list[Segment] = []
        self.events: list[KvEvents] = []
        self.reports: list[TransferReport] = []
        self.emits = 0
        self.feeds: list[Feed] = []
        self.make_feed = Feed
        self._emitted = asyncio.Event()
        options: dict[str, Any] = {"max_sessions": 2, "session_grace": 0.0, **settings}
        self.backend = ExternalBackend(MODEL, self.engine, CompileQueue(to_lark), self._make_feed, self._fail, **options)

    def _make_feed(self, endpoints: EventEndpoints, block_size: int, on_events: Callable[[KvEvents], None]) -> Feed:
        self.feeds.append(self.make_feed(endpoints, block_size, on_events))
        return self.feeds[-1]

    def _fail(self) -> None:
        self.failures += 1

    def emit(self, segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = ()) -> None:
        self.emits += 1
        self.reports += transfers
        self.segments += segments
        if events is not None:
            self.events.append(events)
        self._emitted.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self._emitted.clear()
                await self._emitted.wait()

    async def begin(self, request: Submit) -> EngineRequest:
        """Submits it and waits until the engine has it."""
        self.engine.begun.clear()
        self.backend.submit(request)
        async with asyncio.timeout(5):
            await self.engine.begun.wait()
        return self.engine.requests[-1]

    def say(self, request: EngineRequest, *said: Chunk | Exception | None) -> None:
        for each in said:
            self.engine.queues[request.id].put_nowait(each)

    def deltas(self, number: int) -> list[Delta]:
        return [segment.delta for segment in self.segments if segment.id == name(number) and segment.delta is not None]

    def terminals(self, number: int) -> list[Terminal]:
        return [segment.terminal for segment in self.segments if segment.id == name(number) and segment.terminal is not None]


@contextlib.asynccontextmanager
async def running(facts: EngineFacts = FACTS, **settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(facts, **settings)
    await rig.backend.start(rig.emit)
    try:
        yield rig
    finally:
        await rig.backend.close()
        assert rig.engine.is_closed


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def submit(number: int, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 8, **fields: Any) -> Submit:
    return Submit(name(number), tuple(prompt), max_tokens, **{"seed": 7, **fields})


def chunk(*token_ids: int, **fields: Any) -> Chunk:
    return Chunk(token_ids, **fields)


async def test_chunks_become_disjoint_deltas() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1))
        assert (request.token_ids, request.max_tokens, request.seed, len(request.id)) == ((1, 2, 3), 8, 7, 32)
        rig.say(request, chunk(5, cached_tokens=2), chunk(6, 7), chunk(8, finish="stop"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.deltas(1) == [Delta(0, (5,), None, PromptReport(2)), Delta(1, (6, 7)), Delta(3, (8,))]
        assert rig.terminals(1) == [Finish("stop")]
        assert rig.backend.stats() == WorkerStats(kv_blocks_total=32, prompt_tokens=3, prompt_tokens_cached=2)


async def test_chunks_of_one_loop_turn_are_emitted_together() -> None:
    async with running() as rig:
        requests = [await rig.begin(submit(number)) for number in range(10)]
        rig.emits = 0
        for request in requests:
            rig.say(request, chunk(5))
        await rig.until(lambda: len(rig.segments) == 10)
        assert rig.emits == 1
        assert rig.backend.stats().running == 10
        assert rig.backend.stats().kv_blocks_used == 10


async def test_the_model_has_the_facts_of_the_engine() -> None:
    facts = EngineFacts(64, 4, 32, 8, EventEndpoints("ipc://here"), ("logprobs", "grammar"))
    async with running(facts) as rig:
        model = rig.backend.model
        assert (model.context_length, model.block_size, model.max_batch) == (64, 4, 8)
        assert model.capabilities == ("sessions", "logprobs", "grammar", "kv_events")
        assert rig.feeds[0].made_with == (EventEndpoints("ipc://here"), 4)
        rig.feeds[0].on_events(KvEvents(0, (BlocksStored(b"", (b"12345678",)),)))
        assert rig.events == [KvEvents(0, (BlocksStored(b"", (b"12345678",)),))]
        assert await rig.backend.snapshot() == rig.feeds[0].mirror.snapshot()
        assert (rig.backend.stats().kv_blocks_cached, rig.backend.stats().kv_blocks_evicted) == (3, 2)
    assert not rig.feeds[0].is_open


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (submit(1, []), "empty_prompt"),
        (submit(1, [1, 100]), "invalid_token"),
        (submit(1, [-1]), "invalid_token"),
        (submit(1, [1], stop_ids=(100,)), "invalid_token"),
        (submit(1, [1], logit_bias=((100, 1.0),)), "invalid_token"),
        (submit(1, [1] * 60, 5), "context_length_exceeded"),
        (submit(1, [1], 5, offset=2), "invalid_offset"),
    ],
)
async def test_an_invalid_request_does_not_reach_the_engine(request_: Submit, code: str) -> None:
    async with running() as rig:
        rig.backend.submit(request_)
        await rig.until(lambda: bool(rig.terminals(1)))
        (fault,) = rig.terminals(1)
        assert isinstance(fault, Fault)
        assert fault.code == code
        assert not rig.engine.requests


async def test_an_engine_without_grammar_does_not_announce_it_and_refuses_it() -> None:
    async with running(EngineFacts(64, 4, capabilities=("logprobs",))) as rig:
        assert "grammar" not in rig.backend.model.capabilities
        rig.backend.submit(submit(1, grammar=Grammar("regex", "a+")))
        await rig.until(lambda: bool(rig.terminals(1)))
        (fault,) = rig.terminals(1)
        assert isinstance(fault, Fault)
        assert fault.code == "unsupported"
        assert not rig.engine.requests


async def test_a_root_is_the_engines_salt() -> None:
    async with running() as rig:
        assert (await rig.begin(submit(1))).salt is None
        assert (await rig.begin(submit(2, root=b"\x0a" * 16))).salt == "0a" * 16


async def test_an_engine_that_would_share_kv_between_tenants_refuses() -> None:
    async with running(EngineFacts(64, 4, capabilities=("logprobs",))) as rig:
        rig.backend.submit(submit(1, root=b"\x0a" * 16))
        await rig.until(lambda: bool(rig.terminals(1)))
        (fault,) = rig.terminals(1)
        assert isinstance(fault, Fault)
        assert (fault.code, "--share-prefixes" in fault.message) == ("unsupported", True)
        assert not rig.engine.requests
        assert await rig.begin(submit(2)), "without tenants it may share"


async def test_a_continued_generation_counts_the_earlier_tokens() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1, [1, 2, 3, 8, 9], 6, offset=2, min_tokens=3))
        assert (request.token_ids, request.max_tokens, request.min_tokens) == ((1, 2, 3, 8, 9), 4, 1)
        assert request.seed != 7
        rig.say(request, chunk(5), chunk(6, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert [delta.offset for delta in rig.deltas(1)] == [2, 3]


@pytest.mark.parametrize(("seed", "expected"), [(0, 0), (2**63 - 1, 2**63 - 1), (2**64 - 1, 2**63 - 1), (-1, 2**63 - 1), (2**63, 0)])
async def test_every_seed_fits_the_engine(seed: int, expected: int) -> None:
    async with running() as rig:
        assert (await rig.begin(submit(1, seed=seed))).seed == expected
        behind = await rig.begin(submit(2, [1, 2, 3, 8, 9], 6, offset=2, seed=seed))
        assert behind.seed is not None
        assert 0 <= behind.seed < 2**63
        assert behind.seed != expected


async def test_a_drawn_seed_is_not_sent() -> None:
    async with running() as rig:
        assert (await rig.begin(submit(1, is_seed_drawn=True))).seed is None
        assert (await rig.begin(submit(2, [1, 2, 3, 8, 9], 6, offset=2, is_seed_drawn=True))).seed is None


async def test_under_a_grammar_a_drawn_seed_is_sent() -> None:
    drawn: dict[str, Any] = {"is_seed_drawn": True, "grammar": Grammar("regex", "a+")}
    async with running() as rig:
        first = await rig.begin(submit(1, **drawn))
        again = await rig.begin(submit(2, [1, 2, 3, 8, 9], offset=2, **drawn))
        assert (first.seed, again.seed) == (7, 7)


async def test_only_the_prompt_is_wanted() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1, max_tokens=0, prompt_logprobs=True))
        assert (request.max_tokens, request.prompt_logprobs) == (1, True)
        known = (None, TokenLogprob(-1.0), TokenLogprob(-2.0))
        rig.say(request, chunk(5, finish="length", prompt_logprobs=known, cached_tokens=0))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.deltas(1) == [Delta(0, (), None, PromptReport(0, pack_logprobs(known)))]
        assert rig.terminals(1) == [Finish("length")]


@pytest.mark.parametrize("grammar", [None, Grammar("regex", "a+")])
async def test_a_generation_that_another_worker_completed_needs_no_engine(grammar: Grammar | None) -> None:
    async with running() as rig:
        turn = SessionTurn("s", "open", epoch=1)
        rig.backend.submit(submit(1, [1] * 64, 4, offset=4, grammar=grammar, session=turn))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.deltas(1) == [Delta(4, (), None, PromptReport(0, None, "open"))]
        assert rig.terminals(1) == [Finish("length")]
        assert not rig.engine.requests
        assert (rig.backend.stats().running, rig.backend.stats().kv_blocks_used) == (0, 0)


async def test_marks_are_a_wish_and_nothing_is_reported_as_kept() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1, marks=(Mark(2, 60.0), Mark(3, 20.0))))
        assert (request.keep_seconds, request.session_seconds) == (60.0, 0.0)
        rig.say(request, chunk(5, cached_tokens=1, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert [delta.prompt for delta in rig.deltas(1)] == [PromptReport(1)]


async def test_every_field_of_a_request_reaches_the_engine() -> None:
    asked: dict[str, Any] = {
        "stop_ids": (4,),
        "logit_bias": ((3, 1.5),),
        "logprobs": 2,
        "ignore_eos": True,
        "priority": 3,
    }
    async with running() as rig:
        request = await rig.begin(submit(1, retention_seconds=5.0, **asked))
        assert {field: getattr(request, field) for field in asked} == asked
        assert (request.keep_seconds, request.session_seconds) == (5.0, 0.0)
        assert request.session_id is None


async def test_the_rate_of_prompts_is_measured_while_nothing_else_runs() -> None:
    now = 0.0
    async with running(replace(FACTS, context_length=4096), clock=lambda: now) as rig:
        request = await rig.begin(submit(1, [1] * 1000))
        now = 2.0
        rig.say(request, chunk(5, cached_tokens=200))
        await rig.until(lambda: bool(rig.deltas(1)))
        assert rig.backend.stats().prefill_rate == pytest.approx(400)
        other = await rig.begin(submit(2, [1] * 1000))
        now = 100.0
        rig.say(other, chunk(5, cached_tokens=0))
        await rig.until(lambda: bool(rig.deltas(2)))
        assert rig.backend.stats().prefill_rate == pytest.approx(400), "another one ran"


TRANSFER = bytes(range(16))
MOVES = replace(FACTS, moves=KvMoves("ticket", b"fingerprint", "tcp://127.0.0.1:1", 64))


async def test_a_prompt_for_another_engine_ends_with_a_ticket() -> None:
    ticket = Ticket(time.time(), 12.0, b"where").pack()
    async with running(MOVES) as rig:
        assert (rig.backend.model.kv_fingerprint, rig.backend.model.kv_handover) == (b"fingerprint", "ticket")
        assert (rig.backend.model.kv_address, rig.backend.model.kv_block_bytes) == ("tcp://127.0.0.1:1", 64)
        request = await rig.begin(submit(1, [1, 2, 3, 8], 1, offset=1, export=Export(TRANSFER, 5.0)))
        assert (request.token_ids, request.max_tokens, request.export) == ((1, 2, 3, 8), 1, Export(TRANSFER, 5.0))
        rig.say(request, chunk(5, cached_tokens=2), chunk(finish="length", ticket=ticket))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.deltas(1) == [Delta(1, (), None, PromptReport(2))], "its token is not used"
        assert rig.terminals(1) == [Finish("length")]
        assert rig.reports == [TransferReport(TRANSFER, ticket=ticket)]
        assert rig.backend.stats().exports == 1
        rig.backend.end_transfer(TRANSFER)
        assert rig.backend.stats().exports == 0


async def test_under_a_grammar_both_engines_have_the_same_prompt() -> None:
    """The target generates what came before again, from the start of the grammar."""
    grammar: dict[str, Any] = {"grammar": Grammar("regex", "a+"), "offset": 1}
    async with running(MOVES) as rig:
        exported = await rig.begin(submit(1, [1, 2, 3, 8], 1, export=Export(TRANSFER, 5.0), **grammar))
        source = KvSource(TRANSFER, "", ticket=Ticket(time.time(), 12.0, b"where").pack())
        taken = await rig.begin(submit(2, [1, 2, 3, 8], 8, source=source, **grammar))
        assert exported.token_ids == taken.token_ids == (1, 2, 3)
        assert (exported.lark, taken.source) == (None, source)
        rig.say(exported, chunk(9, finish="length", ticket=source.ticket))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.terminals(1) == [Finish("length")], "its token is not compared with what came before"


async def test_kv_that_does_not_come_is_computed() -> None:
    async with running(MOVES) as rig:
        request = await rig.begin(submit(1, source=KvSource(TRANSFER, "", ticket=b"not one")))
        assert request.source is None
        rig.say(request, chunk(5, 6, finish="stop"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert [delta.token_ids for delta in rig.deltas(1)] == [(5, 6)]
        assert [report.outcome for report in rig.reports] == ["failed"]


async def test_an_engine_whose_kv_does_not_move() -> None:
    async with running() as rig:
        exported = await rig.begin(submit(1, max_tokens=0, export=Export(TRANSFER, 5.0)))
        taken = await rig.begin(submit(2, source=KvSource(TRANSFER, "tcp://a:1")))
        assert (exported.export, taken.source) == (None, None)
        rig.say(exported, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.terminals(1) == [Finish("length")]
        assert [report.outcome for report in rig.reports] == ["failed", "failed"]


async def test_one_half_of_a_pair_runs_nothing_alone() -> None:
    facts = replace(FACTS, moves=KvMoves("meeting", b"fingerprint", computes=False))
    async with running(facts) as rig:
        rig.backend.submit(submit(1))
        await rig.until(lambda: bool(rig.terminals(1)))
        (fault,) = rig.terminals(1)
        assert isinstance(fault, Fault)
        assert (fault.code, fault.retryable) == ("unsupported", True)
        assert not rig.engine.requests
        assert (await rig.begin(submit(2, source=KvSource(TRANSFER, "tcp://a:1")))).source is not None


async def test_cancelled_before_its_task_has_begun() -> None:
    async with running() as rig:
        rig.backend.submit(submit(1, session=SessionTurn("s", "open", epoch=1)))
        rig.backend.cancel(name(1))
        following = await rig.begin(submit(2))
        rig.say(following, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(2)))
        assert len(rig.engine.requests) == 1
        (report,) = await rig.backend.describe_sessions(["s"])
        assert report.active_turns == 0
        assert not rig.deltas(1) + rig.terminals(1)


async def test_a_cancel_stops_the_engine_and_the_deltas() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1))
        rig.say(request, chunk(5))
        await rig.until(lambda: bool(rig.deltas(1)))
        rig.say(request, chunk(6), chunk(7, finish="length"))
        rig.backend.cancel(name(1))
        rig.backend.cancel(name(1))
        assert (rig.backend.stats().running, rig.backend.stats().queued, rig.backend.stats().kv_blocks_used) == (0, 0, 0)
        following = await rig.begin(submit(2))
        assert rig.engine.stopped == [request.id]
        rig.say(following, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(2)))
        assert (len(rig.deltas(1)), rig.terminals(1)) == (1, [])


async def test_cancelled_between_a_chunk_and_its_emission() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1))
        rig.say(request, chunk(5))
        # The task takes it in this turn of the loop, and it is emitted in the next.
        await asyncio.sleep(0)
        rig.backend.cancel(name(1))
        following = await rig.begin(submit(2))
        rig.say(following, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(2)))
        assert not rig.deltas(1) + rig.terminals(1)


async def test_an_id_may_be_reused_while_the_engine_ends_the_first() -> None:
    async with running() as rig:
        first = await rig.begin(submit(1))
        rig.backend.cancel(name(1))
        second = await rig.begin(submit(1))
        assert first.id != second.id
        rig.say(second, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert [delta.token_ids for delta in rig.deltas(1)] == [(5,)]


@pytest.mark.parametrize("said", [chunk(9), chunk(9, finish="length"), EngineRefused(Fault("aborted", "as you asked"))])
async def test_output_after_a_cancel_is_dropped(said: Chunk | Exception) -> None:
    async with running() as rig:
        rig.engine.when_cancelled = said
        first = await rig.begin(submit(1))
        rig.backend.cancel(name(1))
        second = await rig.begin(submit(1))
        while rig.engine.stopped != [first.id]:
            await asyncio.sleep(0)
        rig.say(second, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert ([delta.token_ids for delta in rig.deltas(1)], rig.terminals(1)) == ([(5,)], [Finish("length")])


@pytest.mark.parametrize(
    ("said", "code", "retryable"),
    [
        (EngineRefused(Fault("queue_full", "later", retryable=True)), "queue_full", True),
        (ValueError("odd"), "engine_error", False),
        (None, "no_terminal", True),
    ],
)
async def test_a_failed_generation_does_not_affect_others(said: Exception | None, code: str, retryable: bool) -> None:
    async with running() as rig:
        request, other = await rig.begin(submit(1)), await rig.begin(submit(2))
        rig.say(request, chunk(5), said)
        await rig.until(lambda: bool(rig.terminals(1)))
        (fault,) = rig.terminals(1)
        assert isinstance(fault, Fault)
        assert (fault.code, fault.retryable) == (code, retryable)
        rig.say(other, chunk(6, finish="length"))
        await rig.until(lambda: bool(rig.terminals(2)))
        assert rig.terminals(2) == [Finish("length")]
        assert rig.failures == 0


@pytest.mark.parametrize("by", ["callback", "generation", "ping"])
async def test_the_death_of_the_engine_is_one_fault_per_generation(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_backend, "WATCH_SECONDS", 0.01)
    async with running() as rig:
        requests = [await rig.begin(submit(number)) for number in range(5)]
        for request in requests[:3]:
            rig.say(request, chunk(5))
        await rig.until(lambda: len(rig.segments) >= 3)
        if by == "callback":
            rig.engine.on_death("killed")
        elif by == "generation":
            for request in requests:
                rig.say(request, EngineDied("killed"))
        else:
            rig.engine.ping_error = EngineDied("killed")
        await rig.until(lambda: rig.failures > 0 and all(rig.terminals(number) for number in range(5)))
        rig.engine.on_death("again")
        rig.backend.submit(submit(9))
        await rig.until(lambda: bool(rig.terminals(9)))
        assert rig.failures == 1
        fault = Fault("engine_failed", "the engine has failed: killed", retryable=True)
        assert [rig.terminals(number) for number in (0, 1, 2, 3, 4, 9)] == [[fault]] * 6
        assert (rig.backend.stats().running, rig.backend.stats().queued) == (0, 0)


async def test_a_busy_engine_without_output_is_pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_backend, "WATCH_SECONDS", 0.01)
    async with running() as rig:
        await rig.begin(submit(1))
        await rig.until(lambda: rig.emits >= 3)
        assert rig.engine.pings >= 2
        rig.backend.cancel(name(1))


async def test_silence_counts_from_the_engines_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not from the last look: with its ping, the engine would be silent for more than twice as long as its front ends expect."""
    monkeypatch.setattr(external_backend, "WATCH_SECONDS", 1000.0)
    now = 0.0
    rig = Rig(clock=lambda: now)
    now = 999.99
    await rig.backend.start(rig.emit)
    await rig.begin(submit(1))
    assert rig.engine.pings == 0
    now = 1000.0
    await rig.until(lambda: rig.engine.pings == 1)
    await rig.backend.close()


async def test_a_failed_ping_is_repeated(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is neither a sign of life nor a death: the front end decides how long it waits."""
    monkeypatch.setattr(external_backend, "WATCH_SECONDS", 0.01)
    async with running() as rig:
        rig.engine.ping_error = RuntimeError("odd")
        await rig.begin(submit(1))
        async with asyncio.timeout(5):
            while rig.engine.pings < 3:
                await asyncio.sleep(0)
        assert (rig.emits, rig.failures) == (0, 0)
        assert "pinging byhand failed" in caplog.text
        rig.engine.ping_error = None
        await rig.until(lambda: rig.emits > 0)


async def test_a_grammar_goes_to_the_engine_in_lark() -> None:
    async with running() as rig:
        request = await rig.begin(submit(1, grammar=Grammar("regex", "a+")))
        assert request.lark == "start: /a+/"


async def test_a_wrong_grammar_is_refused() -> None:
    async with running() as rig:
        rig.backend.submit(submit(1, grammar=Grammar("regex", "wrong")))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.terminals(1) == [Fault("invalid_grammar", "`$.type`: wrong")]


@pytest.mark.parametrize("sizes", [(4,), (1, 3), (2, 2), (3, 1), (1, 1, 1, 1)])
async def test_under_a_grammar_earlier_tokens_are_generated_again_and_skipped(sizes: tuple[int, ...]) -> None:
    async with running() as rig:
        request = await rig.begin(submit(1, [1, 2, 3, 8, 9], 6, offset=2, grammar=Grammar("regex", "a+"), logprobs=0))
        assert (request.token_ids, request.max_tokens, request.seed) == ((1, 2, 3), 6, 7)
        made, start = (8, 9, 10, 11), 0
        for size in sizes:
            tokens = made[start : start + size]
            start += size
            entries = tuple(TokenLogprob(-float(token)) for token in tokens)
            rig.say(request, chunk(*tokens, logprobs=entries, finish="stop" if start == 4 else None))
        await rig.until(lambda: bool(rig.terminals(1)))
        deltas = rig.deltas(1)
        assert deltas[0].offset == 2
        assert [token for delta in deltas for token in delta.token_ids] == [10, 11]
        assert [entry.logprob for delta in deltas for entry in delta.logprobs or ()] == [-10.0, -11.0]
        assert rig.terminals(1) == [Finish("stop")]


@pytest.mark.parametrize(
    "said",
    [[chunk(8, 7, finish="stop")], [chunk(8, finish="stop")], [chunk(8), chunk(finish="stop")], [chunk(finish="stop")]],
    ids=["another token", "an end before", "an end behind", "an end alone"],
)
async def test_other_tokens_under_the_grammar_end_the_generation(said: list[Chunk]) -> None:
    async with running() as rig:
        request = await rig.begin(submit(1, [1, 2, 3, 8, 9], 6, offset=2, grammar=Grammar("regex", "a+")))
        rig.say(request, *said)
        await rig.until(lambda: bool(rig.terminals(1)))
        (fault,) = rig.terminals(1)
        assert isinstance(fault, Fault)
        assert fault.code == "grammar_diverged"
        assert not rig.deltas(1)


async def test_the_engine_gets_an_opaque_session_name() -> None:
    async with running() as rig:
        turn = SessionTurn("tenant/agent", "open", 300.0, 1)
        request = await rig.begin(submit(1, session=turn))
        assert request.session_id is not None
        assert len(request.session_id) == 32
        assert "agent" not in request.session_id
        assert (request.keep_seconds, request.session_seconds) == (0.0, 300.0)
        rig.backend.close_session("tenant/agent", 1)
        assert not rig.engine.closed_sessions
        rig.say(request, chunk(5, 6, cached_tokens=1, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        assert rig.deltas(1)[0].prompt == PromptReport(1, None, "open")
        second = await rig.begin(submit(2, session=SessionTurn("tenant/agent", "continue", 300.0, 1)))
        assert second.session_id is None
        assert rig.engine.closed_sessions == [request.session_id]
        assert rig.backend.stats().sessions == 0


async def test_a_session_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_backend, "WATCH_SECONDS", 0.01)
    now = 100.0
    async with running(clock=lambda: now) as rig:
        request = await rig.begin(submit(1, session=SessionTurn("s", "open", 30.0, 1)))
        rig.say(request, chunk(5, finish="length"))
        await rig.until(lambda: bool(rig.terminals(1)))
        while not (await rig.backend.describe_sessions(["s"]))[0].expires_in:
            await asyncio.sleep(0)
        (report,) = await rig.backend.describe_sessions(["s"])
        assert (report.expires_in, report.turns, report.prompt_tokens, report.generated_tokens) == (30.0, 1, 3, 1)
        now = 131.0
        async with asyncio.timeout(5):
            while not rig.engine.closed_sessions:
                await asyncio.sleep(0.005)
        assert not await rig.backend.describe_sessions(["s"])


async def test_close_waits_for_sessions_that_it_ends() -> None:
    """The last turn of a closed session ends with the backend, and then the engine closes the session."""
    async with running() as rig:
        rig.engine.may_close_sessions.clear()
        await rig.begin(submit(1, session=SessionTurn("s", "open", epoch=1)))
        rig.backend.close_session("s", 1)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class FeedThatCannotBeMade(Feed):
    def __init__(self, *_: object) -> None:
        raise OSError("no such address")


class FeedThatCannotStart(Feed):
    async def start(self) -> None:
        raise OSError("no such address")


@pytest.mark.parametrize("feed", [FeedThatCannotBeMade, FeedThatCannotStart])
async def test_a_failure_after_the_engine_started_closes_the_engine(feed: type[Feed]) -> None:
    rig = Rig(EngineFacts(64, 4, events=EventEndpoints("ipc://nowhere")))
    rig.make_feed = feed
    with pytest.raises(OSError, match="no such address"):
        await rig.backend.start(rig.emit)
    assert rig.engine.is_closed


async def test_close_waits_for_running_generations() -> None:
    async with running() as rig:
        requests = [await rig.begin(submit(number)) for number in range(3)]
    assert sorted(rig.engine.stopped) == sorted(request.id for request in requests)
    rig.engine.on_death("after the end")
    assert rig.failures == 0


async def flooded(rig: Rig, flood: int, others: int) -> None:
    """Tenant a, then tenant b, whose prompts begin with 2. The engine computes eight at once and gets one more."""
    for number in range(flood):
        rig.backend.submit(submit(number, (1, number), lane="a"))
    for number in range(flood, flood + others):
        rig.backend.submit(submit(number, (2, number), lane="b"))
    await settled(rig)


async def settled(rig: Rig) -> None:
    """Every task that can go on has: with no task switch for the last ones, nothing more comes."""
    before = -1
    while before < len(rig.engine.requests):
        before = len(rig.engine.requests)
        for _ in range(10):
            await asyncio.sleep(0)


async def test_tenants_get_the_engine_in_turn() -> None:
    async with running() as rig:
        await flooded(rig, 30, 5)
        assert [request.token_ids[0] for request in rig.engine.requests] == [1] * 9 + [2], "b has a place though a took all"
        assert (rig.backend.stats().running, rig.backend.stats().queued) == (0, 35)
        for number in range(35):
            rig.say(rig.engine.requests[number], chunk(5, finish="stop"))
            await rig.until(lambda: bool(rig.segments))
            rig.segments.clear()
            await settled(rig)
        order = [request.token_ids[0] for request in rig.engine.requests]
        assert order[10:].index(2) <= 2
        assert [place for place, lane in enumerate(order) if lane == 2][-1] <= 20, order
        assert len({request.token_ids for request in rig.engine.requests}) == 35


async def test_without_tenants_the_engine_gets_everything_at_once() -> None:
    async with running() as rig:
        for number in range(30):
            rig.backend.submit(submit(number, (1, number)))
        await settled(rig)
        assert len(rig.engine.requests) == 30


async def test_what_is_cancelled_while_it_waits_never_reaches_the_engine() -> None:
    async with running() as rig:
        await flooded(rig, 12, 0)
        for number in (9, 0):
            rig.backend.cancel(name(number))
        await settled(rig)
        assert sorted(request.token_ids[1] for request in rig.engine.requests) == [*range(9), 10]
        assert rig.backend.stats().queued == 10


async def test_what_waits_when_the_engine_dies_fails_with_the_rest() -> None:
    async with running() as rig:
        await flooded(rig, 12, 1)
        rig.engine.on_death("killed")
        await rig.until(lambda: len(rig.segments) == 13)
        assert {segment.terminal.code for segment in rig.segments if isinstance(segment.terminal, Fault)} == {"engine_failed"}
        await settled(rig)
        assert len(rig.engine.requests) == 10
