"""An SQLite file, used from one thread beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from penstock.wire.errors import ConfigError, RequestError

log = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

VERSION = 1
BUSY_SECONDS = 10.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    root TEXT NOT NULL,
    previous TEXT,
    conversation TEXT,
    is_background INTEGER NOT NULL,
    status TEXT NOT NULL,
    runner TEXT,
    body BLOB NOT NULL,
    events BLOB
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_by_age ON responses (created);
CREATE INDEX IF NOT EXISTS responses_running ON responses (runner) WHERE runner IS NOT NULL;
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    metadata BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used);
CREATE TABLE IF NOT EXISTS items (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    holder TEXT NOT NULL,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    id TEXT NOT NULL,
    content BLOB NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS items_of_holder ON items (holder, kind, id);
CREATE INDEX IF NOT EXISTS items_of_owner ON items (owner, id);
"""
"""`runner` is who makes a response that is not over. The holder of an item is a response, of kind `input` or `output`, or a conversation,
of kind `member`. A response's `body` has no output: that is its items."""


class Database:
    """Runs functions over the connection, one after the other, each in a transaction of its own.

    A commit survives the death of the process; whether it survives a loss of power is up to the next checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="response store")
        self._connection: sqlite3.Connection | None = None

    async def open(self) -> None:
        """Raises ConfigError when the file cannot be."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._open)
        except (OSError, sqlite3.Error) as error:
            self._thread.shutdown()
            raise ConfigError(f"--response-store {self._path}: {error}") from error

    async def run(
        self, function: Callable[Concatenate[sqlite3.Connection, Arguments], Result], *arguments: Arguments.args, **more: Arguments.kwargs
    ) -> Result:
        """Raises what the function does, after which nothing of it is left, and RequestError (503) when the file is out of order."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: self._transact(function, *arguments, **more))
        except sqlite3.Error as error:
            log.error("the store of responses %s fails: %s", self._path, error)  # noqa: TRY400, the message tells it all
            raise RequestError("the store of responses cannot be reached", code="store_unavailable", status=503) from error

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    def _open(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The file is made here, so that from its beginning nobody else can read it.
        self._path.touch(mode=0o600)
        connection = sqlite3.connect(self._path, timeout=BUSY_SECONDS, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA journal_size_limit = 16777216")
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, VERSION):
            connection.close()
            raise sqlite3.DatabaseError(f"is of version {found}; this program knows {VERSION}")
        connection.executescript(f"BEGIN IMMEDIATE;{_SCHEMA}PRAGMA user_version = {VERSION};COMMIT;")
        self._connection = connection

    def _transact(
        self, function: Callable[Concatenate[sqlite3.Connection, Arguments], Result], *arguments: Arguments.args, **more: Arguments.kwargs
    ) -> Result:
        connection = self._connection
        if connection is None:
            raise sqlite3.ProgrammingError("it is closed")
        connection.execute("BEGIN IMMEDIATE")
        try:
            result = function(connection, *arguments, **more)
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
    """How much of the file is in use: what was deleted is not, though the file does not shrink."""
    pages, free, size = (connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size"))
    return int((pages - free) * size)
