"""Pictures for the simulator, prompts with them, and what it then says. Made without a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b, shake_128
from typing import Any

from msgspec import structs

from penstock.backends.simulated_images import promised_seals, seed_with_images
from penstock.backends.simulator import tokens_between
from penstock.media.families import simulator
from penstock.media.picture import Picture
from penstock.wire.images import IMAGE_NAME_BYTES, SEAL_BYTES, ImageSpan, image_ids, seal_of
from penstock.wire.messages import Submit
from workers import WORDS, submit

RULES = simulator.make_rules()
SIZE = (96, 64)
POSITIONS = 24


def sealed_name(content: bytes, size: tuple[int, int], pixels: bytes) -> bytes:
    """The name of an image: from the hash of its content, and the pixels and the size that a worker gets."""
    seal = seal_of(size)
    seal.update(pixels)
    return content[: IMAGE_NAME_BYTES - SEAL_BYTES] + seal.digest()


def picture(number: int, size: tuple[int, int] = SIZE) -> Picture:
    pixels = shake_128(b"%d" % number).digest(3 * size[0] * size[1])
    name = sealed_name(blake2b(b"%d %d %d" % (number, *size)).digest(), size, pixels)
    layout = simulator.layout(RULES, name, size)
    return Picture(layout, layout.size, pixels)


def prompt_with(text: Sequence[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    """The fields of a Submit with this text. The pictures are spread over it, the first after its first token."""
    step = max(1, len(text) // max(1, len(pictures)))
    ids, spans, taken = list[int](), list[ImageSpan](), 0
    for index, each in enumerate(pictures):
        ids += text[taken : index * step + 1]
        taken = index * step + 1
        spans.append(ImageSpan(each.name, len(ids), len(ids) + each.layout.positions, each.layout.grid, each.size))
        ids += image_ids(each.name, each.layout.positions)
    return {"token_ids": (*ids, *text[taken:]), "images": tuple(spans)}


def submit_with(number: int, pictures: Sequence[Picture], max_tokens: int = 16, prompt: int = 40, **fields: Any) -> Submit:
    """A request with its own prompt of `prompt` tokens and these pictures."""
    request = submit(number, max_tokens, prompt, **fields)
    return structs.replace(request, **prompt_with(request.token_ids, pictures))


def expected_with(number: int, pictures: Sequence[Picture], count: int) -> tuple[int, ...]:
    seals = promised_seals([ImageSpan(each.name, 0, 0, (0, 0), each.size) for each in pictures])
    return tuple(tokens_between(seed_with_images(number, seals), 0, count, WORDS))
