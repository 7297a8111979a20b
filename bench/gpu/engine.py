"""Measures the embedded engine on a GPU: it gives the CPU's tokens, it serves, and how close it comes to the memory's limit.

    python bench/gpu/engine.py [--json FILE]

An 8B-shaped model with random weights needs no download and about 40 GB of GPU memory. With `--device cpu` everything is tiny, to
try the script itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from penstock.config.engines import EngineConfig
from penstock.engine.engine import Engine
from penstock.engine.model import Model
from penstock.engine.sampler import apply_mask
from penstock.engine.shape import ModelShape
from penstock.wire.messages import Finish, Sampling, Submit

TINY = ModelShape(256, 4, 8, 2, 32, 512, 1000, 2048, qk_norm=True)
LLAMA_8B = ModelShape(4096, 32, 32, 8, 128, 14336, 128256, 8192, rope_theta=500_000.0)
GREEDY = Sampling(temperature=0)
BATCHES = (1, 8, 64, 256)
CONTEXT = 512
MEASURED_STEPS = 64


def random_weights(shape: ModelShape, dtype: torch.dtype, device: torch.device, spread: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields one tensor after the other, so that none is in memory twice. Norms are about one."""
    generator = torch.Generator(device).manual_seed(1)

    def matrix(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, spread, generator=generator)

    hidden, wide, query, kv = shape.hidden_size, shape.intermediate_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", matrix(shape.vocab_size, hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", 1 + matrix(hidden)
        yield prefix + "post_attention_layernorm.weight", 1 + matrix(hidden)
        yield prefix + "self_attn.q_proj.weight", matrix(query, hidden)
        yield prefix + "self_attn.k_proj.weight", matrix(kv, hidden)
        yield prefix + "self_attn.v_proj.weight", matrix(kv, hidden)
        yield prefix + "self_attn.o_proj.weight", matrix(hidden, query)
        if shape.qk_norm:
            yield prefix + "self_attn.q_norm.weight", 1 + matrix(shape.head_dim)
            yield prefix + "self_attn.k_norm.weight", 1 + matrix(shape.head_dim)
        yield prefix + "mlp.gate_proj.weight", matrix(wide, hidden)
        yield prefix + "mlp.up_proj.weight", matrix(wide, hidden)
        yield prefix + "mlp.down_proj.weight", matrix(hidden, wide)
    yield "model.norm.weight", 1 + matrix(hidden)
    yield "lm_head.weight", matrix(shape.vocab_size, hidden)


def make_engine(model: Model, pages: int, **settings: Any) -> Engine:
    config = EngineConfig(model.shape.trained_length, pages, **settings)
    return Engine(config, model, frozenset(), model.shape.vocab_size, None, time.monotonic)


def requests(shape: ModelShape, count: int, length: int, max_tokens: int, sampling: Sampling = GREEDY) -> list[Submit]:
    numbers = random.Random(count * 7 + length)
    prompts = [tuple(numbers.randrange(shape.vocab_size) for _ in range(length)) for _ in range(count)]
    return [Submit(index.to_bytes(16, "big"), prompt, max_tokens, index, sampling=sampling) for index, prompt in enumerate(prompts)]


def run(engine: Engine, submits: list[Submit]) -> dict[bytes, list[int]]:
    """Runs all requests to their end. Checks the cache from time to time."""
    tokens: dict[bytes, list[int]] = {submit.id: [] for submit in submits}
    finished = 0
    for submit in submits:
        engine.submit(submit)
    while engine.has_work:
        for segment in engine.step():
            assert segment.delta is not None
            assert segment.delta.offset == len(tokens[segment.id])
            tokens[segment.id] += segment.delta.token_ids
            finished += segment.terminal == Finish("length")
    engine.check_integrity()
    assert finished == len(submits)
    return tokens


def check_tokens_equal_the_cpus(device: torch.device) -> dict[str, Any]:
    """A tiny float32 model with the same weights on GPU and CPU: batched, in pieces, preempted, and with reused prefixes."""
    cpu = torch.device("cpu")
    weights = list(random_weights(TINY, torch.float32, cpu, 0.15))
    models = [Model(TINY, weights, TINY.trained_length, torch.float32, place) for place in (cpu, device)]
    submits = requests(TINY, 40, 90, 64)
    found = [run(make_engine(model, 120, token_budget=128), submits) for model in models]
    differing = [submit.id.hex() for submit in submits if found[0][submit.id] != found[1][submit.id]]
    assert not differing, f"tokens differ from the CPU's: {differing}"
    drawn = requests(TINY, 40, 90, 64, Sampling(temperature=0.9, top_p=0.9, top_k=50))
    sampled = [run(make_engine(model, 400), drawn) for model in models]
    same = sum(sampled[0][submit.id] == sampled[1][submit.id] for submit in drawn)
    return {"greedy_sequences_equal": len(submits), "sampled_sequences_equal": same, "of": len(drawn)}


def check_masks(device: torch.device) -> None:
    logits = torch.randn(6, 1003)
    bitmask = torch.randint(-(2**31), 2**31 - 1, (6, -(-1003 // 32)), dtype=torch.int32)
    for rows in ([0, 1, 2, 3, 4, 5], [1, 4]):
        expected, found = logits.clone(), logits.clone().to(device)
        apply_mask(expected, rows, bitmask)
        apply_mask(found, rows, bitmask)
        assert torch.equal(expected, found.cpu())


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a large copy. Steps are compared with this limit."""
    source = torch.empty(2**32 if device.type == "cuda" else 2**27, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(5):
        _finish(device)
        began = time.perf_counter()
        target.copy_(source)
        _finish(device)
        best = max(best, 2 * source.numel() / (time.perf_counter() - began))
    return best


def measure(model: Model, batch: int, bandwidth: float, pages: int) -> dict[str, Any]:
    """Measures decode steps of the whole batch, at a context of about `CONTEXT` tokens."""
    shape = model.shape
    engine = make_engine(model, pages, max_batch=batch, token_budget=8192)
    for submit in requests(shape, batch, CONTEXT - MEASURED_STEPS // 2, MEASURED_STEPS + 16):
        engine.submit(submit)
    generated = 0
    while generated < batch:
        generated += len(engine.step())
    times: list[float] = []
    for _ in range(MEASURED_STEPS - 16):
        _finish(model.device)
        began = time.perf_counter()
        segments = engine.step()
        _finish(model.device)
        if len(segments) == batch:
            times.append(time.perf_counter() - began)
    # By now every sequence decodes.
    contexts = [len(sequence.tokens) for sequence in engine._scheduler.decoding.values()]
    seconds = statistics.median(times)
    token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    needed = model.bytes + sum(contexts) * token_bytes
    return {
        "batch": batch,
        "step_ms": seconds * 1e3,
        "tokens_per_second": batch / seconds,
        "limit_ms": needed / bandwidth * 1e3,
        "share_of_limit": needed / bandwidth / seconds,
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    report: dict[str, Any] = {"device": name, "torch": torch.__version__}
    print(f"{name}, torch {torch.__version__}", flush=True)
    check_masks(device)
    report["against_cpu"] = check_tokens_equal_the_cpus(device)
    print("a tiny float32 model:", report["against_cpu"], flush=True)
    bandwidth = copy_bandwidth(device)
    report["copy_gb_per_second"] = bandwidth / 1e9
    shape, dtype = (LLAMA_8B, torch.bfloat16) if device.type == "cuda" else (TINY, torch.float32)
    pages = (256 if device.type == "cuda" else 300) * (CONTEXT + MEASURED_STEPS + 16) // 16
    model = Model(shape, random_weights(shape, dtype, device, 0.02), shape.trained_length, dtype, device)
    print(f"copies: {bandwidth / 1e9:,.0f} GB/s; weights that a step reads: {model.bytes / 1e9:.1f} GB", flush=True)
    submits = requests(shape, 64, 256, 128)
    began = time.perf_counter()
    first = run(make_engine(model, pages, token_budget=8192), submits)
    seconds = time.perf_counter() - began
    report["serve_64"] = {"requests": 64, "tokens": sum(map(len, first.values())), "seconds": seconds}
    print(f"64 concurrent requests, 256 tokens in and 128 out each: {sum(map(len, first.values())) / seconds:,.0f} tokens/s", flush=True)
    report["batches"] = []
    print(f"{'batch':>6} {'step ms':>9} {'tokens/s':>10} {'limit ms':>9} {'of limit':>9}")
    for batch in BATCHES:
        row = measure(model, batch, bandwidth, pages)
        report["batches"].append(row)
        print(
            f"{batch:>6} {row['step_ms']:>9.2f} {row['tokens_per_second']:>10,.0f} {row['limit_ms']:>9.2f} {row['share_of_limit']:>9.0%}",
            flush=True,
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
