"""Calls whose arguments are JSON: an object that names the tool, or a name followed by the arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from penstock.text.formats.calls import MAX_ID_CHARACTERS, MAX_NAME_CHARACTERS, Calls
from penstock.text.formats.json_scanner import checked, read_string, read_value
from penstock.text.formats.source import NO_MARKERS, Malformed, Markers, Sink, Source, Steps

NO_ARGUMENTS = "{}"

_ARGUMENT_KEYS = ("arguments", "parameters")
# The keys of a call in formats without markers.
_KEYS = ("name", "type", "id", *_ARGUMENT_KEYS)
_OPENING_FENCES = Markers("```json", "```\n")
_CLOSING_FENCE = Markers("```")
_NEWLINE = Markers("\n")
_MAX_HEADER_CHARACTERS = MAX_NAME_CHARACTERS + MAX_ID_CHARACTERS + 64


@dataclass(frozen=True)
class JsonCalls:
    """Objects `{"name": …, "arguments": …}`, in a list or one after the other. Keys have any order; `parameters` is also accepted.

    A call ends with its object. Other keys are ignored, except in formats without markers.
    """

    closes: Markers = NO_MARKERS
    separator: str = ""

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        if (yield from source.peek()) == "[":
            yield from self._list(source, calls)
        else:
            yield from self._row(source, calls)
        yield from close(source, calls, self.closes)

    def _list(self, source: Source, calls: Calls) -> Steps[None]:
        source.at += 1
        while True:
            yield from source.spaces()
            yield from read_object(source, calls)
            yield from source.spaces()
            following = yield from source.peek()
            if following == "," and (yield from _is_more_after(source)):
                continue
            if following == "]":
                source.at += 1
                calls.separated()
            elif not source.ended:
                raise Malformed
            return

    def _row(self, source: Source, calls: Calls) -> Steps[None]:
        while True:
            yield from read_object(source, calls)
            yield from source.spaces()
            following = yield from source.peek()
            if self.separator and following == self.separator and (yield from _is_more_after(source)):
                following = yield from source.peek()
            if following != "{":
                return


@dataclass(frozen=True)
class NamedCalls:
    """A header with the name, then the arguments: `opens` header `separates` arguments `closes`, repeated for each call.

    `header` has a group `name`, and may have a group `id`. If the header is just the word `kind`, the name follows on its own line, and the
    arguments are in a fence. Without `opens` there is one call.
    """

    separates: Markers
    header: re.Pattern[str]
    opens: Markers = NO_MARKERS
    closes: Markers = NO_MARKERS
    section_closes: Markers = NO_MARKERS
    kind: str | None = None

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        if self.opens.strings:
            yield from read_each(source, calls, self.opens, self._call)
        else:
            yield from self._call(source, calls)
        yield from close(source, calls, self.section_closes)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        header, separator = yield from source.field(self.separates, _MAX_HEADER_CHARACTERS)
        if separator == "{":
            source.give_back(1)
        yield from source.spaces()
        is_fenced = header.strip() == self.kind and (yield from source.peek()) != "{"
        if is_fenced:
            header, _ = yield from source.field(_NEWLINE, MAX_NAME_CHARACTERS)
        fields = self.header.fullmatch(header.strip())
        if not fields:
            raise Malformed
        calls.begin(fields["name"], fields.groupdict().get("id"))
        if is_fenced:
            yield from source.spaces()
            yield from source.take(_OPENING_FENCES)
        yield from read_body(source, calls, self.closes)
        calls.end()
        yield from self._after(source, calls, is_fenced)

    def _after(self, source: Source, calls: Calls, is_fenced: bool) -> Steps[None]:
        """Reads the end of a call, which may be missing."""
        yield from source.spaces()
        if is_fenced and (yield from source.take_end(_CLOSING_FENCE)):
            yield from source.spaces()
            calls.separated()
        if (yield from source.take_end(self.closes)):
            calls.separated()


@dataclass(frozen=True)
class NamedOrListed:
    """One of the two formats; the first character shows which."""

    named: NamedCalls
    listed: JsonCalls

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        is_listed = (yield from source.peek()) in ("[", "{")
        yield from (self.listed if is_listed else self.named).read(source, calls)


def read_each(source: Source, calls: Calls, opens: Markers, read_call: Callable[[Source, Calls], Steps[None]]) -> Steps[None]:
    """Reads calls as long as each begins with one of these markers. There must be at least one."""
    yield from source.spaces()
    if not (yield from source.take(opens)):
        raise Malformed
    while True:
        yield from read_call(source, calls)
        yield from source.spaces()
        if not (yield from source.take(opens)):
            return


def read_object(source: Source, calls: Calls) -> Steps[None]:
    """Reads one call that is an object."""
    yield from source.expect("{")
    has_begun = has_arguments = False
    held: list[str] = []
    while True:
        yield from source.spaces()
        key = yield from read_string(source)
        yield from source.spaces()
        yield from source.expect(":")
        yield from source.spaces()
        if key == "name":
            calls.begin((yield from read_string(source)))
            has_begun = True
            for piece in held:
                calls.arguments(piece)
        elif key in _ARGUMENT_KEYS and not has_arguments:
            has_arguments = True
            yield from read_arguments(source, calls.arguments if has_begun else held.append)
        elif calls.known_only and key not in _KEYS:
            raise Malformed
        else:
            yield from read_value(source, lambda _: None)
        yield from source.spaces()
        if not (yield from _has_another(source)):
            break
    if not has_begun:
        raise Malformed
    if not has_arguments:
        calls.arguments(NO_ARGUMENTS)
    calls.end()


def read_body(source: Source, calls: Calls, closes: Markers) -> Steps[None]:
    """Reads the arguments of a call. One that is closed at once has none."""
    yield from source.spaces()
    if (yield from source.peek()) in ("{", '"', "n"):
        yield from read_arguments(source, calls.arguments)
    elif (yield from source.take(closes)):
        calls.arguments(NO_ARGUMENTS)
    else:
        raise Malformed


def read_arguments(source: Source, sink: Sink) -> Steps[None]:
    """Reads arguments as they come: an object, a string that contains one, or `null` for no arguments."""
    beginning = yield from source.peek()
    if beginning == "{":
        yield from read_value(source, sink)
        return
    if beginning == '"':
        said = (yield from read_string(source)).strip() or NO_ARGUMENTS
        inner = checked(said) if said.startswith("{") else None
        if inner is None:
            raise Malformed
        sink(inner)
        return
    pieces: list[str] = []
    yield from read_value(source, pieces.append)
    if pieces != ["null"]:
        raise Malformed
    sink(NO_ARGUMENTS)


def close(source: Source, calls: Calls, closes: Markers) -> Steps[None]:
    """Reads the end of a section of calls, if it is there. Malformed if something else follows."""
    yield from source.spaces()
    if (yield from source.take_end(closes)) is None and not source.is_used_up:
        raise Malformed
    calls.close()


def _is_more_after(source: Source) -> Steps[bool]:
    """Reads a separator and the whitespace after it. Returns whether anything follows."""
    source.at += 1
    yield from source.spaces()
    return not source.is_used_up


def _has_another(source: Source) -> Steps[bool]:
    following = yield from source.peek()
    if following not in (",", "}"):
        raise Malformed
    source.at += 1
    return following == ","
