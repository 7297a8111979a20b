"""Images in the KV events of vLLM: from its tokens to the ids that stand for images in our prompts. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from penstock.wire.images import IMAGE_NAME_BYTES, image_ids

Cut = tuple[bytes, int]
"""An image that a block may have ended in, and how many of its positions were before that end."""

UUID_PREFIX = "image-"
_UUID = re.compile(f"{UUID_PREFIX}([0-9a-f]{{{2 * IMAGE_NAME_BYTES}}})")


def image_uuid(name: bytes) -> str:
    """vLLM's name of the image. It is also in its KV events, where a plain hash could be taken for a salt."""
    return UUID_PREFIX + name.hex()


@lru_cache(maxsize=16)
def _drawn(name: bytes, positions: int) -> tuple[int, ...]:
    return image_ids(name, positions)


def _ids(name: bytes, start: int, count: int) -> tuple[int, ...]:
    """Those of these positions. Blocks ask for a few at a time, so they are drawn by powers of two."""
    return _drawn(name, 1 << (start + count).bit_length())[start : start + count]


class KeyedImages:
    """vLLM: an image's positions all have the id `position`, and each block with a part of images has a key for each of those: its uuid,
    and the place where it begins, counted from the block's start, so negative for one that began before."""

    def __init__(self, position: int) -> None:
        self._position = position

    def read(self, token_ids: Sequence[int], keys: Any, before: Cut | None) -> tuple[Sequence[int], Cut | None] | None:
        """A block's ids, and where it ends. `keys`: what it depends on besides tokens and salt. `before` is where the block before it
        ended. None: it has an image that is not ours."""
        if not keys:
            return token_ids, None
        ids, cut = list(token_ids), before
        starts = [_start_of(key) for key in keys]
        ends = [*starts[1:], (b"", len(ids))]
        for start, end in zip(starts, ends, strict=True):
            if start is None or end is None:
                return None
            name, first = start
            if first < 0 and (cut is None or cut[0] != name):
                return None
            count = cut[1] if first < 0 and cut is not None else 0
            places = [place for place in range(max(first, 0), end[1]) if ids[place] == self._position]
            for place, each in zip(places, _ids(name, count, len(places)), strict=True):
                ids[place] = each
            cut = name, count + len(places)
        return ids, cut


def _start_of(key: Any) -> tuple[bytes, int] | None:
    """The image and its start. None for a key that is none of our images."""
    if not isinstance(key, list | tuple) or len(key) != 2 or not isinstance(key[0], str) or not isinstance(key[1], int):
        return None
    found = _UUID.fullmatch(key[0])
    return None if found is None else (bytes.fromhex(found[1]), key[1])
