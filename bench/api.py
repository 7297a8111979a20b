"""Measures two costs of the API beside the token path.

    python bench/api.py parsing        CPU per token of a tool parser and a reasoning parser, at 2,048 streams
    python bench/api.py long-prompt    how a prompt of 200,000 tokens disturbs 1,000 streams

Each measures both sides by turns in one run. Both use `sseload`, the load client in C. It is built on first use; without a C compiler the
measurement is skipped with a message. Results go to bench-results/api-*.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.engine.checkpoints.checkpoint import find_default_model
from penstock.text.tokenizers.source import pack_tokenizer
from servers import Process, serving
from sseload import build_client, figures_of

ROOT = Path(__file__).parents[1]
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]},
    },
}
PROMPT = "@@ID@@ water river stone light wind paper garden bridge morning travel music"
TOKENS = 256
MAX_PARSING_MICROSECONDS = 4.0
LONG_PROMPT_TOKENS = 200_000
MAX_GAP_MILLISECONDS = 20.0


class Load:
    """A load of equal streams on one server."""

    def __init__(self, client: str, server: Process, folder: Path, path: str, body: dict[str, Any]) -> None:
        self._body = folder / f"body-{server.port}.json"
        fixed = {"max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        self._body.write_text(json.dumps({**fixed, **body}))
        (front_end,) = server.children("frontend").values()
        self._command = [client, "-p", str(server.port), "-u", path, "-b", str(self._body), "--quiet"]
        self._command += ["--expect-tokens", str(TOKENS), "--cpu", f"frontend={front_end.pid}"]

    def start(self, concurrency: int, requests: int) -> subprocess.Popen[str]:
        return subprocess.Popen([*self._command, "-c", str(concurrency), "-n", str(requests)], stdout=subprocess.PIPE, text=True)

    def run(self, concurrency: int, requests: int) -> dict[str, Any]:
        figures = figures_of(self.start(concurrency, requests))
        assert figures["ok"] == requests, figures
        return figures


def measure_parsing(client: str, folder: Path, rounds: int) -> tuple[dict[str, Any], bool]:
    """The same chat, by turns with and without tools and parsers."""
    fixed = ("--engine=simulator", "--step-ms=10", "--max-batch=8192")
    # The simulator's words, and the vocabulary of a real model: many of its tokens look like the start of a marker.
    flags = {"words": (), "model": (f"--model={find_default_model()}", "--served-name=simulator")}
    results: dict[str, Any] = {}
    for name, model in flags.items():
        off = serving(*fixed, *model, "--tool-parser=none", "--reasoning-parser=none")
        on = serving(*fixed, *model, "--tool-parser=hermes", "--reasoning-parser=think")
        with off as plain, on as parsing:
            body = {"model": "simulator", "messages": [{"role": "user", "content": PROMPT}]}
            loads = {
                "off": Load(client, plain, folder, "/v1/chat/completions", body),
                "on": Load(client, parsing, folder, "/v1/chat/completions", {**body, "tools": [TOOL]}),
            }
            costs: dict[str, list[float]] = {"off": [], "on": []}
            for number in range(rounds):
                for which, load in loads.items():
                    cost = load.run(2048, 4096)["cpu"]["frontend"]["us_per_token"]
                    costs[which].append(cost)
                    print(f"   {name}, round {number}, parsers {which}: {cost:.2f} CPU-µs per token", flush=True)
        medians = {which: statistics.median(found) for which, found in costs.items()}
        results[name] = {**costs, "difference": medians["on"] - medians["off"]}
        print(f"{name}: {medians['off']:.2f} without, {medians['on']:.2f} with: {results[name]['difference']:.2f} more per token")
    return results, all(result["difference"] <= MAX_PARSING_MICROSECONDS for result in results.values())


def measure_long_prompt(client: str, folder: Path, rounds: int) -> tuple[dict[str, Any], bool]:
    """1,000 streams, by turns without and with a long prompt that arrives in between."""
    model = find_default_model()
    text = long_text(model)
    arguments = ("--engine=simulator", f"--model={model}", "--served-name=simulator", "--context-length=262144")
    results: dict[str, Any] = {"without": [], "with": []}
    with serving(*arguments, "--step-ms=50", "--max-batch=8192") as server:
        body = {"model": "simulator", "prompt": PROMPT}
        load = Load(client, server, folder, "/v1/completions", body)
        load.run(1000, 1000)
        for number in range(rounds):
            for which in ("without", "with"):
                long = {"model": "simulator", "messages": [{"role": "user", "content": f"{number} {text}"}], "max_tokens": 4}
                running = load.start(1000, 1000)
                answers: list[dict[str, Any]] = []
                if which == "with":
                    # When the first streams have begun.
                    threading.Timer(3.0, post, (server, "/v1/chat/completions", long, answers)).start()
                figures = figures_of(running)
                assert figures["ok"] == 1000, figures
                results[which].append(figures["gap_ms"])
                told = (
                    ""
                    if not answers
                    else f"; the prompt had {answers[0]['usage']['prompt_tokens']:,} tokens, {answers[0]['seconds']:.1f} s"
                )
                print(
                    f"   round {number}, {which} the prompt: gap p50 {figures['gap_ms']['p50']:.1f}, p99 {figures['gap_ms']['p99']:.1f}, "
                    f"p99.9 {figures['gap_ms']['p999']:.1f}, longest {figures['gap_ms']['max']:.1f} ms{told}",
                    flush=True,
                )
    p99 = {which: statistics.median(gap["p99"] for gap in gaps) for which, gaps in results.items()}
    rise = p99["with"] - p99["without"]
    print(f"p99 of the gaps: {p99['without']:.1f} ms without, {p99['with']:.1f} with: {rise:.1f} more")
    return {**results, "rise": rise}, rise < MAX_GAP_MILLISECONDS


def long_text(model: Path) -> str:
    """About LONG_PROMPT_TOKENS tokens of text. No line occurs twice."""
    tokenizer = pack_tokenizer(model).load()
    words = ["river", "carries", "water", "past", "old", "stone", "bridge", "morning", "light", "moves", "over", "paper", "garden"]
    lines = [f"{number}: {' '.join(words[number % len(words) :] + words[: number % len(words)])}." for number in range(20_000)]
    a_line = len(tokenizer.encode("\n".join(lines[:200]))) / 200
    return "\n".join(lines[: int(LONG_PROMPT_TOKENS / a_line)])


def post(server: Process, path: str, body: dict[str, Any], answers: list[dict[str, Any]]) -> None:
    asked = urllib.request.Request(f"{server.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(asked) as answer:
        answers.append({**json.load(answer), "seconds": time.perf_counter() - began})


MEASURES: dict[str, Callable[[str, Path, int], tuple[dict[str, Any], bool]]] = {
    "parsing": measure_parsing,
    "long-prompt": measure_long_prompt,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures two costs of the API beside the token path.")
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--client", help="the sseload program (default: built from bench/sseload.c)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each side (default: 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        client = arguments.client or build_client()
        if client is None:
            print("skipped: no C compiler to build sseload; install one or name the program with --client")
            return 0
        results, good = MEASURES[arguments.measure](client, Path(folder), arguments.rounds)
    target = ROOT / "bench-results" / f"api-{arguments.measure}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2))
    print("ok" if good else "MISS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
