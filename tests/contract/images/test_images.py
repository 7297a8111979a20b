"""Images in engines of others: the tokens of transformers, whatever is cached, and never one picture for another."""

from __future__ import annotations

import asyncio

import pytest
from PIL import Image

from contract.images.looking import VisionRig, picture
from penstock.kv.blocks import block_hashes
from penstock.wire.images import FIRST_IMAGE_ID
from penstock.wire.messages import Fault
from tiny_vision import PLACEHOLDERS

SIZES = ((96, 64), (64, 96), (33, 200), (150, 20), (128, 128))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_tokens_are_those_of_transformers(rig: VisionRig, count: int) -> None:
    pictures = [picture(10 * count + index, *SIZES[index]) for index in range(count)]
    parts = [part for index in range(count) for part in (f"The river {index} ", index)]
    text = rig.text(*parts, " runs where?")
    request = rig.look(text, pictures)
    positions = [each >= FIRST_IMAGE_ID for each in request.token_ids]
    assert sum(positions) == sum(each >= FIRST_IMAGE_ID for each in rig.seen(text, pictures).token_ids)
    assert len(positions) == len(rig.seen(text, pictures).token_ids)
    rig.check_seen(rig.ask(request), text, pictures)


def test_text_alone(rig: VisionRig) -> None:
    text = rig.text("A heavy stone in cold water")
    rig.check_seen(rig.ask(rig.look(text, [])), text, [])
    assert not rig.tap.asked


def test_swapped_and_other_pictures_have_other_answers(rig: VisionRig) -> None:
    """The text is the same, and so is the number of positions: only the pictures differ."""
    text = rig.text("first ", 0, " second ", 1, " which?")
    first, second, third = (picture(seed) for seed in (31, 32, 33))
    answers = []
    for pair in ((first, second), (second, first), (first, third), (first, first)):
        generation = rig.ask(rig.look(text, pair))
        rig.check_seen(generation, text, pair)
        answers.append(generation.tokens)
    assert len(set(answers)) == len(answers)


def test_equal_patches_in_another_shape_are_another_picture(rig: VisionRig) -> None:
    """Of one colour, so that all patches are equal, and there are as many of them: only the shape differs."""
    text = rig.text("what shape is this: ", 0, " ")
    answers = []
    for size in ((256, 64), (64, 256), (128, 128), (256, 64)):
        shape = Image.new("RGB", size, (90, 140, 30))
        generation = rig.ask(rig.look(text, [shape]))
        rig.check_seen(generation, text, [shape])
        answers.append(generation.tokens)
    assert answers[0] == answers[3]


def test_many_at_once(rig: VisionRig) -> None:
    text = rig.text("one of many: ", 0)
    pictures = [picture(40 + number, *SIZES[number % len(SIZES)]) for number in range(12)]
    generations = rig.run(rig.finish([rig.look(text, [each]) for each in pictures]))
    for generation, each in zip(generations, pictures, strict=True):
        rig.check_seen(generation, text, [each])


def test_a_second_turn_reuses_the_first_and_pictures_are_asked_for_once(rig: VisionRig) -> None:
    first, second = picture(51, 128, 128), picture(52)
    said = rig.text("Look: ", 0, " and say " + "more " * 60)
    opening = rig.ask(rig.look(said, [first]))
    rig.check_seen(opening, said, [first])
    answer = "It is a river."
    text = f"{said}{answer}<|im_end|>\n" + rig.text("And this? ", 0)
    request = rig.look(text, [first, second])
    shared = len(rig.look(said, [first]).token_ids) // rig.model.block_size
    following = rig.ask(request)
    rig.check_seen(following, text, [first, second])
    assert following.cached_tokens == shared * rig.model.block_size
    assert shared > 2
    names = [span.name for span in request.images]
    assert [wanted.names for wanted in rig.tap.asked] == [(names[0],), (names[1],)]


@pytest.mark.parametrize("offset", [1, 7])
def test_going_on_from_the_middle(rig: VisionRig, offset: int) -> None:
    """What a worker does that takes over a generation."""
    text, pictures = rig.text("before ", 0, " between ", 1, " after"), [picture(61), picture(62, 64, 96)]
    whole = rig.ask(rig.look(text, pictures))
    request = rig.look(text, pictures)
    rest = rig.ask(rig.request((*request.token_ids, *whole.tokens[:offset]), 24, offset=offset, images=request.images))
    assert rest.deltas[0].offset == offset
    rig.check_seen(rest, text, pictures)


def test_the_index_knows_prompts_with_images_and_none_of_other_pictures(rig: VisionRig) -> None:
    """Routing goes by it: as many blocks as it has of a prompt, so many are cached."""
    size = rig.model.block_size
    text = rig.text("In the index " + "before " * 30, 0, " and ", 1, " with " + "words " * 30)
    request = rig.look(text, [picture(71, 256, 192), picture(72, 80, 80)])
    names = block_hashes(request.token_ids, size)
    before_images = request.images[0].start // size
    assert 0 < before_images < len(names) - 2
    rig.ask(request)
    indexed = before_images if rig.setup.engine == "sglang" else len(names)
    rig.run(rig.until(lambda: rig.tap.replay.overlap(names) == indexed))
    other = rig.look(text, [picture(71, 256, 192), picture(73, 80, 80)])
    if rig.setup.engine == "sglang":
        assert rig.ask(other).cached_tokens > before_images * size, "it has more than the router knows"
        return
    known = rig.tap.replay.overlap(block_hashes(other.token_ids, size))
    until_the_second = other.images[1].start // size
    assert until_the_second <= known <= until_the_second + 1
    generation = rig.ask(other)
    assert generation.cached_tokens == known * size


def test_two_tenants_share_nothing(rig: VisionRig) -> None:
    text, pictures = rig.text("Private: ", 0, " " + "secret " * 40), [picture(81)]
    first = rig.ask(rig.look(text, pictures, root=b"a" * 16))
    again = rig.ask(rig.look(text, pictures, root=b"a" * 16))
    other = rig.ask(rig.look(text, pictures, root=b"b" * 16))
    assert again.cached_tokens > 0
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    rig.check_seen(other, text, pictures)
    request = rig.look(text, pictures, root=b"a" * 16)
    names = block_hashes(request.token_ids, rig.model.block_size, b"a" * 16)
    if rig.setup.engine == "vllm":
        rig.run(rig.until(lambda: rig.tap.replay.overlap(names) == len(names)))


def test_a_generation_is_cancelled_while_it_waits_for_its_picture(rig: VisionRig) -> None:
    async def cancel() -> None:
        rig.tap.answers_images = False
        try:
            generation = rig.begin(rig.look(rig.text("never: ", 0), [picture(91)]))
            await rig.until(lambda: bool(rig.tap.asked))
            await rig.cancel(generation)
            await asyncio.sleep(0)
            assert generation.terminal is None
            rig.tap.answer(rig.tap.asked[0])
        finally:
            rig.tap.answers_images = True

    rig.run(cancel())


def test_a_picture_that_others_have_left_is_right(rig: VisionRig) -> None:
    """They leave while it is asked for, while the engine prepares it, or while it is computed: each a little later than the one before."""
    text = rig.text("left alone: ", 0, " ")

    async def leave() -> None:
        for turn in range(20):
            left = picture(200 + turn, 320, 256)
            generation = rig.begin(rig.look(text, [left]))
            await asyncio.sleep(turn / 500)
            await rig.cancel(generation)
            again = rig.begin(rig.look(text, [left], max_tokens=4))
            await rig.ended(again)
            rig.check_seen(again, text, [left])

    rig.run(leave())


def test_a_refused_picture_and_a_stray_placeholder_are_faults(rig: VisionRig) -> None:
    async def refuse() -> Fault:
        rig.tap.answers_images = False
        try:
            generation = rig.begin(rig.look(rig.text("gone: ", 0), [picture(92)]))
            await rig.until(lambda: bool(rig.tap.asked))
            rig.backend.image_refused(rig.tap.asked[0].names[0], "it is gone", retryable=True)
            await rig.ended(generation)
            return generation.fault
        finally:
            rig.tap.answers_images = True

    assert rig.run(refuse()).code == "image_lost"
    request = rig.look(rig.text(0, "and "), [picture(93)])
    stray = rig.tokenizer.encode_part("<image>" if rig.kind == "idefics3" else "<|image_pad|>")
    fault = rig.ask(rig.request((*request.token_ids, *stray), 4, images=request.images)).fault
    assert fault.code == "invalid_images"


def test_a_placeholder_in_a_prompt_without_images_harms_nobody(rig: VisionRig) -> None:
    """A client can send any token id."""
    stray = rig.tokenizer.encode_part(PLACEHOLDERS[rig.kind])
    rig.ask(rig.request((*rig.tokenizer.encode_part("no picture: "), *stray * 3), 4))
    text, pictures = rig.text("a picture: ", 0), [picture(96)]
    rig.check_seen(rig.ask(rig.look(text, pictures)), text, pictures)


def test_an_image_in_other_positions_than_the_engine_gives_it_is_a_fault(rig: VisionRig) -> None:
    """As with a processor whose settings differ: never wrong tokens."""
    request = rig.look(rig.text("wrong: ", 0), [picture(94, 96, 64)])
    (span,) = request.images
    rig.tap.pictures[span.name] = (48, 128), rig.tap.pictures[span.name][1]
    wrong = rig.request(request.token_ids, 4, images=(type(span)(span.name, span.start, span.end, span.grid, (48, 128)),))
    fault = rig.ask(wrong).fault
    assert (fault.code, fault.retryable) == ("image_mismatch", False)
    text, pictures = rig.text("right: ", 0), [picture(95)]
    rig.check_seen(rig.ask(rig.look(text, pictures)), text, pictures)
