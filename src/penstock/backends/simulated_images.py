"""The simulator's images: an encoder that takes as long as a real one would, and tiny real features.

The features of an image are made from its pixels, and must be those that the end of its name promises. So a picture that was taken for
another is found, wherever that happened.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import blake2b

from penstock.backends.simulated_kv import SimulatedSlots
from penstock.config.engines import SimulatorConfig
from penstock.kv.feature_moves import FeatureMoves
from penstock.kv.features import SLOT_POSITIONS, Features, Image, PlacedImage
from penstock.wire.images import SEAL_BYTES, ImageRules, ImageSpan, seal_of
from penstock.worker.backend import PROGRESS_SECONDS


def seed_with_images(seed: int, seals: Sequence[bytes]) -> int:
    """The seed of a text after images whose pixels have these seals, in order: see `wire.images.seal_of`. Without images, the seed."""
    if not seals:
        return seed
    key = b"%d " % seed + b"".join(seals)
    return int.from_bytes(blake2b(key, digest_size=8, person=b"images' text").digest())


def seal_pixels(size: tuple[int, int], pixels: bytes) -> bytes:
    """What the text knows of an image: of its width and height, and its pixels in RGB, row by row."""
    seal = seal_of(size)
    seal.update(pixels)
    return seal.digest()


def promised_seals(images: Sequence[ImageSpan]) -> list[bytes]:
    return [span.name[-SEAL_BYTES:] for span in images]


def image_fingerprint(rules: ImageRules) -> bytes:
    """What gives its features a meaning."""
    return blake2b(repr(rules).encode(), digest_size=16, person=b"simulated tower").digest()


class SimulatedTower:
    """A `backends.encode.FeatureMaker`. `on_progress` is called while an image is encoded; it may raise, to end that."""

    def __init__(self, config: SimulatorConfig, rules: ImageRules, on_progress: Callable[[], None]) -> None:
        self.fingerprint = image_fingerprint(rules)
        self.memory = SimulatedSlots(config.image_positions // SLOT_POSITIONS)
        self._seconds_per_slot = SLOT_POSITIONS * config.encode_ms / 1e6
        self._on_progress = on_progress

    def encode(self, span: ImageSpan, pixels: bytes, slots: Sequence[int]) -> None:
        width, height = span.size
        if len(pixels) != 3 * width * height:
            raise ValueError(f"it has {len(pixels):,} bytes: expected 3 for each pixel of {width} by {height}")
        seal = seal_of(span.size)
        seal.update(pixels)
        self._take(len(slots) * self._seconds_per_slot)
        for index, slot in enumerate(slots):
            self.memory.fill(slot, slot_content(seal.digest(), index))

    def _take(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, PROGRESS_SECONDS))
            self._on_progress()

    def close(self) -> None:
        self.memory.close()


class SimulatedEncoder:
    """Encodes one image after the other, beside the steps. `on_done` is called after each, `fail` for wrong features: never, if the rest
    of the program does what it must. `die` ends the worker."""

    def __init__(
        self,
        config: SimulatorConfig,
        rules: ImageRules,
        features: Features,
        on_done: Callable[[], None],
        fail: Callable[[str], None],
        die: Callable[[], None],
    ) -> None:
        self.features = features
        self.memory = SimulatedSlots(features.slots)
        self.moves = FeatureMoves(features, image_fingerprint(rules), self.memory, self._ask)
        self._seconds_per_position = config.encode_ms / 1e6
        self._on_done = on_done
        self._fail = fail
        self._die = die
        self._faults = config.image_fault
        self._random = random.Random(0 if self._faults is None else self._faults.seed)  # noqa: S311 - a test is repeated with the same seed
        self._queue: deque[tuple[bytes, bytes]] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def take(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        """The pixels of an image that was asked for."""
        image = self.features.queued(name)
        if image is None:
            return
        if image.span.size != size or len(pixels) != 3 * size[0] * size[1]:
            self.features.broken(name, f"it has {len(pixels):,} bytes for {size}: expected 3 for each pixel of {image.span.size}")
        elif self._is_lost():
            self.features.broken(name, "an injected fault: it was lost")
        else:
            self._queue.append((name, seal_pixels(size, pixels)))
            self._begin_next()
        self._on_done()

    def check(self, generation: bytes, images: Sequence[PlacedImage], start: int, end: int) -> None:
        """A generation computes these positions of its prompt. It must hold the right features of the images there."""
        for placed in images:
            if placed.first < end and placed.last >= start:
                name = placed.span.name
                wrong = [
                    slot
                    for index, slot in enumerate(self.features.slots_held(generation, name))
                    if not self.memory.holds(slot, slot_content(name[-SEAL_BYTES:], index))
                ]
                if wrong:
                    self._fail(f"the features of image {name.hex()} in slots {wrong} are those of another")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.memory.close()

    def connect(self) -> None:
        """Call it on the event loop, before features move."""
        self._loop = asyncio.get_running_loop()

    def _ask(self, what: Callable[[], None]) -> None:
        """From the transport's thread."""
        self._loop.call_soon_threadsafe(self._do, what)

    def _do(self, what: Callable[[], None]) -> None:
        what()
        self._on_done()

    def _is_lost(self) -> bool:
        """Draws its fate."""
        faults, number = self._faults, self._random.random()
        if faults is None:
            return False
        if number < faults.kill:
            self._die()
        return number < faults.kill + faults.lose

    def _begin_next(self) -> None:
        while self._timer is None and self._queue:
            name, seal = self._queue.popleft()
            image = self.features.begin(name)
            if image is not None:
                seconds = image.positions * self._seconds_per_position
                self._timer = asyncio.get_running_loop().call_later(seconds, self._end, image, seal)

    def _end(self, image: Image, seal: bytes) -> None:
        self._timer = None
        for index, slot in enumerate(image.slots):
            self.memory.fill(slot, slot_content(seal, index))
        self.features.complete(image.name)
        self._on_done()
        self._begin_next()


def slot_content(seal: bytes, index: int) -> bytes:
    """The features in one slot of an image, before they are made longer."""
    return seal + (index * SLOT_POSITIONS).to_bytes(4)
