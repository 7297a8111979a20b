"""The stores in the directory of --kv-disk: one folder per fingerprint, in it one store per worker.

A store belongs to the process that has locked it. Those that nobody uses are left over: by models that are not served any more, or by
workers beyond those that run. They count to the size of the tier that looks at them, and leave when it needs the room.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MAX_STORES = 64
"""Workers on one machine that share a directory: each has a store of its own."""
RECENT_SECONDS = 600.0
"""A store of the same model is not left over before it was unused for this long: its worker may be starting again."""
MAX_TRIES = 100
TRY_SECONDS = 0.001
"""Who looks at a store shares its lock for a moment. Who wants to own it tries again this often, after this long."""
FILES = ("index", "blocks")


class LeftOver(NamedTuple):
    """A store that nobody uses. Those of other models leave first, the oldest of them first."""

    is_same_model: bool
    used_at: float
    size: int
    store: Path

    def delete(self) -> bool:
        """Returns False if somebody uses it now. The lock stays: another process may be about to take it. Raises OSError."""
        lock = _own(self.store)
        if lock is None:
            return False
        try:
            # The index first: without it nobody takes missing blocks for blocks. What an interruption leaves is left over, too.
            for name in FILES:
                (self.store / name).unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True


def left_over(directory: Path, fingerprint: bytes, since: float) -> list[LeftOver]:
    """What nobody uses in this directory, in the order in which it leaves. `since`: when the asking worker has started."""
    return sorted(_left_over(directory, fingerprint.hex(), time.time() - RECENT_SECONDS, since))


def _left_over(directory: Path, own: str, recently: float, since: float) -> Iterator[LeftOver]:
    for store in directory.glob("*/[0-9]*"):
        try:
            bytes.fromhex(store.parent.name)
            check_private(store.parent)
            check_private(store)
            (store / "lock").lstat()  # Every store has one.
            files = [path.lstat() for path in store.iterdir() if path.name in FILES]
            is_same = store.parent.name == own
            used_at = max(file.st_mtime for file in files)
            if is_same and max(used_at, since) > recently:
                continue
            lock = _try_lock(store, fcntl.LOCK_SH)
        except (OSError, ValueError):
            continue  # Not a store, or one that cannot be used.
        if lock is not None:
            os.close(lock)
            yield LeftOver(is_same, used_at, sum([file.st_size for file in files]), store)


def _own(store: Path) -> int | None:
    """Its lock. None if another process uses it."""
    for _ in range(MAX_TRIES):
        lock = _try_lock(store, fcntl.LOCK_EX)
        if lock is not None:
            return lock
        shared = _try_lock(store, fcntl.LOCK_SH)
        if shared is None:
            return None
        os.close(shared)
        time.sleep(TRY_SECONDS)
    return None


def _try_lock(store: Path, kind: int) -> int | None:
    """None if another process has it: one that owns the store, or, for an exclusive lock, one that looks at it."""
    lock = open_private(store / "lock")
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def lock_store(directory: Path) -> tuple[Path, int]:
    """The first store in this directory that no other process uses, and its lock."""
    directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(directory)
    for number in range(MAX_STORES):
        store = directory / str(number)
        _make_private(store)
        lock = _own(store)
        if lock is not None:
            return store, lock
    raise OSError(errno.EBUSY, f"{MAX_STORES} other processes use it")


def _make_private(directory: Path) -> None:
    """Makes the directory if it is missing. Only this user can use it from now on."""
    directory.mkdir(mode=0o700, exist_ok=True)
    check_private(directory)
    directory.chmod(0o700)


def check_private(directory: Path) -> None:
    """Raises OSError."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"{directory} is not a directory of this user")


def open_private(path: Path) -> int:
    """The same for a file in such a directory, which may have been open to others before."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        os.close(file)
        raise OSError(errno.EPERM, f"{path} is not a file of this user")
    os.fchmod(file, 0o600)
    return file
