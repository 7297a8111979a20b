"""/v1/conversations: items that turns are added to, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from penstock.api.pipeline.request import Incoming, decode_body
from penstock.api.pipeline.response import Response
from penstock.api.responses.items import Item, read_items
from penstock.api.responses.paging import check_query, list_body, page_wish
from penstock.api.responses.schema import RESPONSE_CHOICES, ConversationCreate, ConversationItems, ConversationUpdate
from penstock.api.responses.store import Page, ResponseStore
from penstock.wire.errors import RequestError

_CREATE = msgspec.json.Decoder(ConversationCreate)
_UPDATE = msgspec.json.Decoder(ConversationUpdate)
_ITEMS = msgspec.json.Decoder(ConversationItems)
_INCLUDES = ("include", "include[]")

Found = TypeVar("Found")


@dataclass(frozen=True)
class Conversations:
    """Answers for the conversations of a store."""

    store: ResponseStore

    async def create(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        request = decode_body(incoming.body or b"{}", _CREATE, frozenset(), RESPONSE_CHOICES)
        items = _read(request.items or ())
        return await _send(response, await self.store.create_conversation(incoming.owner, request.metadata or {}, items))

    async def get(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        found = await self.store.get_conversation(incoming.owner, incoming.path["id"])
        return await _send(response, _there(found, incoming.path))

    async def update(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        request = decode_body(incoming.body, _UPDATE, frozenset(), RESPONSE_CHOICES)
        found = await self.store.update_conversation(incoming.owner, incoming.path["id"], request.metadata or {})
        return await _send(response, _there(found, incoming.path))

    async def delete(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        _there(await self.store.delete_conversation(incoming.owner, incoming.path["id"]) or None, incoming.path)
        return await _send(response, {"id": incoming.path["id"], "object": "conversation.deleted", "deleted": True})

    async def list_items(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        check_query(incoming.query, ("limit", "order", "after", "before", *_INCLUDES))
        page = await self.store.conversation_page(incoming.owner, incoming.path["id"], page_wish(incoming.query))
        return await _send(response, list_body(_there(page, incoming.path)))

    async def add_items(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        request = decode_body(incoming.body, _ITEMS, frozenset(), RESPONSE_CHOICES)
        added = await self.store.add_items(incoming.owner, incoming.path["id"], _read(request.items))
        return await _send(response, list_body(Page(_there(added, incoming.path), has_more=False)))

    async def get_item(self, incoming: Incoming, receive: Receive, response: Response) -> str:  # noqa: ARG002
        item = await self.store.get_item(incoming.owner, incoming.path["id"], incoming.path["item_id"])
        return await _send(response, _item_there(item, incoming.path))

    async def delete_item(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        """Answers with the conversation, as it is without the item."""
        deleted = await self.store.delete_item(incoming.owner, incoming.path["id"], incoming.path["item_id"])
        _item_there({} if deleted else None, incoming.path)
        return await self.get(incoming, receive, response)


def _read(given: Sequence[dict[str, Any]]) -> list[Item]:
    items = read_items("items", given)
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            field = f"items[{index}].type"
            raise RequestError(f"`{field}` is item_reference: expected the item itself", param=field)
    return items


def _there(found: Found | None, path: Mapping[str, str]) -> Found:
    """The same whether another key has such a conversation or nobody: ids are not to be guessed."""
    if found is None:
        message = f"there is no conversation `{path['id'][:256]}`"
        raise RequestError(message, param="id", code="conversation_not_found", status=404)
    return found


def _item_there(item: Item | None, path: Mapping[str, str]) -> Item:
    if item is None:
        message = f"there is no item `{path['item_id'][:256]}` in a conversation `{path['id'][:256]}`"
        raise RequestError(message, param="item_id", code="item_not_found", status=404)
    return item


async def _send(response: Response, content: object) -> str:
    await response.send_whole(200, msgspec.json.encode(content))
    return "ok"
