"""Which encode worker makes the features of an image. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

SPARE_IMAGES = 2
"""An image goes past its own encode worker if that one has more waiting than another, by this many images of its size."""


def choose_encoder(name: bytes, positions: int, loads: Mapping[str, int]) -> str | None:
    """By rendezvous hashing: all front ends send an image to the same worker, which may have its features. `loads` has the positions that
    each worker must encode first; one that has far more than the least is passed over. None: there is no worker."""
    if not loads:
        return None
    most = min(loads.values()) + SPARE_IMAGES * positions
    return max((worker for worker, load in loads.items() if load <= most), key=lambda worker: _weight(name, worker))


def _weight(name: bytes, worker: str) -> bytes:
    return blake2b(worker.encode(), digest_size=8, key=name).digest()
