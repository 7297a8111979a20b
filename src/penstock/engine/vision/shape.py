"""What a vision tower looks like: its sizes, and how pixels become its numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

Approximation = Literal["none", "tanh"]
"""Of GELU, as torch calls it."""


@dataclass(frozen=True)
class Encoder:
    """The layers of a tower. `patch` is the side of a patch, in pixels."""

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    patch: int
    norm_eps: float = 1e-6
    gelu: Approximation = "tanh"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads


@dataclass(frozen=True)
class PixelScale:
    """A byte becomes (byte × `factor` - mean) / deviation of its channel."""

    factor: float
    mean: tuple[float, ...]
    deviation: tuple[float, ...]


@dataclass(frozen=True)
class Idefics3Shape:
    """A tile has `tile` × `tile` pixels. The learned positions are a square of `table_side`. A square of `merge` × `merge` patches becomes
    one position. `width` is the size of the text model's hidden state."""

    prefixes: ClassVar[tuple[str, ...]] = ("vision_model.", "connector.")

    encoder: Encoder
    pixels: PixelScale
    width: int
    merge: int
    tile: int
    table_side: int
    levels: int = 1

    @property
    def side(self) -> int:
        """Patches along a side of a tile."""
        return self.tile // self.encoder.patch

    def tiles(self, grid: tuple[int, int]) -> int:
        """A picture that is not cut is one tile. One that is cut is there as a whole, too."""
        rows, columns = grid
        return rows * columns + 1 if rows * columns > 1 else 1

    def positions(self, grid: tuple[int, int]) -> int:
        """How many positions an image with this grid has."""
        return self.tiles(grid) * (self.side // self.merge) ** 2


@dataclass(frozen=True)
class QwenVLShape:
    """The same names. A picture is shown `frames` times, as a film that stands still. `level_layers`: behind these layers of the tower a
    level of features is taken, beside the one behind the last."""

    prefixes: ClassVar[tuple[str, ...]] = ("visual.",)

    encoder: Encoder
    pixels: PixelScale
    width: int
    merge: int
    table_side: int
    frames: int = 2
    level_layers: tuple[int, ...] = ()
    rope_theta: float = 10_000.0

    @property
    def levels(self) -> int:
        return 1 + len(self.level_layers)

    def positions(self, grid: tuple[int, int]) -> int:
        return grid[0] * grid[1]


@dataclass(frozen=True)
class Qwen25VLShape:
    """The same names. Only `full_layers` see a whole image. In the others, a patch sees a window of `window` × `window` positions."""

    prefixes: ClassVar[tuple[str, ...]] = ("visual.",)

    encoder: Encoder
    pixels: PixelScale
    width: int
    merge: int
    window: int
    full_layers: frozenset[int]
    rope_theta: float = 10_000.0
    levels: int = 1

    def positions(self, grid: tuple[int, int]) -> int:
        return grid[0] * grid[1]


TowerShape = Idefics3Shape | QwenVLShape | Qwen25VLShape
