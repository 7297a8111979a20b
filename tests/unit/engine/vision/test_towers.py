"""Towers make the features that transformers makes, of any images, together or alone."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from penstock.engine.checkpoints.checkpoint import open_checkpoint
from penstock.engine.vision.blocks import MAX_ROWS, Block, Linear, Mlp, Norm
from penstock.engine.vision.idefics3 import CPU_PATCHES
from penstock.engine.vision.tower import Tower, make_tower
from tiny_vision import KINDS, PLACEHOLDERS, VARIANTS, Kind, make_picture, make_prompt, prepare, reference_features, vision_model

CPU = torch.device("cpu")
SIZES = [(40, 40), (200, 50), (64, 128), (33, 77), (300, 290)]
MODELS = [*((kind, variant) for kind in KINDS for variant in VARIANTS), ("qwen2_5_vl", "")]
EVERY_MODEL = pytest.mark.parametrize(("kind", "variant"), MODELS)


@functools.cache
def tower(directory: Path) -> Tower:
    return make_tower(open_checkpoint(directory), torch.float32, CPU)


@EVERY_MODEL
def test_features_are_those_of_transformers(kind: Kind, variant: str) -> None:
    directory = vision_model(kind, variant)
    pictures = [make_picture(index, *size) for index, size in enumerate(SIZES)]
    prompt = make_prompt(directory, PLACEHOLDERS[kind] * len(SIZES), pictures)
    made = tower(directory).encode([(image.pixels, image.grid) for image in prompt.images])
    for found, features, image in zip(made, reference_features(directory, prompt), prompt.images, strict=True):
        torch.testing.assert_close(found, features, rtol=1e-4, atol=1e-4)
        assert found.shape == (tower(directory).positions(image.grid), tower(directory).width * tower(directory).levels)


@EVERY_MODEL
def test_an_image_does_not_depend_on_the_others(kind: Kind, variant: str) -> None:
    directory = vision_model(kind, variant)
    images = [prepare(directory, make_picture(index, *size)) for index, size in enumerate(SIZES)]
    together = tower(directory).encode([(image.pixels, image.grid) for image in images])
    for image, features in zip(images, together, strict=True):
        assert tower(directory).encode([(image.pixels, image.grid)])[0].equal(features)
    assert tower(directory).encode([]) == []


@EVERY_MODEL
def test_in_bfloat16_features_point_the_same_way(kind: Kind, variant: str) -> None:
    """As on a GPU: what is computed in which type fits together."""
    directory = vision_model(kind, variant)
    image = prepare(directory, make_picture(3, 200, 90))
    exact = tower(directory).encode([(image.pixels, image.grid)])[0]
    rough = make_tower(open_checkpoint(directory), torch.bfloat16, CPU).encode([(image.pixels, image.grid)])[0]
    assert rough.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(rough.float(), exact).min() > 0.99


def test_an_image_of_many_tiles_goes_through_in_pieces() -> None:
    """Its features are those of its tiles, each as an image of its own."""
    directory = vision_model("idefics3")
    tiles = [torch.randint(256, (64 * 64 * 3,), dtype=torch.uint8).numpy().tobytes() for _ in range(21)]
    assert len(tiles) > CPU_PATCHES // (64 // 8) ** 2
    whole = tower(directory).encode([(b"".join(tiles), (4, 5))])[0]
    alone = torch.cat(tower(directory).encode([(tile, (0, 0)) for tile in tiles]))
    torch.testing.assert_close(whole, alone, rtol=1e-5, atol=1e-5)


def test_a_layer_takes_many_patches_in_pieces() -> None:
    numbers = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=numbers)

    def linear(rows: int, columns: int) -> Linear:
        return Linear(drawn(rows, columns) / rows**0.5, drawn(columns))

    ones = Norm(torch.ones(16), torch.zeros(16), 1e-6)
    block = Block(ones, linear(16, 48), linear(16, 16), ones, Mlp(linear(16, 32), linear(32, 16), "tanh"), heads=2)
    hidden = drawn(MAX_ROWS + 200, 16)
    windows = len(hidden) // 4
    parts = [block(some.clone(), [(len(some) // 4, 4)]) for some in hidden.split_with_sizes([4000, len(hidden) - 4000])]
    torch.testing.assert_close(block(hidden.clone(), [(windows, 4)]), torch.cat(parts), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(block(hidden.clone(), [(100, 4), (windows - 100, 4)]), torch.cat(parts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_that_do_not_fit_the_grid_are_refused(kind: Kind) -> None:
    directory = vision_model(kind)
    image = prepare(directory, make_picture(0, 100, 60))
    with pytest.raises(ValueError, match=f"an image has {len(image.pixels) - 1} bytes: expected {len(image.pixels)}"):
        tower(directory).encode([(image.pixels[:-1], image.grid)])
