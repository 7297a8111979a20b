"""How each engine is started, and the little that a test must know of one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cpu_engines import BLOCK_SIZE, sglang_flags, vllm_flags
from e2e.harness import Server

MODEL = "tiny"
CONTEXT_LENGTH = 2048
MAX_BATCH = 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_STAND_IN = Path(__file__).parents[2] / "engines" / "sglang_cpu"


@dataclass(frozen=True)
class Setup:
    """`process` is in the title of the process that computes; None where the worker itself does. KV is reused by whole blocks.

    `lacks` has what a client can tell the engine by, with the reason: a test of it asserts what happens instead. `keeps` is how much of the
    context the engine keeps to itself, so that it has to be started with so much more. `spins`: its processes burn two cores while they
    wait for each other, and where there are no more, answers reach clients late and in lumps; so they get one.
    """

    engine: str
    arguments: tuple[str, ...]
    block_size: int
    start_seconds: float
    process: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    keeps: int = 0
    spins: bool = False

    def start(self, model: Path, *arguments: str) -> Server:
        """A server that is ready. What it has lost it waits for as long as the engine may take to come back."""
        named = ("--model", str(model), "--served-name", MODEL, "--context-length", str(CONTEXT_LENGTH + self.keeps))
        wait = ("--worker-wait", str(self.start_seconds))
        environment = {**OFFLINE, **self.environment}
        server = Server(*named, *wait, *self.arguments, *arguments, engine=self.engine, model=MODEL, environment=environment)
        try:
            server.wait_ready(self.start_seconds)
        except AssertionError:
            server.stop()
            raise
        if self.spins:
            for engine in [child for worker in workers_of(server) for child in worker.children(recursive=True)]:
                os.sched_setaffinity(engine.pid, {min(os.sched_getaffinity(0))})
        return server

    def computing(self, worker: psutil.Process) -> psutil.Process:
        """The process of this worker in which the engine computes."""
        if self.process is None:
            return worker
        (found,) = [child for child in worker.children(recursive=True) if self.process in " ".join([child.name(), *child.cmdline()])]
        return found

    def reused(self, prompt_tokens: int) -> int:
        """Of a prompt that was computed before, all whole blocks but what has the last token, which is always computed."""
        return (prompt_tokens - 1) // self.block_size * self.block_size


def workers_of(server: Server) -> list[psutil.Process]:
    """Their processes, in the order of their names."""
    children = psutil.Process(server.process.pid).children()
    return sorted([child for child in children if "worker" in child.cmdline()], key=lambda child: child.cmdline())


SETUPS = {
    setup.engine: setup
    for setup in (
        Setup(
            "embedded",
            ("--max-batch", str(MAX_BATCH), "--kv-blocks", "4096", "--threads", "1"),
            block_size=16,
            start_seconds=60,
        ),
        Setup(
            "vllm",
            ("--engine-args", " ".join(vllm_flags(2**26, MAX_BATCH))),
            block_size=BLOCK_SIZE,
            start_seconds=300,
            process="EngineCore",
            spins=True,
        ),
        Setup(
            "sglang",
            ("--engine-args", " ".join(sglang_flags(2**16, MAX_BATCH))),
            block_size=BLOCK_SIZE,
            start_seconds=300,
            process="scheduler",
            environment={
                "SGLANG_USE_CPU_ENGINE": "1",
                "PYTHONPATH": os.pathsep.join([str(_STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]),
            },
            lacks={
                "seeds": "it heeds them only with --enable-deterministic-inference, which this attention backend does not have",
                "counts in time": "it begins a step before it has seen the token of the last one, so that penalties come a token late",
            },
            keeps=6,
        ),
    )
}
