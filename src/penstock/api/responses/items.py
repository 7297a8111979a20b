"""Items of a request: read one by one, and brought into the form in which they are kept and shown."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from penstock.api.openai.schema import ContentPart
from penstock.api.pipeline.request import decode_body
from penstock.api.responses.schema import HOSTED_TOOLS, ITEM_CHOICES, ITEMS
from penstock.wire.errors import RequestError

Item = dict[str, Any]
"""An item as the API shows it: it always has a `type` and an `id`."""

MAX_DEPTH = 64
"""So deep may JSON be nested within an item or a tool."""

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_OUTPUTS = {"function_call_output": "function_call", "custom_tool_call_output": "custom_tool_call"}

StructType = TypeVar("StructType", bound=Struct)


def new_id(kind: str) -> str:
    """An id for an item of this type."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(20)}"


def read_items(field: str, given: str | Sequence[dict[str, Any]]) -> list[Item]:
    """The items of a request's `field`. Raises RequestError that names what is wrong with which of them.

    References stay what they are: `{"type": "item_reference", "id": …}`.
    """
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}])]
    return [_read_item(f"{field}[{index}]", item) for index, item in enumerate(given)]


def read_struct(field: str, value: dict[str, Any], kind: type[StructType]) -> StructType:
    """The value as this type. Raises RequestError that names the field within the request."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        try:
            return decode_body(msgspec.json.encode(value), msgspec.json.Decoder(kind), frozenset(), ITEM_CHOICES)
        except RequestError as error:
            param = field if error.param is None else f"{field}.{error.param}"
            message = error.message.replace(f"`{error.param}`", f"`{param}`", 1)
            raise RequestError(message, param=param, code=error.code) from error


def check_depth(field: str, value: object) -> None:
    """Refuses what is nested so deeply that it cannot be written again."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return
    raise RequestError(f"`{field}` is nested more than {MAX_DEPTH} levels deep", param=field, code="too_deep")


def marked_parts(given: str | Sequence[dict[str, Any]] | None) -> list[ContentPart]:
    """The parts of items that have been read already and are marked for the cache."""
    if given is None or isinstance(given, str):
        return []
    contents = [item.get(name) for item in given for name in ("content", "output")]
    marks = [part.get("prompt_cache_breakpoint") for content in contents if isinstance(content, list) for part in content]
    return [msgspec.convert({"type": "text", "text": "", "prompt_cache_breakpoint": mark}, ContentPart) for mark in marks if mark]


def check_outputs(items: Iterable[Item], fields: Iterable[str]) -> None:
    """Refuses the output of a call that is not there: no model could make sense of it."""
    calls: set[tuple[str, str]] = set()
    for item, field in zip(items, fields, strict=True):
        kind = item["type"]
        if kind in _OUTPUTS and (_OUTPUTS[kind], item["call_id"]) not in calls:
            message = f"`{field}.call_id` is {item['call_id']!r}: no {_OUTPUTS[kind]} before it has that call_id"
            raise RequestError(message, param=f"{field}.call_id")
        if kind in _OUTPUTS.values():
            calls.add((kind, item["call_id"]))


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _read_item(field: str, value: dict[str, Any]) -> Item:
    kind = value.get("type") or ("message" if "role" in value or "id" not in value else "item_reference")
    if not isinstance(kind, str) or kind not in ITEMS:
        shown = msgspec.json.encode(kind)[:80].decode(errors="replace") if isinstance(kind, str) else "no string"
        hosted = isinstance(kind, str) and kind.partition("_call")[0] in HOSTED_TOOLS
        why = "the models here have no such tool" if hosted else f"expected one of {', '.join(ITEMS)}"
        raise RequestError(f"`{field}.type` is {shown}: {why}", param=f"{field}.type")
    check_depth(field, value)
    # Defaults are filled in, so that what is kept has one form.
    read = read_struct(field, value, ITEMS[kind])
    fields = {name: member for name, member in cast(Item, msgspec.to_builtins(read)).items() if member is not None}
    if kind == "item_reference":
        return {"type": kind, "id": fields["id"]}
    item: Item = {"id": new_id(kind), "type": kind, **fields}
    if kind == "message":
        return {**item, **_message(item["role"], item["content"], item["id"], item.get("status", "completed"))}
    if kind == "reasoning":
        item.setdefault("summary", [])
    return {**item, "status": item.get("status", "completed")}


def _message(role: str, content: str | list[dict[str, Any]], item_id: str | None = None, status: str = "completed") -> Item:
    spoken = "output_text" if role == "assistant" else "input_text"
    parts = [{"type": spoken, "text": content}] if isinstance(content, str) else content
    return {
        "id": item_id or new_id("message"),
        "type": "message",
        "role": role,
        "status": status,
        "content": [_part(part, spoken) for part in parts],
    }


def _part(part: dict[str, Any], spoken: str) -> dict[str, Any]:
    shown = {name: value for name, value in part.items() if value is not None}
    if shown["type"] == "refusal":
        return {"type": "refusal", "refusal": shown.get("refusal", shown.get("text", ""))}
    shown["type"] = spoken
    if spoken == "output_text":
        shown.setdefault("annotations", [])
    return shown
