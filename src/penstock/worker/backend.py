"""What the worker runtime asks of an engine, and which requests no engine can run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.wire.errors import context_exceeded
from penstock.wire.images import FIRST_IMAGE_ID, ImageSpan, wrong_images
from penstock.wire.messages import (
    Fault,
    Fetch,
    ImagesWanted,
    KvEvents,
    KvSource,
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


WantImages = Callable[[ImagesWanted], None]
"""Asks for the images of one generation. Called on the event loop, at any time. Never blocks, and is never answered within the call."""


def wants_none(wanted: ImagesWanted) -> None:
    raise AssertionError(f"this engine reads no images: {wanted}")


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

    The engine calls `want` for each generation that needs images whose features it lacks, even if another generation has asked for the
    same images. Each name gets one answer for all generations that wait for it: `image`, `image_at` or `image_refused`. It gets none if
    all of them have ended. After `image_at` the engine may ask again, with `failed`. It asks only for images that it has room for. An
    engine that reads only text never asks.
    """

    @property
    def model(self) -> ModelInfo: ...

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        """Prepares to take work. Raises ConfigError when it cannot."""

    def submit(self, request: Submit) -> None:
        """Queues a generation. One that can never run gets its Fault through `emit`."""

    def cancel(self, generation: bytes) -> None:
        """Stops a generation, queued or running, and frees what it held at once. An unknown or ended one is ignored."""

    def fetch(self, request: Fetch) -> None:
        """Pulls KV from another worker. It is reported through `emit`, at once by an engine that cannot: see `moves_no_kv`."""

    def end_transfer(self, transfer: bytes) -> None:
        """Frees what this transfer holds, begun by a Fetch or a Submit, as the source or the target. An unknown one is ignored."""

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        """The pixels of an image, see ImagePiece. One that nobody waits for any more is ignored, here and below."""

    def image_at(self, name: bytes, source: KvSource) -> None:
        """Another worker computes the features of this image. They are pulled from there, under the id of a transfer as for `fetch`."""

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        """An image cannot be had: the generations that wait for it fail, with the Fault of `image_fault`."""

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


def image_fault(reason: str, *, retryable: bool) -> Fault:
    """How a generation ends whose image cannot be had."""
    return Fault("image_lost", f"an image of the prompt is not available: {reason}", retryable=retryable)


class _LastPrompt:
    """The smallest and the largest id of a prompt's text, and what is wrong with its images. The choices of a request share their prompt,
    and come one after the other."""

    def __init__(self) -> None:
        self._prompt: Sequence[int] = ()
        self._images: tuple[ImageSpan, ...] = ()
        self._found: tuple[int, int, str | None] = 0, 0, None

    def look(self, token_ids: Sequence[int], images: tuple[ImageSpan, ...]) -> tuple[int, int, str | None]:
        if self._prompt is not token_ids or self._images != images:
            self._prompt, self._images = token_ids, images
            wrong = wrong_images(token_ids, images) if images else None
            text = [each for each in token_ids if each < FIRST_IMAGE_ID] or [0] if images else token_ids
            self._found = min(text), max(text), wrong
        return self._found


_LAST_PROMPT = _LastPrompt()


def validate_submit(request: Submit, vocab_size: int, context_length: int, *, reads_images: bool = False) -> Fault | None:
    """The fault of a request that can never run, in the same words for every engine; None when it can run."""
    if not request.token_ids:
        return Fault("empty_prompt", "a prompt needs at least one token")
    if not 0 <= request.offset <= len(request.token_ids):
        return Fault("invalid_offset", f"the offset is {request.offset}: expected 0 to {len(request.token_ids)}")
    if request.images and not reads_images:
        return Fault("unsupported", "the prompt has images, and this worker's model reads only text")
    least, most, wrong = _LAST_PROMPT.look(request.token_ids, request.images)
    if wrong is not None:
        return Fault("invalid_images", wrong)
    ids = (least, most, *request.stop_ids, *dict(request.logit_bias))
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
