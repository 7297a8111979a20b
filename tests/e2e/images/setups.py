"""How each engine is started with a model that reads images."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from cpu_engines import BLOCK_SIZE, SGLANG_IMAGES, sglang_flags, vllm_flags
from e2e.engines.setups import MAX_BATCH, OFFLINE
from e2e.engines.setups import SETUPS as ENGINE_SETUPS
from e2e.harness import Server

MODEL = "seeing"
CONTEXT_LENGTH = 4096


@dataclass(frozen=True)
class Seeing:
    """`name` is that of the tests. `block_size` is how many tokens of a prompt are reused together."""

    name: str
    engine: str
    arguments: Callable[[], tuple[str, ...]]
    block_size: int = 16
    start_seconds: float = 60
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_environment(self) -> dict[str, str]:
        return {**os.environ, **OFFLINE, **self.environment}

    def start(self, *arguments: str) -> Server:
        """A server that is ready."""
        store = Path(tempfile.mkdtemp()) / "responses.db"
        named = ("--served-name", MODEL, "--context-length", str(CONTEXT_LENGTH), "--response-store", str(store))
        server = Server(*named, *self.arguments(), *arguments, engine=self.engine, model=MODEL, environment=self.all_environment)
        try:
            return server.wait_ready(self.start_seconds)
        except AssertionError:
            server.stop()
            raise


@cache
def vision_model(kind: str) -> tuple[str, ...]:
    """The flag that names a tiny model of this family, which is made once."""
    from tiny_vision import make_vision_model

    directory = Path(tempfile.mkdtemp()) / kind
    make_vision_model(kind, directory)  # type: ignore[arg-type]
    return ("--model", str(directory))


def _embedded(kind: str) -> tuple[str, ...]:
    return (*vision_model(kind), "--max-batch", "8", "--kv-blocks", "2048", "--threads", "1")


def _of_others(kind: str, *flags: str) -> tuple[str, ...]:
    return (*vision_model(kind), "--engine-args", " ".join(flags))


_VLLM, _SGLANG = ENGINE_SETUPS["vllm"], ENGINE_SETUPS["sglang"]

SETUPS = {
    setup.name: setup
    for setup in (
        Seeing("simulator", "simulator", lambda: ("--images", "--step-ms", "1")),
        Seeing("embedded-idefics3", "embedded", partial(_embedded, "idefics3")),
        Seeing("embedded-qwen3_vl", "embedded", partial(_embedded, "qwen3_vl")),
        *(
            Seeing(f"vllm-{kind}", "vllm", partial(_of_others, kind, *vllm_flags(2**26, MAX_BATCH)), BLOCK_SIZE, _VLLM.start_seconds)
            for kind in ("idefics3", "qwen3_vl")
        ),
        Seeing(
            "sglang-qwen3_vl",
            "sglang",
            partial(_of_others, "qwen3_vl", *sglang_flags(2**16, MAX_BATCH), *SGLANG_IMAGES),
            BLOCK_SIZE,
            _SGLANG.start_seconds,
            _SGLANG.environment,
        ),
    )
}
