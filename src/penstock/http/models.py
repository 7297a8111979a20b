"""The models that the front end can serve now, each with its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.text.load import load_tokenizer
from penstock.text.tokenizer import Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.messages import ModelInfo


@dataclass(frozen=True)
class ServedModel:
    info: ModelInfo
    tokenizer: Tokenizer


class Models:
    """Looks models up by name among those of the live workers; keeps a tokenizer for each that was ever announced."""

    def __init__(self) -> None:
        self._tokenizers: dict[str, Tokenizer] = {}
        self._live: Callable[[], Iterable[ModelInfo]] = tuple

    def observe(self, live: Callable[[], Iterable[ModelInfo]]) -> None:
        """Says where the live workers' models come from."""
        self._live = live

    async def prepare(self, info: ModelInfo) -> None:
        """Loads the model's tokenizer, beside the event loop. Raises ConfigError when it cannot."""
        if info.tokenizer not in self._tokenizers:
            self._tokenizers[info.tokenizer] = await asyncio.to_thread(load_tokenizer, info.tokenizer)

    def all(self) -> list[ServedModel]:
        unique = {info.name: info for info in self._live()}
        return [ServedModel(info, self._tokenizers[info.tokenizer]) for info in unique.values()]

    def find(self, name: str) -> ServedModel:
        """Raises RequestError: 404 for an unknown model, 503 when no worker is there at all."""
        for info in self._live():
            if info.name == name:
                return ServedModel(info, self._tokenizers[info.tokenizer])
        known = ", ".join(f"`{model.info.name}`" for model in self.all())
        if not known:
            raise RequestError("no worker is ready", code="no_worker", status=503)
        raise RequestError(f"`model` is {name!r}: this server has {known}", param="model", code="model_not_found", status=404)
