"""How models are asked to fill in what is missing between two texts: which of their tokens say so, and in what order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class InfillStyle(NamedTuple):
    """Three tokens, or two, and which text comes first. `middle` stands where the model begins to write, if it has a token for that."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool = False

    def join(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        before, after = [self.prefix, *prefix], [self.suffix, *suffix]
        ending = [] if self.middle is None else [self.middle]
        return [*after, *before, *ending] if self.suffix_first else [*before, *after, *ending]


class _Known(NamedTuple):
    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False


_KNOWN = (
    # StarCoder, Granite, Stable Code, SmolLM
    _Known("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Known("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # Qwen Coder, CodeGemma
    _Known("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # DeepSeek Coder
    _Known("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    # Code Llama
    _Known("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    # Codestral
    _Known("[PREFIX]", "[SUFFIX]", None, suffix_first=True),
)


def find_infill_style(token_id: Callable[[str], int | None]) -> InfillStyle | None:
    """The first known one whose tokens the vocabulary has, all of them."""
    for known in _KNOWN:
        prefix, suffix = token_id(known.prefix), token_id(known.suffix)
        middle = None if known.middle is None else token_id(known.middle)
        if prefix is not None and suffix is not None and (middle is not None or known.middle is None):
            return InfillStyle(prefix, suffix, middle, known.suffix_first)
    return None
