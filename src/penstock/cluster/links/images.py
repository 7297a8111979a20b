"""The images that a worker wants: who has them, and their pixels, piece by piece."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from penstock.media.picture import Picture
from penstock.wire.images import ImageSpan
from penstock.wire.messages import IMAGE_PIECE_BYTES, ImagePiece, ImageRefused, ImageSource, ImagesWanted, KvSource, Message, Submit

log = logging.getLogger(__name__)

# After PIECES_PER_PING pieces the worker is asked whether it has read them. At most MAX_UNANSWERED_PINGS of these questions are open, so
# at most half a MB is on its way. A Submit that waits behind it waits for 40 ms at 100 Mbit/s.
PIECES_PER_PING = 2
MAX_UNANSWERED_PINGS = 2

ImageAnswer = Picture | KvSource | ImageRefused
"""Its pixels, or another worker that computes its features, or why it cannot be had."""


AnswerImage = Callable[[Submit, ImageSpan, str], Coroutine[Any, Any, ImageAnswer]]
"""Decides how a worker gets an image of this request. The last argument says why the worker could not use the last answer; "" if there was
none. It is cancelled when nobody wants the image any more, and then ends what it has begun elsewhere."""


class ImageLink(Protocol):
    """What is needed of the link. `with_images` are its open generations whose prompts have images."""

    with_images: dict[bytes, Submit]
    answer_image: AnswerImage
    pings: int
    pongs: int
    silent_ticks: int

    def ping(self) -> None: ...

    def write(self, message: Message) -> None: ...


def answer_with_pixels(find: Callable[[bytes], Picture | None]) -> AnswerImage:
    """Every image is sent as pixels, if the front end still has them: a picture lives as long as its request runs."""

    async def answer(_: Submit, span: ImageSpan, __: str) -> ImageAnswer:
        return find(span.name) or ImageRefused(span.name, "the front end no longer has it", retryable=False)

    return answer


class ImageSender:
    """Answers one worker. It gets only images of generations that it runs, each once however many of them want it.

    One image is sent after the other, so that the worker holds one that is not complete, and half a MB of it is on its way: other messages
    pass between. An image that nobody wants any more stops where it is.
    """

    def __init__(self, link: ImageLink) -> None:
        self._link = link
        self._askers: dict[bytes, set[bytes]] = {}
        self._tasks: dict[bytes, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        self.ponged = asyncio.Event()

    def want(self, message: ImagesWanted) -> None:
        request = self._link.with_images.get(message.generation)
        if request is None:
            return  # It has ended, and the worker will know.
        spans = {span.name: span for span in request.images}
        for name in message.names:
            if name not in spans:
                log.error("a worker wants image %s, which generation %s does not have", name.hex(), message.generation.hex())
                self._link.write(ImageRefused(name, "the generation has no such image", retryable=False))
            elif name in self._askers:
                self._askers[name].add(message.generation)
            else:
                self._askers[name] = {message.generation}
                work = self._answer(request, spans[name], message.failed)
                task = self._tasks[name] = asyncio.create_task(work, name=f"image {name.hex()}")
                task.add_done_callback(partial(self._answered, name))

    def forget(self, generation: bytes) -> None:
        """This generation has ended, or was cancelled."""
        for name, askers in list(self._askers.items()):
            askers.discard(generation)
            if not askers:
                del self._askers[name]
                self._tasks.pop(name).cancel()

    def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    def _answered(self, name: bytes, task: asyncio.Task[None]) -> None:
        if self._tasks.get(name) is task:
            del self._tasks[name], self._askers[name]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an image was not found", exc_info=error)
            self._link.write(ImageRefused(name, f"{type(error).__name__} in the front end"))

    async def _answer(self, request: Submit, span: ImageSpan, failed: str) -> None:
        answer = await self._link.answer_image(request, span, failed)
        match answer:
            case Picture():
                async with self._turn:
                    await self._send(span.name, answer)
            case KvSource():
                self._link.write(ImageSource(span.name, answer))
            case ImageRefused():
                self._link.write(answer)

    async def _send(self, name: bytes, picture: Picture) -> None:
        link, pixels = self._link, picture.pixels
        for number, offset in enumerate(range(0, len(pixels), IMAGE_PIECE_BYTES), 1):
            link.write(ImagePiece(name, offset, len(pixels), picture.size, pixels[offset : offset + IMAGE_PIECE_BYTES]))
            if number % PIECES_PER_PING == 0:
                link.ping()
                await self._until_read(link.pings - MAX_UNANSWERED_PINGS + 1)

    async def _until_read(self, ping: int) -> None:
        while self._link.pongs < ping:
            self.ponged.clear()
            await self.ponged.wait()
        # It may have nothing to say before it has the image.
        self._link.silent_ticks = 0
