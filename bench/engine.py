"""Measures the embedded engine with the default model on this machine's CPU, and compares the figures with their bounds.

    make bench-engine                  both
    make bench-engine ARGS="reuse"     one of them

reuse        turn 8 of a conversation of 3,000 tokens, compared with the same prompt on a fresh server: reused tokens and time to
             first token
throughput   64 concurrent requests through the whole server, compared with a single one and with a static batch of 64 in
             `transformers` in this process; by turns, twice; our worse run is compared with their better one

Other load on the machine changes the times, so only ratios within one run count. Results go to bench-results/engine.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from openai import OpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from penstock.bench.load import Bodies, Workload
from penstock.engine.checkpoints.checkpoint import find_default_model, open_checkpoint
from servers import serving

ROOT = Path(__file__).parents[1]
MODEL = "SmolLM2-135M-Instruct"
PARAGRAPH = "The river runs from the mountains to the sea, and the people of the valley have built {} along it. "
BATCH = 64
PROMPT_WORDS = 32
NEW_TOKENS = 96


def first_token(url: str, messages: list[Any]) -> tuple[float, str, Any]:
    """Seconds to the first token, the answer and the usage."""
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        began = time.perf_counter()
        stream = client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        first, text, usage = 0.0, "", None
        for chunk in stream:
            if chunk.choices and chunk.choices[0].delta.content:
                first = first or time.perf_counter() - began
                text += chunk.choices[0].delta.content
            usage = chunk.usage or usage
    return first, text, usage


def conversation(url: str) -> tuple[list[dict[str, str]], float, Any]:
    """Eight turns: a long first message, then short questions about it, as in a chat."""
    scene = " ".join(PARAGRAPH.format(what) for what in ("mills", "bridges", "dams", "towns", "canals", "gardens") * 22)
    messages = [{"role": "user", "content": scene + "What is built along the river?"}]
    for turn in range(1, 9):
        seconds, text, usage = first_token(url, messages)
        print(
            f"  turn {turn}: {usage.prompt_tokens:,} tokens, {usage.prompt_tokens_details.cached_tokens:,} reused, {seconds:.3f} s",
            flush=True,
        )
        if turn < 8:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"Tell me more about number {turn}."}]
    return messages, seconds, usage


def reuse() -> dict[str, Any]:
    with serving() as server:
        messages, warm, usage = conversation(server.url)
    with serving() as server:
        first_token(server.url, [{"role": "user", "content": "Hello"}])
        cold, _, cold_usage = first_token(server.url, messages)
    assert cold_usage.prompt_tokens == usage.prompt_tokens
    share = usage.prompt_tokens_details.cached_tokens / usage.prompt_tokens
    print(f"  without reuse: {cold_usage.prompt_tokens_details.cached_tokens} reused, {cold:.3f} s")
    figures = {"prompt_tokens": usage.prompt_tokens, "reused": share, "ttft": warm, "ttft_without_reuse": cold, "ratio": warm / cold}
    verdict("at least 95 % of turn 8's prompt is reused", f"{share:.1%}", share >= 0.95)
    verdict("its first token takes less than a fifth of the time without reuse", f"{warm / cold:.3f}", warm / cold < 0.2)
    return figures


def served_rate(url: str, concurrency: int, requests: int) -> float:
    """Tokens per second, prompts included, as `penstock bench` measures them."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "report.json"
        command = [sys.executable, "-m", "penstock", "bench", "--url", url, "-c", str(concurrency), "-n", str(requests), "--no-progress"]
        command += ["--max-tokens", str(NEW_TOKENS), "--prompt-tokens", str(PROMPT_WORDS), "--json", str(output)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        report = json.loads(output.read_text())
    assert report["tokens"] == requests * NEW_TOKENS
    return float(report["tokens_per_second"])


def reference() -> Any:
    """The default model in transformers."""
    checkpoint = open_checkpoint(find_default_model())
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
        eos_token_id=None,
        pad_token_id=0,
    )
    model: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(dict(checkpoint.tensors()), strict=False)
    model.tie_weights()
    return model.eval()


def reference_rate(model: Any, prompt_tokens: int) -> float:
    """Tokens per second of a static batch, prompts included, as in our figure."""
    ids = torch.randint(100, 40_000, (BATCH, prompt_tokens), generator=torch.Generator().manual_seed(time.time_ns() % 2**31))
    began = time.perf_counter()
    with torch.inference_mode():
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0)
    assert made.shape == (BATCH, prompt_tokens + NEW_TOKENS)
    return BATCH * NEW_TOKENS / (time.perf_counter() - began)


def throughput() -> dict[str, Any]:
    model = reference()
    torch.set_num_threads(os.cpu_count() or 1)
    alone, together, static = [], [], []
    with serving() as server:
        prompt_tokens = prompt_length(server.url)
        served_rate(server.url, 1, 1)
        for _ in range(2):
            alone.append(served_rate(server.url, 1, 2))
            together.append(served_rate(server.url, BATCH, BATCH))
            static.append(reference_rate(model, prompt_tokens))
            print(f"  one alone {alone[-1]:.1f}, {BATCH} at once {together[-1]:.1f}, transformers {static[-1]:.1f} tokens/s", flush=True)
    gain, against = min(together) / max(alone), min(together) / max(static)
    verdict(f"{BATCH} at once make at least 6 times the tokens of one alone", f"{gain:.1f}", gain >= 6)
    verdict(f"no more than 1.3 times slower than transformers' static batch of {BATCH}", f"{against:.2f} of its rate", against >= 1 / 1.3)
    figures = {"alone": alone, "together": together, "transformers": static, "gain": gain, "of_transformers": against}
    return {"prompt_tokens": prompt_tokens, "new_tokens": NEW_TOKENS, **figures}


def prompt_length(url: str) -> int:
    """About how many tokens a prompt of `penstock bench` has."""
    workload = Workload(MODEL, "completions", 1, 1, NEW_TOKENS, PROMPT_WORDS, 1, ignore_eos=True)
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        prompt = Bodies(workload).prompt(0)
        usage = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1).usage
        assert usage is not None
        return usage.prompt_tokens


HELD: list[bool] = []


def verdict(promise: str, figure: str, holds: bool) -> None:
    HELD.append(holds)
    print(f"  {'ok  ' if holds else 'MISS'}: {promise}: {figure}", flush=True)


def main() -> None:
    points = {"reuse": reuse, "throughput": throughput}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", metavar="POINT", choices=[[], *points], default=[])
    chosen = parser.parse_args().points or list(points)
    results: dict[str, Any] = {}
    for name in chosen:
        print(name)
        results[name] = points[name]()
    output = ROOT / "bench-results" / "engine.json"
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(0 if all(HELD) else 1)


if __name__ == "__main__":
    main()
