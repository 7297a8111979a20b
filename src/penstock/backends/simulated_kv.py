"""The simulator's KV that moves: tiny real slots, and links that take as long as real ones would.

A slot has the bytes of its block's name, so a block at a wrong place, or one that was overwritten, is found. Moving it takes the time of
a real block: a worker sends one piece after the other, and receives one after the other.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from penstock.kv.moving import SlotLayout

SLOT_BYTES = 64

# Timers are good for about a millisecond; pieces that end within this time are taken together.
TIMER_SECONDS = 0.000_5


class SimulatedSlots:
    """A `kv.moving.SlotMemory` with a slot per page. The memory is taken when a slot is first written."""

    def __init__(self, slots: int) -> None:
        self.layout = SlotLayout(slots, SLOT_BYTES, (0,))
        self.file = os.memfd_create("simulated KV")
        os.ftruncate(self.file, slots * SLOT_BYTES)
        self._mapped = mmap.mmap(self.file, slots * SLOT_BYTES)
        self._bytes = memoryview(self._mapped)

    def views(self, slot: int) -> Sequence[memoryview]:
        return (self._bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES],)

    def checksum(self, strips: Sequence[memoryview]) -> int:
        return int.from_bytes(blake2b(b"".join(strips), digest_size=8).digest())

    def fill(self, slot: int, name: bytes) -> None:
        """Writes the KV of the block with this name."""
        self._bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] = content(name)

    def holds(self, slot: int, name: bytes) -> bool:
        return self._bytes[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES] == content(name)

    def close(self) -> None:
        """The memory itself lives for as long as another process maps it, or somebody holds a view."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def content(name: bytes) -> bytes:
    """The KV of the block with this name."""
    return blake2b(name, digest_size=SLOT_BYTES).digest()


class Timer(Protocol):
    def cancel(self) -> None: ...


class Timers(Protocol):
    """What a link needs of an event loop."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer: ...


@dataclass(slots=True, eq=False)
class _Piece:
    owner: bytes
    seconds: float
    asked_at: float
    done: Callable[[], None]


class Link:
    """Carries one piece at a time, in the order in which they came. Time that a late event loop has missed is made up for."""

    def __init__(self, bytes_per_second: float, timers: Timers) -> None:
        self._rate = bytes_per_second
        self._timers = timers
        self._pieces: deque[_Piece] = deque()
        self._free_at = 0.0
        self._timer: Timer | None = None

    def __len__(self) -> int:
        """The pieces that wait or are under way."""
        return len(self._pieces)

    def carry(self, owner: bytes, size: int, done: Callable[[], None]) -> None:
        """Calls `done` when all pieces before it and these `size` bytes are through."""
        self._pieces.append(_Piece(owner, size / self._rate, self._timers.time(), done))
        if self._timer is None:
            self._wait()

    def drop(self, owner: bytes) -> None:
        """Its pieces are not carried any more, not even the one that is under way."""
        if self._pieces and self._pieces[0].owner == owner:
            self._free_at = max(self._free_at, self._timers.time())
        self._pieces = deque([piece for piece in self._pieces if piece.owner != owner])
        self._wait()

    def _end(self) -> float:
        """When the first piece is through."""
        first = self._pieces[0]
        return max(self._free_at, first.asked_at) + first.seconds

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timers.call_at(self._end(), self._advance) if self._pieces else None

    def _advance(self) -> None:
        self._timer = None
        while self._pieces and self._end() <= self._timers.time() + TIMER_SECONDS:
            self._free_at = self._end()
            self._pieces.popleft().done()
        self._wait()
