"""A model or a device that computes what is not a number hurts the generation where it happens, and nothing that comes later."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from penstock.engine.engine import Engine
from penstock.engine.model import Batch, Model
from penstock.wire.messages import Fault, Finish
from tiny_models import (
    Collected,
    WatchedModel,
    generation_id,
    make_engine,
    make_model,
    make_submit,
    random_prompt,
    reference,
    reference_tokens,
    run,
)

BAD = 299
"""In the damaged model, the embedding of this token is not a number."""


def damaged_model() -> Model:
    tensors = {name: tensor.clone() for name, tensor in reference("llama").state_dict().items()}
    tensors["model.embed_tokens.weight"][BAD] = math.nan
    return Model(make_model("llama").shape, tensors.items(), 512, torch.float32, torch.device("cpu"))


def prompt_without_bad(seed: int, length: int) -> list[int]:
    return [token % BAD for token in random_prompt(seed, length)]


def blocks(engine: Engine) -> int:
    return engine.stats().kv_blocks_cached


def fault_of(collected: Collected, number: int) -> str:
    fault = collected.terminals[generation_id(number)]
    assert isinstance(fault, Fault)
    return fault.code


@pytest.mark.parametrize("place", [0, 70, 127, 128, 199])
def test_pages_with_what_is_not_a_number_are_not_cached(place: int) -> None:
    """Wherever it is in a prompt of four pieces. What was computed before its piece is kept."""
    engine = make_engine(damaged_model(), kv_pages=64, token_budget=64)
    prompt = prompt_without_bad(1, 200)
    prompt[place] = BAD
    collected = run(engine, [make_submit(0, prompt, 5)])
    assert fault_of(collected, 0) == "invalid_logits"
    assert collected.tokens[generation_id(0)] == []
    assert blocks(engine) == place // 64 * 64 // 16
    healthy = [*prompt[: place // 64 * 64], *prompt_without_bad(2, 30)]
    assert run(engine, [make_submit(1, healthy, 4)]).tokens[generation_id(1)] == reference_tokens("llama", healthy, 4)


def test_one_bad_step_is_forgotten() -> None:
    """The device fails once, in the first piece of a prompt. The same prompt then has its right tokens: nothing bad was cached."""
    steps = iter([True])

    def damage(batch: Batch) -> Batch | None:
        return replace(batch, token_ids=torch.full_like(batch.token_ids, BAD)) if next(steps, False) else None

    engine = make_engine(WatchedModel(damage, damaged_model()), kv_pages=64, token_budget=64)
    prompt = prompt_without_bad(1, 200)
    assert fault_of(run(engine, [make_submit(0, prompt, 5)]), 0) == "invalid_logits"
    again = run(engine, [make_submit(1, prompt, 5)])
    assert again.tokens[generation_id(1)] == reference_tokens("llama", prompt, 5)


def test_a_bad_token_of_an_answer_is_not_cached_and_hurts_nobody() -> None:
    """In the middle of an answer, in a batch: its page is not cached, and the others go on."""
    bad_at = 29  # the step that fills a page
    seen = 0

    def damage(batch: Batch) -> Batch | None:
        nonlocal seen
        seen += 1
        if seen != bad_at:
            return None
        ids = batch.token_ids.clone()
        ids[1] = BAD
        return replace(batch, token_ids=ids)

    engine = make_engine(WatchedModel(damage, damaged_model()), kv_pages=128)
    prompts = [prompt_without_bad(number, 20) for number in range(3)]
    collected = run(engine, [make_submit(number, prompt, 60) for number, prompt in enumerate(prompts)])
    faulted = [number for number in range(3) if isinstance(collected.terminals[generation_id(number)], Fault)]
    assert len(faulted) == 1
    for number, prompt in enumerate(prompts):
        expected = reference_tokens("llama", prompt, 60)
        tokens = collected.tokens[generation_id(number)]
        if number in faulted:
            assert tokens == expected[: bad_at - 1]
            again = run(engine, [make_submit(9, [*prompt, *tokens], 60 - len(tokens))])
            assert again.tokens[generation_id(9)] == expected[len(tokens) :]
        else:
            assert tokens == expected
            assert collected.terminals[generation_id(number)] == Finish("length")
