"""The store of responses and conversations: an SQLite file that the front ends of one machine share."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from penstock.api.responses import rows
from penstock.api.responses.answers import Conversation, ResponseFailure
from penstock.api.responses.database import Arguments, Database, Liveness, used_bytes
from penstock.api.responses.items import Item
from penstock.api.responses.rows import Chain, NewResponse, Page, PageWish, ResponseState, StoredResponse
from penstock.config.front_end import StoreLimits
from penstock.wire.errors import RequestError

Result = TypeVar("Result")
_Find = Callable[[sqlite3.Connection, str, str], object]

_LOST = ResponseFailure("server_error", "the server that was making the response has ended")


class SqliteStore:
    """Stores responses and conversations, as a context. One owner never sees or changes what another one has.

    After a write has returned, every later read sees it, even after a crash of the process. Every method raises RequestError (503) when
    the file fails. A method returns None, or False, where the owner has no such response, conversation or item.

    When the file is full, the owner who has the most loses its oldest; unfinished responses stay. Without `by_owner` the oldest of all
    are deleted: where no keys are needed, anybody could invent owners. A conversation that still does not fit is refused (507).

    If the process that makes a response dies, the response counts as failed; this is stored when it is next read.
    """

    def __init__(
        self, path: Path, limits: StoreLimits | None = None, clock: Callable[[], float] = time.time, *, by_owner: bool = True
    ) -> None:
        self._path = path
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._by_owner = by_owner
        self._database = Database(path)
        self._liveness: Liveness | None = None
        self.size = 0
        """In bytes."""
        self.stored = 0
        """Responses that this process has finished."""
        self.evicted: Counter[str] = Counter()
        """Responses and conversations that this process deleted, by reason."""

    async def __aenter__(self) -> Self:
        """Raises ConfigError when the file cannot be used."""
        await self._database.open()
        self._liveness = await asyncio.to_thread(Liveness, self._path)
        await self._database.run("", self._clean_up)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # Unfinished responses are lost. If that cannot be written now, their next reader does.
        with contextlib.suppress(RequestError):
            await self._database.run("", rows.fail_lost, self._runner.name, _LOST)
        await self._database.close()
        self._runner.close()

    async def begin(self, response: NewResponse, state: ResponseState) -> None:
        """Stores a response that this process is making. It has failed if the process ends before `finish`."""
        await self._run(response.owner, self._insert, response, state, self._runner.name)

    async def put(self, response: NewResponse, state: ResponseState) -> None:
        """Stores a finished response: `begin` and `finish` in one."""
        await self._run(response.owner, self._insert, response, state, None)

    async def finish(self, response: NewResponse, state: ResponseState) -> None:
        """Stores the end of a response, unless it was deleted. Its items are added to its conversation, all together."""
        await self._run(response.owner, self._finish, response, state)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        return await self._run(owner, self._get, owner, response_id)

    async def events(self, owner: str, response_id: str) -> list[bytes] | None:
        """The events of a finished stream."""

        def read(connection: sqlite3.Connection) -> list[bytes] | None:
            query = "SELECT events FROM responses WHERE id = ? AND owner = ? AND created >= ? AND runner IS NULL"
            row = connection.execute(query, (response_id, owner, self._oldest)).fetchone()
            return None if row is None or row[0] is None else rows.unpacked_events(row[0])

        return await self._run(owner, read)

    async def delete(self, owner: str, response_id: str) -> bool:
        return await self._with(self._get, owner, response_id, lambda found: rows.delete_response(found, owner, response_id)) or False

    async def chain(self, owner: str, response_id: str) -> Chain | None:
        """Raises RequestError when the chain is too long."""
        return await self._with(self._get, owner, response_id, lambda connection: rows.read_chain(connection, owner, response_id))

    async def size_of(self, owner: str, previous: str | None, conversation: str | None, references: Sequence[str]) -> int:
        """The bytes of the items of a chain, of a conversation and of those with these ids. Raises RequestError when it is too much."""
        return await self._run(owner, rows.size_of, owner, previous, conversation, references)

    async def input_items(self, owner: str, response_id: str, wish: PageWish) -> Page | None:
        """Raises RequestError when there is no item `wish.after`."""
        return await self._with(self._get, owner, response_id, lambda connection: rows.read_page(connection, response_id, "input", wish))

    async def find_items(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        """The owner's items with these ids, from all responses and conversations. Raises RequestError when they are too large."""
        return await self._run(owner, rows.find_items, owner, ids)

    async def create_conversation(self, owner: str, metadata: Mapping[str, str], items: Sequence[Item]) -> Conversation:
        def create(connection: sqlite3.Connection) -> Conversation:
            conversation_id, now = f"conv_{secrets.token_hex(24)}", self._clock()
            values = (conversation_id, owner, now, now, msgspec.json.encode(metadata))
            connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", values)
            rows.insert_items(connection, owner, conversation_id, "member", items)
            self._keep_bounds(connection, conversation_id, owner, refuses=True)
            return Conversation(id=conversation_id, created_at=int(now), metadata=metadata)

        return await self._run(owner, create)

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        return await self._run(owner, self._conversation, owner, conversation_id)

    async def update_conversation(self, owner: str, conversation_id: str, metadata: Mapping[str, str]) -> Conversation | None:
        def update(connection: sqlite3.Connection) -> Conversation | None:
            query = "UPDATE conversations SET metadata = ?, used = ? WHERE id = ? AND owner = ?"
            connection.execute(query, (msgspec.json.encode(metadata), self._clock(), conversation_id, owner))
            self._keep_bounds(connection, conversation_id, owner, refuses=True)
            return self._conversation(connection, owner, conversation_id)

        return await self._with(self._conversation, owner, conversation_id, update)

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool:
        def delete(connection: sqlite3.Connection) -> bool:
            connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))
            rows.delete_items(connection, [conversation_id])
            return True

        return await self._with(self._conversation, owner, conversation_id, delete) or False

    async def conversation_page(self, owner: str, conversation_id: str, wish: PageWish) -> Page | None:
        """Raises RequestError when there is no item `wish.after`."""
        return await self._with(
            self._conversation, owner, conversation_id, lambda found: rows.read_page(found, conversation_id, "member", wish)
        )

    async def conversation_items(self, owner: str, conversation_id: str) -> list[Item] | None:
        """All items. Raises RequestError when there are too many."""
        return await self._with(self._conversation, owner, conversation_id, lambda found: rows.read_all_members(found, conversation_id))

    async def add_items(self, owner: str, conversation_id: str, items: Sequence[Item]) -> list[Item] | None:
        """Returns the items as stored. Raises RequestError when the conversation gets too large."""

        def add(connection: sqlite3.Connection) -> list[Item]:
            rows.touch_conversation(connection, owner, conversation_id, self._clock())
            added = rows.insert_items(connection, owner, conversation_id, "member", items)
            rows.check_members(connection, conversation_id)
            self._keep_bounds(connection, conversation_id, owner, refuses=True)
            return added

        return await self._with(self._conversation, owner, conversation_id, add)

    async def get_item(self, owner: str, conversation_id: str, item_id: str) -> Item | None:
        def read(connection: sqlite3.Connection) -> Item | None:
            query = "SELECT content FROM items WHERE holder = ? AND kind = 'member' AND id = ?"
            row = connection.execute(query, (conversation_id, item_id)).fetchone()
            return None if row is None else msgspec.json.decode(row[0])

        return await self._with(self._conversation, owner, conversation_id, read)

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool:
        def delete(connection: sqlite3.Connection) -> bool:
            query = "DELETE FROM items WHERE holder = ? AND kind = 'member' AND id = ?"
            return bool(connection.execute(query, (conversation_id, item_id)).rowcount)

        return await self._with(self._conversation, owner, conversation_id, delete) or False

    async def _run(self, owner: str, function: Callable[[sqlite3.Connection, *Arguments], Result], *arguments: *Arguments) -> Result:
        return await self._database.run(owner if self._by_owner else "", function, *arguments)

    async def _with(self, find: _Find, owner: str, holder: str, work: Callable[[sqlite3.Connection], Result]) -> Result | None:
        """Runs `work` in a transaction in which the response or conversation exists. None when it does not."""
        return await self._run(owner, lambda connection: None if find(connection, owner, holder) is None else work(connection))

    @property
    def _runner(self) -> Liveness:
        assert self._liveness is not None, "the store is not open"
        return self._liveness

    @property
    def _oldest(self) -> float:
        return self._clock() - self._limits.seconds

    def _clean_up(self, connection: sqlite3.Connection) -> None:
        """Marks what dead processes left unfinished as failed."""
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
        self._keep_bounds(connection, response.id, response.owner)

    def _finish(self, connection: sqlite3.Connection, response: NewResponse, state: ResponseState) -> None:
        if rows.finish_response(connection, response, state):
            rows.append_to_conversation(connection, response, state, self._clock())
            self.stored += 1
            self._keep_bounds(connection, response.id, response.owner)

    def _get(self, connection: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse | None:
        query = """
            SELECT body, is_background, runner, events IS NOT NULL FROM responses
            WHERE id = ? AND owner = ? AND (created >= ? OR runner IS NOT NULL)
        """
        row = connection.execute(query, (response_id, owner, self._oldest)).fetchone()
        if row is None:
            return None
        encoded, is_background, runner, has_events = row
        if runner is not None and not self._runner.is_alive(runner):
            rows.fail_lost(connection, runner, _LOST)
            return self._get(connection, owner, response_id)
        body = rows.decode_body(encoded)
        body.output = rows.read_items(connection, response_id, "output")
        return StoredResponse(
            body=body, is_background=bool(is_background), has_events=bool(has_events), is_here=runner == self._runner.name
        )

    def _conversation(self, connection: sqlite3.Connection, owner: str, conversation_id: str) -> Conversation | None:
        query = "SELECT created, metadata FROM conversations WHERE id = ? AND owner = ? AND used >= ?"
        row = connection.execute(query, (conversation_id, owner, self._oldest)).fetchone()
        return None if row is None else Conversation(id=conversation_id, created_at=int(row[0]), metadata=msgspec.json.decode(row[1]))

    def _keep_bounds(self, connection: sqlite3.Connection, kept: str, writer: str, *, refuses: bool = False) -> None:
        """Deletes what is too old or too much. If it `refuses`, raises RequestError (507) when what the writer has is still too much."""
        expired = rows.purge(connection, self._oldest)
        full = rows.make_room(connection, self._limits.bytes, kept, writer, by_owner=self._by_owner)
        size = used_bytes(connection)
        if refuses and size > self._limits.bytes:
            own, share = rows.bytes_of(connection, writer), rows.share_of_owners(connection)
            if own >= share or not self._by_owner:
                # The write is undone, and with it what was deleted for it.
                message = f"the store is full: you have {own:,} bytes in it, it holds {self._limits.bytes:,} in all; delete conversations"
                raise RequestError(message, code="store_full", status=507)
        self.size = size
        self.evicted.update(expired=expired, full=full)
