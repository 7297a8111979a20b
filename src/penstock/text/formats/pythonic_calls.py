"""Calls in Python's notation, or in Gemma's. Their values become JSON as they come."""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.text.formats.calls import MAX_NAME_CHARACTERS, Calls
from penstock.text.formats.json_calls import close
from penstock.text.formats.json_scanner import MAX_SCALAR_CHARACTERS, checked, escaped
from penstock.text.formats.source import NO_MARKERS, Malformed, Markers, Sink, Source, Steps
from penstock.text.formats.tagged_calls import MAX_KEY_CHARACTERS, quoted

MAX_DEPTH = 64

_SCALAR = re.compile(r"[-+.\w]*", re.ASCII)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_BARE_KEY = re.compile(r"[^\s:{}\[\],<>]*")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|x[0-9a-fA-F]{2}|[0-7]{1,3}|(?s:.))")
_SIZES = {"u": 6, "U": 10, "x": 4}
_PLAIN = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_BACKSLASH = "\\"


@dataclass(frozen=True)
class Notation:
    """How values are written: what delimits strings, if not quotes, and whether keys need no quotes."""

    around_strings: Markers = NO_MARKERS
    has_bare_keys: bool = False

    def value(self, source: Source, sink: Sink, depth: int = 0) -> Steps[None]:
        """Reads one value and gives its JSON to the sink. Malformed if it is not a value."""
        if depth > MAX_DEPTH:
            raise Malformed
        yield from source.spaces()
        beginning = yield from source.peek()
        if beginning in _CLOSERS:
            yield from self._items(source, sink, depth)
        elif (yield from self._is_string(source)):
            yield from self._string(source, sink)
        else:
            text = yield from source.run(_SCALAR, MAX_SCALAR_CHARACTERS)
            value = _WORDS.get(text) or checked(text)
            if value is None:
                raise Malformed
            sink(value)

    def _items(self, source: Source, sink: Sink, depth: int) -> Steps[None]:
        opening = source.text[source.at]
        source.at += 1
        closing, is_object = _CLOSERS[opening], opening == "{"
        before = "{" if is_object else "["
        while True:
            yield from source.spaces()
            if (yield from source.peek()) == closing:
                source.at += 1
                sink(("" if before == ", " else before) + ("}" if is_object else "]"))
                return
            sink(before)
            if is_object:
                yield from self._key(source, sink)
            yield from self.value(source, sink, depth + 1)
            yield from _skip_comma(source, closing)
            before = ", "

    def _key(self, source: Source, sink: Sink) -> Steps[None]:
        if (yield from self._is_string(source)):
            yield from self._string(source, sink)
        else:
            key = yield from source.run(_BARE_KEY, MAX_KEY_CHARACTERS)
            if not key or not self.has_bare_keys:
                raise Malformed
            sink(quoted(key))
        yield from source.spaces()
        yield from source.expect(":")
        sink(": ")

    def _is_string(self, source: Source) -> Steps[bool]:
        """Whether a string begins here. Reads its delimiter if that is a marker, but not a quote."""
        if self.around_strings.strings:
            return (yield from source.take(self.around_strings)) is not None
        return (yield from source.peek()) in ("'", '"')

    def _string(self, source: Source, sink: Sink) -> Steps[None]:
        if not self.around_strings.strings:
            yield from _quoted_string(source, sink)
            return
        sink('"')
        if not (yield from source.until(self.around_strings, lambda piece: sink(escaped(piece)))):
            raise Malformed
        sink('"')


def _skip_comma(source: Source, closing: str) -> Steps[None]:
    """Reads the comma after a value. Without one, the closing character must follow."""
    yield from source.spaces()
    following = yield from source.peek()
    if following == ",":
        source.at += 1
    elif following != closing:
        raise Malformed


def _quoted_string(source: Source, sink: Sink) -> Steps[None]:
    quote = source.text[source.at]
    source.at += 1
    if (yield from source.take(Markers(quote * 2))):
        quote *= 3
    stops = Markers(quote, _BACKSLASH)
    sink('"')
    while True:
        stop = yield from source.until(stops, lambda piece: sink(escaped(piece)))
        if stop is None:
            raise Malformed
        if stop == quote:
            sink('"')
            return
        source.give_back(1)
        sink((yield from _escape(source)))


def _escape(source: Source) -> Steps[str]:
    """The JSON of a Python escape. A backslash before any other character stands for itself, as in Python."""
    while len(source.text) - source.at < _escape_size(source.text[source.at + 1 : source.at + 2]) and not source.ended:
        yield from source.wait()
    found = _ESCAPE.match(source.text, source.at)
    if not found:
        raise Malformed
    source.at = found.end()
    said = found[0][1:]
    if said in _PLAIN:
        return escaped(_PLAIN[said])
    if said[0] in "01234567":
        return escaped(chr(int(said, 8)))
    if len(said) == 1:
        return escaped(found[0])
    code = int(said[1:], 16)
    if code > 0xFFFF:
        return escaped(chr(code)) if code <= 0x10FFFF else escaped(found[0])
    # The halves of a surrogate pair stay escapes: only together they are a character.
    return f"\\u{code:04x}" if 0xD800 <= code <= 0xDFFF else escaped(chr(code))


def _escape_size(kind: str) -> int:
    """The maximum length of an escape."""
    return _SIZES.get(kind, 4 if kind.isdecimal() else 2)


_PYTHON = Notation()
_GEMMA = Notation(Markers("<escape>"), has_bare_keys=True)
_NAME = re.compile(r"[-.\w]*")
_KEYWORD = re.compile(r"\w*")
_CALL = Markers("call:")
_BRACE = Markers("{")


@dataclass(frozen=True)
class PythonicCalls:
    """Calls with keyword arguments, in a list. Without `needs_list`, also one after the other."""

    closes: Markers = NO_MARKERS
    needs_list: bool = True

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        is_list = (yield from source.peek()) == "["
        if is_list:
            source.at += 1
        elif self.needs_list:
            raise Malformed
        while True:
            yield from source.spaces()
            yield from self._call(source, calls)
            if not (yield from _has_another(source, calls, is_list)):
                break
        yield from close(source, calls, self.closes)

    def _call(self, source: Source, calls: Calls) -> Steps[None]:
        name = yield from source.run(_NAME, MAX_NAME_CHARACTERS)
        yield from source.expect("(")
        calls.begin(name)
        before = "{"
        while True:
            yield from source.spaces()
            if (yield from source.peek()) == ")":
                source.at += 1
                break
            key = yield from source.run(_KEYWORD, MAX_KEY_CHARACTERS)
            yield from source.spaces()
            yield from source.expect("=")
            if not key:
                raise Malformed
            calls.arguments(f"{before}{quoted(key)}: ")
            before = ", "
            yield from _PYTHON.value(source, calls.arguments)
            yield from _skip_comma(source, ")")
        calls.arguments("{}" if before == "{" else "}")
        calls.end()


@dataclass(frozen=True)
class GemmaCalls:
    """`call:name{key:value,…}`, with strings between `<escape>` and `<escape>`."""

    closes: Markers

    def read(self, source: Source, calls: Calls) -> Steps[None]:
        yield from source.spaces()
        if not (yield from source.take(_CALL)):
            raise Malformed
        name, _ = yield from source.field(_BRACE, MAX_NAME_CHARACTERS)
        calls.begin(name.strip())
        source.give_back(1)
        yield from _GEMMA.value(source, calls.arguments)
        calls.end()
        yield from close(source, calls, self.closes)


def _has_another(source: Source, calls: Calls, is_list: bool) -> Steps[bool]:
    yield from source.spaces()
    following = yield from source.peek()
    if following == "," or (not is_list and following == ";"):
        source.at += 1
        yield from source.spaces()
        return not source.is_used_up
    if is_list and not source.ended:
        yield from source.expect("]")
        calls.separated()
    return not is_list and (following.isalpha() or following == "_")
