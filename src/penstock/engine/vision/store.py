"""Slots for the features of images, in host memory: a tower or a transport writes them, steps read them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.engine.host_slots import pin, unpin
from penstock.engine.page_memory import PageMemory
from penstock.kv.features import SLOT_POSITIONS, slots_of


class Part(NamedTuple):
    """The features of `length` positions of an image, from its position `first` on."""

    slots: Sequence[int]
    first: int
    length: int


class FeatureStore:
    """`width` numbers for each position. For a GPU the memory is pinned, so that its copies do not wait for the processor."""

    def __init__(self, slots: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots = slots
        self.memory = PageMemory(1, slots, slot_bytes(width, dtype))
        """What a transport may touch."""
        self._device = device
        self._rows = self.memory.tensor.view(dtype).view(slots * SLOT_POSITIONS, width)
        if device.type == "cuda":
            weakref.finalize(self, unpin, pin(self.memory.tensor))

    def write(self, slots: Sequence[int], features: Tensor) -> None:
        """Puts the features of an image into its slots. On a GPU this goes on behind it, in the current stream. Raises ValueError when they
        are not as many as the slots are for."""
        if slots_of(len(features)) != len(slots):
            raise ValueError(f"the tower makes features of {len(features)} positions, which do not fill {len(slots)} slots")
        done = 0
        for row, count in _runs(Part(slots, 0, len(features))):
            self._rows[row : row + count].copy_(features[done : done + count], non_blocking=True)
            done += count

    def gather(self, parts: Iterable[Part]) -> Tensor:
        """The features of these positions on the device of the model, one below the other. On a GPU this goes on behind it, in the current
        stream: until a step has ended, the slots must not change."""
        runs = [run for part in parts for run in _runs(part)]
        found = torch.empty(sum([count for _, count in runs]), self._rows.shape[1], dtype=self._rows.dtype, device=self._device)
        done = 0
        for row, count in runs:
            found[done : done + count].copy_(self._rows[row : row + count], non_blocking=True)
            done += count
        return found


def slot_bytes(width: int, dtype: torch.dtype) -> int:
    return SLOT_POSITIONS * width * dtype.itemsize


def _runs(part: Part) -> Iterator[tuple[int, int]]:
    """The rows of a part, as few runs of (first row, number of rows) as possible."""
    place, end, begun, count = part.first, part.first + part.length, -1, 0
    while place < end:
        row = part.slots[place // SLOT_POSITIONS] * SLOT_POSITIONS + place % SLOT_POSITIONS
        some = min(end - place, SLOT_POSITIONS - place % SLOT_POSITIONS)
        if row != begun + count:
            if count:
                yield begun, count
            begun, count = row, 0
        count += some
        place += some
    if count:
        yield begun, count
