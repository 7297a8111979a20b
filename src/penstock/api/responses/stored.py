"""The routes over stored responses and conversations: get, list, change, cancel, delete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.request import Incoming, PromptContext, check_query, decode_body, read_limit
from penstock.api.pipeline.response import Response
from penstock.api.responses.answers import Conversation, DeletedConversation, DeletedResponse, ItemList, ResponseFailure, ResponseObject
from penstock.api.responses.create import ResponseRun
from penstock.api.responses.items import Item, read_items, without_files
from penstock.api.responses.output import encoded_event
from penstock.api.responses.rows import Page, PageWish, StoredResponse
from penstock.api.responses.schema import RESPONSE_CHOICES, ConversationCreate, ConversationItems, ConversationUpdate
from penstock.api.responses.store import SqliteStore
from penstock.metrics.frontend import Tally
from penstock.wire.errors import RequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
_MAX_DIGITS = 15
_INCLUDES = ("include", "include[]")
_NOT_STORED = ResponseFailure("server_error", "the response was lost: it could not be stored")
_CREATE = msgspec.json.Decoder(ConversationCreate)
_UPDATE = msgspec.json.Decoder(ConversationUpdate)
_ITEMS = msgspec.json.Decoder(ConversationItems)

Found = TypeVar("Found")


@dataclass(frozen=True)
class StoredResponses:
    """Responses of the store, and the current state of those that this front end is making."""

    store: SqliteStore
    detached: DetachedRuns
    tally: Tally

    async def get(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        """With `stream`, sends the events after number `starting_after`, past and future; else the response as it is now."""
        check_query(incoming.query, ("stream", "starting_after", "include_obfuscation", *_INCLUDES))
        is_stream, after = _stream_wish(incoming.query)
        run = self._running(incoming)
        if run is not None and is_stream:
            return await self._resume(run, after, receive, response)
        if run is not None and run.dialect.is_over:
            # Its end is being stored. Until then it does not count.
            await run.ended()
            run = self._running(incoming)
        if run is not None:
            return await _send(response, run.dialect.snapshot())
        found = await self._find(incoming)
        if is_stream:
            return await self._replay(incoming, found, after, receive, response)
        return await _send(response, found.body)

    async def delete(self, incoming: Incoming) -> DeletedResponse:
        response_id = incoming.path["id"]
        run = self._running(incoming)
        if not await self.store.delete(incoming.owner, response_id):
            raise _response_not_found(response_id)
        if run is not None:
            run.cancel()
            await run.ended()
            self.detached.forget(response_id)
        return DeletedResponse(id=response_id, deleted=True)

    async def cancel(self, incoming: Incoming) -> ResponseObject:
        """Stops a background response. One that has ended stays as it is."""
        found = await self._find(incoming)
        if not found.is_background:
            message = "only a response with `background` true can be cancelled; to stop another one, close its connection"
            raise RequestError(message, param="id", code="not_cancellable")
        run = self._running(incoming)
        if run is not None:
            run.cancel()
            await run.ended()
            found = await self._find(incoming)
        elif found.body.is_running:
            raise _elsewhere(incoming.path["id"])
        return found.body

    async def input_items(self, incoming: Incoming) -> ItemList:
        page = await self.store.input_items(incoming.owner, incoming.path["id"], _page_wish(incoming.query))
        if page is None:
            raise _response_not_found(incoming.path["id"])
        return _item_list(page)

    def _running(self, incoming: Incoming) -> ResponseRun | None:
        run = self.detached.find(incoming.owner, incoming.path["id"])
        return run if isinstance(run, ResponseRun) else None

    async def _find(self, incoming: Incoming) -> StoredResponse:
        response_id = incoming.path["id"]
        found = await self.store.get(incoming.owner, response_id)
        if found is None:
            raise _response_not_found(response_id)
        if found.is_here and self._running(incoming) is None:
            # It has ended, but its end could not be stored.
            found.body.status, found.body.error = "failed", _NOT_STORED
        return found

    async def _resume(self, run: ResponseRun, after: int, receive: Receive, response: Response) -> str:
        _check_after(after, len(run.recording.events), run.is_over)
        self.tally.streams_resumed += 1
        return await self.detached.follow(run, receive, response, after)

    async def _replay(self, incoming: Incoming, found: StoredResponse, after: int, receive: Receive, response: Response) -> str:
        response_id = incoming.path["id"]
        events = await self.store.events(incoming.owner, response_id)
        if events is not None:
            _check_after(after, len(events), is_over=True)
            events = events[after + 1 :]
        elif found.body.status == "failed":
            # The process that made it has ended, and its events are lost. The client sees the failure as the next event.
            events = [encoded_event("response.failed", after + 1, {"response": found.body})]
        elif found.body.is_running:
            raise _elsewhere(response_id)
        else:
            message = "`stream` is true: only a response made with `stream` or `background` can be streamed"
            raise RequestError(message, param="stream")
        self.tally.streams_resumed += 1
        return await self.detached.replay(events, incoming.tenant, receive, response)


@dataclass(frozen=True)
class Conversations:
    """The conversations of the store."""

    store: SqliteStore
    context: PromptContext

    async def create(self, incoming: Incoming) -> Conversation:
        request = await decode_body(incoming.body or b"{}", _CREATE, frozenset(), RESPONSE_CHOICES, turn=incoming.turn)
        items = await self.context.read(incoming, _read, request.items or ())
        return await self.store.create_conversation(incoming.owner, request.metadata or {}, items)

    async def get(self, incoming: Incoming) -> Conversation:
        return _there(await self.store.get_conversation(incoming.owner, incoming.path["id"]), incoming)

    async def update(self, incoming: Incoming) -> Conversation:
        request = await decode_body(incoming.body, _UPDATE, frozenset(), RESPONSE_CHOICES, turn=incoming.turn)
        return _there(await self.store.update_conversation(incoming.owner, incoming.path["id"], request.metadata or {}), incoming)

    async def delete(self, incoming: Incoming) -> DeletedConversation:
        _there(await self.store.delete_conversation(incoming.owner, incoming.path["id"]) or None, incoming)
        return DeletedConversation(id=incoming.path["id"], deleted=True)

    async def list_items(self, incoming: Incoming) -> ItemList:
        page = await self.store.conversation_page(incoming.owner, incoming.path["id"], _page_wish(incoming.query))
        return _item_list(_there(page, incoming))

    async def add_items(self, incoming: Incoming) -> ItemList:
        request = await decode_body(incoming.body, _ITEMS, frozenset(), RESPONSE_CHOICES, turn=incoming.turn)
        items = await self.context.read(incoming, _read, request.items)
        added = await self.store.add_items(incoming.owner, incoming.path["id"], items)
        return _item_list(Page(_there(added, incoming), has_more=False))

    async def get_item(self, incoming: Incoming) -> Item:
        item = await self.store.get_item(incoming.owner, incoming.path["id"], incoming.path["item_id"])
        if item is None:
            raise _item_not_found(incoming.path)
        return without_files([item])[0]

    async def delete_item(self, incoming: Incoming) -> Conversation:
        """Returns the conversation without the item."""
        if not await self.store.delete_item(incoming.owner, incoming.path["id"], incoming.path["item_id"]):
            raise _item_not_found(incoming.path)
        return await self.get(incoming)


def _read(given: Sequence[dict[str, Any]]) -> list[Item]:
    items = read_items("items", given)
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            field = f"items[{index}].type"
            raise RequestError(f"`{field}` is item_reference: expected the item itself", param=field)
    return items


def _page_wish(query: Mapping[str, str]) -> PageWish:
    """Raises RequestError that names the parameter."""
    check_query(query, ("limit", "order", "after", "before", *_INCLUDES))
    limit, order = read_limit(query, DEFAULT_LIMIT, MAX_LIMIT), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(f"`order` is {order[:80]!r}: expected asc or desc", param="order")
    if "before" in query:
        raise RequestError("`before` is not supported: use `after` and `order`", param="before", code="unsupported_field")
    return PageWish(limit, order == "asc", query.get("after"))


def _item_list(page: Page) -> ItemList:
    first, last = (page.items[0]["id"], page.items[-1]["id"]) if page.items else (None, None)
    return ItemList(data=without_files(page.items), first_id=first, last_id=last, has_more=page.has_more)


def _stream_wish(query: Mapping[str, str]) -> tuple[bool, int]:
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream not in ("true", "false"):
        raise RequestError(f"`stream` is {stream[:80]!r}: expected true or false", param="stream")
    if after is None:
        return stream == "true", -1
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_DIGITS):
        raise RequestError(f"`starting_after` is {after[:80]!r}: expected the sequence number of an event", param="starting_after")
    if stream != "true":
        raise RequestError("`starting_after` needs `stream` to be true", param="starting_after")
    return True, int(after)


def _check_after(after: int, count: int, is_over: bool) -> None:
    if after >= count:
        so_far = "" if is_over else " so far"
        raise RequestError(f"`starting_after` is {after}: the stream has events up to {count - 1}{so_far}", param="starting_after")


# A thing of another tenant gets the same answer as one that does not exist, so that ids cannot be guessed.
def _response_not_found(response_id: str) -> RequestError:
    return RequestError(f"there is no response `{response_id[:256]}`", param="id", code="response_not_found", status=404)


def _there(found: Found | None, incoming: Incoming) -> Found:
    if found is None:
        message = f"there is no conversation `{incoming.path['id'][:256]}`"
        raise RequestError(message, param="id", code="conversation_not_found", status=404)
    return found


def _item_not_found(path: Mapping[str, str]) -> RequestError:
    message = f"there is no item `{path['item_id'][:256]}` in a conversation `{path['id'][:256]}`"
    return RequestError(message, param="item_id", code="item_not_found", status=404)


def _elsewhere(response_id: str) -> RequestError:
    message = f"another front end is making response `{response_id[:256]}`: ask that one, or poll here until the response has ended"
    return RequestError(message, param="id", code="response_elsewhere", status=409)


async def _send(response: Response, content: object) -> str:
    await response.send_whole(200, msgspec.json.encode(content))
    return "ok"
