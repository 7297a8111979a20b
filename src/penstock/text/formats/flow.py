"""Text on its way out. Whitespace at its end waits until it is known what follows."""

from __future__ import annotations

import re
from collections.abc import Callable

from penstock.text.formats.source import Markers
from penstock.text.output import Part


class Flow:
    """One kind of text, up to one of some markers.

    With `trims`, whitespace at its beginning is dropped. With `holds`, whitespace at its end is held back: `spaces` has it. With
    `after_call`, whitespace that is all of it is dropped.
    """

    def __init__(
        self,
        out: list[Part],
        kind: Callable[[str], Part],
        markers: Markers,
        *,
        trims: bool = False,
        holds: bool = True,
        after_call: bool = False,
    ) -> None:
        self.markers = markers
        self.spaces: list[str] = []
        self.has_begun = False
        self._out = out
        self._kind = kind
        self._trims = trims
        self._holds = holds
        self._after_call = after_call
        self._find_first = re.compile(markers.first_characters).search

    def write(self, text: str) -> None:
        body = text.rstrip() if self._holds else text
        if body:
            rest = "".join(self.spaces) + body
            self.spaces = []
            self._show(rest.lstrip() if self._trims and not self.has_begun else rest)
        if len(body) < len(text):
            self.spaces.append(text[len(body) :])

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held back, and text in which nothing is remarkable would go out as it is."""
        return self.has_begun and not self.spaces

    def straight(self, text: str) -> Part | None:
        """Of an idle flow: this text as a part; None where something in it asks for a closer look. It is what most tokens cost."""
        if self._find_first(text) or (self._holds and text[-1].isspace()):
            return None
        return self._kind(text)

    def take_spaces(self) -> str:
        spaces = "".join(self.spaces)
        self.spaces = []
        return spaces

    def end(self) -> None:
        """Nothing follows: what was held back is part of it, unless it is to be dropped."""
        spaces = self.take_spaces()
        if self.has_begun or not (self._trims or self._after_call):
            self._show(spaces)

    def _show(self, text: str) -> None:
        if text:
            self.has_begun = True
            self._out.append(self._kind(text))
