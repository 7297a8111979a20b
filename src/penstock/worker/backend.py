"""What the worker runtime asks of an engine, and which requests no engine can run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from penstock.wire.errors import context_exceeded
from penstock.wire.messages import (
    Fault,
    Fetch,
    KvEvents,
    ModelInfo,
    Sampling,
    Segment,
    SessionReport,
    Snapshot,
    Submit,
    TransferReport,
    WorkerStats,
)


class Emit(Protocol):
    """Takes the segments of one engine step, for all generations, the KV events, and the reports on transfers of KV. Called on the event
    loop after every step, also when nothing is new, and every PROGRESS_SECONDS during a longer step, by the engine itself: one that is
    stuck is silent. Never blocks."""

    def __call__(self, segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = (), /) -> None: ...


PROGRESS_SECONDS = 0.25
"""Half of the runtime's BEACON_SECONDS."""

# Logits are divided by the repetition penalty, and overflow when it is much smaller.
MIN_REPETITION_PENALTY = 0.01

_ALLOWED_SAMPLING = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-12, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "repetition_penalty": (MIN_REPETITION_PENALTY, 100.0),
}


class Backend(Protocol):
    """An engine in the worker's process.

    Every submitted generation gets exactly one terminal through `emit`, except a cancelled one, which gets none. Deltas of a
    generation are disjoint and in order, and start at the `offset` of its Submit.
    """

    @property
    def model(self) -> ModelInfo: ...

    async def start(self, emit: Emit) -> None:
        """Prepares to take work. Raises ConfigError when it cannot."""

    def submit(self, request: Submit) -> None:
        """Queues a generation. One that can never run gets its Fault through `emit`."""

    def cancel(self, generation: bytes) -> None:
        """Stops a generation, queued or running, and frees what it held at once. An unknown or ended one is ignored."""

    def fetch(self, request: Fetch) -> None:
        """Pulls KV from another worker. It is reported through `emit`, at once by an engine that cannot: see `moves_no_kv`."""

    def end_transfer(self, transfer: bytes) -> None:
        """Frees what this transfer holds, begun by a Fetch or a Submit, as the source or the target. An unknown one is ignored."""

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        """Ends a session now or when its last active turn ends, see CloseSession. An unknown one, or one of another epoch, is ignored."""

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:
        """Reports on the known ones of these sessions, with their tokens if the engine has them."""

    async def snapshot(self) -> Snapshot | None:
        """All blocks that are cached now; None from an engine without KV events."""

    def stats(self) -> WorkerStats: ...

    async def close(self) -> None:
        """Stops and awaits everything that it started."""


def moves_no_kv(request: Fetch) -> TransferReport:
    """The answer of an engine that cannot pull KV. A Submit with a source then computes everything."""
    return TransferReport(request.source.transfer, "failed", reason="this engine moves no KV")


class _PromptRange:
    """The smallest and the largest id of a prompt. The choices of a request share their prompt, and come one after the other."""

    def __init__(self) -> None:
        self._prompt: Sequence[int] = ()
        self._range = (0, 0)

    def of(self, token_ids: Sequence[int]) -> tuple[int, int]:
        if self._prompt is not token_ids:
            self._prompt, self._range = token_ids, (min(token_ids), max(token_ids))
        return self._range


_PROMPT_RANGE = _PromptRange()


def validate_submit(request: Submit, vocab_size: int, context_length: int) -> Fault | None:
    """The fault of a request that can never run, in the same words for every engine; None when it can run."""
    if not request.token_ids:
        return Fault("empty_prompt", "a prompt needs at least one token")
    if not 0 <= request.offset <= len(request.token_ids):
        return Fault("invalid_offset", f"the offset is {request.offset}: expected 0 to {len(request.token_ids)}")
    ids = (*_PROMPT_RANGE.of(request.token_ids), *request.stop_ids, *dict(request.logit_bias))
    for token in (min(ids), max(ids)):
        if not 0 <= token < vocab_size:
            return Fault("invalid_token", f"token id {token} is not in this model's vocabulary: expected 0 to {vocab_size - 1}")
    tokens, length = len(request.token_ids), total_length(request)
    if length > context_length:
        return Fault("context_length_exceeded", context_exceeded(context_length, "prompt", tokens, length - tokens))
    if wrong := _wrong_sampling(request.sampling):
        return Fault("invalid_sampling", wrong)
    return None


def total_length(request: Submit) -> int:
    """The tokens of the prompt and of the longest answer."""
    return len(request.token_ids) + max(0, request.max_tokens - request.offset)


def _wrong_sampling(sampling: Sampling) -> str | None:
    for name, (least, most) in _ALLOWED_SAMPLING.items():
        value = getattr(sampling, name)
        if not least <= value <= most:
            return f"`{name}` is {value}: expected {least:g} to {most:g}"
    return None
