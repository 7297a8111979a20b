"""Incremental detokenization: any split of the same tokens gives the same text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """Turns the tokens of one generation into text as they come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; characters still incomplete are held back."""

    def finish(self) -> str:
        """The text of what was held back, with U+FFFD for what never became a character."""


class ByteDetokenizer:
    """For tokenizers whose every token stands for fixed bytes: a table and a UTF-8 decoder."""

    __slots__ = ("_held", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._held = b""

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        data = b"".join([table[token_id] for token_id in token_ids])
        if self._held:
            data = self._held + data
        text, consumed = codecs.utf_8_decode(data, "replace", False)
        self._held = data[consumed:]
        return text

    def finish(self) -> str:
        held, self._held = self._held, b""
        return held.decode("utf-8", "replace")
