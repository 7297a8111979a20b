"""What images do to text that is being streamed: 200 streams of the embedded engine on this CPU, while images arrive as fast as they are
encoded.

    python bench/images/gaps.py [--encode-workers 1] [--rounds 3]

The model is small and random: a text model of 4 layers, and a tower that takes about a second of one core for an image (8 layers of 512,
five tiles). Calm and busy rounds take turns on one server. In a busy round `--at-once` clients send one picture after the other, each new.
The figure is the time between two chunks of a text stream.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from penstock.bench.client import Client
from penstock.bench.stream import Stream
from servers import Process, serving
from tiny_vision import make_picture, make_vision_model

MAX_FACTOR = 1.2
SETTLE_SECONDS = 2.0
STATES = ("calm", "busy")


@dataclass
class Figures:
    gaps: dict[str, list[float]] = field(default_factory=lambda: {state: [] for state in STATES})
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STATES, 0))
    images: list[Stream] = field(default_factory=list)

    def percentile(self, state: str, share: float) -> float:
        gaps = sorted(self.gaps[state])
        return gaps[int(len(gaps) * share)]


def text_body(model: str, number: int) -> bytes:
    message = {"role": "user", "content": f"Tell me about {number} in many words."}
    return _body(model, message, 3000)


def image_body(model: str, number: int) -> bytes:
    """No two pictures are equal."""
    file = io.BytesIO()
    make_picture(number, 640, 480).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    parts = [{"type": "text", "text": f"Picture {number}"}, {"type": "image_url", "image_url": {"url": url}}]
    return _body(model, {"role": "user", "content": parts}, 4)


def _body(model: str, message: object, max_tokens: int) -> bytes:
    return msgspec.json.encode({"model": model, "messages": [message], "max_tokens": max_tokens, "ignore_eos": True, "stream": True})


async def measure(
    server: Process, arguments: argparse.Namespace, model: str, state: str, figures: Figures, numbers: itertools.count[int]
) -> None:
    async with Client(server.url, "chat", 600.0) as client:
        streams = [Stream(number, 0) for number in itertools.islice(numbers, arguments.streams)]
        running = [asyncio.create_task(client.run(text_body(model, stream.number), stream)) for stream in streams]
        while not all(stream.times for stream in streams):
            assert not any(stream.error for stream in streams), [stream.error for stream in streams if stream.error][:1]
            await asyncio.sleep(0.1)
        await asyncio.sleep(SETTLE_SECONDS)
        began = time.perf_counter()
        clients = arguments.at_once if state == "busy" else 0
        running += [asyncio.create_task(send_images(client, model, figures, numbers)) for _ in range(clients)]
        await asyncio.sleep(arguments.seconds)
        ended = time.perf_counter()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    for stream in streams:
        times = [moment for moment in stream.times if began <= moment <= ended]
        figures.gaps[state] += [after - before for before, after in itertools.pairwise(times)]
        figures.tokens[state] += len(times)


async def send_images(client: Client, model: str, figures: Figures, numbers: itertools.count[int]) -> None:
    while True:
        stream = Stream(number := next(numbers), 0)
        body = await asyncio.to_thread(image_body, model, number)
        await client.run(body, stream)
        assert stream.error is None, stream.error
        figures.images.append(stream)


async def run(arguments: argparse.Namespace, folder: Path) -> bool:
    path, figures, numbers = make_vision_model("idefics3", folder / "heavy", "heavy"), Figures(), itertools.count()
    with serving(f"--model={path}", "--device=cpu", f"--encode-workers={arguments.encode_workers}", *arguments.flags) as server:
        for _ in range(arguments.rounds):
            for state in STATES:
                await measure(server, arguments, path.name, state, figures, numbers)
        encoded = {role: server.metric("penstock_images_total", name=f"{role}-0", source="encoded") for role in ("encode", "worker")}
        jobs = server.metric("penstock_encode_jobs_total", outcome="done")
    for state in STATES:
        shown = ", ".join(f"p{100 * share:g} {1000 * figures.percentile(state, share):.1f}" for share in (0.5, 0.9, 0.99, 0.999))
        print(f"{state}: chunk gaps in ms: {shown}; {figures.tokens[state] / arguments.rounds / arguments.seconds:,.0f} chunks/s")
    factor = figures.percentile("busy", 0.99) / figures.percentile("calm", 0.99)
    print(f"p99 with images: {factor:.2f} × that without")
    assert figures.images, "no image was encoded: give longer --seconds"
    waits = sorted(stream.times[0] - stream.started for stream in figures.images if stream.times)
    rate = len(figures.images) / arguments.rounds / arguments.seconds
    print(f"{len(figures.images)} images, {rate:.2f}/s, first token p50 {waits[len(waits) // 2]:.2f} s")
    print(f"encoded by the encode worker {encoded['encode']:.0f}, by the other {encoded['worker']:.0f}; pulled {jobs:.0f}")
    return factor <= MAX_FACTOR and len(waits) == len(figures.images)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2, help="clients that send images")
    parser.add_argument("--encode-workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=40.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="more flags for `penstock serve`, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        passed = asyncio.run(run(arguments, Path(folder)))
    print("passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
