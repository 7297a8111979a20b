"""How each engine is started with a model that reads images."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from e2e.engines.setups import OFFLINE
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

    def start(self, *arguments: str) -> Server:
        """A server that is ready."""
        store = Path(tempfile.mkdtemp()) / "responses.db"
        named = ("--served-name", MODEL, "--context-length", str(CONTEXT_LENGTH), "--response-store", str(store))
        server = Server(*named, *self.arguments(), *arguments, engine=self.engine, model=MODEL, environment={**os.environ, **OFFLINE})
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


SETUPS = {
    setup.name: setup
    for setup in (
        Seeing("simulator", "simulator", lambda: ("--images", "--step-ms", "1")),
        Seeing("embedded-idefics3", "embedded", partial(_embedded, "idefics3")),
        Seeing("embedded-qwen3_vl", "embedded", partial(_embedded, "qwen3_vl")),
    )
}
