"""Images of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: one picture of any size, in whole patches, between two special tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.media.families.settings import CLIP_MEAN, CLIP_STD, normalisation, number
from penstock.wire.errors import ConfigError, RequestError
from penstock.wire.images import ImageLayout, ImageRules

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC = 3
MAX_ASPECT_RATIO = 200
BEFORE, AFTER = "<|vision_start|>", "<|vision_end|>"
PLACEHOLDER = f"{BEFORE}<|image_pad|>{AFTER}"


def make_rules(given: Mapping[str, Any]) -> ImageRules:
    """From the settings of the model's image processor. Files of before 2025 have `min_pixels`, later ones put it into `size`."""
    size = given.get("size") or {}
    if not isinstance(size, dict):
        raise ConfigError(f"the image processor's `size` is {size!r}: expected an object")
    pixels = {
        "min_pixels": given.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels"),
        "max_pixels": given.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels"),
    }
    settings = {
        "min_pixels": number(pixels, "min_pixels", 56 * 56),
        "max_pixels": number(pixels, "max_pixels", 28 * 28 * 1280),
        "patch_size": number(given, "patch_size", 14),
        "merge_size": number(given, "merge_size", 2),
        "temporal_patch_size": number(given, "temporal_patch_size", 2),
        **normalisation(given, BICUBIC, CLIP_MEAN, CLIP_STD),
    }
    if settings["min_pixels"] > settings["max_pixels"]:
        raise ConfigError(f"the image processor's `min_pixels` is over its `max_pixels`: {size or pixels}")
    return ImageRules("qwen_vl", settings, PLACEHOLDER)


def layout(rules: ImageRules, name: bytes, size: tuple[int, int]) -> ImageLayout:
    width, height = _resized(rules, size)
    side = _factor(rules)
    rows, columns = height // side, width // side
    return ImageLayout(name, (BEFORE, rows * columns, AFTER), (rows, columns), (width, height))


def prepare(rules: ImageRules, image: Image) -> bytes:
    return image.resize(_resized(rules, image.size), resample=int(rules.settings["resample"])).tobytes()


def _factor(rules: ImageRules) -> int:
    """The side of what one position shows, in pixels."""
    return int(rules.settings["patch_size"] * rules.settings["merge_size"])


def _resized(rules: ImageRules, size: tuple[int, int]) -> tuple[int, int]:
    """Sides of whole positions, within the limits of pixels, with nearly the same ratio."""
    ratio = max(size) / min(size)
    if ratio > MAX_ASPECT_RATIO:
        raise RequestError(
            f"the picture has {size[0]} x {size[1]} pixels: expected one side to be at most {MAX_ASPECT_RATIO} times the other"
        )
    side = _factor(rules)
    least, most = rules.settings["min_pixels"], rules.settings["max_pixels"]
    width, height = (round(each / side) * side for each in size)
    area = size[0] * size[1]
    if width * height > most:
        shrink = math.sqrt(area / most)
        width, height = (max(side, math.floor(each / shrink / side) * side) for each in size)
    elif width * height < least:
        grow = math.sqrt(least / area)
        width, height = (math.ceil(each * grow / side) * side for each in size)
    return width, height
