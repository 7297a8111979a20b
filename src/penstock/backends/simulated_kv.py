"""The simulator's KV that moves: tiny real slots, and links that take as long as real ones would.

A slot has the bytes of its block's name, so a block at a wrong place, or one that was overwritten, is found. Moving it takes the time of
a real block: a worker sends one piece after the other, and receives one after the other.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Protocol

from penstock.config.engines import SimulatorConfig
from penstock.kv.cache import KVCache
from penstock.kv.moving import KvTransport, SlotLayout
from penstock.kv.radix import Node
from penstock.kv.transfers import Transfers
from penstock.wire.messages import KvSource

SLOT_BYTES = 64

# Timers are good for about a millisecond; pieces that end within this time are taken together.
TIMER_SECONDS = 0.000_5

PIECE_SECONDS = 0.002
"""Blocks are sent in pieces of about this long, so that transfers share a link and the first blocks come early."""


class SimulatedSlots:
    """A `kv.moving.SlotMemory` with a slot per page. The memory is taken when a slot is first written."""

    def __init__(self, slots: int) -> None:
        self.layout = SlotLayout(slots, SLOT_BYTES, (0,))
        self.file = os.memfd_create("simulated KV", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
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


@dataclass(slots=True, eq=False)
class _Pull:
    """`received` blocks came through the transport, `delivered` of them took their time on the link. `is_over`: no more will come."""

    names: Sequence[bytes]
    slots: Sequence[int]
    received: int = 0
    delivered: int = 0
    is_over: bool = False
    is_stopped: bool = False


class SimulatedKv:
    """Stands between the books and the transport: a `KvEngine` to the transport, a `KvTransport` to the books.

    Calls of the transport's thread are handed over to the event loop. Blocks that are sent or received wait for their turn on a link.
    A block that arrives must have the bytes of its name: this checks the transport, which compares only checksums. `wake` is called after
    news, `fail` when a block is wrong.
    """

    def __init__(
        self,
        cache: KVCache,
        books: Transfers,
        config: SimulatorConfig,
        fingerprint: bytes,
        wake: Callable[[], None],
        fail: Callable[[str], None],
    ) -> None:
        self.fingerprint = fingerprint
        self.memory = SimulatedSlots(cache.pages)
        self._cache = cache
        self._books = books
        self._wake = wake
        self._fail = fail
        self._block_bytes = config.moved_block_bytes
        self.pull_rate = config.kv_link_gbps * 1e9 / 8
        self._piece = max(1, int(self.pull_rate * PIECE_SECONDS / self._block_bytes))
        self._pulls: dict[bytes, _Pull] = {}
        self._is_filled = False

    def connect(self, transport: KvTransport) -> None:
        """From now on KV moves. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._outgoing, self._incoming = Link(self.pull_rate, self._loop), Link(self.pull_rate, self._loop)
        self._transport = transport
        self._books.transport = self

    def find_wrong(self, nodes: Iterable[Node]) -> str | None:
        """Which of these blocks is not where the tree says. None: all are."""
        wrong = [node for node in nodes if not self.memory.holds(node.page, node.name)] if self._is_filled else []
        return f"page {wrong[0].page} does not hold block {wrong[0].name.hex()}" if wrong else None

    def fill(self) -> None:
        """Writes what computing would have left in the slots. A worker whose KV never moves does not pay for it."""
        if not self._is_filled:
            self._is_filled = True
            self._cache.watch(self._store)

    def _store(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.memory.fill(node.page, node.name)

    # What the books ask for.

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        self.fill()
        self._pulls[source.transfer] = _Pull(names, slots)
        self._transport.pull(source, names, slots)

    def stop(self, transfer: bytes) -> None:
        pull = self._pulls[transfer]
        pull.is_stopped = True
        self._incoming.drop(transfer)
        if pull.is_over:
            # The transport has ended it, and does not end it again.
            self._loop.call_soon(self._end_pull, transfer, "stopped")
        else:
            self._transport.stop(transfer)

    def exported(self, transfer: bytes, first: int, slots: Sequence[int], *, is_last: bool) -> None:
        for start in range(0, max(1, len(slots)), self._piece):
            piece = slots[start : start + self._piece]
            is_end = is_last and start + self._piece >= len(slots)
            send = partial(self._transport.exported, transfer, first + start, piece, is_last=is_end)
            self._outgoing.carry(transfer, len(piece) * self._block_bytes, send)

    def withdraw(self, transfer: bytes) -> None:
        self._outgoing.drop(transfer)
        self._transport.withdraw(transfer)

    # What the transport tells, in its own thread.

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        self._loop.call_soon_threadsafe(self._export, transfer, names, waits)

    def release(self, transfer: bytes) -> None:
        self._loop.call_soon_threadsafe(self._release, transfer)

    def arrived(self, transfer: bytes, blocks: int) -> None:
        self._loop.call_soon_threadsafe(self._receive, transfer, blocks)

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        self._loop.call_soon_threadsafe(self._receive_end, transfer, failure)

    def _export(self, transfer: bytes, names: Sequence[bytes], waits: bool) -> None:
        self.fill()
        self._outgoing.drop(transfer)
        self._books.export(transfer, names, waits=waits)
        self._wake()

    def _release(self, transfer: bytes) -> None:
        self._outgoing.drop(transfer)
        self._books.release(transfer)
        self._wake()

    def _receive(self, transfer: bytes, blocks: int) -> None:
        pull = self._pulls[transfer]
        new, pull.received = blocks - pull.received, blocks
        self._incoming.carry(transfer, new * self._block_bytes, partial(self._deliver, transfer, blocks))

    def _deliver(self, transfer: bytes, blocks: int) -> None:
        pull = self._pulls[transfer]
        for name, slot in zip(pull.names[pull.delivered : blocks], pull.slots[pull.delivered : blocks], strict=True):
            if not self.memory.holds(slot, name):
                self._fail(f"transfer {transfer.hex()}: slot {slot} does not hold block {name.hex()}, which has arrived there")
                return
        pull.delivered = blocks
        self._books.arrived(transfer, blocks)
        self._wake()

    def _receive_end(self, transfer: bytes, failure: str) -> None:
        pull = self._pulls[transfer]
        pull.is_over = True
        if pull.is_stopped:
            self._incoming.drop(transfer)
            self._end_pull(transfer, failure)
        else:
            self._incoming.carry(transfer, 0, partial(self._end_pull, transfer, failure))

    def _end_pull(self, transfer: bytes, failure: str) -> None:
        if self._pulls.pop(transfer, None) is not None:
            self._books.pull_ended(transfer, failure)
            self._wake()
