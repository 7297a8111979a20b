"""What the settings of all image processors have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.wire.errors import ConfigError

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

COLOURS = 3
MAX_RESAMPLE = 5
"""The numbers of Pillow's filters."""


def number(given: Mapping[str, Any], key: str, default: float) -> float:
    """A whole number above zero."""
    value = default if given.get(key) is None else given[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 1 or value != int(value):
        raise ConfigError(f"the image processor's `{key}` is {value!r}: expected a whole number above zero")
    return float(value)


def normalisation(given: Mapping[str, Any], resample: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, float]:
    """The filter that resizes, and what is done to the value v of a colour: (v x rescale - mean) / std.

    The tower does it, but features depend on it, so it is a part of the rules.
    """
    for key in ("do_resize", "do_convert_rgb"):
        if given.get(key, True) is False:
            raise ConfigError(f"the image processor's `{key}` is false: expected true")
    chosen = given.get("resample", resample)
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen <= MAX_RESAMPLE:
        raise ConfigError(f"the image processor's `resample` is {chosen!r}: expected a number from 0 to {MAX_RESAMPLE}")
    rescale = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1.0
    is_normal = given.get("do_normalize", True)
    means = _colours(given, "image_mean", mean) if is_normal else [0.0] * COLOURS
    stds = _colours(given, "image_std", std) if is_normal else [1.0] * COLOURS
    settings = {"resample": float(chosen), "rescale": float(rescale)}
    return settings | {f"{key}_{index}": value for key, each in (("mean", means), ("std", stds)) for index, value in enumerate(each)}


def _colours(given: Mapping[str, Any], key: str, default: Sequence[float]) -> list[float]:
    values = default if given.get(key) is None else given[key]
    if not isinstance(values, list | tuple) or len(values) != COLOURS or not all(isinstance(each, int | float) for each in values):
        raise ConfigError(f"the image processor's `{key}` is {values!r}: expected {COLOURS} numbers")
    return [float(each) for each in values]
