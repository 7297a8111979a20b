"""Embedded engines with tiny models for text and images, and what a front end does for them."""

from __future__ import annotations

import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.engines import EngineConfig
from penstock.engine.checkpoints.checkpoint import open_checkpoint
from penstock.engine.engine import Engine
from penstock.engine.fingerprint import image_fingerprint
from penstock.engine.model import Model
from penstock.engine.vision.images import EngineImages
from penstock.engine.vision.maker import TowerMaker
from penstock.engine.vision.store import FeatureStore
from penstock.engine.vision.tower import Tower, make_tower
from penstock.wire.messages import ImagesWanted, Submit
from tiny_models import Collected, make_submit
from tiny_vision import CONTEXT, PLACEHOLDERS, Kind, VisionPrompt, generate, make_picture, make_prompt, vision_model

CPU = torch.device("cpu")


@functools.cache
def text_model(directory: Path) -> Model:
    checkpoint = open_checkpoint(directory)
    return Model(checkpoint.shape, checkpoint.tensors(), CONTEXT, torch.float32, CPU)


@functools.cache
def tower(directory: Path) -> Tower:
    return make_tower(open_checkpoint(directory), torch.float32, CPU)


class SpoiledTower:
    """A tower of which `spoil` may fail, or change what it has made, by the pixels of the image."""

    def __init__(self, tower: Tower, spoil: Callable[[bytes, Tensor], Tensor]) -> None:
        self.on_progress: Callable[[], None] = lambda: None
        self.width, self.levels, self.positions = tower.width, tower.levels, tower.positions
        self._tower, self._spoil = tower, spoil

    def encode(self, images: Sequence[tuple[bytes, tuple[int, int]]]) -> list[Tensor]:
        return [self._spoil(pixels, made) for (pixels, _), made in zip(images, self._tower.encode(images), strict=True)]


def make_images(
    directory: Path,
    slots: int,
    clock: Callable[[], float] = time.monotonic,
    spoil: Callable[[bytes, Tensor], Tensor] = lambda _, made: made,
) -> EngineImages:
    checkpoint = open_checkpoint(directory)
    shape = checkpoint.tower
    assert shape is not None
    store = FeatureStore(slots, shape.width * shape.levels, torch.float32, CPU)
    fingerprint = image_fingerprint(shape, checkpoint.tower_tensors(), torch.float32)
    return EngineImages(TowerMaker(lambda: SpoiledTower(tower(directory), spoil), store, fingerprint, CPU), shape, clock)


class ImageEngine:
    """An engine, and a front end that has these pictures. It answers what the engine asks for, as long as `answers` is set."""

    def __init__(
        self,
        directory: Path,
        slots: int = 256,
        clock: Callable[[], float] = time.monotonic,
        spoil: Callable[[bytes, Tensor], Tensor] = lambda _, made: made,
        **settings: Any,
    ) -> None:
        self.directory = directory
        self.images = make_images(directory, slots, clock, spoil)
        config = EngineConfig(**{"context_length": CONTEXT, "kv_pages": 256, "session_grace": 0.0, **settings})
        model = text_model(directory)
        self.engine = Engine(config, model, frozenset(), model.shape.vocab_size, None, clock, self.images)
        self.pixels: dict[bytes, bytes] = {}
        self.asked: Counter[bytes] = Counter()
        self.answer: Callable[[ImagesWanted], None] = self.send
        self.collected = Collected()
        self.news = threading.Event()
        self.engine.on_news(self.news.set)

    def knows(self, prompt: VisionPrompt) -> None:
        self.pixels |= {image.name: image.pixels for image in prompt.images}

    def submit(self, number: int, prompt: VisionPrompt, max_tokens: int = 8, **fields: Any) -> Submit:
        self.knows(prompt)
        request = make_submit(number, prompt.token_ids, max_tokens, images=prompt.spans, **fields)
        self.engine.submit(request)
        return request

    def send(self, wanted: ImagesWanted) -> None:
        for name in wanted.names:
            self.images.add_pixels(name, self.pixels[name])

    def step(self) -> None:
        self.news.clear()
        self.collected.step(self.engine)
        for wanted in self.engine.take_asked():
            self.asked.update(wanted.names)
            self.answer(wanted)

    def run(self, most_steps: int = 5000) -> Collected:
        """Until nothing is left to do. While the tower encodes and nothing can be computed, it waits for the tower."""
        for _ in range(most_steps):
            if not (self.engine.has_work or self.images.is_encoding):
                self.engine.check_idle()
                return self.collected
            if not self.engine.has_work:
                assert self.news.wait(30), "the tower makes nothing"
            self.step()
        raise AssertionError(f"work is left after {most_steps} steps: {self.engine.stats()}")

    def tokens(self, request: Submit) -> list[int]:
        return self.collected.tokens[request.id]

    def close(self) -> None:
        self.engine.close()


def chat(kind: Kind, sizes: Iterable[tuple[int, int]], variant: str = "", seed: int = 0, words: str = "Look at") -> VisionPrompt:
    """A prompt with pictures of these sizes, text between them, over two turns."""
    directory, mark = vision_model(kind, variant), PLACEHOLDERS[kind]
    pictures = [make_picture(seed + index, *size) for index, size in enumerate(sizes)]
    middle = (len(pictures) + 1) // 2
    said = ["".join(f" {words} {mark} again." for _ in part) for part in (pictures[:middle], pictures[middle:])]
    turns = [("user", f"Hello{said[0]}"), ("assistant", "Well."), ("user", f"And{said[1]} now?")]
    text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)
    return make_prompt(directory, f"{text}<|im_start|>assistant\n", pictures)


def expected_tokens(prompts: Sequence[VisionPrompt], kind: Kind, count: int, variant: str = "") -> list[list[int]]:
    """Greedily, by transformers."""
    return [generate(vision_model(kind, variant), prompt, count) for prompt in prompts]
