"""Kills and freezes workers and encode workers while they read images, and checks that no client notices.

    python bench/images/chaos.py

Simulated workers and encode workers, 500 streams at once with 3 images each, of pictures that many streams share. Every two seconds a
process is killed with SIGKILL (its supervisor restarts it) or frozen with SIGSTOP, workers and encode workers by turns. The text depends
on the pixels of all images in order. So every stream must have exactly its text: a lost image or one taken for another would show.
Afterwards no worker holds a page, waits for an image or has one to encode, and the front end has no record of one.

No request is tried as one that kills workers: here it is the bench that kills, and a request may well be at every death.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from chaos import ByTurns, show
from images.noise import noise
from penstock.bench.client import Client
from penstock.bench.load import Load, Workload
from penstock.bench.verify import make_verifier
from servers import Process, serving

IMAGES = 3
SETTLE_SECONDS = 10.0
TURNS = (("kill", "worker"), ("freeze", "encode"), ("kill", "encode"), ("freeze", "worker"))


class Requests:
    """Chats with images. Each stream has its own ones, drawn from the pictures that all share, and its own text between them."""

    def __init__(self, workload: Workload, pictures: int, seed: int) -> None:
        self._workload = workload
        self._pictures = [noise(seed + number) for number in range(pictures)]
        chance = random.Random(seed)
        self._drawn = [chance.choices(self._pictures, k=IMAGES) for _ in range(workload.requests)]

    def body(self, number: int) -> bytes:
        workload = self._workload
        content: list[dict[str, object]] = []
        for index, picture in enumerate(self._drawn[number]):
            content += [{"type": "text", "text": f"{number} {index} " + "word " * (workload.prompt_tokens // IMAGES)}, picture.part]
        return msgspec.json.encode(
            {
                "model": workload.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": workload.max_tokens,
                "seed": workload.seed + number,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )

    def seals(self, number: int) -> list[bytes]:
        return [picture.seal for picture in self._drawn[number]]


def left_over(server: Process) -> dict[str, float]:
    """What workers and the front end still hold; empty if nothing."""
    found = {
        "pages in use": server.metric("penstock_kv_blocks", state="used"),
        "generations": sum(server.metric(f"penstock_requests_{state}") for state in ("running", "queued")),
        "positions to encode": server.metric("penstock_image_positions_queued"),
        "jobs of encode workers": server.metric("penstock_encode_jobs_open"),
        "exports and imports": server.metric("penstock_kv_transfers_held"),
        "records of transfers": server.metric("penstock_kv_transfers_open"),
    }
    return {name: value for name, value in found.items() if value}


async def settled(server: Process) -> tuple[dict[str, float], float]:
    """What is left after the last moment in which something was, and how long that took; at most SETTLE_SECONDS."""
    began = time.perf_counter()
    until = began + SETTLE_SECONDS
    while (left := await asyncio.to_thread(left_over, server)) and time.perf_counter() < until:  # noqa: ASYNC110 - metrics are polled
        await asyncio.sleep(0.1)
    return left, time.perf_counter() - began


async def run(arguments: argparse.Namespace) -> bool:
    flags = ["--engine=simulator", "--images", f"--workers={arguments.workers}", f"--encode-workers={arguments.encoders}"]
    flags += [f"--step-ms={arguments.step_ms}", f"--encode-ms={arguments.encode_ms}", f"--image-positions={arguments.positions}"]
    flags += [f"--worker-stall={arguments.stall}", "--trial-seconds=0"]
    if arguments.lose:
        flags.append(f"--image-fault=lose={arguments.lose},seed={arguments.seed}")
    streams = arguments.streams
    workload = Workload("simulator", "chat", streams, streams, arguments.tokens, 60, arguments.seed, ignore_eos=True)
    requests = Requests(workload, arguments.pictures, arguments.seed)
    with serving(*flags) as server:
        async with Client(server.url, "chat", 600.0) as client:
            load = Load(client, workload, requests.body)
            chaos = ByTurns(server, arguments.seed, arguments.freeze, TURNS)
            async with chaos.running():
                await load.run(show)
        left, seconds = await settled(server)
        migrations, stalls = server.metric("penstock_migrations_total"), server.metric("penstock_workers_stalled_total")
        jobs = {
            outcome: server.metric("penstock_encode_jobs_total", outcome=outcome) for outcome in ("done", "failed", "lost", "cancelled")
        }
    wrong = [line for line in server.log if "the simulator stops" in line or "other pixels" in line]
    verification = make_verifier("simulator", "words").verify(load.streams, arguments.tokens, requests.seals)
    errors = [stream.error for stream in load.streams if stream.error is not None]
    print(
        f"\n{streams:,} streams of {IMAGES} images of {arguments.pictures} and {arguments.tokens} tokens in {load.ended - load.began:.1f} s"
    )
    print(f"killed {chaos.killed}, frozen {chaos.frozen}; migrations {migrations:,.0f}, stalls noticed {stalls:.0f}")
    print("jobs of encode workers: " + ", ".join(f"{name} {count:,.0f}" for name, count in jobs.items()))
    print(f"errors at the client {len(errors)}; {verification}")
    for error in sorted(set(errors), key=str):
        print(f"  {errors.count(error)} × {error}")
    print(f"left after {seconds:.1f} s: {left or 'nothing'}; pictures taken for others: {len(wrong)}")
    is_exact = not errors and not verification.wrong_streams and not verification.incomplete
    return is_exact and chaos.killed > 0 and not left and not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--pictures", type=int, default=300, help="that the streams draw their images from")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--encoders", type=int, default=2)
    parser.add_argument("--positions", type=int, default=4096, help="whose features a worker keeps: fewer than the images have")
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--encode-ms", type=float, default=200.0, help="for 1,000 positions of an image")
    parser.add_argument("--lose", type=float, default=0.02, help="share of the images that are lost in the worker")
    parser.add_argument("--stall", type=float, default=1.0, help="--worker-stall of the front end")
    parser.add_argument("--freeze", type=float, default=3.0, help="seconds that a process is frozen")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}")
    passed = asyncio.run(run(arguments))
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
