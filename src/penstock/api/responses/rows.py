"""Responses, conversations and their items as rows of SQLite. Every function runs in its caller's transaction."""

from __future__ import annotations

import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from penstock.api.responses.answers import ResponseFailure, ResponseObject
from penstock.api.responses.database import used_bytes
from penstock.api.responses.items import Item, new_id
from penstock.api.responses.schema import MAX_ITEMS
from penstock.wire.errors import RequestError

ItemKind = Literal["input", "output", "member"]
MAX_CHAIN = 4096
"""Responses in one chain."""
MAX_CHAIN_BYTES = 64 * 2**20
"""Size of the items of a chain, or of a conversation."""
_PURGE_BATCH = 100
# Events compress well, and are read rarely.
_COMPRESSION_LEVEL = 1

_CHAIN = """
WITH RECURSIVE chain (id, previous, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = :id AND owner = :owner
    UNION ALL
    SELECT before.id, before.previous, depth + 1 FROM responses AS before JOIN chain ON before.id = chain.previous
    WHERE before.owner = :owner AND depth < :depth
)
"""
_CHAIN_SIZE = f"{_CHAIN} SELECT MAX(depth), SUM(LENGTH(content)), COUNT(content) FROM chain LEFT JOIN items ON holder = chain.id"  # noqa: S608, constants alone
_CHAIN_BEGINNING = f"{_CHAIN} SELECT previous FROM chain ORDER BY depth DESC LIMIT 1"  # noqa: S608, constants alone
_CHAIN_ITEMS = f"{_CHAIN} SELECT content FROM chain JOIN items ON holder = chain.id ORDER BY depth DESC, number"  # noqa: S608, constants alone

_MEMBERS_SIZE = "SELECT 0, SUM(LENGTH(content)), COUNT(*) FROM items WHERE holder = ? AND owner = ?"
_ITEM_SIZE = "SELECT 0, MAX(LENGTH(content)), COUNT(*) FROM items WHERE owner = ? AND id = ?"


@dataclass(frozen=True, kw_only=True)
class NewResponse:
    """A response to store. `root` is the first response of its chain; `input` has its own items, until the store has them: images are
    large."""

    id: str
    owner: str
    root: str
    input: list[Item]
    previous: str | None = None
    conversation: str | None = None
    is_background: bool = False


@dataclass(frozen=True, kw_only=True)
class ResponseState:
    """The current state of a response, and the events of its stream, joined, if it was one."""

    body: ResponseObject
    events: bytes | None = None


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """`has_events`: its stream can be replayed. `is_here`: this front end is making it."""

    body: ResponseObject
    is_background: bool
    has_events: bool
    is_here: bool


@dataclass(frozen=True)
class Chain:
    """The items of a response and of all responses before it, in order. `missing` is a response of the chain that was deleted."""

    root: str
    status: str
    items: list[Item]
    missing: str | None


@dataclass(frozen=True)
class PageWish:
    """A part of a list: `limit` items after the item `after`."""

    limit: int = 20
    is_ascending: bool = False
    after: str | None = None


@dataclass(frozen=True)
class Page:
    items: list[Item]
    has_more: bool


def insert_response(connection: sqlite3.Connection, response: NewResponse, state: ResponseState, now: float, runner: str | None) -> None:
    """With a runner the response is not finished: its output is inserted later, by `finish_response`."""
    values = (
        response.id,
        response.owner,
        now,
        response.root,
        response.previous,
        response.conversation,
        response.is_background,
        state.body.status,
        runner,
        _body(state),
        _packed(state),
    )
    connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
    insert_items(connection, response.owner, response.id, "input", response.input)
    if runner is None:
        insert_items(connection, response.owner, response.id, "output", state.body.output)


def finish_response(connection: sqlite3.Connection, response: NewResponse, state: ResponseState) -> bool:
    """False when it was deleted."""
    changed = connection.execute(
        "UPDATE responses SET status = ?, body = ?, events = ?, runner = NULL WHERE id = ? AND owner = ?",
        (state.body.status, _body(state), _packed(state), response.id, response.owner),
    )
    if not changed.rowcount:
        return False
    insert_items(connection, response.owner, response.id, "output", state.body.output)
    return True


def append_to_conversation(connection: sqlite3.Connection, response: NewResponse, state: ResponseState, now: float) -> None:
    """Adds the response's items, if the conversation still exists. Failed and cancelled responses add nothing."""
    if response.conversation is None or state.body.status not in ("completed", "incomplete"):
        return
    if not touch_conversation(connection, response.owner, response.conversation, now):
        return
    given = response.input or read_items(connection, response.id, "input")
    insert_items(connection, response.owner, response.conversation, "member", [*given, *state.body.output])


def fail_lost(connection: sqlite3.Connection, runner: str, error: ResponseFailure) -> None:
    """Marks the unfinished responses of a dead runner as failed."""
    for response_id, body in connection.execute("SELECT id, body FROM responses WHERE runner = ?", (runner,)).fetchall():
        failed = msgspec.structs.replace(decode_body(body), status="failed", error=error)
        connection.execute(
            "UPDATE responses SET status = 'failed', body = ?, runner = NULL WHERE id = ?", (msgspec.json.encode(failed), response_id)
        )


def runners(connection: sqlite3.Connection) -> list[str]:
    """The runners of unfinished responses."""
    return [name for (name,) in connection.execute("SELECT DISTINCT runner FROM responses WHERE runner IS NOT NULL")]


def delete_response(connection: sqlite3.Connection, owner: str, response_id: str) -> bool:
    deleted = connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount
    if deleted:
        delete_items(connection, [response_id])
    return bool(deleted)


def size_of(connection: sqlite3.Connection, owner: str, previous: str | None, conversation: str | None, references: Sequence[str]) -> int:
    queries: list[tuple[str, str, Any]] = []
    if previous is not None:
        queries.append(("previous_response_id", _CHAIN_SIZE, {"id": previous, "owner": owner, "depth": MAX_CHAIN}))
    if conversation is not None:
        queries.append(("conversation", _MEMBERS_SIZE, (conversation, owner)))
    queries += [("input", _ITEM_SIZE, (owner, item_id)) for item_id in set(references)]
    size = 0
    for field, query, values in queries:
        _, found, count = connection.execute(query, values).fetchone()
        _check_size(field, count, found or 0)
        size += found or 0
    return size


def read_chain(connection: sqlite3.Connection, owner: str, response_id: str) -> Chain | None:
    first = connection.execute("SELECT root, status FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).fetchone()
    if first is None:
        return None
    wanted = {"id": response_id, "owner": owner, "depth": MAX_CHAIN}
    depth, size, items = connection.execute(_CHAIN_SIZE, wanted).fetchone()
    if depth >= MAX_CHAIN:
        raise _too_long("previous_response_id", f"more than {MAX_CHAIN:,} responses before it", f"{MAX_CHAIN:,}")
    _check_size("previous_response_id", items, size or 0)
    missing = connection.execute(_CHAIN_BEGINNING, wanted).fetchone()[0]
    contents = connection.execute(_CHAIN_ITEMS, wanted)
    return Chain(first[0], first[1], [msgspec.json.decode(content) for (content,) in contents], missing)


def read_items(connection: sqlite3.Connection, holder: str, kind: ItemKind) -> list[Item]:
    rows = connection.execute("SELECT content FROM items WHERE holder = ? AND kind = ? ORDER BY number", (holder, kind))
    return [msgspec.json.decode(content) for (content,) in rows]


def read_all_members(connection: sqlite3.Connection, conversation_id: str) -> list[Item]:
    check_members(connection, conversation_id)
    return read_items(connection, conversation_id, "member")


def read_page(connection: sqlite3.Connection, holder: str, kind: ItemKind, wish: PageWish) -> Page:
    condition, values = "", [holder, kind]
    if wish.after is not None:
        query = "SELECT number FROM items WHERE holder = ? AND kind = ? AND id = ?"
        row = connection.execute(query, (holder, kind, wish.after)).fetchone()
        if row is None:
            raise RequestError(f"`after` is {wish.after[:80]!r}: there is no such item", param="after")
        condition = f"AND number {'>' if wish.is_ascending else '<'} ?"
        values.append(row[0])
    order = "ASC" if wish.is_ascending else "DESC"
    # One more than the limit tells whether there are more.
    query = f"SELECT content FROM items WHERE holder = ? AND kind = ? {condition} ORDER BY number {order} LIMIT ?"  # noqa: S608
    found = [msgspec.json.decode(content) for (content,) in connection.execute(query, (*values, wish.limit + 1))]
    return Page(found[: wish.limit], len(found) > wish.limit)


def find_items(connection: sqlite3.Connection, owner: str, ids: Sequence[str]) -> dict[str, Item]:
    """Raises RequestError when they are too large. An item with images may have 32 MiB, and a reference to it a hundred bytes."""
    found: dict[str, Item] = {}
    size = 0
    for item_id, references in Counter(ids).items():
        row = connection.execute("SELECT content FROM items WHERE owner = ? AND id = ? LIMIT 1", (owner, item_id)).fetchone()
        if row is not None:
            size += references * len(row[0])
            _check_size("input", len(ids), size)
            found[item_id] = msgspec.json.decode(row[0])
    return found


def insert_items(connection: sqlite3.Connection, owner: str, holder: str, kind: ItemKind, items: Iterable[Item]) -> list[Item]:
    """Appends the items, and returns them as stored: an item whose id is taken gets a new one."""
    added: list[Item] = []
    for given in items:
        item = given
        while not _insert_item(connection, owner, holder, kind, item):
            item = {**item, "id": new_id(item["type"])}
        added.append(item)
    return added


def delete_items(connection: sqlite3.Connection, holders: Iterable[str]) -> None:
    connection.executemany("DELETE FROM items WHERE holder = ?", [(holder,) for holder in holders])


def touch_conversation(connection: sqlite3.Connection, owner: str, conversation_id: str, now: float) -> bool:
    query = "UPDATE conversations SET used = ? WHERE id = ? AND owner = ?"
    return bool(connection.execute(query, (now, conversation_id, owner)).rowcount)


def check_members(connection: sqlite3.Connection, conversation_id: str) -> None:
    """Raises RequestError for a conversation with more than a response can read."""
    query = "SELECT COUNT(*), SUM(LENGTH(content)) FROM items WHERE holder = ? AND kind = 'member'"
    count, size = connection.execute(query, (conversation_id,)).fetchone()
    _check_size("conversation", count, size or 0)


def purge(connection: sqlite3.Connection, oldest: float) -> int:
    """Deletes a batch of what is older than this, except unfinished responses. Returns how many."""
    query = "SELECT id FROM responses WHERE created < ? AND runner IS NULL ORDER BY created LIMIT ?"
    responses = connection.execute(query, (oldest, _PURGE_BATCH)).fetchall()
    _delete(connection, "responses", responses)
    query = "SELECT id FROM conversations WHERE used < ? ORDER BY used LIMIT ?"
    conversations = connection.execute(query, (oldest, _PURGE_BATCH)).fetchall()
    _delete(connection, "conversations", conversations)
    return len(responses) + len(conversations)


def make_room(connection: sqlite3.Connection, max_bytes: int, kept: str, writer: str, *, by_owner: bool) -> int:
    """Deletes until at most `max_bytes` are used. Keeps `kept` and unfinished responses. Returns how many were deleted.

    With `by_owner`, the owner who has the most loses its oldest, again and again. So who has no more than its share, the bytes divided by
    the owners, or less than the writer, loses nothing because of another. Else the oldest of all go.
    """
    deleted = 0
    while used_bytes(connection) > max_bytes:
        found = _oldest_of_the_largest(connection, kept, writer) if by_owner else _oldest(connection, kept)
        if found is None:
            break
        _delete(connection, found[1], [(found[0],)])
        deleted += 1
    return deleted


def share_of_owners(connection: sqlite3.Connection) -> float:
    """What each owner would have if all had the same."""
    return float(connection.execute("SELECT IFNULL(AVG(bytes), 0) FROM owners").fetchone()[0])


def bytes_of(connection: sqlite3.Connection, owner: str) -> int:
    row = connection.execute("SELECT bytes FROM owners WHERE owner = ?", (owner,)).fetchone()
    return 0 if row is None else int(row[0])


def _oldest_of_the_largest(connection: sqlite3.Connection, kept: str, writer: str) -> tuple[str, str] | None:
    """If the largest owner has nothing that can be deleted, the next one comes, down to those at their share or below the writer."""
    least = 0.0
    for owner, size in connection.execute("SELECT owner, bytes FROM owners ORDER BY bytes DESC"):
        if size < least:
            break
        found = _oldest(connection, kept, owner)
        if found is not None:
            return found
        least = least or max(share_of_owners(connection), bytes_of(connection, writer))
    return None


def _oldest(connection: sqlite3.Connection, kept: str, owner: str | None = None) -> tuple[str, str] | None:
    """The id and the table of the oldest that may be deleted: of this owner, or of all."""
    condition = "" if owner is None else "AND owner = :owner"
    query = f"""
        SELECT * FROM (SELECT id, 'responses', created AS age FROM responses WHERE runner IS NULL AND id != :kept {condition}
                       ORDER BY created LIMIT 1)
        UNION ALL
        SELECT * FROM (SELECT id, 'conversations', used FROM conversations WHERE id != :kept {condition} ORDER BY used LIMIT 1)
        ORDER BY age LIMIT 1
    """  # noqa: S608, a constant
    row = connection.execute(query, {"kept": kept, "owner": owner}).fetchone()
    return None if row is None else (row[0], row[1])


def _delete(connection: sqlite3.Connection, table: str, ids: Sequence[tuple[str]]) -> None:
    connection.executemany(f"DELETE FROM {table} WHERE id = ?", ids)  # noqa: S608, one of two names
    delete_items(connection, [row_id for (row_id,) in ids])


def _insert_item(connection: sqlite3.Connection, owner: str, holder: str, kind: str, item: Item) -> bool:
    values = (holder, kind, owner, item["id"], msgspec.json.encode(item))
    query = "INSERT OR IGNORE INTO items (holder, kind, owner, id, content) VALUES (?, ?, ?, ?, ?)"
    return bool(connection.execute(query, values).rowcount)


def _body(state: ResponseState) -> bytes:
    return msgspec.json.encode(msgspec.structs.replace(state.body, output=[]))


def decode_body(body: bytes) -> ResponseObject:
    return msgspec.json.decode(body, type=ResponseObject)


def _packed(state: ResponseState) -> bytes | None:
    return None if state.events is None else zlib.compress(state.events, _COMPRESSION_LEVEL)


def unpacked_events(packed: bytes) -> list[bytes]:
    return [event + b"\n\n" for event in zlib.decompress(packed).split(b"\n\n")[:-1]]


def _check_size(field: str, count: int, size: int) -> None:
    if count > MAX_ITEMS:
        raise _too_long(field, f"{count:,} items", f"{MAX_ITEMS:,}")
    if size > MAX_CHAIN_BYTES:
        raise _too_long(field, f"{size:,} bytes", f"{MAX_CHAIN_BYTES:,}")


def _too_long(field: str, has: str, limit: str) -> RequestError:
    return RequestError(f"`{field}` has {has}: the limit is {limit}", param=field, code="too_long")
