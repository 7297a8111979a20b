"""The tower of Idefics3 and SmolVLM: an encoder over square tiles, whose patches are joined into fewer positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from penstock.engine.checkpoints.places import Places
from penstock.engine.vision.blocks import (
    CHANNELS,
    Block,
    Mlp,
    PatchReader,
    flat_patches,
    linear,
    norm,
    patch_embedding,
)
from penstock.engine.vision.shape import Encoder, Idefics3Shape

# Patches that go through a layer together. More are no faster on a CPU, and each takes memory.
CPU_PATCHES = 1024
GPU_PATCHES = 16_384


class Idefics3Tower:
    """A `Tower`. The pixels of an image are its tiles, row by row, and then the whole picture as one more tile."""

    def __init__(self, shape: Idefics3Shape, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> None:
        encoder, places = shape.encoder, Places(dtype, device)
        self.width, self.levels = shape.width, shape.levels
        self._shape = shape
        model = "vision_model."
        self._embedding = patch_embedding(places, f"{model}embeddings.patch_embedding", encoder)
        table = places.matrix(f"{model}embeddings.position_embedding", shape.table_side**2, encoder.hidden_size)
        self._blocks = [_block(places, encoder, f"{model}encoder.layers.{index}.") for index in range(encoder.layers)]
        self._norm = norm(places, f"{model}post_layernorm", encoder.hidden_size, encoder.norm_eps)
        self._projection = places.matrix("connector.modality_projection.proj", shape.width, encoder.hidden_size * shape.merge**2)
        places.fill(flat_patches(weights))
        self._table = table.t().index_select(0, _position_ids(shape.side, shape.table_side).to(device))
        self._reader = PatchReader(shape.pixels, encoder.patch, dtype, device)
        self._tiles_at_once = max(1, (CPU_PATCHES if device.type == "cpu" else GPU_PATCHES) // shape.side**2)
        self.on_progress: Callable[[], None] = lambda: None

    def positions(self, grid: tuple[int, int]) -> int:
        return self._shape.positions(grid)

    @torch.inference_mode()
    def encode(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> list[Tensor]:
        return [self._features(data, grid) for data, grid in images]

    def _features(self, data: bytes, grid: tuple[int, int]) -> Tensor:
        """Tiles go through together only with those of the same image: so its features are the same to the bit whenever they are made."""
        tile, most = self._shape.tile, self._tiles_at_once
        tiles = self._reader.pixels(data, (self._shape.tiles(grid), tile, tile, CHANNELS))
        return torch.cat([self._through(tiles[first : first + most]) for first in range(0, len(tiles), most)])

    def _through(self, tiles: Tensor) -> Tensor:
        """The features of these tiles, one below the other."""
        count, side, patch, merge = len(tiles), self._shape.side, self._shape.encoder.patch, self._shape.merge
        cut = tiles.view(count, side, patch, side, patch, CHANNELS).transpose(2, 3)
        hidden = self._embedding(self._reader.patches(cut)).view(count, side**2, -1).add_(self._table).flatten(0, 1)
        for block in self._blocks:
            self.on_progress()
            hidden = block(hidden, [(count, side**2)])
        squares = self._norm(hidden).view(count, side // merge, merge, side // merge, merge, -1).transpose(2, 3)
        return torch.mm(squares.reshape(-1, self._projection.shape[0]), self._projection)


def _block(places: Places, encoder: Encoder, prefix: str) -> Block:
    size, wide = encoder.hidden_size, encoder.intermediate_size
    attention = f"{prefix}self_attn."
    return Block(
        attention_norm=norm(places, f"{prefix}layer_norm1", size, encoder.norm_eps),
        qkv=linear(places, tuple((f"{attention}{name}_proj", size) for name in "qkv"), size),
        output=linear(places, ((f"{attention}out_proj", size),), size),
        mlp_norm=norm(places, f"{prefix}layer_norm2", size, encoder.norm_eps),
        mlp=Mlp(linear(places, ((f"{prefix}mlp.fc1", wide),), size), linear(places, ((f"{prefix}mlp.fc2", size),), wide), encoder.gelu),
        heads=encoder.heads,
    )


def _position_ids(side: int, table_side: int) -> Tensor:
    """Which learned position each patch of a tile has, where the table may have another size. Patches at fractions of a side fall between
    those of the table: in float32, since models are trained with its rounding."""
    fractions = (torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))).clamp(max=1.0 - 1e-6)
    bounds = torch.arange(1 / table_side, 1.0, 1 / table_side)
    places = torch.bucketize(fractions, bounds, right=True)
    return (places[:, None] * table_side + places).flatten()
