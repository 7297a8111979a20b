"""The images of prompts for external engines, which prepare pictures themselves: placeholders, and pixels that are asked for by name."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Generic, TypeVar

from msgspec import Struct

from penstock.backends.external.engine import EngineImage, EngineRefused
from penstock.fairness import FairBudget, Share
from penstock.wire.images import FIRST_IMAGE_ID, PICTURE_BYTES, ImageSpan
from penstock.wire.messages import Fault, ImagesWanted, Submit
from penstock.worker.backend import WantImages, image_fault, wants_none

if TYPE_CHECKING:
    from PIL.Image import Image

Thing = TypeVar("Thing")

MIB = 2**20
MAX_CACHED_BYTES = 256 * MIB
# The pixels of prompts that the engine has not taken yet.
MAX_HELD_BYTES = 512 * MIB
BYTES_PER_PIXEL = 3
MISMATCH = "image_mismatch"


def mismatch(engine: str, found: int, expected: int) -> EngineRefused:
    """The engine has expanded a prompt to something else than we did. What it computes is of no use: our prompt has other places."""
    lengths = f"{found} tokens instead of {expected}" if found != expected else f"also {expected} tokens, but other ones"
    return EngineRefused(Fault(MISMATCH, f"{engine} turns the prompt's images into other tokens than Penstock: {lengths}"))


def data_url(picture: EngineImage) -> str:
    """The picture as a PNG. It is compressed little: that is quick, and the engine is near."""
    file = BytesIO()
    pil_image(picture).save(file, "PNG", compress_level=1)
    return "data:image/png;base64," + b64encode(file.getvalue()).decode()


def pil_image(picture: EngineImage) -> Image:
    """Takes milliseconds for a large picture."""
    from PIL import Image

    return Image.frombytes("RGB", picture.size, picture.pixels)


class Placeholder(Struct, frozen=True):
    """What an engine finds in a prompt for one image, and expands: `ids`, as the chat template writes them. In the expanded prompt each of
    the image's positions is `position`, one of the ids."""

    ids: tuple[int, ...]
    position: int

    def collapse(self, token_ids: Sequence[int], images: Sequence[ImageSpan], prompt_length: int) -> tuple[int, ...]:
        """The prompt with one placeholder for each image. Raises EngineRefused if its text has one: the engine would put an image there.
        Tokens after `prompt_length` were generated: images that come before them have their places already."""
        collapsed: list[int] = []
        end = 0
        for span in images:
            collapsed += token_ids[end : span.start]
            collapsed += self.ids
            end = span.end
        collapsed += token_ids[end:prompt_length]
        if collapsed.count(self.position) != len(images) * self.ids.count(self.position):
            raise EngineRefused(Fault("invalid_images", f"the text of the prompt has the token {self.position}, which stands for an image"))
        return (*collapsed, *token_ids[prompt_length:])

    def expand(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The prompt that the engine must make of it."""
        return tuple([self.position if each >= FIRST_IMAGE_ID else each for each in token_ids])


class Kept(Generic[Thing]):
    """What was used last, by name, up to `max_bytes`. Each takes PICTURE_BYTES besides its size."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._things: dict[bytes, tuple[Thing, int]] = {}
        """Each with its size, the least recently used first."""
        self._bytes = 0

    def get(self, name: bytes) -> Thing | None:
        found = self._things.pop(name, None)
        if found is None:
            return None
        self._things[name] = found
        return found[0]

    def put(self, name: bytes, thing: Thing, size: int) -> None:
        size += PICTURE_BYTES
        if size > self._max_bytes or self.get(name) is not None:
            return
        self._things[name] = thing, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, freed = self._things.pop(next(iter(self._things)))
            self._bytes -= freed

    def check_integrity(self) -> None:
        """Raises AssertionError unless its size is right, and within its bound."""
        assert self._bytes == sum(size for _, size in self._things.values()) <= self._max_bytes


class Pictures:
    """The pixels of images, by name. What was used last is kept, up to `max_cached` bytes. Prompts that would hold more than `max_held`
    bytes together wait, tenant by tenant, before they ask for any."""

    def __init__(self, max_cached: int = MAX_CACHED_BYTES, max_held: int = MAX_HELD_BYTES) -> None:
        self.want: WantImages = wants_none
        self._room = FairBudget(max_held)
        self._cached: Kept[EngineImage] = Kept(max_cached)
        self._waiting: dict[bytes, dict[asyncio.Future[EngineImage], bytes]] = {}
        """By name, with the generation that waits."""

    @property
    def waiting(self) -> int:
        """The number of images that are waited for."""
        return len(self._waiting)

    async def get(self, request: Submit, share: Share) -> list[EngineImage]:
        """The pictures of a prompt, in order; `release` gives their room back. Raises EngineRefused if one cannot be had. If the caller is
        cancelled, nobody waits for them any more."""
        spans = {span.name: span for span in request.images}
        size = sum([BYTES_PER_PIXEL * span.size[0] * span.size[1] for span in spans.values()])
        if not self._room.take(share, size):
            await self._room.wait(share, size)
        found = {name: self._cached.get(name) for name in spans}
        missing = tuple([name for name, picture in found.items() if picture is None])
        pictures = {name: picture for name, picture in found.items() if picture is not None}
        if missing:
            pictures |= await self._ask(request.id, missing)
        for name, span in spans.items():
            if pictures[name].size != span.size:
                raise EngineRefused(image_fault(f"it has {pictures[name].size} pixels instead of {span.size}", retryable=False))
        return [pictures[span.name] for span in request.images]

    def release(self, share: Share) -> None:
        """The engine has taken the prompt, or it has ended. May be called again."""
        self._room.release(share)

    def put(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        if len(pixels) != BYTES_PER_PIXEL * size[0] * size[1]:
            self.refuse(name, f"{len(pixels)} bytes came for {size[0]} × {size[1]} pixels", retryable=False)
            return
        picture = EngineImage(name, size, pixels)
        self._cached.put(name, picture, len(pixels))
        for waiting in self._waiting.pop(name, ()):
            if not waiting.done():
                waiting.set_result(picture)

    def ask_again(self, name: bytes, why: str) -> None:
        """The answer was of no use."""
        for generation in list(self._waiting.get(name, {}).values())[:1]:
            self.want(ImagesWanted(generation, (name,), why))

    def refuse(self, name: bytes, reason: str, *, retryable: bool) -> None:
        for waiting in self._waiting.pop(name, ()):
            if not waiting.done():
                waiting.set_exception(EngineRefused(image_fault(reason, retryable=retryable)))

    def check_integrity(self) -> None:
        """Raises AssertionError unless what is kept is within its bounds, and somebody waits for all that is waited for."""
        self._room.check_integrity()
        self._cached.check_integrity()
        assert all(self._waiting.values())

    async def _ask(self, generation: bytes, names: tuple[bytes, ...]) -> dict[bytes, EngineImage]:
        loop = asyncio.get_running_loop()
        waiting = {name: loop.create_future() for name in names}
        for name, future in waiting.items():
            self._waiting.setdefault(name, {})[future] = generation
        self.want(ImagesWanted(generation, names))
        try:
            return dict(zip(names, await asyncio.gather(*waiting.values()), strict=True))
        finally:
            # Emptied, as an error refers to this frame: see media/reader.py.
            while waiting:
                self._leave(*waiting.popitem())

    def _leave(self, name: bytes, future: asyncio.Future[EngineImage]) -> None:
        future.cancel()
        others = self._waiting.get(name, {})
        others.pop(future, None)
        if not others:
            self._waiting.pop(name, None)
