"""Slots of another worker on this machine, read from the file that it has passed over a unix socket.

The file is read, not mapped: a read releases the interpreter's lock while it copies, and a file that became shorter is an error and not
the end of this process.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Sequence

from penstock.kv.moving import SlotLayout
from penstock.wire.errors import FrameMalformed

_GET_SEALS = 1034
"""`fcntl.F_GET_SEALS`, which some builds of Python lack. Only files in memory have seals."""


def read_only(file: int) -> int:
    """Another descriptor of a file in memory, which nobody can write through. -1 where that does not work."""
    if file < 0 or sys.platform != "linux":
        return -1
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


class PeerSlots:
    """The slots of another worker. Owns the descriptor."""

    def __init__(self, file: int, layout: SlotLayout) -> None:
        self._file = file
        self._layout = layout

    def check(self) -> None:
        """Raises FrameMalformed unless all slots are in the file, and the file is in memory: reading it never waits."""
        layout = self._layout
        try:
            fcntl.fcntl(self._file, _GET_SEALS)
            size = os.fstat(self._file).st_size
        except OSError as error:
            raise FrameMalformed(f"the source passed something that is not a file in memory: {error.strerror}") from error
        if min(layout.starts) < 0 or max(layout.starts) + layout.slots * layout.strip_bytes > size:
            raise FrameMalformed(f"the source passed a file of {size:,} bytes, which does not hold its {layout.slots:,} slots")

    def copy(self, slot: int, strips: Sequence[memoryview]) -> None:
        """Copies one slot. Raises OSError when the file does not have it."""
        if not 0 <= slot < self._layout.slots:
            raise FrameMalformed(f"the source has no slot {slot}")
        offset = slot * self._layout.strip_bytes
        for start, strip in zip(self._layout.starts, strips, strict=True):
            if os.preadv(self._file, (strip,), start + offset) != len(strip):
                raise FrameMalformed("the source's file has become shorter")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
