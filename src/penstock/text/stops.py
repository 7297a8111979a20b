"""Stop strings over any chunking."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first of several stop strings in a text that comes in pieces.

    `feed` returns the text that is certainly before any stop; what could still become one is held back. After a match
    `matched` names the stop string, the text before it has been returned, and nothing more comes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
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
        """The text that was held back and became no stop string."""
        held, self._held = self._held, ""
        return held

    def _first_completed(self, text: str) -> tuple[int, str] | None:
        """Where it starts, and which: the one completed first, so that it does not depend on how the text was cut."""
        starts = [(text.find(stop), stop) for stop in self._stops if stop in text]
        return min(starts, key=lambda found: (found[0] + len(found[1]), found[0]), default=None)

    def _possible_start(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        return next((size for size in range(longest, 0, -1) if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
