"""KV blocks on disk: a file of equal slots and an index of what is in them, read and written in a thread of its own.

All blocks of a model have the same size. So a file of slots is bounded and needs no compaction, and a block costs one write of its data and
one of its record in the index. After a restart one read of the index finds all blocks. (A file per block would cost a directory entry and
an inode per block; growing files would have to be rewritten to drop blocks.)

Nothing is synced. A record has a checksum of its block and one of itself. A block that a crash has left half-written is found when it is
read, and dropped; then it is computed. Data that is only in the system's memory is lost with the machine, never with the process.

The files hold users' text in the form of KV. Only the user of this process can read them: directories and files of other users, and links,
are refused.

The size bounds the whole directory, once for each worker that uses it: stores that nobody uses leave when this one needs their room.
"""

from __future__ import annotations

import errno
import logging
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from penstock.backends.disk_stores import left_over, lock_store, open_private
from penstock.kv.tiers import Done
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

FULL_SECONDS = 10.0
"""After the disk was full, nothing is written for this long."""
LOOK_SECONDS = 60.0
"""How often a store looks whether others were left over meanwhile."""
CLOSE_SECONDS = 2.0
"""How long an end waits for a disk that does not answer."""
ALIGNMENT = 4096
MAX_BEHIND = 0.05

_HEADER = struct.Struct("<16sQ32s")
_MAGIC = b"penstock KV 1\0\0\0"
# The checksum of the rest, name and parent, the parent's length, the checksum of the data, and the order of writing.
_RECORD = struct.Struct("<I16s16sIIQ")
RECORD_BYTES = 64
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class _Record(NamedTuple):
    name: bytes
    parent: bytes
    checksum: int
    order: int

    def pack(self) -> bytes:
        body = _RECORD.pack(0, self.name, self.parent, len(self.parent), self.checksum, self.order)[4:]
        return (struct.pack("<I", crc32(body)) + body).ljust(RECORD_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> _Record | None:
        """None if these bytes are not a record."""
        checksum, name, parent, length, data_checksum, order = _RECORD.unpack_from(data)
        is_sound = crc32(data[4 : _RECORD.size]) == checksum
        return cls(name, parent[:length], data_checksum, order) if is_sound else None


class DiskTier:
    """A `kv.tiers.BlockFiles`. `on_done` is called in the thread, when something can be taken. `seconds_per_block`: what a block takes at
    least, for the simulator.

    A write that fails drops its block, as does a read that finds other bytes than were written. Reads go before writes.
    """

    def __init__(self, directory: Path, fingerprint: bytes, slot_bytes: int, size: int, seconds_per_block: float = 0.0) -> None:
        """At most `size` bytes. Raises ConfigError if the directory cannot be used. One that is full is only not used."""
        self._slot_bytes = slot_bytes
        self._stride = slot_bytes if slot_bytes < ALIGNMENT else -(-slot_bytes // ALIGNMENT) * ALIGNMENT
        self._seconds_per_block = seconds_per_block
        self.slots = size // (self._stride + RECORD_BYTES)
        if not self.slots:
            raise ConfigError(f"--kv-disk-size is {size} bytes: expected at least {self._stride + RECORD_BYTES}, the size of a KV block")
        self.on_done: Callable[[], None] = lambda: None
        self.dropped = 0
        """Records of an earlier process that could not be used."""
        self._directory, self._fingerprint, self._size = directory, fingerprint, size
        self._began = time.time()
        self._look_at = 0.0
        self._left_over = 0  # bytes, at the last look
        self._open_files: list[int] = []
        try:
            self._records = self._open_store()
        except OSError as error:
            raise ConfigError(f"--kv-disk {directory} cannot be used: {error.strerror or error}") from error
        self._order = max([record.order for record in self._records.values()], default=0)
        self._full_until = 0.0
        self._warned: set[str] = set()
        self._free_at = 0.0
        self._changed = threading.Condition()
        self._reads: deque[Callable[[], None]] = deque()
        self._writes: deque[Callable[[], None]] = deque()
        self._done: list[Done] = []
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="KV on disk", daemon=True)
        self._thread.start()

    def recovered(self) -> Sequence[tuple[int, bytes, bytes]]:
        ordered = sorted(self._records.items(), key=lambda item: item[1].order)
        return [(slot, record.name, record.parent) for slot, record in ordered]

    def write(self, number: int, slot: int, name: bytes, parent: bytes, data: memoryview) -> None:
        self._ask(self._writes, lambda: self._write(number, slot, name, parent, data))

    def read(self, number: int, slot: int, name: bytes, data: memoryview) -> None:
        self._ask(self._reads, lambda: self._read(number, slot, name, data))

    def forget(self, slot: int) -> None:
        self._ask(self._writes, lambda: self._forget(slot))

    def take_done(self) -> list[Done]:
        with self._changed:
            done, self._done = self._done, []
        return done

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Writes what was asked for, then ends the thread and frees the directory for others.

        If the disk does not answer in this time, the thread is left behind, with its files. It does not keep the process from ending.
        """
        with self._changed:
            self._is_closing = True
            self._reads.clear()
            self._changed.notify()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.warning("the disk of --kv-disk does not answer: KV that was to be written is lost")
            self.on_done = lambda: None
            return
        self._close_store()

    # The rest runs in the thread, except for what the constructor calls.

    def _open_store(self) -> dict[int, _Record]:
        """Returns its records. When the disk is full, what is left over by others leaves; if that does not help, nothing is stored."""
        for is_last in (False, True):
            try:
                return self._open()
            except OSError as error:
                self._close_store()
                if error.errno not in _FULL:
                    raise
                if not is_last:
                    self._trim(self._size)
        log.warning("the disk of --kv-disk %s is full: this worker stores no KV there", self._directory)
        self.slots = 0
        return {}

    def _open(self) -> dict[int, _Record]:
        self._store, lock = lock_store(self._directory / self._fingerprint.hex())
        self._open_files.append(lock)
        self._index = open_private(self._store / "index")
        self._open_files.append(self._index)
        self._blocks = open_private(self._store / "blocks")
        self._open_files.append(self._blocks)
        records = self._read_index(self._fingerprint)
        self._extent = -(-os.fstat(self._blocks).st_size // self._stride)
        return records

    def _close_store(self) -> None:
        """The lock last."""
        while self._open_files:
            os.close(self._open_files.pop())

    def _has_room(self, slot: int) -> bool:
        """Whether this slot may be written: with all that others have left over, the size is not exceeded."""
        extent, now = max(self._extent, slot + 1), time.monotonic()
        own = extent * (self._stride + RECORD_BYTES)
        if (own + self._left_over > self._size or now >= self._look_at) and not self._trim(own) and extent > self._extent:
            return False
        self._extent = extent
        return True

    def _trim(self, own: int) -> bool:
        """Deletes what is left over until the size holds that and this many bytes of our own. Returns whether it does."""
        self._look_at = time.monotonic() + LOOK_SECONDS
        found = left_over(self._directory, self._fingerprint, self._began)
        self._left_over = sum([each.size for each in found])
        for each in found:
            if own + self._left_over <= self._size:
                break
            try:
                if each.delete():
                    log.info("%s is deleted: nobody uses its KV, and --kv-disk-size is reached", each.store)
            except OSError as error:
                log.warning("%s cannot be deleted: %s", each.store, error.strerror or error)
                continue
            self._left_over -= each.size
        return own + self._left_over <= self._size

    def _ask(self, queue: deque[Callable[[], None]], what: Callable[[], None]) -> None:
        with self._changed:
            queue.append(what)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._writes or self._is_closing)
                queue = self._reads or self._writes
                if not queue:
                    return
                what = queue.popleft()
            what()

    def _write(self, number: int, slot: int, name: bytes, parent: bytes, data: memoryview) -> None:
        began, failure = time.monotonic(), ""
        record = _Record(name, parent, crc32(data, crc32(name)), self._order + 1)
        # Until the new record is written, the old one stands for the new data, in the file only. Its checksum does not fit.
        earlier = self._records.pop(slot, None)
        try:
            if began >= self._full_until and self._has_room(slot):
                _write_all(self._blocks, data, slot * self._stride)
                _write_all(self._index, memoryview(record.pack()), (slot + 1) * RECORD_BYTES)
                self._order, self._records[slot] = record.order, record
                self._warned -= {"written", "full"}
            else:
                failure = "full"
        except OSError as error:
            failure = self._failed("written", error)
        if failure and earlier is not None:
            # What gave way for this block is in no tier any more. A close would not find it, and a restart would.
            self._forget(slot)
        self._finish(number, failure, began)

    def _read(self, number: int, slot: int, name: bytes, data: memoryview) -> None:
        began, failure = time.monotonic(), ""
        record = self._records.get(slot)
        try:
            length = os.preadv(self._blocks, [data], slot * self._stride)
        except OSError as error:
            failure = self._failed("read", error)
        else:
            self._warned.discard("read")
            if record is None or length < len(data) or record.name != name or crc32(data, crc32(name)) != record.checksum:
                failure = "corrupt"
        if failure:
            self._forget(slot)
        self._finish(number, failure, began)

    def _forget(self, slot: int) -> None:
        """The old record would come back after a restart; its checksum keeps it from doing harm if this fails."""
        self._records.pop(slot, None)
        try:
            _write_all(self._index, memoryview(bytes(RECORD_BYTES)), (slot + 1) * RECORD_BYTES)
        except OSError as error:
            self._failed("written", error)

    def _failed(self, what: str, error: OSError) -> str:
        if error.errno in _FULL:
            self._warn("full", f"the disk of --kv-disk is full: it is tried again every {FULL_SECONDS:g} s")
            if time.monotonic() >= self._full_until:
                self._full_until = time.monotonic() + FULL_SECONDS
                self._trim(self._size)
            return "full"
        self._warn(what, f"a KV block could not be {what}: {error.strerror or error}")
        return "error"

    def _warn(self, what: str, warning: str) -> None:
        """Once, until that works again."""
        if what not in self._warned:
            self._warned.add(what)
            log.warning("%s", warning)

    def _finish(self, number: int, failure: str, began: float) -> None:
        seconds = time.monotonic() - began
        if self._seconds_per_block:
            seconds = self._take_time(began)
        with self._changed:
            self._done.append(Done(number, failure, seconds))
        self.on_done()

    def _take_time(self, began: float) -> float:
        """For the simulator: takes as long as a real block would. What a late thread has missed is made up for."""
        self._free_at = max(self._free_at, began - MAX_BEHIND) + self._seconds_per_block
        rest = self._free_at - time.monotonic()
        if rest > 0:
            time.sleep(rest)
        return self._seconds_per_block

    def _read_index(self, fingerprint: bytes) -> dict[int, _Record]:
        """The records of an earlier process, by slot. If its file is of another kind, it is begun anew."""
        header = _HEADER.pack(_MAGIC, self._slot_bytes, fingerprint[:32]).ljust(RECORD_BYTES, b"\0")
        size = os.fstat(self._index).st_size
        if os.pread(self._index, RECORD_BYTES, 0) != header:
            if size:
                log.warning("%s is from another version or damaged: its KV is deleted", self._store)
                self.dropped += max(0, size // RECORD_BYTES - 1)
            os.ftruncate(self._index, 0)
            os.ftruncate(self._blocks, 0)
            _write_all(self._index, memoryview(header), 0)
            return {}
        # A smaller size than before: what is behind it is given back.
        os.ftruncate(self._index, min(size, (self.slots + 1) * RECORD_BYTES))
        os.ftruncate(self._blocks, min(os.fstat(self._blocks).st_size, self.slots * self._stride))
        with os.fdopen(os.dup(self._index), "rb") as file:
            file.seek(RECORD_BYTES)
            return self._sound_records(file.read())

    def _sound_records(self, data: bytes) -> dict[int, _Record]:
        slots: dict[bytes, int] = {}
        records: dict[int, _Record] = {}
        for slot, start in enumerate(range(0, len(data), RECORD_BYTES)):
            packed = data[start : start + RECORD_BYTES]
            if not any(packed):
                continue
            record = _Record.unpack(packed) if len(packed) == RECORD_BYTES else None
            earlier = None if record is None else slots.get(record.name)
            if record is None or (earlier is not None and records[earlier].order > record.order):
                self.dropped += 1
                continue
            if earlier is not None:
                self.dropped += 1
                del records[earlier]
            slots[record.name] = slot
            records[slot] = record
        return records


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwritev(file, [data], offset)
        data, offset = data[written:], offset + written
