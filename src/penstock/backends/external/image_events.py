"""Images in the KV events of vLLM and SGLang: from the engines' tokens to the ids that stand for images in our prompts. Pure: no I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from penstock.wire.images import IMAGE_NAME_BYTES, image_ids

Cut = tuple[bytes, int]
"""An image that a block may have ended in, and how many of its positions were before that end."""

UUID_PREFIX = "image-"
_UUID = re.compile(f"{UUID_PREFIX}([0-9a-f]{{{2 * IMAGE_NAME_BYTES}}})")
# Images that SGLang may still have in its cache, and that its events can be read for.
MAX_KNOWN = 65_536
# SGLang's own: pads begin here. It refuses models with more tokens.
FIRST_PAD = 1_000_000


def image_uuid(name: bytes) -> str:
    """vLLM's name of the image. It is also in its KV events, where a plain hash could be taken for a salt."""
    return UUID_PREFIX + name.hex()


class EventImages(Protocol):
    """How the events of an engine name images."""

    def has_images(self, token_ids: Sequence[int], keys: Sequence[Any]) -> bool:
        """Whether some block of an event has positions of an image. `keys`: what each block depends on besides tokens and salt."""

    def read(self, token_ids: Sequence[int], keys: Any, before: Cut | None) -> tuple[Sequence[int], Cut | None] | None:
        """A block's ids, and where it ends. `before` is where the block before it ended. None: it has an image that is not ours."""


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

    def has_images(self, token_ids: Sequence[int], keys: Sequence[Any]) -> bool:  # noqa: ARG002
        return any(keys)

    def read(self, token_ids: Sequence[int], keys: Any, before: Cut | None) -> tuple[Sequence[int], Cut | None] | None:
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


class PaddedImages:
    """SGLang: an image's positions have pads in turn, ids outside of the vocabulary that are made from the image's hash. `pads_of` is
    SGLang's own function. Only images that were in a request are known."""

    def __init__(self, pads_of: Callable[[bytes], Sequence[int]], max_known: int = MAX_KNOWN) -> None:
        self._pads_of = pads_of
        self._max_known = max_known
        self._pads: dict[bytes, Sequence[int]] = {}
        """The oldest first."""
        self._names: dict[int, bytes] = {}

    def know(self, name: bytes) -> None:
        """A request has this image."""
        pads = self._pads.pop(name, None) or tuple(self._pads_of(name))
        self._pads[name] = pads
        self._names.update(dict.fromkeys(pads, name))
        if len(self._pads) > self._max_known:
            oldest = next(iter(self._pads))
            for pad in self._pads.pop(oldest):
                self._names.pop(pad, None)

    def has_images(self, token_ids: Sequence[int], keys: Sequence[Any]) -> bool:  # noqa: ARG002
        return max(token_ids, default=0) >= FIRST_PAD

    def read(self, token_ids: Sequence[int], keys: Any, before: Cut | None) -> tuple[Sequence[int], Cut | None] | None:
        if keys:
            return None
        ids: list[int] = []
        cut = before
        for token in token_ids:
            if token < FIRST_PAD:
                cut = None
                ids.append(token)
                continue
            name = self._names.get(token)
            if name is None:
                return None
            count = cut[1] if cut is not None and cut[0] == name else 0
            pads = self._pads[name]
            if pads[count % len(pads)] != token:
                return None
            ids += _ids(name, count, 1)
            cut = name, count + 1
        return ids, cut
