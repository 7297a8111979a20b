"""The tower of Qwen2.5-VL: most layers see only windows of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from penstock.engine.checkpoints.places import Places
from penstock.engine.vision.blocks import CHANNELS, Block, GatedMlp, Groups, Mlp, PatchReader, flat_patches, linear, norm
from penstock.engine.vision.qwen_vl import Merger, patches_of, rotation_of, turn_rates
from penstock.engine.vision.shape import Encoder, Qwen25VLShape


class Qwen25VLTower:
    """A `Tower`. The pixels of an image are its rows."""

    def __init__(self, shape: Qwen25VLShape, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> None:
        encoder, places = shape.encoder, Places(dtype, device)
        self.width, self.levels = shape.width, shape.levels
        self._shape = shape
        self._embedding = places.matrix("visual.patch_embed.proj", encoder.hidden_size, CHANNELS * encoder.patch**2)
        self._blocks = [_block(places, encoder, f"visual.blocks.{index}.") for index in range(encoder.layers)]
        wide = encoder.hidden_size * shape.merge**2
        up, down = linear(places, (("visual.merger.mlp.0", wide),), wide), linear(places, (("visual.merger.mlp.2", shape.width),), wide)
        ln = norm(places, "visual.merger.ln_q", encoder.hidden_size, encoder.norm_eps, has_bias=False)
        self._merger = Merger(ln, Mlp(up, down, "none"))
        places.fill(flat_patches(weights))
        self._reader = PatchReader(shape.pixels, encoder.patch, dtype, device)
        self._rates = turn_rates(shape, device)
        self.on_progress: Callable[[], None] = lambda: None

    def positions(self, grid: tuple[int, int]) -> int:
        return self._shape.positions(grid)

    @torch.inference_mode()
    def encode(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> list[Tensor]:
        return [self._through(data, grid) for data, grid in images]

    def _through(self, data: bytes, grid: tuple[int, int]) -> Tensor:
        """Patches are ordered by window, and put back when they are merged."""
        merge = self._shape.merge
        order, windows = _windows(grid, self._shape.window, merge**2)
        order = order.to(self._rates.device)

        def by_window(patches: Tensor) -> Tensor:
            return patches.view(-1, merge**2, *patches.shape[1:]).index_select(0, order).flatten(0, 1)

        hidden = by_window(torch.mm(patches_of(self._reader, self._shape, data, grid), self._embedding))
        cosines, sines = rotation_of(self._rates, grid, merge)
        rotation = by_window(cosines), by_window(sines)
        for index, block in enumerate(self._blocks):
            self.on_progress()
            hidden = block(hidden, [(1, len(hidden))] if index in self._shape.full_layers else windows, rotation)
        merged = self._merger(hidden)
        return torch.empty_like(merged).index_copy_(0, order, merged)


def _windows(grid: tuple[int, int], side: int, patches: int) -> tuple[Tensor, Groups]:
    """The order of positions by window, and the groups of windows of the same size: whole ones, and what is left at the right, below, and
    in the corner. A position has `patches` patches."""
    rows, columns = grid
    order: list[Tensor] = []
    groups: list[tuple[int, int]] = []
    for band in torch.arange(rows * columns).view(rows, columns).split_with_sizes([rows - rows % side, rows % side]):
        for part in band.split_with_sizes([columns - columns % side, columns % side], 1):
            height, width = (min(side, size) for size in part.shape)
            if height and width:
                order.append(part.reshape(len(part) // height, height, -1, width).transpose(1, 2).flatten())
                groups.append((part.numel() // (height * width), height * width * patches))
    return torch.cat(order), groups


def _block(places: Places, encoder: Encoder, prefix: str) -> Block:
    size, wide = encoder.hidden_size, encoder.intermediate_size
    gate_up = ((f"{prefix}mlp.gate_proj", wide), (f"{prefix}mlp.up_proj", wide))
    return Block(
        attention_norm=norm(places, f"{prefix}norm1", size, encoder.norm_eps, has_bias=False),
        qkv=linear(places, ((f"{prefix}attn.qkv", 3 * size),), size),
        output=linear(places, ((f"{prefix}attn.proj", size),), size),
        mlp_norm=norm(places, f"{prefix}norm2", size, encoder.norm_eps, has_bias=False),
        mlp=GatedMlp(linear(places, gate_up, size), linear(places, ((f"{prefix}mlp.down_proj", size),), wide)),
        heads=encoder.heads,
    )
