"""What the front end asks of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NotRequired, Protocol, TypedDict

from penstock.text.detokenizer import Detokenizer


class ChatMessage(TypedDict):
    """A message of a chat, with its content as plain text."""

    role: str
    content: str
    name: NotRequired[str]


class Answer(NamedTuple):
    """What a model generated: the text as a chat template would have to write it, and its tokens without the one that ended it."""

    text: str
    token_ids: Sequence[int]


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
        """The tokens of a chat, ready for the assistant to answer: those of the parts of its rendered text, one after the other."""

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        """The text of a chat, special tokens included. Raises RequestError where the messages are none that the model knows."""

    def parts(self, rendered: str) -> list[str]:
        """A rendered text, cut wherever a part can be tokenized without the others. Joined they are the text; there is at least one."""

    def begins_part(self, rendered: str, position: int) -> bool:
        """Whether `parts` of any text that goes on like this from here would cut here, whatever stands before."""

    def encode_part(self, part: str) -> list[int]:
        """The tokens of one of the parts."""

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:
        """What was generated after the part `before`, the last of a chat.

        `before` and the answer's text are one part then, and its tokens, together with those of `before`, decode to what the tokens
        of that part decode to. None where this is not certain: special tokens within, characters that are incomplete.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text of these tokens, special ones left out."""

    def token_bytes(self, token_id: int) -> bytes:
        """What this token adds to the text, which need not be whole characters."""

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder for one generation."""
