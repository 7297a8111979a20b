"""What an engine or an encode worker needs of a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Tower(Protocol):
    """Makes features of images. One thread calls it.

    `width` is the size of the text model's hidden state. Features have `levels` of that width for each position: the first replaces the
    embedding of a token, the others are added behind the first layers of the text model, one behind each.
    """

    @property
    def width(self) -> int: ...

    @property
    def levels(self) -> int: ...

    def positions(self, grid: tuple[int, int]) -> int:
        """How many positions an image with this grid has."""

    def encode(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> list[Tensor]:
        """The features of each image, [positions, width × levels], on the tower's device. An image is its prepared pixels (see Picture)
        and its grid (see ImageSpan). What is made of an image does not depend on the others, but for rounding. Raises ValueError when the
        pixels do not fit the grid."""
