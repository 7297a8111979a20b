"""A prompt computed by one worker and continued by another: whoever fails, the tokens are the same, and nothing is left of the transfer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from penstock.backends.simulator import Simulator
from penstock.cluster import dispatch, suspects
from penstock.cluster.dispatch import MAX_FRUITLESS_MIGRATIONS
from penstock.cluster.pool import Member
from penstock.cluster.sessions import moves
from penstock.config.front_end import RouterSettings
from penstock.router.affinity import Binding, MemoryStore
from penstock.router.policy import Hints, SessionWish
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import (
    Delta,
    Fault,
    Fetch,
    Finish,
    KvHandover,
    Mark,
    PromptReport,
    Role,
    Segment,
    SessionTurn,
    Submit,
    TransferOutcome,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import Emit, WantImages, wants_none
from workers import FrontEnd, Reader, Worker, expected, make_model, submit, until

PROMPT = 320
POISON = 666
ALWAYS = RouterSettings(disaggregation="always")


class Mover(Simulator):
    """A simulator that reports on transfers what the test says. It computes what it has not pulled, so tokens are always right."""

    outcome: TransferOutcome | None = "done"
    """None: it says nothing."""
    is_held = False
    """It begins nothing that comes from now on."""
    fault: Fault | None = None
    """It fails everything with this."""
    dies_after: int | None = None
    """It dies of the poisoned request when that has made this many tokens here; with 0, when it comes."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.submits: list[Submit] = []
        self.fetches: list[Fetch] = []
        self.ended: list[bytes] = []
        self.held: list[Submit] = []
        self.on_poison: Callable[[], None] = lambda: None

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        self._emit = emit
        await super().start(emit, want)

    def submit(self, request: Submit) -> None:
        self.submits.append(request)
        if request.export is not None and self.model.kv_handover == "ticket" and self.outcome is not None:
            asyncio.get_running_loop().call_soon(self._emit, (), None, [TransferReport(request.export.transfer, ticket=b"a ticket")])
        if request.seed == POISON and self.dies_after == 0:
            asyncio.get_running_loop().call_soon(self.on_poison)
        if request.source is not None and request.source.transfer not in [fetch.source.transfer for fetch in self.fetches]:
            self.answer(request.source.transfer)
        if self.fault is not None:
            asyncio.get_running_loop().call_soon(self.emit, Segment(request.id, None, self.fault))
        elif self.is_held:
            self.held.append(request)
        else:
            self._compute(request)

    def check_fatal(self) -> None:
        poisoned = [each for each in self._scheduler.decoding.values() if each.request.seed == POISON]
        if self.dies_after and any(each.position - each.request.offset >= self.dies_after for each in poisoned):
            self.on_poison()

    def _compute(self, request: Submit) -> None:
        super().submit(structs.replace(request, export=None, source=None))

    def cancel(self, generation: bytes) -> None:
        self.held = [request for request in self.held if request.id != generation]
        super().cancel(generation)

    def fetch(self, request: Fetch) -> None:
        self.fetches.append(request)
        self.answer(request.source.transfer)

    def end_transfer(self, transfer: bytes) -> None:
        self.ended.append(transfer)

    def stats(self) -> WorkerStats:
        """With a rate that makes moving worth it."""
        return structs.replace(super().stats(), prefill_rate=5000.0)

    def let_go(self) -> None:
        self.is_held = False
        for request in self.held:
            self._compute(request)
        self.held = []

    def emit(self, segment: Segment) -> None:
        self._emit([segment], None)

    def answer(self, transfer: bytes) -> None:
        if self.outcome is not None:
            asyncio.get_running_loop().call_soon(self._emit, (), None, [TransferReport(transfer, self.outcome, 20, 20 * 64, 0.01)])


class MovingWorker(Worker):
    simulator: Mover

    def __init__(self, folder: Path, name: str, role: Role = "aggregated", handover: KvHandover = "blocks", batch: int = 1000) -> None:
        kv: dict[str, Any] = {"kv_fingerprint": b"same", "kv_address": f"unix:{name}.kv", "kv_block_bytes": 64, "kv_handover": handover}
        model = make_model(roles=(role,), max_batch=batch, **kv)
        super().__init__(folder, name, model, Mover, step_ms=1.0, kv_block_bytes=64, fatal_seed=POISON)
        self.simulator.on_poison = self.break_links

    @property
    def submits(self) -> list[Submit]:
        return self.simulator.submits


class Cluster:
    """Workers by name: p… are prefill workers, d… decode workers, others neither."""

    def __init__(self, workers: dict[str, MovingWorker], front_end: FrontEnd) -> None:
        self.workers = workers
        self.front_end = front_end
        self.transfers = front_end.dispatcher.transfers

    def __getitem__(self, name: str) -> MovingWorker:
        return self.workers[name]

    def member(self, name: str) -> Member:
        member = self.front_end.pool.find(name)
        assert member is not None
        return member

    async def check_settled(self) -> None:
        """Nothing is left of any transfer, here and at the workers that are connected."""
        await until(lambda: not any(worker.runtime.open_transfers for worker in self.workers.values()))
        assert not self.transfers.open
        assert not self.front_end.dispatcher.shared_prompts
        for member in self.front_end.pool.members:
            assert member.link.reserved == 0, member.name
            await until(lambda member=member: self.front_end.router.load_of(member.name) == 0)  # type: ignore[misc]


@asynccontextmanager
async def cluster(
    folder: Path, names: str, router: RouterSettings = ALWAYS, handover: KvHandover = "blocks", batch: int = 1000, **options: Any
) -> AsyncIterator[Cluster]:
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    workers = {name: MovingWorker(folder, name, roles.get(name[0], "aggregated"), handover, batch) for name in names.split()}
    for worker in workers.values():
        await worker.__aenter__()
    try:
        async with FrontEnd(list(workers.values()), router=router, **options) as front_end:
            made = Cluster(workers, front_end)
            yield made
            await made.check_settled()
    finally:
        for worker in workers.values():
            await worker.__aexit__()


async def finished(task: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20):
        await asyncio.shield(task)


async def test_one_worker_computes_and_another_continues(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        request = submit(1, 50, PROMPT, logprobs=2, prompt_logprobs=True)
        turn, reader = await both.front_end.run(request)
        assert reader.tokens == expected(1, 50)
        (first,), (second,), (fetch,) = both["p"].submits, both["d"].submits, both["d"].simulator.fetches
        assert (first.max_tokens, first.offset, first.token_ids) == (1, 0, request.token_ids)
        assert (second.max_tokens, second.offset, second.token_ids) == (50, 1, (*request.token_ids, reader.tokens[0]))
        assert (first.prompt_logprobs, second.prompt_logprobs, second.export) == (True, False, None)
        assert first.export is not None
        assert second.source is not None
        assert first.export.transfer == second.source.transfer == fetch.source.transfer
        assert (fetch.source.address, fetch.source.waits, fetch.token_ids) == ("unix:p.kv", True, request.token_ids)
        delta, terminal = reader.read()
        assert delta is not None
        assert delta.prompt is not None
        assert delta.prompt.logprobs is not None
        assert delta.logprobs is not None
        assert (len(delta.logprobs), terminal) == (50, Finish("length"))
        assert both.transfers.counts == {("prefill", "done"): 1}
        assert (turn.worker, turn.describe_route(has_costs=False)[0]["kv_from"]) == ("d", {"worker": "p", "reason": "prefill"})


async def test_choices_and_many_prompts_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p0 p1 d0 d1") as both:
        ids = submit(1, 40, PROMPT).token_ids
        started = [both.front_end.start(structs.replace(submit(n, 40), token_ids=ids, prompt=b"s" * 16)) for n in range(4)]
        started += [both.front_end.start(submit(n, 40, PROMPT)) for n in range(4, 40)]
        for _, task in started:
            await finished(task)
        assert [reader.tokens for reader, _ in started] == [expected(n, 40) for n in range(40)]
        assert {request.max_tokens for name in ("p0", "p1") for request in both[name].submits} == {1}
        assert both.transfers.counts == {("prefill", "done"): 40}
        assert all(both[name].simulator.fetches for name in ("d0", "d1"))


async def test_an_end_at_the_first_token_is_the_end(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        reader, task = await in_prefill(both, None)
        (request,) = both["p"].simulator.held
        both["p"].simulator.emit(Segment(request.id, None, Finish("stop")))
        await finished(task)
        assert reader.read() == (None, Finish("stop"))
        assert both["d"].submits == []
        assert both.transfers.counts == {("prefill", "cancelled"): 1}


@pytest.mark.parametrize("fate", ["opens", "dies", "is late"])
async def test_a_session_is_opened_also_by_a_turn_that_ends_at_its_first_token(
    tmp_path: Path, fate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fate == "is late":
        monkeypatch.setattr(dispatch, "OPENING_SECONDS", 0.01)
    async with cluster(tmp_path, "p d") as both:
        both["p"].simulator.is_held = True
        both["d"].simulator.is_held = fate != "opens"
        turn = both.front_end.turn(Hints(SessionWish("s")))
        await both.front_end.sessions.begin(turn, "simulator")
        reader, task = both.front_end.start(submit(1, 50, PROMPT, min_tokens=5), turn)
        await until(lambda: bool(both["p"].simulator.held))
        (first,) = both["p"].simulator.held
        token = Delta(0, expected(1, 1), None, PromptReport(0))
        both["p"].simulator.emit(Segment(first.id, token, Finish("stop")))
        if fate == "dies":
            await until(lambda: bool(both["d"].simulator.held))
            both["d"].break_links()
        await finished(task)
        if fate == "is late":
            await until(lambda: bool(both["d"].submits) and both["d"].runtime.is_idle)
        both.front_end.sessions.end(turn)
        delta, terminal = reader.read()
        assert delta is not None
        assert (delta.token_ids, terminal) == (expected(1, 1), Finish("stop"))
        (second,) = both["d"].submits
        assert (second.offset, second.max_tokens, second.min_tokens) == (1, 1, 0)
        assert (turn.state, both["d"].simulator.stats().sessions) == ("open", fate == "opens")


async def test_a_session_is_leased_where_it_is_decoded(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        for _ in range(2):
            turn, _ = await both.front_end.run(submit(1, 20, PROMPT), Hints(SessionWish("s")))
            assert (turn.state, turn.worker) == ("open", "d")
        assert [request.session for request in both["p"].submits] == [None] * len(both["p"].submits)
        assert all(isinstance(request.session, SessionTurn) for request in both["d"].submits)
        assert (both["p"].simulator.stats().sessions, both["d"].simulator.stats().sessions) == (0, 1)


async def test_a_marked_prompt_is_written_once_and_kept_by_both(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        turn, reader = await both.front_end.run(submit(1, 20, PROMPT, marks=(Mark(PROMPT, 60.0),)))
        delta, _ = reader.read()
        assert delta is not None
        assert delta.prompt is not None
        assert (delta.prompt.retained, delta.prompt.written) == ((Mark(PROMPT, 60.0),), (PROMPT,))
        assert [each["tokens"] for each in turn.describe_retained()] == [PROMPT]
        assert [both[name].simulator.stats().kv_blocks_leased for name in "pd"] == [PROMPT // 16] * 2


async def test_a_key_is_bound_to_the_worker_that_decodes(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        await both.front_end.run(submit(1, 20, PROMPT), Hints(affinity="key"))
        await until(lambda: both.front_end.sessions.is_idle)
        turn = both.front_end.turn(Hints(affinity="key"))
        await both.front_end.sessions.begin(turn, "simulator")
        assert turn.affinity is not None
        assert turn.affinity.worker == "d"


async def test_what_needs_no_decoding_goes_to_a_prefill_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        await both.front_end.run(submit(1, 1, PROMPT))
        await both.front_end.run(submit(2, 0, PROMPT))
        assert (len(both["p"].submits), both["d"].submits) == (2, [])


@pytest.mark.parametrize("count", [0, 1])
async def test_a_sessions_turn_without_decoding_gets_no_token_from_another_worker(tmp_path: Path, count: int) -> None:
    async with cluster(tmp_path, "p d") as both:
        turn, reader = await both.front_end.run(submit(1, count, PROMPT), Hints(SessionWish("s")))
        assert (reader.tokens, turn.worker, both["p"].submits) == (expected(1, count), "d", [])


@pytest.mark.parametrize("names", ["p0 p1", "d0 d1", "p", "d"])
async def test_a_role_without_workers_is_taken_over(tmp_path: Path, names: str) -> None:
    async with cluster(tmp_path, names) as some:
        started = [some.front_end.start(submit(n, 40, PROMPT)) for n in range(10)]
        for _, task in started:
            await finished(task)
        assert [reader.tokens for reader, _ in started] == [expected(n, 40) for n in range(10)]


@pytest.mark.parametrize("is_given", [True, False], ids=["ticket", "no ticket"])
async def test_engines_of_others_need_a_ticket_and_the_second_makes_all_tokens(tmp_path: Path, is_given: bool) -> None:
    async with cluster(tmp_path, "p d", handover="ticket") as both:
        both["p"].simulator.outcome = "done" if is_given else None
        _, reader = await both.front_end.run(submit(1, 50, PROMPT, logprobs=2))
        assert reader.tokens == expected(1, 50)
        (first,), (second,) = both["p"].submits, both["d"].submits
        assert (first.max_tokens, second.offset, both["d"].simulator.fetches) == (0, 0, [])
        assert (None if second.source is None else second.source.ticket) == (b"a ticket" if is_given else None)
        assert both.transfers.counts == {("prefill", "done" if is_given else "failed"): 1}
        await both.front_end.run(submit(2, 50, PROMPT, prompt_logprobs=True))
        assert len(both["p"].submits) == 1, "who computes the prompt has its logprobs"


async def test_a_pair_whose_transfer_failed_is_not_tried_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        both["d"].simulator.outcome = "failed"
        for number in range(3):
            _, reader = await both.front_end.run(submit(number, 50, PROMPT))
            assert reader.tokens == expected(number, 50)
        assert both.transfers.counts == {("prefill", "failed"): 1}
        assert (len(both["p"].submits), len(both["d"].submits)) == (1, 3)


async def test_what_was_computed_for_a_prompt_was_not_cached(tmp_path: Path) -> None:
    """An engine of others says that a prompt is cached when its KV has come from elsewhere."""
    async with cluster(tmp_path, "p d", handover="ticket") as both:
        both["d"].simulator.is_held = True
        reader, task = both.front_end.start(submit(1, 50, PROMPT))
        await until(lambda: bool(both["d"].simulator.held))
        (request,) = both["d"].simulator.held
        both["d"].simulator.emit(Segment(request.id, Delta(0, expected(1, 50), None, PromptReport(PROMPT)), Finish("length")))
        await finished(task)
        delta, _ = reader.read()
        assert delta is not None
        assert delta.prompt == PromptReport(0)


@pytest.mark.parametrize("fails", [False, True])
async def test_engines_of_others_may_have_to_work_at_the_same_time(tmp_path: Path, fails: bool) -> None:
    async with cluster(tmp_path, "p d", handover="meeting") as both:
        both["p"].simulator.is_held = both["d"].simulator.is_held = True
        both["d"].simulator.outcome = None if fails else "done"
        reader, task = both.front_end.start(submit(1, 50, PROMPT))
        await until(lambda: bool(both["p"].simulator.held and both["d"].simulator.held))
        (first,), (second,) = both["p"].submits, both["d"].submits
        assert first.export is not None
        assert second.source is not None
        assert (first.max_tokens, second.offset, first.export.transfer) == (0, 0, second.source.transfer)
        if fails:
            both["p"].break_links()
            # The other one cannot go on alone. When the first is back, both begin again.
            await until(lambda: len(both["d"].submits) == 2)
            assert [request.id for request in both["d"].simulator.held] == [both["d"].submits[1].id], "its first attempt was cancelled"
            assert both["d"].simulator.ended == [first.export.transfer]
        both["d"].simulator.let_go()
        await finished(task)
        assert reader.tokens == expected(1, 50)
        assert both.transfers.counts["prefill", "lost" if fails else "done"] == 1
        assert both.front_end.dispatcher.migrations["worker_lost"] == fails


@pytest.mark.parametrize("is_retryable", [False, True])
async def test_a_half_that_always_fails_ends_the_generation(tmp_path: Path, is_retryable: bool) -> None:
    async with cluster(tmp_path, "p d", handover="meeting") as both:
        both["p"].simulator.fault = Fault("engine_error", "not this one", is_retryable)
        both["d"].simulator.is_held, both["d"].simulator.outcome = True, None
        _, task = both.front_end.start(submit(1, 50, PROMPT))
        with pytest.raises(GenerationFault, match="not this one"):
            await finished(task)
        assert len(both["p"].submits) == (1 + MAX_FRUITLESS_MIGRATIONS if is_retryable else 1)
        await until(lambda: both["d"].runtime.is_idle)


@pytest.mark.parametrize("names", ["p0 d", "p0 p1 d", "p0 p1 p2 p3 p4 d"])
async def test_engines_that_are_silent_for_long_cost_no_generation(tmp_path: Path, names: str) -> None:
    """One may be in a long step. It is left for one that was not tried; the last one is waited for, as nobody else can do it."""
    async with cluster(tmp_path, names, handover="meeting") as both:
        for worker in both.workers.values():
            worker.simulator.is_held, worker.simulator.outcome = True, None
        reader, task = both.front_end.start(submit(1, 50, PROMPT))
        helpers = names.split()[:-1]
        for _ in range(30 * len(helpers)):
            both.transfers.tick()
        await until(lambda: [len(both[name].submits) for name in names.split()] == [1] * len(helpers) + [len(helpers)])
        assert not task.done()
        for worker in both.workers.values():
            worker.simulator.outcome = "done"
            worker.simulator.let_go()
        await finished(task)
        assert reader.tokens == expected(1, 50)
        assert both.front_end.dispatcher.migrations.total() == len(helpers) - 1


@pytest.mark.parametrize("handover", ["blocks", "ticket", "meeting"])
async def test_the_first_half_need_not_make_the_least_number_of_tokens(tmp_path: Path, handover: KvHandover) -> None:
    async with cluster(tmp_path, "p d", handover=handover) as both:
        _, reader = await both.front_end.run(submit(1, 50, PROMPT, min_tokens=20))
        assert reader.tokens == expected(1, 50)
        assert [(request.min_tokens, request.max_tokens) for request in both["p"].submits] == [(handover == "blocks",) * 2]
        assert [request.min_tokens for request in both["d"].submits] == [20]


@pytest.mark.parametrize("lane", ["", "tenant"])
@pytest.mark.parametrize("handover", ["ticket", "meeting"])
async def test_a_handover_begins_when_its_second_worker_has_a_place(tmp_path: Path, handover: KvHandover, lane: str) -> None:
    """A ticket gets old, and two engines lose each other, while one of them makes others wait."""
    async with cluster(tmp_path, "p d", handover=handover, batch=1) as both:
        both["d"].simulator.is_held = True
        first = both.front_end.start(submit(1, 50, PROMPT))
        await until(lambda: bool(both["d"].simulator.held))
        second = both.front_end.start(submit(2, 50, PROMPT, lane=lane))
        assert both.front_end.dispatcher.queued == 1
        assert both.transfers.open.keys() <= {request.source.transfer for request in both["d"].submits if request.source}
        both["d"].simulator.let_go()
        for number, (reader, task) in enumerate((first, second), start=1):
            await finished(task)
            assert reader.tokens == expected(number, 50)
        assert both.transfers.counts == {("prefill", "done"): 2}


async def test_two_engines_that_wait_for_their_turn_are_not_late(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d", handover="meeting") as both:
        both["p"].simulator.is_held = both["d"].simulator.is_held = True
        both["d"].simulator.outcome = None
        reader, task = both.front_end.start(submit(1, 50, PROMPT))
        await until(lambda: bool(both["p"].simulator.held and both["d"].simulator.held))
        (transfer,) = both.transfers.open.values()
        transfer.deadline = 0.0
        both.transfers.tick()
        assert list(both.transfers.open) == [transfer.id]
        both["p"].simulator.let_go()
        await until(lambda: not transfer.waits)
        assert transfer.deadline, "from now on it must come"
        both["d"].simulator.let_go()
        await finished(task)
        assert reader.tokens == expected(1, 50)


@pytest.mark.parametrize("name", ["p", "d"])
async def test_one_half_of_a_pair_alone_is_no_worker(tmp_path: Path, name: str) -> None:
    async with cluster(tmp_path, name, handover="meeting", worker_wait=0.01) as one:
        _, task = one.front_end.start(submit(1, 50, PROMPT))
        with pytest.raises(GenerationFault, match="no prefill and decode worker for model 'simulator' came within"):
            await finished(task)
        assert one[name].submits == []


async def test_a_second_half_that_drains_owes_nothing_to_the_next_pair(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d0 d1", handover="meeting") as both:
        for worker in both.workers.values():
            worker.simulator.is_held, worker.simulator.outcome = True, None
        reader, task = both.front_end.start(submit(1, 50, PROMPT))
        await until(lambda: bool(both["p"].simulator.held and (both["d0"].submits or both["d1"].submits)))
        old, new = (both["d0"], both["d1"]) if both["d0"].submits else (both["d1"], both["d0"])
        drains(old)
        await until(lambda: bool(new.submits))
        await until(lambda: not old.runtime.owes_kv)
        for worker in both.workers.values():
            worker.simulator.let_go()
        await finished(task)
        assert reader.tokens == expected(1, 50)


async def test_one_half_of_a_pair_gets_nothing_alone(tmp_path: Path) -> None:
    """Also a prompt shorter than a block, and one that the second is thought to have cached."""
    async with cluster(tmp_path, "p d", handover="meeting") as both:
        for number, length in enumerate((5, PROMPT, PROMPT)):
            _, reader = await both.front_end.run(submit(number // 2, 20, length))
            assert reader.tokens == expected(number // 2, 20)
        assert len(both["p"].submits) == len(both["d"].submits) == 3
        assert all(request.source is not None for request in both["d"].submits)
        both["p"].simulator.is_held = both["d"].simulator.is_held = True
        reader, task = both.front_end.start(submit(7, 20, PROMPT))
        await until(lambda: bool(both["p"].simulator.held and both["d"].simulator.held))
        task.cancel()
        await until(lambda: not both["p"].simulator.held and not both["d"].simulator.held)


async def in_prefill(both: Cluster, outcome: TransferOutcome | None = "done") -> tuple[Reader, asyncio.Task[None]]:
    """A generation whose prompt is being computed, for as long as the test wants."""
    for worker in both.workers.values():
        worker.simulator.outcome = outcome
    both["p"].simulator.is_held = True
    reader, task = both.front_end.start(submit(1, 200, PROMPT))
    await until(lambda: bool(both["p"].simulator.held) and any(worker.simulator.fetches for worker in both.workers.values()))
    return reader, task


def dies(worker: MovingWorker) -> None:
    worker.break_links()


def faults(worker: MovingWorker) -> None:
    (request,) = worker.simulator.held
    worker.simulator.held = []
    worker.simulator.emit(Segment(request.id, None, Fault("out_of_memory", "too large", retryable=True)))


def drains(worker: MovingWorker) -> None:
    worker.runtime.drain()
    worker.runtime.hand_over()


def stalls(_: MovingWorker) -> None:
    """It never makes the token."""


@pytest.mark.parametrize("outcome", ["done", "failed", None])
@pytest.mark.parametrize("fails", [dies, faults, drains, stalls])
async def test_without_its_first_token_the_decode_worker_computes(
    tmp_path: Path, fails: Callable[[MovingWorker], None], outcome: TransferOutcome | None
) -> None:
    async with cluster(tmp_path, "p d") as both:
        reader, task = await in_prefill(both, outcome)
        fails(both["p"])
        await until(lambda: bool(both["d"].submits))
        assert both.member("d").link.reserved == 0, "it has its place, and no second one"
        await finished(task)
        assert reader.tokens == expected(1, 200)
        (request,) = both["d"].submits
        assert (request.offset, request.max_tokens, request.source) == (0, 200, None)
        both["p"].simulator.let_go()
        await both.check_settled()
        assert both.front_end.dispatcher.migrations.total() == 1


async def test_a_token_that_comes_too_late_is_dropped(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        reader, task = await in_prefill(both, None)
        (late,), (transfer,) = both["p"].simulator.held, both.transfers.open.values()
        # It is on the wire when the front end gives up.
        both["p"].simulator.emit(Segment(late.id, Delta(0, expected(1, 1), None, PromptReport(0)), Finish("length")))
        both.transfers.end(transfer, "stalled")
        transfer.owner.transfer_was_late()
        await finished(task)
        assert reader.tokens == expected(1, 200)
        assert [request.offset for request in both["d"].submits] == [0]
        assert both.transfers.counts == {("prefill", "stalled"): 1}


@pytest.mark.parametrize("fails", [dies, drains])
async def test_a_decode_worker_that_leaves_before_the_token_is_replaced(tmp_path: Path, fails: Callable[[MovingWorker], None]) -> None:
    async with cluster(tmp_path, "p d0 d1") as both:
        reader, task = await in_prefill(both)
        (chosen,) = [name for name in ("d0", "d1") if both[name].simulator.fetches]
        other = {"d0": "d1", "d1": "d0"}[chosen]
        member = both.member(chosen)
        fails(both[chosen])
        await until(lambda: not member.link.is_usable)
        both["p"].simulator.let_go()
        await finished(task)
        assert reader.tokens == expected(1, 200)
        assert both[chosen].submits == []
        (request,) = both[other].submits
        assert request.offset == 1
        assert request.source is not None, "p has its blocks"
        assert request.source.address == "unix:p.kv"


async def test_a_prefill_worker_stalls_when_the_decode_worker_has_died(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d0 d1") as both:
        reader, task = await in_prefill(both)
        (chosen,) = [name for name in ("d0", "d1") if both[name].simulator.fetches]
        both[chosen].break_links()
        await finished(task)
        assert reader.tokens == expected(1, 200)
        assert both.front_end.dispatcher.migrations == {"prefill_stalled": 1}
        both["p"].simulator.let_go()


@pytest.mark.parametrize("names", ["p d", "p d a"])
async def test_both_workers_die(tmp_path: Path, names: str) -> None:
    async with cluster(tmp_path, names, trial_seconds=0.0) as both:
        reader, task = await in_prefill(both)
        both["p"].break_links()
        both["d"].break_links()
        both["p"].simulator.is_held = False
        await finished(task)
        assert reader.tokens == expected(1, 200)


async def test_the_source_dies_while_the_decode_worker_waits_for_it(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d") as both:
        both["d"].simulator.outcome = None
        both["d"].simulator.is_held = True
        reader, task = both.front_end.start(submit(1, 200, PROMPT))
        await until(lambda: bool(both["d"].simulator.held))
        ((transfer, record),) = both.transfers.open.items()
        assert both["d"].simulator.ended == []
        both["p"].break_links()
        await until(lambda: both["d"].simulator.ended == [transfer])
        assert not record.owner.turn.deaths, "it is not suspected: p had computed its prompt"
        both["d"].simulator.let_go()
        await finished(task)
        assert reader.tokens == expected(1, 200)
        assert both.transfers.counts == {("prefill", "lost"): 1}


async def test_a_decode_worker_that_dies_with_the_generation(tmp_path: Path) -> None:
    async with cluster(tmp_path, "p d0 d1") as both:
        reader, task = both.front_end.start(submit(1, 500, PROMPT))
        await until(lambda: len(reader.tokens) > 30)
        (chosen,) = [name for name in ("d0", "d1") if both[name].submits]
        both[chosen].break_links()
        await finished(task)
        assert reader.tokens == expected(1, 500)


async def test_all_help_to_compute_what_a_decode_worker_has_lost(tmp_path: Path) -> None:
    """Prompts for seconds would wait at the only decode worker that is left. A single one stays with the role, and those for which no
    worker has room yet wait in the front end."""
    async with cluster(tmp_path, "p d0 d1", RouterSettings(disaggregation="never"), trial_seconds=0.0) as both:
        for count, helps in ((1, False), (20, True)):
            started = [both.front_end.start(submit(number, 300, PROMPT)) for number in range(count)]
            await until(lambda: min(len(reader.tokens) for reader, _ in started) > 5)  # noqa: B023
            both["p"].submits.clear()
            for name in ("d0", "d1"):
                both[name].simulator.is_held = True
            lost = max(("d0", "d1"), key=lambda name: both.member(name).link.active)
            both[lost].break_links()
            await until(lambda: any(len(both[name].simulator.held) for name in ("d0", "d1")))
            await until(lambda: bool(both["p"].submits) or not helps)  # noqa: B023
            assert max(len(both[name].simulator.held) for name in ("d0", "d1")) < max(2, count // 2)
            for name in ("d0", "d1"):
                both[name].simulator.let_go()
            for _, task in started:
                await finished(task)
            assert [reader.tokens for reader, _ in started] == [expected(number, 300) for number in range(count)]
            assert bool(both["p"].submits) == helps


async def test_a_pull_that_nobody_reports_on_is_given_up(tmp_path: Path) -> None:
    """The generation waits at the decode worker for a transfer that does not end."""
    async with cluster(tmp_path, "p d") as both:
        both["d"].simulator.outcome = None
        both["d"].simulator.is_held = True
        _, task = both.front_end.start(submit(1, 50, PROMPT))
        await until(lambda: bool(both["d"].simulator.held))
        (transfer,) = both.transfers.open
        await until(lambda: both["d"].simulator.ended == [transfer])
        await until(lambda: transfer in both["p"].simulator.ended)
        both["d"].simulator.let_go()
        await finished(task)
        assert both.transfers.counts == {("prefill", "stalled"): 1}


@pytest.mark.parametrize("phase", ["prefill", "waiting", "decode"])
async def test_a_client_that_leaves_in_any_phase_leaves_nothing(tmp_path: Path, phase: str) -> None:
    async with cluster(tmp_path, "p d") as both:
        both["d"].simulator.outcome = None if phase != "decode" else "done"
        both["d"].simulator.is_held = phase == "waiting"
        both["p"].simulator.is_held = phase == "prefill"
        reader, task = both.front_end.start(submit(1, 5_000, PROMPT))
        await until(lambda: bool(both["p"].simulator.held or both["d"].simulator.held or len(reader.tokens) > 20))
        task.cancel()
        await asyncio.wait([task])
        await both.check_settled()
        for worker in both.workers.values():
            await until(lambda worker=worker: worker.runtime.is_idle)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("handover", "killed", "tokens"),
    [("blocks", "pd", 0), ("meeting", "p", 0), ("meeting", "d", 0), ("meeting", "d", 3), ("meeting", "d", 40)],
)
async def test_a_request_that_kills_its_workers_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handover: KvHandover, killed: str, tokens: int
) -> None:
    """Whether it kills those that compute its prompt, or those that continue, at once or after some tokens."""
    monkeypatch.setattr(suspects, "HOLD_SECONDS", 0.5)
    async with cluster(tmp_path, "p0 p1 d0 d1", trial_seconds=5.0, handover=handover) as both:
        for name, worker in both.workers.items():
            worker.simulator.dies_after = tokens if name[0] in killed else None
        calm = [both.front_end.start(submit(n, 300, PROMPT)) for n in range(8)]
        _, task = both.front_end.start(structs.replace(submit(99, 20_000, PROMPT), seed=POISON))
        with pytest.raises(Exception, match="it is not tried again"):
            await finished(task)
        for _, other in calm:
            await finished(other)
        assert [reader.tokens for reader, _ in calm] == [expected(n, 300) for n in range(8)]
        assert both.front_end.dispatcher.suspects.deaths <= 4


async def test_a_pair_tries_one_suspect_at_a_time(tmp_path: Path) -> None:
    """Though the other worker that computes prompts is free. The next trial begins when the first one has proved its innocence."""
    async with cluster(tmp_path, "p0 p1 d", handover="meeting", trial_seconds=60.0) as both:
        started = [both.front_end.start(submit(number, 300, PROMPT)) for number in range(3)]
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 5)
        both["d"].simulator.is_held = True
        both["d"].break_links()
        await until(lambda: bool(both["d"].simulator.held))
        assert (len(both["d"].simulator.held), len(both.front_end.dispatcher.suspects)) == (1, 2)
        both["d"].simulator.let_go()
        for _, task in started:
            await finished(task)
        assert [reader.tokens for reader, _ in started] == [expected(number, 300) for number in range(3)]
        assert both.front_end.dispatcher.suspects.deaths == 1


async def test_a_worker_pulls_what_another_one_has(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        first, _ = await both.front_end.run(submit(1, 20, 3200))
        home, other = ("a", "b") if first.worker == "a" else ("b", "a")
        both[home].runtime.drain()
        await until(lambda: both.member(home).link.draining)
        turn, reader = await both.front_end.run(submit(1, 20, 3200))
        assert (turn.worker, reader.tokens) == (other, expected(1, 20))
        (request,) = both[other].submits
        assert request.source is not None
        assert (request.source.address, request.source.waits) == (f"unix:{home}.kv", False)
        assert both.transfers.counts == {("peer", "done"): 1}


async def test_idle_sessions_leave_a_worker_that_drains_with_their_kv(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        turns = [(await both.front_end.run(submit(n, 20, 3200), Hints(SessionWish(f"s{n}"))))[0] for n in range(4)]
        home = turns[0].worker
        assert home is not None
        other = {"a": "b", "b": "a"}[home]
        moved = [n for n in range(4) if turns[n].worker == home]
        before = len(both[other].submits)
        both[home].runtime.drain()
        await until(lambda: both[home].simulator.stats().sessions == 0 and both[other].simulator.stats().sessions == 4)
        assert not both[home].runtime.has_sessions
        requests = both[other].submits[before:]
        assert sorted(request.token_ids[:3200] for request in requests) == sorted(submit(n, 20, 3200).token_ids for n in moved)
        for request in requests:
            assert request.source is not None
            assert (request.source.address, request.max_tokens) == (f"unix:{home}.kv", 0)
        await until(lambda: both.front_end.sessions.is_idle)
        for n in range(4):
            turn, reader = await both.front_end.run(submit(n, 20, 3200), Hints(SessionWish(f"s{n}")))
            assert (turn.worker, turn.state, reader.tokens) == (other, "open", expected(n, 20))
        assert both.transfers.counts == {("session", "done"): len(moved)}


async def test_a_worker_that_drains_keeps_a_session_until_its_kv_has_moved(tmp_path: Path) -> None:
    """Else it may end before the other one has begun to pull."""
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        turn, _ = await both.front_end.run(submit(1, 20, 3200), Hints(SessionWish("s")))
        home = turn.worker or ""
        other = {"a": "b", "b": "a"}[home]
        assert turn.session is not None
        both[other].simulator.is_held = True
        both[home].runtime.drain()
        await until(lambda: bool(both[other].submits))
        # The answer comes after all that was sent to it before.
        assert len(await both.member(home).link.describe_sessions([turn.session.key])) == 1
        both[other].simulator.let_go()
        await until(lambda: not both[home].runtime.has_sessions)


@pytest.mark.parametrize("is_handed_over", [True, False])
async def test_a_session_whose_turn_runs_leaves_a_worker_that_drains(tmp_path: Path, is_handed_over: bool) -> None:
    """With its turn, or after it."""
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        hints = Hints(SessionWish("s"))
        running = asyncio.create_task(both.front_end.run(submit(1, 100, 3200), hints))
        await until(lambda: any(both[name].simulator.stats().sessions for name in "ab"))
        home, other = ("a", "b") if both["a"].submits else ("b", "a")
        both[home].runtime.drain()
        await until(lambda: both.member(home).link.draining)
        if is_handed_over:
            both[home].runtime.hand_over()
        turn, reader = await running
        assert (turn.worker, reader.tokens) == (other if is_handed_over else home, expected(1, 100))
        await until(lambda: not both[home].runtime.has_sessions and both[other].simulator.stats().sessions == 1)
        await until(lambda: both.front_end.sessions.is_idle)
        turn, _ = await both.front_end.run(submit(1, 20, 3200), hints)
        assert (turn.worker, turn.state) == (other, "open")


class SlowStore(MemoryStore):
    """One lookup takes as long as the test wants."""

    held: asyncio.Event | None = None
    is_waiting = False
    slow_renewal: asyncio.Event | None = None

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        if self.slow_renewal is not None:
            await self.slow_renewal.wait()
        return await super().renew(key, epoch, seconds)

    async def get(self, key: str) -> Binding | None:
        found, held = await super().get(key), self.held
        self.held = None
        if held is not None:
            self.is_waiting = True
            await held.wait()
        return found


@pytest.mark.parametrize("is_over", [True, False])
async def test_the_last_turn_of_a_session_that_moves_is_its_last(tmp_path: Path, is_over: bool) -> None:
    """It comes while the move looks the session up. Its end may come, too."""
    store = SlowStore()
    async with cluster(tmp_path, "a b", RouterSettings(), store=store) as both:
        turn, _ = await both.front_end.run(submit(1, 20, 3200), Hints(SessionWish("s")))
        await until(lambda: both.front_end.sessions.is_idle)
        home, other = ("a", "b") if turn.worker == "a" else ("b", "a")
        held = store.held = asyncio.Event()
        both[home].runtime.drain()
        await until(lambda: store.is_waiting)
        last = asyncio.create_task(both.front_end.run(submit(1, 200, 3200), Hints(SessionWish("s", is_final=True))))
        await until(lambda: last.done() if is_over else both[other].simulator.stats().running > 0)
        held.set()
        turn, reader = await last
        assert (turn.state, reader.tokens) == ("closed", expected(1, 200))
        await until(lambda: both.front_end.sessions.is_idle and not len(both.front_end.sessions))
        await until(lambda: not any(both[name].simulator.stats().sessions for name in "ab"))
        assert both.front_end.sessions.counts["opened"] == 1


async def test_a_move_that_is_cut_off_ends_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "MOVE_SECONDS", 0.05)
    store = SlowStore()
    async with cluster(tmp_path, "a b", RouterSettings(), store=store) as both:
        turn, _ = await both.front_end.run(submit(1, 20, 3200), Hints(SessionWish("s")))
        await until(lambda: both.front_end.sessions.is_idle)
        slow = store.slow_renewal = asyncio.Event()
        both[str(turn.worker)].runtime.drain()
        await until(lambda: not both[str(turn.worker)].runtime.has_sessions)
        slow.set()
        await until(lambda: both.front_end.sessions.is_idle)


async def test_a_worker_that_drains_waits_for_its_sessions_only_while_they_can_move(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a", RouterSettings()) as alone:
        await alone.front_end.run(submit(1, 20, 3200), Hints(SessionWish("s")))
        assert alone["a"].runtime.has_sessions
        alone["a"].runtime.drain()
        await until(lambda: not alone["a"].runtime.has_sessions)


async def test_a_worker_that_drains_hands_its_kv_over(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        started = [both.front_end.start(submit(n, 2_000, PROMPT)) for n in range(20)]
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 50)
        moved = {request.id for request in both["a"].submits}
        old = both["a"]
        old.runtime.drain()
        old.runtime.hand_over()
        owed = [old.runtime.owes_kv]
        for _, task in started:
            await finished(task)
        assert [reader.tokens for reader, _ in started] == [expected(n, 2_000) for n in range(20)]
        sources = [request.source for request in both["b"].submits if request.offset]
        assert {source.transfer for source in sources if source is not None} == moved
        await until(lambda: not old.runtime.owes_kv)
        assert owed == [True]
        assert both.transfers.counts == {("drain", "done"): len(moved)}


@pytest.mark.parametrize("is_heard", [True, False])
async def test_a_worker_that_drains_does_not_wait_for_clients_that_leave(tmp_path: Path, is_heard: bool) -> None:
    """At the same moment: before, or just after the front end has heard that the worker hands the generation over."""
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        reader, task = both.front_end.start(submit(1, 2_000, PROMPT))
        await until(lambda: len(reader.tokens) > 10)
        (old,) = [name for name in "ab" if both[name].submits]
        link = both.member(old).link
        both[old].runtime.drain()
        both[old].runtime.hand_over()
        while is_heard and link.active:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        await until(lambda: not both[old].runtime.owes_kv, seconds=2.0)


async def test_half_a_prompt_leaves_a_worker_that_drains(tmp_path: Path) -> None:
    async with cluster(tmp_path, "a b", RouterSettings()) as both:
        reader, task = both.front_end.start(submit(1, 20, 60_000))
        await until(lambda: any(both.front_end.router.index.held(name)[0] > 100 for name in "ab"))
        (old,), (new,) = [name for name in "ab" if both[name].submits], [name for name in "ab" if not both[name].submits]
        assert not reader.tokens
        both[old].runtime.drain()
        both[old].runtime.hand_over()
        await finished(task)
        assert reader.tokens == expected(1, 20)
        ((first,), (second,)) = both[old].submits, both[new].submits
        assert second.source is not None
        assert (second.source.transfer, second.source.address) == (first.id, f"unix:{old}.kv")
        assert both.transfers.counts == {("drain", "done"): 1}
        await until(lambda: not both[old].runtime.owes_kv)
