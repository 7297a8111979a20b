"""The simulator's images: a position for each patch of pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.wire.images import ImageLayout, ImageRules

if TYPE_CHECKING:
    from PIL.Image import Image

PATCH_PIXELS = 16
MAX_SIDE = 64
"""Positions along a side."""


def make_rules(patch_pixels: int = PATCH_PIXELS, max_side: int = MAX_SIDE) -> ImageRules:
    return ImageRules("simulator", {"patch_pixels": patch_pixels, "max_side": max_side}, placeholder="")


def layout(rules: ImageRules, name: bytes, size: tuple[int, int]) -> ImageLayout:
    patch, most = int(rules.settings["patch_pixels"]), int(rules.settings["max_side"])
    columns, rows = (min(max(-(-side // patch), 1), most) for side in size)
    return ImageLayout(name, (rows * columns,), (rows, columns), size)


def prepare(rules: ImageRules, image: Image) -> bytes:  # noqa: ARG001, the simulator gets pictures as they are
    return image.tobytes()
