"""Images of prompts for external engines: placeholders, and pixels that come when they are asked for, or do not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from penstock.backends.external.backend import ExternalBackend
from penstock.backends.external.engine import Chunk, EngineFacts, EngineImage, EngineRefused, EngineRequest, KvMoves
from penstock.backends.external.images import Kept, Pictures, Placeholder, mismatch
from penstock.fairness import Share
from penstock.wire.images import PICTURE_BYTES, ImageRules, ImageSpan, image_ids
from penstock.wire.messages import Fault, ImagesWanted, KvEvents, KvSource, ModelInfo, Segment, Submit, Terminal, TransferReport

START, PAD, END = 90, 91, 92
PLACEHOLDER = Placeholder((START, PAD, END), PAD)
CAT, DOG, BIRD = bytes([1] * 16), bytes([2] * 16), bytes([3] * 16)
SIZE = (2, 3)
PIXELS = {CAT: bytes(range(18)), DOG: bytes(range(18, 36)), BIRD: bytes(18)}
# Text, a cat in three positions, text, a dog in two, text. The layout's text around positions belongs to the image.
PROMPT = (5, START, *image_ids(CAT, 3), END, 6, START, *image_ids(DOG, 2), END, 7)
SPANS = (ImageSpan(CAT, 1, 6, (1, 3), SIZE), ImageSpan(DOG, 7, 11, (1, 2), SIZE))
EXPANDED = (5, START, PAD, PAD, PAD, END, 6, START, PAD, PAD, END, 7)
COLLAPSED = (5, START, PAD, END, 6, START, PAD, END, 7)
FACTS = EngineFacts(64, 4, 32, 8)
MODEL = ModelInfo("tiny", "byhand", "words", 100, 1, 1, images=ImageRules("any", {}, "", is_prepared=False))


def submit(number: int = 1, prompt: Sequence[int] = PROMPT, images: tuple[ImageSpan, ...] = SPANS, **fields: Any) -> Submit:
    return Submit(number.to_bytes(16, "big"), tuple(prompt), 8, **{"seed": 7, "images": images, **fields})


def test_each_image_becomes_one_placeholder() -> None:
    assert PLACEHOLDER.collapse(PROMPT, SPANS, len(PROMPT)) == COLLAPSED
    assert PLACEHOLDER.expand(PROMPT) == EXPANDED


def test_a_placeholder_of_one_token_stands_for_tiles_with_text_between_them() -> None:
    tiles = (50, *image_ids(CAT, 4)[:2], 51, *image_ids(CAT, 4)[2:], 50)
    placeholder = Placeholder((PAD,), PAD)
    assert placeholder.collapse((1, *tiles, 2), [ImageSpan(CAT, 1, 8, (1, 2), SIZE)], 9) == (1, PAD, 2)
    assert placeholder.expand((1, *tiles, 2)) == (1, 50, PAD, PAD, 51, PAD, PAD, 50, 2)


def _moved(span: ImageSpan, place: int) -> tuple[int, int]:
    """Where a span is when a token was put at this place."""
    return span.start + (place <= span.start), span.end + (place <= span.start)


@pytest.mark.parametrize("place", [0, 6, len(PROMPT)])
def test_text_that_stands_for_an_image_is_refused(place: int) -> None:
    prompt = (*PROMPT[:place], PAD, *PROMPT[place:])
    moved = [ImageSpan(each.name, *_moved(each, place), each.grid, each.size) for each in SPANS]
    with pytest.raises(EngineRefused) as refused:
        PLACEHOLDER.collapse(prompt, moved, len(prompt))
    assert refused.value.fault.code == "invalid_images"


def test_a_generated_token_may_be_the_one_that_stands_for_images() -> None:
    assert PLACEHOLDER.collapse((*PROMPT, PAD, 8), SPANS, len(PROMPT)) == (*COLLAPSED, PAD, 8)


class EngineByHand:
    """Generates one token when it is told to. It has what pictures a request had when it came."""

    def __init__(self, facts: EngineFacts) -> None:
        self._facts = facts
        self.requests: list[tuple[EngineRequest, list[EngineImage]]] = []
        self.begun = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.refusal: EngineRefused | None = None

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        return self._facts

    async def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append((request, [] if request.images is None else list(request.images.pictures)))
        self.begun.set()
        await self.may_answer.wait()
        if self.refusal is not None:
            raise self.refusal
        yield Chunk((8,))
        yield Chunk((9,), finish="stop")

    def pulled_bytes(self) -> int:
        return 0

    async def ping(self) -> None: ...

    async def close_session(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


class Rig:
    def __init__(self, facts: EngineFacts, model: ModelInfo, pictures: Pictures) -> None:
        self.engine = EngineByHand(facts)
        self.pictures = pictures
        self.wanted: list[ImagesWanted] = []
        self.ends: dict[bytes, Terminal] = {}
        self.told = asyncio.Event()
        options: dict[str, Any] = {"max_sessions": 2, "session_grace": 0.0, "placeholder": PLACEHOLDER, "pictures": pictures}
        self.backend = ExternalBackend(model, self.engine, None, lambda *_: None, lambda: None, **options)  # type: ignore[arg-type]

    def want(self, wanted: ImagesWanted) -> None:
        self.wanted.append(wanted)
        self.told.set()

    def emit(self, segments: Sequence[Segment], _: KvEvents | None, __: Sequence[TransferReport] = ()) -> None:
        for segment in segments:
            if segment.terminal is not None:
                assert segment.id not in self.ends
                self.ends[segment.id] = segment.terminal
        self.told.set()

    def answer(self, *names: bytes) -> None:
        for name in names:
            self.backend.image(name, SIZE, PIXELS[name])

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.told.clear()
                await self.told.wait()

    async def asked(self, number: int) -> None:
        await self.until(lambda: len(self.wanted) == number)

    async def has_begun(self, number: int) -> None:
        async with asyncio.timeout(5):
            while len(self.engine.requests) < number:
                self.engine.begun.clear()
                await self.engine.begun.wait()

    async def ended(self, request: Submit) -> Terminal:
        await self.until(lambda: request.id in self.ends)
        return self.ends[request.id]


@contextlib.asynccontextmanager
async def running(facts: EngineFacts = FACTS, model: ModelInfo = MODEL, **limits: int) -> AsyncIterator[Rig]:
    rig = Rig(facts, model, Pictures(**limits))
    await rig.backend.start(rig.emit, rig.want)
    try:
        yield rig
    finally:
        await rig.backend.close()
        rig.pictures.check_integrity()
        assert not rig.pictures.waiting


async def test_a_generation_waits_for_its_pictures_and_the_engine_gets_them_in_order() -> None:
    async with running() as rig:
        request = submit()
        rig.backend.submit(request)
        await rig.asked(1)
        assert rig.wanted == [ImagesWanted(request.id, (CAT, DOG))]
        rig.answer(DOG)
        await asyncio.sleep(0)
        assert not rig.engine.requests
        rig.answer(CAT)
        await rig.has_begun(1)
        [(asked, pictures)] = rig.engine.requests
        assert pictures == [EngineImage(CAT, SIZE, PIXELS[CAT]), EngineImage(DOG, SIZE, PIXELS[DOG])]
        assert asked.images is not None
        assert (asked.token_ids, asked.images.token_ids) == (EXPANDED, COLLAPSED)
        rig.engine.may_answer.set()
        await rig.ended(request)
        assert not asked.images.pictures, "the engine has them, or what it made of them"


async def test_what_is_kept_is_not_asked_for_and_a_picture_that_comes_twice_in_a_prompt_is_asked_for_once() -> None:
    async with running() as rig:
        rig.engine.may_answer.set()
        rig.backend.submit(submit(1))
        await rig.asked(1)
        rig.answer(CAT, DOG)
        await rig.ended(submit(1))
        twice = (START, *image_ids(CAT, 1), END, START, *image_ids(CAT, 1), END)
        again = submit(2, twice, (ImageSpan(CAT, 0, 3, (1, 1), SIZE), ImageSpan(CAT, 3, 6, (1, 1), SIZE)))
        rig.backend.submit(again)
        await rig.ended(again)
        assert len(rig.wanted) == 1
        assert [picture.name for picture in rig.engine.requests[-1][1]] == [CAT, CAT]


async def test_the_least_recently_used_picture_is_forgotten_first() -> None:
    async with running(max_cached=2 * (18 + PICTURE_BYTES)) as rig:
        rig.engine.may_answer.set()
        for number, name in enumerate((CAT, DOG, CAT, BIRD, CAT, DOG)):
            before = len(rig.wanted)
            request = submit(number, (START, *image_ids(name, 1), END), (ImageSpan(name, 0, 3, (1, 1), SIZE),))
            rig.backend.submit(request)
            await rig.until(lambda: len(rig.wanted) > before or request.id in rig.ends)  # noqa: B023
            if len(rig.wanted) > before:
                rig.answer(name)
            await rig.ended(request)
        assert [wanted.names for wanted in rig.wanted] == [(CAT,), (DOG,), (BIRD,), (DOG,)]


def test_tiny_things_that_are_kept_take_memory_for_their_books() -> None:
    kept: Kept[str] = Kept(10 * PICTURE_BYTES)
    for number in range(20):
        kept.put(bytes([number]), "tiny", 4)
        kept.check_integrity()
    assert sum(kept.get(bytes([number])) is not None for number in range(20)) == 9


async def test_one_answer_is_for_all_that_wait() -> None:
    async with running() as rig:
        rig.engine.may_answer.set()
        requests = [submit(number) for number in range(3)]
        for request in requests:
            rig.backend.submit(request)
        await rig.asked(3)
        rig.answer(CAT, DOG)
        for request in requests:
            await rig.ended(request)


async def test_a_cancelled_generation_waits_for_nothing_and_the_others_still_do() -> None:
    async with running() as rig:
        rig.engine.may_answer.set()
        rig.backend.submit(submit(1))
        rig.backend.submit(submit(2))
        await rig.asked(2)
        rig.backend.cancel(submit(1).id)
        await asyncio.sleep(0)
        rig.answer(CAT, DOG)
        await rig.ended(submit(2))
        assert submit(1).id not in rig.ends
        assert len(rig.engine.requests) == 1


@pytest.mark.parametrize("retryable", [True, False])
async def test_a_refused_picture_ends_the_generation(retryable: bool) -> None:
    async with running() as rig:
        rig.backend.submit(submit())
        await rig.asked(1)
        rig.answer(CAT)
        rig.backend.image_refused(DOG, "it is gone", retryable=retryable)
        fault = await rig.ended(submit())
        assert fault == Fault("image_lost", "an image of the prompt is not available: it is gone", retryable=retryable)
        assert not rig.engine.requests


@pytest.mark.parametrize(("size", "pixels"), [(SIZE, bytes(17)), ((3, 2), bytes(18))])
async def test_pixels_that_are_not_those_of_the_prompt_are_refused(size: tuple[int, int], pixels: bytes) -> None:
    async with running() as rig:
        rig.backend.submit(submit())
        await rig.asked(1)
        rig.answer(DOG)
        rig.backend.image(CAT, size, pixels)
        fault = await rig.ended(submit())
        assert isinstance(fault, Fault)
        assert (fault.code, fault.retryable) == ("image_lost", False)


async def test_features_elsewhere_are_of_no_use() -> None:
    async with running() as rig:
        rig.engine.may_answer.set()
        rig.backend.submit(submit())
        await rig.asked(1)
        rig.answer(CAT)
        rig.backend.image_at(DOG, KvSource(bytes(16), "tcp://there:1"))
        await rig.asked(2)
        assert rig.wanted[1] == ImagesWanted(submit().id, (DOG,), "byhand takes pixels only")
        rig.answer(DOG)
        await rig.ended(submit())


async def test_prompts_with_more_pixels_than_there_is_room_for_wait_before_they_ask() -> None:
    async with running(max_held=36) as rig:
        rig.backend.submit(submit(1))
        await rig.asked(1)
        rig.answer(CAT, DOG)
        waiting = submit(2, (START, *image_ids(BIRD, 1), END), (ImageSpan(BIRD, 0, 3, (1, 1), SIZE),))
        rig.backend.submit(waiting)
        rig.backend.submit(submit(3, lane="another tenant"))
        await rig.has_begun(2)
        assert len(rig.wanted) == 1, "the other tenant has what is kept, and the second prompt has not asked"
        rig.engine.may_answer.set()
        await rig.asked(2)
        assert rig.wanted[1].generation == waiting.id
        rig.answer(BIRD)
        for number in (1, 2, 3):
            await rig.ended(submit(number))


async def test_an_engine_that_makes_something_else_of_images_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    async with running() as rig:
        rig.engine.refusal = mismatch("byhand", 40, 12)
        rig.engine.may_answer.set()
        for number in (1, 2):
            rig.backend.submit(submit(number))
            if number == 1:
                await rig.asked(1)
                rig.answer(CAT, DOG)
            fault = await rig.ended(submit(number))
            assert isinstance(fault, Fault)
            assert (fault.code, fault.retryable) == ("image_mismatch", False)
            assert "40 tokens instead of 12" in fault.message
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1


async def test_a_model_of_text_and_a_pair_that_meets_refuse_images() -> None:
    text_only = ModelInfo("tiny", "byhand", "words", 100, 1, 1)
    meeting = EngineFacts(64, 4, 32, 8, moves=KvMoves("meeting", b"x", computes=False))
    for options in ({"model": text_only}, {"facts": meeting}):
        async with running(**options) as rig:
            request = submit(source=KvSource(bytes(16), "tcp://there:1"))
            rig.backend.submit(request)
            fault = await rig.ended(request)
            assert isinstance(fault, Fault)
            assert fault.code == "unsupported"
            assert not rig.wanted


async def test_room_is_given_back_when_a_waiting_prompt_is_cancelled() -> None:
    pictures = Pictures(max_held=36)
    wanted: list[ImagesWanted] = []
    pictures.want = wanted.append
    first, second = Share(), Share()
    asking = asyncio.create_task(pictures.get(submit(1), first))
    waiting = asyncio.create_task(pictures.get(submit(2), second))
    await asyncio.sleep(0)
    assert len(wanted) == 1
    waiting.cancel()
    asking.cancel()
    await asyncio.gather(asking, waiting, return_exceptions=True)
    pictures.release(first)
    pictures.release(second)
    pictures.check_integrity()
    assert not pictures.waiting
    third = asyncio.create_task(pictures.get(submit(3), Share()))
    await asyncio.sleep(0)
    assert len(wanted) == 2
    pictures.put(CAT, SIZE, PIXELS[CAT])
    pictures.put(DOG, SIZE, PIXELS[DOG])
    assert [picture.name for picture in await third] == [CAT, DOG]


class Pixels(bytearray):
    """Pixels that weak references may refer to."""


async def test_a_prompt_that_is_refused_lets_go_of_the_pictures_it_had() -> None:
    """Without the garbage collector, which comes seldom."""
    pictures = Pictures(max_cached=0)
    pictures.want = lambda _: None
    asking = asyncio.create_task(pictures.get(submit(1), Share()))
    await asyncio.sleep(0)
    pixels: Any = Pixels(PIXELS[CAT])
    held = weakref.ref(pixels)
    gc.disable()
    try:
        pictures.put(CAT, SIZE, pixels)
        del pixels
        pictures.refuse(DOG, "it is gone", retryable=True)
        with contextlib.suppress(EngineRefused):
            await asking
        del asking
        assert held() is None
    finally:
        gc.enable()
    pictures.check_integrity()
