"""Leases: how long somebody would like KV to be kept. A preference, never a lock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.kv.radix import Node


class Lease:
    """A wish to keep some nodes until `ends_at`. Its weight falls from one to nothing over its `seconds`.

    A lease that is held (its session has a turn running) has its full weight and no end.
    """

    __slots__ = ("ends_at", "is_session", "nodes", "seconds")

    def __init__(self, seconds: float, ends_at: float = math.inf, *, is_session: bool = False) -> None:
        self.is_session = is_session
        self.seconds = seconds
        self.ends_at = ends_at
        self.nodes: set[Node] = set()

    def weight(self, now: float) -> float:
        if self.ends_at == math.inf:
            return 1.0
        return min(1.0, max(0.0, (self.ends_at - now) / self.seconds)) if self.seconds > 0 else 0.0
