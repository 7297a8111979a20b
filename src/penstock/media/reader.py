"""Reads the images of requests: each once, within limits, named by its content."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from hashlib import blake2b
from weakref import WeakValueDictionary

import msgspec

from penstock.media.decode import LOW_PIXELS, decode
from penstock.media.families import make as families
from penstock.media.file import ImageFile, base64_file
from penstock.media.formats import read_header
from penstock.media.picture import ImageRef, Picture
from penstock.wire.errors import RequestError
from penstock.wire.images import IMAGE_NAME_BYTES, ImageRules, sealed_name


class MediaReader:
    """The pictures of all requests of a front end, while anybody holds them. For one event loop."""

    def __init__(self) -> None:
        self._alive: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()

    async def read(
        self,
        refs: Sequence[ImageRef],
        lane: str,  # noqa: ARG002
        root: bytes,
        rules: ImageRules,
        weight: float = 1.0,  # noqa: ARG002
    ) -> list[Picture]:
        """The picture of each image of a request, in order; equal ones are read once. `lane` and `weight` are those of its tenant, `root`
        that of its KV. Whoever wants `find` to know a picture holds it.

        Raises RequestError, which names the field and what would be right.
        """
        return [await asyncio.to_thread(self._read, ref, root, rules) for ref in refs]

    def find(self, name: bytes) -> Picture | None:
        """The picture with this name. None if nobody holds it any more."""
        return self._alive.get(name)

    def _read(self, ref: ImageRef, root: bytes, rules: ImageRules) -> Picture:
        file = sent_file(ref)
        try:
            header = read_header(file)
            found = decode(file.part(0, file.size), header.kind, header.pixels, ref.detail == "low", rules)
        except (ValueError, OSError, SyntaxError) as error:
            raise RequestError(f"`{ref.field}` is not a picture that can be read: {error}", param=ref.field) from error
        content = picture_name(found.content, root, rules, is_low=ref.detail == "low" and max(header.width, header.height) > LOW_PIXELS)
        layout = families.layout(rules, content, found.size)
        name = sealed_name(content, layout.size, found.pixels)
        layout = msgspec.structs.replace(layout, name=name)
        picture = Picture(layout, layout.size, found.pixels)
        return self._alive.setdefault(name, picture)


def sent_file(ref: ImageRef) -> ImageFile:
    """The file in a request. Raises RequestError, also for one that must be fetched."""
    if ref.data:
        return base64_file(ref.data)
    head = ref.url[:256]
    comma = head.find(",")
    if not head.startswith("data:") or comma < 0 or not head[:comma].endswith(";base64"):
        raise RequestError(f"`{ref.field}` is {head[:80]!r}: expected data:image/png;base64,…", param=ref.field)
    return base64_file(ref.url, comma + 1)


def picture_name(content: bytes, root: bytes, rules: ImageRules, *, is_low: bool) -> bytes:
    """The name of a picture with this content under this root: the pixels that the model gets are a function of what is hashed."""
    how = msgspec.msgpack.encode((content, rules, is_low), order="sorted")
    return blake2b(how, digest_size=IMAGE_NAME_BYTES, key=root, person=b"picture").digest()
