"""The pages of a KV store on a CPU as slots: a transport, and workers on the same machine, read and write them in place."""

from __future__ import annotations

import functools
import mmap
import os
import sys
import weakref
from collections.abc import Sequence

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kv.moving import SlotLayout


class PageMemory:
    """A `SlotMemory` with a slot per page. A page has a strip for each layer's keys, then one for each layer's values.

    The memory is a memfd, whose bytes the system zeroes when they are first touched. Elsewhere than on Linux others cannot map it.
    """

    def __init__(self, strips: int, pages: int, strip_bytes: int) -> None:
        size = strips * pages * strip_bytes
        self.layout = SlotLayout(pages, strip_bytes, tuple(range(0, size, pages * strip_bytes)))
        self.file = -1
        if sys.platform == "linux":
            self.file = os.memfd_create("penstock-kv-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.file)
            os.ftruncate(self.file, size)
        self._mapped = mmap.mmap(self.file, size)
        self._bytes = memoryview(self._mapped)
        self.tensor: Tensor = torch.frombuffer(self._mapped, dtype=torch.uint8)

    def views(self, slot: int) -> Sequence[memoryview]:
        size = self.layout.strip_bytes
        first = slot * size
        return [self._bytes[start + first : start + first + size] for start in self.layout.starts]

    def checksum(self, strips: Sequence[memoryview]) -> int:
        return checksum(strips)


def checksum(strips: Sequence[memoryview]) -> int:
    """64 bits over the bytes of a slot, the same for one strip and for many. Each strip is a whole number of 8-byte words.

    A sum of all words, each times an odd number of its own. So it changes with any change of one word, and with words that change places.
    """
    parts = [numpy.frombuffer(strip, numpy.uint64) for strip in strips]
    factors = _factors(1 << (sum(map(len, parts)) - 1).bit_length())
    total, first = 0, 0
    for words in parts:
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
