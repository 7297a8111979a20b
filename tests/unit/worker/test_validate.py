"""Which requests no engine can run, because of their images."""

from __future__ import annotations

from msgspec import structs

from penstock.wire.images import FIRST_IMAGE_ID, ImageSpan, image_ids
from penstock.wire.messages import Submit
from penstock.worker.backend import validate_submit

CAT, DOG = bytes(16), bytes([1] * 16)
PROMPT = (5, *image_ids(CAT, 3), 6, *image_ids(DOG, 2), 7)
IMAGES = (ImageSpan(CAT, 1, 4, (1, 3), (9, 9)), ImageSpan(DOG, 5, 7, (1, 2), (9, 9)))
REQUEST = Submit(bytes(16), PROMPT, 20, seed=1, images=IMAGES)


def code(request: Submit, *, reads_images: bool = True) -> str:
    fault = validate_submit(request, 10, 100, reads_images=reads_images)
    return "" if fault is None else fault.code


def test_positions_of_images_are_no_tokens_of_the_vocabulary() -> None:
    assert code(REQUEST) == ""
    assert code(structs.replace(REQUEST, token_ids=(*PROMPT[:-1], 10))) == "invalid_token"
    assert code(structs.replace(REQUEST, stop_ids=(FIRST_IMAGE_ID,))) == "invalid_token"


def test_a_prompt_may_be_one_image_alone() -> None:
    assert code(Submit(bytes(16), image_ids(CAT, 3), 0, seed=1, images=(ImageSpan(CAT, 0, 3, (1, 3), (9, 9)),))) == ""


def test_a_model_of_text_takes_no_images() -> None:
    assert code(REQUEST, reads_images=False) == "unsupported"
    assert code(structs.replace(REQUEST, images=())) == "invalid_token"


def test_images_that_are_not_those_of_the_prompt_are_refused_also_for_a_prompt_that_was_right() -> None:
    assert code(REQUEST) == ""
    swapped = tuple([structs.replace(span, name=name) for span, name in zip(IMAGES, (DOG, CAT), strict=True)])
    assert code(structs.replace(REQUEST, images=swapped)) == "invalid_images"
    assert code(structs.replace(REQUEST, images=IMAGES[:1])) == "invalid_images"
