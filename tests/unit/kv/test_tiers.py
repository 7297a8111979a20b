"""What goes down to host memory and to the disk, what comes up again, and what gives way."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from penstock.kv.blocks import ROOT, KvEventLog, block_hashes
from penstock.kv.cache import KVCache
from penstock.kv.moving import SlotLayout
from penstock.kv.radix import Lease, Node, Root
from penstock.kv.rates import Rate
from penstock.kv.shelves import Shelves, Spot, TierBlock
from penstock.kv.tiers import DISK_PATIENCE, PROBE_BLOCKS, STALE_SECONDS, Done, HostTier, Tiers
from penstock.wire.messages import BlocksRemoved, BlocksStored, KvSource, WorkerStats

SIZE = 4
BYTES = 16
"""A page holds the name of its block."""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Queued:
    """A copy that ends after some polls. Like one of a GPU, it happens at an unknown moment before: at the last."""

    polls: int
    pages: Sequence[int]
    copies: Sequence[tuple[memoryview, memoryview]]
    on_end: Callable[[], None]
    is_save: bool
    is_made: bool = False

    def make(self) -> None:
        if not self.is_made:
            self.is_made = True
            for target, source in self.copies:
                target[:] = source


class MemoryCopies:
    """`kv.tiers.PageCopies` between two pieces of memory, and a `SlotMemory`."""

    def __init__(self, pages: int, slots: int, polls: int = 0) -> None:
        self.layout = SlotLayout(slots, BYTES, (0,))
        self.file = -1
        self.polls = polls
        self.load_rate = BYTES / 0.001
        self.pages = bytearray(pages * BYTES)
        self.host = bytearray(slots * BYTES)
        self.saved = 0
        self.queue: list[Queued] = []

    def page(self, page: int) -> memoryview:
        return memoryview(self.pages)[page * BYTES : (page + 1) * BYTES]

    def views(self, slot: int) -> Sequence[memoryview]:
        return (memoryview(self.host)[slot * BYTES : (slot + 1) * BYTES],)

    def checksum(self, strips: Sequence[memoryview]) -> int:
        return hash(bytes(strips[0]))

    def save(self, pages: Sequence[int], slots: Sequence[int], on_end: Callable[[], None]) -> None:
        self.saved += len(pages)
        copies = [(self.views(slot)[0], self.page(page)) for page, slot in zip(pages, slots, strict=True)]
        self.queue.append(Queued(self.polls, pages, copies, on_end, is_save=True))

    def load(self, slots: Sequence[int], pages: Sequence[int], on_end: Callable[[], None]) -> None:
        copies = [(self.page(page), self.views(slot)[0]) for page, slot in zip(pages, slots, strict=True)]
        self.queue.append(Queued(self.polls, pages, copies, on_end, is_save=False))

    def protect(self, pages: Iterable[int]) -> None:
        for queued in self.queue:
            if queued.is_save and not set(pages).isdisjoint(queued.pages):
                queued.make()

    def poll(self) -> None:
        for queued in list(self.queue):
            queued.polls -= 1
            if queued.polls < 0:
                self.queue.remove(queued)
                queued.make()
                queued.on_end()


class MemoryFiles:
    """`kv.tiers.BlockFiles` without files. What was asked for is done by `work`."""

    def __init__(self, slots: int, seconds: float = 0.002) -> None:
        self.slots, self.seconds = slots, seconds
        self.stored: dict[int, tuple[bytes, bytes, bytes]] = {}
        self.asked: list[tuple[str, int, int, bytes, bytes, memoryview]] = []
        self.done: list[Done] = []
        self.failures: list[str] = []
        self.on_done: Callable[[], None] = lambda: None

    def recovered(self) -> Sequence[tuple[int, bytes, bytes]]:
        return [(slot, name, parent) for slot, (name, parent, _) in self.stored.items()]

    def write(self, number: int, slot: int, name: bytes, parent: bytes, data: memoryview) -> None:
        self.asked.append(("write", number, slot, name, parent, data))

    def read(self, number: int, slot: int, name: bytes, data: memoryview) -> None:
        self.asked.append(("read", number, slot, name, b"", data))

    def forget(self, slot: int) -> None:
        self.asked.append(("forget", 0, slot, b"", b"", memoryview(b"")))

    def close(self) -> None:
        pass

    def take_done(self) -> list[Done]:
        done, self.done = self.done, []
        return done

    def work(self, count: int = 1000) -> None:
        for what, number, slot, name, parent, data in self.asked[:count]:
            failure = self.failures.pop() if self.failures and what != "forget" else ""
            if what == "forget":
                self.stored.pop(slot, None)
                continue
            if what == "write" and not failure:
                self.stored[slot] = name, parent, bytes(data)
            elif what == "read" and not failure:
                assert self.stored[slot][0] == name
                data[:] = self.stored[slot][2]
            self.done.append(Done(number, failure, self.seconds))
        del self.asked[:count]


class World:
    """A device's cache with tiers below it, and sequences that come and go."""

    def __init__(self, pages: int = 16, host: int = 64, disk: int = 0, polls: int = 0, files: MemoryFiles | None = None) -> None:
        self.clock = Clock()
        self.cache = KVCache(pages, SIZE)
        self.copies = MemoryCopies(pages, host, polls)
        self.files = files or (MemoryFiles(disk) if disk else None)
        self.prefill = Rate()
        # A block takes 10 ms to compute.
        self.prefill.measure(SIZE, 0.010, 0.0)
        self.tiers = Tiers(HostTier(self.copies, self.copies, 4), self.files, self.cache.events, self.prefill, SIZE, BYTES, self.clock)
        self.cache.below = self.tiers
        self.tiers.listener = self
        self.pulled: dict[bytes, int] = {}
        self.ended: dict[bytes, str] = {}
        self.leases: list[Lease] = []
        self.pulls = 0
        # What the events say.
        self.told = self.snapshot()

    @property
    def host_blocks(self) -> int:
        return self.tiers.add_stats(WorkerStats()).kv_host_blocks

    @property
    def disk_blocks(self) -> int:
        return self.tiers.add_stats(WorkerStats()).kv_disk_blocks

    def arrived(self, transfer: bytes, blocks: int) -> None:
        self.pulled[transfer] = blocks

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        self.ended[transfer] = failure

    def lease(self) -> Lease:
        self.leases.append(Lease(100.0, is_session=True))
        return self.leases[-1]

    def run(self, tokens: list[int], lease: Lease | None = None, *, loads: bool = True) -> int:
        """A turn: loads, computes the rest, ends. Returns how many blocks were not computed."""
        path = self.cache.match(ROOT, [*tokens, -1])
        self.cache.acquire(path, lease)
        if loads:
            path += self.load(tokens, path, lease)
        reused = len(path)
        keys = [tuple(tokens[start : start + SIZE]) for start in range(reused * SIZE, len(tokens), SIZE)]
        pages = self.cache.allocate(len(keys), self.clock.now)
        # As before a step of the model.
        self.copies.protect(pages)
        new = self.cache.commit(path[-1] if path else self.cache.root(ROOT), keys, pages, lease)
        for node in new:
            self.copies.page(node.page)[:] = node.name
        path += new
        if lease is not None:
            self.tiers.pause(path)
        self.cache.release(path)
        self.check()
        return reused

    def load(self, tokens: list[int], path: Sequence[Node], lease: Lease | None) -> list[Node]:
        names = block_hashes(tokens, SIZE)[len(path) :]
        count = self.tiers.plan(names)
        if not count:
            return []
        pages = self.cache.allocate(count, self.clock.now)
        transfer = self.pull(names[:count], pages)
        while transfer not in self.ended:
            self.poll()
        arrived = self.pulled.get(transfer, 0)
        for name, page in zip(names[:arrived], pages, strict=False):
            assert self.copies.page(page) == name, "another block than was asked for"
        keys = [tuple(tokens[start : start + SIZE]) for start in range(len(path) * SIZE, (len(path) + arrived) * SIZE, SIZE)]
        self.cache.give_back(pages[arrived:])
        return self.cache.commit(path[-1] if path else self.cache.root(ROOT), keys, pages[:arrived], lease)

    def pull(self, names: Sequence[bytes], pages: Sequence[int]) -> bytes:
        self.pulls += 1
        transfer = self.pulls.to_bytes(16)
        self.tiers.pull(KvSource(transfer, ""), names, pages)
        return transfer

    def poll(self) -> None:
        if self.files is not None:
            self.files.work()
        self.step()

    def step(self) -> None:
        self.copies.poll()
        self.tiers.poll()

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(100):
            self.poll()
        assert not self.tiers.has_work
        assert not self.copies.queue

    def check(self) -> None:
        self.tiers.check_integrity(self.leases)
        self.read_events()

    def snapshot(self) -> dict[str, set[bytes]]:
        found: dict[str, set[bytes]] = {"device": set(), "host": set(), "disk": set()}
        for stored in self.cache.snapshot().events:
            assert isinstance(stored, BlocksStored)
            found[stored.tier].update(stored.blocks)
        return found

    def read_events(self) -> None:
        # First: it reports what has left.
        found = self.snapshot()
        taken = self.cache.events.take()
        for event in () if taken is None else taken.events:
            match event:
                case BlocksStored():
                    self.told[event.tier].update(event.blocks)
                case BlocksRemoved():
                    assert self.told[event.tier].issuperset(event.blocks)
                    self.told[event.tier].difference_update(event.blocks)
        assert self.told == found


def tokens(number: int, blocks: int) -> list[int]:
    return [number * 1000 + index for index in range(blocks * SIZE)]


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.check()


def test_what_is_evicted_is_loaded_again(world: World) -> None:
    for number in range(4):
        assert world.run(tokens(number, 8)) == 0
    assert [world.run(tokens(number, 8)) for number in range(4)] == [8] * 4
    assert world.tiers.counts["host loaded"] == 32


def test_without_a_pause_nothing_is_saved_before_its_eviction(world: World) -> None:
    world.run(tokens(1, 8))
    world.settle()
    assert world.host_blocks == 0
    world.run(tokens(2, 8), world.lease())
    world.settle()
    assert world.host_blocks == 8


def test_an_eviction_copies_nothing_that_a_pause_has_saved(world: World) -> None:
    world.run(tokens(1, 8), world.lease())
    world.settle()
    saved = world.copies.saved
    world.run(tokens(2, 16), loads=False)
    assert world.copies.saved == saved
    assert world.run(tokens(1, 8)) == 8


def test_a_close_frees_in_every_tier() -> None:
    world = World(disk=64)
    lease = world.lease()
    world.run(tokens(1, 8), lease)
    world.settle()
    assert (world.host_blocks, world.disk_blocks) == (8, 8)
    world.cache.end_lease(lease, free_exclusive=True)
    world.settle()
    assert (world.host_blocks, world.disk_blocks) == (0, 0)
    assert world.files is not None
    assert not world.files.stored, "a restart would find it"
    world.check()


def test_a_close_leaves_what_others_have_used(world: World) -> None:
    first, second = world.lease(), world.lease()
    world.run(tokens(1, 4), first)
    world.run(tokens(1, 2))
    world.run(tokens(1, 3), second)
    world.settle()
    world.cache.end_lease(first, free_exclusive=True)
    assert world.host_blocks == 3
    world.cache.end_lease(second, free_exclusive=True)
    assert world.host_blocks == 2


def test_the_end_of_a_lease_frees_nothing(world: World) -> None:
    lease = world.lease()
    world.run(tokens(1, 8), lease)
    world.run(tokens(2, 16))
    world.cache.end_lease(lease, free_exclusive=False)
    world.leases.clear()
    assert world.run(tokens(1, 8)) == 8


def test_leased_blocks_give_way_last() -> None:
    world = World(host=16)
    world.run(tokens(1, 8), world.lease())
    for number in range(2, 12):
        world.run(tokens(number, 8), loads=False)
    assert world.run(tokens(1, 8)) == 8


def test_leases_protect_only_a_share_of_a_tier() -> None:
    """Otherwise the sessions of one tenant take all of it, and what others have written goes at once."""
    shelves, root, lease = Shelves(4, 0, KvEventLog(), 0.5), Root(ROOT), Lease(100.0, is_session=True)

    def store(number: int, *leases: Lease) -> None:
        node = Node((number,), number, root, bytes([number]) * 16)
        node.leases = set(leases)
        slot = shelves.make_room(shelves.host)
        assert slot is not None
        spot = shelves.add(node, slot)
        shelves.take_over(spot.block, node)
        shelves.use(spot.block, shelves.tick())
        shelves.unpin(shelves.host, spot)

    for number in range(4):
        store(number, lease)
    for number in range(4, 8):
        store(number)
    assert sorted(spot.block.name[0] for spot in shelves.host) == [2, 3, 6, 7]
    shelves.check_integrity(Counter(), [lease])


def test_a_close_frees_what_a_restart_has_found_on_disk() -> None:
    """Also if host memory is too slow to be used, so that nothing comes through it."""
    files = MemoryFiles(64)
    first = World(files=files)
    first.run(tokens(1, 4), first.lease())
    first.settle()
    assert len(files.stored) == 4
    world = World(files=files)
    world.copies.load_rate = BYTES / 1.0
    lease = world.lease()
    world.run(tokens(1, 4), lease, loads=False)
    world.run(tokens(2, 16), loads=False)
    world.cache.end_lease(lease, free_exclusive=True)
    world.settle()
    assert not files.stored
    world.check()


def test_what_a_turn_has_superseded_gives_way_first() -> None:
    world = World(pages=32, host=16)
    lease = world.lease()
    world.run(tokens(1, 8), lease)
    world.settle()
    world.run([*tokens(1, 4), *tokens(9, 4)], lease)
    kept = world.cache.match(ROOT, [*tokens(1, 4), *tokens(9, 4), -1])
    world.cache.demote(lease, set(kept))
    world.settle()
    world.run(tokens(2, 8), world.lease())
    world.settle()
    world.check()
    assert world.tiers.plan(block_hashes([*tokens(1, 4), *tokens(9, 4)], SIZE)) == 8
    assert world.tiers.plan(block_hashes(tokens(1, 8), SIZE)) == 4


def shelves_on_disk(blocks: int) -> tuple[Shelves, list[TierBlock]]:
    shelves = Shelves(1, blocks, KvEventLog(), 0.5)
    names = [number.to_bytes(16) for number in range(blocks)]
    shelves.recover([(slot, name, b"") for slot, name in enumerate(names)])
    return shelves, [block for name in names if (block := shelves.get(name)) is not None]


def calls_of(function: Callable[[], object]) -> int:
    """How many functions it calls in all, those of C included."""
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def test_who_needs_room_does_not_put_in_order_what_was_used_meanwhile() -> None:
    """A block that nobody uses is first for long, and behind it chains are used again and again."""
    chains, length = 40, 50
    shelves, blocks = shelves_on_disk(chains * length)
    for chain in [*range(chains)] * 4:
        tick = shelves.tick()
        for block in blocks[max(1, chain * length) : (chain + 1) * length]:
            shelves.use(block, tick)
    shelves.check_integrity(Counter())
    room: list[int | None] = []
    calls = [calls_of(lambda: room.append(shelves.make_room(shelves.disk))) for _ in range(3 * length)]
    assert max(calls) < 3 * length, "at most one chain is put in order"
    assert room == [*range(3 * length)]


@pytest.mark.parametrize("seed", range(5))
def test_the_least_recently_used_gives_way_and_of_these_the_deepest(seed: int) -> None:
    choose = random.Random(seed)
    shelves, blocks = shelves_on_disk(100)
    spots = [block.disk for block in blocks if block.disk is not None]
    here, pinned = set(spots), set[Spot]()
    while len(here) > 20:
        for spot in choose.sample(sorted(here, key=lambda spot: spot.slot), 5):
            if spot in pinned:
                pinned.remove(spot)
                shelves.unpin(shelves.disk, spot)
            elif choose.random() < 0.3:
                pinned.add(spot)
                shelves.disk.pin(spot)
        tick = shelves.tick()
        for block in choose.sample(blocks, choose.randrange(12)):
            shelves.use(block, tick)
        shelves.disk.check_integrity()
        if choose.random() < 0.5:
            first = min(here - pinned, key=lambda spot: (spot.block.used, -spot.block.depth))
            taken = shelves.disk.take()
            assert taken == (first.slot, first)
            here.remove(first)
            # Its slot is being written again, and nobody uses its block any more.
            shelves.disk.pin(first)
            blocks.remove(first.block)
            pinned.discard(first)


def test_a_block_that_is_read_again_and_again_takes_no_memory_in_its_queue() -> None:
    shelves, blocks = shelves_on_disk(8)
    assert shelves.make_room(shelves.disk) == 0
    spot = blocks[4].disk
    assert spot is not None
    for _ in range(1000):
        shelves.disk.pin(spot)
        shelves.unpin(shelves.disk, spot)
    assert spot.moment is not None
    assert len(spot.moment.order or ()) < 100
    assert [shelves.make_room(shelves.disk) for _ in range(7)] == [1, 2, 3, 4, 5, 6, 7]


def test_the_oldest_chain_gives_way_from_its_end() -> None:
    world = World(host=12)
    for number in (1, 2, 3):
        world.run(tokens(number, 6), loads=False)
        world.run(tokens(0, 16), loads=False)
        world.settle()
    # Of the first chain nothing is left, the others were used since.
    assert world.tiers.plan(block_hashes(tokens(1, 6), SIZE)) == 0
    names = block_hashes(tokens(3, 6), SIZE)
    assert world.tiers.plan(names) in range(1, 7)
    world.check()


def test_parents_that_were_saved_before_their_children_do_not_go_first() -> None:
    """A session's second turn: the blocks of the first are in host memory, the new ones come later."""
    world = World(pages=32, host=12)
    lease = world.lease()
    world.run(tokens(1, 4), lease)
    world.settle()
    world.run(tokens(1, 8), lease)
    world.settle()
    world.run(tokens(2, 6), world.lease())
    world.settle()
    names = block_hashes(tokens(1, 8), SIZE)
    assert world.tiers.plan(names) == 6


def test_the_disk_gets_what_host_memory_has_and_survives() -> None:
    files = MemoryFiles(64)
    world = World(host=16, files=files)
    for number in range(6):
        world.run(tokens(number, 8), world.lease())
        world.settle()
    assert world.disk_blocks == 48
    world.check()
    again = World(host=16, files=files)
    assert len(again.told["disk"]) == 48
    # Nobody knows how fast the disk is: a few blocks at first, then all.
    assert again.run(tokens(0, 8)) == PROBE_BLOCKS
    assert [again.run(tokens(number, 8)) for number in range(1, 6)] == [8] * 5
    assert again.tiers.counts["disk loaded"] == 48


@pytest.mark.parametrize("failure", ["corrupt", "error"])
def test_a_block_that_cannot_be_read_is_dropped_and_computed(failure: str) -> None:
    files = MemoryFiles(64)
    World(host=16, files=files).run(tokens(1, 1))
    first = World(pages=32, host=16, files=files)
    first.run(tokens(1, 8), first.lease())
    first.settle()
    world = World(pages=32, host=16, files=files)
    files.failures = [failure, "", "", ""]
    assert world.run(tokens(1, 8)) == 3
    assert world.tiers.counts[f"disk {failure}"] == 1
    assert world.ended[(1).to_bytes(16)]
    world.settle()
    world.check()
    assert world.tiers.plan(block_hashes(tokens(1, 8), SIZE)) == 3


def test_a_full_disk_is_no_obstacle() -> None:
    world = World(disk=64)
    assert world.files is not None
    world.files.failures = ["full"] * 100
    world.run(tokens(1, 8), world.lease())
    world.settle()
    assert world.disk_blocks == 0
    assert world.tiers.counts["disk full"] == 8
    world.run(tokens(2, 16), loads=False)
    assert world.run(tokens(1, 8)) == 8
    world.check()


def test_a_silent_disk_is_given_up() -> None:
    files = MemoryFiles(64)
    first = World(files=files)
    first.run(tokens(1, 8), first.lease())
    first.settle()
    world = World(files=files)
    names = block_hashes(tokens(1, 8), SIZE)
    transfer = world.pull(names, world.cache.allocate(8, 0.0))
    world.step()
    assert not world.tiers.has_work
    assert world.tiers.next_expiry == world.clock.now + DISK_PATIENCE
    world.clock.now += DISK_PATIENCE
    world.step()
    assert "silent" in world.ended[transfer]
    world.check()
    assert world.tiers.plan(names) == 0, "it is slower than computing now"
    # What it reads after all is in host memory.
    world.settle()
    world.check()
    assert world.host_blocks == 8


def test_host_memory_slower_than_computing_is_not_used(world: World) -> None:
    world.run(tokens(1, 8))
    world.run(tokens(2, 16), loads=False)
    names = block_hashes(tokens(1, 8), SIZE)
    assert world.tiers.plan(names) == 8
    world.copies.load_rate = BYTES / 0.020
    assert world.tiers.plan(names) == 0
    assert world.tiers.counts["host declined"] == 8
    saved = world.copies.saved
    world.run(tokens(3, 16), loads=False)
    world.run(tokens(4, 16), world.lease(), loads=False)
    world.settle()
    assert world.copies.saved == saved, "nothing more goes there"
    world.prefill.per_second = 0.0
    assert world.tiers.plan(names) == 8, "while nobody knows how fast prompts are computed"
    world.copies.load_rate = BYTES / 0.300
    assert world.tiers.plan(names) == 3, "but for no longer than a second"


def test_a_disk_slower_than_computing_is_not_used_and_measured_again_later() -> None:
    files = MemoryFiles(64, seconds=0.020)
    first = World(files=files)
    first.run(tokens(1, 12), first.lease())
    first.settle()
    world = World(files=files)
    assert world.run(tokens(1, 12)) == PROBE_BLOCKS
    world.run(tokens(2, 16), loads=False)
    world = World(files=files)
    world.tiers.disk_rate.measure(BYTES, 0.020, world.clock.now)
    names = block_hashes(tokens(1, 12), SIZE)
    assert world.tiers.plan(names) == 0
    assert world.tiers.counts["disk declined"] == 12
    written = len(files.stored)
    world.run(tokens(3, 8), world.lease(), loads=False)
    world.settle()
    assert len(files.stored) == written, "nothing more goes there"
    world.clock.now += STALE_SECONDS + 1
    files.seconds = 0.001
    assert world.run(tokens(1, 12)) == PROBE_BLOCKS


def test_a_slow_disk_does_not_keep_host_memory_from_being_used() -> None:
    files = MemoryFiles(64, seconds=0.050)
    world = World(host=8, files=files)
    world.run(tokens(1, 12), world.lease())
    world.settle()
    world.run(tokens(2, 16), loads=False)
    world.tiers.disk_rate.measure(BYTES, 0.050, world.clock.now)
    names = block_hashes(tokens(1, 12), SIZE)
    in_host = world.snapshot()["host"]
    leading = next(index for index, name in enumerate([*names, b""]) if name not in in_host)
    assert world.tiers.plan(names) == leading < 12


def slow_load() -> tuple[World, bytes]:
    """A load of 8 blocks from host memory, where copies take three steps."""
    world = World(polls=3)
    world.run(tokens(1, 8))
    world.run(tokens(2, 16), loads=False)
    for _ in range(5):
        world.step()
    return world, world.pull(block_hashes(tokens(1, 8), SIZE), world.cache.allocate(8, 0.0))


def test_a_stopped_load_ends_when_its_copy_has() -> None:
    world, transfer = slow_load()
    world.step()
    world.tiers.stop(transfer)
    assert transfer not in world.ended, "a copy is under way"
    world.check()
    for _ in range(5):
        world.step()
    assert world.ended[transfer] == "stopped"
    assert world.pulled[transfer] == 4
    world.check()


def test_a_load_that_waits_for_a_copy_has_no_deadline() -> None:
    """Only a silent disk is given up. A deadline in the past would wake an engine that has nothing to do, again and again."""
    world, transfer = slow_load()
    world.tiers.poll()
    world.clock.now += DISK_PATIENCE + 1
    world.tiers.poll()
    assert transfer not in world.ended
    assert world.tiers.next_expiry > world.clock.now
    for _ in range(10):
        world.step()
    assert world.ended[transfer] == ""
    world.check()


def test_a_block_freed_while_it_is_written_is_gone_afterwards() -> None:
    world = World(disk=64)
    lease = world.lease()
    world.run(tokens(1, 4), lease)
    world.step()
    world.step()
    assert world.files is not None
    assert world.files.asked
    world.cache.end_lease(lease, free_exclusive=True)
    world.check()
    # The same blocks come again, before the old ones have ended.
    world.run(tokens(1, 4), world.lease())
    world.check()
    world.settle()
    assert (world.host_blocks, world.disk_blocks) == (4, 4)
    world.check()


def test_a_load_that_finds_no_room_ends() -> None:
    """All slots of host memory are taken by another load, which waits for the disk."""
    files = MemoryFiles(64)
    first = World(pages=32, host=32, files=files)
    for number in (1, 2):
        first.run(tokens(number, 8), first.lease())
        first.settle()
    world = World(pages=32, host=8, files=files)
    one = world.pull(block_hashes(tokens(1, 8), SIZE), world.cache.allocate(8, 0.0))
    two = world.pull(block_hashes(tokens(2, 8), SIZE), world.cache.allocate(8, 0.0))
    world.step()
    assert world.ended == {two: "no room in host memory"}
    world.settle()
    assert world.ended == {one: "", two: "no room in host memory"}
    world.check()


@pytest.mark.parametrize("seed", range(4))
def test_random_sessions(seed: int) -> None:
    """Sessions grow, pause, are closed and expire, with slow copies and a disk that fails."""
    draw = random.Random(seed)
    world = World(pages=24, host=draw.choice([8, 20, 60]), disk=draw.choice([0, 30, 200]), polls=draw.choice([0, 2]))
    sessions: dict[int, Lease] = {}
    lengths: dict[int, int] = {}
    for _ in range(150):
        number = draw.randrange(8)
        action = draw.random()
        world.clock.now += draw.random()
        if action < 0.7:
            lease = sessions.setdefault(number, world.lease()) if number < 6 else None
            lengths[number] = min(16, lengths.get(number, 0) + draw.randrange(1, 6))
            world.run(tokens(number, lengths[number]), lease)
        elif action < 0.8 and number in sessions:
            world.cache.end_lease(sessions.pop(number), free_exclusive=draw.random() < 0.5)
            lengths.pop(number)
        elif world.files is not None and action < 0.9:
            world.files.failures = draw.choices(["", "corrupt", "full", "error"], k=10)
        else:
            world.step()
        world.check()
        world.cache.check_integrity([], [], world.leases)
    for lease in sessions.values():
        world.cache.end_lease(lease, free_exclusive=True)
    world.settle()
    world.check()


def test_rates_average_times() -> None:
    rate = Rate()
    assert rate.per_second == 0
    rate.measure(100, 1.0, 1.0)
    rate.measure(0, 1.0, 2.0)
    rate.measure(5, 0.0, 2.0)
    assert (rate.per_second, rate.measured_at) == (100, 1.0)
    rate.measure(100_000, 1.0, 3.0)
    assert 100 < rate.per_second < 140, "one measurement that was much too fast hides nothing"
