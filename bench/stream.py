"""Measures the token path and compares the figures with their bounds.

    make bench                          all points
    make bench ARGS="1 2"               some points
    make bench ARGS="--client sseload"  with another build of the load client

Points 1 to 3 use `sseload`, the load client in C. It is built on first use; without a C compiler these points are skipped with a message.
Other load on the machine changes the figures; CPU-µs per token change least. Results go to bench-results/stream.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from servers import Process
from servers import serving as start_server
from sseload import build_client, figures_of

ROOT = Path(__file__).parents[1]
STEP_MS = 10
TOKENS = 256
# About 16 tokens in the simulator's vocabulary. The number makes each prompt different.
PROMPT = "@@ID@@ water river stone light wind paper garden bridge morning travel music"


@contextmanager
def serving(*arguments: str) -> Iterator[Process]:
    """`penstock serve` with the simulator and one worker. Its log must have no error."""
    with start_server("--engine=simulator", f"--step-ms={STEP_MS}", "--max-batch=8192", *arguments) as server:
        yield server
    assert server.process.returncode == 0, server.log
    wrong = [line for line in server.log if " ERROR " in line or "Traceback" in line]
    assert not wrong, wrong


def worker_load(server: Process) -> tuple[float, float, float]:
    """Generations running and queued at the worker, and KV blocks in use."""
    running = server.metric("penstock_requests_running", name="worker-0")
    queued = server.metric("penstock_requests_queued", name="worker-0")
    return running, queued, server.metric("penstock_kv_blocks", name="worker-0", state="used")


def pid(server: Process, role: str) -> int:
    (found,) = server.children(role).values()
    return int(found.pid)


class Bench:
    """Runs the points and keeps their figures."""

    def __init__(self, client: str | None, folder: Path) -> None:
        self._client = client
        self._body = folder / "body.json"
        fields = {"model": "simulator", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        self._body.write_text(json.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}}))
        self.results: dict[str, dict[str, Any]] = {}

    def start_load(self, server: Process, concurrency: int, requests: int, *arguments: str) -> subprocess.Popen[str]:
        assert self._client is not None
        command = [self._client, "-p", str(server.port), "-u", "/v1/completions", "-b", str(self._body), "-c", str(concurrency)]
        command += ["-n", str(requests), "--expect-tokens", str(TOKENS), "--cpu", f"frontend={pid(server, 'frontend')}"]
        command += ["--cpu", f"worker={pid(server, 'worker')}", "--quiet", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def load(self, server: Process, concurrency: int, requests: int, *arguments: str) -> dict[str, Any]:
        return figures_of(self.start_load(server, concurrency, requests, *arguments))

    def point_1(self) -> dict[str, tuple[Any, bool]]:
        """4,096 streams, 8,192 requests."""
        with serving() as server:
            figures = self.load(server, 4096, 8192)
        front_end = figures["cpu"]["frontend"]
        return {
            "ok, each with exactly 256 tokens": (figures["ok"], figures["ok"] == 8192),
            "tokens/s (at least 132,140)": (round(figures["tokens_per_s"]), figures["tokens_per_s"] >= 132_140),
            "front end CPU-µs per token (at most 4)": (front_end["us_per_token"], front_end["us_per_token"] <= 4),
            "TTFT p50 / p99 ms (p99 under 3,000)": (_pair(figures["ttft_ms"]), figures["ttft_ms"]["p99"] < 3000),
            "worker CPU-µs per token": (figures["cpu"]["worker"]["us_per_token"], True),
            "chunk gap p50 / p99 ms": (_pair(figures["gap_ms"]), True),
            "front end RSS MB": (front_end["rss_max_mb"], True),
        }

    def point_2(self) -> dict[str, tuple[Any, bool]]:
        """64 streams: no added delay."""
        with serving() as server:
            figures = self.load(server, 64, 512)
        gap, first = figures["gap_ms"]["p50"], figures["ttft_ms"]["p50"]
        events = figures["content_events"] / figures["requests"]
        return {
            "ok, each with exactly 256 tokens": (figures["ok"], figures["ok"] == 512),
            "chunk gap p50 ms (9 to 11)": (gap, abs(gap - STEP_MS) <= STEP_MS / 10),
            "TTFT p50 ms (under 30)": (first, first < 2 * STEP_MS + 10),
            "events with text per stream (256: one per token)": (round(events, 2), events > 0.99 * TOKENS),
            "front end CPU-µs per token": (figures["cpu"]["frontend"]["us_per_token"], True),
        }

    def point_3(self) -> dict[str, tuple[Any, bool]]:
        """200 slow readers among 2,000 fast ones. Three runs, each with its own server: without, with, and without slow readers."""
        runs = [self._fast_and_slow(slow) for slow in (False, True, False)]
        (before, _), (among, slow), (after, _) = runs
        alone = statistics.mean([before["tokens_per_s"], after["tokens_per_s"]])
        rss = max(run["cpu"]["frontend"]["rss_max_mb"] for run in (before, after))
        share = among["tokens_per_s"] / alone
        growth = among["cpu"]["frontend"]["rss_max_mb"] - rss
        assert slow is not None
        return {
            "fast streams exact": (among["ok"], among["ok"] == among["requests"]),
            "slow streams exact": (slow["ok"], slow["ok"] == slow["requests"]),
            "fast tokens/s without / with slow readers": (f"{alone:,.0f} / {among['tokens_per_s']:,.0f}", True),
            "share of the throughput kept (over 0.9)": (round(share, 3), share > 0.9),
            "growth of the front end's RSS, MiB (at most 64)": (round(growth, 1), growth <= 64),
            "events per slow / fast stream": (
                f"{slow['content_events'] / slow['requests']:.1f} / {among['content_events'] / among['requests']:.1f}",
                True,
            ),
        }

    def _fast_and_slow(self, with_slow: bool) -> tuple[dict[str, Any], dict[str, Any] | None]:
        with serving() as server:
            # 512 bytes every 50 ms: slow streams take seconds longer than fast ones, so they are there during the whole run.
            arguments = ("--slow", "200", "--slow-bytes", "512", "--slow-ms", "50")
            slow = self.start_load(server, 200, 600, *arguments) if with_slow else None
            fast = self.load(server, 2000, 8000)
            return fast, figures_of(slow) if slow is not None else None

    def point_4(self) -> dict[str, tuple[Any, bool]]:
        """1,000 clients cut off at random moments. Only 400 run at a time, so some have no token yet."""
        with serving("--max-batch", "400") as server:
            took, unserved, most = asyncio.run(_cut_off(server, 1000))
        return {
            "ms from the last cut until the worker is empty and its KV is free (under 200)": (round(took * 1000), took < 0.2),
            "clients cut off before their first token": (unserved, unserved > 0),
            "most generations at the worker at once": (most, most > 400),
        }

    def point_5(self) -> dict[str, tuple[Any, bool]]:
        """penstock bench --verify over 10,000 streams, 2,048 at a time."""
        with serving() as server, tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, "-m", "penstock", "bench", "--url", f"http://127.0.0.1:{server.port}", "-c", "2048", "-n", "10000"]
            command += ["--verify", "--max-tokens", str(TOKENS), "--no-progress", "--json", file.name]
            done = subprocess.run(
                [*command, "--process", f"frontend={pid(server, 'frontend')}"], capture_output=True, text=True, check=False
            )
            figures = json.load(file) if done.returncode < 2 else {}
        checked = figures["verification"]
        wrong = {name: checked[name] for name in ("lost", "repeated", "reordered", "usage_mismatch")}
        return {
            "streams verified": (checked["streams"], checked["streams"] == 10_000 and done.returncode == 0),
            "wrong": (wrong, not any(wrong.values())),
            "tokens/s, with this client": (round(figures["tokens_per_second"]), True),
        }

    def point_6(self) -> dict[str, tuple[Any, bool]]:
        """8 prompts × n = 4 in one streaming completion, against one prompt with n = 1."""
        with serving() as server:
            one = statistics.median([_stream_once(server, 1, 1)[0] for _ in range(5)])
            many, interleaved = zip(*[_stream_once(server, 8, 4) for _ in range(5)], strict=True)
        ratio = statistics.median(many) / one
        return {
            "seconds for one choice / for 32": (f"{one:.3f} / {statistics.median(many):.3f}", True),
            "ratio (below 1.5)": (round(ratio, 3), ratio < 1.5),
            "32 choices interleave": (all(interleaved), all(interleaved)),
        }

    def run(self, number: str) -> bool:
        point: Callable[[], dict[str, tuple[Any, bool]]] = getattr(self, f"point_{number}")
        print(f"\n{number}. {point.__doc__}", flush=True)
        if number in "123" and self._client is None:
            print("   skipped: no C compiler to build sseload; install one or name the program with --client")
            return True
        before = psutil.cpu_times()
        figures = point()
        stolen = _stolen(before, psutil.cpu_times())
        figures["CPU share taken by other machines (steal)"] = (round(stolen, 3), True)
        for name, (value, good) in figures.items():
            print(f"   {'ok  ' if good else 'MISS'}  {name}: {f'{value:,}' if isinstance(value, int) else value}")
        self.results[number] = {name: value for name, (value, _) in figures.items()}
        return all(good for _, good in figures.values())


def _stolen(before: Any, after: Any) -> float:
    """The share of time that the host of a virtual machine gave to others. With a high share, the figures say little."""
    spent = sum(after) - sum(before)
    return (getattr(after, "steal", 0.0) - getattr(before, "steal", 0.0)) / spent if spent else 0.0


def _pair(spread: dict[str, float]) -> str:
    return f"{spread['p50']:,.1f} / {spread['p99']:,.1f}"


async def _cut_off(server: Process, count: int) -> tuple[float, int, float]:
    generator = random.Random(7)
    body = json.dumps({"model": "simulator", "prompt": "cut me off", "max_tokens": 100_000, "ignore_eos": True, "stream": True}).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    unserved = 0
    most = 0.0

    async def client(seconds: float) -> None:
        nonlocal unserved
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(request)
        received = 0
        try:
            async with asyncio.timeout(seconds):
                while data := await reader.read(65536):
                    received += len(data)
        except TimeoutError:
            pass
        unserved += received == 0
        writer.transport.abort()

    async def watch() -> None:
        nonlocal most
        while True:
            running, queued, _ = await asyncio.to_thread(worker_load, server)
            most = max(most, running + queued)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(generator.uniform(0.5, 3.0)) for _ in range(count)))
    last_cut = time.monotonic()
    watching.cancel()
    while any(await asyncio.to_thread(worker_load, server)):
        if time.monotonic() - last_cut > 10:
            break
    return time.monotonic() - last_cut, unserved, most


def _stream_once(server: Process, prompts: int, n: int) -> tuple[float, bool]:
    """Wall seconds of one streaming completion, and whether no choice ended before all had begun."""
    fields = {"model": "simulator", "prompt": [f"prompt {index}" for index in range(prompts)], "n": n, "max_tokens": TOKENS, "stream": True}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/completions", json.dumps(fields).encode())
    began = time.monotonic()
    first: dict[int, int] = {}
    ends: dict[int, int] = {}
    with urllib.request.urlopen(request) as answer:
        for position, line in enumerate(answer):
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                first.setdefault(choice["index"], position)
                if choice["finish_reason"]:
                    ends[choice["index"]] = position
    took = time.monotonic() - began
    return took, len(ends) == prompts * n and max(first.values()) < min(ends.values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the token path.")
    parser.add_argument("points", nargs="*", metavar="POINT", help="1 to 6 (default: all)")
    parser.add_argument("--client", help="the sseload program (default: built from bench/sseload.c)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.client or build_client(), Path(folder))
        good = [bench.run(number) for number in arguments.points or "123456"]
    results = ROOT / "bench-results"
    results.mkdir(exist_ok=True)
    (results / "stream.json").write_text(json.dumps(bench.results, indent=2))
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
