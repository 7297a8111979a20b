"""The one random number that a token is drawn with: a function of (seed, position) and of nothing else.

So the same request gives the same tokens alone or in a batch, after a preemption, and on another worker from the middle on.
"""

from __future__ import annotations

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """In (0, 1), with 32 bits, so that it stays below one when multiplied by a sum."""
    return ((_mixed(_mixed(seed & _MASK) ^ position) >> 32) + 0.5) / 2**32


def _mixed(number: int) -> int:
    """A step of splitmix64: every bit of the number changes half of the result's."""
    number = (number + 0x9E3779B97F4A7C15) & _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
