"""Which block is in which slot of host memory or of the disk, who leases it, and which one gives way.

Each tier evicts unleased blocks first, the least recently used first. Leases protect at most a share of the tier, as on the device: beyond
it, leased blocks are evicted like unleased ones. A chain is used as a whole, and of blocks used at the same time the deepest is evicted
first. So children leave before their parents. If a failure drops a parent, its children are of no use until it is computed again. They are
evicted like other blocks.
"""

from __future__ import annotations

from bisect import insort_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from penstock.kv.blocks import KvEventLog
from penstock.kv.radix import Lease, Node
from penstock.lazy_heap import SLACK, LazyHeap
from penstock.wire.messages import BlocksStored, Tier

RECOVERED_TOGETHER = 1024
"""Blocks of the disk that count as used at the same time, at the start."""


class TierBlock:
    """A block that is in host memory, on disk, or both. `is_gone`: it was freed, but somebody still reads or writes a slot of it."""

    __slots__ = ("depth", "disk", "host", "is_gone", "is_public", "leases", "name", "parent", "used")

    def __init__(self, name: bytes, parent: bytes, depth: int, *, is_public: bool) -> None:
        self.name = name
        self.parent = parent
        self.depth = depth
        self.used = 0
        # Both as in `radix.Node`.
        self.is_public = is_public
        self.leases: set[Lease] | None = None
        self.host: Spot | None = None
        self.disk: Spot | None = None
        self.is_gone = False


class Spot:
    """A block's slot in one tier. `pins` counts who reads or writes it now. `is_ready`: its bytes are complete. `moment`: its place in a
    queue, if it is in one."""

    __slots__ = ("block", "is_ready", "moment", "pins", "slot")

    def __init__(self, block: TierBlock, slot: int) -> None:
        self.block = block
        self.slot = slot
        self.pins = 0
        self.is_ready = False
        self.moment: _Moment | None = None


class _Moment:
    """The spots of a queue whose blocks were used at one time. They are put in order when the first of them gives way."""

    __slots__ = ("order", "queue", "spots", "time")

    def __init__(self, queue: _Queue, time: int) -> None:
        self.queue = queue
        self.time = time
        self.spots: dict[Spot, None] = {}
        # By depth, the deepest last. Spots that have left stay in it until they would be the last.
        self.order: list[Spot] | None = None

    def add(self, spot: Spot) -> None:
        self.spots[spot] = None
        if self.order is not None:
            insort_left(self.order, spot, key=_depth)
            if len(self.order) > 2 * len(self.spots) + SLACK:
                self.order = None

    def deepest(self) -> Spot:
        if self.order is None:
            self.order = sorted(self.spots, key=_depth)
        while self.order[-1] not in self.spots:
            self.order.pop()
        return self.order[-1]


class _Queue:
    """Spots by their blocks' last use. At the end of a turn thousands of blocks are used at once, and all go to one moment: a put takes as
    long as one into a dict."""

    def __init__(self) -> None:
        self._moments: dict[int, _Moment] = {}
        self._order: LazyHeap[_Moment, int] = LazyHeap()
        self._spots = 0

    def __len__(self) -> int:
        return self._spots

    def __iter__(self) -> Iterator[Spot]:
        for moment in self._moments.values():
            yield from moment.spots

    def put(self, spot: Spot) -> None:
        """The spot comes, or its block was used."""
        time = spot.block.used
        if spot.moment is not None:
            if spot.moment.time == time:
                return
            self.remove(spot)
        moment = self._moments.get(time)
        if moment is None:
            moment = self._moments[time] = _Moment(self, time)
            self._order.put(moment, time)
        moment.add(spot)
        spot.moment = moment
        self._spots += 1

    def remove(self, spot: Spot) -> None:
        moment = spot.moment
        assert moment is not None
        spot.moment = None
        self._spots -= 1
        del moment.spots[spot]
        if not moment.spots:
            del self._moments[moment.time]
            self._order.discard(moment)

    def first(self) -> Spot | None:
        """Who gives way first."""
        least = self._order.least()
        return None if least is None else least[1].deepest()

    def check_integrity(self) -> None:
        self._order.check_integrity()
        assert set(self._order) == set(self._moments.values())
        assert self._spots == len(list(self))
        for time, moment in self._moments.items():
            assert moment.spots, "a moment without spots"
            assert all(spot.moment is moment and spot.block.used == time for spot in moment.spots)


class Shelf:
    """The slots of one tier. A spot is pinned, or it is in one of two queues: that of leased blocks, or that of others."""

    def __init__(self, tier: Tier, slots: int, lease_share: float) -> None:
        self.tier: Tier = tier
        self.slots = slots
        self._max_leased = int(slots * lease_share)
        self._free = list(range(slots - 1, -1, -1))
        self._plain = _Queue()
        self._leased = _Queue()
        self._pinned: set[Spot] = set()

    def __len__(self) -> int:
        """How many slots are taken."""
        return self.slots - len(self._free)

    def __iter__(self) -> Iterator[Spot]:
        yield from (*self._plain, *self._leased, *self._pinned)

    def take(self) -> tuple[int, Spot | None] | None:
        """A slot, and the spot that gives it up. None if all are pinned."""
        if self._free:
            return self._free.pop(), None
        plain, leased = self._plain.first(), self._leased.first()
        if plain is None or leased is None:
            spot = plain or leased
        else:
            spot = plain if len(self._leased) <= self._max_leased or _weight(plain) < _weight(leased) else leased
        if spot is None:
            return None
        self._withdraw(spot)
        return spot.slot, spot

    def claim(self, slots: Iterable[int]) -> None:
        """Takes these free slots."""
        self._free = sorted(set(self._free).difference(slots), reverse=True)

    def settle(self, spot: Spot) -> None:
        """The spot is new, its leases have changed, or it is to give way first."""
        self._withdraw(spot)
        if not spot.pins:
            (self._leased if spot.block.leases else self._plain).put(spot)

    def pin(self, spot: Spot) -> None:
        spot.pins += 1
        self._pinned.add(spot)
        self._withdraw(spot)

    def unpin(self, spot: Spot) -> None:
        spot.pins -= 1
        if not spot.pins:
            self._pinned.discard(spot)
            self.settle(spot)

    def remove(self, spot: Spot) -> None:
        """Frees the slot of a spot that nobody pins."""
        assert not spot.pins
        self._withdraw(spot)
        self._free.append(spot.slot)

    def check_integrity(self) -> None:
        taken = Counter([*self._free, *(spot.slot for spot in self)])
        assert taken == Counter(range(self.slots)), f"{self.tier} slots in no place or in several: {taken - Counter(range(self.slots))}"
        assert all(spot.pins > 0 for spot in self._pinned)
        for queue, is_leased in ((self._plain, False), (self._leased, True)):
            queue.check_integrity()
            for spot in queue:
                assert not spot.pins
                assert not spot.block.is_gone
                assert bool(spot.block.leases) == is_leased, "a block in the wrong queue"

    def _withdraw(self, spot: Spot) -> None:
        if spot.moment is not None:
            spot.moment.queue.remove(spot)


class Shelves:
    """All blocks below the device. `counts` has blocks by tier and by what happened to them, such as `host stored`."""

    def __init__(self, host_slots: int, disk_slots: int, events: KvEventLog, lease_share: float) -> None:
        self.host = Shelf("host", host_slots, lease_share)
        self.disk = Shelf("disk", disk_slots, lease_share)
        self.counts: Counter[str] = Counter()
        self._events = events
        self._blocks: dict[bytes, TierBlock] = {}
        self._held: dict[Lease, set[TierBlock]] = {}
        self._clock = 0
        # Blocks that have left a tier. Reported together, and before any that came.
        self._left: dict[Tier, list[bytes]] = {"host": [], "disk": []}

    def get(self, name: bytes) -> TierBlock | None:
        return self._blocks.get(name)

    def recover(self, found: Sequence[tuple[int, bytes, bytes]]) -> None:
        """Blocks that are on disk at the start: slot, name and parent, the oldest first."""
        self.disk.claim(slot for slot, _, _ in found)
        for position, (slot, name, parent) in enumerate(found):
            # The older of two goes first, as if it were deeper. Some share a time, as those of a chain do.
            block = self._blocks[name] = TierBlock(name, parent, -position, is_public=False)
            block.used = self._clock = 1 + position // RECOVERED_TOGETHER
            block.disk = Spot(block, slot)
            block.disk.is_ready = True
            self.disk.settle(block.disk)

    def add(self, node: Node, slot: int) -> Spot:
        """A node's block gets a slot in host memory, which is to be filled."""
        block = self._blocks.get(node.name)
        if block is None:
            assert node.parent is not None
            block = self._blocks[node.name] = TierBlock(node.name, node.parent.name, node.depth, is_public=node.is_public)
        block.depth = node.depth
        return self.put(block, self.host, slot)

    def put(self, block: TierBlock, shelf: Shelf, slot: int) -> Spot:
        """The block gets this slot, which is to be filled. It is pinned until then."""
        spot = Spot(block, slot)
        if shelf is self.host:
            block.host = spot
        else:
            block.disk = spot
        shelf.pin(spot)
        return spot

    def tick(self) -> int:
        """A new time of use."""
        self._clock += 1
        return self._clock

    def use(self, block: TierBlock, tick: int) -> None:
        """The block was used at this time."""
        block.used = max(block.used, tick)
        for spot in (block.host, block.disk):
            if spot is not None and spot.moment is not None:
                spot.moment.queue.put(spot)

    def take_over(self, block: TierBlock, node: Node) -> None:
        """The block belongs to those that its node belongs to."""
        block.is_public |= node.is_public
        if not node.leases or (block.leases and node.leases <= block.leases):
            return
        was_leased, block.leases = bool(block.leases), (block.leases or set()) | node.leases
        for lease in node.leases:
            self._held.setdefault(lease, set()).add(block)
        if not was_leased:
            self._settle(block)

    def of(self, block: TierBlock) -> list[tuple[Shelf, Spot]]:
        return [(shelf, spot) for shelf, spot in ((self.host, block.host), (self.disk, block.disk)) if spot is not None]

    def make_room(self, shelf: Shelf) -> int | None:
        """A free slot. What was used least recently gives way for it. None if all slots are being read or written."""
        taken = shelf.take()
        if taken is None:
            return None
        slot, spot = taken
        if spot is not None:
            self.counts[f"{shelf.tier} evicted"] += 1
            self._leave(shelf, spot)
        return slot

    def unpin(self, shelf: Shelf, spot: Spot, *, is_broken: bool = False) -> None:
        """Somebody has read or written it. `is_broken`: its bytes are of no use."""
        shelf.unpin(spot)
        assert not (is_broken and spot.pins)
        if not spot.pins and (is_broken or spot.block.is_gone):
            shelf.remove(spot)
            self._leave(shelf, spot)

    def free(self, block: TierBlock) -> None:
        """Takes the block out of all tiers. Slots that are being read or written are free when that has ended."""
        block.is_gone = True
        del self._blocks[block.name]
        self._drop_leases(block)
        for shelf, spot in self.of(block):
            self._note_left(shelf, spot)
            if not spot.pins:
                shelf.remove(spot)
                self._leave(shelf, spot)

    def end_lease(self, lease: Lease) -> list[TierBlock]:
        """The lease is over. Returns the blocks that nobody holds any more and that no request without a session has used."""
        exclusive: list[TierBlock] = []
        for block in self._held.pop(lease, ()):
            assert block.leases is not None
            block.leases.discard(lease)
            if not block.leases and not block.is_public:
                exclusive.append(block)
            self._settle(block)
        return exclusive

    def supersede(self, lease: Lease, kept: Collection[bytes]) -> None:
        """Takes the lease from all blocks except these. Those that nobody else holds are the first to give way."""
        held = self._held.get(lease, set())
        for block in [block for block in held if block.name not in kept]:
            held.discard(block)
            assert block.leases is not None
            block.leases.discard(lease)
            if not block.leases and not block.is_public:
                block.used = 0
            self._settle(block)

    def announce(self, blocks: Iterable[TierBlock], shelf: Shelf) -> None:
        """These blocks can be loaded from now on."""
        self.report_left()
        for chain in _chains([block for block in blocks if not block.is_gone]):
            self.counts[f"{shelf.tier} stored"] += len(chain)
            self._events.stored(chain[0].parent, [block.name for block in chain], shelf.tier)

    def report_left(self) -> None:
        for tier, names in self._left.items():
            if names:
                self._events.removed(names, tier)
                self._left[tier] = []

    def stored_events(self) -> list[BlocksStored]:
        """All blocks that can be loaded, as events."""
        self.report_left()
        return [
            BlocksStored(chain[0].parent, tuple([block.name for block in chain]), shelf.tier)
            for shelf in (self.host, self.disk)
            for chain in _chains([spot.block for spot in shelf if spot.is_ready and not spot.block.is_gone])
        ]

    def check_integrity(self, pins: Counter[Spot], leases: Collection[Lease] | None = None) -> None:
        """Raises AssertionError unless every slot is in one place, and all pins and leases are among these."""
        for shelf in (self.host, self.disk):
            shelf.check_integrity()
            for spot in shelf:
                block = spot.block
                assert (shelf, spot) in self.of(block)
                assert block.is_gone or self._blocks[block.name] is block
                assert spot.pins == pins[spot], f"{spot.pins} pins, {pins[spot]} known"
        for block in self._blocks.values():
            assert self.of(block), "a block in no tier"
            assert all(block in self._held[lease] for lease in block.leases or ())
        for lease, blocks in self._held.items():
            assert leases is None or lease in leases, "an unknown lease"
            assert all(block.leases and lease in block.leases for block in blocks)

    def _settle(self, block: TierBlock) -> None:
        for shelf, spot in self.of(block):
            shelf.settle(spot)

    def _leave(self, shelf: Shelf, spot: Spot) -> None:
        """The block has no slot in this tier any more."""
        block = spot.block
        if shelf is self.host:
            block.host = None
        else:
            block.disk = None
        if block.is_gone:
            return
        self._note_left(shelf, spot)
        if not self.of(block):
            del self._blocks[block.name]
            self._drop_leases(block)

    def _note_left(self, shelf: Shelf, spot: Spot) -> None:
        if spot.is_ready:
            self._left[shelf.tier].append(spot.block.name)

    def _drop_leases(self, block: TierBlock) -> None:
        for lease in block.leases or ():
            self._held[lease].discard(block)
        block.leases = None


def _depth(spot: Spot) -> int:
    return spot.block.depth


def _weight(spot: Spot) -> tuple[int, int]:
    return spot.block.used, -spot.block.depth


def _chains(blocks: Sequence[TierBlock]) -> Iterator[list[TierBlock]]:
    """The same blocks as chains: each follows the one before it."""
    children: dict[bytes, list[TierBlock]] = {}
    names = {block.name for block in blocks}
    pending: list[TierBlock] = []
    for block in blocks:
        if block.parent in names:
            children.setdefault(block.parent, []).append(block)
        else:
            pending.append(block)
    while pending:
        chain = [pending.pop()]
        while (following := children.get(chain[-1].name)) is not None:
            chain.append(following[0])
            pending += following[1:]
        yield chain
