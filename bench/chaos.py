"""Kills and freezes workers under load, and checks that no client notices. Stops a front end whose clients do not let go.

    python bench/chaos.py simulator     2,000 streams of 512 tokens on four simulated workers
    python bench/chaos.py embedded      100 sampled streams on four workers with a tiny model, compared to an undisturbed run
    python bench/chaos.py shutdown      SIGTERM with 200 connections that hold the server up, 20 times; see BAD_STATES

Every two seconds a random worker is killed with SIGKILL (its supervisor restarts it) and another is frozen with SIGSTOP for five seconds.
Exits with 1 when one token or one answer is wrong, or when a stop takes longer than the grace time and a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import random
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from penstock.bench.client import Client
from penstock.bench.load import Load, Progress, Workload
from penstock.bench.verify import make_verifier
from servers import Process, serving

KILL_EVERY = 2.0
FREEZE_SECONDS = 5.0
VOCABULARY = 300
SETTLE_SECONDS = 2.0


class Chaos:
    """Kills and freezes workers while it is entered. `faults` has the time of each."""

    def __init__(self, server: Process, seed: int, freeze_seconds: float = FREEZE_SECONDS) -> None:
        self._server = server
        self._random = random.Random(seed)
        self._freeze_seconds = freeze_seconds
        self._frozen: dict[int, psutil.Process] = {}
        self.killed = 0
        self.frozen = 0
        self.faults: list[float] = []

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Chaos]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.wait([task])
            for process in list(self._frozen.values()):
                self._thaw(process)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(KILL_EVERY)
            workers = list(self._server.children("worker").items())
            self._random.shuffle(workers)
            self.strike(workers)

    def strike(self, workers: list[tuple[str, psutil.Process]]) -> None:
        """What happens every KILL_EVERY seconds, to these workers in random order."""
        for _, process in workers[:1]:
            self.kill(process)
        for _, process in workers[1:2]:
            self.freeze(process)

    def kill(self, process: psutil.Process) -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            self.killed += 1
            self.faults.append(time.perf_counter())
            self._frozen.pop(process.pid, None)

    def freeze(self, process: psutil.Process) -> None:
        if process.pid not in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGSTOP)
                self.frozen += 1
                self.faults.append(time.perf_counter())
                self._frozen[process.pid] = process
                asyncio.get_running_loop().call_later(self._freeze_seconds, self._thaw, process)

    def _thaw(self, process: psutil.Process) -> None:
        if self._frozen.pop(process.pid, None) is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


class ByTurns(Chaos):
    """One fault at a time. `turns` says which, and of which workers: those whose names begin with a role."""

    def __init__(self, server: Process, seed: int, freeze_seconds: float, turns: Sequence[tuple[str, str]]) -> None:
        super().__init__(server, seed, freeze_seconds)
        self._turns = itertools.cycle(turns)

    def strike(self, workers: list[tuple[str, psutil.Process]]) -> None:
        what, role = next(self._turns)
        for _, process in ([each for each in workers if each[0].startswith(role)] or workers)[:1]:
            getattr(self, what)(process)


async def run_simulator(arguments: argparse.Namespace) -> bool:
    flags = ["--engine=simulator", "--workers=4", "--max-batch=768", "--worker-queue=32"]
    flags += [f"--step-ms={arguments.step_ms}", f"--worker-stall={arguments.stall}"]
    with serving(*flags) as server:
        workload = Workload("simulator", "completions", arguments.streams, arguments.streams, 512, 32, arguments.seed, ignore_eos=True)
        async with Client(server.url, "completions", 600.0) as client:
            load = Load(client, workload)
            chaos = Chaos(server, arguments.seed)
            async with chaos.running():
                await load.run(show)
        verification = make_verifier("simulator", "words").verify(load.streams, 512)
        errors = [stream.error for stream in load.streams if stream.error is not None]
        migrations, stalls = server.metric("penstock_migrations_total"), server.metric("penstock_workers_stalled_total")
    print()
    print(f"{len(load.streams):,} streams of 512 tokens in {load.ended - load.began:.1f} s; killed {chaos.killed}, frozen {chaos.frozen}")
    print(f"migrations {migrations:,.0f}, stalls noticed {stalls:.0f}")
    print(f"errors at the client {len(errors)}; {verification}")
    for error in sorted(set(errors), key=str):
        print(f"  {errors.count(error)} × {error}")
    return not errors and not verification.wrong_streams and not verification.incomplete and chaos.killed > 0


def _posted(path: str, **fields: object) -> bytes:
    body = json.dumps({"model": "simulator", **fields}).encode()
    return b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body


_ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 100_000, "ignore_eos": True}
BAD_STATES = {
    "nothing sent": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncont",
    "half a body": b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{"model":',
    "idle after an answer": b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n",
    "unread stream": _posted("/v1/completions", stream=True, n=8, **_ENDLESS),
    "unread whole answer": _posted("/tokenize", prompt="x" * 300_000),
    "whole answer in the making": _posted("/v1/completions", **_ENDLESS),
    "stream that is read": _posted("/v1/completions", stream=True, **_ENDLESS),
    "resumable stream, unread": _posted("/v1/completions", stream=True, stream_options={"resumable": True}, n=4, **_ENDLESS),
    "background response": _posted("/v1/responses", input="x", background=True, max_output_tokens=100_000),
}
"""What a client sends, and then nothing more. Most of the generations wait in the queue: the worker has 64 places."""


async def run_shutdown(arguments: argparse.Namespace) -> bool:
    """Prints how long after the grace time the front end has ended, and `serve` with its worker."""
    late = []
    for number in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as directory:
            flags = [
                "--engine=simulator",
                "--step-ms=1",
                "--max-batch=64",
                f"--grace={arguments.grace}",
                f"--response-store={directory}/store",
            ]
            with serving(*flags) as server:
                states = list(itertools.islice(itertools.cycle(BAD_STATES), arguments.streams))
                connections = [_begin(server.port, state) for state in states]
                await asyncio.sleep(SETTLE_SECONDS)
                inside = sum(server.metric(f"penstock_requests_{state}", role="frontend") for state in ("running", "queued"))
                front_end, whole = _stop(server, arguments.grace)
            for connection in connections:
                connection.close()
        cleaned = any("frontend has ended" in line for line in server.log)
        print(f"{number + 1:2}: {inside:.0f} generating; front end {front_end:+.2f} s, all {whole:+.2f} s; cleaned up: {cleaned}")
        late.append(front_end if cleaned and not server.process.returncode else math.inf)
    in_time = sum(seconds <= 1 for seconds in late)
    print(f"{in_time} of {len(late)} front ends ended within a second of the grace time; the latest {max(late):+.2f} s")
    return in_time == len(late)


def _stop(server: Process, grace: float) -> tuple[float, float]:
    """The seconds from the end of the grace time to the end of the front end, and of all."""
    front_end = server.children("frontend")["frontend"]
    due = time.monotonic() + grace
    server.process.terminate()
    with contextlib.suppress(psutil.NoSuchProcess):
        front_end.wait(grace + 30)
    ended = time.monotonic() - due
    server.process.wait(grace + 30)
    return ended, time.monotonic() - due


def _begin(port: int, state: str) -> socket.socket:
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port))
    connection.sendall(BAD_STATES[state])
    if state == "stream that is read":
        threading.Thread(target=_read, args=[connection], daemon=True).start()
    return connection


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(65536):
            pass


async def run_embedded(arguments: argparse.Namespace) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "tiny"
        save_tiny_model(model)
        flags = [
            "--engine=embedded",
            f"--model={model}",
            "--workers=4",
            "--threads=1",
            "--worker-wait=120",
            "--worker-queue=8",
            "--reproducible",
        ]
        flags.append(f"--worker-stall={arguments.stall}")
        with serving(*flags) as server:
            calm = await _ask_all(server, arguments)
            chaos = Chaos(server, arguments.seed)
            async with chaos.running():
                disturbed = await _ask_all(server, arguments)
            migrations = server.metric("penstock_migrations_total")
    equal = sum(left == right for left, right in zip(calm, disturbed, strict=True))
    errors = [text for text in disturbed if text.startswith("error: ")]
    for number, (left, right) in enumerate(zip(calm, disturbed, strict=True)):
        if left != right and not right.startswith("error: "):
            print(f"  stream {number} differs: {_difference(left, right)}")
    print(f"{equal} of {len(calm)} sampled streams equal those of the undisturbed run; killed {chaos.killed}, frozen {chaos.frozen}")
    print(f"migrations {migrations:,.0f}; errors at the client {len(errors)} {sorted(set(errors))[:3]}")
    return equal == len(calm) and not errors and chaos.killed > 0


def _difference(left: str, right: str) -> str:
    """The first place where two answers differ."""
    place = next((index for index, (one, other) in enumerate(zip(left, right, strict=False)) if one != other), min(len(left), len(right)))
    return f"at {place} of {len(left)} and {len(right)}: …{left[place - 40 : place + 40]!r} against …{right[place - 40 : place + 40]!r}"


def _body(number: int, model: str) -> dict[str, object]:
    """A request with a seed, and by turns with logprobs, penalties, several choices or a stop string. All of it must survive."""
    prompt = random.Random(number).choices(range(VOCABULARY), k=24)
    variants: list[dict[str, object]] = [
        {"logprobs": 1},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.1},
        {"n": 2},
        {"stop": [" aa bb"], "min_p": 0.01},
    ]
    fixed = {"model": model, "prompt": prompt, "max_tokens": 440, "temperature": 0.8, "seed": number, "ignore_eos": True}
    return {**fixed, **variants[number % len(variants)], "stream": True, "stream_options": {"include_usage": True}}


async def _ask_all(server: Process, arguments: argparse.Namespace) -> list[str]:
    """The text, finish reason and logprob tokens of each choice, and the usage."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)) as session:
        return await asyncio.gather(*[_ask(session, server.url, number) for number in range(arguments.streams)])


async def _ask(session: aiohttp.ClientSession, url: str, number: int) -> str:
    texts: dict[int, list[object]] = {}
    usage = None
    async with session.post(f"{url}/v1/completions", json=_body(number, "tiny")) as response:
        if response.status != 200:
            return f"error: {response.status} {await response.text()}"
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if "error" in event:
                return f"error: {event['error']}"
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                part = texts.setdefault(choice["index"], ["", [], None])
                part[0] = str(part[0]) + choice["text"]
                part[1] = [*list(part[1]), *((choice["logprobs"] or {}).get("tokens") or [])]  # type: ignore[call-overload]
                part[2] = choice["finish_reason"] or part[2]
    usage = {name: value for name, value in (usage or {}).items() if name != "prompt_tokens_details"}
    return json.dumps([sorted(texts.items()), usage])


def save_tiny_model(directory: Path) -> None:
    """A random Llama model. Each token of its tokenizer is a word of two letters."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(7)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
    }
    config = LlamaConfig(**sizes, vocab_size=VOCABULARY, max_position_embeddings=512, initializer_range=0.2, eos_token_id=VOCABULARY - 1)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {f"\u0120{left}{right}": index for index, (left, right) in enumerate(itertools.product(letters, letters))}
    vocabulary = {word: index for word, index in words.items() if index < VOCABULARY - 1} | {"<end>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))


def show(progress: Progress) -> None:
    if sys.stderr.isatty():
        print(f"\r{progress.finished} of {progress.total}, {progress.failed} failed", end="", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["simulator", "embedded", "shutdown"])
    parser.add_argument("--streams", type=int, help="concurrent streams (default: 2000, embedded 100, shutdown 200)")
    parser.add_argument("--rounds", type=int, default=20, help="how often it is stopped")
    parser.add_argument("--grace", type=float, default=1.0, help="--grace of a front end that is stopped")
    parser.add_argument("--step-ms", type=float, default=30.0, help="length of a simulated step; a stream has 512 steps")
    parser.add_argument("--stall", type=float, default=2.0, help="--worker-stall of the front end")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    run, streams = {"simulator": (run_simulator, 2000), "embedded": (run_embedded, 100), "shutdown": (run_shutdown, 200)}[arguments.what]
    arguments.streams = arguments.streams or streams
    print(f"seed {arguments.seed}")
    passed = asyncio.run(run(arguments))
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
