"""Tiny random models, as transformers makes them, and the embedded engine around the same weights."""

from __future__ import annotations

import functools
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from penstock.config.engines import EngineConfig
from penstock.engine.attention import KVStore
from penstock.engine.checkpoints.checkpoint import open_checkpoint
from penstock.engine.engine import Engine
from penstock.engine.model import Batch, Model
from penstock.wire.messages import Delta, Sampling, Submit, Terminal

VOCABULARY = 300
CONTEXT = 512
GREEDY = Sampling(temperature=0)

# Threads that wait for each other at every operation gain nothing on a model so small, and lose much where others work beside.
torch.set_num_threads(1)

_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    # Large enough that the likeliest token leads by a margin, as in a trained model.
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_reference(family: str, **changes: Any) -> Any:
    """The model in transformers. Changes of its configuration do not change its weights."""
    torch.manual_seed(7)
    sizes = {**_SIZES, **changes}
    match family:
        case "llama":
            config: Any = LlamaConfig(**sizes, tie_word_embeddings=False)
        case "qwen3":
            config = Qwen3Config(**sizes, head_dim=32, tie_word_embeddings=True)
        case "qwen2":
            config = Qwen2Config(**sizes, tie_word_embeddings=False)
        case "mistral":
            config = MistralConfig(**sizes, tie_word_embeddings=False, sliding_window=24)
        case _:
            raise ValueError(family)
    made: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    if family == "qwen2":
        # transformers makes these zero, with which nothing would be tested.
        for name, weights in made.named_parameters():
            if name.endswith("proj.bias"):
                torch.nn.init.normal_(weights, 0, 0.5)
    return made.eval()


@functools.cache
def reference(family: str) -> Any:
    return make_reference(family)


@functools.cache
def make_model(family: str, context_length: int = CONTEXT) -> Model:
    """The same model in the engine, by way of its files."""
    with tempfile.TemporaryDirectory() as directory:
        reference(family).save_pretrained(directory)
        checkpoint = open_checkpoint(Path(directory))
        return Model(checkpoint.shape, checkpoint.tensors(), context_length, torch.float32, torch.device("cpu"))


class WatchedModel(Model):
    """The real model. `watch` sees each step's batch before it is computed, and may change it or raise; `wide` are its rows of logits."""

    def __init__(self, watch: Callable[[Batch], Batch | None], model: Model | None = None) -> None:
        vars(self).update(vars(make_model("llama") if model is None else model))
        self.watch = watch
        self.wide: list[int] = []

    def forward(self, batch: Batch, store: KVStore) -> Tensor:
        return super().forward(self.watch(batch) or batch, store)

    def logits(self, hidden: Tensor) -> Tensor:
        self.wide.append(len(hidden))
        return super().logits(hidden)


def generate(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates, greedily."""
    return generate_all(model, [prompt], count)[0]


def generate_all(model: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What transformers generates for each prompt, greedily, in one batch."""
    length = max(map(len, prompts))
    ids = torch.tensor([[0] * (length - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    tokens: list[list[int]] = made[:, length:].tolist()
    assert all(len(answer) == count for answer in tokens)
    return tokens


def reference_tokens(family: str, prompt: Sequence[int], count: int) -> list[int]:
    return generate(reference(family), prompt, count)


def make_engine(
    model: Model | str = "llama", clock: Callable[[], float] = time.monotonic, end_ids: Iterable[int] = (), **settings: Any
) -> Engine:
    config = EngineConfig(**{"context_length": CONTEXT, "kv_pages": 64, "session_grace": 0.0, **settings})
    return Engine(config, make_model(model) if isinstance(model, str) else model, frozenset(end_ids), VOCABULARY, None, clock)


def generation_id(number: int) -> bytes:
    return number.to_bytes(16, "big")


def make_submit(number: int, prompt: Sequence[int], max_tokens: int = 64, **fields: Any) -> Submit:
    return Submit(generation_id(number), tuple(prompt), max_tokens, **{"seed": 0, "sampling": GREEDY, **fields})


def random_prompt(seed: int, length: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(VOCABULARY) for _ in range(length)]


class Collected:
    """What an engine made, put together: offsets are checked, and that each generation ends once."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, list[int]] = {}
        self.deltas: dict[bytes, list[Delta]] = {}
        self.terminals: dict[bytes, Terminal] = {}

    def step(self, engine: Engine) -> None:
        for segment in engine.step():
            assert segment.id not in self.terminals, "a segment after the terminal"
            tokens = self.tokens.setdefault(segment.id, [])
            if segment.delta is not None:
                deltas = self.deltas.setdefault(segment.id, [])
                start = deltas[0].offset if deltas else segment.delta.offset
                assert segment.delta.offset == start + len(tokens)
                tokens += segment.delta.token_ids
                deltas.append(segment.delta)
            if segment.terminal is not None:
                self.terminals[segment.id] = segment.terminal
        engine.check_integrity()


def run(engine: Engine, requests: Iterable[Submit], most_steps: int = 10_000) -> Collected:
    """Submits them all and steps until nothing is left, checking the integrity after every step."""
    collected = Collected()
    for request in requests:
        engine.submit(request)
    for _ in range(most_steps):
        if not engine.has_work:
            engine.check_idle()
            return collected
        collected.step(engine)
    raise AssertionError(f"work is left after {most_steps} steps: {engine.stats()}")
