"""How each engine is started for these tests, and what it cannot have."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpu_engines import sglang_flags, vllm_flags

CONTEXT_LENGTH = 2048
MAX_BATCH = 8
KV_TOKENS = 8192
"""Small enough that a few long prompts fill it."""
KV_BYTES = 1024
"""A token's, of the model of these tests: two layers with two heads of 32 numbers, twice, in float32."""
MAX_SESSIONS = 6

_STAND_IN = Path(__file__).parents[2] / "engines" / "sglang_cpu"


@dataclass(frozen=True)
class Setup:
    """`lacks` has what the engine cannot have, by name, with the reason: a test of it asserts what happens instead.

    `process` is in the title of the process in which the engine computes; None where that is the worker's own. `patience` is how many
    seconds a test waits for what must come.
    """

    engine: str
    flags: tuple[str, ...]
    start_seconds: float
    patience: float = 60.0
    lacks: Mapping[str, str] = field(default_factory=dict)
    process: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    import_path: Path | None = None

    def arguments(self, model: Path, *more: str) -> list[str]:
        """Of the command `penstock worker`, without an address."""
        return ["worker", "--engine", self.engine, "--model", str(model), "--context-length", str(CONTEXT_LENGTH), *self.flags, *more]

    def prepare(self) -> None:
        """What must be known to this process and its children before the engine is imported."""
        os.environ.update(self.environment)
        if self.import_path is not None:
            sys.path.insert(0, str(self.import_path))
            inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
            os.environ["PYTHONPATH"] = os.pathsep.join([str(self.import_path), *inherited])


_SESSIONS = ("--max-sessions", str(MAX_SESSIONS), "--session-grace", "0")
_OFFLINE = {"HF_HUB_OFFLINE": "1"}
# Threads that wait for each other at every operation gain nothing on a model so small, and lose much where others work beside.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_KV_FITS = "the engine does not start with less KV than the context needs"
_NO_LEASES = "the engine's cache is its own: a session names what it computed, and cannot hold it"
_FORGETS_COUNTS = "to the engine, what another worker generated is part of the prompt"
_OWN_NOISE = "the engine's random numbers are its own, and begin where it begins"

_SIMULATOR = Setup(
    "simulator",
    ("--max-batch", str(MAX_BATCH), "--kv-blocks", str(KV_TOKENS // 16), "--block-size", "16", "--step-ms", "1", *_SESSIONS),
    start_seconds=10,
    lacks={
        "choice": "its tokens follow from the seed: nothing else can change them, and only its own end comes before max_tokens",
        "grammar": "its tokens follow from the seed: none of them could be banned",
        "own process": "it has no engine apart from its worker",
    },
)
_EMBEDDED = Setup(
    "embedded",
    ("--max-batch", str(MAX_BATCH), "--kv-blocks", str(KV_TOKENS // 16), "--device", "cpu", "--threads", "1", *_SESSIONS),
    start_seconds=60,
    lacks={"own process": "it computes in a thread of its worker", "kv_too_small": "the context is cut to what the KV holds"},
)
_VLLM = Setup(
    "vllm",
    ("--engine-args", " ".join(vllm_flags(KV_TOKENS * KV_BYTES, MAX_BATCH)), *_SESSIONS),
    start_seconds=240,
    patience=180,
    lacks={
        "kv_too_small": _KV_FITS,
        "leases": _NO_LEASES,
        "counts of others": _FORGETS_COUNTS,
        "noise by position": _OWN_NOISE,
    },
    process="EngineCore",
    environment={**_OFFLINE, "VLLM_NO_USAGE_STATS": "1"},
)
_SGLANG = Setup(
    "sglang",
    ("--engine-args", " ".join(sglang_flags(KV_TOKENS, MAX_BATCH)), *_SESSIONS),
    start_seconds=300,
    patience=300,
    lacks={
        "seeds": "the engine heeds them only with --enable-deterministic-inference, which this attention backend does not have",
        "the prompt's repetition": "the engine punishes the repetition of what it generated",
        "counts in time": "the engine begins a step before it has seen the token of the last one",
        "the whole context": "the engine keeps the last few places of its context to itself",
        "kv_too_small": _KV_FITS,
        "leases": _NO_LEASES,
        "counts of others": _FORGETS_COUNTS,
        "noise by position": _OWN_NOISE,
    },
    process="scheduler",
    environment={**_OFFLINE, "SGLANG_USE_CPU_ENGINE": "1", **_ONE_THREAD},
    import_path=_STAND_IN,
)

SETUPS = {setup.engine: setup for setup in (_SIMULATOR, _EMBEDDED, _VLLM, _SGLANG)}
BY_DEFAULT = ("simulator", "embedded")
