"""Measured rates: how fast prompts are computed, and KV is pulled, saved and loaded."""

from __future__ import annotations

import math

# A new measurement counts this much, the earlier ones together the rest.
NEWEST_SHARE = 0.25


class Rate:
    """Something per second: an average over the latest measurements, weighted by time. 0 until the first one."""

    __slots__ = ("measured_at", "per_second")

    def __init__(self) -> None:
        self.per_second = 0.0
        self.measured_at = -math.inf

    def measure(self, amount: float, seconds: float, now: float) -> None:
        """`amount` took `seconds`. Nothing, or no time at all, is no measurement."""
        if amount <= 0 or seconds <= 0:
            return
        # Times are averaged, not rates: one measurement that was much too fast would otherwise hide many slow ones.
        latest = seconds / amount
        earlier = 1 / self.per_second if self.per_second else latest
        self.per_second = 1 / (earlier + NEWEST_SHARE * (latest - earlier))
        self.measured_at = now
