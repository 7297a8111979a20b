"""Which worker holds which KV blocks: the index, and the feed that fills it from a worker's numbered events."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import get_args

from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot, Tier

TIERS: tuple[Tier, ...] = get_args(Tier)

MAX_BLOCKS = 1_000_000
# Predictions that one lookup ends: a few milliseconds. There may be a million.
MAX_ENDED = 4096
# Events that are kept while a feed waits for a snapshot.
MAX_KEPT_EVENTS = 4096
MAX_AT_ONCE = 4096
"""Blocks of a snapshot, or of a worker that has left: a few milliseconds."""


@dataclass(slots=True, eq=False)
class _Holding:
    """What one worker holds. On its device a block is known or predicted, never both. Predictions are ordered by their end. `below` has
    the blocks in its slower tiers; many are on the device, too. `doubted` has what was known before the snapshot that is being loaded, and
    has not come with it so far: one set for each snapshot that was begun."""

    name: str
    bit: int
    prediction_seconds: float
    known: set[bytes] = field(default_factory=set)
    predicted: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    below: dict[Tier, set[bytes]] = field(default_factory=lambda: {tier: set() for tier in TIERS[1:]})
    doubted: dict[Tier, list[set[bytes]]] = field(default_factory=lambda: {tier: [] for tier in TIERS})

    def doubt(self, tier: Tier) -> None:
        if names := self.in_tier(tier):
            self.doubted[tier].append(names)
            if tier == "device":
                self.known = set()
            else:
                self.below[tier] = set()

    def end_doubt(self, name: bytes, tier: Tier) -> bool:
        """Returns whether this block was doubted."""
        for names in self.doubted[tier]:
            if name in names:
                names.remove(name)
                return True
        return False

    def in_tier(self, tier: Tier) -> set[bytes]:
        return self.known if tier == "device" else self.below[tier]

    @property
    def all_in(self) -> list[tuple[Tier, set[bytes] | OrderedDict[bytes, float]]]:
        """Its blocks with their tiers."""
        doubted = [(tier, names) for tier in TIERS for names in self.doubted[tier]]
        return [("device", self.predicted), *[(tier, self.in_tier(tier)) for tier in TIERS], *doubted]


class PrefixIndex:
    """Maps the name of a KV block to the workers that have it.

    A block's name stands for all tokens up to its end, so a flat table is enough; no tree is needed. Each worker is one bit of a mask.
    The bit is used again when all blocks of a worker that left are removed: some at once, the others with `leave_more`.

    Besides the blocks that workers report there are predictions: a request was sent there, so its blocks are expected. A prediction
    ends after the worker's `prediction_seconds`, or when the worker reports the block as stored or removed.

    Each tier has a table of its own. Only the device's has predictions: what is sent to a worker is computed there.

    Per worker and tier at most `max_blocks` known and `max_blocks` predicted blocks are kept. More known blocks are ignored and counted in
    `dropped`: the worker is underrated until its next snapshot, which costs a prefill at worst. More predicted blocks replace the oldest.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.dropped = 0
        self._max_blocks = max_blocks
        self._masks: dict[Tier, dict[bytes, int]] = {tier: {} for tier in TIERS}
        self._holdings: dict[str, _Holding] = {}
        self._by_slot: list[_Holding | None] = []
        self._free_slots: list[int] = []
        self._leaving: deque[_Holding] = deque()
        self._everyone = 0
        # No prediction ends before this time, so most lookups need not search for ended ones.
        self._next_end = math.inf

    def join(self, worker: str, prediction_seconds: float) -> None:
        """Adds a worker that holds nothing yet."""
        assert worker not in self._holdings, worker
        if not self._free_slots:
            self._free_slots.append(len(self._by_slot))
            self._by_slot.append(None)
        slot = self._free_slots.pop()
        holding = _Holding(worker, 1 << slot, prediction_seconds)
        self._by_slot[slot] = self._holdings[worker] = holding
        self._everyone |= holding.bit

    def leave(self, worker: str) -> None:
        """Forgets the worker. The bits of its blocks are removed in pieces."""
        holding = self._holdings.pop(worker)
        self._by_slot[holding.bit.bit_length() - 1] = None
        self._everyone ^= holding.bit
        self._leaving.append(holding)
        self.leave_more()

    def leave_more(self) -> bool:
        """Removes some more blocks of workers that have left, or were cleared. Returns whether there are others."""
        left = MAX_AT_ONCE
        while self._leaving and left:
            holding = self._leaving[0]
            for tier, names in holding.all_in:
                for _ in range(min(left, len(names))):
                    name = names.pop() if isinstance(names, set) else names.popitem()[0]
                    _unset(self._masks[tier], name, holding.bit)
                    left -= 1
            if not any(names for _, names in holding.all_in):
                self._leaving.popleft()
                self._free_slots.append(holding.bit.bit_length() - 1)
        return bool(self._leaving)

    def stored(self, worker: str, names: Iterable[bytes], tier: Tier = "device") -> None:
        """The worker has these blocks in this tier now."""
        holding = self._holdings[worker]
        known, masks = holding.in_tier(tier), self._masks[tier]
        predicted, doubted = holding.predicted if tier == "device" else None, holding.doubted[tier]
        for name in names:
            if name in known:
                continue
            if len(known) >= self._max_blocks:
                self.dropped += 1
                continue
            known.add(name)
            if doubted:
                holding.end_doubt(name, tier)
            if predicted:
                predicted.pop(name, None)
            masks[name] = masks.get(name, 0) | holding.bit

    def removed(self, worker: str, names: Iterable[bytes], tier: Tier = "device") -> None:
        """The worker no longer has these blocks in this tier, known or predicted."""
        holding = self._holdings[worker]
        known, masks = holding.in_tier(tier), self._masks[tier]
        for name in names:
            if name in known:
                known.remove(name)
            elif holding.end_doubt(name, tier):
                pass
            elif tier != "device" or holding.predicted.pop(name, None) is None:
                continue
            _unset(masks, name, holding.bit)

    def cleared(self, worker: str) -> None:
        """The worker has no blocks any more, in no tier. It goes on under another bit, and the old one is removed in pieces."""
        seconds = self._holdings[worker].prediction_seconds
        self.leave(worker)
        self.join(worker, seconds)

    def doubt(self, worker: str) -> None:
        """All blocks of the worker come again, in a snapshot. Those that do not are removed with `drop_doubted`, and count until then."""
        for tier in TIERS:
            self._holdings[worker].doubt(tier)

    def drop_doubted(self, worker: str, most: int) -> int:
        """Removes blocks that did not come again, at most `most` of them. Returns how many it removed."""
        holding, left = self._holdings[worker], most
        for tier in TIERS:
            doubted = holding.doubted[tier]
            while doubted and left:
                for _ in range(min(left, len(doubted[-1]))):
                    _unset(self._masks[tier], doubted[-1].pop(), holding.bit)
                    left -= 1
                if not doubted[-1]:
                    doubted.pop()
        return most - left

    def predict(self, worker: str, names: Sequence[bytes], now: float) -> None:
        """Expects the worker to have this chain of blocks for the next `prediction_seconds`."""
        holding = self._holdings[worker]
        known, predicted, masks = holding.known, holding.predicted, self._masks["device"]
        end = now + holding.prediction_seconds
        # The end of the chain first: when the oldest prediction must go, no other block depends on it.
        for name in reversed(names):
            if name in known:
                continue
            if name in predicted:
                predicted.move_to_end(name)
            else:
                holding.end_doubt(name, "device")
                masks[name] = masks.get(name, 0) | holding.bit
            predicted[name] = end
        self._next_end = min(self._next_end, end)
        while len(predicted) > self._max_blocks:
            _unset(masks, predicted.popitem(last=False)[0], holding.bit)

    def overlaps(self, names: Sequence[bytes], now: float, tier: Tier = "device") -> dict[str, int]:
        """How many leading blocks of this chain each worker has, in this tier or a faster one. Workers without the first are left out.

        Caches evict the end of a chain first. So a worker that has a block has all blocks before it, and a binary search finds the last
        one in a few lookups; a linear search would take milliseconds for a long prompt. If a cache has a hole, blocks behind the hole
        may be counted as well.
        """
        if now >= self._next_end:
            self._end_predictions(now)
        found: dict[str, int] = {}
        if not names:
            return found
        mask_of = self._masks_down_to(tier)
        # (workers, low, high): these workers have block low - 1 and lack block high, or high is the end.
        searches = [(self._everyone & mask_of(names[0], 0), 1, len(names))]
        while searches:
            workers, low, high = searches.pop()
            if not workers:
                continue
            if low == high:
                self._note(found, workers, low)
                continue
            middle = (low + high) // 2
            having = workers & mask_of(names[middle], 0)
            searches.append((having, middle + 1, high))
            searches.append((workers ^ having, low, middle))
        return found

    def reported(self, worker: str, names: Sequence[bytes]) -> int:
        """How many leading blocks of this chain the worker has on its device, without those that are only expected there."""
        holding = self._holdings[worker]
        reported = [holding.known, *holding.doubted["device"]]
        return bisect_left(names, True, key=lambda name: not any(name in known for known in reported))

    def held(self, worker: str) -> tuple[int, int]:
        """How many known and how many predicted blocks the worker has."""
        holding = self._holdings[worker]
        return len(holding.known) + sum(map(len, holding.doubted["device"])), len(holding.predicted)

    def check_integrity(self) -> None:
        """Raises AssertionError unless masks and holdings agree and every bound is kept."""
        masks: dict[Tier, dict[bytes, int]] = {tier: {} for tier in TIERS}
        for holding in self._leaving:
            for tier, names in holding.all_in:
                for name in names:
                    masks[tier][name] = masks[tier].get(name, 0) | holding.bit
        for worker, holding in self._holdings.items():
            assert self._by_slot[holding.bit.bit_length() - 1] is holding, worker
            assert holding.name == worker
            assert not holding.known & holding.predicted.keys(), worker
            assert max(len(holding.predicted), *[len(holding.in_tier(tier)) for tier in TIERS]) <= self._max_blocks, worker
            ends = list(holding.predicted.values())
            assert ends == sorted(ends), f"the predictions of {worker} are out of order"
            assert not ends or ends[0] >= self._next_end, worker
            for tier, names in holding.all_in:
                for name in names:
                    assert not masks[tier].get(name, 0) & holding.bit, f"{worker} has a block twice"
                    masks[tier][name] = masks[tier].get(name, 0) | holding.bit
        assert masks == self._masks
        assert self._everyone == sum(holding.bit for holding in self._holdings.values())
        free = [slot for slot, holding in enumerate(self._by_slot) if holding is None]
        assert sorted([*self._free_slots, *[holding.bit.bit_length() - 1 for holding in self._leaving]]) == free

    def _masks_down_to(self, tier: Tier) -> Callable[[bytes, int], int]:
        """Who has a block in this tier or a faster one."""
        tables = [self._masks[each] for each in TIERS[: TIERS.index(tier) + 1]]
        first, *others = [table for table in tables if table] or tables[:1]
        if not others:
            return first.get
        if len(others) == 1:
            (second,) = others
            return lambda name, nobody: first.get(name, nobody) | second.get(name, nobody)
        second, third = others
        return lambda name, nobody: first.get(name, nobody) | second.get(name, nobody) | third.get(name, nobody)

    def _note(self, found: dict[str, int], mask: int, length: int) -> None:
        while mask:
            lowest = mask & -mask
            holding = self._by_slot[lowest.bit_length() - 1]
            assert holding is not None
            found[holding.name] = length
            mask ^= lowest

    def _end_predictions(self, now: float) -> None:
        """Ends at most MAX_ENDED predictions; the next lookup continues."""
        self._next_end = math.inf
        left = MAX_ENDED
        for holding in self._holdings.values():
            predicted = holding.predicted
            while predicted:
                name, end = next(iter(predicted.items()))
                if not left:
                    self._next_end = -math.inf
                    return
                left -= 1
                if end > now:
                    self._next_end = min(self._next_end, end)
                    break
                del predicted[name]
                _unset(self._masks["device"], name, holding.bit)


def _unset(masks: dict[bytes, int], name: bytes, bit: int) -> None:
    mask = masks[name] ^ bit
    if mask:
        masks[name] = mask
    else:
        del masks[name]


class KvFeed:
    """Keeps the index in step with one worker, over one link.

    The code that makes a feed asks the worker for a snapshot. After that, every event is applied once, in order. When event numbers have a
    gap, `receive` returns True once: another snapshot is needed. Until it comes, the index stays as it is and events are kept aside,
    because the snapshot may be older than they are.
    """

    def __init__(self, index: PrefixIndex, worker: str) -> None:
        self._index = index
        self._worker = worker
        self._next_number = 0
        self._is_waiting = True
        self._was_asked = True
        # While waiting: consecutive events. `_kept_until` is the number after the last one.
        self._kept: list[KvEvent] = []
        self._kept_until = 0
        self._loading: Iterator[None] = iter(())
        # What has left the worker since the snapshot that is being loaded.
        self._removed: dict[Tier, set[bytes]] | None = None

    @property
    def is_current(self) -> bool:
        """The index has all events that were received."""
        return not self._is_waiting

    def receive(self, batch: KvEvents) -> bool:
        """Applies events. Returns True when the caller must ask for a snapshot; only once until it comes."""
        if not self._is_waiting and batch.first <= self._next_number:
            self._apply(batch.events[self._next_number - batch.first :])
            return False
        self._is_waiting = True
        self._keep(batch)
        must_ask, self._was_asked = not self._was_asked, True
        return must_ask

    def load(self, snapshot: Snapshot) -> None:
        """Replaces the worker's blocks, then applies the events that were kept. Many blocks come with `load_more`. Predictions of other
        blocks stay: the worker may not have begun them yet.

        A snapshot older than the index is ignored. If events are missing after the snapshot, the next `receive` asks for another one.
        """
        if not self._is_waiting and snapshot.next_number < self._next_number:
            return
        self._index.doubt(self._worker)
        self._removed = {tier: set() for tier in TIERS}
        self._loading = self._take(snapshot.events, self._removed)
        self.load_more()
        self._next_number = snapshot.next_number
        first = self._kept_until - len(self._kept)
        self._is_waiting = bool(self._kept) and first > snapshot.next_number
        self._was_asked = False
        if not self._is_waiting:
            self._apply(self._kept[snapshot.next_number - first :] if self._kept else ())
            self._kept = []

    def load_more(self) -> bool:
        """Takes some more blocks of the last snapshot. Returns whether there may be others: a disk may have a million."""
        for _ in self._loading:
            return True
        return False

    def _take(self, events: Sequence[KvEvent], removed: dict[Tier, set[bytes]]) -> Iterator[None]:
        """Takes all blocks of a snapshot, in order, so that a bound cuts off the ends of chains. Then drops the others. At each yield,
        others go on."""
        left = MAX_AT_ONCE
        for event in events:
            if not isinstance(event, BlocksStored):
                continue
            start, gone = 0, removed[event.tier]
            while start < len(event.blocks):
                some = event.blocks[start : start + left]
                self._index.stored(self._worker, [name for name in some if name not in gone], event.tier)
                start += len(some)
                left -= len(some)
                if not left:
                    yield
                    left = MAX_AT_ONCE
        while dropped := self._index.drop_doubted(self._worker, left):
            left -= dropped
            if not left:
                yield
                left = MAX_AT_ONCE
        self._removed = None

    def _apply(self, events: Sequence[KvEvent]) -> None:
        index, worker = self._index, self._worker
        # What was cleared.
        index.leave_more()
        for event in events:
            match event:
                case BlocksStored():
                    index.stored(worker, event.blocks, event.tier)
                case BlocksRemoved():
                    index.removed(worker, event.blocks, event.tier)
                    if self._removed is not None:
                        self._removed[event.tier].update(event.blocks)
                case BlocksCleared():
                    index.cleared(worker)
                    self._loading, self._removed = iter(()), None
        self._next_number += len(events)

    def _keep(self, batch: KvEvents) -> None:
        """Keeps the newest events without a gap. Older ones before a gap are useless: the missing events stay missing."""
        end = batch.first + len(batch.events)
        if self._kept and end <= self._kept_until:
            return
        if not self._kept or batch.first > self._kept_until:
            self._kept = list(batch.events)
        else:
            self._kept += batch.events[self._kept_until - batch.first :]
        self._kept_until = end
        if len(self._kept) > MAX_KEPT_EVENTS:
            del self._kept[: len(self._kept) - MAX_KEPT_EVENTS]
