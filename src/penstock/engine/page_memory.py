"""The pages of a KV store on a CPU as slots: a transport, and workers on the same machine, read and write them in place."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.host_slots import checksum
from penstock.kv.moving import SlotLayout


class PageMemory:
    """A `SlotMemory` with a slot per page. A page has a strip for each layer's keys, then one for each layer's values.

    The memory is a memfd, whose bytes the system zeroes when they are first touched.
    """

    def __init__(self, strips: int, pages: int, strip_bytes: int) -> None:
        size = strips * pages * strip_bytes
        self.layout = SlotLayout(pages, strip_bytes, tuple(range(0, size, pages * strip_bytes)))
        self.file = os.memfd_create("penstock-kv-pages", os.MFD_CLOEXEC)
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
