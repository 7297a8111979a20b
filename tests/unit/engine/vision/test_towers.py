"""Towers make the features that transformers makes, of any images, together or alone."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from penstock.engine.checkpoints.checkpoint import open_checkpoint
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


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_that_do_not_fit_the_grid_are_refused(kind: Kind) -> None:
    directory = vision_model(kind)
    image = prepare(directory, make_picture(0, 100, 60))
    with pytest.raises(ValueError, match=f"an image has {len(image.pixels) - 1} bytes: expected {len(image.pixels)}"):
        tower(directory).encode([(image.pixels[:-1], image.grid)])
