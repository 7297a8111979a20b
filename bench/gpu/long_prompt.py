"""Measures long prompts on a GPU: later pieces of a prompt, prompt logprobs, memory after loading, and memory that runs out.

    python bench/gpu/long_prompt.py [--json FILE] [--markdown FILE] [--seconds 140]

An 8B-shaped model with random weights needs no download and about 40 GB of GPU memory. The most important figures come first; each part is
independent, and after `--seconds` the script ends with what it has. With `--device cpu` everything is tiny, to try the script itself.

FLOP are those of the matrices (two per weight and token; the head only for the last token) and of attention (four per head, size and pair
of tokens that see each other). "Matrices only" leaves the second part out of the count, not out of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "src"))

from gpu.engine import LLAMA_8B, TINY, make_engine, random_weights, requests, run
from penstock.engine import attention
from penstock.engine.attention import AttentionPlan, KVStore, PromptPart, attend
from penstock.engine.engine import Engine
from penstock.engine.memory import release_unused
from penstock.engine.model import Model
from penstock.engine.shape import ModelShape
from penstock.wire.codec import unpack_logprobs
from penstock.wire.messages import Finish, Sampling, Submit

GB = 1e9
Kernel = Callable[[Tensor, Tensor, Tensor, int | None], Tensor]
"""Queries [rows, heads, size], keys and values [1, KV heads, tokens, size], window: what `attention.attend_causally` takes."""


class Sizes:
    """What is measured on a GPU, or tiny sizes to try the script on a CPU."""

    def __init__(self, is_tiny: bool) -> None:
        base = TINY if is_tiny else LLAMA_8B
        self.total, self.chunk = (400, 128) if is_tiny else (30_000, 8192)
        self.lengths: tuple[int, ...] = (32, 128, 256, 400) if is_tiny else (2048, 8192, 16_384, 30_000)
        self.shape = replace(base, trained_length=2048 if is_tiny else 32_768)
        self.wide = replace(self.shape, layers=2, vocab_size=1500 if is_tiny else 152_000)
        self.dtype = torch.float32 if is_tiny else torch.bfloat16


class Bench:
    """Runs the parts one after the other until the time is up, and writes what is known after each."""

    def __init__(self, device: torch.device, arguments: argparse.Namespace) -> None:
        self.device = device
        self.sizes = Sizes(device.type == "cpu")
        self.report: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__}
        self._arguments = arguments
        self._ends_at = time.monotonic() + arguments.seconds
        self._lock = threading.Lock()
        watchdog = threading.Timer(arguments.seconds, self._stop)
        watchdog.daemon = True
        watchdog.start()

    def part(self, name: str, seconds: float, measure: Callable[[], Any]) -> None:
        """`seconds` is what the part needs at most: with less left it is not begun."""
        left = self._ends_at - time.monotonic()
        if left < seconds:
            say(f"-- {name}: not begun, {left:.0f} s are left")
            return
        say(f"-- {name} ({left:.0f} s are left)")
        began = time.monotonic()
        try:
            self.report[name] = measure()
        except Exception:  # noqa: BLE001, the other parts go on
            self.report[name] = {"failed": traceback.format_exc()}
            say(traceback.format_exc())
        if self.device.type == "cuda":
            release_unused(self.device)
        say(f"   {time.monotonic() - began:.1f} s")
        self.write()

    def write(self) -> None:
        with self._lock:
            if self._arguments.json is not None:
                self._arguments.json.write_text(json.dumps(self.report, indent=1, default=str) + "\n")
            if self._arguments.markdown is not None:
                self._arguments.markdown.write_text(as_markdown(self.report))

    def _stop(self) -> None:
        say("-- the time is up")
        self.write()
        os._exit(0)


def say(text: str) -> None:
    print(text, flush=True)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Peak:
    """The most memory that was taken since it began, above what was taken then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = self._allocated()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def gigabytes(self) -> float:
        return (torch.cuda.max_memory_allocated(self._device) - self._before) / GB if self._device.type == "cuda" else 0.0

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


# The attention of a later piece of a prompt.


def lower_right(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """torch's own bias for it: the same kernel, by another way."""
    from torch.nn.attention.bias import causal_lower_right

    assert window is None
    bias: Any = causal_lower_right(len(queries), keys.shape[2])
    seen = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, attn_mask=bias, enable_gqa=True)
    return seen.transpose(1, 2)


def split(queries: Tensor, keys: Tensor, values: Tensor, kernel: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor]]) -> Tensor:
    """The piece itself, causal, and all that is before it, unmasked; joined by the logarithms of their sums."""
    rows = len(queries)
    queries = queries.transpose(0, 1)[None]
    past = keys.shape[2] - rows
    own, own_sum = kernel(queries, keys[:, :, past:], values[:, :, past:], True)
    if not past:
        return own.transpose(1, 2)
    before, before_sum = kernel(queries, keys[:, :, :past], values[:, :, :past], False)
    share = (own_sum - before_sum).reshape(1, queries.shape[1], rows, 1).sigmoid().to(own.dtype)
    return torch.lerp(before, own, share).transpose(1, 2)


def split_flash(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    def kernel(queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        seen = torch.ops.aten._scaled_dot_product_flash_attention(queries, keys, values, 0.0, is_causal, False)
        return seen[0], seen[1]

    assert window is None
    return split(queries, keys, values, kernel)


def split_cudnn(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    def kernel(queries: Tensor, keys: Tensor, values: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        seen = torch.ops.aten._scaled_dot_product_cudnn_attention(queries, keys, values, None, True, 0.0, is_causal, False)
        return seen[0], seen[1]

    assert window is None
    return split(queries, keys, values, kernel)


def split_cudnn_expanded(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    groups = queries.shape[1] // keys.shape[1]
    return split_cudnn(queries, keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1), window)


def masked(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """How it was before: a mask, which only torch's plain products take together with shared keys."""
    rows, tokens = len(queries), keys.shape[2]
    own, others = torch.arange(tokens - rows, tokens, device=keys.device)[:, None], torch.arange(tokens, device=keys.device)
    hidden = others > own if window is None else (others > own) | (others <= own - window)
    mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device).masked_fill_(hidden, -torch.inf)
    seen = scaled_dot_product_attention(queries.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True)
    return seen.transpose(1, 2)


OWN = "flash (the engine's)"
KERNELS: dict[str, Kernel] = {
    OWN: attention.attend_causally,
    "causal_lower_right": lower_right,
    "split, flash": split_flash,
    "split, cuDNN": split_cudnn,
    "split, cuDNN, expanded keys": split_cudnn_expanded,
    "masked (before)": masked,
}


def random_qkv(rows: int, tokens: int, heads: int, kv_heads: int, size: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(rows + tokens + size)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator)

    queries, keys, values = made(rows, heads, size), made(1, tokens, kv_heads, size), made(1, tokens, kv_heads, size)
    return queries, keys.transpose(1, 2), values.transpose(1, 2)


def plain_attention(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """The same in float32, by its definition."""
    groups = queries.shape[1] // keys.shape[1]
    keys, values = (each[0].float().repeat_interleave(groups, 0) for each in (keys, values))
    rows, tokens = len(queries), keys.shape[1]
    scores = torch.einsum("rhd,htd->hrt", queries.float(), keys) * queries.shape[-1] ** -0.5
    own, others = torch.arange(tokens - rows, tokens, device=keys.device)[:, None], torch.arange(tokens, device=keys.device)
    hidden = others > own if window is None else (others > own) | (others <= own - window)
    return torch.einsum("hrt,htd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def check_kernels(bench: Bench, names: Sequence[str]) -> dict[str, str]:
    """The largest difference to float32. bfloat16 has 8 bits, and results are about 1: up to 0.02 is right."""
    found: dict[str, str] = {}
    cases = [(300, 1000, 128, None), (1000, 1000, 128, None), (17, 1500, 64, None), (2, 999, 128, None)]
    windows = [(300, 1000, 128, 100), (300, 310, 128, 2000), (1000, 1000, 64, 17)]
    for name in names:
        worst = []
        for rows, tokens, size, window in cases + (windows if name in (OWN, "masked (before)") else []):
            try:
                queries, keys, values = random_qkv(rows, tokens, 32, 8, size, bench.device)
                with torch.inference_mode():
                    seen = KERNELS[name](queries, keys, values, window).reshape(queries.shape)
                worst.append(f"{(seen.float() - plain_attention(queries, keys, values, window)).abs().max().item():.4f}")
            except Exception as error:  # noqa: BLE001, the other kernels go on
                worst.append(f"{type(error).__name__}: {str(error)[:200]}")
        found[name] = ", ".join(worst)
        say(f"   {name}: {found[name]}")
    return found


def check_pages(bench: Bench) -> dict[str, float]:
    """The engine's whole attention over pages, for later pieces and windows, in both types, against float32."""
    found: dict[str, float] = {}
    shape = ModelShape(1024, 1, 8, 2, 128, 64, 64, 2048)
    for dtype in (torch.bfloat16, torch.float32):
        for rows, context, window in ((300, 1000, None), (640, 640, None), (300, 1000, 100)):
            queries, keys, values = random_qkv(rows, context, shape.heads, shape.kv_heads, shape.head_dim, bench.device)
            queries, keys, values = (each.to(dtype) for each in (queries, keys, values))
            store = KVStore(shape, 128, 16, dtype, bench.device)
            pages = torch.randperm(128, device=bench.device)[: -(-context // 16)]
            slots = (pages[:, None] * 16 + torch.arange(16, device=bench.device)).flatten()[:context]
            store.write(0, slots, keys[0].transpose(0, 1), values[0].transpose(0, 1))
            plan = AttentionPlan(slots, (PromptPart(0, rows, context, pages),), ())
            with torch.inference_mode():
                seen = attend(queries, store, 0, plan, window).view(queries.shape)
            difference = (seen.float() - plain_attention(queries, keys, values, window)).abs().max().item()
            found[f"{dtype} {rows} of {context}, window {window}"] = difference
            assert difference < (0.02 if dtype == torch.bfloat16 else 0.005), found
    say(f"   {found}")
    return found


def time_kernels(bench: Bench, names: Sequence[str]) -> list[dict[str, Any]]:
    """A piece of `chunk` tokens at the end of `total`: the first call, later ones, and the most memory above its inputs."""
    sizes, shape = bench.sizes, bench.sizes.shape
    rows, total = sizes.chunk, sizes.total
    flop = 4 * shape.heads * shape.head_dim * (rows * (total - rows) + rows * rows / 2)
    found: list[dict[str, Any]] = []
    for name in names:
        queries, keys, values = random_qkv(rows, total, shape.heads, shape.kv_heads, shape.head_dim, bench.device)
        peak = Peak(bench.device)
        row: dict[str, Any] = {"kernel": name}
        try:
            turns = 2 if name == "masked (before)" else 6
            with torch.inference_mode():
                times = [timed(bench.device, partial(KERNELS[name], queries, keys, values, None)) for _ in range(turns)]
            row |= {"first_ms": times[0] * 1e3, "ms": min(times[1:]) * 1e3, "tflops": flop / min(times[1:]) / 1e12}
            row["peak_gb"] = peak.gigabytes()
        except Exception as error:  # noqa: BLE001, the other kernels go on
            row["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
        say(f"   {row}")
        found.append(row)
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def timed(device: torch.device, call: Callable[[], Any]) -> float:
    finish(device)
    began = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - began


# The whole engine.


def load(bench: Bench, shape: ModelShape) -> tuple[Model, dict[str, float]]:
    """A model by way of the engine's own loading, and the memory that it leaves reserved but unused."""
    model = Model(
        shape, random_weights(shape, bench.sizes.dtype, bench.device, 0.02), shape.trained_length, bench.sizes.dtype, bench.device
    )
    found = {"model_gb": model.bytes / GB, "unused_gb_after_loading": unused(bench.device)}
    release_unused(bench.device)
    return model, found | {"unused_gb_after_release": unused(bench.device)}


def unused(device: torch.device) -> float:
    return (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) / GB if device.type == "cuda" else 0.0


def load_as_before(bench: Bench) -> dict[str, float]:
    """What loading left before: all tensors first, then those with the same input joined."""
    tensors = dict(random_weights(bench.sizes.shape, bench.sizes.dtype, bench.device, 0.02))
    sets = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
    prefixes = [f"model.layers.{layer}." for layer in range(bench.sizes.shape.layers)]
    kept = [torch.cat([tensors.pop(f"{prefix}{name}.weight") for name in names]) for prefix in prefixes for names in sets]
    say(f"   {len(kept)} matrices joined")
    return {"unused_gb": unused(bench.device)}


def flop_of_prompt(shape: ModelShape, tokens: int) -> tuple[float, float]:
    """Those of the matrices, and those of attention."""
    heads, kv_heads, size = shape.heads, shape.kv_heads, shape.head_dim
    weights = shape.hidden_size * ((2 * heads + 2 * kv_heads) * size + 3 * shape.intermediate_size)
    matrices = 2.0 * (tokens * shape.layers * weights + shape.hidden_size * shape.vocab_size)
    return matrices, 2.0 * shape.layers * heads * size * tokens * tokens


def prompt_engine(bench: Bench, model: Model, **settings: Any) -> Engine:
    """Room for two of the longest prompts."""
    return make_engine(model, 2 * -(-bench.sizes.total // 16) + 64, token_budget=bench.sizes.chunk, **settings)


def prompt_of(bench: Bench, number: int, tokens: int, **fields: Any) -> Submit:
    numbers = random.Random(number)
    ids = tuple(numbers.choices(range(bench.sizes.shape.vocab_size), k=tokens))
    return Submit(number.to_bytes(16, "big"), ids, 1, number, **{"sampling": Sampling(temperature=0), **fields})


def first_token(engine: Engine, submit: Submit) -> int:
    engine.submit(submit)
    token = -1
    while engine.has_work:
        for segment in engine.step():
            assert segment.delta is not None, segment
            assert segment.terminal == Finish("length"), segment
            token = segment.delta.token_ids[0]
    return token


def measure_prompts(bench: Bench, model: Model) -> list[dict[str, Any]]:
    engine = prompt_engine(bench, model)
    first_token(engine, prompt_of(bench, 999, bench.sizes.lengths[0]))
    rows: list[dict[str, Any]] = []
    for number, tokens in enumerate(bench.sizes.lengths):
        peak = Peak(bench.device)
        submits = [prompt_of(bench, 10 * number + turn, tokens) for turn in range(2)]
        times = [timed(bench.device, partial(first_token, engine, submit)) for submit in submits]
        matrices, pairs = flop_of_prompt(bench.sizes.shape, tokens)
        row = {"tokens": tokens, "seconds": min(times), "other_seconds": max(times)}
        row["tflops"] = (matrices + pairs) / min(times) / 1e12
        row["tflops_matrices_only"] = matrices / min(times) / 1e12
        row |= {"peak_gb_over_model_and_kv": peak.gigabytes(), "reserved_unused_gb": unused(bench.device)}
        say(f"   {row}")
        rows.append(row)
    engine.close()
    return rows


@contextlib.contextmanager
def using(kernel: Kernel) -> Iterator[None]:
    own = attention.attend_causally
    vars(attention)["attend_causally"] = kernel
    try:
        yield
    finally:
        vars(attention)["attend_causally"] = own


def measure_prompts_with(bench: Bench, model: Model, name: str) -> list[dict[str, Any]]:
    with using(KERNELS[name]):
        return measure_prompts(bench, model)


def check_tokens(bench: Bench) -> dict[str, Any]:
    """A tiny float32 model gives the CPU's tokens, with prompts in many pieces."""
    cpu = torch.device("cpu")
    weights = list(random_weights(TINY, torch.float32, cpu, 0.15))
    submits = requests(TINY, 6, 500, 12)
    models = [Model(TINY, weights, TINY.trained_length, torch.float32, place) for place in (cpu, bench.device)]
    found = [run(make_engine(model, 400, token_budget=128), submits) for model in models]
    return {"equal": sum(found[0][submit.id] == found[1][submit.id] for submit in submits), "of": len(submits)}


def measure_logprobs(bench: Bench) -> dict[str, Any]:
    """Prompt logprobs of the longest prompt with a large vocabulary. Few layers: the memory of logits does not depend on them."""
    model, _ = load(bench, bench.sizes.wide)
    engine = prompt_engine(bench, model)
    submit = prompt_of(bench, 5, bench.sizes.total, prompt_logprobs=True, logprobs=2)
    peak = Peak(bench.device)
    began = time.perf_counter()
    engine.submit(submit)
    reports = []
    while engine.has_work:
        reports += [segment.delta.prompt for segment in engine.step() if segment.delta is not None and segment.delta.prompt is not None]
    seconds = time.perf_counter() - began
    logprobs = [entry for piece in reports[0].logprobs or () for entry in unpack_logprobs(piece)]
    assert len(logprobs) == bench.sizes.total
    engine.close()
    return {
        "tokens": len(logprobs),
        "vocabulary": model.shape.vocab_size,
        "seconds": seconds,
        "peak_gb_over_model_and_kv": peak.gigabytes(),
    }


def measure_out_of_memory(bench: Bench, model: Model) -> list[dict[str, Any]]:
    """The longest prompt, with less and less memory beside model and KV: its pieces shrink, and its token is the same."""
    engine = prompt_engine(bench, model)
    expected = first_token(engine, prompt_of(bench, 77, bench.sizes.total))
    engine.close()
    del engine
    rows: list[dict[str, Any]] = []
    for gigabytes in (8.0, 0.7, 0.3):
        engine = prompt_engine(bench, model)
        release_unused(bench.device)
        if bench.device.type == "cuda":
            taken, total = torch.cuda.memory_reserved(bench.device), torch.cuda.get_device_properties(bench.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, (taken + gigabytes * GB) / total), bench.device)
        try:
            began = time.perf_counter()
            token = first_token(engine, prompt_of(bench, 77, bench.sizes.total))
            row = {"room_gb": gigabytes, "seconds": time.perf_counter() - began, "failures": engine.stats().memory_failures}
            rows.append(row | {"same_token": token == expected})
            say(f"   {rows[-1]}")
        finally:
            if bench.device.type == "cuda":
                torch.cuda.set_per_process_memory_fraction(1.0, bench.device)
            engine.close()
    return rows


def as_markdown(report: dict[str, Any]) -> str:
    lines = [f"{report['device']}, torch {report['torch']}", ""]
    for name, found in report.items():
        rows = found if isinstance(found, list) else [found] if isinstance(found, dict) else []
        if not rows:
            continue
        columns = list(dict.fromkeys(key for row in rows for key in row))
        lines += [f"**{name}**", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
        lines += [f"| {' | '.join(_shown(row.get(column, '')) for column in columns)} |" for row in rows]
        lines.append("")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else str(value).replace("\n", " ").replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the same as tables")
    parser.add_argument("--seconds", type=float, default=140, help="end after this time with what is known")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    # torch wants an index where memory is limited.
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    bench = Bench(device, arguments)
    say(f"{bench.report['device']}, torch {torch.__version__}")
    is_gpu = bench.device.type == "cuda"
    bench.part("attention over pages against float32", 5, lambda: check_pages(bench))
    if is_gpu:
        bench.part("the engine's kernel against float32", 5, lambda: check_kernels(bench, [OWN]))
        bench.part("the engine's kernel", 5, lambda: time_kernels(bench, [OWN]))
    loaded: list[Model] = []

    def load_model() -> dict[str, float]:
        model, found = load(bench, bench.sizes.shape)
        loaded.append(model)
        say(f"   {found}")
        return found

    bench.part("memory after loading", 10, load_model)
    if loaded:
        bench.part("prompts", 10, lambda: measure_prompts(bench, loaded[0]))
    bench.part("prompt logprobs", 10, lambda: measure_logprobs(bench))
    if loaded:
        bench.part("out of memory", 15, lambda: measure_out_of_memory(bench, loaded[0]))
    bench.part("tokens against the CPU's", 15, lambda: check_tokens(bench))
    bench.part("memory after loading as before", 10, lambda: load_as_before(bench))
    if is_gpu and loaded:
        # Last: a kernel that breaks the device's context would break what comes after it.
        others = [name for name in KERNELS if name != OWN]
        bench.part("other kernels against float32", 10, lambda: check_kernels(bench, others))
        bench.part("other kernels", 10, lambda: time_kernels(bench, others))
        bench.part("prompts, split, cuDNN", 15, lambda: measure_prompts_with(bench, loaded[0], "split, cuDNN"))
        bench.sizes.lengths = bench.sizes.lengths[:3]
        bench.part("prompts, masked (before)", 35, lambda: measure_prompts_with(bench, loaded[0], "masked (before)"))
    say("-- done")


if __name__ == "__main__":
    main()
