"""The parts of an answer: text, reasoning, and tool calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from msgspec import Struct


class Reasoning(Struct, frozen=True, gc=False):
    """A piece of the model's reasoning."""

    text: str


class CallBegin(Struct, frozen=True, gc=False):
    """A call of the tool `name` begins. Calls are numbered from 0. `id` is the one that the model wrote, if its format has ids."""

    index: int
    name: str
    id: str | None = None


class CallArguments(Struct, frozen=True, gc=False):
    """A piece of a call's arguments. All pieces of a call, joined, are a JSON object."""

    index: int
    text: str


class CallEnd(Struct, frozen=True, gc=False):
    """The call is complete, and its arguments are a JSON object."""

    index: int


class CallBroken(Struct, frozen=True, gc=False):
    """What began as a call is not one. `text` is all that the model wrote of it, from the start; it is shown as text."""

    index: int
    text: str


Part = str | Reasoning | CallBegin | CallArguments | CallEnd | CallBroken
"""A piece of an answer, in the order in which the model wrote it. A plain `str` is text; it is never empty."""


class OutputParser(Protocol):
    """Text in, parts out. For any split of the same text the parts are the same, once neighbours of one kind are joined.

    Nothing is lost: what turns out not to be a call comes back as text. It never raises.
    """

    def feed(self, text: str) -> Sequence[Part]:
        """The parts that this text completes. Text that may still become something else waits."""

    def finish(self) -> Sequence[Part]:
        """The parts of what still waits, at the end of the text."""


def joined(parts: Iterable[Part]) -> list[Part]:
    """The parts with neighbouring pieces of one kind joined: the same for any split of the text."""
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


def without_broken_calls(parts: Sequence[Part]) -> list[Part]:
    """Replaces each broken call by its text."""
    broken = {part.index for part in parts if isinstance(part, CallBroken)}
    kept = [part for part in parts if not (isinstance(part, CallBegin | CallArguments | CallEnd) and part.index in broken)]
    return [part.text if isinstance(part, CallBroken) else part for part in kept]


def _kind(part: Part) -> type | int:
    """Equal for parts that can be joined. Arguments are joined within one call."""
    return part.index if type(part) is CallArguments else type(part)
