"""JSON that comes in pieces, checked as far as it is certainly valid."""

from __future__ import annotations

import json
import re

from penstock.text.formats.source import Malformed, Sink, Source, Steps

MAX_DEPTH = 128
MAX_SCALAR_CHARACTERS = 400

_SPACE = re.compile(r"[ \t\n\r]+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_BEGINNING_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_RUN = re.compile(r"[-+.\w]+", re.ASCII)
_SCALAR = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null", re.ASCII)
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIRS = {"{": "}", "[": "]"}
_VALUE, _FIRST_KEY, _KEY, _COLON, _FIRST_ITEM, _NEXT = range(6)
_VALUE_BEGINS = (_VALUE, _FIRST_ITEM)
_KEY_BEGINS = (_FIRST_KEY, _KEY)


class JsonScanner:
    """Follows one JSON value through a text that comes in pieces.

    It stops where the text is not certainly valid: it waits for the rest of a number, a word or an escape. Control characters in strings,
    which models write and JSON forbids, become escapes. Depth is limited.
    """

    __slots__ = ("_closers", "_expected", "_in_string", "is_broken", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._closers: list[str] = []
        self._expected = _VALUE
        self._in_string = False

    def scan(self, text: str, at: int, out: list[str]) -> int:
        """Returns how far the text is valid, and appends that part to `out`. If it stops before the end of the text, the value is done or
        broken, or it waits for more."""
        while at < len(text) and not self.is_done:
            end = self._string(text, at, out) if self._in_string else self._token(text, at, out)
            if end == at:
                break
            at = end
        return at

    def _string(self, text: str, at: int, out: list[str]) -> int:
        found = _PLAIN.match(text, at) or _ESCAPE.match(text, at)
        if found:
            out.append(found[0])
            return found.end()
        character = text[at]
        if character == '"':
            self._in_string = False
            out.append(character)
            if self._expected in _KEY_BEGINS:
                self._expected = _COLON
            else:
                self._after_value()
            return at + 1
        if character == "\\":
            self.is_broken = not _BEGINNING_OF_ESCAPE.match(text, at)
            return at
        out.append(escaped(character))
        return at + 1

    def _token(self, text: str, at: int, out: list[str]) -> int:
        found = _SPACE.match(text, at)
        if found:
            out.append(found[0])
            return found.end()
        character = text[at]
        if self._expected in _VALUE_BEGINS and _RUN.match(character):
            return self._scalar(text, at, out)
        if not self._advance(character):
            self.is_broken = True
            return at
        out.append(character)
        return at + 1

    def _scalar(self, text: str, at: int, out: list[str]) -> int:
        found = _RUN.match(text, at)
        assert found is not None
        if len(found[0]) <= MAX_SCALAR_CHARACTERS and found.end() == len(text):
            return at
        if len(found[0]) > MAX_SCALAR_CHARACTERS or not _SCALAR.fullmatch(found[0]):
            self.is_broken = True
            return at
        out.append(found[0])
        self._after_value()
        return found.end()

    def _advance(self, character: str) -> bool:
        """Whether this character is allowed here, outside of strings and scalars."""
        expected = self._expected
        if character == '"' and (expected in _VALUE_BEGINS or expected in _KEY_BEGINS):
            self._in_string = True
        elif character in _PAIRS and expected in _VALUE_BEGINS and len(self._closers) < MAX_DEPTH:
            self._closers.append(_PAIRS[character])
            self._expected = _FIRST_KEY if character == "{" else _FIRST_ITEM
        elif character == ":" and expected == _COLON:
            self._expected = _VALUE
        elif character == "," and expected == _NEXT:
            self._expected = _KEY if self._closers[-1] == "}" else _VALUE
        elif self._closers and character == self._closers[-1] and expected in (_FIRST_KEY, _FIRST_ITEM, _NEXT):
            self._closers.pop()
            self._after_value()
        else:
            return False
        return True

    def _after_value(self) -> None:
        self._expected = _NEXT
        self.is_done = not self._closers


def read_value(source: Source, sink: Sink) -> Steps[None]:
    """Reads one value and gives it to the sink as it comes. Malformed if it is not JSON or does not end."""
    scanner = JsonScanner()
    while True:
        out: list[str] = []
        source.at = scanner.scan(source.text, source.at, out)
        if out:
            sink("".join(out))
        if scanner.is_done:
            return
        if scanner.is_broken or not (yield from source.wait()):
            raise Malformed


def read_string(source: Source) -> Steps[str]:
    """Reads a string and returns its content."""
    pieces: list[str] = []
    if (yield from source.peek()) != '"':
        raise Malformed
    yield from read_value(source, pieces.append)
    return str(json.loads("".join(pieces)))


def checked(text: str) -> str | None:
    """The text as JSON if it is one complete value, else None. Unpaired surrogates are not valid."""
    # The space ends a number or a word.
    text = text.strip() + " "
    scanner = JsonScanner()
    out: list[str] = []
    end = scanner.scan(text, 0, out)
    is_whole = scanner.is_done and end == len(text) - 1
    return "".join(out) if is_whole and not _SURROGATE.search(text) else None


def escaped(text: str) -> str:
    """The text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
