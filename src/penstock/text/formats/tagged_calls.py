"""Calls whose parameters are each in a tag of their own, as text: they become JSON by what the tool's schema says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.text.formats.calls import LONGEST_NAME, Calls
from penstock.text.formats.json_calls import close
from penstock.text.formats.json_scanner import escaped
from penstock.text.formats.schema_types import STRING, as_json, quoted, types_of_parameter
from penstock.text.formats.source import NO_MARKERS, Malformed, Markers, Source, Steps

LONGEST_KEY = 256


@dataclass(frozen=True)
class TaggedCalls:
    """`opens` name `name_ends`, then for each parameter `key_opens` key `key_ends` (`value_opens`) value `value_closes`, then `closes`.

    Without `opens` there is one call. A `name_ends` of `given_back` belongs to what follows it. `kinds` are those of `key_ends` that say
    themselves whether the value is a string. With `trims`, a newline at each end of a value is not part of it. Strings flow as they
    come; other values when they are complete.
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
        yield from source.spaces()
        if not (yield from source.take(self.opens)):
            raise Malformed
        while True:
            yield from self._call(source, calls)
            yield from source.spaces()
            if not (yield from source.take(self.opens)):
                break
        yield from close(source, calls, self.section_closes)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        name, end = yield from source.field(self.name_ends, LONGEST_NAME)
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
            key, end = yield from source.field(self.key_ends, LONGEST_KEY)
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
    """A value on its way: written as it comes when it is a string, and held until it is complete when it is not."""

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
        """Without the first newline; the last waits until there is something after it."""
        if not self._is_begun:
            self._is_begun = True
            text = text.removeprefix("\n")
        if not text:
            return ""
        if self._holds_newline:
            text = "\n" + text
        self._holds_newline = text.endswith("\n")
        return text.removesuffix("\n") if self._holds_newline else text
