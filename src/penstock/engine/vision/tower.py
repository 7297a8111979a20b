"""What an engine or an encode worker needs of a vision tower."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from penstock.engine.vision.shape import Idefics3Shape, Qwen25VLShape, QwenVLShape
from penstock.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from penstock.engine.checkpoints.checkpoint import Checkpoint


class Tower(Protocol):
    """Makes features of images. One thread calls it.

    `width` is the size of the text model's hidden state. Features have `levels` of that width for each position: the first replaces the
    embedding of a token, the others are added behind the first layers of the text model, one behind each.
    """

    on_progress: Callable[[], None]
    """Called between layers, in the thread that computes."""

    @property
    def width(self) -> int: ...

    @property
    def levels(self) -> int: ...

    def positions(self, grid: tuple[int, int]) -> int:
        """How many positions an image with this grid has."""

    def encode(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> list[Tensor]:
        """The features of each image, [positions, width × levels], on the tower's device. An image is its prepared pixels (see Picture)
        and its grid (see ImageSpan). What is made of an image does not depend on the others, to the bit. Raises ValueError when the pixels
        do not fit the grid."""


def make_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower:
    """The tower of a model that has one."""
    # Imported here, since it takes long.
    import torch

    from penstock.engine.vision.idefics3 import Idefics3Tower
    from penstock.engine.vision.qwen25_vl import Qwen25VLTower
    from penstock.engine.vision.qwen_vl import QwenVLTower

    if device.type == "cuda":
        # As for the text model: cuDNN's attention plans every new shape, which takes a tenth of a second.
        torch.backends.cuda.enable_cudnn_sdp(False)
    match checkpoint.tower:
        case Idefics3Shape() as shape:
            return Idefics3Tower(shape, checkpoint.tower_tensors(), dtype, device)
        case QwenVLShape() as shape:
            return QwenVLTower(shape, checkpoint.tower_tensors(), dtype, device)
        case Qwen25VLShape() as shape:
            return Qwen25VLTower(shape, checkpoint.tower_tensors(), dtype, device)
        case None:
            raise ConfigError("the model has no vision tower: expected one that reads images")
