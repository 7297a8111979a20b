"""One generation's text: detokenized, and cut at its stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.text.detokenizer import Detokenizer
from penstock.text.stops import StopMatcher


class TextPart(NamedTuple):
    """What some tokens became: their text, how many of them count, and whether a stop string ended it."""

    text: str
    tokens: int
    stopped: bool


class TextAssembler:
    """Tokens in, text out; the same for any split of the same tokens.

    A stop string ends the generation at the token that completed it: later tokens are neither text nor counted. It is itself part of the
    text only with `includes_stop`; what the token has behind it is not.
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
        """What was held back. A stop string can still be completed by it, but takes no further token."""
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
