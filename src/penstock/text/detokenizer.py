"""Incremental detokenization: any split of the same tokens gives the same text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Turns the tokens of one generation into text as they come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; characters still incomplete are held back."""

    def finish(self) -> str:
        """The text of what was held back, with U+FFFD for what never became a character."""


class ByteDetokenizer:
    """For tokenizers whose every token stands for fixed bytes: a table and a UTF-8 decoder."""

    __slots__ = ("_decoder", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = _UTF8("replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        table = self._table
        if len(token_ids) == 1:
            return self._decoder.decode(table[token_ids[0]])
        return self._decoder.decode(b"".join([table[token_id] for token_id in token_ids]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)
