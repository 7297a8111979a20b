"""A conversation with images: what its fifth turn computes again.

    python bench/images/turns.py

Two simulated workers. Turns 1 to 3 bring four images. Each turn sends the whole conversation again, as clients do. Turn 5 comes three
times, in conversations of their own: to the same worker; after that worker was drained (its session has moved); and without a session, to
a worker that has never seen it. Every answer must be exact. Turn 5 must find at least 95 % of its prompt, and no worker may encode an
image of a conversation again, by the metric.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from images.noise import Noise, noise
from penstock.bench.verify import Verifier, make_verifier
from servers import Process

TOKENS = 64
IMAGES_OF_TURN = (2, 1, 1, 0, 0)
MIN_REUSED = 0.95
WORKERS = ("left", "right")


class Conversation:
    """One that sends all of itself with every turn."""

    def __init__(self, front_end: Process, verifier: Verifier, number: int) -> None:
        self._front_end = front_end
        self._verifier = verifier
        self._number = number
        self._messages: list[dict[str, object]] = []
        self._seals: list[bytes] = []
        self.wrong = 0

    def turn(self, headers: dict[str, str]) -> tuple[float, str]:
        """Returns the share of its prompt that was cached, and its worker."""
        turn = len(self._messages) // 2
        pictures: list[Noise] = [noise(100 * self._number + 10 * turn + index, (320, 240)) for index in range(IMAGES_OF_TURN[turn])]
        # A long first message, as of an agent; the others are short.
        text = {"type": "text", "text": f"conversation {self._number}, turn {turn}" + ": and so on" * (0 if turn else 100)}
        self._messages.append({"role": "user", "content": [text, *[picture.part for picture in pictures]]})
        self._seals += [picture.seal for picture in pictures]
        seed = 1000 * self._number + turn
        answer = self._post({"seed": seed, "max_tokens": TOKENS, "ignore_eos": True, "nvext": {"extra_fields": ["route"]}}, headers)
        said = answer["choices"][0]["message"]["content"]
        self._messages.append({"role": "assistant", "content": said})
        self.wrong += said != self._verifier.expected_text(seed, TOKENS, self._seals)
        usage = answer["usage"]
        route = answer["nvext"]["route"]
        worker = (route[0] if isinstance(route, list) else route)["worker"]
        return usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"], worker

    def _post(self, fields: dict[str, object], headers: dict[str, str]) -> Any:
        body = json.dumps({"model": "simulator", "messages": self._messages, **fields}).encode()
        url = f"{self._front_end.url}/v1/chat/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
        with urllib.request.urlopen(request) as response:
            return json.load(response)


class Cluster:
    """Two workers and a front end. A worker that was drained can be started again."""

    def __init__(self, stack: contextlib.ExitStack, arguments: argparse.Namespace) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._places = {name: f"unix:{folder}/{name}.sock" for name in WORKERS}
        # An encoder and a prefill that are slow beside the link, so that KV is worth moving.
        self._flags = ["--engine=simulator", "--images", "--step-ms=2", f"--encode-ms={arguments.encode_ms}", "--kv-block-bytes=65536"]
        self._flags += [f"--prefill-rate={arguments.prefill_rate}", "--grace=0"]
        self.workers = {name: self.start(stack, name) for name in WORKERS}
        self.front_end = Process("frontend", "--port=0", *[f"--worker={place}" for place in self._places.values()])
        stack.callback(self.front_end.stop)
        self.front_end.wait_ready()

    def start(self, stack: contextlib.ExitStack, name: str) -> Process:
        worker = Process("worker", f"--name={name}", f"--listen={self._places[name]}", *self._flags)
        stack.callback(worker.stop)
        return worker

    def drain(self, stack: contextlib.ExitStack, name: str) -> None:
        """Ends a worker, after its sessions have moved, and starts it again."""
        self.workers[name].process.terminate()
        self.workers[name].process.wait(30)
        until(lambda: self.front_end.metric("penstock_workers") == 1)
        self.workers[name] = self.start(stack, name)
        until(lambda: self.front_end.metric("penstock_workers") == 2)

    def encoded(self) -> dict[str, float]:
        """By worker, since its start."""
        return {name: self.front_end.metric("penstock_images_total", source="encoded", name=name) for name in WORKERS}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)


def run_case(stack: contextlib.ExitStack, cluster: Cluster, verifier: Verifier, number: int, case: str) -> bool:
    conversation = Conversation(cluster.front_end, verifier, number)
    session = {"x-session-id": f"conversation-{number}"}
    before = cluster.encoded()
    for _ in range(4):
        _, home = conversation.turn(session)
    other = next(name for name in WORKERS if name != home)
    after = cluster.encoded()
    first = after[home] - before[home], after[other] - before[other]
    headers = session
    if case == "moved by a drain":
        cluster.drain(stack, home)
        after = {home: 0.0, other: after[other]}
    elif case == "elsewhere":
        # Until the turn of the other one comes.
        headers = {"x-penstock-router": "round-robin"}
        warm = Conversation(cluster.front_end, verifier, number + 50)
        while warm.turn(headers)[1] != home:
            warm = Conversation(cluster.front_end, verifier, number + 51)
        after = cluster.encoded()
    reused, worker = conversation.turn(headers)
    found = cluster.encoded()
    again = {name: found[name] - after[name] for name in WORKERS if found[name] != after[name]}
    print(f"{case}: turn 5 ran on {worker} and found {reused:.1%} of its prompt; answers that were wrong: {conversation.wrong}")
    print(f"  images encoded in turns 1 to 4: {first[0]:.0f} by {home}, {first[1]:.0f} by {other}; in turn 5: {again or 'none'}")
    is_there = (worker == home) == (case == "at home")
    return is_there and reused >= MIN_REUSED and not again and sum(first) == sum(IMAGES_OF_TURN) and not conversation.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encode-ms", type=float, default=50.0, help="for 1,000 positions of an image")
    parser.add_argument("--prefill-rate", type=float, default=20_000.0)
    arguments = parser.parse_args()
    verifier = make_verifier("simulator", "words")
    with contextlib.ExitStack() as stack:
        cluster = Cluster(stack, arguments)
        cases = ("at home", "moved by a drain", "elsewhere")
        passed = [run_case(stack, cluster, verifier, number, case) for number, case in enumerate(cases, 1)]
    print("passed" if all(passed) else "FAILED")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
