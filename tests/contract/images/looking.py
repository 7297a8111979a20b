"""An engine that reads images, and prompts for it: made as the front end makes them, and judged by transformers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from contract.backends.rig import Generation, Rig
from contract.backends.setups import SETUPS
from cpu_engines import SGLANG_IMAGES
from penstock.media.families.make import layout, prepare
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.images import IMAGE_NAME_BYTES, SEAL_BYTES, ImageSpan, image_ids
from penstock.wire.messages import Submit
from simulated_pictures import sealed_name
from tiny_vision import PLACEHOLDERS, Kind, VisionPrompt, generate, make_picture, make_prompt, vision_model

if TYPE_CHECKING:
    from PIL.Image import Image

FAMILIES: Mapping[str, tuple[Kind, ...]] = {"vllm": ("idefics3", "qwen3_vl"), "sglang": ("qwen3_vl",)}
"""What each engine runs here: SGLang does not start with Idefics3."""
FLAGS: Mapping[str, tuple[str, ...]] = {"sglang": SGLANG_IMAGES}


class VisionRig(Rig):
    def __init__(self, engine: str, kind: Kind) -> None:
        setup = SETUPS[engine]
        flags = dict(zip(setup.flags[::2], setup.flags[1::2], strict=True))
        own = " ".join((flags["--engine-args"], *FLAGS.get(engine, ())))
        super().__init__(setup, "--engine-args", own, model=vision_model(kind))
        self.kind = kind

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return pack_tokenizer(self.directory).load()

    def text(self, *parts: str | int) -> str:  # type: ignore[override]
        """A turn of a user: text, and for each number a picture."""
        said = "".join(PLACEHOLDERS[self.kind] if isinstance(part, int) else part for part in parts)
        return f"<|im_start|>user\n{said}<|im_end|>\n<|im_start|>assistant\n"

    def look(self, text: str, pictures: Sequence[Image], max_tokens: int = 24, **fields: Any) -> Submit:
        """A request as a front end makes it. The pictures can be had."""
        rules = self.model.images
        assert rules is not None
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for index, piece in enumerate(text.split(rules.placeholder)):
            ids += self.tokenizer.encode_part(piece) if piece else []
            if index == len(pictures):
                break
            picture = pictures[index]
            pixels = prepare(rules, picture)
            content = blake2b(pixels + repr(picture.size).encode(), digest_size=IMAGE_NAME_BYTES - SEAL_BYTES).digest()
            size = layout(rules, content, picture.size).size
            made = layout(rules, sealed_name(content, size, pixels), picture.size)
            start, drawn = len(ids), iter(image_ids(made.name, made.positions))
            for part in made.pieces:
                ids += self.tokenizer.encode_part(part) if isinstance(part, str) else [next(drawn) for _ in range(part)]
            spans.append(ImageSpan(made.name, start, len(ids), made.grid, made.size))
            self.tap.pictures[made.name] = made.size, pixels
        return self.request(ids, max_tokens, images=tuple(spans), **fields)

    def expected(self, text: str, pictures: Sequence[Image], count: int = 24) -> tuple[int, ...]:
        return tuple(generate(self.directory, self.seen(text, pictures), count))

    def seen(self, text: str, pictures: Sequence[Image]) -> VisionPrompt:
        """By transformers' own processor."""
        return make_prompt(self.directory, text, pictures, as_engines=True)

    def check_seen(self, generation: Generation, text: str, pictures: Sequence[Image]) -> None:
        """It is what transformers makes of the same prompt."""
        generation.check()
        offset = generation.request.offset
        assert generation.tokens == self.expected(text, pictures, generation.request.max_tokens)[offset:]


def picture(seed: int, width: int = 96, height: int = 64) -> Image:
    return make_picture(seed, width, height)
