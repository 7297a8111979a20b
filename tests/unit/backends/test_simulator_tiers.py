"""The simulator with host memory and a disk: every block that is used again is the one that was computed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.simulator import Simulator, Vocabulary, tokens_between
from penstock.config.engines import GIB, SimulatorConfig
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Fault, KvEvents, ModelInfo, Segment, SessionTurn, Submit, TransferReport

WORDS = range(300, 1800)
MODEL = ModelInfo("simulator", "simulator", "words", 100_000, 100_000, 16)
BLOCK_BYTES = 2 * 2**20


class Worker:
    """A simulator, and what it has said."""

    def __init__(self, simulator: Simulator) -> None:
        self.simulator = simulator
        self.tokens: dict[bytes, list[int]] = {}
        self.cached: dict[bytes, int] = {}
        self.ended: set[bytes] = set()
        self.changed = asyncio.Event()
        self.number = 0

    def emit(self, segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = ()) -> None:
        for segment in segments:
            if segment.delta is not None:
                self.tokens.setdefault(segment.id, []).extend(segment.delta.token_ids)
                if segment.delta.prompt is not None:
                    self.cached[segment.id] = segment.delta.prompt.cached_tokens
            if segment.terminal is not None:
                assert not isinstance(segment.terminal, Fault), segment.terminal
                self.ended.add(segment.id)
        assert not transfers
        self.changed.set()

    def submit(self, prompt: Sequence[int], session: str = "", max_tokens: int = 8) -> bytes:
        self.number += 1
        generation = self.number.to_bytes(16)
        turn = SessionTurn(session, "open", epoch=1) if session else None
        self.simulator.submit(Submit(generation, tuple(prompt), max_tokens, self.number, ignore_eos=True, session=turn))
        return generation

    async def ended_all(self, *generations: bytes) -> None:
        async with asyncio.timeout(30):
            while not self.ended.issuperset(generations):
                self.changed.clear()
                await self.changed.wait()

    async def turn(self, prompt: list[int], session: str = "") -> int:
        """The number of cached tokens. The prompt grows by the answer."""
        generation = self.submit(prompt, session)
        await self.ended_all(generation)
        assert self.tokens[generation] == tokens_between(self.number, 0, 8, WORDS)
        prompt += self.tokens[generation]
        return self.cached[generation]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.001)

    def event(self, name: str) -> int:
        return self.simulator.stats().kv_tier_events.get(name, 0)


@asynccontextmanager
async def running(host_blocks: int = 400, disk: Path | None = None, **settings: Any) -> AsyncIterator[Worker]:
    """40 blocks on the device. A block takes 0.8 ms to compute, and 0.08 ms to load from host memory."""
    failures: list[str] = []
    defaults = {"step_ms": 0.0, "prefill_rate": 20_000.0, "kv_blocks": 40, "kv_disk": disk, "kv_disk_size": 400 * BLOCK_BYTES / GIB}
    config = SimulatorConfig(**{**defaults, "kv_host_memory": host_blocks * BLOCK_BYTES / GIB, **settings})
    simulator = Simulator(config, MODEL, Vocabulary(WORDS, 1), on_failure=lambda: failures.append("wrong KV"))
    worker = Worker(simulator)
    await simulator.start(worker.emit)
    try:
        yield worker
        simulator.check_integrity()
    finally:
        await simulator.close()
    assert not failures


def prompt_of(number: int, tokens: int = 320) -> list[int]:
    return [1000 + number * 1000 + index for index in range(tokens)]


async def test_what_the_device_has_no_room_for_is_used_again() -> None:
    async with running() as worker:
        prompts = [prompt_of(number) for number in range(6)]
        for number, prompt in enumerate(prompts):
            assert await worker.turn(prompt, f"agent {number}") == 0
        for number, prompt in enumerate(prompts):
            # All full blocks, of the prompt and of the answer, except what the last token needs.
            assert await worker.turn(prompt, f"agent {number}") == 320
        assert worker.event("host loaded") >= 80
        assert worker.event("host declined") == 0
        stats = worker.simulator.stats()
        assert stats.kv_host_total == 400
        assert stats.kv_host_blocks == worker.event("host stored") >= 120


async def test_host_memory_slower_than_computing_is_not_used() -> None:
    async with running(kv_host_gbps=8) as worker:
        for _ in range(2):
            for number in range(6):
                assert await worker.turn(prompt_of(number)) == 0
        assert worker.simulator.stats().kv_tier_events == {}


async def test_a_disk_slower_than_computing_is_measured_and_then_left_alone(tmp_path: Path) -> None:
    async with running(disk=tmp_path, host_blocks=30, kv_disk_gbps=8) as worker:
        for _ in range(3):
            for number in range(6):
                await worker.turn(prompt_of(number))
        assert worker.event("disk declined")
        assert worker.event("disk loaded") <= 16, "a few, to measure it"


async def test_a_restart_finds_the_disk(tmp_path: Path) -> None:
    prompts = [prompt_of(number) for number in range(6)]
    async with running(disk=tmp_path, host_blocks=200, kv_disk_gbps=100) as worker:
        for number, prompt in enumerate(prompts):
            await worker.turn(prompt, f"agent {number}")
        await worker.until(lambda: worker.event("disk stored") >= 120)
    async with running(disk=tmp_path, host_blocks=60, kv_disk_gbps=100) as worker:
        assert worker.simulator.stats().kv_disk_blocks >= 120
        assert [await worker.turn(prompt) for prompt in prompts] == [320] * 6
        assert worker.event("disk loaded") >= 120
        assert worker.event("disk corrupt") == 0


async def test_a_close_frees_what_is_below_the_device(tmp_path: Path) -> None:
    async with running(disk=tmp_path) as worker:
        await worker.turn(prompt_of(1), "agent")
        await worker.turn(prompt_of(2))
        await worker.until(lambda: worker.event("disk stored") > 0)
        worker.simulator.close_session("agent", 1)
        # What is being written is freed after that.
        await worker.until(lambda: not worker.simulator.stats().kv_host_blocks)
        assert worker.simulator.stats().kv_disk_blocks == 0


async def test_chaos(tmp_path: Path) -> None:
    """Many agents at once, some leave while they wait, load, compute or decode. Nothing is wrong, and nothing stays."""
    draw = random.Random(3)
    async with running(disk=tmp_path, host_blocks=60, kv_disk_gbps=100) as worker:
        prompts = [prompt_of(number, draw.randrange(50, 400)) for number in range(12)]
        left: set[bytes] = set()
        for _ in range(150):
            number = draw.randrange(len(prompts))
            generation = worker.submit(prompts[number], f"agent {number}" if number % 3 else "", max_tokens=draw.randrange(1, 30))
            if draw.random() < 0.3:
                for _ in range(draw.randrange(30)):
                    await asyncio.sleep(0)
                worker.simulator.cancel(generation)
                left.add(generation)
            elif draw.random() < 0.3:
                await worker.ended_all(generation)
            worker.simulator.check_integrity()
        await worker.ended_all(*[number.to_bytes(16) for number in range(1, worker.number + 1) if number.to_bytes(16) not in left])
        assert worker.simulator.stats().running == worker.simulator.stats().imports == worker.simulator.stats().kv_blocks_used == 0
        assert worker.event("host loaded")


async def test_too_little_host_memory_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--kv-host-memory has no room for a KV block of 2097152 bytes"):
        async with running(kv_host_memory=0.0001):
            pass
