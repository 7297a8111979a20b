"""The default model gives the tokens that transformers gives with the same weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.config.engines import EngineConfig
from penstock.engine.checkpoints.checkpoint import Checkpoint, find_default_model, open_checkpoint
from penstock.engine.engine import Engine
from penstock.engine.model import Model
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatPrompt
from tiny_models import generate_all, generation_id, make_submit, run
from tokenizer_kinds import encode_chat

TOKENS = 24
QUESTIONS = [
    "What is the capital of France?",
    "Write a short story about a river and a mill.",
    "Explain how a turbine turns water into electricity, step by step.",
]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def all_cores() -> Iterator[None]:
    """This model is large enough for them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(find_default_model())


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoint) -> Model:
    return Model(checkpoint.shape, checkpoint.tensors(), checkpoint.shape.trained_length, torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = pack_tokenizer(find_default_model()).load()
    questions = [encode_chat(tokenizer, ChatPrompt([{"role": "user", "content": question}])) for question in QUESTIONS]
    # One more that shares most of another's, so that there is something to reuse.
    return [*questions, [*questions[1], *tokenizer.encode(" It begins at night.")]]


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint, prompts: list[list[int]]) -> list[list[int]]:
    shape = checkpoint.shape
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.trained_length,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    reference: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    missing, unexpected = reference.load_state_dict(dict(checkpoint.tensors()), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    reference.tie_weights()
    return generate_all(reference.eval(), prompts, TOKENS)


@pytest.mark.parametrize(
    ("settings", "is_short"),
    [
        ({"max_batch": 1, "kv_pages": 64, "token_budget": 512}, False),
        ({"kv_pages": 64, "token_budget": 512}, False),
        ({"kv_pages": 64, "token_budget": 24}, False),
        ({"kv_pages": 12, "token_budget": 48}, True),
    ],
    ids=["alone", "batch", "pieces", "preempted"],
)
def test_greedy_tokens(model: Model, prompts: list[list[int]], expected: list[list[int]], settings: dict[str, Any], is_short: bool) -> None:
    engine = Engine(EngineConfig(8192, **settings), model, frozenset(), model.shape.vocab_size, None, time.monotonic)
    collected = run(engine, [make_submit(number, prompt, TOKENS) for number, prompt in enumerate(prompts)])
    assert [collected.tokens[generation_id(number)] for number in range(len(prompts))] == expected
    assert bool(engine.stats().preemptions) == is_short
    again = run(engine, [make_submit(9, prompts[1], 16)])
    report = again.deltas[generation_id(9)][0].prompt
    assert report is not None
    assert report.cached_tokens or is_short
    assert again.tokens[generation_id(9)] == expected[1][:16]
