"""Host memory for the KV of blocks: slots, which copies fill and empty, and which the transport and other workers can read."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from penstock.engine.attention import KVStore
from penstock.engine.page_memory import checksum
from penstock.kv.moving import SlotLayout, SlotMemory


class HostSlots:
    """A `SlotMemory` in which a block is one strip: its keys of all layers, then its values. The same bytes, in the same order, as a block
    whose slot is its page.

    For a GPU the memory is pinned: its copy engine reads and writes it beside the steps, at the full rate of the bus. It is a memfd, so a
    worker on the same machine can map it; that costs nothing.
    """

    def __init__(self, store: KVStore, slots: int) -> None:
        strips = store.strips
        self.layout = SlotLayout(slots, strips.shape[0] * strips.shape[2] * strips.itemsize, (0,))
        self.file = os.memfd_create("penstock-kv-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.file, max(1, slots) * self.layout.slot_bytes)
        self._memory = mmap.mmap(self.file, 0)
        # Touched by all of torch's threads: pinning would touch it in one thread, at half a second per GB.
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        self._release = weakref.finalize(self, _release, self.file, pin(self._bytes) if store.device.type == "cuda" else None)
        self.tensor: Tensor = self._bytes.view(torch.int64).view(max(1, slots), strips.shape[0], strips.shape[2])

    def views(self, slot: int) -> tuple[memoryview]:
        size = self.layout.slot_bytes
        return (memoryview(self._memory)[slot * size : (slot + 1) * size],)

    def checksum(self, strips: Sequence[memoryview]) -> int:
        return checksum(strips)

    def first(self, slots: int) -> SlotMemory:
        """The first ones of these slots, for one who may use no others."""
        return _FirstSlots(self, slots)

    def close(self) -> None:
        """No copy is under way, and nobody uses a view any more. Also done when nobody has this object any more."""
        self._release()
        self.file = -1


class _FirstSlots:
    file = -1

    def __init__(self, slots: HostSlots, count: int) -> None:
        self.layout = msgspec.structs.replace(slots.layout, slots=count)
        self.views = slots.views
        self.checksum = slots.checksum


def pin(memory: Tensor) -> int:
    """Returns the address, to unpin it."""
    address = memory.data_ptr()
    status = int(torch.cuda.cudart().cudaHostRegister(address, memory.numel(), 0))  # type: ignore[no-untyped-call]
    if status:
        raise MemoryError(f"cannot pin {memory.numel() / 2**30:.1f} GiB of host memory: CUDA error {status}")
    return address


def _release(file: int, pinned: int | None) -> None:
    if pinned is not None:
        unpin(pinned)
    os.close(file)


def unpin(address: int) -> None:
    """Memory that is unmapped while it is pinned could never be pinned again."""
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
