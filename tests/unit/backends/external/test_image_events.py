"""Blocks with images in the events of vLLM get the names that our own prompts have. SGLang's have none."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.backends.external.image_events import KeyedImages, image_uuid
from penstock.backends.external.kv_events import BlockMirror, EngineStored
from penstock.kv.blocks import block_hashes, tenant_root
from penstock.wire.images import FIRST_IMAGE_ID, ImageSpan, image_ids
from penstock.wire.messages import BlocksStored

SIZE = 4
START, PAD, END, TILE = 90, 91, 92, 50
CAT, DOG = bytes([1] * 16), bytes([2] * 16)
ALICE = tenant_root("alice")
PROMPT = (5, START, *image_ids(CAT, 9), END, 6, 7, START, *image_ids(DOG, 2), END, *range(10, 17))
# Where vLLM says that an image is: only its positions.
AT = {CAT: (2, 11), DOG: (15, 17)}


def expanded(prompt: Sequence[int]) -> list[int]:
    return [PAD if each >= FIRST_IMAGE_ID else each for each in prompt]


def keys(places: Sequence[tuple[bytes, int, int]], length: int, salt: str | None = None) -> list[Any]:
    """vLLM's keys of each full block."""
    made: list[Any] = []
    for start in range(0, length - SIZE + 1, SIZE):
        pairs: list[Any] = [[image_uuid(name), first - start] for name, first, end in places if first < start + SIZE and end > start]
        pairs += [salt] if salt is not None and start == 0 else []
        made.append(pairs or None)
    return made


def stored(first: int, count: int, tokens: Sequence[int], block_keys: Sequence[Any] | None) -> EngineStored:
    part = list(tokens[first * SIZE : (first + count) * SIZE])
    chosen = None if block_keys is None else list(block_keys[first : first + count])
    return EngineStored(list(range(first, first + count)), first - 1 if first else None, part, SIZE, medium="GPU", extra_keys=chosen)  # type: ignore[arg-type]


def names_in(mirror: BlockMirror) -> list[bytes]:
    return [name for event in mirror.snapshot().events if isinstance(event, BlocksStored) for name in event.blocks]


def of_vllm(prompt: Sequence[int], places: Sequence[tuple[bytes, int, int]], pieces: Sequence[int], salt: str | None = None) -> BlockMirror:
    """A mirror that has heard of these blocks, so many of them at a time."""
    return _heard(KeyedImages(PAD), expanded(prompt), keys(places, len(prompt), salt), pieces)


def _heard(images: KeyedImages, tokens: Sequence[int], block_keys: Sequence[Any] | None, pieces: Sequence[int]) -> BlockMirror:
    mirror = BlockMirror(SIZE, images=images)
    first = 0
    for count in pieces:
        mirror.apply([stored(first, count, tokens, block_keys)])
        mirror.check_integrity()
        first += count
    return mirror


PLACES = [(name, *place) for name, place in AT.items()]
BLOCKS = len(PROMPT) // SIZE


@pytest.mark.parametrize("pieces", [[BLOCKS], [1] * BLOCKS, [2, 1, BLOCKS - 3]])
@pytest.mark.parametrize("salt", [None, ALICE.hex()])
def test_blocks_of_vllm_have_our_names_however_they_are_cut(pieces: list[int], salt: str | None) -> None:
    root = b"" if salt is None else ALICE
    assert names_in(of_vllm(PROMPT, PLACES, pieces, salt)) == block_hashes(PROMPT, SIZE, root)


def test_a_salt_after_the_keys_of_an_image_in_the_first_block_is_found() -> None:
    prompt = (*image_ids(CAT, 6), 3, 4)
    assert names_in(of_vllm(prompt, [(CAT, 0, 6)], [2], ALICE.hex())) == block_hashes(prompt, SIZE, ALICE)


def test_tiles_with_text_between_them_are_one_image() -> None:
    ids = image_ids(CAT, 7)
    prompt = (1, TILE, *ids[:3], TILE, *ids[3:6], TILE, ids[6], TILE, 2, 3)
    for pieces in ([3], [1, 1, 1]):
        assert names_in(of_vllm(prompt, [(CAT, 1, 12)], pieces)) == block_hashes(prompt, SIZE)[:3]


def test_two_images_in_one_block_and_one_image_twice() -> None:
    prompt = (1, *image_ids(CAT, 1), *image_ids(DOG, 1), 2, *image_ids(CAT, 2), *image_ids(CAT, 2), 3, 4, 5, 6)
    places = [(CAT, 1, 2), (DOG, 2, 3), (CAT, 4, 6), (CAT, 6, 8)]
    assert names_in(of_vllm(prompt, places, [1, 2])) == block_hashes(prompt, SIZE)


def test_random_prompts_have_our_names_and_other_pictures_have_others() -> None:
    chance = random.Random(5)
    seen: dict[bytes, tuple[int, ...]] = {}
    for _ in range(200):
        prompt: list[int] = []
        places: list[tuple[bytes, int, int]] = []
        for _ in range(chance.randint(1, 6)):
            prompt += [chance.randrange(50) for _ in range(chance.randrange(6))]
            name, positions = bytes([chance.randrange(4)] * 16), chance.randint(1, 11)
            places.append((name, len(prompt), len(prompt) + positions))
            prompt += image_ids(name, positions)
        prompt += [1] * SIZE
        blocks = len(prompt) // SIZE
        pieces = [1] * blocks if chance.random() < 0.5 else [blocks]
        names = names_in(of_vllm(prompt, places, pieces))
        assert names == block_hashes(prompt, SIZE)
        for index, name in enumerate(names):
            before = tuple(prompt[: (index + 1) * SIZE])
            assert seen.setdefault(name, before) == before


@pytest.mark.parametrize(
    "strange",
    [
        ["0" * 64, -2],
        [CAT.hex(), -2],
        "image-" + CAT.hex(),
        [image_uuid(CAT)],
        [image_uuid(CAT), "2"],
        [image_uuid(DOG), -2],
    ],
    ids=[
        "a hash of vLLM's",
        "a name without its prefix",
        "a bare uuid",
        "no place",
        "a place that is no number",
        "an image that did not begin",
    ],
)
def test_blocks_with_images_of_others_are_ignored_and_those_before_stay(strange: Any) -> None:
    block_keys = keys(PLACES, len(PROMPT))
    block_keys[1] = [strange]
    assert names_in(_heard(KeyedImages(PAD), expanded(PROMPT), block_keys, [BLOCKS])) == block_hashes(PROMPT, SIZE)[:1]


def test_without_images_a_block_with_keys_is_ignored() -> None:
    mirror = BlockMirror(SIZE)
    mirror.apply([stored(0, BLOCKS, expanded(PROMPT), [None, [[image_uuid(CAT), 0]], None, None, None])])
    assert names_in(mirror) == block_hashes(PROMPT, SIZE)[:0] + block_hashes(expanded(PROMPT), SIZE)[:1]
    pads = BlockMirror(SIZE)
    pads.apply([stored(0, 3, [1, 2, 3, 4, 5, 2**62, 7, 8, 9, 10, 11, 12], None)])
    assert names_in(pads) == block_hashes([1, 2, 3, 4], SIZE)


def test_spans_of_the_prompt_are_as_this_test_says() -> None:
    spans = (ImageSpan(CAT, *AT[CAT], (3, 3), (9, 9)), ImageSpan(DOG, *AT[DOG], (1, 2), (9, 9)))
    for span in spans:
        assert PROMPT[span.start : span.end] == image_ids(span.name, span.end - span.start)
