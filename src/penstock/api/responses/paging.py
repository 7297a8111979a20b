"""Lists, a page at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.responses.store import Page, PageWish
from penstock.wire.errors import RequestError

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def check_query(query: Mapping[str, str], known: Sequence[str]) -> None:
    for name in query:
        if name not in known:
            expected = ", ".join(name for name in known if not name.endswith("[]"))
            raise RequestError(f"unknown parameter `{name[:80]}`: expected {expected}", param=name[:80], code="unknown_field")


def page_wish(query: Mapping[str, str]) -> PageWish:
    """Raises RequestError that names the parameter."""
    limit, order = query.get("limit", str(DEFAULT_LIMIT)), query.get("order", "desc")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LIMIT)) and 1 <= int(limit) <= MAX_LIMIT):
        raise RequestError(f"`limit` is {limit[:80]!r}: expected a number from 1 to {MAX_LIMIT}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError(f"`order` is {order[:80]!r}: expected asc or desc", param="order")
    if "before" in query:
        raise RequestError("`before` is not supported: use `after`, in either `order`", param="before", code="unsupported_field")
    return PageWish(int(limit), order == "asc", query.get("after"))


def list_body(page: Page) -> dict[str, Any]:
    return {
        "object": "list",
        "data": page.items,
        "first_id": page.items[0]["id"] if page.items else None,
        "last_id": page.items[-1]["id"] if page.items else None,
        "has_more": page.has_more,
    }
