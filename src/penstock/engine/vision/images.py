"""The images of an engine: the books of their features, and a tower that encodes beside the steps, in a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from penstock.engine.vision.maker import TowerMaker
from penstock.engine.vision.shape import TowerShape
from penstock.kv.features import Features, Image, PlacedImage
from penstock.worker.backend import PROGRESS_SECONDS

log = logging.getLogger(__name__)

AHEAD = 2
"""Images that the tower's thread has at once: the next one need not wait for the end of a step."""

CPU_THREADS = 1
"""Of the tower, on a CPU: with more threads than cores every step would be slower."""


class StoppedError(Exception):
    """The engine ends while an image is encoded."""


class EngineImages:
    """Called in the engine's thread. `shape` is the tower's: images that do not fit it are refused."""

    def __init__(self, maker: TowerMaker, shape: TowerShape, clock: Callable[[], float]) -> None:
        self.maker = maker
        self.features = Features(maker.store.slots, clock)
        self.on_done: Callable[[], None] = lambda: None
        """Called in another thread when a step can go on, and every PROGRESS_SECONDS while a long image goes on."""
        self._shape = shape
        self._clock = clock
        self._spoke_at = 0.0
        self._pixels: dict[bytes, bytes] = {}
        self._encoding = 0
        self._done: deque[tuple[Image, Future[None]]] = deque()
        self._is_stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, "tower", partial(torch.set_num_threads, CPU_THREADS))
        maker.on_progress = self._progressed

    @property
    def has_news(self) -> bool:
        """Whether a step has something to do with what the tower has made."""
        return bool(self._done)

    @property
    def is_encoding(self) -> bool:
        return bool(self._encoding)

    def wrong(self, images: tuple[PlacedImage, ...]) -> str | None:
        """What is wrong with the images of a prompt, for this model."""
        for image in images:
            expected = self._shape.positions(image.span.grid)
            if min(image.span.grid) < 0 or image.positions != expected:
                rows, columns = image.span.grid
                return f"an image of {rows} by {columns} has {image.positions} positions: expected {expected}"
        return None

    def add_pixels(self, name: bytes, pixels: bytes) -> None:
        """The pixels of an image that was asked for."""
        if self.features.queued(name) is not None:
            self._pixels[name] = pixels
            self._feed()

    def poll(self) -> None:
        """Call it first in a step. What the tower has made is here from now on."""
        while self._done:
            image, work = self._done.popleft()
            self._encoding -= 1
            self._end(image, work)
        if self._pixels:
            self._pixels = {name: pixels for name, pixels in self._pixels.items() if self.features.is_queued(name)}
            self._feed()

    def close(self) -> None:
        self._is_stopping.set()
        self._thread.shutdown(cancel_futures=True)
        self.maker.close()

    def _feed(self) -> None:
        """Hands images to the tower, in the order in which their pixels came."""
        while self._pixels and self._encoding < AHEAD:
            name = next(iter(self._pixels))
            pixels = self._pixels.pop(name)
            image = self.features.begin(name)
            if image is not None:
                self._encoding += 1
                work = self._thread.submit(self.maker.encode, image.span, pixels, list(image.slots))
                work.add_done_callback(partial(self._tell, image))

    def _tell(self, image: Image, work: Future[None]) -> None:
        """In the tower's thread."""
        self._done.append((image, work))
        self.on_done()

    def _end(self, image: Image, work: Future[None]) -> None:
        """If the tower has failed, so have those that wait for this image, and nobody else."""
        match work.exception():
            case None:
                self.features.complete(image.name)
            case ValueError() as error:
                self.features.broken(image.name, str(error), retryable=False)
            case MemoryError() as error:
                log.warning("too little memory to encode an image of %d positions: %s", image.positions, error)
                self.features.broken(image.name, "the worker has too little memory to encode it")
            case error:
                log.error("the tower failed", exc_info=error)
                self.features.broken(image.name, f"the tower has failed: {type(error).__name__}")

    def _progressed(self) -> None:
        """In the tower's thread. A tower that is stuck says nothing."""
        if self._is_stopping.is_set():
            raise StoppedError
        now = self._clock()
        if now - self._spoke_at >= PROGRESS_SECONDS:
            self._spoke_at = now
            self.on_done()
