"""What is kept of responses and conversations, and what is asked of whoever keeps it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.api.responses.answers import Conversation, ResponseObject
from penstock.api.responses.items import Item

MAX_CHAIN = 4096
"""So many responses may follow one another."""
MAX_CHAIN_BYTES = 64 * 2**20
"""So much may the items of a chain, or of a conversation, take."""


@dataclass(frozen=True, kw_only=True)
class NewResponse:
    """A response that is being made, or has been. `root` is the first of its chain; `input` are its own items."""

    id: str
    owner: str
    root: str
    input: Sequence[Item]
    previous: str | None = None
    conversation: str | None = None
    is_background: bool = False


@dataclass(frozen=True, kw_only=True)
class ResponseState:
    """What a response has come to: the Response object, and, where it was a stream, its events, joined."""

    body: ResponseObject
    events: bytes | None = None

    @property
    def is_kept_in_conversation(self) -> bool:
        """What failed, or was stopped, was not said."""
        return self.body.status in ("completed", "incomplete")


@dataclass(frozen=True, kw_only=True)
class StoredResponse:
    """`has_events`: its stream can be played again. `is_here`: it is not over, and this front end makes it."""

    body: ResponseObject
    is_background: bool = False
    has_events: bool = False
    is_here: bool = False


@dataclass(frozen=True)
class Chain:
    """All items of a response and those before it, in their order. `missing` is one that the chain needs and that is not there any more."""

    root: str
    status: str
    items: list[Item] = field(default_factory=list)
    missing: str | None = None


@dataclass(frozen=True)
class PageWish:
    """Some of a list: `limit` of it, behind the item `after`."""

    limit: int = 20
    is_ascending: bool = False
    after: str | None = None


@dataclass(frozen=True)
class Page:
    items: list[Item]
    has_more: bool


class ResponseStore(Protocol):
    """Keeps responses and conversations. One owner never sees, or changes, what another has.

    What a write has returned for is there for every read that begins afterwards, and after a crash of the process. Every method raises
    RequestError (503) when the store cannot be reached. `size` is how many bytes it holds.
    """

    size: int

    async def begin(self, response: NewResponse, state: ResponseState) -> None:
        """A response is being made, by this process: if that ends before `finish`, the response has failed."""

    async def finish(self, response: NewResponse, state: ResponseState) -> None:
        """It is over. Nothing happens when it was deleted meanwhile. In a conversation, its items are appended, all together."""

    async def put(self, response: NewResponse, state: ResponseState) -> None:
        """A response that is over already: `begin` and `finish` in one."""

    async def get(self, owner: str, response_id: str) -> StoredResponse | None: ...

    async def events(self, owner: str, response_id: str) -> list[bytes] | None:
        """The events of its stream, if it was one and is over."""

    async def delete(self, owner: str, response_id: str) -> bool:
        """Returns whether there was one."""

    async def chain(self, owner: str, response_id: str) -> Chain | None:
        """Raises RequestError when it is too long."""

    async def input_items(self, owner: str, response_id: str, wish: PageWish) -> Page | None:
        """Raises RequestError when `wish.after` is none of them."""

    async def find_items(self, owner: str, ids: Sequence[str]) -> dict[str, Item]:
        """Those of the owner's items that have these ids, wherever they are."""

    async def create_conversation(self, owner: str, metadata: Mapping[str, str], items: Sequence[Item]) -> Conversation: ...

    async def get_conversation(self, owner: str, conversation_id: str) -> Conversation | None: ...

    async def update_conversation(self, owner: str, conversation_id: str, metadata: Mapping[str, str]) -> Conversation | None: ...

    async def delete_conversation(self, owner: str, conversation_id: str) -> bool: ...

    async def conversation_page(self, owner: str, conversation_id: str, wish: PageWish) -> Page | None: ...

    async def conversation_items(self, owner: str, conversation_id: str) -> list[Item] | None:
        """All of them. Raises RequestError when they are too many."""

    async def add_items(self, owner: str, conversation_id: str, items: Sequence[Item]) -> list[Item] | None:
        """Returns them as they were added."""

    async def get_item(self, owner: str, conversation_id: str, item_id: str) -> Item | None: ...

    async def delete_item(self, owner: str, conversation_id: str, item_id: str) -> bool: ...
