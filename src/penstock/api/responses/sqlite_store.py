"""The store of responses and conversations in an SQLite file, which several front ends of one machine may share."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from penstock.api.responses import rows
from penstock.api.responses.answers import Conversation, ResponseFailure
from penstock.api.responses.database import Database, used_bytes
from penstock.api.responses.items import Item
from penstock.api.responses.liveness import Liveness
from penstock.api.responses.store import Chain, NewResponse, Page, PageWish, ResponseState, StoredResponse
from penstock.config.front_end import StoreLimits
from penstock.wire.errors import RequestError

_LOST = ResponseFailure("server_error", "the server that was making the response has ended")


@dataclass(frozen=True)
class StoreSettings:
    """Where it is. `is_chosen`: somebody said so; else it may be left out where it cannot be."""

    path: Path
    limits: StoreLimits
    is_chosen: bool


class SqliteStore:
    """See `ResponseStore`. When there is no room, the oldest go first; what is not over stays.

    A response whose process has ended before it was finished is shown as failed from then on, by whoever reads it first.
    """

    def __init__(self, path: Path, limits: StoreLimits | None = None, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._database = Database(path)
        self._liveness: Liveness | None = None
        self.size = 0
        self.stored = 0
        """Responses that were finished here."""

    async def __aenter__(self) -> Self:
        """Raises ConfigError when the file cannot be used."""
        await self._database.open()
        self._liveness = await asyncio.to_thread(Liveness, self._path)
        await self._database.run(self._look_around)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # What was not finished is lost, and may be known as that at once; if that cannot be written, when somebody reads it.
        with contextlib.suppress(RequestError):
            await self._database.run(rows.fail_lost, self._runner.name, _LOST)
        await self._database.close()
        self._runner.close()

    async def begin(self, response: NewResponse, state: ResponseState) -> None:
        await self._database.run(self._insert, response, state, self._runner.name)

    async def put(self, response: NewResponse, state: ResponseState) -> None:
        await self._database.run(self._insert, response, state, None)

    async def finish(self, response: NewResponse, state: ResponseState) -> None:
        await self._database.run(self._finish, response, state)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return await self._database.run(self._get, owner, response_id)

    async def events(self, owner: str, response_id: str) -> list[bytes] | None:
        def read(connection: sqlite3.Connection) -> list[bytes] | None:
            query = "SELECT events FROM responses WHERE id = ? AND owner = ? AND created >= ? AND runner IS NULL"
            row = connection.execute(query, (response_id, owner, self._oldest)).fetchone()
            return None if row is None or row[0] is None else rows.unpacked_events(row[0])

        return await self._database.run(read)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._database.run(self._delete, owner, response_id)

    async def chain(self, owner: str, response_id: str) -> Chain | None:
        def read(connection: sqlite3.Connection) -> Chain | None:
            return rows.read_chain(connection, owner, response_id) if self._get(connection, owner, response_id) else None

        return await self._database.run(read)

    async def input_items(self, owner: str, response_id: str, wish: PageWish) -> Page | None:
        def read(connection: sqlite3.Connection) -> Page | None:
            return rows.read_page(connection, response_id, "input", wish) if self._get(connection, owner, response_id) else None

        return await self._database.run(read)

    async def find_items(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        return await self._database.run(rows.find_items, owner, ids)

    async def create_conversation(self, owner: str, metadata: Mapping[str, str], items: Sequence[Item]) -> Conversation:
        return await self._database.run(self._create_conversation, owner, metadata, items)

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        return await self._database.run(self._conversation, owner, conversation_id)

    async def update_conversation(self, owner: str, conversation_id: str, metadata: Mapping[str, str]) -> Conversation | None:
        def update(connection: sqlite3.Connection) -> Conversation | None:
            if self._conversation(connection, owner, conversation_id) is None:
                return None
            query = "UPDATE conversations SET metadata = ?, used = ? WHERE id = ? AND owner = ?"
            connection.execute(query, (msgspec.json.encode(metadata), self._clock(), conversation_id, owner))
            return self._conversation(connection, owner, conversation_id)

        return await self._database.run(update)

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        def delete(connection: sqlite3.Connection) -> bool:
            found = self._conversation(connection, owner, conversation_id) is not None
            if found:
                connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
                rows.delete_items(connection, [conversation_id])
            return found

        return await self._database.run(delete)

    async def conversation_page(self, owner: str, conversation_id: str, wish: PageWish) -> Page | None:
        def read(connection: sqlite3.Connection) -> Page | None:
            is_there = self._conversation(connection, owner, conversation_id) is not None
            return rows.read_page(connection, conversation_id, "member", wish) if is_there else None

        return await self._database.run(read)

    async def conversation_items(self, owner: str, conversation_id: str) -> list[Item] | None:
        def read(connection: sqlite3.Connection) -> list[Item] | None:
            is_there = self._conversation(connection, owner, conversation_id) is not None
            return rows.read_all_members(connection, conversation_id) if is_there else None

        return await self._database.run(read)

    async def add_items(self, owner: str, conversation_id: str, items: Sequence[Item]) -> list[Item] | None:
        def add(connection: sqlite3.Connection) -> list[Item] | None:
            if self._conversation(connection, owner, conversation_id) is None:
                return None
            rows.touch_conversation(connection, owner, conversation_id, self._clock())
            rows.check_room(connection, conversation_id, len(items))
            added = rows.insert_items(connection, owner, conversation_id, "member", items)
            self._keep_bounds(connection, conversation_id)
            return added

        return await self._database.run(add)

    async def get_item(self, owner: str, conversation_id: str, item_id: str) -> Item | None:
        def read(connection: sqlite3.Connection) -> Item | None:
            if self._conversation(connection, owner, conversation_id) is None:
                return None
            query = "SELECT content FROM items WHERE holder = ? AND kind = 'member' AND id = ?"
            row = connection.execute(query, (conversation_id, item_id)).fetchone()
            return None if row is None else msgspec.json.decode(row[0])

        return await self._database.run(read)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool:
        def delete(connection: sqlite3.Connection) -> bool:
            if self._conversation(connection, owner, conversation_id) is None:
                return False
            query = "DELETE FROM items WHERE holder = ? AND kind = 'member' AND id = ?"
            return bool(connection.execute(query, (conversation_id, item_id)).rowcount)

        return await self._database.run(delete)

    @property
    def _runner(self) -> Liveness:
        assert self._liveness is not None, "the store is not open"
        return self._liveness

    @property
    def _oldest(self) -> float:
        return self._clock() - self._limits.seconds

    def _look_around(self, connection: sqlite3.Connection) -> None:
        """What ended processes have left behind."""
        for runner in rows.runners(connection):
            if not self._runner.is_alive(runner):
                rows.fail_lost(connection, runner, _LOST)
        self._runner.forget_dead()
        self.size = used_bytes(connection)

    def _insert(self, connection: sqlite3.Connection, response: NewResponse, state: ResponseState, runner: str | None) -> None:
        now = self._clock()
        rows.insert_response(connection, response, state, now, runner)
        if runner is None:
            rows.append_to_conversation(connection, response, state, now)
            self.stored += 1
        self._keep_bounds(connection, response.id)

    def _finish(self, connection: sqlite3.Connection, response: NewResponse, state: ResponseState) -> None:
        if rows.finish_response(connection, response, state):
            rows.append_to_conversation(connection, response, state, self._clock())
            self.stored += 1
            self._keep_bounds(connection, response.id)

    def _get(self, connection: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse | None:
        query = """
            SELECT body, is_background, runner, events IS NOT NULL FROM responses
            WHERE id = ? AND owner = ? AND (created >= ? OR runner IS NOT NULL)
        """
        row = connection.execute(query, (response_id, owner, self._oldest)).fetchone()
        if row is None:
            return None
        body, is_background, runner, has_events = row
        if runner is not None and not self._runner.is_alive(runner):
            rows.fail_lost(connection, runner, _LOST)
            return self._get(connection, owner, response_id)
        shown = rows.decode_body(body)
        shown.output = rows.read_items(connection, response_id, "output")
        return StoredResponse(
            body=shown, is_background=bool(is_background), has_events=bool(has_events), is_here=runner == self._runner.name
        )

    def _delete(self, connection: sqlite3.Connection, owner: str, response_id: str) -> bool:
        is_there = self._get(connection, owner, response_id) is not None
        return rows.delete_response(connection, owner, response_id) and is_there

    def _create_conversation(
        self, connection: sqlite3.Connection, owner: str, metadata: Mapping[str, str], items: Sequence[Item]
    ) -> Conversation:
        conversation_id, now = f"conv_{secrets.token_hex(24)}", self._clock()
        values = (conversation_id, owner, now, now, msgspec.json.encode(metadata))
        connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", values)
        rows.insert_items(connection, owner, conversation_id, "member", items)
        self._keep_bounds(connection, conversation_id)
        return _conversation(conversation_id, now, metadata)

    def _conversation(self, connection: sqlite3.Connection, owner: str, conversation_id: str) -> Conversation | None:
        query = "SELECT created, metadata FROM conversations WHERE id = ? AND owner = ? AND used >= ?"
        row = connection.execute(query, (conversation_id, owner, self._oldest)).fetchone()
        return None if row is None else _conversation(conversation_id, row[0], msgspec.json.decode(row[1]))

    def _keep_bounds(self, connection: sqlite3.Connection, kept: str) -> None:
        rows.purge(connection, self._oldest)
        rows.make_room(connection, self._limits.bytes, kept)
        self.size = used_bytes(connection)


def _conversation(conversation_id: str, created: float, metadata: Mapping[str, str]) -> Conversation:
    return Conversation(id=conversation_id, created_at=int(created), metadata=metadata)
