"""The embedded engine in a worker: it steps in its own thread, and hands over to the event loop once per step."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from msgspec import structs

from penstock.engine.engine import Engine
from penstock.engine.vision.images import EngineImages
from penstock.kv.feature_moves import FeatureMoves
from penstock.kv.moving import KvEngine, KvTransport, SlotMemory
from penstock.wire.messages import (
    Fault,
    Fetch,
    KvEvents,
    KvSource,
    ModelInfo,
    Segment,
    SessionReport,
    Snapshot,
    Submit,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import PROGRESS_SECONDS, Emit, WantImages, moves_no_kv, wants_none

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class EmbeddedBackend:
    """A `worker.backend.Backend`. `make_engine` loads the model. It is called once, in the engine's thread.

    The model is loaded in the thread that computes: each such thread has its own OpenMP helpers, and with more helpers than cores OpenMP
    puts them to sleep after every operation, which halves the speed.

    The event loop leaves its calls in a queue; the engine's thread runs them before its next step. If the engine is idle, it steps once
    for them. If the engine fails, every generation gets a retryable fault, every open question gets an empty answer, and `on_failure` is
    called: the process must end, since the state of the engine is unknown.
    """

    def __init__(self, model: ModelInfo, make_engine: Callable[[], Engine], on_failure: Callable[[], None]) -> None:
        self.model = model
        self._make_engine = make_engine
        self._on_failure = on_failure
        self._asked: deque[Callable[[Engine], object]] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._failure: Fault | None = None
        self._stats = WorkerStats()
        self._open: set[bytes] = set()
        self._questions: set[asyncio.Future[None]] = set()
        self._thread: threading.Thread | None = None
        self._spoke_at = 0.0
        self.kv: KvEngine | None = None
        """Set when the model is loaded, if its KV can move."""
        self.features: FeatureMoves | None = None
        """Set when the model is loaded, if it reads images. It pulls their features from encode workers."""

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        began = time.monotonic()
        log.info("loading %s", self.model.name)
        self._emit, self._want, self._loop = emit, want, asyncio.get_running_loop()
        loaded: Future[WorkerStats] = Future()
        self._thread = threading.Thread(target=self._run, args=(loaded,), name="engine")
        self._thread.start()
        self._stats = await asyncio.wrap_future(loaded)
        tokens = self._stats.kv_blocks_total * self.model.block_size
        log.info("loaded %s in %.1f s, with room for the KV of %s tokens", self.model.name, time.monotonic() - began, f"{tokens:,}")

    def submit(self, request: Submit) -> None:
        if self._failure is not None:
            self._emit([Segment(request.id, None, self._failure)], None)
            return
        self._open.add(request.id)
        self.ask(lambda engine: engine.submit(request))

    def cancel(self, generation: bytes) -> None:
        self._open.discard(generation)
        self.ask(lambda engine: engine.cancel(generation))

    def fetch(self, request: Fetch) -> None:
        if self._failure is not None:
            self._emit((), None, (moves_no_kv(request),))
            return
        self.ask(lambda engine: engine.transfers.fetch(request))

    def end_transfer(self, transfer: bytes) -> None:
        self.ask(lambda engine: self._end_transfer(engine, transfer))

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:  # noqa: ARG002
        self._ask_images(lambda images: images.add_pixels(name, pixels))

    def image_at(self, name: bytes, source: KvSource) -> None:
        self.ask(lambda _: None if self.features is None else self.features.pull(name, source))

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        self._ask_images(lambda images: images.features.refuse(name, reason, retryable=retryable))

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        self.ask(lambda engine: engine.close_session(session_id, epoch, frees=frees))

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:
        return await self._answer(lambda engine: engine.describe_sessions(session_ids, with_tokens=with_tokens)) or []

    async def snapshot(self) -> Snapshot | None:
        return await self._answer(lambda engine: engine.snapshot())

    def stats(self) -> WorkerStats:
        return self._stats

    async def close(self) -> None:
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._answer_nothing()

    async def _answer(self, question: Callable[[Engine], Answer]) -> Answer | None:
        """The engine's answer; None when it fails or is closed before."""
        if self._failure is not None or self._stopping:
            return None
        answers: list[Answer] = []
        answered = self._loop.create_future()

        def answer(engine: Engine) -> None:
            answers.append(question(engine))
            if not self._stopping:
                self._loop.call_soon_threadsafe(_set, answered)

        self._questions.add(answered)
        self.ask(answer)
        try:
            await answered
        finally:
            self._questions.discard(answered)
        return answers[0] if answers else None

    def _answer_nothing(self) -> None:
        for question in self._questions:
            _set(question)

    def ask(self, what: Callable[[Engine], object]) -> None:
        """Runs this in the engine's thread, before its next step."""
        self._asked.append(what)
        self._wake.set()

    def _end_transfer(self, engine: Engine, transfer: bytes) -> None:
        engine.transfers.end(transfer)
        if self.features is not None:
            self.features.end(transfer)

    def _ask_images(self, what: Callable[[EngineImages], object]) -> None:
        self.ask(lambda engine: None if engine.images is None else what(engine.images))

    def _run(self, loaded: Future[WorkerStats]) -> None:
        loaded.set_running_or_notify_cancel()
        try:
            engine = self._make_engine()
        except Exception as error:  # noqa: BLE001, raised again where the start is awaited
            loaded.set_exception(error)
            return
        engine.model.on_progress = self._progressed
        engine.on_news(self._wake.set)
        if engine.images is not None:
            images, maker = engine.images.features, engine.images.maker
            self.model = structs.replace(self.model, image_fingerprint=maker.fingerprint)
            self.features = FeatureMoves(images, maker.fingerprint, maker.memory, lambda what: self.ask(lambda _: what()))
        if engine.memory is not None:
            self.kv = EmbeddedKv(engine.fingerprint(), engine.memory, self.ask)
        loaded.set_result(engine.stats())
        try:
            while True:
                # Cleared before the queue is read: what is asked for after that sets it again.
                self._wake.clear()
                if self._stopping:
                    break
                self._turn(engine)
        except BaseException as error:
            log.exception("the engine failed")
            fault = Fault("engine_failed", f"the engine has failed: {type(error).__name__}", retryable=True)
            self._loop.call_soon_threadsafe(self._fail, fault)
        finally:
            engine.close()

    def _turn(self, engine: Engine) -> None:
        """Does what was asked for, then one step. With nothing left to do, waits for work or for the end of a lease."""
        while self._asked:
            self._asked.popleft()(engine)
        self._spoke_at = time.monotonic()
        segments = engine.step()
        events, transfers, asked = engine.take_events(), engine.transfers.take_reports(), engine.take_asked()
        if self.features is not None:
            transfers += self.features.take_reports()
        # While stopping, the loop may be closed already, and nobody needs the last step.
        if not self._stopping:
            self._loop.call_soon_threadsafe(self._deliver, segments, events, transfers, engine.stats())
            for wanted in asked:
                self._loop.call_soon_threadsafe(self._want, wanted)
        if not engine.has_work:
            engine.check_idle()
            until_expiry = engine.next_expiry - time.monotonic()
            if engine.awaits_images:
                # The front end hears that the engine is alive.
                until_expiry = min(until_expiry, PROGRESS_SECONDS)
            self._wake.wait(None if until_expiry == math.inf else max(0.0, until_expiry))

    def _progressed(self) -> None:
        """Says that a long step goes on. Called by the engine between the layers of its model, not by a timer: an engine that is stuck says
        nothing."""
        now = time.monotonic()
        if now - self._spoke_at >= PROGRESS_SECONDS and not self._stopping:
            self._spoke_at = now
            self._loop.call_soon_threadsafe(self._emit, (), None, ())

    def _deliver(self, segments: list[Segment], events: KvEvents | None, transfers: list[TransferReport], stats: WorkerStats) -> None:
        self._stats = stats
        self._open.difference_update([segment.id for segment in segments if segment.terminal is not None])
        self._emit(segments, events, transfers)

    def _fail(self, fault: Fault) -> None:
        self._failure = fault
        self._emit([Segment(generation, None, fault) for generation in self._open], None)
        self._open.clear()
        self._answer_nothing()
        self._on_failure()


class EmbeddedKv:
    """A `kv.moving.KvEngine`. Calls of the transport's thread are left for the engine's thread."""

    def __init__(self, fingerprint: bytes, memory: SlotMemory, ask: Callable[[Callable[[Engine], object]], None]) -> None:
        self.fingerprint = fingerprint
        self.memory = memory
        self._ask = ask

    def connect(self, transport: KvTransport) -> None:
        self._ask(lambda engine: engine.connect(transport))

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        self._ask(lambda engine: engine.moves.export(transfer, names, waits=waits))

    def release(self, transfer: bytes) -> None:
        self._ask(lambda engine: engine.moves.release(transfer))

    def arrived(self, transfer: bytes, blocks: int) -> None:
        self._ask(lambda engine: engine.moves.arrived(transfer, blocks))

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        self._ask(lambda engine: engine.moves.pull_ended(transfer, failure))


def _set(answered: asyncio.Future[None]) -> None:
    """Sets it, unless the one who asked has left or was answered."""
    if not answered.done():
        answered.set_result(None)
