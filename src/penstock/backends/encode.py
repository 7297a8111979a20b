"""An encode worker: it only makes features of images, which other workers pull.

A job is a Submit with one image, no token to make, and an Export. Its pixels come from the front end, unless the features are still here.
Lanes take turns. At most MAX_PIXELS_AT_ONCE images have their pixels here or on the way. One is encoded at a time, in the tower's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol

from msgspec import structs

from penstock.fairness import FairQueue
from penstock.kv.feature_moves import FeatureMoves
from penstock.kv.features import ANSWER_SECONDS, Features, Image, place_images, slot_names
from penstock.kv.moving import SlotMemory
from penstock.wire.images import ImageSpan, wrong_images
from penstock.wire.messages import (
    Fault,
    Fetch,
    Finish,
    ImagesWanted,
    KvSource,
    ModelInfo,
    Segment,
    SessionReport,
    Submit,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import PROGRESS_SECONDS, Emit, WantImages, image_fault, moves_no_kv, wants_none

log = logging.getLogger(__name__)

MAX_PIXELS_AT_ONCE = 4
"""Images whose pixels are here or under way. They are larger than features, and the tower takes one after the other."""


NICE = 10
"""When others take all cores, they get about ten times as much time as the tower."""


def yield_to_others() -> None:
    """On a CPU, the streams of other workers go first. This holds for the calling thread and those that it starts. Where Linux
    divides time between sessions of processes, it holds for the session, if this process has one of its own."""
    os.nice(NICE)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(NICE), encoding="ascii")


class FeatureMaker(Protocol):
    """A tower and the slots that it writes. Made and called in one thread. `fingerprint`: others make the same features."""

    fingerprint: bytes

    @property
    def memory(self) -> SlotMemory: ...

    def encode(self, span: ImageSpan, pixels: bytes, slots: Sequence[int]) -> None:
        """Writes the features of an image into these slots. Raises ValueError when the pixels do not fit the span, MemoryError when there
        is too little memory for this one."""

    def close(self) -> None: ...


class _StoppedError(Exception):
    """The worker ends while an image is encoded."""


class EncodeBackend:
    """A `worker.backend.Backend`. `make` loads the tower, in its thread. The tower calls what it is given while it goes on.

    If the tower fails, every job gets a retryable fault, and `on_failure` is called: the process must end.
    """

    def __init__(self, model: ModelInfo, make: Callable[[Callable[[], None]], FeatureMaker], on_failure: Callable[[], None]) -> None:
        self.model = model
        self._make = make
        self._on_failure = on_failure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tower")
        self._maker: FeatureMaker | None = None
        self._jobs: dict[bytes, Submit] = {}
        self._positions: dict[bytes, int] = {}
        """Of the images that jobs wait for, by name."""
        self._ended: list[Segment] = []
        self._ready: list[bytes] = []
        self._turns: FairQueue[bytes] = FairQueue()
        """The images whose pixels are to be asked for."""
        self._to_ask: dict[bytes, list[ImagesWanted]] = {}
        """The jobs that need them, by name."""
        self._pixels: dict[bytes, bytes | None] = {}
        """By the name of the image. None: they are under way."""
        self._encoding: Image | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._submitted = 0
        self._stats = WorkerStats()
        self._spoke_at = 0.0
        self._is_stopping = False
        self._failure: Fault | None = None

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        began = time.monotonic()
        log.info("loading the tower of %s", self.model.name)
        self._emit, self._want, self._loop = emit, want, asyncio.get_running_loop()
        maker = self._maker = await self._loop.run_in_executor(self._thread, self._make, self._progressed)
        self.books = Features(maker.memory.layout.slots)
        self.kv = FeatureMoves(self.books, maker.fingerprint, maker.memory, self._ask)
        self.model = structs.replace(self.model, image_fingerprint=maker.fingerprint)
        self._stats = self._count()
        log.info("loaded the tower of %s in %.1f s", self.model.name, time.monotonic() - began)

    def submit(self, request: Submit) -> None:
        if (fault := self._failure or self._wrong(request)) is not None:
            self._emit([Segment(request.id, None, fault)], None)
            return
        assert request.export is not None
        placed = place_images(request.token_ids, request.images)
        self._jobs[request.id] = request
        self._positions[request.images[0].name] = placed[0].positions
        self.kv.expect(request.export.transfer, request.export.lease_seconds)
        self._submitted += 1
        wake, fail = partial(self._ready.append, request.id), partial(self._fail_job, request.id)
        if self.books.want(request.id, placed, request.lane, request.weight, self._submitted, wake, fail):
            wake()
        self._advance()

    def _wrong(self, request: Submit) -> Fault | None:
        if len(request.images) != 1 or request.max_tokens or request.export is None:
            return Fault("unsupported", "this worker only makes features: expected one image, no tokens, and an export", retryable=True)
        if (wrong := wrong_images(request.token_ids, request.images)) is not None:
            return Fault("invalid_images", wrong)
        wrong = self.books.too_large(place_images(request.token_ids, request.images))
        return None if wrong is None else Fault("image_too_large", wrong, retryable=True)

    def cancel(self, generation: bytes) -> None:
        request = self._jobs.pop(generation, None)
        if request is not None:
            self._leave(request)
            self._advance()

    def end_transfer(self, transfer: bytes) -> None:
        self.kv.end(transfer)
        self._advance()

    def fetch(self, request: Fetch) -> None:
        self._emit((), None, (moves_no_kv(request),))

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:  # noqa: ARG002
        if self.books.queued(name) is not None:
            self._pixels[name] = pixels
            self._advance()

    def image_at(self, name: bytes, source: KvSource) -> None:  # noqa: ARG002
        """Front ends send pixels here."""
        self.image_refused(name, "an encode worker takes only pixels", retryable=True)

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        self.books.refuse(name, reason, retryable=retryable)
        self._advance()

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        """There are none."""

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:  # noqa: ARG002
        return ()

    async def snapshot(self) -> None:
        return None

    def stats(self) -> WorkerStats:
        """As of the last thing that it said: news in them are sent, and nothing is while the tower is stuck."""
        return self._stats

    def _count(self) -> WorkerStats:
        books, running = self.books, int(self._encoding is not None)
        return WorkerStats(
            running=running,
            queued=max(0, len(self._positions) - running),
            kv_blocks_total=books.slots,
            kv_blocks_used=books.used - books.cached,
            kv_blocks_cached=books.cached,
            exports=self.kv.exports,
            images_encoded=books.encoded,
            images_reused=books.reused,
            image_positions_to_encode=sum(self._positions.values()),
        )

    async def close(self) -> None:
        self._is_stopping = True
        if self._timer is not None:
            self._timer.cancel()
        await asyncio.to_thread(self._thread.shutdown)
        if self._maker is not None:
            self._maker.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the books agree with each other."""
        self.books.check_integrity()
        self.kv.check_integrity()
        assert set(self._positions) == {request.images[0].name for request in self._jobs.values()}
        assert all(self._is_wanted(name) for name in self._pixels)
        self._turns.check_integrity()
        assert set(self._turns) == self._to_ask.keys() <= self._positions.keys()

    # All on the event loop.

    def _ask(self, what: Callable[[], None]) -> None:
        """From the transport's thread."""
        self._loop.call_soon_threadsafe(self._do, what)

    def _do(self, what: Callable[[], None]) -> None:
        what()
        self._advance()

    def _advance(self) -> None:
        """Goes on with everything that can go on, and says what is new."""
        now = time.monotonic()
        self.books.expire(now)
        self.kv.expire(now)
        self._finish_ready()
        self._ask_for_pixels()
        is_busy = self._encoding is not None
        if not is_busy:
            self._encode_next()
        segments, self._ended = self._ended, []
        reports = self.kv.take_reports()
        if segments or reports or not is_busy:
            self._say(segments, reports)
        self._wait_for_expiry(now)

    def _say(self, segments: Sequence[Segment] = (), reports: Sequence[TransferReport] = ()) -> None:
        self._stats = self._count()
        self._emit(segments, None, reports)

    def _finish_ready(self) -> None:
        while self._ready:
            request = self._jobs.pop(self._ready.pop(), None)
            if request is not None and request.export is not None:
                self.kv.offer(request.export.transfer, request.images[0].name)
                self._end(request, Finish("length"))

    def _fail_job(self, generation: bytes, reason: str, retryable: bool) -> None:
        request = self._jobs.pop(generation, None)
        if request is not None and request.export is not None:
            self._end(request, image_fault(reason, retryable=retryable))
            self.kv.end(request.export.transfer)

    def _end(self, request: Submit, terminal: Finish | Fault) -> None:
        self._ended.append(Segment(request.id, None, terminal))
        self._forget(request)

    def _leave(self, request: Submit) -> None:
        assert request.export is not None
        self.kv.end(request.export.transfer)
        self._forget(request)

    def _forget(self, request: Submit) -> None:
        self.books.leave(request.id)
        name = request.images[0].name
        if not any(each.images[0].name == name for each in self._jobs.values()):
            self._positions.pop(name, None)
            self._to_ask.pop(name, None)
            self._turns.discard(name)

    def _is_wanted(self, name: bytes) -> bool:
        image = self.books.find(slot_names(name, 1)[0])
        return image is not None and image.state in ("asked", "queued")

    def _ask_for_pixels(self) -> None:
        self._pixels = {name: pixels for name, pixels in self._pixels.items() if self._is_wanted(name)}
        for wanted in self.books.take_asked():
            self._put_in_turn(wanted)
        while len(self._pixels) < MAX_PIXELS_AT_ONCE and (name := self._turns.first()) is not None:
            self._turns.serve(name, self._positions[name])
            askers = self._to_ask.pop(name)
            if self._is_wanted(name):
                self._pixels[name] = None
                self.books.expect(name, ANSWER_SECONDS)
                for wanted in askers:
                    self._want(wanted)

    def _put_in_turn(self, wanted: ImagesWanted) -> None:
        name, request = wanted.names[0], self._jobs[wanted.generation]
        if name in self._pixels:
            self._want(wanted)
            return
        # It cannot be late before it is asked for.
        self.books.expect(name, math.inf)
        if name not in self._turns:
            self._submitted += 1
            self._turns.put(name, request.lane, request.weight, self._submitted)
        self._to_ask.setdefault(name, []).append(wanted)

    def _encode_next(self) -> None:
        """In the order in which they were asked for."""
        for name, pixels in list(self._pixels.items()):
            if pixels is not None and self._failure is None:
                self._encoding = self.books.begin(name)
                assert self._encoding is not None
                del self._pixels[name]
                self._spoke_at = time.monotonic()
                work = self._loop.run_in_executor(self._thread, self._encode, self._encoding, pixels)
                work.add_done_callback(partial(self._encoded, self._encoding))
                # There is room for the pixels of another one.
                self._ask_for_pixels()
                return

    def _encode(self, image: Image, pixels: bytes) -> None:
        """In the tower's thread."""
        assert self._maker is not None
        self._maker.encode(image.span, pixels, image.slots)

    def _encoded(self, image: Image, work: asyncio.Future[None]) -> None:
        self._encoding = None
        if self._is_stopping:
            work.exception()
            return
        match work.exception():
            case None:
                self.books.complete(image.name)
            case ValueError() as error:
                self.books.broken(image.name, str(error), retryable=False)
            case MemoryError() as error:
                log.warning("too little memory to encode an image of %d positions: %s", image.positions, error)
                self.books.broken(image.name, "the encode worker has too little memory for it")
            case error:
                log.error("the tower failed", exc_info=error)
                self._fail(type(error).__name__)
                return
        self._advance()

    def _fail(self, error: str) -> None:
        self._failure = fault = Fault("engine_failed", f"the tower has failed: {error}", retryable=True)
        jobs, self._jobs = self._jobs, {}
        for request in jobs.values():
            self._leave(request)
        self._emit([Segment(generation, None, fault) for generation in jobs], None)
        self._on_failure()

    def _progressed(self) -> None:
        """Says that a long image goes on. Called by the tower between its layers, not by a timer: a tower that is stuck says nothing."""
        if self._is_stopping:
            raise _StoppedError
        now = time.monotonic()
        if now - self._spoke_at >= PROGRESS_SECONDS:
            self._spoke_at = now
            self._loop.call_soon_threadsafe(self._say)

    def _wait_for_expiry(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        expiry = min(self.books.next_expiry, self.kv.next_expiry)
        if self._jobs and self._encoding is None:
            # Pixels are awaited. The front ends hear that this worker is alive.
            expiry = min(expiry, now + PROGRESS_SECONDS)
        self._timer = None if expiry == math.inf else self._loop.call_later(max(0.0, expiry - now), self._advance)
