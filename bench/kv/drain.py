"""Drains a worker with running generations, and counts what the others must compute again.

    python bench/kv/drain.py

Two workers of the simulator, 200 streams with prompts of 2,000 tokens. When all of them have tokens, one worker gets SIGTERM. Its
generations go on at the other one, with their KV. Computed again are the prompt tokens that the other worker reports as not cached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.bench.client import Client
from penstock.bench.load import Load, Progress, Workload
from penstock.bench.verify import make_verifier
from servers import Process

PROMPT_TOKENS = 2000
MAX_SHARE = 0.01
POLL_SECONDS = 0.05


async def until(condition: Callable[[], bool]) -> None:
    while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - metrics are polled
        await asyncio.sleep(POLL_SECONDS)


async def drained(front_end: Process, worker: Process, load: Load, arguments: argparse.Namespace) -> tuple[float, float, float]:
    """Drains when every stream has a token. Returns how many generations moved, their tokens, and what was computed before."""
    await until(lambda: len(load.streams) == arguments.streams and all(stream.times for stream in load.streams))
    moved = front_end.metric("penstock_requests_running", role="worker", name="leaver")
    known = sum(len(stream.parts) for stream in load.streams) / len(load.streams) + PROMPT_TOKENS
    before = front_end.metric("penstock_prompt_tokens_total", name="taker", source="computed")
    worker.process.terminate()
    await until(lambda: front_end.metric("penstock_workers") == 1)
    return moved, moved * known, before


def _show(_: Progress) -> None:
    pass


async def run(arguments: argparse.Namespace) -> bool:
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        processes = []
        for name in ("leaver", "taker"):
            flags = [
                "--engine=simulator",
                f"--step-ms={arguments.step_ms}",
                f"--grace={arguments.grace}",
                f"--prefill-rate={arguments.prefill_rate}",
            ]
            processes.append(Process("worker", f"--name={name}", f"--listen=unix:{folder}/{name}.sock", *flags))
            stack.callback(processes[-1].stop)
        front_end = Process("frontend", "--port=0", *[f"--worker=unix:{folder}/{name}.sock" for name in ("leaver", "taker")])
        stack.callback(front_end.stop)
        front_end.wait_ready()
        workload = Workload(
            "simulator",
            "completions",
            arguments.streams,
            arguments.streams,
            arguments.tokens,
            PROMPT_TOKENS,
            arguments.seed,
            ignore_eos=True,
        )
        async with Client(front_end.url, "completions", 600.0) as client:
            load = Load(client, workload)
            loading = asyncio.create_task(load.run(_show))
            moved, tokens, before = await drained(front_end, processes[0], load, arguments)
            await loading
        computed = front_end.metric("penstock_prompt_tokens_total", name="taker", source="computed") - before
        outcomes = ("done", "failed", "cancelled", "lost", "stalled")
        ended = {outcome: front_end.metric("penstock_kv_transfers_total", reason="drain", outcome=outcome) for outcome in outcomes}
    verification = make_verifier("simulator", "words").verify(load.streams, arguments.tokens)
    errors = [stream.error for stream in load.streams if stream.error is not None]
    print(f"{moved:.0f} generations with {tokens:,.0f} tokens moved, transfers {ended}; computed again: {computed:,.0f} tokens")
    print(f"that is {computed / tokens:.2%}; errors at the client {len(errors)} {sorted(set(errors), key=str)[:3]}; {verification}")
    is_exact = not errors and not verification.wrong_streams and not verification.incomplete
    return is_exact and moved >= arguments.streams * 0.4 and computed < MAX_SHARE * tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="on both workers together")
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--prefill-rate", type=float, default=20_000.0)
    parser.add_argument("--grace", type=float, default=0.0, help="--grace of the worker that is drained")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    passed = asyncio.run(run(arguments))
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
