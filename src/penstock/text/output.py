"""What a model's text says: plain text, reasoning, and calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from msgspec import Struct


class Reasoning(Struct, frozen=True, gc=False):
    """A piece of what the model thought before it answered."""

    text: str


class CallBegin(Struct, frozen=True, gc=False):
    """A call of the tool `name` begins; calls are counted from 0. `id` is the one that the model itself wrote, where its format has ids."""

    index: int
    name: str
    id: str | None = None


class CallArguments(Struct, frozen=True, gc=False):
    """A piece of a call's arguments: all pieces of a call, joined, are a JSON object."""

    index: int
    text: str


class CallEnd(Struct, frozen=True, gc=False):
    """The call is complete, and its arguments are a JSON object."""

    index: int


class CallBroken(Struct, frozen=True, gc=False):
    """What had begun as a call is none: `text` is all that the model wrote of it, from its beginning on. It is to be shown as text."""

    index: int
    text: str


Part = str | Reasoning | CallBegin | CallArguments | CallEnd | CallBroken
"""A piece of an answer, in the order in which the model wrote it. A plain `str` is text; it is never empty."""


class OutputParser(Protocol):
    """Text in, parts out; the same parts for any split of the same text, apart from where pieces of one kind are cut.

    Nothing is lost: what is no call after all comes back as text. It never raises, whatever the text.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that this text completes. What could still become something else is held back."""

    def finish(self) -> Sequence[Part]:
        """The text has ended: what was held back."""


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbouring pieces of one kind put together: the same for any chunking."""
    whole: list[Part] = []
    for kind, pieces in groupby(parts, _kind):
        if kind is str:
            whole.append("".join(piece for piece in pieces if isinstance(piece, str)))
        elif kind is Reasoning:
            whole.append(Reasoning("".join(piece.text for piece in pieces if isinstance(piece, Reasoning))))
        elif isinstance(kind, int):
            whole.append(CallArguments(kind, "".join(piece.text for piece in pieces if isinstance(piece, CallArguments))))
        else:
            whole += pieces
    return whole


def _kind(part: Part) -> type | int:
    """What can be put together has the same: of arguments, those of one call."""
    return part.index if type(part) is CallArguments else type(part)
