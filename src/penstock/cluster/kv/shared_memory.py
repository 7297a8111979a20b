"""Slots of another worker on this machine, copied from the file that it has passed over a unix socket.

Long strips are read from the file: that copies without the GIL. Short ones are copied from a mapping: a system call for each, and then a
wait for the GIL, would take longer than the copy. A file is mapped only if it is sealed: otherwise its owner could make it shorter, and
reading the mapping would end this process.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Sequence

from penstock.kv.moving import SlotLayout
from penstock.wire.errors import FrameMalformed

F_SEAL_FUTURE_WRITE = 0x10
"""Of Linux since 5.1: only mappings that are there already may write. Python's `fcntl` has no name for it yet."""
MIN_READ_BYTES = 256 * 1024
"""Strips of this size and more are read, shorter ones are copied from a mapping."""


def read_only(file: int) -> int:
    """Another descriptor of a file in memory, which nobody can write through. If the file may be sealed, it cannot shrink from now on, and
    nobody writes to it but through the mappings that it has: a peer could open the descriptor again. -1 where memory cannot be shared."""
    if file < 0 or sys.platform != "linux":
        return -1
    for seal in (fcntl.F_SEAL_SHRINK, F_SEAL_FUTURE_WRITE):
        with contextlib.suppress(OSError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, seal)
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class PeerSlots:
    """The slots of another worker. Owns the descriptor and the mapping."""

    def __init__(self, file: int, layout: SlotLayout) -> None:
        self._file = file
        self._layout = layout
        self._mapping: mmap.mmap | None = None
        self._mapped: memoryview | None = None

    @property
    def is_mapped(self) -> bool:
        return self._mapped is not None

    def open(self) -> None:
        """Raises FrameMalformed unless all slots are in the file, and the file is in memory: reading it never waits."""
        layout = self._layout
        try:
            # Only files in memory have seals.
            seals = fcntl.fcntl(self._file, fcntl.F_GET_SEALS)
            size = os.fstat(self._file).st_size
        except OSError as error:
            raise FrameMalformed(f"the source passed something that is not a file in memory: {error.strerror}") from error
        if layout.slots < 1 or min(layout.starts) < 0 or max(layout.starts) + layout.slots * layout.strip_bytes > size:
            raise FrameMalformed(f"the source passed a file of {size:,} bytes, which does not hold its {layout.slots:,} slots")
        if seals & fcntl.F_SEAL_SHRINK and layout.strip_bytes < MIN_READ_BYTES:
            # Where this process may map no more memory, the slots are read.
            with contextlib.suppress(OSError):
                self._mapping = mmap.mmap(self._file, size, prot=mmap.PROT_READ)
                self._mapped = memoryview(self._mapping)

    def copy(self, slot: int, strips: Sequence[memoryview]) -> None:
        """Copies one slot. Raises FrameMalformed or OSError when the file does not have it."""
        if not 0 <= slot < self._layout.slots:
            raise FrameMalformed(f"the source has no slot {slot}")
        size, mapped = self._layout.strip_bytes, self._mapped
        offset = slot * size
        for start, strip in zip(self._layout.starts, strips, strict=True):
            if mapped is not None:
                strip[:] = mapped[start + offset : start + offset + size]
            elif os.preadv(self._file, (strip,), start + offset) != size:
                raise FrameMalformed("the source's file has become shorter")

    def close(self) -> None:
        if self._mapped is not None and self._mapping is not None:
            self._mapped.release()
            self._mapping.close()
            self._mapped = self._mapping = None
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
