"""Text that comes in pieces, and the ways to read it. Readers are generators: they pause at the end of the text and resume when more comes.

Every decision depends on the characters only, never on where the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader. It yields when it has read all text so far."""

Sink = Callable[[str], object]

_SPACES = re.compile(r"\s*")
_NEVER = "(?!)"


class Malformed(Exception):
    """The text is not in the expected format."""


class Markers:
    """Strings to look for. None of them may end within another, so that the result does not depend on how a text is cut."""

    __slots__ = ("_beginnings", "firsts", "longest", "pattern", "strings")

    def __init__(self, *strings: str) -> None:
        self.strings = strings
        self.longest = max(map(len, strings), default=0)
        self.pattern = re.compile("|".join(map(re.escape, strings)) or _NEVER)
        firsts = "".join(dict.fromkeys(re.escape(string[0]) for string in strings))
        self.firsts = re.compile(f"[{firsts}]" if firsts else _NEVER)
        """Any character that starts a marker."""
        self._beginnings = frozenset(string[:size] for string in strings for size in range(1, len(string)))

    def __or__(self, other: Markers) -> Markers:
        return Markers(*dict.fromkeys(self.strings + other.strings))

    def may_begin(self, text: str) -> bool:
        """Whether this can become a marker with more text."""
        return not text or text in self._beginnings

    def held_from(self, text: str, at: int) -> int:
        """The position from which the end of a text without markers may still become one."""
        for first in self.firsts.finditer(text, max(at, len(text) - self.longest + 1)):
            if text[first.start() :] in self._beginnings:
                return first.start()
        return len(text)


NO_MARKERS = Markers()


class Source:
    """The text that has come and is not read yet. Records what is read after `mark`, in linear time."""

    __slots__ = ("_marked_at", "_recorded", "at", "ended", "text")

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self._recorded: list[str] = []
        self._marked_at: int | None = None

    def add(self, text: str) -> None:
        if self._marked_at is not None:
            self._recorded.append(self.text[self._marked_at : self.at])
            self._marked_at = 0
        self.text = self.text[self.at :] + text
        self.at = 0

    @property
    def is_used_up(self) -> bool:
        return self.at == len(self.text)

    def mark(self, prefix: str = "") -> None:
        """Starts recording: this prefix, and what is read from here."""
        self._recorded = [prefix]
        self._marked_at = self.at

    def recorded(self) -> str:
        """What was read since the mark. Stops recording."""
        assert self._marked_at is not None
        recorded = "".join(self._recorded) + self.text[self._marked_at : self.at]
        self._recorded, self._marked_at = [], None
        return recorded

    def wait(self) -> Steps[bool]:
        """Waits for more text. False at the end."""
        if self.ended:
            return False
        yield
        return not self.ended

    def peek(self) -> Steps[str]:
        """The next character, not read yet; empty at the end."""
        while self.at == len(self.text):
            if not (yield from self.wait()):
                return ""
        return self.text[self.at]

    def spaces(self) -> Steps[None]:
        """Skips whitespace."""
        while True:
            found = _SPACES.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if not self.is_used_up or not (yield from self.wait()):
                return

    def expect(self, character: str) -> Steps[None]:
        if (yield from self.peek()) != character:
            raise Malformed
        self.at += 1

    def take(self, markers: Markers) -> Steps[str | None]:
        """Reads the marker at this position. None, and nothing is read, if there is none."""
        while True:
            found = markers.pattern.match(self.text, self.at)
            if found:
                self.at = found.end()
                return found[0]
            if len(self.text) - self.at >= markers.longest or not markers.may_begin(self.text[self.at :]):
                return None
            if not (yield from self.wait()):
                return None

    def take_end(self, markers: Markers) -> Steps[str | None]:
        """As `take`, but also reads the start of a marker at the very end of the text."""
        found = yield from self.take(markers)
        if found is None and self.ended and markers.may_begin(self.text[self.at :]):
            self.at = len(self.text)
        return found

    def until(self, markers: Markers, sink: Sink) -> Steps[str | None]:
        """Reads up to and including the next marker. The sink gets the text before it, piece by piece. None if the text ends first."""
        while True:
            found = markers.pattern.search(self.text, self.at)
            end = found.start() if found else markers.held_from(self.text, self.at)
            if end > self.at:
                sink(self.text[self.at : end])
            if found:
                self.at = found.end()
                return found[0]
            self.at = end
            if not (yield from self.wait()):
                if not self.is_used_up:
                    sink(self.text[self.at :])
                    self.at = len(self.text)
                return None

    def field(self, markers: Markers, longest: int) -> Steps[tuple[str, str]]:
        """Reads the text before the next marker, and the marker. Malformed if it does not come within `longest` characters."""
        pieces: list[str] = []
        room = longest
        while True:
            found = markers.pattern.search(self.text, self.at)
            end = found.start() if found else markers.held_from(self.text, self.at)
            if end - self.at > room:
                self.at += room
                raise Malformed
            pieces.append(self.text[self.at : end])
            room -= end - self.at
            if found:
                self.at = found.end()
                return "".join(pieces), found[0]
            self.at = end
            if not (yield from self.wait()):
                self.at = len(self.text)
                raise Malformed

    def run(self, pattern: re.Pattern[str], longest: int) -> Steps[str]:
        """Reads the characters that match the pattern, a character class with `*`. Malformed if there are more than `longest`."""
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            if len(found[0]) > longest:
                raise Malformed
            if found.end() < len(self.text) or not (yield from self.wait()):
                self.at = found.end()
                return found[0]

    def give_back(self, count: int) -> None:
        """Unreads the last `count` characters: the end of a marker."""
        self.at -= count

    def unread(self, text: str) -> None:
        """Puts text back before what is not read yet."""
        self.text = text + self.text[self.at :]
        self.at = 0
