"""Measures two costs of the API beside the token path, and what a client hears while it waits.

    python bench/api.py parsing        CPU per token of a tool parser and a reasoning parser, at 2,048 streams
    python bench/api.py long-prompt    how a prompt of 200,000 tokens disturbs 1,000 streams
    python bench/api.py waiting        headers and silence of every route that generates, with a prefill of 60 s

The first two measure both sides by turns in one run, and use `sseload`, the load client in C. It is built on first use; without a C
compiler they are skipped with a message. Results go to bench-results/api-*.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from itertools import pairwise
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
PREFILL_SECONDS = 60.0
PREFILL_RATE = 20
MAX_HEADER_SECONDS = 2.0
MAX_WHOLE_SECONDS = 42.0
MAX_SILENCE_SECONDS = 5.0
# Routes, and what their bodies have besides the prompt.
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {}),
    "chat, resumable": ("/v1/chat/completions", {"stream_options": {"resumable": True}}),
    "completions": ("/v1/completions", {}),
    "completions, resumable": ("/v1/completions", {"stream_options": {"resumable": True}}),
    "messages": ("/v1/messages", {}),
    "responses": ("/v1/responses", {"store": False}),
    "responses, stored": ("/v1/responses", {}),
    "responses, background": ("/v1/responses", {"background": True}),
}
WHOLE = ("chat", "completions", "messages", "responses", "responses, stored")


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


class Wait:
    """One request, and when something came: seconds since it was sent."""

    def __init__(self, server: Process, method: str, path: str, body: dict[str, Any] | None) -> None:
        self.headers = 0.0
        self.times: list[float] = []
        self.content = b""
        self._began = time.perf_counter()
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=2 * PREFILL_SECONDS)
        self._connection.request(method, path, None if body is None else json.dumps(body), {"content-type": "application/json"})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        answer = self._connection.getresponse()
        self.headers = time.perf_counter() - self._began
        assert answer.status == 200, answer.read()
        while content := answer.read1(65536):
            self.times.append(time.perf_counter() - self._began)
            self.content += content

    def figures(self) -> dict[str, float]:
        """The times of headers and end, the longest silence, and how many reads had something."""
        self._reader.join(3 * PREFILL_SECONDS)
        marks = [self.headers, *self.times]
        silence = max(after - before for before, after in pairwise(marks))
        return {"headers": self.headers, "end": marks[-1], "silence": silence, "reads": len(self.times)}


def waiting_body(name: str, stream: bool, words: int) -> dict[str, Any]:
    """Its prompt begins with its name, so no two share a prefix."""
    path, more = STREAMS[name]
    text = f"{name} {stream} " + "water " * words
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
    if path == "/v1/completions":
        prompt = {"prompt": text, "max_tokens": 4}
    elif path == "/v1/responses":
        prompt = {"input": text, "max_output_tokens": 4}
    return {"model": "simulator", **prompt, **more, "stream": stream}


def send_all(server: Process, wanted: Sequence[tuple[str, bool]]) -> dict[str, Wait]:
    """Sends these requests at once: their prompts are computed in one step of PREFILL_SECONDS, after another of two seconds."""
    before = {"model": "simulator", "prompt": "stone " * (2 * PREFILL_RATE), "max_tokens": 1}
    Wait(server, "POST", "/v1/completions", before)
    time.sleep(0.5)
    words = int(PREFILL_SECONDS * PREFILL_RATE / len(wanted))
    waits = {}
    for name, stream in wanted:
        waits[name if stream else f"{name}, whole"] = Wait(server, "POST", STREAMS[name][0], waiting_body(name, stream, words))
    return waits


def follow(server: Process, wait: Wait) -> Wait:
    """Another reader of a response, which has all events so far."""
    while b"response.in_progress" not in wait.content:
        time.sleep(0.1)
    events = [json.loads(line[6:]) for line in wait.content.splitlines() if line.startswith(b"data: ")]
    path = f"/v1/responses/{events[0]['response']['id']}?stream=true&starting_after={events[-1]['sequence_number']}"
    return Wait(server, "GET", path, None)


def measure_waiting(_: str, __: Path, ___: int) -> tuple[dict[str, Any], bool]:
    """Every route that generates, with the default settings; whole answers also with `--whole-keep-alive 1`."""
    fixed = ("--engine=simulator", f"--prefill-rate={PREFILL_RATE}")
    results: dict[str, Any] = {}
    good = True
    with (
        tempfile.TemporaryDirectory() as state,
        serving(*fixed, f"--response-store={state}/a.db") as server,
        serving(*fixed, "--whole-keep-alive=1", f"--response-store={state}/b.db") as early,
    ):
        waits = send_all(server, [*((name, True) for name in STREAMS), *((name, False) for name in WHOLE)])
        hurried = {f"{name} (1 s)": wait for name, wait in send_all(early, [(name, False) for name in WHOLE]).items()}
        waits["responses, background, followed"] = follow(server, waits["responses, background"])
        for name, wait in {**waits, **hurried}.items():
            results[name] = found = wait.figures()
            latest = MAX_WHOLE_SECONDS if name.endswith("whole") else MAX_HEADER_SECONDS
            good &= found["headers"] <= latest and found["silence"] <= MAX_SILENCE_SECONDS and found["end"] >= PREFILL_SECONDS / 2
            told = f"headers {found['headers']:5.2f} s, longest silence {found['silence']:5.2f} s, end {found['end']:5.1f} s"
            print(f"   {name:40} {told}, {found['reads']} reads", flush=True)
    return results, good


MEASURES: dict[str, Callable[[str, Path, int], tuple[dict[str, Any], bool]]] = {
    "parsing": measure_parsing,
    "long-prompt": measure_long_prompt,
    "waiting": measure_waiting,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures two costs of the API, and what a client hears while it waits.")
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--client", help="the sseload program (default: built from bench/sseload.c)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="measurements of each side (default: 3)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        client = arguments.client or build_client()
        if client is None and arguments.measure != "waiting":
            print("skipped: no C compiler to build sseload; install one or name the program with --client")
            return 0
        results, good = MEASURES[arguments.measure](client or "", Path(folder), arguments.rounds)
    target = ROOT / "bench-results" / f"api-{arguments.measure}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(results, indent=2))
    print("ok" if good else "MISS")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
