"""The load: a number of requests, with a fixed number in flight."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from penstock.backends.simulator import tokens_between
from penstock.bench.client import Client
from penstock.bench.stream import Stream
from penstock.text.tokenizers.words import WordTokenizer

TICK_SECONDS = 0.1

# Prompts are made of the simulator's words, but with other seeds than the answers.
_PROMPT_SEED = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class Workload:
    """What to request. Request `i` has the seed `seed + i` and a prompt that begins with `i`, so no two prompts share a prefix."""

    model: str
    endpoint: str
    requests: int
    concurrency: int
    max_tokens: int
    prompt_tokens: int
    seed: int
    ignore_eos: bool


@dataclass(frozen=True)
class Progress:
    """The state of a running load."""

    total: int
    finished: int
    failed: int
    running: int
    events: int


class Bodies:
    """Makes the request bodies of a workload."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._words = WordTokenizer()

    def prompt(self, number: int) -> str:
        workload = self._workload
        tokens = tokens_between(workload.seed + number ^ _PROMPT_SEED, 0, workload.prompt_tokens - 1, self._words.ordinary_ids)
        return f"{number}{self._words.decode(tokens)}"

    def body(self, number: int) -> bytes:
        workload = self._workload
        prompt = self.prompt(number)
        asked: dict[str, object] = {"prompt": prompt}
        if workload.endpoint == "chat":
            asked = {"messages": [{"role": "user", "content": prompt}]}
        fixed = {"model": workload.model, "max_tokens": workload.max_tokens, "seed": workload.seed + number}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode({**fixed, **asked, **stream, **({"ignore_eos": True} if workload.ignore_eos else {})})


class Load:
    """Runs a workload once. Afterwards `streams` has every request that was started, also after Ctrl-C. `make_body` makes other bodies
    than the workload's own, with the same seeds."""

    def __init__(self, client: Client, workload: Workload, make_body: Callable[[int], bytes] | None = None) -> None:
        self.streams: list[Stream] = []
        self.began = self.ended = 0.0
        self.interrupted = False
        self._client = client
        self._workload = workload
        self._make_body = make_body or Bodies(workload).body
        self._numbers: Iterator[int] = iter(range(workload.requests))
        self._running: set[Stream] = set()
        self._failed = 0
        self._events = 0

    async def run(self, report: Callable[[Progress], None]) -> None:
        """Returns when every request has ended, or after Ctrl-C. Calls `report` every TICK_SECONDS, and at the end."""
        loop = asyncio.get_running_loop()
        ticks = asyncio.create_task(self._tick(report), name="bench progress")
        self.began = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as group:
                workers = [group.create_task(self._work()) for _ in range(min(self._workload.concurrency, self._workload.requests))]
                loop.add_signal_handler(signal.SIGINT, self._interrupt, workers)
        finally:
            self.ended = time.perf_counter()
            loop.remove_signal_handler(signal.SIGINT)
            ticks.cancel()
            await asyncio.wait([ticks])
        report(self.progress())

    def progress(self) -> Progress:
        finished = len(self.streams) - len(self._running)
        events = self._events + sum(stream.events for stream in self._running)
        return Progress(self._workload.requests, finished, self._failed, len(self._running), events)

    def _interrupt(self, workers: list[asyncio.Task[None]]) -> None:
        self.interrupted = True
        for worker in workers:
            worker.cancel()

    async def _work(self) -> None:
        """Starts the next request when the previous one has ended."""
        for number in self._numbers:
            stream = Stream(number, self._workload.seed + number)
            self.streams.append(stream)
            self._running.add(stream)
            try:
                await self._client.run(self._make_body(number), stream)
            finally:
                self._running.discard(stream)
                self._events += stream.events
                self._failed += stream.error is not None

    async def _tick(self, report: Callable[[Progress], None]) -> None:
        while True:
            report(self.progress())
            await asyncio.sleep(TICK_SECONDS)
