"""The offset ledger: the one place that knows how many tokens have passed."""

from __future__ import annotations

from penstock.stream.merge import check_contiguous
from penstock.wire.messages import Delta


class Ledger:
    """Counts the tokens that passed a point, and raises at the first gap or overlap."""

    __slots__ = ("next_offset",)

    def __init__(self, next_offset: int = 0) -> None:
        self.next_offset = next_offset

    def record(self, delta: Delta) -> None:
        """Raises GapError or OverlapError, and then has recorded nothing."""
        if delta.offset != self.next_offset:
            check_contiguous(self.next_offset, delta)
        self.next_offset += len(delta.token_ids)
