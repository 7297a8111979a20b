"""An image in a prompt: its name, the ids that stand for it, and how a model wants it."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b, shake_128

from msgspec import Struct

IMAGE_NAME_BYTES = 16
SEAL_BYTES = 4
"""The end of a name, a hash of what a worker gets: see `seal_of`."""
FIRST_IMAGE_ID = 2**62
"""Ids from here on stand for a position of an image. No vocabulary has them, and no client can send them."""

MAX_IMAGE_BYTES = 256 * 2**20
"""The pixels that a worker takes of one image: 89 million in RGB."""

PICTURE_BYTES = 4096
"""What keeping a picture takes besides its pixels: its name, its layout and the books. Rounded up."""

_BITS = FIRST_IMAGE_ID - 1


class ImageRules(Struct, frozen=True):
    """How a model wants its images. The rules are part of each image's name, so other rules mean other KV.

    `family` names the code that knows the layout (`media/families/`); `settings` are the processor's own, as numbers, such as the size of
    a patch. `placeholder` is what the chat template writes for one image. `is_prepared`: the worker gets pixels that are already resized
    and cut for the model. Otherwise it gets the picture as the client sent it, in RGB, and prepares it itself.
    """

    family: str
    settings: dict[str, float]
    placeholder: str
    is_prepared: bool = True


class ImageSpan(Struct, frozen=True, array_like=True, gc=False):
    """Where an image is in a prompt: its tokens from `start` to `end`. The ids from FIRST_IMAGE_ID on stand for its features, in order;
    others between them are ordinary tokens, such as those between tiles.

    `grid` has the image's rows and columns: of features or of tiles, which depends on the family. `size` is the width and height of the
    pixels that a worker gets, with three bytes for each pixel. Tiles are one below the other.
    """

    name: bytes
    start: int
    end: int
    grid: tuple[int, int]
    size: tuple[int, int]


class ImageLayout(Struct, frozen=True, gc=False):
    """What stands for one image in a prompt: pieces of text, special tokens included, and numbers of positions. `grid` and `size` are those
    of its ImageSpan."""

    name: bytes
    pieces: tuple[str | int, ...]
    grid: tuple[int, int]
    size: tuple[int, int]

    @property
    def positions(self) -> int:
        return sum(piece for piece in self.pieces if isinstance(piece, int))


def seal_of(size: tuple[int, int]) -> blake2b:
    """Hashes the pixels of an image of this size, which are given to its `update`. Its digest ends the image's name, so that a worker never
    takes one picture for another."""
    return blake2b(b"%d %d" % size, digest_size=SEAL_BYTES, person=b"image pixels")


def image_ids(name: bytes, positions: int) -> tuple[int, ...]:
    """The ids of an image's positions: each carries 62 bits of its name."""
    drawn = struct.unpack(f"<{positions}Q", shake_128(name).digest(8 * positions))
    return tuple([FIRST_IMAGE_ID | (each & _BITS) for each in drawn])


def is_image_id(token_id: int) -> bool:
    return token_id >= FIRST_IMAGE_ID


def wrong_images(token_ids: Sequence[int], images: Iterable[ImageSpan]) -> str | None:
    """What is wrong with the images of a prompt: spans that overlap or leave it, ids of another image, ids outside of any span."""
    end = found = 0
    for index, span in enumerate(images):
        if not end <= span.start < span.end <= len(token_ids):
            return f"image {index} is at {span.start} to {span.end}: expected a place after {end} in {len(token_ids)} tokens"
        end = span.end
        ids = tuple([each for each in token_ids[span.start : span.end] if each >= FIRST_IMAGE_ID])
        if not ids or ids != image_ids(span.name, len(ids)):
            return f"the {len(ids)} positions of image {index} do not carry its name"
        found += len(ids)
    if found != sum([each >= FIRST_IMAGE_ID for each in token_ids]):
        return "there are positions of an image outside of the prompt's images"
    return None


def whole_images(token_ids: tuple[int, ...], images: Sequence[ImageSpan]) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """The beginning of a prompt, of which `images` are known, up to the first image that is cut off or unknown, and its images."""
    kept = tuple([span for span in images if span.end <= len(token_ids)])
    end = kept[-1].end if kept else 0
    for place in range(end, len(token_ids)):
        if token_ids[place] >= FIRST_IMAGE_ID:
            token_ids = token_ids[:place]
            break
    return whole_images(token_ids, kept[:-1]) if wrong_images(token_ids, kept) else (token_ids, kept)
