"""What a parameter may be, by its tool's schema, and the JSON of a value that a model wrote as bare text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.text.formats.json_scanner import checked, escaped

STRING = frozenset({"string"})
NO_STRING = frozenset({"number", "boolean", "null", "object", "array"})
ANYTHING: frozenset[str] = frozenset()
"""The schema says nothing."""

MAX_STEPS = 64

_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_TYPES: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}


def types_of_parameter(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """The JSON types that a parameter may have, `number` for every number; `ANYTHING` where that is not said."""
    properties = schema.get("properties")
    described = properties.get(name) if isinstance(properties, Mapping) else None
    return _types(schema, described)


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that stands for itself in the text.

    Where it may be a string or anything: JSON of one of the other types is that, and all else is a string, quotes included. Where it
    may be no string: any JSON is that, a word such as `True` or `None` is what it means, and only what is no JSON is a string.
    """
    value = checked(text)
    if types and "string" not in types:
        return value or _WORDS.get(text.strip().lower()) or quoted(text)
    if value is None or _type_of(value) not in (types or NO_STRING) - STRING:
        return quoted(text)
    return value


def quoted(text: str) -> str:
    return f'"{escaped(text)}"'


def _type_of(value: str) -> str:
    return {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}.get(value[0], "number")


def _types(root: Mapping[str, Any], described: object) -> frozenset[str]:
    """Follows references and alternatives, so many of them at most."""
    found: set[str] = set()
    waiting = [described]
    for _ in range(MAX_STEPS):
        if not waiting:
            return frozenset(found)
        schema = waiting.pop()
        if not isinstance(schema, Mapping):
            return ANYTHING
        known, alternatives = _said(root, schema)
        if not known and not alternatives:
            return ANYTHING
        found |= known
        waiting += alternatives
    return ANYTHING


def _said(root: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[set[str], list[object]]:
    """The types that a schema names itself, and the schemas that say the rest."""
    named = schema.get("type")
    if named is not None:
        names = named if isinstance(named, list) else [named]
        return {"number" if name == "integer" else str(name) for name in names}, []
    if isinstance(schema.get("enum"), list):
        return {_TYPES.get(type(value), "string") for value in schema["enum"]}, []
    if "const" in schema:
        return {_TYPES.get(type(schema["const"]), "string")}, []
    for keyword in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(keyword), list):
            return set(), list(schema[keyword])
    if isinstance(schema.get("$ref"), str):
        return set(), [_referred(root, schema["$ref"])]
    return set(), []


def _referred(root: Mapping[str, Any], reference: str) -> object:
    value: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        value = value.get(step) if isinstance(value, Mapping) else None
    return value
