"""The simulator's KV cache: blocks, prefix reuse, eviction, without any KV."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_SIZE = 16


class SimulatedCache:
    """A pool of equal blocks. Each is free, cached (evictable, found by its hash), or used by running generations.

    Full blocks are shared by their hash and counted by reference; a block that is being filled belongs to one generation.
    Nothing that a running generation uses is evicted; cached blocks are, the least recently used first.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._references: dict[bytes, int] = {}
        # Ordered by last use. A plain dict would do, but taking the first of one that was emptied from the front is slow.
        self._cached: OrderedDict[bytes, None] = OrderedDict()
        self._private = 0

    @property
    def used(self) -> int:
        return len(self._references) + self._private

    @property
    def cached(self) -> int:
        return len(self._cached)

    def matched(self, hashes: Sequence[bytes]) -> int:
        """How many blocks from the start are here."""
        for count, block in enumerate(hashes):
            if block not in self._references and block not in self._cached:
                return count
        return len(hashes)

    def can_allocate(self, hashes: Sequence[bytes], private: int) -> bool:
        """Whether these blocks could be used at once, evicting what nobody uses."""
        new = sum(1 for block in hashes if block not in self._references)
        return self.used + new + private <= self.total

    def allocate(self, hashes: Sequence[bytes], private: int) -> None:
        """Takes references to full blocks, and `private` blocks that are still to be filled."""
        for block in hashes:
            self._cached.pop(block, None)
            self._references[block] = self._references.get(block, 0) + 1
        self._private += private
        self._evict()

    def release(self, hashes: Sequence[bytes], filled: Sequence[bytes], private: int) -> None:
        """Gives the references and the private blocks back.

        Blocks that nobody uses stay cached while there is room: those of `hashes`, and the private ones that were `filled`.
        """
        self._private -= private
        for block in reversed(filled):
            if block not in self._references:
                self._cached[block] = self._cached.pop(block, None)
        # The end of a chain first, so that eviction never leaves a block whose parent is gone.
        for block in reversed(hashes):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
                self._cached[block] = None

    def check_integrity(self) -> None:
        """Raises AssertionError unless every block is free, cached or used, and only one of them."""
        assert self._private >= 0, self._private
        assert all(count > 0 for count in self._references.values())
        assert not self._references.keys() & self._cached.keys()
        assert self.used + self.cached <= self.total, (self.used, self.cached, self.total)

    def _evict(self) -> None:
        while self._cached and self.used + len(self._cached) > self.total:
            self._cached.popitem(last=False)
