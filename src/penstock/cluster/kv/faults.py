"""Faults that a source injects into its transfers, for tests: with the probabilities of the settings, and a seed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass

from penstock.config.engines import TransferFault, TransferFaults


@dataclass(frozen=True)
class Fate:
    """What happens to a transfer, before this block of it."""

    kind: TransferFault | None = None
    block: int = 0


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Faults:
    """Decides the fate of each transfer when it begins. `kill` ends this worker."""

    def __init__(self, chances: TransferFaults | None = None, kill: Callable[[], None] = _kill) -> None:
        self.kill = kill
        self._chances = chances
        self._random = random.Random(0 if chances is None else chances.seed)  # noqa: S311 - a test is repeated with the same seed

    def draw(self, blocks: int) -> Fate:
        if self._chances is None:
            return Fate()
        number, block = self._random.random(), self._random.randrange(blocks)
        for kind, chance in self._chances.by_kind():
            if number < chance:
                return Fate(kind, block)
            number -= chance
        return Fate()
