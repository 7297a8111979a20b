"""The books of transfers, with the scheduler that uses them and a transport that is moved by hand. Pages hold the names of their blocks."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from hashlib import blake2b
from typing import Any

import pytest
from msgspec import structs

from moving import Hub, MemoryTransport
from penstock.engine.scheduler import Scheduler, Sequence, Work
from penstock.kv.blocks import ROOT, block_hashes, tenant_root
from penstock.kv.cache import KVCache
from penstock.kv.moving import KvTransport, SlotLayout, SlotMemory
from penstock.kv.sessions import Sessions
from penstock.kv.staging import Staging
from penstock.kv.transfers import (
    EXPECT_SECONDS,
    HOLD_SECONDS,
    MAX_SHORT_SECONDS,
    NO_TRANSPORT,
    NOTHING_ARRIVES,
    TOO_FEW_PAGES,
    Nearby,
    Transfers,
)
from penstock.wire.messages import Export, Fetch, KvSource, SessionTurn, Submit, TransferReport

SIZE = 4
NAME = 16
JUNK = b"\xff" * NAME


class NameMemory:
    """A `kv.moving.SlotMemory` whose slots have room for the name of a block."""

    def __init__(self, slots: int) -> None:
        self.file = -1
        self.layout = SlotLayout(slots, NAME, (0,))
        self.bytes = bytearray(slots * NAME)

    def views(self, slot: int) -> Items[memoryview]:
        return [memoryview(self.bytes)[slot * NAME : (slot + 1) * NAME]]

    def checksum(self, strips: Items[memoryview]) -> int:
        return int.from_bytes(blake2b(b"".join(strips), digest_size=8).digest())


class NotLookedThrough(list[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("this takes as long as the prompt is long")


class Worker:
    """A `kv.moving.KvEngine`: a scheduler that makes the same token for everyone, and writes the name of each block into its page."""

    fingerprint = b"same"

    def __init__(self, hub: Hub, name: str, clock: Clock, pages: int = 64, budget: int = 16, max_batch: int = 16) -> None:
        self.clock = clock
        self.name = name
        self.budget = budget
        self.cache = KVCache(pages, SIZE)
        self.page_memory = NameMemory(pages)
        self.memory: SlotMemory = self.page_memory
        self.transfers = Transfers(self.cache, clock, block_bytes=NAME)
        self.scheduler: Scheduler[Sequence] = Scheduler(self.cache, Sessions(self.cache, 10, 0.0), max_batch, self.transfers)
        self.transport = hub.add(name, self)
        self.connect(self.transport)
        self.sequences: dict[int, Sequence] = {}
        self.ended: list[int] = []
        self.computed = 0
        self.reports: list[TransferReport] = []

    def connect(self, transport: KvTransport) -> None:
        self.transfers.transport = transport
        self.books: Transfers | Staging = self.transfers

    def export(self, transfer: bytes, names: Items[bytes], *, waits: bool) -> None:
        self.books.export(transfer, names, waits=waits)

    def release(self, transfer: bytes) -> None:
        self.books.release(transfer)

    def arrived(self, transfer: bytes, blocks: int) -> None:
        self.books.arrived(transfer, blocks)

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        self.books.pull_ended(transfer, failure)

    def submit(self, number: int, prompt: Items[int], max_tokens: int = 1, **fields: Any) -> Sequence:
        request = Submit(number.to_bytes(16), tuple(prompt), max_tokens, seed=0, **fields)
        assert self.scheduler.validate(request) is None
        sequence = Sequence(request, *self.scheduler.sessions.begin_turn(request.session, request.lane))
        self.sequences[number] = sequence
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, number: int) -> bool:
        return self.scheduler.cancel(number.to_bytes(16), self.clock())

    def step(self) -> None:
        now = self.clock()
        self.scheduler.expire(now)
        self.scheduler.make_way()
        work = self.scheduler.schedule_decodes(now)
        work += self.scheduler.schedule_prompts(max(self.budget - len(work), 1), now)
        for item in work:
            self.compute(item)
        self.reports += self.transfers.take_reports()
        self.check()

    def compute(self, item: Work[Sequence]) -> None:
        sequence = item.sequence
        self.computed += item.length
        have = sequence.computed + item.length
        names = block_hashes(sequence.tokens[:have], SIZE, sequence.request.root)
        for page, name in list(zip(sequence.pages, names, strict=False))[sequence.computed // SIZE :]:
            self.page_memory.views(page)[0][:] = name
        self.scheduler.computed(item)
        if not sequence.to_compute:
            sequence.tokens.append(7)
            if len(sequence.tokens) - len(sequence.request.token_ids) >= sequence.request.max_tokens:
                self.scheduler.finish(sequence, self.clock())
                self.ended.append(int.from_bytes(sequence.request.id))

    def check(self) -> None:
        """The books are right, and each page in the tree holds its block."""
        self.scheduler.check_integrity()
        for event in self.cache.snapshot().events:
            for name in getattr(event, "blocks", ()):
                node = self.cache.find(name)
                assert node is not None
                assert bytes(self.page_memory.views(node.page)[0]) == name, "a page in the tree holds something else"

    def run(self, hub: Hub, most: int = 200) -> None:
        """Steps and moves until nothing happens."""
        for _ in range(most):
            self.step()
            if not hub.move() and not self.scheduler.has_work:
                return
        raise AssertionError("work is left")

    def known(self, prompt: Items[int], root: bytes = ROOT) -> int:
        return len(self.cache.match_blocks(root, prompt, len(prompt) // SIZE))

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left of any transfer."""
        return not (self.transfers.imports or self.transfers.exports or self.transfers.held_pages or self.cache.used)


class SlowCopies:
    """A `kv.tiers.PageCopies` that copies when the test says so."""

    load_rate = 1e9

    def __init__(self, pages: NameMemory, slots: NameMemory) -> None:
        self.pages, self.slots = pages, slots
        self.saves: deque[tuple[Items[int], Items[int], Callable[[], None]]] = deque()
        self.loads: deque[tuple[Items[int], Items[int], Callable[[], None]]] = deque()

    def save(self, pages: Items[int], slots: Items[int], on_end: Callable[[], None]) -> None:
        self.saves.append((pages, slots, on_end))

    def load(self, slots: Items[int], pages: Items[int], on_end: Callable[[], None]) -> None:
        self.loads.append((pages, slots, on_end))

    def protect(self, pages: Iterable[int]) -> None:
        """Reads them now; who has asked for it hears of it later."""
        wanted = set(pages)
        for index, (sources, slots, on_end) in enumerate(self.saves):
            if not wanted.isdisjoint(sources):
                self.copy(self.pages, sources, self.slots, slots)
                self.saves[index] = (), (), on_end

    def move(self) -> bool:
        """Ends the oldest copies. Returns whether there were any."""
        is_busy = bool(self.saves or self.loads)
        if self.saves:
            pages, slots, on_end = self.saves.popleft()
            self.copy(self.pages, pages, self.slots, slots)
            on_end()
        if self.loads:
            pages, slots, on_end = self.loads.popleft()
            self.copy(self.slots, slots, self.pages, pages)
            on_end()
        return is_busy

    def copy(self, source: NameMemory, sources: Items[int], target: NameMemory, targets: Items[int]) -> None:
        for first, second in zip(sources, targets, strict=True):
            target.views(second)[0][:] = source.views(first)[0]


class StagedWorker(Worker):
    """A worker whose pages are not slots, as on a GPU. In each step one copy of each kind ends. Ten more slots are a tier's."""

    slots = 20

    def connect(self, transport: KvTransport) -> None:
        self.memory = slots = NameMemory(self.slots + 10)
        self.copies = SlowCopies(self.page_memory, slots)
        self.books = self.staging = Staging(self.transfers, transport, self.copies, range(self.slots))
        self.transfers.transport = self.staging

    def compute(self, item: Work[Sequence]) -> None:
        self.copies.protect(self.cache.take_fresh())
        super().compute(item)

    def step(self) -> None:
        self.copies.move()
        super().step()

    def check(self) -> None:
        super().check()
        self.staging.check_integrity()

    def run(self, hub: Hub, most: int = 200) -> None:
        for _ in range(most):
            self.step()
            if not hub.move() and not self.scheduler.has_work and not self.copies.saves and not self.copies.loads:
                return
        raise AssertionError("work is left")


class Clock:
    """A `monotonic` that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def two_workers(**settings: Any) -> tuple[Hub, Worker, Worker]:
    hub, clock = Hub(), Clock()
    return hub, Worker(hub, "p", clock, **settings), Worker(hub, "d", clock, **settings)


def prompt_of(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(1000) for _ in range(length)]


def source_of(number: int, *, waits: bool = False, address: str = "p") -> KvSource:
    return KvSource(number.to_bytes(16), address, waits)


def fetch_of(number: int, prompt: Items[int], *, waits: bool = False, seconds: float = 5.0, **fields: Any) -> Fetch:
    return Fetch(source_of(number, waits=waits), tuple(prompt), seconds, **fields)


def export_of(number: int, seconds: float = 5.0) -> Export:
    return Export(number.to_bytes(16), seconds)


def test_a_prompt_is_pulled_and_only_its_last_token_computed() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 42)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert d.ended == [2]
    assert d.computed == 2
    assert d.sequences[2].cached_tokens == 40
    (report,) = d.reports
    assert (report.id, report.outcome, report.blocks, report.size, report.reason) == ((9).to_bytes(16), "done", 10, 160, "")
    d.transfers.end((9).to_bytes(16))
    p.step()
    assert p.is_clean
    assert d.is_clean


def test_pages_move_while_the_rest_is_computed() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 64)
    p.submit(1, prompt, export=export_of(9))
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    d.step()
    moved = []
    while not p.ended:
        hub.move()
        p.step()
        hub.move()
        d.step()
        moved.append(d.known(prompt))
    assert moved == [4, 8, 12, 16], "after each piece of 16 tokens"
    assert [report.outcome for report in d.reports] == ["done"]
    first = d.submit(2, [*prompt, 7], offset=1, max_tokens=3, source=source_of(9, waits=True))
    d.step()
    assert first.cached_tokens == 64, "also the block that ends with the prompt"
    d.run(hub)
    for worker in (p, d):
        worker.transfers.end((9).to_bytes(16))
        worker.step()
        assert worker.is_clean


def test_the_puller_may_come_before_the_generation_that_computes() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 33)
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    d.step()
    hub.move()
    p.clock.now += EXPECT_SECONDS / 2
    p.step()
    assert p.transfers.exports == 1
    p.submit(1, prompt, export=export_of(9))
    p.clock.now += EXPECT_SECONDS
    p.run(hub)
    d.run(hub)
    assert d.known(prompt) == 8
    assert [(report.outcome, report.blocks) for report in d.reports] == [("done", 8)]


def test_a_puller_whose_generation_never_comes_is_sent_away() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 33)
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    waiting = d.submit(2, prompt, source=source_of(9, waits=True))
    d.step()
    hub.move()
    p.clock.now += EXPECT_SECONDS
    p.step()
    d.run(hub)
    assert d.ended == [2]
    assert waiting.cached_tokens == 0
    assert [(report.outcome, report.blocks) for report in d.reports] == [("failed", 0)]
    assert [report.outcome for report in p.reports] == ["expired"]
    assert p.is_clean


def test_only_what_is_missing_is_pulled() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 42)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(1, prompt[:23])
    d.run(hub)
    computed = d.computed
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert hub.copied == 5
    assert d.computed == computed + 2
    d.submit(3, prompt, source=source_of(10))
    d.run(hub)
    assert hub.copied == 5, "nothing was missing"
    assert [report.blocks for report in d.reports] == [5, 0]


def test_a_source_is_asked_only_for_what_it_has() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 42)
    p.submit(1, prompt[:25])
    p.run(hub)
    d.submit(2, prompt, source=structs.replace(source_of(9), blocks=6))
    d.run(hub)
    assert [(report.outcome, report.blocks) for report in d.reports] == [("done", 6)]
    assert d.sequences[2].cached_tokens == 24


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_short_prompts_and_ends_of_blocks(length: int) -> None:
    """A generation computes at least one token. A fetched prompt is pulled to its end: its generation has one token more."""
    hub, p, d = two_workers()
    prompt = prompt_of(1, length)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert d.ended == [2]
    assert d.sequences[2].cached_tokens == (length - 1) // SIZE * SIZE
    other = Worker(hub, "other", p.clock)
    other.transfers.fetch(fetch_of(10, prompt))
    other.run(hub)
    assert other.known(prompt) == length // SIZE
    assert [report.outcome for report in other.reports] == ["done"]


def test_roots_are_not_mixed() -> None:
    hub, p, d = two_workers()
    prompt, alice = prompt_of(1, 20), tenant_root("alice")
    p.submit(1, prompt, root=alice)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert d.sequences[2].cached_tokens == 0, "the same tokens of another tenant have other names"
    d.submit(3, prompt, source=source_of(10), root=alice)
    d.run(hub)
    assert d.sequences[3].cached_tokens == 16
    assert [report.reason for report in d.reports] == ["the source lacks blocks", ""]


def test_two_imports_of_one_prefix_pull_it_once() -> None:
    hub, p, d = two_workers()
    prefix = prompt_of(1, 40)
    prompts = [[*prefix, *prompt_of(number, 9)] for number in (2, 3)]
    for number, prompt in enumerate(prompts):
        p.submit(number, prompt)
    p.run(hub)
    for number, prompt in enumerate(prompts):
        d.submit(number, prompt, source=source_of(9 + number))
    d.step()
    assert len(d.transport.pulls) == 1, "the second waits for what the first pulls"
    d.run(hub)
    assert hub.copied == 12 + 2
    assert [each.cached_tokens for each in d.sequences.values()] == [48, 48]


def test_the_second_import_goes_on_when_the_first_is_ended() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.step()
    d.submit(2, prompt, source=source_of(10))
    d.step()
    d.transfers.end((9).to_bytes(16))
    d.run(hub)
    assert d.sequences[2].cached_tokens == 36
    assert [report.id for report in d.reports] == [(10).to_bytes(16)]


def test_choices_wait_for_one_import() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 21)
    p.submit(1, prompt)
    p.run(hub)
    for number in range(4):
        d.submit(number, prompt, max_tokens=6, source=source_of(9))
    d.run(hub)
    assert sorted(d.ended) == [0, 1, 2, 3]
    assert hub.copied == 5
    assert [report.outcome for report in d.reports] == ["done"]
    assert [each.cached_tokens for each in d.sequences.values()] == [20] * 4


def test_without_a_transport_everything_is_computed() -> None:
    hub, _, d = two_workers()
    d.transfers.transport = None
    prompt = prompt_of(1, 21)
    d.transfers.fetch(fetch_of(9, prompt))
    d.submit(2, prompt, source=source_of(10))
    d.run(hub)
    assert d.ended == [2]
    assert [(report.outcome, report.reason) for report in d.reports] == [("failed", NO_TRANSPORT)] * 2


def test_half_a_transfer_is_worth_half() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    hub.on_copy = lambda source, block: "a block is damaged" if block == 6 else ""
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert d.ended == [2]
    assert d.sequences[2].cached_tokens == 24
    assert d.computed == 41 - 24
    assert [(report.outcome, report.blocks, report.reason) for report in d.reports] == [("failed", 6, "a block is damaged")]


def test_pages_of_a_stopped_pull_are_not_free_before_the_transport_says_so() -> None:
    hub, p, d = two_workers(pages=16)
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.step()
    d.transfers.end((9).to_bytes(16))
    d.step()
    assert d.transfers.held_pages == 10
    assert d.cache.free == 6
    sequence = d.submit(2, prompt_of(2, 30))
    d.step()
    assert not d.scheduler.has_work, "nothing to do until the transport has let go"
    assert sequence.cached_tokens is None
    hub.move()
    assert d.transfers.held_pages == 0
    d.run(hub)
    assert d.ended == [2]


def test_a_stopped_pull_that_arrives_nevertheless_changes_nothing() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.step()
    d.transfers.end((9).to_bytes(16))
    d.arrived((9).to_bytes(16), 10)
    d.pull_ended((9).to_bytes(16), "")
    d.step()
    assert d.known(prompt) == 0
    assert d.is_clean
    assert d.reports == []


def test_pulled_blocks_are_held_for_the_lease_and_then_evicted() -> None:
    hub, p, d = two_workers(pages=16)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt, seconds=5.0))
    d.run(hub)
    assert d.cache.used == 10
    assert d.scheduler.next_expiry == d.clock() + 5.0
    d.clock.now += 4.9
    d.step()
    assert d.cache.used == 10
    d.clock.now += 0.1
    d.step()
    assert d.is_clean
    assert d.known(prompt) == 10, "cached, like any other block"


def test_the_session_has_the_lease_of_pulled_blocks_from_its_start() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9), session=SessionTurn("s", "open"))
    d.run(hub)
    assert d.cache.leased == 10
    d.scheduler.sessions.close("s", 0)
    d.step()
    assert d.known(prompt) == 0, "closing frees what only the session has used"


def test_held_blocks_give_way_before_anything_is_preempted() -> None:
    hub, p, d = two_workers(pages=20)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt, seconds=1000.0))
    d.run(hub)
    d.submit(2, prompt_of(2, 30), max_tokens=20)
    d.run(hub)
    assert d.ended == [2]
    assert d.scheduler.stats().preemptions == 0
    assert d.known(prompt) < 10


def test_pages_that_are_held_are_counted_without_a_look_at_each() -> None:
    """An engine that has nothing else to do counts them after each block that arrives."""
    hub, p, d = two_workers(pages=16)
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.run(hub)
    held = d.transfers._imports[(9).to_bytes(16)]
    held.path = NotLookedThrough(held.path)
    assert d.transfers.held_pages == 10


def test_a_pull_that_must_give_way_is_stopped() -> None:
    hub, p, d = two_workers(pages=20)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt_of(2, 30), max_tokens=20)
    d.step()
    d.submit(3, prompt, source=source_of(9))
    d.step()
    assert d.transfers.held_pages == 9
    for _ in range(16):
        d.step()
    assert d.transport.pulls[(9).to_bytes(16)].is_stopped
    d.run(hub)
    assert sorted(d.ended) == [2, 3]
    assert [(report.outcome, report.reason) for report in d.reports] == [("failed", TOO_FEW_PAGES)]


def test_an_import_waits_for_pages_but_not_for_long() -> None:
    hub, p, d = two_workers(pages=20)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt_of(2, 50), max_tokens=20)
    d.step()
    d.submit(3, prompt, source=source_of(9))
    d.step()
    assert not d.transport.pulls
    assert d.scheduler.next_expiry == d.clock() + MAX_SHORT_SECONDS
    d.clock.now += MAX_SHORT_SECONDS
    d.run(hub)
    assert d.ended == [2, 3]
    assert [(report.outcome, report.reason) for report in d.reports] == [("failed", TOO_FEW_PAGES)]


def test_an_import_from_which_nothing_comes_is_given_up() -> None:
    """A generation whose source is its own export would wait for itself."""
    hub, _, d = two_workers()
    prompt = prompt_of(1, 40)
    d.submit(2, prompt, source=source_of(9, waits=True, address="d"), export=export_of(9))
    d.run(hub)
    assert d.ended == []
    d.clock.now = d.scheduler.next_expiry
    d.run(hub)
    assert d.ended == [2]
    assert [(report.outcome, report.reason) for report in d.reports] == [("failed", NOTHING_ARRIVES)]


def test_an_import_begins_when_pages_are_free_again() -> None:
    hub, p, d = two_workers(pages=20)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt_of(2, 50), max_tokens=20)
    d.step()
    d.submit(3, prompt, source=source_of(9))
    d.run(hub)
    assert d.ended == [2, 3]
    assert d.sequences[3].cached_tokens == 36


def test_a_prompt_larger_than_the_share_of_imports_is_pulled_in_part() -> None:
    hub, p, d = two_workers(pages=16)
    prompt = prompt_of(1, 62)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert d.ended == [2]
    assert d.sequences[2].cached_tokens == 48


def test_a_large_prompt_gets_the_pages_that_imports_hold() -> None:
    """Nothing runs, and what is held is for generations that have not come."""
    hub, p, d = two_workers(pages=16)
    p.submit(1, prompt_of(1, 40))
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt_of(1, 40), seconds=1000.0))
    d.run(hub)
    d.submit(2, prompt_of(2, 60))
    d.run(hub)
    assert d.ended == [2]


@pytest.mark.parametrize("steps", range(5))
def test_a_waiting_generation_is_cancelled(steps: int) -> None:
    """While its import is queued, pulls, has ended; and while it runs."""
    hub, p, d = two_workers()
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, max_tokens=50, source=source_of(9))
    for step in range(steps):
        d.step()
        if step:
            hub.move()
    assert d.cancel(2)
    d.run(hub)
    d.transfers.end((9).to_bytes(16))
    p.step()
    assert d.is_clean
    assert p.is_clean
    assert d.ended == []


def test_a_cancelled_choice_does_not_end_the_import_of_the_others() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9))
    d.submit(3, prompt, source=source_of(9))
    d.step()
    d.cancel(2)
    d.run(hub)
    assert d.ended == [3]
    assert d.sequences[3].cached_tokens == 36


def test_blocks_are_kept_after_the_end_for_the_lease_of_their_export() -> None:
    hub, p, d = two_workers(pages=16)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt, export=export_of(9, 5.0))
    p.run(hub)
    assert p.cache.used == 10
    p.clock.now += 4.9
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    d.run(hub)
    assert d.known(prompt) == 10
    assert p.cache.used == 10, "another worker may come"
    p.clock.now += 0.1
    p.step()
    assert p.is_clean
    assert [report.outcome for report in p.reports] == ["expired"]


def test_a_second_worker_pulls_when_the_first_has_left() -> None:
    hub, p, d = two_workers()
    other = Worker(hub, "other", p.clock)
    prompt = prompt_of(1, 40)
    p.submit(1, prompt, export=export_of(9))
    p.step()
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    d.step()
    hub.move()
    d.transfers.end((9).to_bytes(16))
    hub.move()
    other.transfers.fetch(fetch_of(9, prompt, waits=True))
    other.step()
    p.run(hub)
    other.run(hub)
    assert other.known(prompt) == 10


def test_an_export_past_its_lease_is_withdrawn_and_freed_when_the_transport_says_so() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    d.submit(2, prompt, source=source_of(9))
    d.step()
    hub.move()
    assert p.cache.used == 9
    p.clock.now += HOLD_SECONDS
    p.step()
    assert p.cache.used == 9
    assert p.transport.withdrawn == {(9).to_bytes(16)}
    hub.move()
    assert p.is_clean
    d.run(hub)
    assert d.ended == [2], "it computes"


def test_names_that_are_no_chain_are_not_followed() -> None:
    hub, p, _ = two_workers()
    prompt = prompt_of(1, 40)
    p.submit(1, prompt)
    p.run(hub)
    names = block_hashes(prompt, SIZE)
    told: list[tuple[int, int, bool]] = []

    class Listening(MemoryTransport):
        def exported(self, transfer: bytes, first: int, slots: Items[int], *, is_last: bool) -> None:
            told.append((first, len(slots), is_last))

    p.connect(Listening(hub, p))
    p.export(b"1" * 16, [names[2], names[3], names[5]], waits=False)
    p.export(b"2" * 16, [names[0], b"?" * 16], waits=False)
    p.export(b"3" * 16, [], waits=False)
    p.check()
    assert told == [(0, 2, True), (0, 1, True), (0, 0, True)]
    for transfer in (b"1" * 16, b"2" * 16, b"3" * 16):
        p.release(transfer)
    p.check()
    assert p.is_clean


def test_a_preempted_generation_goes_on_with_its_export() -> None:
    hub, p, d = two_workers(pages=20)
    prompt = prompt_of(1, 32)
    p.submit(1, prompt_of(2, 24), max_tokens=40)
    p.submit(2, prompt, max_tokens=40, export=export_of(9))
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    d.step()
    for _ in range(200):
        hub.move()
        p.step()
        d.step()
    assert p.scheduler.stats().preemptions
    assert p.ended == [1, 2]
    assert d.known(prompt) == 8


class Tier(Nearby):
    """Blocks in host memory. A pull ends with the next poll."""

    next_expiry = math.inf

    def __init__(self, worker: Worker, most: int = 1000) -> None:
        self.worker = worker
        self.most = most
        self.names: set[bytes] = set()
        self.fails = self.is_slow = False
        self.pulls: dict[bytes, tuple[Items[bytes], Items[int]]] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.pulls)

    def plan(self, names: Iterable[bytes]) -> int:
        return min(self.most, len(list(itertools.takewhile(self.names.__contains__, names))))

    def keep(self, names: Iterable[bytes]) -> None:
        assert self.names.issuperset(names)

    def pull(self, source: KvSource, names: Items[bytes], slots: Items[int]) -> None:
        self.pulls[source.transfer] = names, slots

    def stop(self, transfer: bytes) -> None:
        pass

    def poll(self) -> None:
        if self.is_slow:
            return
        pulls, self.pulls = self.pulls, {}
        for transfer, (names, slots) in pulls.items():
            for name, slot in zip(names, slots, strict=True):
                self.worker.memory.views(slot)[0][:] = name
            self.worker.pull_ended(transfer, "the tier is damaged" if self.fails else "")


def test_blocks_come_from_a_tier_and_the_rest_from_a_worker() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update(block_hashes(prompt, SIZE)[:4])
    d.submit(2, prompt[:18])
    d.run(hub)
    assert d.sequences[2].cached_tokens == 16
    assert hub.copied == 0
    assert d.reports == [], "no front end knows of it"
    assert not d.transfers.held_pages
    other = Worker(hub, "other", p.clock)
    other.transfers.nearby = tier
    tier.worker = other
    other.submit(3, prompt, source=source_of(10))
    other.run(hub)
    assert other.sequences[3].cached_tokens == 40
    assert hub.copied == 6
    assert [(report.outcome, report.blocks) for report in other.reports] == [("done", 6)], "only these came from a worker"


def test_a_small_load_is_followed_by_the_rest() -> None:
    """As if the first few blocks had shown how fast the tier is."""
    hub, _, d = two_workers()
    prompt = prompt_of(1, 41)
    tier = d.transfers.nearby = Tier(d, most=3)
    tier.names.update(block_hashes(prompt, SIZE))
    d.submit(1, prompt)
    d.run(hub)
    assert d.sequences[1].cached_tokens == 40
    assert not d.transfers.imports
    assert not d.transfers.held_pages


def test_a_damaged_tier_is_not_tried_again_by_the_same_generation() -> None:
    hub, _, d = two_workers()
    prompt = prompt_of(1, 41)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update(block_hashes(prompt, SIZE))
    tier.fails = True
    d.submit(1, prompt)
    d.run(hub)
    assert d.ended == [1]
    assert d.sequences[1].cached_tokens == 0


def test_a_generation_cancelled_while_it_loads_leaves_no_page() -> None:
    hub, _, d = two_workers()
    prompt = prompt_of(1, 41)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update(block_hashes(prompt, SIZE))
    d.submit(1, prompt)
    assert d.transfers.imports == 1
    d.cancel(1)
    d.run(hub)
    assert not d.transfers.imports
    assert not d.transfers.held_pages


def test_two_generations_load_the_same_blocks_once() -> None:
    hub, _, d = two_workers()
    prompt = prompt_of(1, 41)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update(block_hashes(prompt, SIZE))
    d.submit(1, prompt)
    d.submit(2, prompt)
    assert len(tier.pulls) == 1
    d.run(hub)
    assert [d.sequences[number].cached_tokens for number in (1, 2)] == [40, 40]


def test_a_load_is_not_interrupted_by_a_generation_that_waits_for_pages() -> None:
    hub, _, d = two_workers(pages=16)
    first, second = prompt_of(1, 41), prompt_of(2, 41)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update([*block_hashes(first, SIZE), *block_hashes(second, SIZE)])
    tier.is_slow = True
    d.submit(1, first)
    d.submit(2, second)
    d.step()
    tier.is_slow = False
    d.run(hub)
    assert [d.sequences[number].cached_tokens for number in (1, 2)] == [40, 40]


def test_a_load_for_which_there_are_no_pages_waits_until_its_generation_is_next() -> None:
    hub, _, d = two_workers(pages=16)
    first, second = prompt_of(1, 41), prompt_of(2, 41)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update(block_hashes(second, SIZE))
    d.submit(1, first, max_tokens=8)
    d.step()
    d.submit(2, second)
    assert not tier.pulls
    d.run(hub)
    assert d.sequences[2].cached_tokens == 40


def test_a_damaged_tier_ends_the_pull_behind_it() -> None:
    hub, p, d = two_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    tier = d.transfers.nearby = Tier(d)
    tier.names.update(block_hashes(prompt, SIZE)[:4])
    tier.fails = True
    d.submit(2, prompt, source=source_of(9))
    d.run(hub)
    assert d.ended == [2]
    assert d.sequences[2].cached_tokens == 0
    assert [report.reason for report in d.reports] == ["the tier is damaged"]


class Chaos:
    """Three workers that pull from each other at random, with pages too few for all. After each event the books and all pages are right."""

    def __init__(self, seed: int, kind: type[Worker] = Worker) -> None:
        self.random = random.Random(seed)
        self.hub, self.clock = Hub(), Clock()
        self.hub.on_copy = lambda source, block: "a block is damaged" if self.random.random() < 0.02 else ""
        self.workers = [kind(self.hub, name, self.clock, pages=24, max_batch=4) for name in "pde"]
        self.cancelled: set[int] = set()
        self.owner: dict[int, Worker] = {}
        self.transfers: list[tuple[int, list[int]]] = []
        self.number = 0

    def run(self, events: int) -> None:
        actions = [
            self.submit,
            self.fetch,
            self.step,
            self.step,
            self.step,
            self.move,
            self.move,
            self.move,
            self.cancel,
            self.end,
            self.wait,
        ]
        for _ in range(events):
            self.random.choice(actions)()
            self.touch()
            for worker in self.workers:
                worker.check()

    def prompt(self) -> list[int]:
        """Few, so that they share blocks."""
        return prompt_of(self.random.randrange(4), self.random.randrange(1, 56))

    def submit(self) -> None:
        self.number += 1
        worker, prompt, fields = self.random.choice(self.workers), self.prompt(), dict[str, Any]()
        if self.random.random() < 0.5:
            fields["source"] = self.source()
            if self.transfers and self.random.random() < 0.5:
                number, prompt = self.random.choice(self.transfers)
                fields["source"] = source_of(number, address=self.random.choice("pdex"))
        if self.random.random() < 0.4:
            self.transfers.append((self.number, prompt))
            fields["export"] = Export(self.number.to_bytes(16), self.random.choice([0.0, 2.0, 20.0]))
        if self.random.random() < 0.3:
            fields["session"] = SessionTurn(self.random.choice("ab"), self.random.choice(("open", "continue", "close")), timeout=3.0)
        worker.submit(self.number, prompt, max_tokens=self.random.randrange(1, 30), **fields)
        self.owner[self.number] = worker

    def source(self) -> KvSource:
        self.number += 1
        return source_of(self.number, waits=self.random.random() < 0.3, address=self.random.choice("pdex"))

    def fetch(self) -> None:
        source, prompt = self.source(), self.prompt()
        if self.transfers and self.random.random() < 0.5:
            number, prompt = self.random.choice(self.transfers)
            source = source_of(number, waits=True, address=self.random.choice("pde"))
        self.random.choice(self.workers).transfers.fetch(Fetch(source, tuple(prompt), self.random.choice([0.0, 1.0, 9.0])))

    def step(self) -> None:
        self.random.choice(self.workers).step()

    def move(self) -> None:
        transport = self.random.choice(self.workers).transport
        if transport.pulls and self.random.random() < 0.9:
            transport.move_one(self.random.choice(list(transport.pulls)), self.random.randrange(1, 4))
        for transfer in list(transport.withdrawn):
            transport.leave_source(transfer)

    def cancel(self) -> None:
        running = [number for number, worker in self.owner.items() if number not in worker.ended and number not in self.cancelled]
        if running:
            number = self.random.choice(running)
            self.cancelled.add(number)
            self.owner[number].cancel(number)

    def end(self) -> None:
        worker = self.random.choice(self.workers)
        worker.transfers.end(self.random.randrange(1, self.number + 2).to_bytes(16))

    def wait(self) -> None:
        self.clock.now += self.random.choice([0.1, 1.0, 3.0])

    def touch(self) -> None:
        """What a transport may do at any time: write into pages that have not arrived, and read those that were told."""
        for worker in self.workers:
            for pulling in worker.transport.pulls.values():
                for slot in pulling.into[pulling.arrived :]:
                    worker.memory.views(slot)[0][:] = JUNK
                source = self.hub.transports.get(pulling.source.address)
                if source is not None and source.exports.get(pulling.source.transfer) is worker.transport:
                    for slot, name in zip(pulling.slots, pulling.names, strict=False):
                        assert bytes(source.engine.memory.views(slot)[0]) == name, "a page was reused while it is read"

    def settle(self) -> None:
        """No more faults: all generations end, and nothing is left of any transfer."""
        self.hub.on_copy = lambda source, block: ""
        for _ in range(400):
            self.hub.move()
            for worker in self.workers:
                worker.step()
            self.touch()
            self.clock.now += 0.5
        for number, worker in self.owner.items():
            assert (number in worker.ended) != (number in self.cancelled), f"generation {number}"
        for worker in self.workers:
            assert worker.is_clean


def two_staged_workers(slots: int = 20, **settings: Any) -> tuple[Hub, StagedWorker, StagedWorker]:
    hub, clock = Hub(), Clock()
    kind = type("WithSlots", (StagedWorker,), {"slots": slots})
    return hub, kind(hub, "p", clock, **settings), kind(hub, "d", clock, **settings)


def run_both(hub: Hub, *workers: StagedWorker) -> None:
    """Until nothing happens at either."""
    for _ in range(60):
        for worker in workers:
            worker.step()
        hub.move()
    assert not any(worker.scheduler.has_work or worker.copies.saves or worker.copies.loads for worker in workers)


@pytest.mark.parametrize(("slots", "known"), [(20, 10), (10, 10), (4, 4), (1, 1), (0, 0)])
def test_blocks_go_through_host_memory_as_far_as_there_is_some(slots: int, known: int) -> None:
    hub, p, d = two_staged_workers(slots)
    prompt = prompt_of(1, 41)
    p.submit(1, prompt, export=export_of(9))
    d.transfers.fetch(fetch_of(9, prompt, waits=True))
    run_both(hub, p, d)
    assert d.known(prompt) == known
    d.submit(2, prompt, source=source_of(9))
    run_both(hub, p, d)
    assert d.ended == [2]
    assert d.sequences[2].cached_tokens == known * SIZE
    assert [report.outcome for report in d.reports] == ["done" if known == 10 else "failed"]
    for worker in (p, d):
        worker.transfers.end((9).to_bytes(16))
    run_both(hub, p, d)
    assert p.is_clean
    assert d.is_clean


def test_a_block_is_shown_only_when_it_is_loaded() -> None:
    hub, p, d = two_staged_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.step()
    # What was exported is not told before it is saved, and what has arrived not before it is loaded.
    hub.move()
    hub.move()
    assert hub.copied == 0
    p.step()
    hub.move()
    assert hub.copied == 10
    assert d.known(prompt) == 0
    d.step()
    assert d.known(prompt) == 10


def test_pages_of_a_stopped_pull_are_free_when_their_loads_are_over() -> None:
    hub, p, d = two_staged_workers()
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.step()
    hub.move()
    p.step()
    d.transport.move_one((9).to_bytes(16), 3)
    assert len(d.copies.loads) == 1
    d.transfers.end((9).to_bytes(16))
    hub.move()
    d.check()
    assert d.cache.used == 10
    d.step()
    assert d.is_clean


def test_slots_are_not_free_while_they_are_saved_to() -> None:
    hub, p, d = two_staged_workers(10)
    prompt = prompt_of(1, 41)
    p.submit(1, prompt)
    p.run(hub)
    d.transfers.fetch(fetch_of(9, prompt))
    d.step()
    hub.move()
    assert len(p.copies.saves) == 1
    d.transfers.end((9).to_bytes(16))
    hub.move()
    assert p.is_clean
    # Nothing is left for another export, until the save is over.
    d.transfers.fetch(fetch_of(10, prompt))
    d.step()
    hub.move()
    run_both(hub, p, d)
    assert d.known(prompt) == 0
    d.transfers.fetch(fetch_of(11, prompt))
    run_both(hub, p, d)
    assert d.known(prompt) == 10


def test_what_a_tier_saves_is_read_before_its_pages_are_pulled_into() -> None:
    hub, p, d = two_staged_workers(pages=14)
    first, second = prompt_of(1, 41), prompt_of(2, 41)
    d.submit(1, first)
    d.run(hub)
    p.submit(2, second)
    p.run(hub)
    path = d.cache.match_blocks(ROOT, first, 10)
    d.copies.save([node.page for node in path], range(20, 30), lambda: None)
    names = [node.name for node in path]
    d.transfers.fetch(fetch_of(9, second))
    d.transfers.advance(d.clock(), 0)
    assert d.known(first) < 10
    # The load is faster than the save.
    save = d.copies.saves.popleft()
    run_both(hub, p, d)
    d.copies.saves.append(save)
    d.copies.move()
    assert d.known(second) == 10
    assert [bytes(d.memory.views(slot)[0]) for slot in range(20, 30)] == names


class Heard:
    """A `KvTransport` that notes what is exported."""

    pull_rate = 0.0

    def __init__(self) -> None:
        self.told: list[tuple[int, int, bool]] = []

    def exported(self, transfer: bytes, first: int, slots: Items[int], *, is_last: bool) -> None:
        self.told.append((first, len(slots), is_last))

    def pull(self, source: KvSource, names: Items[bytes], slots: Items[int]) -> None: ...

    def stop(self, transfer: bytes) -> None: ...

    def withdraw(self, transfer: bytes) -> None: ...


def test_an_export_without_a_slot_for_a_block_ends_before_it() -> None:
    """Also if slots are free again later: a puller wants blocks without a gap."""
    copies, heard = SlowCopies(NameMemory(20), NameMemory(20)), Heard()
    staging = Staging(Transfers(KVCache(20, SIZE)), heard, copies, range(3))
    staging.exported(b"other", 0, [9], is_last=True)
    staging.exported(b"this", 0, [1, 2, 3, 4], is_last=False)
    staging.release(b"other")
    while copies.move():
        pass
    staging.exported(b"this", 4, [5], is_last=True)
    assert not copies.move()
    assert heard.told == [(0, 2, True)]
    staging.check_integrity()
    staging.release(b"this")
    staging.check_integrity()


@pytest.mark.parametrize("seed", range(25))
def test_random_transfers_through_host_memory_leave_the_books_right(seed: int) -> None:
    chaos = Chaos(seed, StagedWorker)
    chaos.run(250)
    chaos.settle()


@pytest.mark.parametrize("seed", range(24))
def test_random_transfers_leave_the_books_right(seed: int) -> None:
    chaos = Chaos(seed)
    chaos.run(250)
    chaos.settle()
