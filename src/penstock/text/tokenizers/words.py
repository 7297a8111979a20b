"""The built-in tokenizer of the simulator: readable words, and bytes for everything else.

Ids 0-255 are bytes, then come the words, each with a space before it, then the special tokens. Any text decodes to itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from penstock.text.detokenizer import ByteDetokenizer, ByteTables
from penstock.text.tokenizers.tokenizer import Answer, ChatMessage, ChatPrompt
from penstock.text.tool_prompt import calls_text
from penstock.wire.errors import RequestError

_WORDS = Path(__file__).with_name("words.txt")
_SPECIAL = ("<|end|>", "<|message|>", "<|role|>")
# They stand for the special tokens in rendered text. UTF-8 has no bytes for surrogates, so no message can contain one.
_END, _MESSAGE, _ROLE = _MARKS = "\ud800\ud801\ud802"
_EACH_MARK = tuple(re.compile(mark) for mark in _MARKS)
_PIECES = re.compile(r" ?[a-z]+|[^a-z ]+| +(?![a-z])| ")
# A text can be cut after this: no word, and no space before a word, continues there. _SLICE: minimum characters between two cuts.
_EDGE = re.compile("[a-z](?=[^a-z])|[^a-z ]")
_SLICE = 4096


class WordTokenizer:
    """See the module's docstring. It needs no files, so a new clone can serve at once."""

    def __init__(self) -> None:
        words = [f" {word}".encode() for word in _WORDS.read_text(encoding="ascii").split()]
        pieces = [*(bytes([byte]) for byte in range(256)), *words, *(token.encode() for token in _SPECIAL)]
        self._tables = ByteTables(pieces, {token: 256 + len(words) + index for index, token in enumerate(_SPECIAL)})
        self._table = self._tables.plain
        self._ids = {word.decode(): 256 + index for index, word in enumerate(words)}
        self.vocab_size = len(self._table)
        self.max_token_bytes = max(map(len, self._table))
        self.definition: str | None = None
        self.chat_template: str | None = None
        self.renders_tools = True
        self.template_losses: Sequence[str] = ()
        self.ordinary_ids: Sequence[int] = range(256, 256 + len(words))
        self.end_id, self._message_id, self._role_id = range(256 + len(words), len(self._table))

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = []
        for piece in _PIECES.findall(text):
            word = self._ids.get(piece)
            if word is None:
                token_ids += piece.encode()
            else:
                token_ids.append(word)
        return token_ids

    def encode_steps(self, text: str) -> Iterator[list[int]]:
        return map(self.encode, _slices(text))

    def encode_infill(self, prefix: str, suffix: str) -> list[int] | None:  # noqa: ARG002
        return None

    def render_chat(self, prompt: ChatPrompt) -> str:
        """Roles and contents. Tools and documents are JSON in messages of their own, calls are text after the content.

        Reasoning is left out, as the templates of most models leave out that of earlier turns.
        """
        if prompt.template not in (None, "default"):
            raise RequestError(f"`chat_template` is {prompt.template!r}: expected 'default', the only one", param="chat_template")
        if prompt.continues and (prompt.begins_answer or not prompt.messages):
            message = "`continue_final_message` needs a message to continue, and cannot be combined with `add_generation_prompt`"
            raise RequestError(message, param="continue_final_message")
        given = [("tools", prompt.tools), ("documents", prompt.documents)]
        shown = [(role, "\n".join([json.dumps(value, ensure_ascii=False) for value in values])) for role, values in given if values]
        shown += [(message["role"], _content(message)) for message in prompt.messages]
        text = "".join([f"{_ROLE}{role}{_MESSAGE}{content}{_END}" for role, content in shown])
        if prompt.continues:
            return text.removesuffix(_END)
        return f"{text}{_ROLE}assistant{_MESSAGE}" if prompt.begins_answer else text

    def parts(self, rendered: str) -> list[str]:
        # One search per mark is ten times as fast as one for all.
        edges = sorted([found.start() for mark in _EACH_MARK for found in mark.finditer(rendered, 1)])
        return [rendered[start:stop] for start, stop in pairwise([0, *edges, len(rendered)])]

    def begins_part(self, rendered: str, position: int) -> bool:
        return rendered.startswith(tuple(_MARKS), position)

    def encode_part(self, part: str) -> list[int]:
        mark = _MARKS.find(part[:1]) if part else -1
        return self.encode(part) if mark < 0 else [self.end_id + mark, *self.encode(part[1:])]

    def encode_part_steps(self, part: str) -> Iterator[list[int]]:
        return map(self.encode_part, _slices(part))

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:  # noqa: ARG002
        if token_ids and token_ids[-1] == self.end_id:
            token_ids = token_ids[:-1]
        if any(token_id >= self.end_id for token_id in token_ids):
            return None
        try:
            return Answer(b"".join([self._table[token_id] for token_id in token_ids]).decode(), token_ids)
        except UnicodeDecodeError:
            return None

    def decode(self, token_ids: Sequence[int]) -> str:
        return b"".join([self._table[token_id] for token_id in token_ids]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id]

    def detokenizer(self, visible: frozenset[str] = frozenset(), skip_special_tokens: bool = True) -> ByteDetokenizer:
        return ByteDetokenizer(self._tables.find(visible, skip_special_tokens))


def _content(message: ChatMessage) -> str:
    calls = message.get("tool_calls")
    return "\n".join(filter(None, (message["content"], calls_text(calls)))) if calls else message["content"]


def _slices(text: str) -> Iterator[str]:
    start = 0
    while (edge := _EDGE.search(text, start + _SLICE)) is not None:
        yield text[start : edge.end()]
        start = edge.end()
    yield text[start:]
