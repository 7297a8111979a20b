"""Tokens to text, as they come: detokenized and cut at stop strings. Any split of the same tokens gives the same text."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

# More than a model has formats.
MAX_TABLES = 8

# No character has more bytes. What is incomplete after this many byte tokens stays incomplete.
MAX_CHARACTER_BYTES = 4


class Detokenizer(Protocol):
    """Turns the tokens of one generation into text as they come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete. The bytes of an incomplete character wait."""

    def finish(self) -> str:
        """The text of what still waits, with U+FFFD for bytes that are no character."""


class ByteTables:
    """The bytes that every token adds to the text: one table for each choice of special tokens to show, made once.

    `pieces` are the bytes of every id, special tokens included. `special` maps the text of each special token to its id.
    """

    def __init__(self, pieces: Sequence[bytes], special: Mapping[str, int]) -> None:
        self._pieces = pieces
        self._special = special
        self._tables: dict[tuple[frozenset[str], bool], Sequence[bytes]] = {}
        self.plain = self._make({})
        """The table that shows no special token."""

    def shown(self, visible: frozenset[str], skip_special_tokens: bool) -> Mapping[int, str]:
        """The special tokens to show, with their text. The others add nothing."""
        if skip_special_tokens and not visible:
            return {}
        return {index: text for text, index in self._special.items() if text in visible or not skip_special_tokens}

    def find(self, visible: frozenset[str], skip_special_tokens: bool) -> Sequence[bytes]:
        if skip_special_tokens and not visible:
            return self.plain
        wanted = (visible, skip_special_tokens)
        table = self._tables.get(wanted)
        if table is None:
            while len(self._tables) >= MAX_TABLES:
                del self._tables[next(iter(self._tables))]
            shown = self.shown(visible, skip_special_tokens)
            table = self._tables[wanted] = self._make(shown) if shown else self.plain
        return table

    def _make(self, shown: Mapping[int, str]) -> Sequence[bytes]:
        table = list(self._pieces)
        for index in self._special.values():
            if index not in shown:
                table[index] = b""
        return table


class ByteDetokenizer:
    """For tokenizers whose tokens stand for fixed bytes: a table and a UTF-8 decoder.

    With `strips`, the first space of the text is dropped: in SentencePiece vocabularies it only marks the start of a word.
    """

    __slots__ = ("_held", "_strips", "_table")

    def __init__(self, table: Sequence[bytes], strips: bool = False) -> None:
        self._table = table
        self._strips = strips
        self._held = b""

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        if self._held:
            data = self._held + data
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._held = data[consumed:]
        return self._stripped(text) if self._strips else text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return self._stripped(held.decode("utf-8", "replace"))

    def _stripped(self, text: str) -> str:
        if not self._strips or not text:
            return text
        self._strips = False
        return text.removeprefix(" ")


class StepDetokenizer:
    """For tokenizers whose text depends on neighbouring tokens: each token is decoded together with those before it.

    The window of tokens starts where text was last complete, so its cost does not grow with the generation. `decode` returns the text of
    tokens without special ones. `shown` are the special tokens to show, with their text; the others add nothing.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], shown: Mapping[int, str]) -> None:
        self._decode = decode
        self._shown = shown
        self._window: list[int] = []
        self._known = 0
        """How many tokens of the window have become text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._new_text()

    def _step(self, token_id: int) -> str:
        if token_id in self._shown:
            text = self._new_text()
            self._advance()
            return text + self._shown[token_id]
        self._window.append(token_id)
        text = self._new_text()
        held = len(self._window) - self._known
        if not text or (text.endswith("\N{REPLACEMENT CHARACTER}") and held < MAX_CHARACTER_BYTES):
            return ""
        self._advance()
        return text

    def _advance(self) -> None:
        """All of the window is text now. Drops the tokens that were text before."""
        if self._known < len(self._window):
            self._window = self._window[self._known :]
            self._known = len(self._window)

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._known])
        return self._decode(self._window)[len(before) :]


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces.

    `feed` returns text that is certainly before a stop string; what may become one waits. After a match `matched` is the stop string, the
    text before it has been returned, and `feed` returns nothing more.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops))
        self._by_first: dict[str, list[str]] = {}
        for stop in stops:
            self._by_first.setdefault(stop[0], []).append(stop)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        if self.matched is not None or not text:
            return ""
        held = self._held + text
        found = self._first_completed(held)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return held[:start]
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The text that waited and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str) -> tuple[int, str] | None:
        """Where it starts, and which one: the one completed first, so that the result does not depend on how the text was cut."""
        starts = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(starts, key=lambda found: (found[0] + len(found[1]), found[0]), default=None)

    def _possible_start(self, text: str) -> int:
        """The length of the longest end of `text` that is the start of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._by_first:
                end = text[start:]
                for stop in self._by_first[end[0]]:
                    if stop.startswith(end):
                        return len(end)
        return 0


class TextPart(NamedTuple):
    """The text of some tokens, how many of them count, and whether a stop string ended it."""

    text: str
    tokens: int
    stopped: bool


class TextAssembler:
    """The text of one generation, cut at its stop string.

    A stop string ends the generation at the token that completes it: later tokens are neither text nor counted. With `includes_stop`
    the stop string is part of the text. Text of the same token after the stop string is always dropped.
    """

    __slots__ = ("_detokenizer", "_includes_stop", "_matcher")

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), includes_stop: bool = False) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stops) if stops else None
        self._includes_stop = includes_stop

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._matcher is None else self._matcher.matched

    def feed(self, token_ids: Sequence[int]) -> TextPart:
        if self._matcher is None:
            return TextPart(self._detokenizer.feed(token_ids), len(token_ids), False)
        if self.matched is not None:
            return TextPart("", 0, True)
        parts = []
        for count, token_id in enumerate(token_ids, 1):
            # One at a time, to know which token completed the stop string.
            parts.append(self._matcher.feed(self._detokenizer.feed((token_id,))))
            if self._matcher.matched is not None:
                return TextPart("".join(parts) + self._stop_text(), count, True)
        return TextPart("".join(parts), len(token_ids), False)

    def finish(self) -> TextPart:
        """The text that still waits. It may complete a stop string, but counts no further token."""
        tail = self._detokenizer.finish()
        if self._matcher is None:
            return TextPart(tail, 0, False)
        if self.matched is not None:
            return TextPart("", 0, True)
        text = self._matcher.feed(tail)
        if self._matcher.matched is not None:
            return TextPart(text + self._stop_text(), 0, True)
        return TextPart(text + self._matcher.finish(), 0, False)

    def _stop_text(self) -> str:
        return self.matched or "" if self._includes_stop else ""
