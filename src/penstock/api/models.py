"""The models that the front end can serve now, each with its tokenizer."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from penstock.text.tokenizers.source import load_tokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.messages import ModelInfo


@dataclass(frozen=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer
    workers: int = 1


class Worker(Protocol):
    @property
    def model(self) -> ModelInfo: ...


class Models:
    """Looks models up by name among those of the live workers; keeps a tokenizer for each that was ever announced.

    A model whose workers are all gone can still be asked for, for a while: they may be about to come back.
    """

    def __init__(self, remember_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}
        self._remember_seconds = remember_seconds
        self._clock = clock
        self._last_seen: dict[str, tuple[ModelInfo, float]] = {}
        self._live: Callable[[], Iterable[ModelInfo]] = tuple

    def observe(self, live: Callable[[], Iterable[ModelInfo]]) -> None:
        """Says where the live workers' models come from."""
        self._live = live

    async def prepare(self, info: ModelInfo) -> None:
        """Loads the model's tokenizer, beside the event loop. Raises ConfigError when it cannot."""
        if info.tokenizer not in self._tokenizers:
            self._tokenizers[info.tokenizer] = await asyncio.to_thread(load_tokenizer, info.tokenizer)

    def joined(self, _: Worker) -> None:
        """What is live is asked for when it is needed."""

    def left(self, worker: Worker) -> None:
        """A worker is gone, perhaps the last of its model."""
        self._last_seen[worker.model.name] = worker.model, self._clock()

    def all(self) -> list[ServedModel]:
        live = list(self._live())
        count = Counter(info.name for info in live)
        unique = {info.name: info for info in live}
        return [ServedModel(info, self._tokenizers[info.tokenizer], count[name]) for name, info in unique.items()]

    def find(self, name: str) -> ServedModel:
        """Raises RequestError: 404 for an unknown model, 503 when no worker is there at all."""
        for info in self._live():
            if info.name == name:
                return ServedModel(info, self._tokenizers[info.tokenizer])
        if name in self._last_seen:
            info, seen = self._last_seen[name]
            if self._clock() - seen < self._remember_seconds:
                return ServedModel(info, self._tokenizers[info.tokenizer], 0)
        known = ", ".join(f"`{model.info.name}`" for model in self.all())
        if not known:
            raise RequestError("no worker is ready", code="no_worker", status=503)
        raise RequestError(f"`model` is {name[:256]!r}: this server has {known}", param="model", code="model_not_found", status=404)
