"""An SQLite file, used from one thread of its own; and which processes that share it are alive."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar, TypeVarTuple

from penstock.fairness import FairBudget, Share
from penstock.wire.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")

VERSION = 1
BUSY_SECONDS = 10.0


class Database:
    """Runs functions on the connection, one after the other, each in its own transaction. Lanes take turns: one that asks for much waits
    for itself.

    A commit survives the death of the process. It survives a loss of power only after the next checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response store")
        self._turns = FairBudget(1)
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Raises ConfigError when the file cannot be used."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"--response-store {self._path}: {error}") from error

    async def run(self, lane: str, function: Callable[[sqlite3.Connection, *Arguments], Result], *arguments: *Arguments) -> Result:
        """Raises what the function raises, after a rollback, and RequestError (503) when SQLite fails."""
        turn = Share(lane)
        try:
            if not self._turns.take(turn, 1):
                await self._turns.wait(turn, 1)
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, function, *arguments)
        except sqlite3.Error as error:
            log.error("the response store %s fails: %s", self._path, error)  # noqa: TRY400, the message says all
            raise RequestError("the response store is not available", code="store_unavailable", status=503) from error
        finally:
            self._turns.release(turn)

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Created with these permissions, the file is never readable for others.
        self._path.touch(mode=0o600)
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            connection.close()
            raise sqlite3.DatabaseError(f"the file has version {found}; expected {VERSION}")
        schema = Path(__file__).with_name("schema.sql").read_text(encoding="utf-8")
        connection.executescript(f"BEGIN IMMEDIATE;{schema}PRAGMA user_version = {VERSION};COMMIT;")
        self._connection = connection

    def _transact(self, function: Callable[[sqlite3.Connection, *Arguments], Result], *arguments: *Arguments) -> Result:
        connection = self._connection
        if connection is None:
            raise sqlite3.ProgrammingError("it is closed")
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = function(connection, *arguments)
        except BaseException:
            connection.execute("ROLLBACK")
            raise
        connection.execute("COMMIT")
        return result

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def used_bytes(connection: sqlite3.Connection) -> int:
    """The size of the data. The file itself does not shrink after a deletion."""
    pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)


class Liveness:
    """Tells which processes that share a file are alive, on one machine.

    Each process locks a small file of its own, beside the shared one. The system releases the lock when the process ends, in any way.
    """

    def __init__(self, beside: Path) -> None:
        self._beside = beside
        self.name = secrets.token_hex(8)
        self._descriptor = self._take()

    def is_alive(self, name: str) -> bool:
        """Whether the process of this name runs."""
        if name == self.name:
            return True
        with self._try_lock(name) as is_free:
            return not is_free

    def forget_dead(self) -> None:
        """Deletes the files of processes that have ended."""
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
            # Between opening and locking, another process may have deleted it as the file of a dead one.
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_ino == os.fstat(descriptor).st_ino:
                    return descriptor
            os.close(descriptor)

    @contextlib.contextmanager
    def _try_lock(self, name: str) -> Iterator[bool]:
        """Whether the lock was free. If so, it is held until the context is left."""
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
