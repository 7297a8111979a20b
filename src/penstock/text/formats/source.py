"""The text as it comes, and the few ways to read it. Readers are generators that stop where the text does, and go on when there is more.

Whatever is decided here is decided by characters alone, never by where the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import reduce
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reader: it yields whenever it has used up the text so far."""

Sink = Callable[[str], object]

_SPACES = re.compile(r"\s*")
_NEVER = "(?!)"


class Malformed(Exception):
    """What is being read is not what it began as."""


class Markers:
    """Strings to look for. None of them may end within another: then which of them is found does not depend on how a text is cut."""

    __slots__ = ("_beginnings", "_firsts", "_pattern", "longest", "strings")

    def __init__(self, *strings: str) -> None:
        self.strings = strings
        self.longest = max(map(len, strings), default=0)
        self._pattern = re.compile("|".join(map(re.escape, strings)) or _NEVER)
        self._firsts = re.compile(self.first_characters)
        self._beginnings = frozenset(string[:size] for string in strings for size in range(1, len(string)))

    def __or__(self, other: Markers) -> Markers:
        return Markers(*dict.fromkeys(self.strings + other.strings))

    @property
    def first_characters(self) -> str:
        """A regex for any character that begins one."""
        firsts = "".join(dict.fromkeys(re.escape(string[0]) for string in self.strings))
        return f"[{firsts}]" if firsts else _NEVER

    def search(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def match(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.match(text, at)

    def may_begin(self, text: str) -> bool:
        """Whether more text could make one of this."""
        return not text or text in self._beginnings

    def held_from(self, text: str, at: int) -> int:
        """From where on a text without a marker could still become one."""
        for first in self._firsts.finditer(text, max(at, len(text) - self.longest + 1)):
            if text[first.start() :] in self._beginnings:
                return first.start()
        return len(text)


NO_MARKERS = Markers()


def all_of(sets: list[Markers]) -> Markers:
    """Every marker of these."""
    return reduce(Markers.__or__, sets, NO_MARKERS)


class Source:
    """What has come of a text and has not been read. It remembers what was read since `mark`, at a cost that grows only with the text."""

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
        """Begins to record: this prefix, and what is read from here on."""
        self._recorded = [prefix]
        self._marked_at = self.at

    def recorded(self) -> str:
        """What was read since the mark. Recording ends."""
        assert self._marked_at is not None
        recorded = "".join(self._recorded) + self.text[self._marked_at : self.at]
        self._recorded, self._marked_at = [], None
        return recorded

    def wait(self) -> Steps[bool]:
        """Whether there was more text."""
        if self.ended:
            return False
        yield
        return not self.ended

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text):
            if not (yield from self.wait()):
                return ""
        return self.text[self.at]

    def spaces(self) -> Steps[None]:
        """Reads over whitespace."""
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
        """The marker that stands here; None, with nothing read, where none does."""
        while True:
            found = markers.match(self.text, self.at)
            if found:
                self.at = found.end()
                return found[0]
            if len(self.text) - self.at >= markers.longest or not markers.may_begin(self.text[self.at :]):
                return None
            if not (yield from self.wait()):
                return None

    def take_end(self, markers: Markers) -> Steps[str | None]:
        """As `take`; what is the beginning of a marker at the very end of the text is read, too."""
        found = yield from self.take(markers)
        if found is None and self.ended and markers.may_begin(self.text[self.at :]):
            self.at = len(self.text)
        return found

    def until(self, markers: Markers, sink: Sink) -> Steps[str | None]:
        """Reads up to the next marker and over it, and gives the sink what comes before, piece by piece. None when the text ends first."""
        while True:
            found = markers.search(self.text, self.at)
            end = found.start() if found else markers.held_from(self.text, self.at)
            if end > self.at:
                sink(self.text[self.at : end])
            if found:
                self.at = found.end()
                return found[0]
            self.at = end
            if not (yield from self.wait()):
                self._pour(sink)
                return None

    def field(self, markers: Markers, longest: int) -> Steps[tuple[str, str]]:
        """The text before the next marker, and that marker, which is read, too. Malformed where it does not come in so many characters."""
        pieces: list[str] = []
        room = longest
        while True:
            found = markers.search(self.text, self.at)
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
        """The characters from here that the pattern, a character class with `*`, matches. Malformed where they are more than so many."""
        while True:
            found = pattern.match(self.text, self.at)
            assert found is not None
            if len(found[0]) > longest:
                raise Malformed
            if found.end() < len(self.text) or not (yield from self.wait()):
                self.at = found.end()
                return found[0]

    def give_back(self, count: int) -> None:
        """Unreads what was read last: the end of a marker."""
        self.at -= count

    def unread(self, text: str) -> None:
        """Puts back what was read."""
        self.text = text + self.text[self.at :]
        self.at = 0

    def _pour(self, sink: Sink) -> None:
        if not self.is_used_up:
            sink(self.text[self.at :])
            self.at = len(self.text)
