"""The simulator's encoder: it makes features of the pixels that it gets, and finds those of another picture."""

from __future__ import annotations

import asyncio

import pytest

from penstock.backends.simulated_images import SimulatedEncoder, promised_seals, seed_with_images
from penstock.backends.simulator import tokens_between
from penstock.config.engines import ImageFaults, SimulatorConfig, parse_image_fault
from penstock.kv.features import Features, PlacedImage, place_images
from penstock.wire.images import ImageSpan, image_ids
from simulated_pictures import RULES, SIZE, picture

CAT, DOG = picture(1), picture(2)
SPANS = [ImageSpan(each.name, 30 * index, 30 * index + 24, each.layout.grid, SIZE) for index, each in enumerate((CAT, DOG))]
PROMPT = (*image_ids(CAT.name, 24), *range(6), *image_ids(DOG.name, 24))
PLACED = place_images(PROMPT, SPANS)
GENERATION = b"g" * 16


class Bench:
    """An encoder whose images one generation wants."""

    def __init__(self, **config: object) -> None:
        self.failures: list[str] = []
        self.deaths = 0
        self.lost: list[str] = []
        self.awake = asyncio.Event()
        self.features = Features(8)
        settings = SimulatorConfig(**{"encode_ms": 1.0, **config})  # type: ignore[arg-type]
        self.encoder = SimulatedEncoder(settings, RULES, self.features, lambda: None, self.failures.append, self._die)

    def _die(self) -> None:
        self.deaths += 1

    def want(self, *placed: PlacedImage) -> None:
        def fail(reason: str, retryable: bool) -> None:
            assert retryable
            self.lost.append(reason)

        assert not self.features.want(GENERATION, placed, "", 1, 0, self.awake.set, fail)
        self.features.take_asked()

    async def encoded(self) -> None:
        async with asyncio.timeout(10):
            await self.awake.wait()

    def close(self) -> None:
        self.encoder.close()
        self.features.leave(GENERATION)
        self.features.check_integrity()


async def test_features_are_made_of_the_pixels_and_those_of_another_picture_are_found() -> None:
    bench = Bench()
    bench.want(*PLACED)
    bench.encoder.take(CAT.name, SIZE, CAT.pixels)
    bench.encoder.take(DOG.name, SIZE, CAT.pixels)
    await bench.encoded()
    assert bench.features.encoded == 2
    bench.encoder.check(GENERATION, PLACED, 0, 30)
    assert bench.failures == []
    bench.encoder.check(GENERATION, PLACED, 31, 32)
    assert [DOG.name.hex() in failure for failure in bench.failures] == [True]
    bench.close()


async def test_slots_that_were_overwritten_are_found() -> None:
    bench = Bench()
    bench.want(PLACED[0])
    bench.encoder.take(CAT.name, SIZE, CAT.pixels)
    await bench.encoded()
    (_, second) = bench.features.slots_held(GENERATION, CAT.name)
    bench.encoder.memory.fill(second, b"something else")
    bench.encoder.check(GENERATION, PLACED, 23, 24)
    assert len(bench.failures) == 1
    bench.close()


@pytest.mark.parametrize(("size", "pixels"), [((64, 96), CAT.pixels), (SIZE, CAT.pixels[:-3])])
async def test_pixels_of_another_size_end_those_that_wait_and_not_the_engine(size: tuple[int, int], pixels: bytes) -> None:
    bench = Bench()
    bench.want(PLACED[0])
    bench.encoder.take(CAT.name, size, pixels)
    assert ["expected 3 for each pixel" in reason for reason in bench.lost] == [True]
    assert not bench.features.encoded
    bench.close()


@pytest.mark.parametrize(("fault", "lost", "deaths"), [(ImageFaults(lose=1), 1, 0), (ImageFaults(kill=1), 1, 1), (ImageFaults(), 0, 0)])
async def test_faults_are_injected(fault: ImageFaults, lost: int, deaths: int) -> None:
    bench = Bench(image_fault=fault)
    bench.want(PLACED[0])
    bench.encoder.take(CAT.name, SIZE, CAT.pixels)
    assert (len(bench.lost), bench.deaths) == (lost, deaths)
    bench.encoder.take(DOG.name, SIZE, DOG.pixels)
    bench.close()


async def test_an_image_takes_its_time_and_one_comes_after_the_other() -> None:
    bench = Bench(encode_ms=1e9)
    bench.want(*PLACED)
    bench.encoder.take(CAT.name, SIZE, CAT.pixels)
    bench.encoder.take(DOG.name, SIZE, DOG.pixels)
    await asyncio.sleep(0)
    assert (bench.features.encoded, bench.features.positions_to_encode) == (0, 48)
    bench.close()


def test_the_text_is_a_function_of_seed_and_images_in_order() -> None:
    cat, dog = promised_seals(SPANS)
    seeds = {seed_with_images(seed, seals) for seed in (1, 2) for seals in ((), (cat,), (dog,), (cat, dog), (dog, cat), (cat, cat))}
    assert len(seeds) == 12
    assert seed_with_images(7, ()) == 7
    words = range(300, 1800)
    assert tokens_between(seed_with_images(1, [cat]), 0, 20, words) != tokens_between(1, 0, 20, words)


@pytest.mark.parametrize("text", ["lose=2", "drop=0.5", "lose=0.6,kill=0.6", "lose", ""])
def test_faults_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is unknown or given twice|is not|are 1\.2"):
        parse_image_fault(text)


def test_faults_are_read_and_shown() -> None:
    assert parse_image_fault("lose=0.05,kill=0.01,seed=4") == ImageFaults(0.05, 0.01, 4)
    assert str(ImageFaults(0.05, 0.01, 4)) == "lose=0.05,kill=0.01,seed=4"
    assert RULES.family == "simulator"
