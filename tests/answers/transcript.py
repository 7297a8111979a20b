"""One answer and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part

TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "filters": {"$ref": "#/$defs/filters"},
            "tags": {"type": "array"},
            "exact": {"type": "boolean"},
        },
        "$defs": {"filters": {"type": "object"}},
    },
    "ping": {"type": "object", "properties": {}},
}


@dataclass(frozen=True)
class Transcript:
    """`parts` are what `text` is, written down by hand."""

    name: str
    text: str
    parts: list[Part]
    tools: str | None = None
    reasoning: str | None = None
    inside: bool = False
    schemas: Mapping[str, Mapping[str, Any]] | None = None


def call(index: int, name: str, arguments: str = "{}", call_id: str | None = None) -> list[Part]:
    """A complete call."""
    return [CallBegin(index, name, call_id), CallArguments(index, arguments), CallEnd(index)]


def broken(index: int, name: str, arguments: str, text: str, call_id: str | None = None) -> list[Part]:
    """A call that is none after all: what had been seen of its arguments, and all of its text."""
    seen: list[Part] = [CallArguments(index, arguments)] if arguments else []
    return [CallBegin(index, name, call_id), *seen, CallBroken(index, text)]
