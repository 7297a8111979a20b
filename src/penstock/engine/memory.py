"""Memory that runs out: how it is noticed, how a step is made smaller, and how large the next ones are."""

from __future__ import annotations

import gc
from collections.abc import Sequence as Items

import torch

from penstock.engine.scheduler import S, Work

# How a processor's allocator and the GPU's libraries say it, where torch has no type for it.
_WORDS = ("can't allocate memory", "not enough memory", "ALLOC_FAILED")
# After this many steps without a failure a step may be twice as large again.
STEPS_TO_GROW = 256


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(words in str(error) for words in _WORDS)


def release_unused(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the device."""
    gc.collect()
    if device.type != "cpu":
        torch.cuda.empty_cache()


def smaller(work: Items[Work[S]], page_size: int) -> list[list[Work[S]]]:
    """Steps that need less memory than one with all of this work: both halves of it, or half of a single prompt's piece.

    Empty if it cannot be smaller: a piece of one page is small enough for any device that has room for the model.
    """
    if len(work) > 1:
        half = sum(item.length for item in work) / 2
        first, rows = 1, work[0].length
        while first < len(work) - 1 and rows + work[first].length <= half:
            rows += work[first].length
            first += 1
        return [list(work[:first]), list(work[first:])]
    sequence, length = work[0]
    return [[Work(sequence, length // 2)]] if length > page_size else []


class StepBudget:
    """How many tokens a step may compute. Halved when memory runs out; doubled, up to the setting, after STEPS_TO_GROW steps."""

    def __init__(self, tokens: int, least: int) -> None:
        self.tokens = tokens
        self._most = tokens
        self._least = min(least, tokens)
        self._steps = 0

    def failed(self, tokens: int) -> None:
        """Memory ran out in a step of this many tokens."""
        self.tokens = max(self._least, min(self.tokens, tokens // 2))
        self._steps = 0

    def succeeded(self) -> None:
        self._steps += 1
        if self._steps >= STEPS_TO_GROW:
            self._steps = 0
            self.tokens = min(2 * self.tokens, self._most)
