"""Which processes are alive: each holds a lock on a file of its own, which the system takes away when it ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path


class Liveness:
    """This process's mark beside a file that several share, on one machine."""

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self.name = secrets.token_hex(8)
        self._descriptor = self._take()

    def is_alive(self, name: str) -> bool:
        """Whether the process of this name still runs."""
        if name == self.name:
            return True
        with self._try_lock(name) as is_free:
            return not is_free

    def forget_dead(self) -> None:
        """Removes the files of those that have ended."""
        for path in self._beside.parent.glob(f"{self._beside.name}-runner-*"):
            name = path.name.rpartition("-")[2]
            if name != self.name:
                with self._try_lock(name) as is_free:
                    if is_free:
                        path.unlink(missing_ok=True)

    def close(self) -> None:
        self._path(self.name).unlink(missing_ok=True)
        os.close(self._descriptor)

    def _take(self) -> int:
        path = self._path(self.name)
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Between opening and locking, another may have taken it for that of a dead one, and removed it.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    @contextlib.contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        """Whether nobody has the lock; then it is held here, until the context is left."""
        try:
            descriptor = os.open(self._path(name), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            yield True
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        except BlockingIOError:
            is_free = False
        try:
            yield is_free
        finally:
            os.close(descriptor)

    def _path(self, name: str) -> Path:
        return self._beside.with_name(f"{self._beside.name}-runner-{name}")
