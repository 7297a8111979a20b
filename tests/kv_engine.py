"""A small real engine for the transport of KV: a dictionary of names to slots in a memfd."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from hashlib import blake2b

from penstock.kv.moving import KvTransport, SlotLayout


def names_of(count: int, chain: str = "a") -> list[bytes]:
    return [blake2b(f"{chain} {number}".encode(), digest_size=16).digest() for number in range(count)]


class MemorySlots:
    """A `SlotMemory`: strips of all slots, one after the other, with a gap at the front."""

    def __init__(self, slots: int, strip_bytes: int = 4096, strips: int = 2, *, can_seal: bool = False) -> None:
        self.layout = SlotLayout(slots, strip_bytes, tuple(100 + strip * slots * strip_bytes for strip in range(strips)))
        size = 100 + strips * slots * strip_bytes
        self.file = os.memfd_create("slots", os.MFD_CLOEXEC | (os.MFD_ALLOW_SEALING if can_seal else 0))
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        self._bytes = memoryview(mmap.mmap(self.file, size))

    def views(self, slot: int) -> Sequence[memoryview]:
        width = self.layout.strip_bytes
        return [self._bytes[start + slot * width : start + (slot + 1) * width] for start in self.layout.starts]

    def checksum(self, strips: Sequence[memoryview]) -> int:
        found = 0
        for strip in strips:
            found = zlib.crc32(strip, found)
        return found << 32 | found

    def fill(self, slot: int, name: bytes) -> None:
        for number, strip in enumerate(self.views(slot)):
            strip[:] = (blake2b(name + bytes([number])).digest() * (len(strip) // 64 + 1))[: len(strip)]

    def holds(self, slot: int, name: bytes) -> bool:
        return all(
            strip == (blake2b(name + bytes([number])).digest() * (len(strip) // 64 + 1))[: len(strip)]
            for number, strip in enumerate(self.views(slot))
        )


class DictEngine:
    """A `KvEngine`. It answers an export at once with the blocks that it has, unless `is_manual`: then the test answers."""

    def __init__(
        self, slots: int = 64, strip_bytes: int = 4096, fingerprint: bytes = b"equal", *, is_manual: bool = False, can_seal: bool = False
    ) -> None:
        self.fingerprint = fingerprint
        self.memory = MemorySlots(slots, strip_bytes, can_seal=can_seal)
        self.transport: KvTransport | None = None
        self.is_manual = is_manual
        self.slot_of: dict[bytes, int] = {}
        self.exports: dict[bytes, list[bytes]] = {}
        self.released: list[bytes] = []
        self.progress: dict[bytes, list[int]] = {}
        self.ended: list[tuple[bytes, str]] = []
        self.busy_seconds = 0.0
        """How long the transport's thread is kept when a block has arrived."""
        self._changed = threading.Condition()

    def connect(self, transport: KvTransport) -> None:
        self.transport = transport

    def store(self, names: Sequence[bytes]) -> list[int]:
        slots = list(range(len(self.slot_of), len(self.slot_of) + len(names)))
        for slot, name in zip(slots, names, strict=True):
            self.memory.fill(slot, name)
            self.slot_of[name] = slot
        return slots

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        with self._changed:
            assert transfer not in self.exports
            self.exports[transfer] = list(names)
            self._changed.notify_all()
        if not self.is_manual:
            slots = []
            for name in names:
                if name not in self.slot_of:
                    break
                slots.append(self.slot_of[name])
            assert self.transport is not None
            self.transport.exported(transfer, 0, slots, is_last=not waits)

    def release(self, transfer: bytes) -> None:
        with self._changed:
            self.released.append(transfer)
            self._changed.notify_all()

    def arrived(self, transfer: bytes, blocks: int) -> None:
        with self._changed:
            self.progress.setdefault(transfer, []).append(blocks)
            self._changed.notify_all()
        threading.Event().wait(self.busy_seconds)

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        with self._changed:
            self.ended.append((transfer, failure))
            self._changed.notify_all()

    def until(self, condition: Callable[[], object], seconds: float = 10.0, *, poll: bool = False) -> None:
        """`poll`: for a condition that no call of the transport announces."""
        with self._changed:
            while poll and not condition():
                self._changed.wait(0.001)
            assert self._changed.wait_for(condition, seconds), (self.ended, self.progress, self.released)

    def until_quiet(self, seconds: float) -> None:
        """Until nothing has changed for this time."""
        with self._changed:
            while self._changed.wait(seconds):
                pass

    def until_ended(self, transfer: bytes) -> str:
        """The failure of this pull."""
        self.until(lambda: transfer in dict(self.ended))
        assert [each for each, _ in self.ended].count(transfer) == 1
        return dict(self.ended)[transfer]

    def until_released(self, transfer: bytes) -> None:
        self.until(lambda: transfer in self.released)
        assert self.released.count(transfer) == 1
