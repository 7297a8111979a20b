"""Which worker holds which KV blocks, as far as is known or expected."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence

MAX_BLOCKS = 1_000_000


class _Holding:
    """What one worker holds. A block is known or predicted, never both; predictions are in the order of their end."""

    __slots__ = ("bit", "known", "name", "predicted", "prediction_seconds")

    def __init__(self, name: str, bit: int, prediction_seconds: float) -> None:
        self.name = name
        self.bit = bit
        self.prediction_seconds = prediction_seconds
        self.known: set[bytes] = set()
        self.predicted: OrderedDict[bytes, float] = OrderedDict()


class PrefixIndex:
    """From the name of a KV block to the workers that have it.

    A block's name stands for all tokens up to its end, so a flat table does what a tree would. A worker is a bit of a mask while it is
    here; the bit of one that left is used again. Leaving costs as many operations as it held blocks.

    Besides what workers tell there are predictions: a request was sent there, so its blocks are expected. Each ends after the worker's
    `prediction_seconds`, or when the worker tells of its block, stored or removed.

    Of each worker at most `max_blocks` known and as many predicted blocks are kept. Known ones beyond that are not taken in, and `dropped`
    counts them: such a worker is credited with too little until its next snapshot, which costs a prefill at worst. Predicted ones push
    out the oldest.
    """

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self.dropped = 0
        self._max_blocks = max_blocks
        self._masks: dict[bytes, int] = {}
        self._holdings: dict[str, _Holding] = {}
        self._by_slot: list[_Holding | None] = []
        self._free_slots: list[int] = []
        self._everyone = 0
        # No prediction ends before this, so that most lookups need not look for one that did.
        self._next_end = math.inf

    def join(self, worker: str, prediction_seconds: float) -> None:
        """A worker of which nothing is known yet."""
        assert worker not in self._holdings, worker
        if not self._free_slots:
            self._free_slots.append(len(self._by_slot))
            self._by_slot.append(None)
        slot = self._free_slots.pop()
        holding = _Holding(worker, 1 << slot, prediction_seconds)
        self._by_slot[slot] = self._holdings[worker] = holding
        self._everyone |= holding.bit

    def leave(self, worker: str) -> None:
        """Forgets the worker and all that it held."""
        self.cleared(worker)
        holding = self._holdings.pop(worker)
        slot = holding.bit.bit_length() - 1
        self._by_slot[slot] = None
        self._free_slots.append(slot)
        self._everyone ^= holding.bit

    def stored(self, worker: str, names: Iterable[bytes]) -> None:
        """The worker has these blocks from now on."""
        holding = self._holdings[worker]
        known, predicted, masks = holding.known, holding.predicted, self._masks
        for name in names:
            if name in known:
                continue
            if len(known) >= self._max_blocks:
                self.dropped += 1
                continue
            known.add(name)
            if predicted:
                predicted.pop(name, None)
            masks[name] = masks.get(name, 0) | holding.bit

    def removed(self, worker: str, names: Iterable[bytes]) -> None:
        """The worker no longer has these blocks, expected or not."""
        holding = self._holdings[worker]
        for name in names:
            if name in holding.known:
                holding.known.remove(name)
            elif holding.predicted.pop(name, None) is None:
                continue
            self._unset(name, holding.bit)

    def cleared(self, worker: str) -> None:
        """The worker has nothing any more."""
        holding = self._holdings[worker]
        for names in (holding.known, holding.predicted):
            for name in names:
                self._unset(name, holding.bit)
            names.clear()

    def replaced(self, worker: str, names: Collection[bytes]) -> None:
        """The worker has these blocks and no others. Predictions of others stay: they are of what it may not have begun."""
        self.removed(worker, self._holdings[worker].known.difference(names))
        self.stored(worker, names)

    def predict(self, worker: str, names: Sequence[bytes], now: float) -> None:
        """Expects the worker to have these blocks, each behind the one before it, until its `prediction_seconds` have passed."""
        holding = self._holdings[worker]
        known, predicted, masks = holding.known, holding.predicted, self._masks
        end = now + holding.prediction_seconds
        # The end of the chain first, so that the oldest prediction, when it must go, is one that no other stands on.
        for name in reversed(names):
            if name in known:
                continue
            if name in predicted:
                predicted.move_to_end(name)
            else:
                masks[name] = masks.get(name, 0) | holding.bit
            predicted[name] = end
        self._next_end = min(self._next_end, end)
        while len(predicted) > self._max_blocks:
            self._unset(predicted.popitem(last=False)[0], holding.bit)

    def overlaps(self, names: Sequence[bytes], now: float) -> dict[str, int]:
        """How many of these blocks each worker has, from the first on. Those without the first are left out.

        Caches evict ends before beginnings, so a worker that has a block has those before it, and halving finds the last one in a few
        lookups, where going through a long prompt's blocks would take milliseconds. From a cache with a hole, what lies behind
        the hole may be counted as well.
        """
        if now >= self._next_end:
            self._end_predictions(now)
        found: dict[str, int] = {}
        if not names:
            return found
        mask_of = self._masks.get
        # Workers that have the block before `low` and lack that at `high`, or it is the end.
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

    def held(self, worker: str) -> tuple[int, int]:
        """How many blocks the worker is known to have, and how many more are predicted."""
        holding = self._holdings[worker]
        return len(holding.known), len(holding.predicted)

    def check_integrity(self) -> None:
        """Raises AssertionError unless masks and holdings say the same, and every bound is kept."""
        masks: dict[bytes, int] = {}
        for worker, holding in self._holdings.items():
            assert self._by_slot[holding.bit.bit_length() - 1] is holding, worker
            assert holding.name == worker
            assert not holding.known & holding.predicted.keys(), worker
            assert max(len(holding.known), len(holding.predicted)) <= self._max_blocks, worker
            ends = list(holding.predicted.values())
            assert ends == sorted(ends), f"the predictions of {worker} are out of order"
            assert not ends or ends[0] >= self._next_end, worker
            for name in (*holding.known, *holding.predicted):
                masks[name] = masks.get(name, 0) | holding.bit
        assert masks == self._masks
        assert self._everyone == sum(holding.bit for holding in self._holdings.values())
        free = [slot for slot, holding in enumerate(self._by_slot) if holding is None]
        assert sorted(self._free_slots) == free

    def _note(self, found: dict[str, int], mask: int, length: int) -> None:
        while mask:
            lowest = mask & -mask
            holding = self._by_slot[lowest.bit_length() - 1]
            assert holding is not None
            found[holding.name] = length
            mask ^= lowest

    def _end_predictions(self, now: float) -> None:
        self._next_end = math.inf
        for holding in self._holdings.values():
            predicted = holding.predicted
            while predicted:
                name, end = next(iter(predicted.items()))
                if end > now:
                    self._next_end = min(self._next_end, end)
                    break
                del predicted[name]
                self._unset(name, holding.bit)

    def _unset(self, name: bytes, bit: int) -> None:
        mask = self._masks[name] ^ bit
        if mask:
            self._masks[name] = mask
        else:
            del self._masks[name]
