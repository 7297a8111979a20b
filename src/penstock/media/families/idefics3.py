"""Images of Idefics3 and SmolVLM: tiles of one size, row by row, and after them the whole picture in one more tile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.media.families.settings import HALF, normalisation, number
from penstock.wire.errors import ConfigError, RequestError
from penstock.wire.images import ImageLayout, ImageRules

if TYPE_CHECKING:
    from PIL.Image import Image

LANCZOS = 1
MAX_SIDE = 4096
"""The processor makes no picture larger than this before it cuts tiles."""

DEFAULT_TILE = 364
DEFAULT_POSITIONS = 169

AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
PLACEHOLDER = "<image>"


def make_rules(given: Mapping[str, Any], processor: Mapping[str, Any], model: Mapping[str, Any]) -> ImageRules:
    """From the settings of the model's image processor, of its processor, and of the model."""
    tile = _edge(given, "max_image_size", DEFAULT_TILE)
    settings = {
        "longest_edge": _edge(given, "size", 4 * DEFAULT_TILE),
        "tile_size": tile,
        "tile_positions": _positions(tile, processor, model),
        "splits": float(given.get("do_image_splitting", True)),
        **normalisation(given, LANCZOS, HALF, HALF),
    }
    return ImageRules("idefics3", settings, PLACEHOLDER)


def layout(rules: ImageRules, name: bytes, size: tuple[int, int]) -> ImageLayout:
    tile, positions = int(rules.settings["tile_size"]), int(rules.settings["tile_positions"])
    _, (rows, columns) = _sizes(rules, size)
    pieces: list[str | int] = []
    before = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            pieces += [f"{before}{AROUND}<row_{row}_col_{column}>", positions]
            before = ""
        before = "\n"
    before *= 2
    pieces += [f"{before}{AROUND}{WHOLE}", positions, AROUND]
    return ImageLayout(name, tuple(pieces), (rows, columns), (tile, tile * (rows * columns + 1)))


def prepare(rules: ImageRules, image: Image) -> bytes:
    """Each tile from its top to its bottom. The processor resizes step by step, and so does this: the pixels are the same."""
    tile, resample = int(rules.settings["tile_size"]), int(rules.settings["resample"])
    resized, (rows, columns) = _sizes(rules, image.size)
    image = image.resize(resized, resample=resample)
    if rules.settings["splits"]:
        image = image.resize(_in_tiles(tile, resized), resample=resample)
    corners = [(column * tile, row * tile) for row in range(rows) for column in range(columns)]
    tiles = [image.crop((left, top, left + tile, top + tile)).tobytes() for left, top in corners]
    return b"".join([*tiles, image.resize((tile, tile), resample=resample).tobytes()])


def _sizes(rules: ImageRules, size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The size that a picture first gets, and its rows and columns of tiles: none if it is not cut."""
    tile = int(rules.settings["tile_size"])
    resized = _resized(int(rules.settings["longest_edge"]), size)
    if not rules.settings["splits"]:
        return resized, (0, 0)
    width, height = _in_tiles(tile, resized)
    if not (width and height):
        raise RequestError(f"the picture has {size[0]} x {size[1]} pixels: its sides are too unequal to be shown to the model")
    return resized, (0, 0) if (width, height) == (tile, tile) else (height // tile, width // tile)


def _resized(longest: int, size: tuple[int, int]) -> tuple[int, int]:
    """The longer side as the processor wants it, the other one even."""
    width, height = size
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height = max(height + height % 2, 1)
    else:
        width, height = int(longest * ratio), longest
        width = max(width + width % 2, 1)
    if longest <= MAX_SIDE:
        return width, height
    ratio = width / height
    return (MAX_SIDE, max(int(MAX_SIDE / ratio), 1)) if width >= height else (max(int(MAX_SIDE * ratio), 1), MAX_SIDE)


def _in_tiles(tile: int, size: tuple[int, int]) -> tuple[int, int]:
    """Sides of whole tiles."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = _up(width, tile)
        return width, _up(int(width / ratio), tile)
    height = _up(height, tile)
    return _up(int(height * ratio), tile), height


def _up(side: int, tile: int) -> int:
    return math.ceil(side / tile) * tile


def _edge(given: Mapping[str, Any], key: str, default: int) -> float:
    size = given.get(key) or {"longest_edge": default}
    if not isinstance(size, dict) or "longest_edge" not in size:
        raise ConfigError(f"the image processor's `{key}` is {size!r}: expected an object with `longest_edge`")
    return number(size, "longest_edge", default)


def _positions(tile: float, processor: Mapping[str, Any], model: Mapping[str, Any]) -> float:
    """How many positions a tile has: what the processor says must be what the model makes of one."""
    vision = model.get("vision_config")
    made = None
    if isinstance(vision, dict) and "patch_size" in vision:
        made = (tile // number(vision, "patch_size", 0)) ** 2 // number(model, "scale_factor", 2) ** 2
    said = number(processor, "image_seq_len", made or DEFAULT_POSITIONS)
    if made is not None and made != said:
        raise ConfigError(f"the processor's `image_seq_len` is {said:g}, but the model makes {made:g} positions of a tile")
    return said
