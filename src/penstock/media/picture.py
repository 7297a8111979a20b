"""A picture that a client sent: where it is in the request, and what became of it."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from penstock.wire.images import PICTURE_BYTES, ImageLayout

_WEB = re.compile("https?:", re.IGNORECASE | re.ASCII)

Detail = Literal["auto", "low", "high", "original"]


class ImageRef(Struct, frozen=True, gc=False):
    """An image as a request names it. `field` is its place in the request, for error messages. Either `url`, which may be a data URL, or
    `data`, which is base64. `is_old`: it is in the history or a tool's result, so a model that reads only text gets a note in its place."""

    field: str
    url: str = ""
    data: str = ""
    detail: Detail = "auto"
    is_old: bool = False

    @property
    def is_remote(self) -> bool:
        """Its file must be fetched."""
        return _WEB.match(self.url) is not None


class Picture(Struct, frozen=True, weakref=True, eq=False):
    """An image that was read. `pixels` are what a worker gets: see ImagePiece. There is one of each name: it equals only itself."""

    layout: ImageLayout
    size: tuple[int, int]
    pixels: bytes

    @property
    def name(self) -> bytes:
        return self.layout.name

    @property
    def memory(self) -> int:
        """The bytes that it takes of --media-memory."""
        return len(self.pixels) + PICTURE_BYTES
