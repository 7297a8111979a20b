"""The books of a pool of image features: which image is in which slots, which are in the making, and who waits for them.

A **slot** has room for the features of SLOT_POSITIONS positions of one image. A generation asks for all images that it needs at once. It
gets slots for all of them or for none, in its turn, and holds them until it says that it is done. Only images that nobody holds are
evicted, the least recently used first. A generation that waits for slots holds none, so generations cannot wait for each other in a circle.
A generation that has pages and waits for slots is urgent.

An image is **asked** for; then its pixels are here (**queued**) and it waits for the tower; then its slots are written (**making**), from
the tower or from another worker; then it is **here**. An image that is asked for or queued is forgotten when nobody wants it any more.
All calls come from one thread.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, NamedTuple

from penstock.fairness import FairQueue
from penstock.lazy_heap import LazyHeap
from penstock.wire.images import FIRST_IMAGE_ID, ImageSpan
from penstock.wire.messages import ImagesWanted

SLOT_POSITIONS = 16
SLOT_NAME_BYTES = 16

ANSWER_SECONDS = 120.0
"""How long a front end has to send what was asked for. Generations that wait for longer fail, and go on elsewhere."""

MAX_FAILED_PULLS = 4
"""In a row, of one image. Then the generations that wait for it fail."""


class PlacedImage(NamedTuple):
    """An image in the tokens of a prompt: it has `positions` ids, the first at `first` and the last at `last`."""

    span: ImageSpan
    positions: int
    first: int
    last: int

    @property
    def slots(self) -> int:
        return slots_of(self.positions)


def slots_of(positions: int) -> int:
    return -(-positions // SLOT_POSITIONS)


def place_images(token_ids: Sequence[int], images: Iterable[ImageSpan]) -> tuple[PlacedImage, ...]:
    """Where the positions of these images are. The prompt was checked with `wire.images.wrong_images`."""
    found = []
    for span in images:
        places = [place for place in range(span.start, span.end) if token_ids[place] >= FIRST_IMAGE_ID]
        found.append(PlacedImage(span, len(places), places[0], places[-1]))
    return tuple(found)


def slot_names(image: bytes, slots: int) -> list[bytes]:
    """The names under which the slots of an image move between workers, in order."""
    return [blake2b(image + index.to_bytes(4), digest_size=SLOT_NAME_BYTES).digest() for index in range(slots)]


@dataclass(slots=True, eq=False)
class Image:
    """`wants` are the generations that hold it, `readers` are others that do, such as a worker that pulls it."""

    span: ImageSpan
    positions: int
    slots: list[int]
    state: Literal["asked", "queued", "making", "here"] = "asked"
    is_pulled: bool = False
    failed_pulls: int = 0
    wants: set[bytes] = field(default_factory=set)
    readers: set[bytes] = field(default_factory=set)

    @property
    def name(self) -> bytes:
        return self.span.name

    @property
    def is_held(self) -> bool:
        return bool(self.wants or self.readers)


@dataclass(slots=True, eq=False)
class _Want:
    """What a generation needs. `missing` are the names that are not here yet, once it has its slots."""

    key: bytes
    images: dict[bytes, PlacedImage]
    wake: Callable[[], None]
    fail: Callable[[str, bool], None]
    missing: set[bytes] | None = None
    is_asleep: bool = False


class Features:
    """The pool's books. `evicted` and the two others count images since the start. With no slots there are no images.

    `is_used`: an image has been asked for. Until then there is nothing to look after.
    """

    def __init__(self, slots: int = 0, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self.encoded = self.reused = self.evicted = 0
        self.is_used = False
        self._clock = clock
        self._free = list(range(slots - 1, -1, -1))
        self._images: dict[bytes, Image] = {}
        self._coming: dict[bytes, Image] = {}  # those that are not here
        self._first_slots: dict[bytes, Image] = {}  # by the name of the first slot
        self._unheld: dict[bytes, Image] = {}  # here, and held by nobody: the least recently used first
        self._unheld_slots = 0
        self._wants: dict[bytes, _Want] = {}
        self._waiting: FairQueue[_Want] = FairQueue()  # those without slots
        self._asked: list[ImagesWanted] = []
        self._deadlines: LazyHeap[Image, float] = LazyHeap()  # of those asked for

    def __contains__(self, name: bytes) -> bool:
        """Whether the features of this image are here."""
        image = self._images.get(name)
        return image is not None and image.state == "here"

    @property
    def used(self) -> int:
        """Slots with the features of an image, or reserved for one."""
        return self.slots - len(self._free)

    @property
    def cached(self) -> int:
        """Those of them that nobody holds."""
        return self._unheld_slots

    @property
    def positions_to_encode(self) -> int:
        return sum([image.positions for image in self._coming.values() if not image.is_pulled])

    @property
    def is_awaited(self) -> bool:
        """Whether an image is not here that somebody needs, or that is being made."""
        return bool(self._coming)

    @property
    def next_expiry(self) -> float:
        """When something ends if nothing else happens."""
        least = self._deadlines.least()
        return math.inf if least is None else least[0]

    def expire(self, now: float) -> None:
        while (late := self._deadlines.pop_due(now)) is not None:
            self._end(late, f"it has not come within {ANSWER_SECONDS:g} seconds", retryable=True)

    def take_asked(self) -> list[ImagesWanted]:
        """What must be asked for since the last call."""
        asked, self._asked = self._asked, []
        return [each for each in asked if each.generation in self._wants]

    def too_large(self, images: Iterable[PlacedImage]) -> str | None:
        """Why a prompt with these images can never run here."""
        largest = max([image.positions for image in images], default=0)
        if slots_of(largest) <= self.slots:
            return None
        room = self.slots * SLOT_POSITIONS
        return f"an image has {largest} positions and the worker has room for the features of {room}: see --image-memory"

    # A generation.

    def want(
        self,
        key: bytes,
        images: Iterable[PlacedImage],
        lane: str,
        weight: float,
        place: float,
        wake: Callable[[], None],
        fail: Callable[[str, bool], None],
        *,
        is_urgent: bool = False,
    ) -> bool:
        """A generation needs these images, which together have room in the pool. They replace what it wanted before. Returns whether all
        are here and held for it. If not, `wake` is called when they are, or `fail` with a reason and whether another worker may succeed.
        Slots are given in turn by `lane`, within a lane by `place`, and to urgent generations first."""
        needed = {image.span.name: image for image in images}
        earlier = self._wants.get(key)
        if earlier is not None and earlier.missing is not None and earlier.images.keys() >= needed.keys():
            earlier.wake, earlier.fail = wake, fail
            return not earlier.missing
        if earlier is not None:
            self._forget(earlier)
        want = self._wants[key] = _Want(key, needed, wake, fail)
        if is_urgent:
            self._waiting.put_first(want, place)
        else:
            self._waiting.put(want, lane, weight, place)
        self._serve()
        want.is_asleep = True
        return want.missing is not None and not want.missing

    def next_images(self, images: Iterable[PlacedImage], start: int) -> tuple[list[PlacedImage], int]:
        """The first of these images that have positions from `start` on and room in the pool together, and where the next one begins."""
        chosen: dict[bytes, PlacedImage] = {}
        slots = 0
        for image in images:
            if image.last >= start and image.span.name not in chosen:
                slots += image.slots
                if slots > self.slots:
                    return list(chosen.values()), max(start, image.first)
                chosen[image.span.name] = image
        return list(chosen.values()), sys.maxsize

    def is_known(self, key: bytes) -> bool:
        """Whether this generation holds images or waits for some."""
        return key in self._wants

    def has_slots(self, key: bytes) -> bool:
        """Whether all that this generation wants is here or on its way."""
        return key in self._wants and self._wants[key].missing is not None

    def is_waiting(self, key: bytes) -> bool:
        return key in self._wants and self._wants[key].missing != set()

    def holds(self, key: bytes, names: Iterable[bytes] = ()) -> bool:
        """Whether all that this generation wanted is here, and these are among it."""
        want = self._wants.get(key)
        return want is not None and want.missing == set() and want.images.keys() >= set(names)

    def leave(self, key: bytes) -> None:
        """This generation needs no images any more. Ignored if it needed none."""
        want = self._wants.get(key)
        if want is not None:
            self._forget(want)
            self._serve()

    def slots_held(self, key: bytes, name: bytes) -> Sequence[int]:
        """The slots of an image that is here and that this generation holds."""
        image = self._images[name]
        assert image.state == "here"
        assert key in image.wants, "features are used that nobody holds"
        return image.slots

    # What becomes of an image.

    def expect(self, name: bytes, seconds: float) -> None:
        """An image that was asked for comes within this time from now, or those that wait for it fail. At first it is ANSWER_SECONDS."""
        self._deadlines.put(self._images[name], self._clock() + seconds)

    def queued(self, name: bytes) -> Image | None:
        """Its pixels are here. Returns the image, if anybody waits for them."""
        return self._move(name, ("asked",), "queued")

    def is_queued(self, name: bytes) -> bool:
        """Whether its pixels are here, and it waits for the tower."""
        image = self._images.get(name)
        return image is not None and image.state == "queued"

    def begin(self, name: bytes, *, is_pulled: bool = False) -> Image | None:
        """Its slots will be written. They are not used for anything else until `complete`, `pull_failed` or `broken`. Returns the image, if
        anybody still waits for it."""
        image = self._move(name, ("asked", "queued"), "making")
        if image is not None:
            image.is_pulled = is_pulled
        return image

    def complete(self, name: bytes) -> None:
        """Its slots have its features."""
        image = self._images[name]
        assert image.state == "making"
        image.state = "here"
        del self._coming[name]
        self.encoded += not image.is_pulled
        if not image.is_held:
            self._rest(image)
        for want in [self._wants[key] for key in image.wants]:
            assert want.missing is not None
            want.missing.discard(name)
            if not want.missing and want.is_asleep:
                want.wake()
        self._serve()

    def pull_failed(self, name: bytes, reason: str) -> None:
        """Nobody writes its slots any more, and they have no features. It is asked for again."""
        image = self._images[name]
        assert image.state == "making"
        image.state, image.is_pulled = "asked", False
        image.failed_pulls += 1
        if not image.wants:
            self._drop(image)
            self._serve()
        elif image.failed_pulls >= MAX_FAILED_PULLS:
            self._end(image, reason, retryable=True)
        else:
            self._deadlines.put(image, self._clock() + ANSWER_SECONDS)
            self._asked += [ImagesWanted(key, (name,), reason) for key in sorted(image.wants)]

    def broken(self, name: bytes, reason: str, *, retryable: bool = True) -> None:
        """It cannot be encoded: those that wait for it fail. Nobody writes its slots any more."""
        self._end(self._images[name], reason, retryable=retryable)

    def refuse(self, name: bytes, reason: str, *, retryable: bool) -> None:
        """It cannot be had: those that wait for it fail. Ignored if nobody does."""
        image = self._images.get(name)
        if image is not None and image.state == "asked":
            self._end(image, reason, retryable=retryable)

    # Others who read features.

    def find(self, first_slot: bytes) -> Image | None:
        """The image whose first slot has this name, here or in the making."""
        return self._first_slots.get(first_slot)

    def hold(self, reader: bytes, name: bytes) -> Image | None:
        """Keeps an image that is here, until `let_go`. None if it is not."""
        image = self._images.get(name)
        if image is None or image.state != "here":
            return None
        self._use(image)
        image.readers.add(reader)
        return image

    def let_go(self, reader: bytes, name: bytes) -> None:
        image = self._images.get(name)
        if image is not None and reader in image.readers:
            image.readers.discard(reader)
            if not image.is_held:
                self._rest(image)
            self._serve()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every slot is in one place, holders are known, and each that waits lacks an image."""
        slots = [*self._free, *[slot for image in self._images.values() for slot in image.slots]]
        assert sorted(slots) == list(range(self.slots)), "a slot is lost, or used twice"
        assert {name for name, image in self._images.items() if image.state == "here" and not image.is_held} == self._unheld.keys()
        assert self._unheld_slots == sum(len(image.slots) for image in self._unheld.values())
        assert self._coming == {name: image for name, image in self._images.items() if image.state != "here"}
        assert set(self._deadlines) == {image for image in self._images.values() if image.state == "asked"}
        assert set(self._waiting) == {want for want in self._wants.values() if want.missing is None}
        assert set(self._first_slots.values()) == set(self._images.values())
        for image in self._images.values():
            assert image.state in ("making", "here") or image.wants, "an image is asked for that nobody wants"
            assert all(image.name in self._wants[key].images for key in image.wants)
        for want in self._wants.values():
            if want.missing is not None:
                assert want.missing == {name for name in want.images if self._images[name].state != "here"}
                assert all(want.key in self._images[name].wants for name in want.images)
        first = self._waiting.first()
        assert first is None or not self._fits(first), "somebody waits for slots that are free"

    def _serve(self) -> None:
        """Gives slots to those whose turn it is. When one lacks slots, those behind it wait as well."""
        while (want := self._waiting.first()) is not None and self._fits(want):
            missing = [image for name, image in want.images.items() if name not in self._images]
            self._waiting.serve(want, 1 + sum([image.slots for image in missing]))
            known = [self._images[name] for name in want.images if name in self._images]
            if any(image.positions != want.images[image.name].positions for image in known):
                del self._wants[want.key]
                want.fail("two prompts give it different numbers of positions", False)
                continue
            self.reused += len(known)
            for image in known:
                self._use(image)
                image.wants.add(want.key)
            for placed in missing:
                self._reserve(placed).wants.add(want.key)
            want.missing = {name for name in want.images if self._images[name].state != "here"}
            asked = tuple([name for name in want.images if self._images[name].state == "asked"])
            if asked:
                self._asked.append(ImagesWanted(want.key, asked))
            elif not want.missing and want.is_asleep:
                want.wake()

    def _fits(self, want: _Want) -> bool:
        needed = sum([image.slots for name, image in want.images.items() if name not in self._images])
        kept = sum([image.slots for name, image in want.images.items() if name in self._unheld])
        return needed <= len(self._free) + self._unheld_slots - kept

    def _reserve(self, placed: PlacedImage) -> Image:
        while len(self._free) < placed.slots:
            oldest = next(iter(self._unheld.values()))
            self._use(oldest)
            self._drop(oldest)
            self.evicted += 1
        image = Image(placed.span, placed.positions, [self._free.pop() for _ in range(placed.slots)])
        self.is_used = True
        self._images[image.name] = self._coming[image.name] = self._first_slots[slot_names(image.name, 1)[0]] = image
        self._deadlines.put(image, self._clock() + ANSWER_SECONDS)
        return image

    def _move(self, name: bytes, sources: Iterable[str], target: Literal["queued", "making"]) -> Image | None:
        image = self._images.get(name)
        if image is None or image.state not in sources:
            return None
        image.state = target
        self._deadlines.discard(image)
        return image

    def _forget(self, want: _Want) -> None:
        """It holds nothing any more, and nobody tells it."""
        del self._wants[want.key]
        if want.missing is None:
            self._waiting.discard(want)
            return
        for name in want.images:
            image = self._images[name]
            image.wants.discard(want.key)
            if image.state in ("asked", "queued") and not image.wants:
                self._drop(image)
            elif image.state == "here" and not image.is_held:
                self._rest(image)

    def _end(self, image: Image, reason: str, *, retryable: bool) -> None:
        """It will not be here: those that wait for it fail."""
        failed = [self._wants[key] for key in image.wants]
        # In this state `_forget` drops it when nobody waits any more.
        image.state = "asked"
        for want in failed:
            self._forget(want)
        if not failed:
            self._drop(image)
        for want in failed:
            want.fail(reason, retryable)
        self._serve()

    def _use(self, image: Image) -> None:
        if self._unheld.pop(image.name, None) is not None:
            self._unheld_slots -= len(image.slots)

    def _rest(self, image: Image) -> None:
        self._unheld[image.name] = image
        self._unheld_slots += len(image.slots)

    def _drop(self, image: Image) -> None:
        self._deadlines.discard(image)
        self._free += image.slots
        self._coming.pop(image.name, None)
        del self._images[image.name], self._first_slots[slot_names(image.name, 1)[0]]
