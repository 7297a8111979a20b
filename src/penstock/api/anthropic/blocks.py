"""An answer's parts as Anthropic's content blocks, and the signatures of thinking blocks: opaque to clients, which send them back."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, Part, Reasoning, without_broken_calls

_OMITTED = "omitted."
_SHOWN = "shown."
Kind = Literal["text", "thinking", "signature", "partial_json"]
"""What is added to a block: the name of its member."""


class BlockStart(NamedTuple):
    """A block begins, without its content."""

    number: int
    block: dict[str, Any]


class BlockDelta(NamedTuple):
    """A piece of a block's content."""

    number: int
    kind: Kind
    text: str


class BlockStop(NamedTuple):
    """The block is complete."""

    number: int


Step = BlockStart | BlockDelta | BlockStop


class Blocks:
    """Turns parts into steps. Blocks are numbered from 0, and each is complete before the next one starts.

    Text of only whitespace before or after another block makes no block: models write line breaks between thinking, text and calls.
    Thinking that is not shown is put into its block's signature. A broken call ends its block, and its text goes into a text block.
    """

    def __init__(self, shows_thinking: bool = True) -> None:
        self._shows_thinking = shows_thinking
        self._next = 0
        self._open: Literal["text", "thinking", "tool_use"] | None = None
        self._blank = ""
        """Whitespace that is held back."""
        self._thinking: list[str] = []

    @property
    def number(self) -> int:
        """The number of the open block, if there is one."""
        return self._next - 1

    @property
    def is_in_text(self) -> bool:
        """Whether new text belongs to the open block as it is."""
        return self._open == "text"

    def feed(self, parts: Iterable[Part]) -> list[Step]:
        steps: list[Step] = []
        for part in parts:
            match part:
                case str():
                    self._add_text(part, steps)
                case Reasoning():
                    self._add_thinking(part.text, steps)
                case CallBegin():
                    block = {"type": "tool_use", "id": part.id or f"toolu_{secrets.token_hex(12)}", "name": part.name, "input": {}}
                    self._begin("tool_use", block, steps)
                case CallArguments():
                    steps.append(BlockDelta(self.number, "partial_json", part.text))
                case CallEnd():
                    self._close(steps)
                case CallBroken():
                    self._close(steps)
                    self._add_text(part.text, steps)
        return steps

    def finish(self) -> list[Step]:
        """The answer has ended. If it was only whitespace, that is its text."""
        steps: list[Step] = []
        if self._blank and not self._next:
            self._begin_text(steps)
        self._close(steps)
        return steps

    def _add_text(self, text: str, steps: list[Step]) -> None:
        if self._open == "text":
            steps.append(BlockDelta(self.number, "text", text))
            return
        self._blank += text
        if self._blank and not self._blank.isspace():
            self._begin_text(steps)

    def _begin_text(self, steps: list[Step]) -> None:
        text = self._blank
        self._begin("text", {"type": "text", "text": ""}, steps)
        steps.append(BlockDelta(self.number, "text", text))

    def _add_thinking(self, text: str, steps: list[Step]) -> None:
        if self._open != "thinking":
            self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""}, steps)
        self._thinking.append(text)
        if self._shows_thinking:
            steps.append(BlockDelta(self.number, "thinking", text))

    def _begin(self, kind: Literal["text", "thinking", "tool_use"], block: dict[str, Any], steps: list[Step]) -> None:
        self._close(steps)
        self._blank = ""
        self._open = kind
        self._next += 1
        steps.append(BlockStart(self.number, block))

    def _close(self, steps: list[Step]) -> None:
        if self._open == "thinking":
            thinking = "".join(self._thinking)
            self._thinking.clear()
            steps.append(BlockDelta(self.number, "signature", (signature_of if self._shows_thinking else sealed)(thinking)))
        if self._open is not None:
            self._open = None
            steps.append(BlockStop(self.number))


def whole_blocks(parts: Sequence[Part], shows_thinking: bool = True) -> list[dict[str, Any]]:
    """The blocks of a whole answer. A broken call is only text."""
    blocks = Blocks(shows_thinking)
    whole: list[dict[str, Any]] = []
    arguments: dict[int, str] = {}
    for step in [*blocks.feed(without_broken_calls(parts)), *blocks.finish()]:
        match step:
            case BlockStart(block=block):
                whole.append(block)
            case BlockDelta(number=number, kind="partial_json", text=text):
                arguments[number] = arguments.get(number, "") + text
            case BlockDelta(number=number, kind=kind, text=text):
                whole[number][kind] += text
    for number, text in arguments.items():
        whole[number]["input"] = _object(text)
    return whole


def _object(arguments: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def signature_of(thinking: str) -> str:
    """For a block that shows its thinking. Its value does not matter, but clients do not send a block back without one."""
    return _SHOWN + hashlib.blake2b(thinking.encode(), digest_size=24, person=b"penstock-thought").hexdigest()


def sealed(thinking: str) -> str:
    """For a block that hides its thinking: the next turn sends it back inside the signature. It is not encrypted."""
    return _OMITTED + base64.b64encode(thinking.encode()).decode()


def unsealed(signature: str) -> str:
    """The thinking in a signature; empty if there is none."""
    if not signature.startswith(_OMITTED):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(_OMITTED), validate=True).decode()
    except ValueError:
        return ""
