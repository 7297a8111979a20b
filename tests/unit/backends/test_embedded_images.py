"""Images in the embedded backend: what a worker asks for, and what it does with each answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest
from torch import Tensor

from image_engine import ImageEngine, chat, expected_tokens
from moving import Hub
from penstock.backends.embedded import EmbeddedBackend
from penstock.kv.feature_moves import NO_TRANSPORT, FeatureMoves
from penstock.kv.features import place_images
from penstock.wire.messages import Fault, Finish, ImagesWanted, KvEvents, KvSource, ModelInfo, Segment, Terminal, TransferReport
from tiny_models import make_submit
from tiny_vision import VisionPrompt, vision_model

MODEL = ModelInfo("tiny", "embedded", "none", 300, 4096, 16)
MOVE = (7).to_bytes(16)
COUNT = 6


class Receiver:
    """What a worker runtime would get."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, list[int]] = {}
        self.terminals: dict[bytes, Terminal] = {}
        self.transfers: list[TransferReport] = []
        self.asked: list[ImagesWanted] = []
        self.emitted = 0
        self._news = asyncio.Event()

    def emit(self, segments: Sequence[Segment], _: KvEvents | None, transfers: Sequence[TransferReport] = ()) -> None:
        for segment in segments:
            if segment.delta is not None:
                self.tokens.setdefault(segment.id, []).extend(segment.delta.token_ids)
            if segment.terminal is not None:
                self.terminals[segment.id] = segment.terminal
        self.transfers += transfers
        self.emitted += 1
        self._news.set()

    def want(self, wanted: ImagesWanted) -> None:
        self.asked.append(wanted)
        self._news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def started(
    spoil: Callable[[bytes, Tensor], Tensor] = lambda _, made: made, rigs: list[ImageEngine] | None = None
) -> AsyncIterator[tuple[EmbeddedBackend, Receiver]]:
    receiver, rigs = Receiver(), [] if rigs is None else rigs
    rigs.append(ImageEngine(vision_model("qwen3_vl"), spoil=spoil))
    backend = EmbeddedBackend(MODEL, lambda: rigs[0].engine, lambda: None)
    await backend.start(receiver.emit, receiver.want)
    try:
        yield backend, receiver
    finally:
        await backend.close()
        rigs[0].engine.check_integrity()


@pytest.fixture(scope="module")
def prompt() -> VisionPrompt:
    return chat("qwen3_vl", [(96, 64)], seed=6)


def submit(backend: EmbeddedBackend, prompt: VisionPrompt) -> bytes:
    request = make_submit(1, prompt.token_ids, COUNT, images=prompt.spans)
    backend.submit(request)
    return request.id


async def test_pixels(prompt: VisionPrompt) -> None:
    (image,) = prompt.images
    async with started() as (backend, receiver):
        assert backend.model.image_fingerprint
        generation = submit(backend, prompt)
        await receiver.until(lambda: bool(receiver.asked))
        assert receiver.asked == [ImagesWanted(generation, (image.name,))]
        backend.image(b"x" * 16, image.size, b"nobody wants this one")
        backend.image(image.name, image.size, image.pixels)
        await receiver.until(lambda: bool(receiver.terminals))
        assert receiver.terminals[generation] == Finish("length")
        assert [receiver.tokens[generation]] == expected_tokens([prompt], "qwen3_vl", COUNT)
        assert backend.stats().images_encoded == 1


async def test_a_refusal(prompt: VisionPrompt) -> None:
    async with started() as (backend, receiver):
        generation = submit(backend, prompt)
        await receiver.until(lambda: bool(receiver.asked))
        backend.image_refused(prompt.images[0].name, "it is gone", retryable=True)
        await receiver.until(lambda: bool(receiver.terminals))
        fault = receiver.terminals[generation]
        assert isinstance(fault, Fault)
        assert (fault.code, fault.retryable) == ("image_lost", True)


async def test_a_source_that_cannot_be_reached_and_then_pixels(prompt: VisionPrompt) -> None:
    (image,) = prompt.images
    async with started() as (backend, receiver):
        generation = submit(backend, prompt)
        await receiver.until(lambda: bool(receiver.asked))
        backend.image_at(image.name, KvSource(MOVE, "nowhere", waits=True))
        await receiver.until(lambda: len(receiver.asked) > 1)
        assert receiver.asked[1] == ImagesWanted(generation, (image.name,), NO_TRANSPORT)
        backend.image(image.name, image.size, image.pixels)
        await receiver.until(lambda: bool(receiver.terminals))
        assert [receiver.tokens[generation]] == expected_tokens([prompt], "qwen3_vl", COUNT)


async def test_features_that_another_worker_made(prompt: VisionPrompt) -> None:
    """The tower of this one is not used, and the tokens are the same."""
    (image,) = prompt.images

    def fail(_: bytes, __: Tensor) -> Tensor:
        raise AssertionError("this worker encodes")

    encoder, hub = ImageEngine(vision_model("qwen3_vl")), Hub()
    books, maker = encoder.images.features, encoder.images.maker
    moves = FeatureMoves(books, maker.fingerprint, maker.memory, lambda what: what())
    moves.connect(hub.add("e", moves))
    books.want(b"job", place_images(prompt.token_ids, prompt.spans), "", 1, 0, lambda: None, lambda *_: None)
    made = books.begin(image.name)
    assert made is not None
    maker.encode(made.span, image.pixels, made.slots)
    books.complete(image.name)
    moves.expect(MOVE, 5.0)
    moves.offer(MOVE, image.name)
    async with started(fail) as (backend, receiver):
        assert backend.features is not None
        backend.features.connect(hub.add("w", backend.features))
        generation = submit(backend, prompt)
        await receiver.until(lambda: bool(receiver.asked))
        backend.image_at(image.name, KvSource(MOVE, "e", waits=True))
        while not receiver.terminals:
            hub.move()
            await asyncio.sleep(0)
        assert [receiver.tokens[generation]] == expected_tokens([prompt], "qwen3_vl", COUNT)
        assert backend.stats().images_encoded == 0
        assert [report.outcome for report in receiver.transfers] == ["done"]
        backend.end_transfer(MOVE)
    encoder.close()


async def test_a_worker_that_waits_for_an_image_is_not_silent(prompt: VisionPrompt) -> None:
    """Neither until its pixels come, nor while its tower goes on."""
    rigs: list[ImageEngine] = []
    may_end = threading.Event()

    def take_long(_: bytes, made: Tensor) -> Tensor:
        while not may_end.wait(0.01):
            rigs[0].images.maker.on_progress()
        return made

    (image,) = prompt.images
    async with started(take_long, rigs) as (backend, receiver):
        generation = submit(backend, prompt)
        await receiver.until(lambda: bool(receiver.asked))
        await receiver.until(lambda: receiver.emitted > 5)
        backend.image(image.name, image.size, image.pixels)
        emitted = receiver.emitted
        await receiver.until(lambda: receiver.emitted > emitted + 5)
        may_end.set()
        await receiver.until(lambda: bool(receiver.terminals))
        assert receiver.terminals[generation] == Finish("length")


async def test_the_end_of_a_worker_that_encodes(prompt: VisionPrompt) -> None:
    """It does not wait for what nobody needs any more."""
    began, may_go_on = threading.Event(), threading.Event()

    def wait(_: bytes, made: Tensor) -> Tensor:
        began.set()
        may_go_on.wait(30)
        return made

    (image,) = prompt.images
    async with started(wait) as (backend, receiver):
        submit(backend, prompt)
        await receiver.until(lambda: bool(receiver.asked))
        backend.image(image.name, image.size, image.pixels)
        await asyncio.to_thread(began.wait, 30)
        closing = asyncio.create_task(backend.close())
        may_go_on.set()
        await closing
