"""The interface to an external engine (vLLM, SGLang, or a server behind HTTP). `ExternalBackend` makes a worker's backend of it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from penstock.wire.errors import PenstockError
from penstock.wire.messages import Capability, Export, Fault, FinishReason, KvHandover, KvSource, Sampling, TokenLogprob

if TYPE_CHECKING:
    from penstock.backends.external.image_events import KeyedImages


class EngineRefused(PenstockError):
    """The engine refused or gave up this generation. Other generations are not affected."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class EngineDied(PenstockError):
    """The engine is gone, with all its generations."""


class EngineImage(Struct, frozen=True, gc=False):
    """A picture in RGB, a byte for each colour, row by row. `size` is its width and height."""

    name: bytes
    size: tuple[int, int]
    pixels: bytes


class PromptImages(Struct, frozen=True):
    """A prompt with images as an engine takes it: `token_ids` has one placeholder for each of the pictures, which the engine expands.
    `pictures` is emptied after the first chunk: they are large."""

    token_ids: tuple[int, ...]
    pictures: list[EngineImage]


class EngineRequest(Struct, frozen=True, gc=False):
    """One generation, as an engine gets it. Tokens that another worker generated are part of the prompt.

    `id` is unique and of a fixed length, so no id is a prefix of another. Token ids, context length and sampling are already checked.
    `seed` is in [0, 2**63), or None: any seed. `lark` is a grammar for llguidance. `session_id` names a session that has a lease.
    `session_seconds`: how long the session lasts after this turn. `keep_seconds`: how long a client asked to keep the KV, session or not.
    KV is shared only between requests with the same `salt`.
    `export`: the engine computes the prompt for another engine, and makes one token. `source`: it gets the prompt's KV from another
    engine. Both are only set for an engine with `EngineFacts.moves`. With `images`, `token_ids` is what the engine must make of
    `images.token_ids` when it expands the placeholders.
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
    session_seconds: float = 0.0
    keep_seconds: float = 0.0
    salt: str | None = None
    export: Export | None = None
    source: KvSource | None = None
    images: PromptImages | None = None


class Chunk(Struct, frozen=True, gc=False):
    """The new part of a generation: tokens that no earlier chunk had, copied from the engine's own lists.

    The token that ended the text is included. `logprobs` has one entry per token, or is None if not requested. `cached_tokens` and
    `prompt_logprobs` are read with the first token or before it; `prompt_logprobs` has one entry per prompt token, the first is None.
    Only the last chunk has a `finish`, and for an export perhaps a `ticket`: see `handover.Ticket`.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    ticket: bytes = b""


@dataclass(frozen=True, slots=True)
class KvMoves:
    """How an engine's KV gets to another engine of the same kind: those with an equal `fingerprint`. `computes`: if that fails, it can
    compute the prompt itself. `address` and `block_bytes` are those of ModelInfo."""

    handover: KvHandover
    fingerprint: bytes
    address: str = ""
    block_bytes: int = 0
    computes: bool = True


@dataclass(frozen=True, slots=True)
class EventEndpoints:
    """The ZMQ addresses of an engine's KV events: where it publishes them, and where missed ones can be requested again. `images` knows
    how they name images; None: blocks with images are ignored."""

    publisher: str
    replay: str | None = None
    topic: str = ""
    images: KeyedImages | None = None


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What is known about an engine after its start. `kv_blocks` and `max_batch` are 0 if unknown. `capabilities` lists only what the
    engine itself does; `ExternalBackend` adds its own. `moves` is None if its KV does not move. `reads_images`: if its model does."""

    context_length: int
    block_size: int
    kv_blocks: int = 0
    max_batch: int = 0
    events: EventEndpoints | None = None
    capabilities: tuple[Capability, ...] = ("logprobs", "prompt_logprobs", "grammar", "isolation")
    moves: KvMoves | None = None
    reads_images: bool = True


class ExternalEngine(Protocol):
    """An engine: tokens in, tokens out. All methods are called on the event loop and never block it."""

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        """Loads the model. Raises ConfigError if that fails. Afterwards `on_death` is called with the reason when the engine dies, but
        never after `close` was called."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[Chunk, None]:
        """Yields chunks until one has a finish. Closing the generator or cancelling its reader aborts the generation in the engine, and
        returns when the engine has received the abort. Raises EngineRefused or EngineDied."""

    def pulled_bytes(self) -> int:
        """How much KV it has pulled from other engines since its start, by its own count; 0 if it does not count."""

    async def ping(self) -> None:
        """Returns when the engine's own loop has answered, between two of its steps."""

    async def close_session(self, session_id: str) -> None:
        """Lets the engine free what it keeps for this session only. Unknown sessions are ignored."""

    async def close(self) -> None:
        """Ends the engine's processes and waits for their end."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One thing that an engine may be able to do. `detail` says how, or why not."""

    name: str
    is_available: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What `penstock doctor` prints about an engine. `version` is None if it is not installed, `supported` is the supported range in
    words, `problem` says why the engine cannot be used."""

    engine: str
    version: str | None
    supported: str
    problem: str | None = None
    features: tuple[Feature, ...] = ()
