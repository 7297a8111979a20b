"""What long prompts do to streams that are being generated: prefill and decode on workers of their own, against the same workers mixed.

    python bench/kv/interference.py

Two servers of simulated workers run at the same time, and are measured by turns: `--prefill-workers 1 --decode-workers 1`, and
`--workers 2`. Each has streams that decode all the time. In a calm round nothing else happens; in a busy one prompts of 8,000 tokens
arrive. The figure is the time between two chunks of a stream.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from penstock.bench.client import Client
from penstock.bench.load import Bodies, Workload
from penstock.bench.stream import Stream
from penstock.bench.verify import make_verifier
from servers import Process, serving

MAX_FACTOR = 1.2
SETTLE_SECONDS = 1.0


@dataclass
class Side:
    """One server, and what was measured of it."""

    name: str
    server: Process
    gaps: dict[str, list[float]] = field(default_factory=lambda: {"calm": [], "busy": []})
    first_tokens: list[float] = field(default_factory=list)
    prompts: list[Stream] = field(default_factory=list)

    def p99(self, state: str) -> float:
        gaps = sorted(self.gaps[state])
        return gaps[int(len(gaps) * 0.99)]


async def measure(side: Side, arguments: argparse.Namespace, numbers: Iterator[int], state: str) -> None:
    """One round: streams that decode, and in a busy round prompts that arrive."""
    async with Client(side.server.url, "completions", 600.0) as client:
        short = Workload("simulator", "completions", 0, 0, 100_000, 32, arguments.seed, ignore_eos=True)
        streams = [Stream(number, arguments.seed + number) for number in itertools.islice(numbers, arguments.streams)]
        running = [asyncio.create_task(client.run(Bodies(short).body(stream.number), stream)) for stream in streams]
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.perf_counter()
        if state == "busy":
            await send_prompts(client, side, arguments, numbers)
        else:
            await asyncio.sleep(arguments.seconds)
        ended = time.perf_counter()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for stream in streams:
        times = [moment for moment in stream.times if began <= moment <= ended]
        side.gaps[state] += [after - before for before, after in itertools.pairwise(times)]


async def send_prompts(client: Client, side: Side, arguments: argparse.Namespace, numbers: Iterator[int]) -> None:
    long = Workload("simulator", "completions", 0, 0, arguments.tokens, arguments.prompt, arguments.seed, ignore_eos=True)
    bodies, tasks = Bodies(long), []
    deadline = time.perf_counter() + arguments.seconds
    while time.perf_counter() < deadline:
        stream = Stream(number := next(numbers), arguments.seed + number)
        side.prompts.append(stream)
        tasks.append(asyncio.create_task(client.run(bodies.body(number), stream)))
        await asyncio.sleep(1 / arguments.rate)
    await asyncio.gather(*tasks)


async def run(arguments: argparse.Namespace) -> bool:
    common = ["--engine=simulator", f"--step-ms={arguments.step_ms}", f"--prefill-rate={arguments.prefill_rate}"]
    common.append(f"--prefill-budget={arguments.budget}")
    with contextlib.ExitStack() as stack:
        apart = Side("apart", stack.enter_context(serving(*common, "--prefill-workers=1", "--decode-workers=1")))
        mixed = Side("mixed", stack.enter_context(serving(*common, "--workers=2")))
        numbers = itertools.count()
        for _ in range(arguments.rounds):
            for side, state in itertools.product((apart, mixed), ("calm", "busy")):
                await measure(side, arguments, numbers, state)
        pulled = apart.server.metric("penstock_kv_transfers_total", outcome="done")
    verifier = make_verifier("simulator", "words")
    passed = pulled > 0
    for side in (apart, mixed):
        ttft = sorted(stream.times[0] - stream.started for stream in side.prompts if stream.times)
        verification = verifier.verify(side.prompts, arguments.tokens)
        passed &= not verification.wrong_streams and not verification.incomplete
        calm, busy = side.p99("calm"), side.p99("busy")
        print(f"{side.name}: chunk gap p99 calm {1000 * calm:.1f} ms, with prompts {1000 * busy:.1f} ms: {busy / calm:.2f} ×")
        print(f"  {len(side.prompts)} prompts, first token p50 {ttft[len(ttft) // 2]:.2f} s, at most {ttft[-1]:.2f} s; {verification}")
    print(f"transfers done: {pulled:.0f}")
    return passed and apart.p99("busy") <= MAX_FACTOR * apart.p99("calm")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32, help="that decode all the time")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--tokens", type=int, default=32, help="that a long prompt generates")
    parser.add_argument("--rate", type=float, default=1.25, help="long prompts per second")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--prefill-rate", type=float, default=20_000.0)
    parser.add_argument("--budget", type=int, default=2048, help="prompt tokens in a step")
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    passed = asyncio.run(run(arguments))
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
