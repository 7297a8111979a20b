"""The models that the front end serves, each with its tokenizer; GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, get_args

from msgspec import Struct, structs

from penstock.api.anthropic.answers import AnthropicModel, AnthropicModelList
from penstock.api.openai.answers import Model, ModelDetails, ModelList
from penstock.cluster.pool import Member
from penstock.text.tokenizers.cache import Fetch, TokenizerCache
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.wire.errors import RequestError
from penstock.wire.messages import ModelInfo, Role

if TYPE_CHECKING:
    from penstock.api.app import Services
    from penstock.api.pipeline.request import Incoming


class ServedModel(Struct, frozen=True, gc=False):
    info: ModelInfo
    tokenizer: Tokenizer
    workers: int = 1


class Models:
    """Finds the models of the live workers by name. Keeps the tokenizer of every model it has seen, which it gets from `cache`.

    A model whose last worker has gone stays available for `remember_seconds`: a worker may come back.
    """

    def __init__(
        self, remember_seconds: float = 0.0, clock: Callable[[], float] = time.monotonic, cache: TokenizerCache | None = None
    ) -> None:
        self._cache = cache or TokenizerCache()
        self._remember_seconds = remember_seconds
        self._clock = clock
        self._last_seen: dict[str, tuple[ModelInfo, float]] = {}
        self.live: list[ModelInfo] = []
        """The models of the live workers, one per worker."""
        self._encoders: Counter[str] = Counter()
        """How many workers make features of images, by model. They alone serve nothing."""

    async def prepare(self, info: ModelInfo, fetch: Fetch | None = None) -> None:
        """Loads the model's tokenizer, with `fetch` if it is not on this machine. Raises ConfigError or LinkError when it cannot."""
        await self._cache.load(info.tokenizer, fetch)

    def tokenizer(self, info: ModelInfo) -> Tokenizer:
        """The tokenizer of a model that is prepared."""
        return self._cache.loaded[info.tokenizer]

    def joined(self, member: Member) -> None:
        if member.is_encoder:
            self._encoders[member.model.name] += 1
        else:
            self.live.append(member.model)

    def left(self, member: Member) -> None:
        """Remembers the worker's model: it may have been the last one."""
        if member.is_encoder:
            self._encoders[member.model.name] -= 1
            return
        self.live.remove(member.model)
        self._last_seen[member.model.name] = member.model, self._clock()

    def all(self) -> list[ServedModel]:
        count = Counter(info.name for info in self.live)
        unique = {info.name: info for info in self.live}
        return [
            ServedModel(structs.replace(info, roles=self._roles(name)), self.tokenizer(info), count[name]) for name, info in unique.items()
        ]

    def _roles(self, name: str) -> tuple[Role, ...]:
        """What the model's workers do, in an order that does not depend on who joined first."""
        taken = {role for info in self.live if info.name == name for role in info.roles}
        if self._encoders[name]:
            taken.add("encode")
        return tuple(role for role in get_args(Role) if role in taken)

    def find(self, name: str) -> ServedModel:
        """Raises RequestError: 404 for an unknown model, 503 when there is no worker."""
        for info in self.live:
            if info.name == name:
                return ServedModel(info, self.tokenizer(info))
        if name in self._last_seen:
            info, seen = self._last_seen[name]
            if self._clock() - seen < self._remember_seconds:
                return ServedModel(info, self.tokenizer(info), 0)
        known = ", ".join(f"`{model.info.name}`" for model in self.all())
        if not known:
            raise RequestError("no worker is ready", code="no_worker", status=503)
        raise RequestError(f"`model` is {name[:256]!r}: this server has {known}", param="model", code="model_not_found", status=404)


async def list_models(services: Services, incoming: Incoming) -> ModelList | AnthropicModelList:
    """Answers GET /v1/models. A client of Anthropic's API gets all models in one page, whatever its `limit`."""
    models = services.context.models.all()
    if not _is_anthropic(incoming):
        return ModelList("list", [_described(model) for model in models])
    listed = [_described_for_anthropic(model) for model in models]
    return AnthropicModelList(listed, False, listed[0].id if listed else None, listed[-1].id if listed else None)


async def get_model(services: Services, incoming: Incoming) -> Model | AnthropicModel:
    """Answers GET /v1/models/{id}. Raises RequestError when there is no such model."""
    models, name = services.context.models, incoming.path["id"]
    live = next((model for model in models.all() if model.info.name == name), None)
    return (_described_for_anthropic if _is_anthropic(incoming) else _described)(live or models.find(name))


def _is_anthropic(incoming: Incoming) -> bool:
    return any(name == b"anthropic-version" for name, _ in incoming.headers)


def _described_for_anthropic(model: ServedModel) -> AnthropicModel:
    info = model.info
    created = datetime.fromtimestamp(info.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return AnthropicModel("model", info.name, info.name, created, "active", info.context_length, info.context_length, _capabilities(info))


def _capabilities(info: ModelInfo) -> dict[str, dict[str, Any]]:
    no, yes = {"supported": False}, {"supported": True}
    thinking = {"supported": info.reasoning_parser is not None}
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": {**yes, "clear_thinking_20251015": yes, "clear_tool_uses_20250919": no, "compact_20260112": no},
        "effort": {**thinking, **dict.fromkeys(("low", "medium", "high", "xhigh", "max"), thinking)},
        "image_input": {"supported": info.images is not None},
        "pdf_input": no,
        "server_tools": {**no, "code_execution": no, "web_search": no},
        "structured_outputs": {"supported": "grammar" in info.capabilities},
        "thinking": {**thinking, "types": {"disabled": yes, **dict.fromkeys(("adaptive", "enabled", "between_tools"), thinking)}},
    }


def _described(model: ServedModel) -> Model:
    info = model.info
    details = ModelDetails(
        engine=info.engine,
        tokenizer=info.tokenizer,
        context_length=info.context_length,
        workers=model.workers,
        roles=list(info.roles),
        capabilities=list(info.capabilities),
        tool_parser=info.tool_parser,
        reasoning_parser=info.reasoning_parser,
    )
    reads: list[Literal["text", "image"]] = ["text"] if info.images is None else ["text", "image"]
    return Model(info.name, "model", info.created, "penstock", details, reads, ["text"])
