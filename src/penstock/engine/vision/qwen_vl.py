"""The tower of Qwen3-VL: an encoder over all patches of an image, with positions by row and column, and features from several depths."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from penstock.engine.checkpoints.places import Places
from penstock.engine.vision.blocks import (
    CHANNELS,
    Block,
    Mlp,
    Norm,
    PatchReader,
    Rotation,
    flat_patches,
    linear,
    norm,
    patch_embedding,
)
from penstock.engine.vision.shape import Encoder, Qwen25VLShape, QwenVLShape


@dataclass(frozen=True)
class Merger:
    """Makes one position of each square of patches. The norm is over a patch or, in those of the deeper levels, over a square."""

    norm: Norm
    mlp: Mlp

    def __call__(self, hidden: Tensor) -> Tensor:
        size = self.mlp.up.matrix.shape[0]
        return self.mlp(self.norm(hidden.view(-1, len(self.norm.weight))).view(-1, size))


class QwenVLTower:
    """A `Tower`. The pixels of an image are its rows. Patches are ordered by squares of those that are merged."""

    def __init__(self, shape: QwenVLShape, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> None:
        encoder, places = shape.encoder, Places(dtype, device)
        self.width, self.levels = shape.width, shape.levels
        self._shape = shape
        self._embedding = patch_embedding(places, "visual.patch_embed.proj", encoder)
        table = places.matrix("visual.pos_embed", shape.table_side**2, encoder.hidden_size)
        self._blocks = [_block(places, encoder, f"visual.blocks.{index}.") for index in range(encoder.layers)]
        self._merger = _merger(places, shape, "visual.merger.", encoder.hidden_size)
        wide = encoder.hidden_size * shape.merge**2
        mergers = [_merger(places, shape, f"visual.deepstack_merger_list.{index}.", wide) for index in range(len(shape.level_layers))]
        self._mergers = dict(zip(shape.level_layers, mergers, strict=True))
        places.fill(flat_patches(weights))
        self._table = table.float().reshape(1, encoder.hidden_size, shape.table_side, shape.table_side)
        self._reader = PatchReader(shape.pixels, encoder.patch, dtype, device)
        self._rates = turn_rates(shape, device)
        self.on_progress: Callable[[], None] = lambda: None

    def positions(self, grid: tuple[int, int]) -> int:
        return self._shape.positions(grid)

    @torch.inference_mode()
    def encode(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> list[Tensor]:
        return [self._through(data, grid) for data, grid in images]

    def _through(self, data: bytes, grid: tuple[int, int]) -> Tensor:
        hidden = self._embedding(patches_of(self._reader, self._shape, data, grid))
        hidden += self._learned_positions(grid)
        rotation = rotation_of(self._rates, grid, self._shape.merge)
        levels: list[Tensor] = []
        for index, block in enumerate(self._blocks):
            self.on_progress()
            hidden = block(hidden, [(1, len(hidden))], rotation)
            if index in self._mergers:
                levels.append(self._mergers[index](hidden))
        return torch.cat((self._merger(hidden), *levels), -1)

    def _learned_positions(self, grid: tuple[int, int]) -> Tensor:
        """Those of the table, stretched over the image from corner to corner."""
        merge = self._shape.merge
        rows, columns = grid
        stretched = interpolate(self._table, (rows * merge, columns * merge), mode="bilinear", align_corners=True)[0]
        return _by_squares(stretched.permute(1, 2, 0), grid, merge).to(self._embedding.bias.dtype)


def patches_of(reader: PatchReader, shape: QwenVLShape | Qwen25VLShape, data: bytes, grid: tuple[int, int]) -> Tensor:
    rows, columns = grid
    pixels = reader.pixels(data, (rows, shape.merge, shape.encoder.patch, columns, shape.merge, shape.encoder.patch, CHANNELS))
    return reader.patches(pixels.permute(0, 3, 1, 4, 2, 5, 6))


def turn_rates(shape: QwenVLShape | Qwen25VLShape, device: torch.device) -> Tensor:
    """How far each pair of a head turns from one row or column to the next."""
    pairs = torch.arange(shape.encoder.head_dim // 4, device=device)
    return shape.rope_theta ** (-pairs / len(pairs))


def rotation_of(rates: Tensor, grid: tuple[int, int], merge: int) -> Rotation:
    """The first half of a head's pairs turns by row, the other by column."""
    rows, columns = torch.arange(grid[0] * merge, device=rates.device), torch.arange(grid[1] * merge, device=rates.device)
    places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), -1)
    angles = (_by_squares(places, grid, merge)[:, :, None] * rates).flatten(1)
    angles = torch.cat((angles, angles), -1)[:, None]
    return angles.cos(), angles.sin()


def _by_squares(patches: Tensor, grid: tuple[int, int], merge: int) -> Tensor:
    """[rows, columns, numbers] of patches, square by square, as [patches, numbers]."""
    rows, columns = grid
    return patches.reshape(rows, merge, columns, merge, -1).transpose(1, 2).flatten(0, 3)


def _block(places: Places, encoder: Encoder, prefix: str) -> Block:
    size, wide = encoder.hidden_size, encoder.intermediate_size
    up, down = linear(places, ((f"{prefix}mlp.linear_fc1", wide),), size), linear(places, ((f"{prefix}mlp.linear_fc2", size),), wide)
    return Block(
        attention_norm=norm(places, f"{prefix}norm1", size, encoder.norm_eps),
        qkv=linear(places, ((f"{prefix}attn.qkv", 3 * size),), size),
        output=linear(places, ((f"{prefix}attn.proj", size),), size),
        mlp_norm=norm(places, f"{prefix}norm2", size, encoder.norm_eps),
        mlp=Mlp(up, down, encoder.gelu),
        heads=encoder.heads,
    )


def _merger(places: Places, shape: QwenVLShape, prefix: str, norm_size: int) -> Merger:
    wide = shape.encoder.hidden_size * shape.merge**2
    up, down = linear(places, ((f"{prefix}linear_fc1", wide),), wide), linear(places, ((f"{prefix}linear_fc2", shape.width),), wide)
    return Merger(norm(places, f"{prefix}norm", norm_size, shape.encoder.norm_eps), Mlp(up, down, "none"))
