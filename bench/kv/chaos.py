"""Kills and freezes prefill and decode workers and spoils transfers of KV, and checks that no client notices.

    python bench/kv/chaos.py

Two prefill and two decode workers of the simulator, 1,000 streams with prompts of 2,000 tokens. Every two seconds a worker is killed with
SIGKILL (its supervisor restarts it) or frozen with SIGSTOP, prefill and decode by turns. Of all transfers 5 % are dropped, stalled or
corrupted. Every stream must have exactly its text. Two seconds after the end no worker holds a page, an export or an import, and the
front end has no record of a transfer.

Recovery must not wait for computing: the simulated workers compute a prompt of 2,000 tokens in a few milliseconds, and their links have
400 Gbit/s. No request is tried as one that kills workers: that takes its time (`--trial-seconds`) and has its own proof. Here it is the
bench that kills, and a request may well be at every death.

A stream counts as hit by a fault if it had tokens before and waits for the next one longer than HIT_SECONDS. Tokens that were on their
way when their worker was hit may come after the fault, so a fault also counts if it was UNDER_WAY_SECONDS before the last token. A wait
may have several faults, two seconds apart: then it counts from the first of them. What it took from the last is shown, too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import ByTurns, Chaos, show
from penstock.bench.client import Client
from penstock.bench.load import Load, Workload
from penstock.bench.stream import Stream
from penstock.bench.verify import make_verifier
from servers import Process, serving

PROMPT_TOKENS = 2000
HIT_SECONDS = 0.3
UNDER_WAY_SECONDS = 0.3
SETTLE_SECONDS = 2.0
MAX_P99_SECONDS = 2.0
TURNS = (("kill", "prefill"), ("freeze", "decode"), ("kill", "decode"), ("freeze", "prefill"))


def hits(streams: list[Stream], faults: list[float]) -> list[tuple[float, float]]:
    """From a fault to the next token, for every wait that a fault began or prolonged: since the first such fault, and since the last."""
    found = []
    for stream in streams:
        for before, after in itertools.pairwise(stream.times):
            if after - before > HIT_SECONDS:
                meant = [fault for fault in faults if before - UNDER_WAY_SECONDS <= fault < after]
                found += [(after - meant[0], after - meant[-1])] if meant else []
    return sorted(found)


def percentile(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] if values else 0.0


def left_over(server: Process) -> dict[str, float]:
    """What workers and the front end still hold; empty if nothing."""
    found = {
        "pages in use": server.metric("penstock_kv_blocks", state="used"),
        "generations": sum(server.metric(f"penstock_requests_{state}") for state in ("running", "queued")),
        "exports": server.metric("penstock_kv_transfers_held", side="export"),
        "imports": server.metric("penstock_kv_transfers_held", side="import"),
        "records": server.metric("penstock_kv_transfers_open"),
    }
    return {name: value for name, value in found.items() if value}


async def run(arguments: argparse.Namespace) -> bool:
    flags = [
        "--engine=simulator",
        "--disaggregation=always",
        f"--prefill-workers={arguments.prefill}",
        f"--decode-workers={arguments.decode}",
    ]
    flags += [f"--step-ms={arguments.step_ms}", f"--worker-stall={arguments.stall}", f"--trial-seconds={arguments.trial}"]
    flags += [
        f"--fault=transfer:{arguments.fault}",
        f"--prefill-rate={arguments.prefill_rate}",
        f"--prefill-budget={arguments.prefill_budget}",
        f"--kv-link-gbps={arguments.link_gbps}",
        f"--kv-block-bytes={arguments.block_bytes}",
    ]
    with serving(*flags) as server:
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
        async with Client(server.url, "completions", 600.0) as client:
            load = Load(client, workload)
            settings = server, arguments.seed, arguments.freeze
            chaos = Chaos(*settings) if arguments.both else ByTurns(*settings, TURNS)
            async with chaos.running():
                await load.run(show)
        await asyncio.sleep(SETTLE_SECONDS)
        left = left_over(server)
        transfers = {outcome: server.metric("penstock_kv_transfers_total", outcome=outcome) for outcome in ("done", "failed", "expired")}
        migrations, stalls = server.metric("penstock_migrations_total"), server.metric("penstock_workers_stalled_total")
    wrong_blocks = [line for line in server.log if "does not hold block" in line]
    verification = make_verifier("simulator", "words").verify(load.streams, arguments.tokens)
    errors = [stream.error for stream in load.streams if stream.error is not None]
    found = hits(load.streams, chaos.faults)
    waits, last = [first for first, _ in found], sorted(last for _, last in found)
    p99 = percentile(waits, 0.99)
    print(f"\n{len(load.streams):,} streams of {PROMPT_TOKENS:,} + {arguments.tokens} tokens in {load.ended - load.began:.1f} s")
    print(f"killed {chaos.killed}, frozen {chaos.frozen}; migrations {migrations:,.0f}, stalls noticed {stalls:.0f}")
    print("transfers: " + ", ".join(f"{name} {count:,.0f}" for name, count in transfers.items()))
    print(f"errors at the client {len(errors)}; {verification}")
    for error in sorted(set(errors), key=str):
        print(f"  {errors.count(error)} × {error}")
    print(f"left after {SETTLE_SECONDS:g} s: {left or 'nothing'}; blocks that were wrong in their slot: {len(wrong_blocks)}")
    print(
        f"fault to next token, {len(waits):,} hits: p50 {percentile(waits, 0.5):.2f}, p99 {p99:.2f}, at most {percentile(waits, 1):.2f} s; "
        f"from the last fault of a wait: p99 {percentile(last, 0.99):.2f}, at most {percentile(last, 1):.2f} s"
    )
    is_exact = not errors and not verification.wrong_streams and not verification.incomplete
    is_used = chaos.killed > 0 and transfers["done"] > 0 and transfers["failed"] > 0
    return is_exact and is_used and not left and not wrong_blocks and p99 < MAX_P99_SECONDS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=512, help="of each answer")
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--prefill-rate", type=float, default=1_000_000.0)
    parser.add_argument(
        "--block-bytes", type=int, default=65536, help="of KV, small enough that pulling a prompt is faster than computing it"
    )
    parser.add_argument("--prefill-budget", type=int, default=65_536, help="prompt tokens of a step")
    parser.add_argument("--link-gbps", type=float, default=400.0)
    parser.add_argument("--stall", type=float, default=0.7, help="--worker-stall of the front end")
    parser.add_argument("--trial", type=float, default=0.0, help="--trial-seconds of the front end")
    parser.add_argument("--both", action="store_true", help="kill one and freeze another every two seconds, not by turns")
    parser.add_argument("--freeze", type=float, default=3.0, help="seconds that a worker is frozen")
    parser.add_argument("--fault", default="drop=0.02,stall=0.015,corrupt=0.015", help="shares of transfers")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    passed = asyncio.run(run(arguments))
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
