"""Measures the router: the cost of a decision, and the cache hits on a recorded trace.

    python bench/routing.py                 everything
    python bench/routing.py --decision      the cost of a decision
    python bench/routing.py --model         the trace in virtual time, without a server: oracle, round-robin, and ours by load weight
    python bench/routing.py --serve         the trace over HTTP, sped up, to real servers, one policy after the other

The trace is Mooncake's (one JSON object per line: timestamp, input_length, output_length, hash_ids; one id per 512 tokens). It comes from
../shared/traces if it exists, or named with `--trace`. Without it, only the first part runs, and a message says so.
Results go to bench-results/routing.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import heapq
import itertools
import json
import math
import random
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from penstock.config.front_end import RouterSettings
from penstock.kv.blocks import block_hashes
from penstock.router.router import Assignment, Candidate, Router
from penstock.wire.messages import BlocksRemoved, BlocksStored, KvEvent, KvEvents, ModelInfo, Snapshot
from servers import Process, serving

ROOT = Path(__file__).parents[1]
TRACE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz"
BLOCK = 512
WORKERS = 4
BLOCKS_A_WORKER = 4000
# Bounds.
MAX_DECISION_US = 150.0
MIN_GAIN = 2.1
MIN_OF_ORACLE = 0.95


class Request(msgspec.Struct):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]

    @property
    def full_blocks(self) -> list[bytes]:
        """The names of its full blocks. An engine shares only those."""
        return [number.to_bytes(8) for number in self.hash_ids[: self.input_length // BLOCK]]


def read_trace(path: Path) -> list[Request]:
    with gzip.open(path) as file:
        return [msgspec.json.decode(line, type=Request) for line in file]


# The cost of a decision.


def measure_decision(rounds: int = 2000) -> dict[str, Any]:
    """16 workers with 10,000 cached blocks each, and prompts of 512 blocks that some workers have in part or in whole."""
    generator = random.Random(3)
    router = Router(RouterSettings())
    names = [f"worker-{number}" for number in range(16)]
    prompts = [[generator.randrange(32_000) for _ in range(8192)] for _ in range(len(names) * 20)]
    hashed = [block_hashes(prompt, 16) for prompt in prompts]
    model = ModelInfo("m", "simulator", "words", 32_000, 131_072, 16, capabilities=("kv_events",))
    for position, name in enumerate(names):
        router.join(name, model)
        blocks: list[bytes] = []
        while len(blocks) < 10_000:
            # Most blocks are its own. Some are shared, so that overlaps end at different blocks.
            owner = generator.choice([position, generator.randrange(len(names))])
            blocks += hashed[owner * 20 + generator.randrange(20)][: generator.choice([512, 512, 300, 64])]
        router.load_snapshot(name, Snapshot(0, (BlocksStored(b"", tuple(blocks[:10_000])),)))
    candidates = [Candidate(name) for name in names]
    hashing, choosing, sending = [], [], []
    for _ in range(rounds):
        prompt = generator.choice(prompts)
        began = time.perf_counter()
        fresh = block_hashes(prompt, 16)
        hashed_at = time.perf_counter()
        decision = router.choose(candidates, fresh, 512)
        chosen_at = time.perf_counter()
        assert decision is not None
        assignment = router.sent(decision, fresh, 512)
        hashing.append(hashed_at - began)
        choosing.append(chosen_at - hashed_at)
        sending.append(time.perf_counter() - chosen_at)
        assignment.ended()
    router.check_integrity()
    return {"decision": _microseconds(choosing), "counting it in": _microseconds(sending), "hashing the prompt": _microseconds(hashing)}


def _microseconds(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": round(cuts[49] * 1e6, 1), "p99": round(cuts[98] * 1e6, 1)}


# The trace in virtual time.


class Cache:
    """Blocks by last use. The end of a chain counts as older than its start, so it is evicted first."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, names: Sequence[bytes]) -> int:
        for count, name in enumerate(names):
            if name not in self._blocks:
                return count
        return len(names)

    def use(self, names: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Adds the blocks; returns the new ones and the evicted ones."""
        new = [name for name in names if name not in self._blocks]
        for name in reversed(names):
            self._blocks[name] = None
            self._blocks.move_to_end(name)
        gone = [self._blocks.popitem(last=False)[0] for _ in range(max(0, len(self._blocks) - self._size))]
        return new, gone


def oracle(trace: Sequence[Request]) -> float:
    """The hit rate of one cache as large as all workers' caches together."""
    cache = Cache(WORKERS * BLOCKS_A_WORKER)
    hits = 0
    for request in trace:
        names = request.full_blocks
        hits += cache.matched(names)
        cache.use(names)
    return hits * BLOCK / sum(request.input_length for request in trace)


@dataclass(frozen=True)
class Pace:
    """Speed of the modelled workers. The default fits a large model on one GPU."""

    prefill_rate: float = 20_000.0
    step_seconds: float = 0.025


PACE = Pace()


@dataclass
class Job:
    """One request on its worker."""

    request: Request
    prompt: Sequence[bytes]
    assignment: Assignment


class ModelledWorker:
    """Computes one prompt after the other, and one token per step for each of its generations.

    A prompt's blocks are cached, and told of, when it is computed. It is never short of memory: what is measured is where prompts go.
    """

    def __init__(self, name: str, model: VirtualTime) -> None:
        self.name = name
        self.busy = 0.0
        self.hits = 0
        self._model = model
        self._cache = Cache(BLOCKS_A_WORKER)
        self._waiting: deque[Job] = deque()
        self._is_computing = False
        self._next_number = 0

    def take(self, job: Job) -> None:
        self._waiting.append(job)
        self._begin()

    def _begin(self) -> None:
        if self._is_computing or not self._waiting:
            return
        job = self._waiting.popleft()
        self._is_computing = True
        cached = self._cache.matched(job.prompt)
        self.hits += cached
        seconds = (job.request.input_length - cached * BLOCK) / self._model.pace.prefill_rate
        self.busy += seconds
        self._model.after(seconds, partial(self._computed, job))

    def _computed(self, job: Job) -> None:
        model = self._model
        new, gone = self._cache.use(job.prompt)
        events: tuple[KvEvent, ...] = (BlocksStored(b"", tuple(new)), BlocksRemoved(tuple(gone)))
        model.router.receive(self.name, KvEvents(self._next_number, events))
        self._next_number += len(events)
        job.assignment.first_token()
        model.waits.append(model.now - job.request.timestamp / 1000)
        model.after(job.request.output_length * model.pace.step_seconds, job.assignment.ended)
        self._is_computing = False
        self._begin()


class VirtualTime:
    """Four modelled workers under our router."""

    def __init__(self, settings: RouterSettings, pace: Pace) -> None:
        self.now = 0.0
        self.pace = pace
        self.waits: list[float] = []
        self.router = Router(settings, lambda: self.now, random.Random(11).random)
        self.workers = {name: ModelledWorker(name, self) for name in (f"worker-{number}" for number in range(WORKERS))}
        self._candidates = [Candidate(name) for name in self.workers]
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        for name in self.workers:
            self.router.join(name, ModelInfo("m", "simulator", "words", 1, 1, BLOCK, capabilities=("kv_events",)))
            self.router.load_snapshot(name, Snapshot(0, ()))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), action))

    def run(self, trace: Sequence[Request]) -> None:
        for request in trace:
            self.after(request.timestamp / 1000, partial(self._route, request))
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()
        self.router.check_integrity()

    def _route(self, request: Request) -> None:
        prompt, blocks = request.full_blocks, -(-request.input_length // BLOCK)
        decision = self.router.choose(self._candidates, prompt, blocks)
        assert decision is not None
        self.workers[decision.worker].take(Job(request, prompt, self.router.sent(decision, decision.names, blocks)))


def replay(trace: Sequence[Request], settings: RouterSettings, pace: Pace = PACE) -> dict[str, float]:
    """The trace in virtual time: the share of prompt tokens found, seconds to the first token, and the workers' load by prompts."""
    model = VirtualTime(settings, pace)
    model.run(trace)
    cuts = statistics.quantiles(model.waits, n=10)
    busy = [worker.busy / model.now for worker in model.workers.values()]
    return {
        "hits": sum(worker.hits for worker in model.workers.values()) * BLOCK / sum(request.input_length for request in trace),
        "ttft_p50": cuts[4],
        "ttft_p90": cuts[8],
        "busy": statistics.mean(busy),
        "busiest": max(busy),
    }


# The trace against real servers.

# The prefill rate grows with the speed of the trace, so workers are as busy as in virtual time. Steps of the same scale would take 2 ms,
# too short for this many processes on few cores; with longer steps more generations run at once and more KV is in use.
# Two cores manage this speed: at 20 they are nearly full.
SPEED = 12.0
STEP_MS = 8.0
# Three ids name the block, the rest is constant. So equal ids give equal blocks, and bodies stay small.
NAMING = range(256, 1800)
FILLER = b"65,"
USAGE = '"usage":{'
TAIL = 2048
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
)
REQUEST_SECONDS = 120.0


def body(request: Request) -> bytes:
    """The prompt as token ids."""
    parts: list[bytes] = []
    count = len(NAMING)
    for position, number in enumerate(request.hash_ids):
        ids = [NAMING[number % count], NAMING[number // count % count], NAMING[number // count**2]]
        length = min(BLOCK, request.input_length - position * BLOCK)
        parts.append(b"%d,%d,%d," % tuple(ids) + FILLER * (length - 3) if length > 3 else b"".join(b"%d," % one for one in ids[:length]))
    fields = b'{"model":"simulator","stream":true,"stream_options":{"include_usage":true},"ignore_eos":true,"max_tokens":%d,"prompt":[%b]}'
    return fields % (request.output_length, b"".join(parts)[:-1])


class _Answer(asyncio.Protocol):
    """Reads one answer: only the time of the first event and the end, so the load costs little here."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first_at: float | None = None
        self.status = b""
        self.tail = b""

    def data_received(self, data: bytes) -> None:
        if not self.status:
            self.status = data[9:12]
        if self.first_at is None and b"data:" in data:
            self.first_at = time.perf_counter()
        self.tail = data[-TAIL:] if len(data) >= TAIL else (self.tail + data)[-TAIL:]

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002
        if not self.done.done():
            self.done.set_result(None)


@dataclass
class Served:
    """The figures of one server."""

    server: Process
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finished: int = 0
    failed: int = 0
    last_error: str = ""
    first_tokens: list[float] = field(default_factory=list)

    async def ask(self, request: Request, content: bytes) -> None:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                transport, answer = await asyncio.get_running_loop().create_connection(_Answer, "127.0.0.1", self.server.port)
                transport.write(HEAD % len(content) + content)
                try:
                    await answer.done
                finally:
                    transport.abort()
        except OSError as error:
            return self._fail(repr(error))
        tail = answer.tail.decode(errors="replace")
        usage = tail.rfind(USAGE)
        if answer.status != b"200" or usage < 0 or answer.first_at is None:
            return self._fail(tail[-300:])
        figures, _ = json.JSONDecoder().raw_decode(tail, usage + len(USAGE) - 1)
        if (figures["prompt_tokens"], figures["completion_tokens"]) != (request.input_length, request.output_length):
            return self._fail(f"expected {request.input_length} and {request.output_length} tokens: {figures}")
        self.finished += 1
        self.prompt_tokens += figures["prompt_tokens"]
        self.cached_tokens += (figures.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.first_tokens.append(answer.first_at - began)
        return None

    def _fail(self, message: str) -> None:
        self.failed += 1
        self.last_error = message

    @property
    def figures(self) -> dict[str, Any]:
        cuts = statistics.quantiles(self.first_tokens, n=10) if len(self.first_tokens) > 1 else [0.0] * 9
        hits = self.cached_tokens / max(1, self.prompt_tokens)
        return {"hits": hits, "ttft_p50": cuts[4], "ttft_p90": cuts[8], "requests": self.finished, "errors": self.failed}


async def _replay_over_http(trace: Sequence[Request], served: Served, speed: float) -> float:
    """Sends every request at its time. Returns the largest delay."""
    began = time.perf_counter()
    latest = 0.0
    async with asyncio.TaskGroup() as group:
        for request in trace:
            due = began + request.timestamp / 1000 / speed
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            latest = max(latest, time.perf_counter() - due)
            group.create_task(served.ask(request, body(request)))
    return latest


def serve(trace: Sequence[Request], speed: float) -> dict[str, Any]:
    """Four simulators under each policy, with the same requests. One policy after the other, because both together need more cores."""
    arguments = [f"--workers={WORKERS}", f"--block-size={BLOCK}", f"--kv-blocks={BLOCKS_A_WORKER}", f"--step-ms={STEP_MS}"]
    arguments += ["--engine=simulator", f"--prefill-rate={PACE.prefill_rate * speed}"]
    results: dict[str, Any] = {}
    for policy in ("round-robin", "kv"):
        with serving(f"--router={policy}", *arguments) as server:
            served = Served(server)
            began = time.perf_counter()
            late = uvloop.run(_replay_over_http(trace, served, speed))
        results[policy] = served.figures
        took = time.perf_counter() - began
        print(f"   {policy} took {took:.0f} s; the latest request was sent {late * 1000:.0f} ms late {served.last_error}", flush=True)
    return results


# The report.


def _show(rows: dict[str, dict[str, float]]) -> None:
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    print(f"   {'':24}" + "".join(f"{column:>12}" for column in columns))
    for name, row in rows.items():
        cells = [f"{value:12.1%}" if column in ("hits", "busy", "busiest") else f"{value:12,.4g}" for column, value in row.items()]
        print(f"   {name:24}" + "".join(cells), flush=True)


def _check(name: str, value: float, is_good: bool) -> bool:
    print(f"   {'ok  ' if is_good else 'MISS'}  {name}: {value:.3g}")
    return is_good


def _compare(ours: float, round_robin: float, best: float) -> bool:
    times = ours / (round_robin or math.inf)
    gain = _check(f"hits compared with round-robin (at least {MIN_GAIN} times)", times, ours >= MIN_GAIN * round_robin)
    return _check(f"hits compared with the oracle (at least {MIN_OF_ORACLE})", ours / best, ours >= MIN_OF_ORACLE * best) and gain


def decision_point(results: dict[str, Any]) -> bool:
    print("\nCost of a decision, µs: 16 workers × 10,000 blocks, prompts of 512 blocks", flush=True)
    results["decision"] = figures = measure_decision()
    _show(figures)
    p50 = figures["decision"]["p50"]
    return _check(f"p50 (under {MAX_DECISION_US:g})", p50, p50 < MAX_DECISION_US)


def model_point(trace: Sequence[Request], results: dict[str, Any]) -> bool:
    print("\nThe trace in virtual time: four caches of 4,000 blocks; seconds", flush=True)
    best = oracle(trace)
    default = RouterSettings()
    tried = {policy: RouterSettings(policy=policy) for policy in ("round-robin", "least-loaded", "kv")}
    tried |= {f"kv, load weight {weight}": RouterSettings(load_weight=weight) for weight in (0.01, 0.1, 0.2, 0.5, 1.0)}
    rows = {name: replay(trace, settings) for name, settings in tried.items()}
    rows[f"kv, load weight {default.load_weight}"] = rows.pop("kv")
    _show({"one cache of 16,000": {"hits": best}, **rows})
    results["model"] = {"oracle": best, **rows}
    return _compare(rows[f"kv, load weight {default.load_weight}"]["hits"], rows["round-robin"]["hits"], best)


def serve_point(trace: Sequence[Request], speed: float, results: dict[str, Any]) -> bool:
    print(f"\nThe trace over HTTP, {speed:g} times as fast, to four simulators; seconds", flush=True)
    best = oracle(trace)
    rows = serve(trace, speed)
    _show({"one cache of 16,000": {"hits": best}, **rows})
    results["serve"] = {"oracle": best, "speed": speed, **rows}
    errors = sum(row["errors"] for row in rows.values())
    good = _check("errors (none)", errors, not errors)
    waits = [rows[policy]["ttft_p50"] for policy in ("kv", "round-robin")]
    good = _check("TTFT p50 against round-robin's (below 1)", waits[0] / waits[1], waits[0] < waits[1]) and good
    return _compare(rows["kv"]["hits"], rows["round-robin"]["hits"], best) and good


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures the router.")
    for point, meaning in (("decision", "what a decision costs"), ("model", "the trace in virtual time"), ("serve", "the trace over HTTP")):
        parser.add_argument(f"--{point}", action="store_true", help=f"only {meaning} (repeat for more)")
    parser.add_argument("--trace", type=Path, default=TRACE, help="default: %(default)s")
    parser.add_argument("--requests", type=int, help="use only the first N requests of the trace", metavar="N")
    parser.add_argument("--speed", type=float, default=SPEED, help="how many times faster than recorded (default: %(default)g)")
    arguments = parser.parse_args()
    everything = not (arguments.decision or arguments.model or arguments.serve)
    results: dict[str, Any] = {}
    good = [decision_point(results)] if everything or arguments.decision else []
    if everything or arguments.model or arguments.serve:
        if not arguments.trace.exists():
            print(f"\nThe trace is skipped: {arguments.trace} does not exist; name it with --trace")
        else:
            trace = read_trace(arguments.trace)[: arguments.requests]
            if everything or arguments.model:
                good.append(model_point(trace, results))
            if everything or arguments.serve:
                good.append(serve_point(trace, arguments.speed, results))
    folder = ROOT / "bench-results"
    folder.mkdir(exist_ok=True)
    (folder / "routing.json").write_text(json.dumps(results, indent=2))
    return 0 if all(good) else 1


if __name__ == "__main__":
    raise SystemExit(main())
