"""Measures how long the front end's event loop is held by the worst requests that a client can send.

    python bench/stalls.py [NAME …] [--rounds N] [--json FILE]

Each request is sent alone to a server of two simulated workers; `penstock_loop_longest_stall_seconds` tells the longest stall of each.
`--stall-log` names what caused it. A stall is measured up to 5 ms too short.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.checkpoints.checkpoint import find_default_model
from servers import Process, serving

MAX_STALL_MILLISECONDS = 20.0
MAX_BODY = 32 * 2**20
WORDS = ["river", "carries", "water", "past", "old", "stone", "bridge", "morning", "light", "moves", "over", "paper", "garden"]
SCHEMA = {"type": "object", "properties": {f"p{number}": {"type": "string", "enum": ["a", "b"]} for number in range(30)}}


class Case(NamedTuple):
    """A request, and the statuses that its answer may have."""

    path: str
    body: bytes
    statuses: tuple[int, ...] = (200,)


def completion(prompt: object, **fields: object) -> Case:
    return Case("/v1/completions", json.dumps({"model": "m", "prompt": prompt, "max_tokens": 1, **fields}).encode())


def chat(messages: list[dict[str, Any]], path: str = "/v1/chat/completions", **fields: object) -> Case:
    return Case(path, json.dumps({"model": "m", "messages": messages, "max_tokens": 1, **fields}).encode())


def filled(element: str, size: int = MAX_BODY) -> Case:
    """A prompt of as many of these elements as fit."""
    elements = ",".join([element] * ((size - 64) // (len(element) + 1)))
    return Case("/v1/completions", f'{{"model":"m","prompt":[{elements}]}}'.encode(), (400, 413))


def text(words: int) -> str:
    return " ".join(f"{WORDS[number % len(WORDS)]} {number}" for number in range(words // 2))


def messages(count: int) -> list[dict[str, Any]]:
    return [{"role": "assistant" if number % 2 else "user", "content": f"{number}"} for number in range(count - 1)] + [
        {"role": "user", "content": "?"}
    ]


def calls(count: int) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"x": [1] * 20})}}
    return [message for _ in range(count) for message in ({"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]})]


def tagged_last(size: int = MAX_BODY - 256) -> dict[str, Any]:
    """A message with long text, and the type of each object after what it holds."""
    return {"content": [{"text": "word " * (size // 5), "type": "text"}], "role": "user"}


IDS = list(range(1000, 41_000))
CASES: dict[str, Callable[[], Case]] = {
    "200,000 token ids": lambda: completion(IDS * 5),
    "200,000 token ids, n 128": lambda: completion(IDS * 5, n=128),
    "200,000 tokens of text": lambda: completion(text(59_000)),
    "200,000 tokens in a session": lambda: chat(
        [{"role": "user", "content": text(59_000)}], nvext={"session_control": {"session_id": "s", "action": "open"}}
    ),
    "echo, logprobs, 100,000 tokens, n 4": lambda: completion((IDS * 3)[:100_000], n=4, echo=True, logprobs=5),
    "the same, streamed": lambda: completion((IDS * 3)[:100_000], n=4, echo=True, logprobs=5, stream=True),
    "2,048 choices": lambda: completion([[index] for index in range(1000, 1016)], n=128, max_tokens=16),
    "2,048 choices, streamed": lambda: completion([[index] for index in range(1000, 1016)], n=128, max_tokens=16, stream=True),
    "128 choices with 20 logprobs": lambda: chat([{"role": "user", "content": "x"}], n=128, max_tokens=64, logprobs=True, top_logprobs=20),
    "2,048 tokens with 20 logprobs, Responses": lambda: Case(
        "/v1/responses",
        json.dumps({"model": "m", "input": "x", "max_output_tokens": 2048, "ignore_eos": True, "top_logprobs": 20}).encode(),
        (200, 400),
    ),
    "prompt token ids, n 128": lambda: completion(IDS, n=128, return_token_ids=True),
    "empty strings": lambda: filled('""'),
    "empty arrays": lambda: filled("[]"),
    "objects": lambda: filled('{"a":1}'),
    "1e308": lambda: filled("1e308"),
    "numbers of 4,300 digits": lambda: filled("1" * 4300),
    "escapes": lambda: Case("/v1/completions", b'{"model":"m","prompt":"' + b"\\n" * (MAX_BODY // 2 - 64) + b'"}', (400, 413)),
    "spaces": lambda: Case("/v1/completions", b" " * (MAX_BODY - 64) + b'{"model":"m","prompt":"x"}', (400, 413)),
    "short 1e308": lambda: filled("1e308", 4090),
    "16,384 messages": lambda: chat(messages(16_384)),
    "16,384 messages in a session": lambda: chat(messages(16_384), nvext={"session_control": {"session_id": "m", "action": "open"}}),
    "16,384 messages, Anthropic": lambda: chat(messages(16_383), "/v1/messages"),
    "16,384 items, Responses": lambda: Case("/v1/responses", json.dumps({"model": "m", "input": messages(16_384)}).encode()),
    "a wrong field after 16,384 messages": lambda: chat(messages(16_384), n="x")._replace(statuses=(400,)),
    "types after 32 MiB of text": lambda: chat([tagged_last()])._replace(statuses=(400,)),
    "types after 32 MiB of text, Anthropic": lambda: chat([tagged_last()], "/v1/messages")._replace(statuses=(400,)),
    "2,000 tool calls": lambda: chat(calls(2000)),
    "1,024 tools": lambda: chat(
        [{"role": "user", "content": "x"}],
        tools=[
            {"type": "function", "function": {"name": f"f{number}", "parameters": SCHEMA if not number % 4 else {}}}
            for number in range(1024)
        ],
    )._replace(statuses=(200, 400, 413)),
    "truncation auto": lambda: Case(
        "/v1/responses",
        json.dumps({"model": "m", "truncation": "auto", "input": [{"role": "user", "content": text(60)} for _ in range(8000)]}).encode(),
    ),
    "256 KiB of instructions, stored": lambda: Case(
        "/v1/responses", json.dumps({"model": "m", "input": "x", "instructions": "y " * 2**17, "metadata": {}}).encode(), (200, 400)
    ),
    "200,000 tokens detokenized": lambda: Case("/detokenize", json.dumps({"model": "m", "tokens": IDS * 5}).encode()),
    "200,000 tokens tokenized": lambda: Case(
        "/tokenize", json.dumps({"model": "m", "prompt": text(59_000), "return_token_strs": True}).encode()
    ),
}


def send(server: Process, case: Case) -> int:
    """Sends a request and reads the whole answer. Returns its size."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    connection.request("POST", case.path, case.body, {"content-type": "application/json"})
    answer = connection.getresponse()
    size = 0
    first = answer.read(200)
    piece = first
    while piece:
        size += len(piece)
        piece = answer.read(1 << 20)
    connection.close()
    assert answer.status in case.statuses, (answer.status, first)
    return size


def measure(server: Process, name: str, rounds: int) -> dict[str, Any]:
    case = CASES[name]()
    stalls, seconds, logged, size = [], [], len(server.log), 0
    for _ in range(rounds):
        server.metric("penstock_loop_longest_stall_seconds")
        began = time.perf_counter()
        size = send(server, case)
        seconds.append(time.perf_counter() - began)
        time.sleep(0.1)
        stalls.append(server.metric("penstock_loop_longest_stall_seconds") * 1000)
    causes = [match[1] for line in server.log[logged:] if (match := re.search(r"was held for (.*)", line))]
    result = {"stall_ms": max(stalls), "median_ms": statistics.median(stalls), "seconds": min(seconds), "answer_bytes": size}
    mark = "" if max(stalls) <= MAX_STALL_MILLISECONDS else "   MISS"
    figures = f"{len(case.body) / 2**20:6.1f} MiB {result['seconds']:7.2f} s  stall {max(stalls):7.1f} ms"
    print(f"{name:40} {figures} (median {result['median_ms']:.1f}){mark}")
    for cause in dict.fromkeys(causes):
        print(f"      {cause}")
    sys.stdout.flush()
    return {**result, "causes": causes}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures how long the worst requests hold the event loop.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"requests to send (default: all): {'; '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="how often each is sent (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    help_text = "give the front end real-time priority: on a busy machine, waiting for a core looks like a stall (needs root)"
    parser.add_argument("--real-time", action="store_true", help=help_text)
    arguments = parser.parse_args()
    flags = ("--engine=simulator", f"--model={find_default_model()}", "--served-name=m", "--context-length=262144", "--step-ms=1")
    with serving(*flags, "--workers=2", "--stall-log=0.02") as server:
        if arguments.real_time:
            (front_end,) = server.children("frontend").values()
            for thread in front_end.threads():
                os.sched_setscheduler(thread.id, os.SCHED_FIFO, os.sched_param(1))
        send(server, completion("warm up"))
        results = {name: measure(server, name, arguments.rounds) for name in arguments.names or CASES}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))
    longest = max(result["stall_ms"] for result in results.values())
    print(f"longest stall: {longest:.1f} ms: {'ok' if longest <= MAX_STALL_MILLISECONDS else 'MISS'}")
    return 0 if longest <= MAX_STALL_MILLISECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
