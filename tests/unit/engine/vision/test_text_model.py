"""The text model with images in its prompt: logits and tokens as in transformers, however the prompt is cut."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.attention import AttentionPlan, DecodeGroup, KVStore, PromptPart
from penstock.engine.checkpoints.checkpoint import open_checkpoint
from penstock.engine.model import Batch, ImageRows, Model
from penstock.engine.vision.positions import positions_of, shift_behind
from penstock.wire.images import ImageSpan, is_image_id
from tiny_vision import (
    CONTEXT,
    KINDS,
    PLACEHOLDERS,
    VARIANTS,
    Kind,
    VisionPrompt,
    generate,
    make_picture,
    make_prompt,
    reference,
    reference_features,
    reference_logits,
    vision_model,
)

CPU = torch.device("cpu")
PAGE_SIZE = 16
MODELS = [*((kind, variant) for kind in KINDS for variant in VARIANTS), ("qwen2_5_vl", "")]
EVERY_MODEL = pytest.mark.parametrize(("kind", "variant"), MODELS)


@functools.cache
def text_model(directory: Path, context_length: int = CONTEXT) -> Model:
    checkpoint = open_checkpoint(directory)
    return Model(checkpoint.shape, checkpoint.tensors(), context_length, torch.float32, CPU)


class OneSequence:
    """One prompt in a KV store of its own."""

    def __init__(self, model: Model, prompt: VisionPrompt, features: Sequence[Tensor]) -> None:
        self.model, self.prompt = model, prompt
        self.features = torch.cat(list(features)) if features else torch.empty(0)
        self.tokens = list(prompt.token_ids)
        pages = len(self.tokens) // PAGE_SIZE + 4
        self.pages = torch.arange(pages).flip(0)
        self.store = KVStore(model.shape, pages, PAGE_SIZE, torch.float32, CPU)

    def logits(self, start: int, end: int) -> Tensor:
        hidden = self.model.forward(self.batch(start, end), self.store)
        return self.model.logits(hidden)

    def batch(self, start: int, end: int) -> Batch:
        ids = self.tokens[start:end]
        rows = [row for row, token in enumerate(ids) if is_image_id(token)]
        before = sum(map(is_image_id, self.tokens[:start]))
        images = ImageRows(torch.tensor(rows), self.features[before : before + len(rows)]) if rows else None
        places = torch.arange(start, end)
        slots = self.pages[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        plan = AttentionPlan(slots, (PromptPart(0, end - start, end, self.pages[: -(-end // PAGE_SIZE)]),), ())
        if end - start == 1:
            plan = AttentionPlan(slots, (), (DecodeGroup(0, 1, self.pages[None], torch.tensor([end])),))
        known = torch.tensor([0 if is_image_id(token) else token for token in ids])
        return Batch(known, self.positions(start, end), plan, images)

    def positions(self, start: int, end: int) -> Tensor:
        if not self.model.shape.rope_axes:
            return torch.arange(start, end)
        return torch.tensor(positions_of(self.prompt.spans, start, end - start))

    def generate(self, count: int) -> list[int]:
        made: list[int] = []
        start = 0
        while len(made) < count:
            made.append(int(self.logits(start, len(self.tokens))[-1].argmax()))
            start = len(self.tokens)
            self.tokens.append(made[-1])
        return made


def prompt_with(kind: Kind, variant: str, sizes: Sequence[tuple[int, int]]) -> tuple[Path, VisionPrompt]:
    """Text between the pictures, of different sizes, over two turns if there are two or more."""
    directory, mark = vision_model(kind, variant), PLACEHOLDERS[kind]
    pictures = [make_picture(index, *size) for index, size in enumerate(sizes)]
    middle = len(sizes) // 2
    said = ["".join(f" Look at {mark} again." for _ in part) for part in (sizes[:middle], sizes[middle:])]
    turns = [("user", f"Hello{said[0]}"), ("assistant", "Well."), ("user", f"And{said[1]} now?")]
    text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns)
    return directory, make_prompt(directory, f"{text}<|im_start|>assistant\n", pictures)


SIZES = [[], [(96, 64)], [(50, 90), (130, 60)], [(40, 40), (200, 50), (64, 128), (33, 77), (120, 110)]]


@EVERY_MODEL
@pytest.mark.parametrize("sizes", SIZES, ids=len)
def test_logits_and_tokens_are_those_of_transformers(kind: Kind, variant: str, sizes: list[tuple[int, int]]) -> None:
    directory, prompt = prompt_with(kind, variant, sizes)
    features = reference_features(directory, prompt) if sizes else []
    whole = OneSequence(text_model(directory), prompt, features)
    torch.testing.assert_close(whole.logits(0, len(prompt.token_ids)), reference_logits(directory, prompt), rtol=1e-4, atol=1e-4)
    assert OneSequence(text_model(directory), prompt, features).generate(12) == generate(directory, prompt, 12)


@EVERY_MODEL
def test_a_prompt_may_be_cut_anywhere(kind: Kind, variant: str) -> None:
    directory, prompt = prompt_with(kind, variant, [(50, 90), (130, 60)])
    features, end = reference_features(directory, prompt), len(prompt.token_ids)
    whole = OneSequence(text_model(directory), prompt, features).logits(0, end)
    for step in (1, 7, 30):
        cut = OneSequence(text_model(directory), prompt, features)
        parts = [cut.logits(start, stop) for start, stop in pairwise([*range(0, end, step), end])]
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_positions_are_those_of_transformers(variant: str) -> None:
    sizes = [(40, 40), (200, 50), (64, 128), (33, 77), (120, 110)]
    directory, prompt = prompt_with("qwen3_vl", variant, sizes)
    keys = ("input_ids", "mm_token_type_ids", "image_grid_thw")
    expected, shift = reference(directory).model.get_rope_index(**{key: prompt.inputs[key] for key in keys})
    end = len(prompt.token_ids)
    assert positions_of(prompt.spans, 0, end) == tuple(expected[:, 0].tolist())
    assert shift_behind(prompt.spans) == shift.item()
    for start in range(0, end, 5):
        assert positions_of(prompt.spans, start, 9) == tuple(axis[start : start + 9] for axis in positions_of(prompt.spans, 0, end + 9))
    # A span may also be without the tokens around the positions.
    narrow = [ImageSpan(span.name, span.start + 1, span.end - 1, span.grid, span.size) for span in prompt.spans]
    assert positions_of(narrow, 0, end) == positions_of(prompt.spans, 0, end)


def test_text_is_computed_to_the_bit_as_without_axes() -> None:
    directory, prompt = prompt_with("qwen3_vl", "", [])
    sequence, end = OneSequence(text_model(directory), prompt, []), len(prompt.token_ids)
    batch = sequence.batch(0, end)
    flat = replace(batch, positions=torch.arange(end))
    model = sequence.model
    assert model.forward(batch, sequence.store).equal(model.forward(flat, sequence.store))


@pytest.mark.parametrize("factor", [4.0])
def test_a_longer_context_stretches_all_axes(factor: float, tmp_path: Path) -> None:
    """With YaRN, as transformers does it for a model whose settings ask for it."""
    directory, prompt = prompt_with("qwen3_vl", "", [(50, 90), (130, 60)])
    stretched = Path(shutil.copytree(directory, tmp_path / "model"))
    config = json.loads((stretched / "config.json").read_text())
    config["text_config"]["rope_parameters"] |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": CONTEXT}
    (stretched / "config.json").write_text(json.dumps(config))
    expected, end = reference_logits(stretched, prompt), len(prompt.token_ids)
    features = reference_features(directory, prompt)
    for model in (text_model(stretched), text_model(directory, int(factor) * CONTEXT)):
        torch.testing.assert_close(OneSequence(model, prompt, features).logits(0, end), expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(OneSequence(text_model(directory), prompt, features).logits(0, end), expected, rtol=1e-2, atol=1e-2)
