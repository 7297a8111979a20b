"""Where the tensors of a checkpoint go."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from penstock.wire.errors import ConfigError

Parts = tuple[tuple[str, int], ...]
"""Names of weights that are joined into one matrix, with the rows of each."""


class Places:
    """Where each tensor of a checkpoint goes. All memory is there first, and each tensor is copied to its place when it is read.

    So loading takes little more memory than the model: joining tensors that were loaded before would leave as much again unused.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._places: dict[str, tuple[Tensor, tuple[int, ...]]] = {}

    def vector(self, name: str, size: int) -> Tensor:
        return self.vectors({name: 1}, size).view(size)

    def vectors(self, counts: dict[str, int], size: int) -> Tensor:
        """One row for each, as often as its count says."""
        joined = self._empty(sum(counts.values()), size)
        for (name, _), place in zip(counts.items(), torch.split(joined, list(counts.values())), strict=True):
            self._places[name] = place, (size,)
        return joined

    def bias(self, parts: Parts) -> Tensor:
        joined = self._empty(sum(size for _, size in parts))
        for (name, size), place in zip(parts, torch.split(joined, [size for _, size in parts]), strict=True):
            self._places[f"{name}.bias"] = place, (size,)
        return joined

    def matrix(self, name: str, rows: int, columns: int) -> Tensor:
        return self.joined(((name, rows),), columns)

    def joined(self, parts: Parts, columns: int) -> Tensor:
        """As [in, out]. On a CPU also in memory: batches of 8 to 16 rows are then up to twice as fast."""
        rows = sum(size for _, size in parts)
        matrix = self._empty(columns, rows) if self._device.type == "cpu" else self._empty(rows, columns).t()
        for (name, size), place in zip(parts, torch.split(matrix.t(), [size for _, size in parts]), strict=True):
            self._places[f"{name}.weight"] = place, (size, columns)
        return matrix

    @torch.no_grad()
    def fill(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Each tensor must be there once. One without a place would mean that a part of the model is ignored."""
        unknown: list[str] = []
        for name, tensor in weights:
            if name not in self._places:
                unknown.append(name)
                continue
            place, shape = self._places.pop(name)
            if tuple(tensor.shape) != shape:
                raise ConfigError(f"the weight {name!r} has shape {tuple(tensor.shape)}; the model's configuration says {shape}")
            place.copy_(tensor)
        if self._places:
            raise ConfigError(f"the model has no weight {next(iter(self._places))!r}, which its configuration needs")
        if unknown:
            names = ", ".join(sorted(unknown)[:3])
            raise ConfigError(f"the model has {len(unknown)} weights that its configuration does not need, such as {names}")

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)
