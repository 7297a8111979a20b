"""How fast KV comes from other workers, measured while it comes."""

from __future__ import annotations

GAP_SECONDS = 0.02
"""A longer pause counts as idle: nothing was being sent."""
WINDOW_SECONDS = 2.0
"""Time of transfer after which older measurements count half."""
MIN_SECONDS = 0.001
"""No rate is known before so much time of transfer."""


class Rate:
    """Bytes per second of all transfers together. Times are those of one clock."""

    def __init__(self) -> None:
        self.total_bytes = 0
        self.total_seconds = 0.0
        self._bytes = 0.0
        self._seconds = 0.0
        self._last = 0.0

    @property
    def per_second(self) -> float:
        """0 while it is unknown."""
        return self._bytes / self._seconds if self._seconds >= MIN_SECONDS else 0.0

    def begin(self, now: float) -> None:
        """Blocks are announced. The pause before is not counted if it was long."""
        if now - self._last > GAP_SECONDS:
            self._last = now

    def add(self, size: int, now: float) -> None:
        """They are here."""
        seconds, self._last = now - self._last, now
        self.total_bytes += size
        self.total_seconds += seconds
        self._bytes += size
        self._seconds += seconds
        if self._seconds > WINDOW_SECONDS:
            self._bytes /= 2
            self._seconds /= 2
