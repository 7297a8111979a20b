"""Which tokens wrote which text: found again by their bytes, for a parser does not say."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from penstock.api.responses.items import Item


class Logprobs:
    """The logprobs of an answer's tokens, in the order in which they came, and how far its items have got in them.

    What an item has does not depend on how the tokens came. A text that is not in them byte by byte has none: that of special tokens
    which are not shown, or of bytes that are no UTF-8.
    """

    def __init__(self) -> None:
        self._entries: list[Item] = []
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._written = bytearray()
        self._closed = 0
        """Behind the last item that is complete."""
        self._sent = 0
        """Behind the last delta."""

    def note(self, entries: Sequence[Item]) -> None:
        """These tokens have come."""
        for entry in entries:
            self._entries.append(entry)
            self._begins.append(len(self._written))
            self._written += bytes(entry["bytes"])
            self._ends.append(len(self._written))

    def of_delta(self, text: str) -> list[Item]:
        """Those of the tokens that wrote this piece of a message, the last that was written."""
        piece = text.encode()
        least = max(self._sent, self._closed)
        # It goes on where the last one ended, except behind what is no text: then its own place is the last that it may be.
        found = least if self._written.startswith(piece, least) else self._written.rfind(piece, least)
        if found < 0:
            return []
        self._sent = found + len(piece)
        return self._between(least, found, self._sent)

    def of_item(self, text: str) -> list[Item]:
        """Those of an item that is complete, with all of its text. Everything before it is behind us."""
        whole = text.encode()
        least = self._closed
        found = self._written.find(whole, least)
        if found < 0:
            return []
        self._closed = found + len(whole)
        return self._between(least, found, self._closed)

    def _between(self, least: int, begin: int, end: int) -> list[Item]:
        """The tokens with bytes from `begin` to `end`, but none that began before `least`: that one is another's."""
        first = max(bisect_left(self._begins, least), bisect_right(self._ends, begin))
        return self._entries[first : bisect_left(self._begins, end)]
