"""Host memory for the KV of blocks: slots, which copies fill and empty, and which the transport and other workers can read."""

from __future__ import annotations

import functools
import mmap
import os
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.attention import KVStore
from penstock.kv.moving import SlotLayout


class HostSlots:
    """A `SlotMemory` in which a block is one strip: its keys of all layers, then its values. The same bytes, in the same order, as a block
    whose slot is its page.

    For a GPU the memory is pinned: its copy engine reads and writes it beside the steps, at the full rate of the bus. It is a memfd, so a
    worker on the same machine can map it; that costs nothing.
    """

    def __init__(self, store: KVStore, slots: int) -> None:
        strips = store.strips
        self.layout = SlotLayout(slots, strips.shape[0] * strips.shape[2] * strips.itemsize, (0,))
        self.file = os.memfd_create("penstock-kv-slots")
        os.ftruncate(self.file, max(1, slots) * self.layout.slot_bytes)
        self._memory = mmap.mmap(self.file, 0)
        # Touched by all of torch's threads: pinning would touch page after page in one thread, at half a second per GB.
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8).zero_()
        self._is_pinned = store.device.type == "cuda"
        if self._is_pinned:
            _check(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.numel(), 0))
        self.tensor: Tensor = self._bytes.view(torch.int64).view(max(1, slots), strips.shape[0], strips.shape[2])

    def views(self, slot: int) -> tuple[memoryview]:
        size = self.layout.slot_bytes
        return (memoryview(self._memory)[slot * size : (slot + 1) * size],)

    def checksum(self, strips: Sequence[memoryview]) -> int:
        return checksum(strips)

    def close(self) -> None:
        """No copy is under way, and nobody uses a view any more."""
        if self._is_pinned:
            self._is_pinned = False
            _check(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))
        if self.file >= 0:
            os.close(self.file)
            self.file = -1


def checksum(strips: Sequence[memoryview]) -> int:
    """64 bits over the bytes of a slot, the same for one strip and for many. Each strip is a whole number of 8-byte words.

    A sum of all words, each times an odd number of its own. So it changes with any change of one word, and with words that change places.
    """
    total, first = 0, 0
    for strip in strips:
        words = numpy.frombuffer(strip, numpy.uint64)
        factors = _factors(1 << (first + len(words) - 1).bit_length())
        total += int(numpy.dot(words, factors[first : first + len(words)]))
        first += len(words)
    return total % 2**64


@functools.lru_cache(2)
def _factors(count: int) -> NDArray[numpy.uint64]:
    """Odd numbers, the same in every process. Those of a longer slot begin with those of a shorter one."""
    places = numpy.arange(1, count + 1, dtype=numpy.uint64) * numpy.uint64(0x9E3779B97F4A7C15)
    mixed = (places ^ (places >> numpy.uint64(31))) * numpy.uint64(0xBF58476D1CE4E5B9)
    factors: NDArray[numpy.uint64] = mixed ^ (mixed >> numpy.uint64(27)) | numpy.uint64(1)
    return factors


def _check(status: int) -> None:
    if int(status):
        raise MemoryError(f"pinning host memory for KV failed: CUDA error {int(status)}")
