"""Calls with each parameter as text in a tag of its own. The tool's schema says what JSON it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.formats.calls import MAX_NAME_CHARACTERS, Calls
from penstock.text.formats.json_calls import close, read_each
from penstock.text.formats.json_scanner import checked, escaped
from penstock.text.formats.source import NO_MARKERS, Malformed, Markers, Source, Steps

STRING = frozenset({"string"})
NO_STRING = frozenset({"number", "boolean", "null", "object", "array"})
ANYTHING: frozenset[str] = frozenset()
"""The schema does not say."""

MAX_STEPS = 64
MAX_KEY_CHARACTERS = 256

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
    """The JSON types that a parameter may have; `integer` counts as `number`. `ANYTHING` if the schema does not say.

    Follows at most MAX_STEPS references and alternatives.
    """
    properties = schema.get("properties")
    waiting: list[object] = [properties.get(name) if isinstance(properties, Mapping) else None]
    found: set[str] = set()
    for _ in range(MAX_STEPS):
        if not waiting:
            return frozenset(found)
        described = waiting.pop()
        if not isinstance(described, Mapping):
            return ANYTHING
        known, alternatives = _said(schema, described)
        if not known and not alternatives:
            return ANYTHING
        found |= known
        waiting += alternatives
    return ANYTHING


def as_json(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that is written as plain text.

    If it may be a string: JSON of another allowed type stays JSON, everything else is a string, quotes included. If it may not be a
    string: any JSON stays JSON, a word such as `True` or `None` is converted, and only the rest is a string.
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


def _said(root: Mapping[str, Any], schema: Mapping[str, Any]) -> tuple[set[str], list[object]]:
    """The types that a schema names, and the schemas that it refers to."""
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


@dataclass(frozen=True)
class TaggedCalls:
    """`opens` name `name_ends`, then for each parameter `key_opens` key `key_ends` (`value_opens`) value `value_closes`, then `closes`.

    Without `opens` there is one call. A `name_ends` in `given_back` is also the start of what follows. `kinds` are the `key_ends` that say
    whether the value is a string. With `trims`, a newline at each end of a value is dropped. Strings are passed on as they come, other
    values when they are complete.
    """

    name_ends: Markers
    key_opens: Markers
    key_ends: Markers
    value_closes: Markers
    closes: Markers
    opens: Markers = NO_MARKERS
    value_opens: Markers = NO_MARKERS
    section_closes: Markers = NO_MARKERS
    given_back: frozenset[str] = frozenset()
    kinds: tuple[tuple[str, frozenset[str]], ...] = ()
    trims: bool = False

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        if not self.opens.strings:
            yield from self._call(source, calls)
            calls.close()
            return
        yield from read_each(source, calls, self.opens, self._call)
        yield from close(source, calls, self.section_closes)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        name, end = yield from source.field(self.name_ends, MAX_NAME_CHARACTERS)
        if end in self.given_back:
            source.give_back(len(end))
        name = name.strip()
        calls.begin(name)
        yield from self._parameters(source, calls, calls.schema(name))
        calls.end()

    def _parameters(self, source: Source, calls: Calls, schema: Mapping[str, Any]) -> Steps[None]:
        before = "{"
        either = self.key_opens | self.closes
        while True:
            yield from source.spaces()
            marker = yield from source.take(either)
            if marker is None:
                raise Malformed
            if marker in self.closes.strings:
                calls.arguments("{}" if before == "{" else "}")
                return
            key, end = yield from source.field(self.key_ends, MAX_KEY_CHARACTERS)
            if self.value_opens.strings:
                yield from source.spaces()
                if not (yield from source.take(self.value_opens)):
                    raise Malformed
            calls.arguments(f"{before}{quoted(key.strip())}: ")
            types = dict(self.kinds).get(end)
            yield from self._value(source, calls, types_of_parameter(schema, key.strip()) if types is None else types)
            before = ", "

    def _value(self, source: Source, calls: Calls, types: frozenset[str]) -> Steps[None]:
        value = _Value(calls, self.trims, types)
        if not (yield from source.until(self.value_closes, value.write)):
            raise Malformed
        value.close()


class _Value:
    """A value on its way out. A string goes out as it comes, any other value when it is complete."""

    def __init__(self, calls: Calls, trims: bool, types: frozenset[str]) -> None:
        self._calls = calls
        self._trims = trims
        self._types = types
        self._flows = types == STRING
        self._pieces: list[str] = []
        self._is_begun = False
        self._holds_newline = False
        if self._flows:
            calls.arguments('"')

    def write(self, text: str) -> None:
        if self._trims:
            text = self._trimmed(text)
        if text and self._flows:
            self._calls.arguments(escaped(text))
        elif text:
            self._pieces.append(text)

    def close(self) -> None:
        self._calls.arguments('"' if self._flows else as_json("".join(self._pieces), self._types))

    def _trimmed(self, text: str) -> str:
        """The text without the first newline. The last newline waits until something follows."""
        if not self._is_begun:
            self._is_begun = True
            text = text.removeprefix("\n")
        if not text:
            return ""
        if self._holds_newline:
            text = "\n" + text
        self._holds_newline = text.endswith("\n")
        return text.removesuffix("\n") if self._holds_newline else text
