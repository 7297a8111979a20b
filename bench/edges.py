"""Measures what one hostile API key can do to 500 streams of others.

    python bench/edges.py               60 s calm, then 60 s beside the hostile key; ends with 1 when a bound is missed
    python bench/edges.py --seconds 10  shorter
    python bench/edges.py --only NAME   send only bodies of this kind (repeat for more); --list names them

The hostile client is a process of its own. It sends the most expensive request of each kind that was ever found, over many connections, as
fast as the server takes them; some it sends only half, some answers it never reads. The others are five keys with 100 streams each, read
and checked by `sseload`. Results go to bench-results/edges.json.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from penstock.engine.checkpoints.checkpoint import find_default_model
from servers import Process, serving
from sseload import build_client, figures_of

ROOT = Path(__file__).parents[1]
MODEL = "simulator"
HOSTILE_KEY = "psk-hostile-0123456789abcdef"
KEYS = [f"psk-honest-{number}-0123456789abcdef" for number in range(5)]
STREAMS_PER_KEY = 100
STEP_SECONDS = 0.05
TOKENS = 100
PROMPT = "@@ID@@ water river stone light wind paper garden bridge morning travel music"
MIB = 2**20
BODY_BYTES = 4 * MIB - 4096
CONNECTIONS_PER_KIND = 2
MAX_GAP_RATIO = 1.5
MAX_RSS_GROWTH_MIB = 768
"""What hostile requests may add to the memory of a front end with the default limits."""


@dataclass(frozen=True)
class Kind:
    """One kind of hostile request. `sends`: how many of its bytes are sent; `reads`: whether its answer is read."""

    path: str
    body: Callable[[], bytes]
    sends: float = 1.0
    reads: bool = True


def _formatted(schema: dict[str, Any]) -> bytes:
    return _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}})


def _json(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, **fields}, ensure_ascii=False, separators=(",", ":")).encode()


def _repeated(head: str, item: str, tail: str) -> bytes:
    """As many items as fit into a body."""
    count = (BODY_BYTES - len(head) - len(tail)) // (len(item) + 1)
    return (head + ",".join([item] * count) + tail).encode()


def _words(tokens: int) -> str:
    return " ".join(f"w{number}" for number in range(tokens // 3))


def _chat(**fields: Any) -> bytes:
    return _json(**{"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields})


def _schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _tool(number: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(20)}}
    return {"type": "function", "function": {"name": f"tool_{number}", "description": "x" * 100, "parameters": parameters}}


def _wide_schema() -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{index}": {"type": "array", "items": {"type": "string"}} for index in range(20_000)}}


COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
LONG_IDS = list(range(300, 1300)) * 100
KINDS: dict[str, Kind] = {
    # Many small values: each costs far more memory decoded than sent.
    "empty prompts": Kind(COMPLETIONS, lambda: _repeated(f'{{"model":"{MODEL}","prompt":[', '""', "]}")),
    "empty messages": Kind(CHAT, lambda: _repeated(f'{{"model":"{MODEL}","messages":[', "{}", "]}")),
    "short messages": Kind(CHAT, lambda: _repeated(f'{{"model":"{MODEL}","messages":[', '{"role":"user","content":"x"}', "]}")),
    "short blocks": Kind(
        MESSAGES, lambda: _repeated(f'{{"model":"{MODEL}","max_tokens":4,"messages":[', '{"role":"user","content":"x"}', "]}")
    ),
    "short items": Kind(RESPONSES, lambda: _repeated(f'{{"model":"{MODEL}","input":[', '{"role":"user","content":"x"}', "]}")),
    "content parts": Kind(
        CHAT,
        lambda: _repeated(f'{{"model":"{MODEL}","messages":[{{"role":"user","content":[', '{"type":"text","text":"x"}', "]}]}"),
    ),
    "empty lists": Kind(CHAT, lambda: _repeated(f'{{"model":"{MODEL}","messages":[],"metadata":[', "[]", "]}")),
    "deep nesting": Kind(CHAT, lambda: b'{"model":"x","messages":' + b"[" * (BODY_BYTES // 2) + b"]" * (BODY_BYTES // 2) + b"}"),
    "not JSON": Kind(CHAT, lambda: b'{"messages":"' + b"\\u0041" * (BODY_BYTES // 6)),
    "biases": Kind(COMPLETIONS, lambda: _json(prompt="x", logit_bias={str(number): 1 for number in range(200_000)})),
    "stop strings": Kind(COMPLETIONS, lambda: _json(prompt="x", stop=["x" * 1000 + str(number) for number in range(4000)])),
    "many tools": Kind(CHAT, lambda: _chat(tools=[_tool(number) for number in range(3000)])),
    # Long prompts.
    "token ids": Kind(COMPLETIONS, lambda: _json(prompt=LONG_IDS * 2, max_tokens=1)),
    "token ids, 128 choices": Kind(COMPLETIONS, lambda: _json(prompt=LONG_IDS, n=128, max_tokens=1)),
    "echo with logprobs": Kind(COMPLETIONS, lambda: _json(prompt=LONG_IDS, n=4, echo=True, logprobs=5, max_tokens=1)),
    "one long word": Kind(COMPLETIONS, lambda: _json(prompt="x" * BODY_BYTES, max_tokens=1)),
    "one long line of marks": Kind(COMPLETIONS, lambda: _json(prompt="!?" * (BODY_BYTES // 2), max_tokens=1)),
    "many words": Kind(CHAT, lambda: _chat(messages=[{"role": "user", "content": _words(200_000)}])),
    "truncation": Kind(
        RESPONSES,
        lambda: _json(truncation="auto", max_output_tokens=1, input=[{"role": "user", "content": _words(4_000)} for _ in range(150)]),
    ),
    "counting": Kind("/tokenize", lambda: _json(prompt=_words(400_000))),
    "stored": Kind(RESPONSES, lambda: _json(input=_words(100_000), store=True, max_output_tokens=1)),
    # Grammars.
    "deep schema": Kind(CHAT, lambda: _formatted(_schema(250))),
    "wide schema": Kind(CHAT, lambda: _formatted(_wide_schema())),
    "large regex": Kind(CHAT, lambda: _chat(structured_outputs={"regex": "((a|b|c){1,200}){1,200}x" * 20})),
    # Answers that nobody reads, and requests that never end.
    "unread answer": Kind(COMPLETIONS, lambda: _json(prompt=LONG_IDS, echo=True, logprobs=5, max_tokens=1), reads=False),
    "unread stream": Kind(CHAT, lambda: _chat(stream=True, max_tokens=2000, ignore_eos=True, n=8), reads=False),
    "resumable stream, left": Kind(CHAT, lambda: _chat(stream=True, max_tokens=500, ignore_eos=True, resumable=True), reads=False),
    "half a body": Kind(CHAT, lambda: _chat(messages=[{"role": "user", "content": _words(200_000)}]), sends=0.5),
}
MAX_HELD = 40
HOLD_SECONDS = 0.05
"""Of each of these kinds a sender leaves so many connections open, unread or half sent, and makes a new one after so long."""


def _head(kind: Kind, length: int) -> bytes:
    lines = [
        f"POST {kind.path} HTTP/1.1",
        "host: 127.0.0.1",
        f"authorization: Bearer {HOSTILE_KEY}",
        "content-type: application/json",
        "connection: close",
    ]
    return "\r\n".join([*lines, f"content-length: {length}", "", ""]).encode()


class Hostile:
    """Sends bodies of these kinds until the time is over. Runs in a process of its own."""

    def __init__(self, port: int, kinds: list[str], seconds: float) -> None:
        self._port = port
        self._bodies = {name: KINDS[name].body() for name in kinds}
        self._seconds = seconds
        self.statuses: dict[str, Counter[str]] = {name: Counter() for name in kinds}

    async def run(self) -> None:
        self._ends = time.monotonic() + self._seconds
        senders = [self._send(name) for name in self._bodies for _ in range(CONNECTIONS_PER_KIND)]
        await asyncio.gather(*senders)

    async def _send(self, name: str) -> None:
        kind, body = KINDS[name], self._bodies[name]
        held: list[asyncio.StreamWriter] = []
        while time.monotonic() < self._ends:
            try:
                status, writer = await asyncio.wait_for(self._one(kind, body), self._ends + 5 - time.monotonic())
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                self.statuses[name][type(error).__name__] += 1
                await asyncio.sleep(0.01)
                continue
            self.statuses[name][status] += 1
            if kind.reads and kind.sends == 1.0:
                writer.close()
                continue
            held.append(writer)
            if len(held) > MAX_HELD:
                held.pop(0).transport.abort()
            await asyncio.sleep(HOLD_SECONDS)
        for writer in held:
            writer.transport.abort()

    async def _one(self, kind: Kind, body: bytes) -> tuple[str, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=MIB)
        if not kind.reads:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(_head(kind, len(body)) + body[: int(len(body) * kind.sends)])
        await writer.drain()
        if not kind.reads or kind.sends < 1.0:
            return "held", writer
        # A refusal may come before the body is taken.
        line = await reader.readline()
        status = line.split()[1].decode() if line else "closed"
        while await reader.read(MIB):
            pass
        return status, writer


def attack(port: int, kinds: list[str], seconds: float, result: Any) -> None:
    hostile = Hostile(port, kinds, seconds)
    result.put("ready")
    asyncio.run(hostile.run())
    result.put({name: dict(counts) for name, counts in hostile.statuses.items()})


@contextmanager
def key_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        entries = [("hostile", HOSTILE_KEY), *((f"honest-{number}", key) for number, key in enumerate(KEYS))]
        lines = [f'[[keys]]\nname = "{name}"\nsha256 = "{hashlib.sha256(key.encode()).hexdigest()}"' for name, key in entries]
        path = Path(folder) / "keys.toml"
        path.write_text("\n".join(lines) + "\n")
        path.chmod(0o600)
        yield path


class Others:
    """The streams of the honest keys."""

    def __init__(self, client: str, server: Process, folder: Path, seconds: float) -> None:
        body = folder / "body.json"
        fixed = {"model": MODEL, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        body.write_text(json.dumps({**fixed, "messages": [{"role": "user", "content": PROMPT}]}))
        self._rounds = max(2, round(seconds / (TOKENS * STEP_SECONDS)))
        requests, limit = STREAMS_PER_KEY * self._rounds, 10 * seconds + 60
        command = [client, "-p", str(server.port), "-u", CHAT, "-b", str(body), "--quiet", "--expect-tokens", str(TOKENS)]
        command += ["-c", str(STREAMS_PER_KEY), "-n", str(requests), "--ramp", "2", "--timeout", str(limit)]
        self._loads = [
            subprocess.Popen([*command, "-H", f"Authorization: Bearer {key}"], stdout=subprocess.PIPE, text=True) for key in KEYS
        ]

    def figures(self) -> dict[str, Any]:
        """The worst of the keys."""
        found = [figures_of(load) for load in self._loads]
        wanted = STREAMS_PER_KEY * self._rounds * len(KEYS)
        gaps = {name: max(one["gap_ms"][name] for one in found) for name in ("p50", "p99", "p999", "max")}
        first = {name: max(one["ttft_ms"][name] for one in found) for name in ("p50", "p99")}
        return {"wanted": wanted, "ok": sum(one["ok"] for one in found), "gap_ms": gaps, "ttft_ms": first, "of_each": found}


def peak_mib(process: psutil.Process) -> float:
    """The most memory that the process has ever had."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def measure(client: str, kinds: list[str], seconds: float) -> dict[str, Any]:
    """One server with its load; with kinds, the hostile client beside it."""
    flags = ["--engine=simulator", f"--model={find_default_model()}", f"--served-name={MODEL}", "--context-length=262144"]
    flags += [f"--step-ms={STEP_SECONDS * 1000:g}", "--max-batch=4096", "--prefill-rate=2000000"]
    with key_file() as keys, tempfile.TemporaryDirectory() as folder, serving(*flags, f"--key-file={keys}") as server:
        (front_end,), (worker,) = server.children("frontend").values(), server.children("worker").values()
        began = {"front end": peak_mib(front_end), "worker": peak_mib(worker)}
        spawning = multiprocessing.get_context("spawn")
        results: Any = spawning.Queue()
        hostile = spawning.Process(target=attack, args=(server.port, kinds, seconds, results))
        if kinds:
            hostile.start()
            assert results.get(timeout=120) == "ready"
        others = Others(client, server, Path(folder), seconds)
        figures = others.figures()
        if kinds:
            figures["hostile"] = results.get(timeout=seconds + 60)
            hostile.join()
        figures["peak_mib"] = {"front end": peak_mib(front_end), "worker": peak_mib(worker)}
        figures["began_mib"] = began
        figures["cpu_seconds"] = {"front end": sum(front_end.cpu_times()[:2]), "worker": sum(worker.cpu_times()[:2])}
    return figures


def show(name: str, figures: dict[str, Any]) -> None:
    gap, first, peak = figures["gap_ms"], figures["ttft_ms"], figures["peak_mib"]
    print(f"{name}: {figures['ok']:,} of {figures['wanted']:,} streams exact")
    print(f"  gap p50 {gap['p50']:.1f}, p99 {gap['p99']:.1f}, p99.9 {gap['p999']:.1f}, longest {gap['max']:.0f} ms")
    print(f"  TTFT p50 {first['p50']:.0f}, p99 {first['p99']:.0f} ms")
    print(f"  most memory: front end {peak['front end']:.0f}, worker {peak['worker']:.0f} MiB; CPU seconds {figures['cpu_seconds']}")
    for kind, statuses in figures.get("hostile", {}).items():
        print(f"    {kind:26} {statuses}")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--only", action="append", metavar="NAME", choices=list(KINDS), help="only this kind of request (repeatable)")
    parser.add_argument("--list", action="store_true", help="list the kinds")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(KINDS))
        return 0
    client = build_client()
    if client is None:
        print("skipped: no C compiler to build sseload")
        return 0
    calm = measure(client, [], arguments.seconds)
    show("calm", calm)
    hostile = measure(client, arguments.only or list(KINDS), arguments.seconds)
    show("beside the hostile key", hostile)
    ratio = hostile["gap_ms"]["p99"] / calm["gap_ms"]["p99"]
    growth = hostile["peak_mib"]["front end"] - calm["peak_mib"]["front end"]
    checks = {
        f"p99 of the gaps at most {MAX_GAP_RATIO} × the calm run: {ratio:.2f}": ratio <= MAX_GAP_RATIO,
        "no request of the others failed": hostile["ok"] == hostile["wanted"] and calm["ok"] == calm["wanted"],
        f"the front end grows at most {MAX_RSS_GROWTH_MIB} MiB more: {growth:.0f}": growth <= MAX_RSS_GROWTH_MIB,
    }
    for check, holds in checks.items():
        print(f"{'ok  ' if holds else 'MISS'} {check}")
    target = ROOT / "bench-results" / "edges.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({"calm": calm, "hostile": hostile}, indent=2))
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
