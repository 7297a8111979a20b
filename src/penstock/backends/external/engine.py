"""What is asked of an engine that others have made. `external.backend.ExternalBackend` makes a backend of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from penstock.wire.errors import PenstockError
from penstock.wire.messages import Bootstrap, Capability, Fault, FinishReason, Sampling, TokenLogprob


class EngineRefused(PenstockError):
    """The engine does not take this generation, or gave it up. Nothing else is hurt."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class EngineDied(PenstockError):
    """The engine is gone, with all that it was doing."""


class EngineRequest(Struct, frozen=True, gc=False):
    """One generation as an engine is asked for it: what was generated elsewhere is part of the prompt.

    `id` is new for every request and of a fixed length, so that no id begins another one. All token ids have been checked, as have the
    context length and the sampling; `seed` is from 0 to below 2**63, None where any will do. `lark` is a grammar for llguidance.
    `session_id` names a session that was granted a lease; `is_retained` says that the KV is to be kept rather than other KV.
    """

    id: str
    token_ids: tuple[int, ...]
    max_tokens: int
    seed: int | None
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    sampling: Sampling = Sampling()
    stop_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    lark: str | None = None
    session_id: str | None = None
    priority: int = 0
    is_retained: bool = False
    bootstrap: Bootstrap | None = None


class Chunk(Struct, frozen=True, gc=False):
    """What is new of a generation: tokens that no chunk before had, and no list that the engine goes on growing.

    The token that ended the text is among them. `logprobs` has an entry a token where they were asked for, else it is None.
    `cached_tokens` and `prompt_logprobs` count where they come before the first token, or with it; the latter has an entry a prompt
    token, the first of them None. The last chunk has the `finish`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """Where an engine publishes its KV events over ZMQ, and where those that were missed are asked for."""

    publisher: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known of an engine once it runs. `kv_blocks` and `max_batch` are 0 where it does not say. `capabilities` are those that the
    engine has, as it is set up; what needs nothing of the engine is not among them."""

    context_length: int
    block_size: int
    kv_blocks: int = 0
    max_batch: int = 0
    events: EventEndpoints | None = None
    capabilities: tuple[Capability, ...] = ("logprobs", "prompt_logprobs", "grammar")


class ExternalEngine(Protocol):
    """An engine, tokens in and tokens out. All methods are called on the event loop and never block it."""

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        """Loads the model. Raises ConfigError when it cannot. From then on, `on_death` is called with the reason when the engine's process
        ends by itself; never after `close` has begun."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks until one has a finish. Closing the generator, or cancelling who awaits it, stops the generation in the engine, begun or
        not, and returns when the engine has been told. Raises EngineRefused, or EngineDied."""

    async def ping(self) -> None:
        """Returns when the engine's own loop has answered, between two of its steps."""

    async def close_session(self, session_id: str) -> None:
        """The session is over: what the engine keeps for it alone can go. Unknown ones are ignored."""

    async def close(self) -> None:
        """Ends the engine's processes, and awaits that."""
