"""The tiers below the device: KV blocks go down to host memory and to the disk, and are loaded again. Books only: others copy and write.

A block goes down when its session pauses, or at the latest when it is evicted from the device. So an eviction usually has nothing left to
copy. From host memory blocks are written to the disk in the background, the oldest first. A block comes up the same way: from the disk to
host memory, from there to a page. It also stays in the tiers that it was in.

A block is loaded if that takes less time than computing it, by rates that are measured all the time. A tier that is slower than computing
is not read, and nothing more goes there.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from msgspec import structs

from penstock.config.engines import SessionSettings
from penstock.kv.blocks import KvEventLog
from penstock.kv.moving import SlotMemory
from penstock.kv.radix import Lease, Node
from penstock.kv.rates import Rate
from penstock.kv.shelves import Shelves, Spot, TierBlock
from penstock.wire.messages import BlocksStored, KvSource, Tier, WorkerStats

MAX_READS = 32
"""Blocks that one load reads from the disk at a time."""
MAX_WRITES = 8
"""Blocks on their way to the disk at a time. Each keeps its slot in host memory."""
MAX_PIECE = 64
"""Blocks of a load that are copied together. Each piece can be used when it has arrived."""
PROBE_BLOCKS = 8
"""Read from a disk whose rate is not known."""
PROBE_SECONDS = 1.0
"""What a load may take while nobody knows how fast prompts are computed."""
STALE_SECONDS = 60.0
"""A disk that was slower than computing is measured again after this time."""
DISK_PATIENCE = 2.0
"""A load that waits for the disk this long is given up, and the rest is computed."""


class PageCopies(Protocol):
    """Copies between pages of the device and slots in host memory: `engine.page_copies`. Called in the engine's thread.

    Each call queues copies; `on_end` is called when all of them have ended. Copies of one kind end in the order of their calls.
    """

    @property
    def load_rate(self) -> float:
        """Bytes per second, as measured."""

    def save(self, pages: Sequence[int], slots: Sequence[int], on_end: Callable[[], None]) -> None: ...

    def load(self, slots: Sequence[int], pages: Sequence[int], on_end: Callable[[], None]) -> None: ...

    def protect(self, pages: Iterable[int]) -> None:
        """These pages will be written anew: saves that read them come first."""


class HostTier(NamedTuple):
    """Host memory: its slots, their bytes, and the copies. At most `max_copying` blocks are queued for either direction at a time, so that
    a step is not held up; what is evicted is saved at once, however much it is."""

    copies: PageCopies
    memory: SlotMemory
    max_copying: int


class Done(NamedTuple):
    """The end of a read or a write. `failure` says why it failed: `full`, `corrupt` or `error`."""

    number: int
    failure: str
    seconds: float


class BlockFiles(Protocol):
    """Blocks on disk, each in a slot. Every call returns at once; what it asks for is done in order, in another thread. That thread calls
    `on_done` when something can be taken."""

    slots: int
    on_done: Callable[[], None]

    def recovered(self) -> Sequence[tuple[int, bytes, bytes]]:
        """What an earlier process has left: slot, name and parent of each block, the oldest first."""

    def write(self, number: int, slot: int, name: bytes, parent: bytes, data: memoryview) -> None: ...

    def read(self, number: int, slot: int, name: bytes, data: memoryview) -> None: ...

    def forget(self, slot: int) -> None:
        """Nobody finds the block in this slot any more, not even after a restart."""

    def take_done(self) -> list[Done]: ...

    def close(self) -> None:
        """Does what was asked for, then ends."""


class PullListener(Protocol):
    """Who asks for loads: `kv.transfers.Transfers`."""

    def arrived(self, transfer: bytes, blocks: int) -> None: ...

    def pull_ended(self, transfer: bytes, failure: str) -> None: ...


class Load:
    """A chain of blocks on its way to these pages.

    Blocks before `arrived` are in their pages, blocks before `started` are being copied there, blocks before `requested` are in host memory
    or being read from the disk. Blocks from `end` on are given up.
    """

    def __init__(self, transfer: bytes, blocks: Sequence[TierBlock], pages: Sequence[int], now: float) -> None:
        self.transfer = transfer
        self.patient_until = now + DISK_PATIENCE
        self.blocks = blocks
        self.pages = pages
        self.spots: list[Spot | None] = [None] * len(blocks)
        self.from_disk: set[int] = set()
        self.end = len(blocks)
        self.failure = ""
        self.requested = 0
        self.started = 0
        self.arrived = 0

    @property
    def can_go_on(self) -> bool:
        """Whether it waits for nothing but the next `poll`."""
        if self.arrived < self.started:
            return False
        if self.arrived >= self.end or self.requested < min(self.end, self.arrived + MAX_READS):
            return True
        spot = self.spots[self.started]
        return spot is not None and spot.is_ready


class Tiers:
    """What is in host memory and on disk, and what is on its way. Called in the engine's thread only.

    To `Transfers` it is a place to pull from. Nothing blocks: `poll` continues what was begun. `prefill` is the measured rate of computing
    prompts, in tokens. `block_bytes` is the size of a block, for the rates.
    """

    def __init__(
        self,
        host: HostTier,
        files: BlockFiles | None,
        events: KvEventLog,
        prefill: Rate,
        page_size: int,
        block_bytes: int,
        clock: Callable[[], float],
        lease_share: float = SessionSettings.lease_share,
    ) -> None:
        self.listener: PullListener | None = None
        self.disk_rate = Rate()
        self._copies, self._memory, self._max_copying = host
        self._files = files
        self._prefill = prefill
        self._page_size = page_size
        self._block_bytes = block_bytes
        self._clock = clock
        self._shelves = Shelves(host.memory.layout.slots, 0 if files is None else files.slots, events, lease_share)
        self._host, self._disk, self.counts = self._shelves.host, self._shelves.disk, self._shelves.counts
        # Nodes of paused sessions that are to be saved, with the time of the pause; blocks to be written to the disk. The oldest first.
        self._to_save: OrderedDict[bytes, tuple[Node, int]] = OrderedDict()
        self._to_write: OrderedDict[bytes, TierBlock] = OrderedDict()
        self._saving: set[Spot] = set()
        self._loads: dict[bytes, Load] = {}
        # By their number: the slots in host memory and on disk.
        self._writes: dict[int, tuple[Spot, Spot]] = {}
        self._reads: dict[int, tuple[Spot, Spot]] = {}
        self._last_number = 0
        if files is not None:
            self._shelves.recover(files.recovered())

    def add_stats(self, stats: WorkerStats) -> WorkerStats:
        """The same, with what is known here."""
        return structs.replace(
            stats,
            kv_host_blocks=len(self._host),
            kv_host_total=self._host.slots,
            kv_disk_blocks=len(self._disk),
            kv_disk_total=self._disk.slots,
            host_rate=self._copies.load_rate,
            disk_rate=self.disk_rate.per_second,
            kv_tier_events=dict(self.counts),
        )

    @property
    def has_work(self) -> bool:
        """Whether `poll` has something to do now. It may also wait for copies or for the disk."""
        return bool(self._to_save and len(self._saving) < self._max_copying) or any(load.can_go_on for load in self._loads.values())

    @property
    def next_expiry(self) -> float:
        """When a load that waits for the disk is given up, if nothing else happens."""
        return min([load.patient_until for load in self._loads.values() if load.arrived == load.started], default=math.inf)

    def poll(self) -> None:
        """Continues what was begun. Call it in every step, and when the disk has done something."""
        if self._reads or self._writes:
            self._take_done()
        for load in list(self._loads.values()):
            self._advance(load)
        room = self._max_copying - len(self._saving)
        if self._to_save and room > 0:
            self._save([self._to_save.popitem(last=False)[1] for _ in range(min(room, len(self._to_save)))])
        if self._to_write:
            self._write_behind()
        self._shelves.report_left()

    # Down.

    def pause(self, path: Sequence[Node]) -> None:
        """A session's turn has ended; its blocks will be needed again. Those that are not in host memory are saved in the next steps."""
        tick, pays = self._shelves.tick(), self._pays("host")
        for node in reversed(path):
            if not self._touch(node, tick) and pays:
                self._to_save[node.name] = node, tick

    def demote(self, nodes: Sequence[Node]) -> None:
        """These nodes leave the device now. Their pages are not used again yet."""
        tick = self._shelves.tick()
        pays = self._pays("host")
        for node in nodes:
            self._to_save.pop(node.name, None)
            if not pays:
                self._touch(node, tick)
        if pays:
            self._save([(node, tick) for node in nodes])
        self._shelves.report_left()

    def protect(self, pages: Sequence[int]) -> None:
        """Somebody else will write to these pages: what is saved of them is read first."""
        self._copies.protect(pages)

    def drop(self, nodes: Iterable[Node]) -> None:
        """These nodes leave the device for good: their session was closed, and nobody else has used them."""
        for node in nodes:
            self._to_save.pop(node.name, None)
            block = self._shelves.get(node.name)
            if block is not None and not block.leases and not block.is_public:
                self._free(block)
        self._shelves.report_left()

    def end_lease(self, lease: Lease, *, free_exclusive: bool) -> None:
        """The lease is over. `free_exclusive`: blocks that only this lease held are freed, in all tiers."""
        exclusive = self._shelves.end_lease(lease)
        if free_exclusive:
            for block in exclusive:
                self._free(block)
            self._shelves.report_left()

    def supersede(self, lease: Lease, kept: Collection[bytes]) -> None:
        """The lease holds no block any more except these. Blocks that nobody else holds are the first to give way."""
        self._shelves.supersede(lease, kept)

    def _free(self, block: TierBlock) -> None:
        self._to_write.pop(block.name, None)
        if block.disk is not None and self._files is not None:
            self._files.forget(block.disk.slot)
        self._shelves.free(block)

    def _touch(self, node: Node, tick: int) -> bool:
        """The block was used now, wherever it is, and belongs to whom the node belongs. Returns whether it is in host memory, or on its
        way there."""
        block = self._shelves.get(node.name)
        if block is None:
            return False
        self._shelves.take_over(block, node)
        self._shelves.use(block, tick)
        return block.host is not None

    def _save(self, nodes: Iterable[tuple[Node, int]]) -> None:
        pages: list[int] = []
        spots: list[Spot] = []
        for node, tick in nodes:
            if self._touch(node, tick):
                continue
            slot = self._shelves.make_room(self._host)
            if slot is None:
                self.counts["host full"] += 1
                continue
            spot = self._shelves.add(node, slot)
            self._shelves.take_over(spot.block, node)
            self._shelves.use(spot.block, tick)
            spots.append(spot)
            pages.append(node.page)
        if spots:
            self._saving.update(spots)
            self._copies.save(pages, [spot.slot for spot in spots], lambda: self._saved(spots))

    def _saved(self, spots: Sequence[Spot]) -> None:
        self._saving.difference_update(spots)
        for spot in spots:
            spot.is_ready = True
            self._shelves.unpin(self._host, spot)
        blocks = [spot.block for spot in spots if not spot.block.is_gone]
        self._shelves.announce(blocks, self._host)
        if self._files is not None and self._pays("disk"):
            self._to_write.update({block.name: block for block in blocks if block.disk is None})
            while len(self._to_write) > self._host.slots:
                # The disk is slower than what comes. Most of these have left host memory, too.
                self._to_write.popitem(last=False)
                self.counts["disk busy"] += 1

    def _write_behind(self) -> None:
        while self._to_write and len(self._writes) < MAX_WRITES and self._files is not None:
            block = self._to_write.popitem(last=False)[1]
            if block.host is None or block.is_gone or block.disk is not None:
                continue
            slot = self._shelves.make_room(self._disk)
            if slot is None:
                self.counts["disk busy"] += 1
                continue
            spot = self._shelves.put(block, self._disk, slot)
            self._host.pin(block.host)
            self._last_number += 1
            self._writes[self._last_number] = block.host, spot
            self._files.write(self._last_number, slot, block.name, block.parent, self._memory.views(block.host.slot)[0])

    # Up.

    def plan(self, names: Iterable[bytes]) -> int:
        """How many of the first blocks of this chain are worth loading: as many as are there and come sooner than they are computed.

        If nobody knows how fast the disk is, or it was too slow a while ago, it is measured with a few blocks.
        """
        compute = self._compute_seconds()
        probes = PROBE_BLOCKS if self._needs_probe() else 0
        best = 0
        found: list[str] = []
        seconds = gain = best_gain = 0.0
        for name in names:
            block = self._shelves.get(name)
            tier = None if block is None else _fastest(block)
            if tier is None:
                break
            found.append(tier)
            is_probe = tier == "disk" and probes > 0
            probes -= is_probe
            load = 0.0 if is_probe else self._load_seconds(tier)
            seconds, gain = seconds + load, gain + compute - load
            if compute == math.inf:
                # Nobody knows what computing takes.
                best = len(found) if seconds <= PROBE_SECONDS else best
            elif gain > best_gain:
                best, best_gain = len(found), gain
        self.counts.update(f"{tier} declined" for tier in found[best:])
        return best

    def keep(self, names: Iterable[bytes]) -> None:
        """These blocks will be pulled next. What makes room for them until then does not push them out first."""
        tick = self._shelves.tick()
        for name in names:
            block = self._shelves.get(name)
            if block is not None:
                self._shelves.use(block, tick)

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Loads this chain into these pages, in order. Ends with `pull_ended`, in a later `poll`."""
        blocks: list[TierBlock] = []
        for name in names:
            block = self._shelves.get(name)
            if block is None or _fastest(block) is None:
                break
            blocks.append(block)
        load = self._loads[source.transfer] = Load(source.transfer, blocks, slots, self._clock())
        load.failure = "" if len(blocks) == len(names) else "a block has left its tier"
        # What is in host memory stays there until it is loaded.
        for index, block in enumerate(blocks):
            if block.host is not None:
                load.spots[index] = block.host
                self._host.pin(block.host)

    def stop(self, transfer: bytes) -> None:
        """Ends a load before it is complete. Its pages may be used again only after `pull_ended`."""
        load = self._loads.get(transfer)
        if load is not None:
            self._give_up(load, load.started, "stopped")

    def _advance(self, load: Load) -> None:
        while load.requested < min(load.end, load.arrived + MAX_READS):
            if load.spots[load.requested] is None and not self._request(load, load.requested):
                break
            load.requested += 1
        while load.started < min(load.end, load.arrived + self._max_copying) and self._begin_copy(load):
            pass
        if not load.can_go_on and load.started == load.arrived and self._clock() >= load.patient_until:
            self.counts["disk stalled"] += 1
            self.disk_rate.measure(self._block_bytes, DISK_PATIENCE, self._clock())
            self._give_up(load, load.started, "the disk is silent")
        if load.arrived >= load.end:
            self._end_load(load)

    def _request(self, load: Load, index: int) -> bool:
        """Has a block brought to host memory. Returns whether it will come."""
        block = load.blocks[index]
        if block.host is None:
            slot = None if block.disk is None or block.is_gone else self._shelves.make_room(self._host)
            if slot is None or block.disk is None or self._files is None:
                # Waiting for room could take for ever: those that have it may wait for others, too.
                self._give_up(load, index, "no room in host memory")
                return False
            spot = self._shelves.put(block, self._host, slot)
            self._disk.pin(block.disk)
            self._last_number += 1
            self._reads[self._last_number] = spot, block.disk
            self._files.read(self._last_number, block.disk.slot, block.name, self._memory.views(slot)[0])
        assert block.host is not None
        self._host.pin(block.host)
        load.spots[index] = block.host
        load.from_disk.add(index)
        return True

    def _begin_copy(self, load: Load) -> bool:
        """Has the next piece copied, if it is in host memory."""
        first = load.started
        slots: list[int] = []
        for spot in load.spots[first : min(load.end, first + MAX_PIECE, load.arrived + self._max_copying)]:
            if spot is None or not spot.is_ready:
                break
            slots.append(spot.slot)
        if slots:
            load.started += len(slots)
            self._copies.load(slots, load.pages[first : load.started], partial(self._copied, load, len(slots)))
        return bool(slots)

    def _copied(self, load: Load, count: int) -> None:
        for index in range(load.arrived, load.arrived + count):
            spot, load.spots[index] = load.spots[index], None
            assert spot is not None
            self._shelves.unpin(self._host, spot)
            self.counts["disk loaded" if index in load.from_disk else "host loaded"] += 1
        load.arrived += count
        load.patient_until = self._clock() + DISK_PATIENCE
        assert self.listener is not None
        self.listener.arrived(load.transfer, load.arrived)

    def _give_up(self, load: Load, end: int, failure: str) -> None:
        """Blocks from `end` on, which are not being copied, are not loaded."""
        for index in range(end, load.end):
            spot, load.spots[index] = load.spots[index], None
            if spot is not None:
                self._shelves.unpin(self._host, spot)
        if end < load.end:
            load.end, load.failure = end, failure

    def _end_load(self, load: Load) -> None:
        del self._loads[load.transfer]
        tick = self._shelves.tick()
        for block in load.blocks[: load.arrived]:
            if not block.is_gone:
                self._shelves.use(block, tick)
        assert self.listener is not None
        self.listener.pull_ended(load.transfer, load.failure)

    # The disk.

    def _take_done(self) -> None:
        written: list[TierBlock] = []
        read: list[TierBlock] = []
        for done in () if self._files is None else self._files.take_done():
            if done.failure:
                self.counts[f"disk {done.failure}"] += 1
            if done.number in self._writes:
                host, disk = self._writes.pop(done.number)
                disk.is_ready = not done.failure
                written += [disk.block] if disk.is_ready else []
                self._shelves.unpin(self._disk, disk, is_broken=bool(done.failure))
                self._shelves.unpin(self._host, host)
            else:
                host, disk = self._reads.pop(done.number)
                read += [] if done.failure else [host.block]
                self._end_read(host, disk, done)
        self._shelves.announce(written, self._disk)
        self._shelves.announce(read, self._host)

    def _end_read(self, host: Spot, disk: Spot, done: Done) -> None:
        host.is_ready = not done.failure
        if done.failure:
            for load in self._loads.values():
                if host in load.spots:
                    self._give_up(load, load.spots.index(host), f"a block on disk is lost: {done.failure}")
        else:
            self.disk_rate.measure(self._block_bytes, done.seconds, self._clock())
        self._shelves.unpin(self._disk, disk, is_broken=bool(done.failure))
        self._shelves.unpin(self._host, host, is_broken=bool(done.failure))

    # What it costs.

    def _compute_seconds(self) -> float:
        """What computing a block takes; infinity while nobody knows."""
        return self._page_size / self._prefill.per_second if self._prefill.per_second else math.inf

    def _load_seconds(self, tier: str) -> float:
        """What loading a block takes; infinity while nobody knows. From the disk it goes through host memory."""
        rates = [self._copies.load_rate, self.disk_rate.per_second][: 1 if tier == "host" else 2]
        return sum([self._block_bytes / rate if rate else math.inf for rate in rates])

    def _needs_probe(self) -> bool:
        """Whether nobody knows how fast the disk is, or it was too slow a while ago."""
        is_slower = self._load_seconds("disk") > self._compute_seconds() >= self._load_seconds("host")
        return not self.disk_rate.per_second or (is_slower and self._clock() - self.disk_rate.measured_at > STALE_SECONDS)

    def _pays(self, tier: str) -> bool:
        """Whether blocks should go to this tier."""
        return self._load_seconds(tier) <= self._compute_seconds() or (tier == "disk" and self._needs_probe())

    # What others ask.

    def tier_of(self, name: bytes) -> Tier | None:
        """The fastest tier that has the block; None if none has it."""
        block = self._shelves.get(name)
        return None if block is None else _fastest(block)

    def stored_events(self) -> list[BlocksStored]:
        """All blocks that can be loaded, as events."""
        return self._shelves.stored_events()

    def check_integrity(self, leases: Collection[Lease] | None = None) -> None:
        """Raises AssertionError unless every slot is in one place, and what is pinned is being copied, read or written."""
        pins: Counter[Spot] = Counter()
        for load in self._loads.values():
            assert load.arrived <= load.started <= load.end
            pins.update(spot for spot in load.spots if spot is not None)
        pins.update(self._saving)
        for pair in (*self._writes.values(), *self._reads.values()):
            pins.update(pair)
        self._shelves.check_integrity(pins, leases)
        assert len(self._to_write) <= self._host.slots


def _fastest(block: TierBlock) -> Tier | None:
    """The fastest tier from which the block can be loaded. One that is being read from the disk is still there."""
    if block.disk is not None and block.disk.is_ready and not (block.host is not None and block.host.is_ready):
        return "disk"
    return None if block.host is None else "host"
