"""What the simulator must say."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.backends.simulated_images import seal_pixels, seed_with_images
from penstock.backends.simulator import tokens_between
from penstock.text.tokenizers.words import WordTokenizer

WORDS = WordTokenizer()


def predicted(seed: int, count: int, images: Sequence[tuple[tuple[int, int], bytes]] = ()) -> str:
    """The text of the first `count` tokens of a generation with this seed, and with images of this width, height and pixels."""
    seed = seed_with_images(seed, [seal_pixels(size, pixels) for size, pixels in images])
    return WORDS.decode(tokens_between(seed, 0, count, WORDS.ordinary_ids))
