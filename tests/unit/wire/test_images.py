"""Images in a prompt: the names, and what is left of them when a prompt is cut."""

from __future__ import annotations

import pytest

from penstock.wire.images import IMAGE_NAME_BYTES, ImageSpan, image_ids, seal_of, whole_images, wrong_images
from simulated_pictures import sealed_name


def test_the_end_of_a_name_tells_the_pixels_and_the_size() -> None:
    content, pixels = b"a hash of the picture's content", bytes(range(24))
    name = sealed_name(content, (4, 2), pixels)
    seal = seal_of((4, 2))
    for start in range(0, 24, 5):
        seal.update(pixels[start : start + 5])
    assert (len(name), name[:12], name[12:]) == (IMAGE_NAME_BYTES, content[:12], seal.digest())
    assert len({name, sealed_name(content, (2, 4), pixels), sealed_name(content, (4, 2), pixels[::-1])}) == 3


@pytest.mark.parametrize("length", range(60))
def test_the_beginning_of_a_prompt_has_only_whole_images(length: int) -> None:
    names = [bytes([number] * 16) for number in range(3)]
    prompt = (1, *image_ids(names[0], 20), 2, *image_ids(names[1], 5), *image_ids(names[2], 10), 3, 4)
    spans = (
        ImageSpan(names[0], 1, 21, (4, 5), (9, 9)),
        ImageSpan(names[1], 22, 27, (1, 5), (9, 9)),
        ImageSpan(names[2], 27, 37, (2, 5), (9, 9)),
    )
    kept, images = whole_images(prompt[:length], spans)
    expected = 1 if 1 < length < 21 else 22 if 22 < length < 27 else 27 if 27 < length < 37 else min(length, len(prompt))
    assert kept == prompt[:expected]
    assert images == tuple([span for span in spans if span.end <= expected])
    assert wrong_images(kept, images) is None


def test_images_of_another_prompt_are_not_kept() -> None:
    cat, dog = bytes(16), bytes([1] * 16)
    prompt = (1, 2, *image_ids(cat, 4), 3)
    assert whole_images(prompt, (ImageSpan(dog, 2, 6, (2, 2), (9, 9)),)) == ((1, 2), ())
    assert whole_images(prompt, ()) == ((1, 2), ())
