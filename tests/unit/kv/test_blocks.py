"""Names of blocks: equal prompts share them, and prompts with other images do not."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.blocks import PIECE_BLOCKS, block_hash, block_hash_pieces, block_hashes
from penstock.wire.images import image_ids

NAMES = st.binary(min_size=16, max_size=16)
TEXTS = st.lists(st.integers(0, 2**20), max_size=40)
BLOCK_SIZES = st.sampled_from([1, 3, 16])
IMAGES = st.lists(st.tuples(TEXTS, NAMES, st.integers(1, 30)), min_size=1, max_size=3)


def prompt_of(images: Sequence[tuple[list[int], bytes, int]], end: Sequence[int]) -> list[int]:
    return [each for text, name, positions in images for each in (*text, *image_ids(name, positions))] + list(end)


@given(images=IMAGES, end=TEXTS, block_size=BLOCK_SIZES)
def test_equal_prompts_share_all_blocks_and_each_is_named_as_alone(
    images: list[tuple[list[int], bytes, int]], end: list[int], block_size: int
) -> None:
    prompt = prompt_of(images, end)
    names = block_hashes(tuple(prompt), block_size)
    assert names == block_hashes(prompt, block_size)
    assert len(names) == len(prompt) // block_size
    parent = b""
    for index, name in enumerate(names):
        assert name == block_hash(parent, prompt[index * block_size : (index + 1) * block_size])
        parent = name


@given(images=IMAGES, which=st.integers(0, 2), other=NAMES, end=TEXTS, block_size=BLOCK_SIZES)
def test_prompts_that_differ_in_one_image_share_no_block_from_it_on(
    images: list[tuple[list[int], bytes, int]], which: int, other: bytes, end: list[int], block_size: int
) -> None:
    which %= len(images)
    text, name, positions = images[which]
    if name == other:
        return
    changed = [*images[:which], (text, other, positions), *images[which + 1 :]]
    first, second = (block_hashes(prompt_of(each, end), block_size) for each in (images, changed))
    start = len(prompt_of(images[:which], text)) // block_size
    assert first[:start] == second[:start]
    assert set(first[start:]).isdisjoint(second[start:])


@given(text=TEXTS, name=NAMES, block_size=BLOCK_SIZES)
def test_text_before_an_image_has_the_names_of_text_alone(text: list[int], name: bytes, block_size: int) -> None:
    whole = len(text) // block_size
    assert block_hashes([*text, *image_ids(name, 5)], block_size)[:whole] == block_hashes(text, block_size)


def test_names_of_text_stay_as_they_are() -> None:
    """Workers of other versions, and disks, know them."""
    assert block_hash(b"", [1, 2, 3]).hex() == "b30a3c159d7e8193559a42a84f1fcae1"
    assert block_hashes(range(32), 16)[1].hex() == "23c42dc62d8010a50554cd07c5d1c92d"


def test_a_block_of_an_image_is_none_of_text() -> None:
    """The same bytes: one id of eight, or two of four."""
    (drawn,) = image_ids(bytes(16), 1)
    assert block_hash(b"", [drawn]) != block_hash(b"", [drawn % 2**32, drawn // 2**32])


def test_long_prompts_are_named_piece_by_piece() -> None:
    prompt = [*range(2 * PIECE_BLOCKS), *image_ids(bytes(16), 3)]
    assert [len(piece) for piece in block_hash_pieces(prompt, 1)] == [PIECE_BLOCKS, PIECE_BLOCKS, 3]
    assert block_hashes(prompt, 1)[:-3] == block_hashes(prompt[:-3], 1)
