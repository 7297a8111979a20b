"""What the front end asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NotRequired, Protocol, TypedDict

from penstock.text.detokenizer import Detokenizer


class ChatMessage(TypedDict):
    """A message of a chat, with its content as plain text."""

    role: str
    content: str
    name: NotRequired[str]


class Tokenizer(Protocol):
    """One model's way between text and tokens."""

    vocab_size: int
    """Ids run from 0 to below this."""

    ordinary_ids: Sequence[int]
    """Those that are text: neither special nor holes in the vocabulary. (Of the built-in tokenizer, the words.)"""

    end_id: int
    """The one with which a model ends its text."""

    max_token_bytes: int
    """The UTF-8 length of its longest token: a text of more than n times that has more than n tokens."""

    definition: str | None
    """The text of its `tokenizer.json`, which a grammar is compiled for; None where there is no such thing."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a prompt, with whatever the model expects at its beginning."""

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The tokens of a chat, ready for the assistant to answer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of these tokens, special ones left out."""

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text, which need not be whole characters."""

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one generation."""
