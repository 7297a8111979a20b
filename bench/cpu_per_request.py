"""Measures the front end's CPU time per request, for two source trees by turns.

    make bench-requests ARGS="--former ../former"

256 clients ask for one-token chats, one after the other, over connections that stay open. Each tree has its own server with one simulator
worker. The trees take turns, so that other load on the machine hits both. The CPU time is the front end's own, user and system, from
/proc: it counts 10 ms, so runs are long enough to make that small. A ratio below 1 means that this tree costs less than the former one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from servers import Process
from sseload import build_client, figures_of

ROOT = Path(__file__).parents[1]
CLIENTS = 256
ROUNDS = 3
REQUESTS = 20_000
SERVER = ("serve", "--engine=simulator", "--port", "0", "--step-ms", "1", "--max-batch", "8192")
# The number makes each prompt another.
MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "@@ID@@ water river stone light wind paper garden bridge morning travel music"},
]
BODY = {"model": "simulator", "messages": MESSAGES, "max_tokens": 1, "stream": True}


@contextmanager
def serving(source: Path) -> Iterator[Process]:
    """A server that runs the code of this tree."""
    server = Process(*SERVER, environment={**os.environ, "PYTHONPATH": str(source / "src")})
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()


def measure(client: str, server: Process, body: Path, requests: int) -> float:
    """CPU microseconds per request."""
    (front_end,) = server.children("frontend").values()
    command = [client, "-p", str(server.port), "-u", "/v1/chat/completions", "-b", str(body), "-c", str(CLIENTS), "-n", str(requests)]
    before = front_end.cpu_times()
    figures = figures_of(subprocess.Popen([*command, "--quiet"], stdout=subprocess.PIPE, text=True))
    after = front_end.cpu_times()
    assert figures["ok"] == requests, figures
    return float((after.user + after.system - before.user - before.system) * 1e6 / requests)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the front end's CPU time per request.")
    parser.add_argument("--source", type=Path, default=ROOT, help="the tree to measure (default: this one)")
    parser.add_argument("--former", type=Path, help="the tree to compare it with")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests per round and tree")
    arguments = parser.parse_args()
    client = build_client()
    if client is None:
        print("skipped: there is no C compiler for the load client")
        return 0
    trees = {"new": arguments.source} if arguments.former is None else {"former": arguments.former, "new": arguments.source}
    figures: dict[str, list[float]] = {name: [] for name in trees}
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        body = Path(folder) / "body.json"
        body.write_text(json.dumps(BODY))
        servers = {name: stack.enter_context(serving(source.resolve())) for name, source in trees.items()}
        for server in servers.values():
            measure(client, server, body, 2 * CLIENTS)
        for number in range(arguments.rounds):
            for name, server in servers.items():
                figures[name].append(measure(client, server, body, arguments.requests))
                print(f"round {number + 1}, {name}: {figures[name][-1]:.0f} CPU-µs per request", flush=True)
    medians = {name: statistics.median(values) for name, values in figures.items()}
    for name, median in medians.items():
        print(f"{name}: median {median:.0f} CPU-µs per request")
    if "former" in medians:
        print(f"ratio: {medians['new'] / medians['former']:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
