"""What the towers share: normalised patches, and the layers that all of them have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, rms_norm, scaled_dot_product_attention, silu

from penstock.engine.checkpoints.places import Parts, Places
from penstock.engine.vision.shape import Approximation, Encoder, PixelScale

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, [patches, 1, head size]."""
Groups = Sequence[tuple[int, int]]
"""Patches in the order of rows: groups of windows of the same size, with the windows of each and the patches of a window. A patch sees all
others of its window."""
CHANNELS = 3
# Rows whose widest numbers are in memory at once: with 4,304 of them to a row, 140 MB in float32.
MAX_ROWS = 8192


@dataclass(frozen=True)
class Linear:
    """The matrix is [in, out]."""

    matrix: Tensor
    bias: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        return torch.addmm(self.bias, rows, self.matrix)


@dataclass(frozen=True)
class Norm:
    """Without a bias, it does not take the mean away, either."""

    weight: Tensor
    bias: Tensor | None
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        if self.bias is None:
            return rms_norm(rows, self.weight.shape, self.weight, self.eps)
        return layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class Mlp:
    up: Linear
    down: Linear
    gelu: Approximation

    def __call__(self, rows: Tensor) -> Tensor:
        return self.down(gelu(self.up(rows), approximate=self.gelu))


@dataclass(frozen=True)
class GatedMlp:
    gate_up: Linear
    down: Linear

    def __call__(self, rows: Tensor) -> Tensor:
        gate, up = self.gate_up(rows).chunk(2, -1)
        return self.down(silu(gate).mul_(up))


@dataclass(frozen=True)
class Block:
    """One layer."""

    attention_norm: Norm
    qkv: Linear
    output: Linear
    mlp_norm: Norm
    mlp: Mlp | GatedMlp
    heads: int

    def __call__(self, hidden: Tensor, groups: Groups, rotation: Rotation | None = None) -> Tensor:
        """`hidden` is [patches, size]. It is changed."""
        hidden += self.output(self._attend(self.qkv(self.attention_norm(hidden)), groups, rotation))
        for rows in hidden.split_with_sizes(_pieces(len(hidden))):
            rows += self.mlp(self.mlp_norm(rows))
        return hidden

    def _attend(self, qkv: Tensor, groups: Groups, rotation: Rotation | None) -> Tensor:
        queries, keys, values = qkv.view(len(qkv), 3, self.heads, -1).unbind(1)
        if rotation is not None:
            queries, keys = _rotated(queries, rotation), _rotated(keys, rotation)
        parts = [each.split_with_sizes([windows * patches for windows, patches in groups]) for each in (queries, keys, values)]
        seen = [_attend(windows, *part) for (windows, _), *part in zip(groups, *parts, strict=True)]
        return seen[0] if len(seen) == 1 else torch.cat(seen)


def _attend(windows: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention within each of these windows, of [patches, heads, head size]."""
    query, key, value = (each.reshape(windows, -1, *each.shape[1:]).transpose(1, 2) for each in (queries, keys, values))
    return scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(len(queries), -1)


def linear(places: Places, parts: Parts, columns: int) -> Linear:
    return Linear(places.joined(parts, columns), places.bias(parts))


def norm(places: Places, name: str, size: int, eps: float, *, has_bias: bool = True) -> Norm:
    return Norm(places.vector(f"{name}.weight", size), places.vector(f"{name}.bias", size) if has_bias else None, eps)


def patch_embedding(places: Places, name: str, encoder: Encoder) -> Linear:
    return linear(places, ((name, encoder.hidden_size),), CHANNELS * encoder.patch**2)


def flat_patches(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The weights, those of a convolution as a matrix: rows of pixels, each with its channels. A picture is shown as often as the
    convolution has frames, so that their sum is what counts."""
    for name, tensor in weights:
        summed = tensor.float().sum(2) if tensor.dim() == 5 else tensor
        yield name, summed.permute(0, 2, 3, 1).flatten(1) if summed.dim() == 4 else summed


class PatchReader:
    """Turns bytes into the normalised patches of a tower, [patches, patch × patch × channels]."""

    def __init__(self, scale: PixelScale, patch: int, dtype: torch.dtype, device: torch.device) -> None:
        deviation = torch.tensor(scale.deviation, dtype=torch.float64)
        self._factor = (scale.factor / deviation).repeat(patch**2).float().to(device)
        self._shift = (-torch.tensor(scale.mean, dtype=torch.float64) / deviation).repeat(patch**2).float().to(device)
        self._dtype, self._device = dtype, device

    def pixels(self, data: bytes, shape: Sequence[int]) -> Tensor:
        """The bytes of an image, on the device. Raises ValueError when there are more or fewer."""
        if len(data) != math.prod(shape):
            raise ValueError(f"an image has {len(data)} bytes: expected {math.prod(shape)}")
        # A copy: torch wants memory that it may write to.
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device).view(*shape)

    def patches(self, pixels: Tensor) -> Tensor:
        """Of pixels in the order of the result."""
        numbers = pixels.reshape(-1, len(self._factor)).float()
        return torch.addcmul(self._shift, numbers, self._factor).to(self._dtype)


def _rotated(heads: Tensor, rotation: Rotation) -> Tensor:
    """In float32, whatever the type."""
    cosines, sines = rotation
    wide = heads.float()
    first, second = wide.chunk(2, -1)
    return (wide * cosines + torch.cat((-second, first), -1) * sines).to(heads.dtype)


def _pieces(rows: int) -> list[int]:
    whole, rest = divmod(rows, MAX_ROWS)
    return [MAX_ROWS] * whole + [rest] * bool(rest)
