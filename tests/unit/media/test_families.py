"""Families of image processors: what stands for an image in a prompt, and its pixels."""

from __future__ import annotations

import pytest
from msgspec import structs
from PIL import Image

from penstock.media.families import simulator
from penstock.media.families.make import layout, prepare
from penstock.wire.errors import ConfigError
from penstock.wire.images import ImageRules

NAME = bytes(range(16))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), (1, 1)), ((16, 16), (1, 1)), ((17, 16), (1, 2)), ((160, 32), (2, 10)), ((100_000, 1), (1, 64)), ((9999, 9999), (64, 64))],
)
def test_simulated_images_have_a_position_for_each_patch(size: tuple[int, int], grid: tuple[int, int]) -> None:
    made = layout(simulator.make_rules(), NAME, size)
    assert (made.grid, made.positions, made.size) == (grid, grid[0] * grid[1], size)


def test_pixels_are_three_bytes_for_each_pixel_of_the_layout() -> None:
    rules = simulator.make_rules()
    image = Image.new("RGB", (5, 7), (1, 2, 3))
    assert prepare(rules, image) == prepare(structs.replace(rules, is_prepared=False), image) == bytes([1, 2, 3]) * 35


def test_an_unknown_family_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match="'other': expected one of"):
        layout(ImageRules("other", {}, ""), NAME, (1, 1))
