"""What was said before a request: the responses that it follows, the conversation that it is in, the items that it refers to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock.api.responses.items import Item, check_outputs, read_items
from penstock.api.responses.schema import MAX_ITEMS, Asked
from penstock.api.responses.store import SqliteStore
from penstock.wire.errors import RequestError


@dataclass(frozen=True)
class Context:
    """`before` are the items of earlier turns, `input` those of this one. `session` names the conversation that they are all part of;
    None for the first response of what may become a chain, and its `root` is that of the chain."""

    input: list[Item]
    before: list[Item] = field(default_factory=list)
    before_field: str = "input"
    session: str | None = None
    root: str | None = None

    @property
    def items(self) -> list[Item]:
        return [*self.before, *self.input]

    @property
    def fields(self) -> list[str]:
        """For each item the field of the request that it comes from."""
        return [*[self.before_field] * len(self.before), *(f"input[{index}]" for index in range(len(self.input)))]


async def read_context(asked: Asked, owner: str, store: SqliteStore | None) -> Context:
    """Raises RequestError: 404 for what is not there, or not the owner's, which is the same."""
    if asked.previous_response_id is not None and asked.conversation is not None:
        message = "`previous_response_id` and `conversation` exclude each other"
        raise RequestError(message, param="previous_response_id", code="mutually_exclusive")
    given = [] if asked.input is None else read_items("input", asked.input)
    added = await _resolved(given, owner, store)
    if asked.previous_response_id is not None:
        context = await _chain(asked.previous_response_id, added, owner, store)
    elif asked.conversation_id is not None:
        context = await _conversation(asked.conversation_id, added, owner, store)
    else:
        context = Context(added)
    if not context.items and asked.instructions is None:
        raise RequestError("`input` is required", param="input", code="missing_field")
    if len(context.items) > MAX_ITEMS:
        message = f"`input` and what came before it have {len(context.items):,} items: the limit is {MAX_ITEMS:,}"
        raise RequestError(message, param="input", code="too_long")
    check_outputs(context.items, context.fields)
    return context


async def _resolved(given: Sequence[Item], owner: str, store: SqliteStore | None) -> list[Item]:
    """The items, with those that others refer to in the place of the references."""
    wanted = [item["id"] for item in given if item["type"] == "item_reference"]
    if not wanted:
        return list(given)
    found = {} if store is None else await store.find_items(owner, wanted)
    resolved: list[Item] = []
    for index, item in enumerate(given):
        if item["type"] == "item_reference" and item["id"] not in found:
            message = f"`input[{index}].id` is {item['id'][:80]!r}: there is no such item"
            raise RequestError(message, param=f"input[{index}].id", code="item_not_found", status=404)
        resolved.append(found[item["id"]] if item["type"] == "item_reference" else item)
    return resolved


async def _chain(previous: str, added: list[Item], owner: str, store: SqliteStore | None) -> Context:
    chain = None if store is None else await store.chain(owner, previous)
    if chain is None:
        raise _not_found("previous_response_id", "response", previous, "previous_response_not_found")
    if chain.missing is not None:
        message = f"`previous_response_id` {previous!r} follows {chain.missing!r}, which is there no more"
        raise RequestError(message, param="previous_response_id", code="previous_response_not_found", status=404)
    if chain.status not in ("completed", "incomplete"):
        message = f"`previous_response_id` {previous!r} is {chain.status}: expected one that is completed or incomplete"
        raise RequestError(message, param="previous_response_id", code="previous_response_not_over")
    return Context(added, chain.items, "previous_response_id", chain.root, chain.root)


async def _conversation(conversation: str, added: list[Item], owner: str, store: SqliteStore | None) -> Context:
    items = None if store is None else await store.conversation_items(owner, conversation)
    if items is None:
        raise _not_found("conversation", "conversation", conversation, "conversation_not_found")
    return Context(added, items, "conversation", conversation)


def _not_found(field: str, what: str, given: str, code: str) -> RequestError:
    """The same whether another key has such a thing or nobody: ids are not to be guessed."""
    return RequestError(f"`{field}` is {given!r}: there is no such {what}", param=field, code=code, status=404)
