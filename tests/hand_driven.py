"""A worker's runtime with an engine whose steps the test makes, and the sockets of its front ends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.wire.messages import (
    Fetch,
    KvEvents,
    KvSource,
    Message,
    ModelInfo,
    Segment,
    SessionReport,
    Snapshot,
    Step,
    Submit,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import Emit, WantImages, wants_none
from penstock.worker.runtime import FrontEndPort, WorkerRuntime

MODEL = ModelInfo("m", "by hand", "words", 10, 100, 16)
FIRST, SECOND = b"1" * 16, b"2" * 16


class HandDriven:
    """A backend whose steps the test makes."""

    def __init__(self) -> None:
        self.model = MODEL
        self.active: dict[bytes, Submit] = {}
        self.cancelled: list[bytes] = []
        self.closed_sessions: list[tuple[str, int]] = []
        self.questions: list[asyncio.Future[object]] = []
        self.emit: Emit | None = None
        self.want: WantImages = wants_none
        self.fetches: list[Fetch] = []
        self.ended_transfers: list[bytes] = []
        self.exports = 0
        self.images: list[tuple[object, ...]] = []
        """Answers to what it wanted."""

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        self.emit, self.want = emit, want

    def submit(self, request: Submit) -> None:
        self.active[request.id] = request

    def cancel(self, generation: bytes) -> None:
        if self.active.pop(generation, None) is not None:
            self.cancelled.append(generation)

    def fetch(self, request: Fetch) -> None:
        self.fetches.append(request)

    def end_transfer(self, transfer: bytes) -> None:
        self.ended_transfers.append(transfer)

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        self.images.append((name, size, pixels))

    def image_at(self, name: bytes, source: KvSource) -> None:
        self.images.append((name, source))

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        self.images.append((name, reason, retryable))

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        self.closed_sessions.append((session_id, epoch))

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:
        reports = await self._ask()
        assert isinstance(reports, list)
        return reports

    async def snapshot(self) -> Snapshot | None:
        snapshot = await self._ask()
        assert snapshot is None or isinstance(snapshot, Snapshot)
        return snapshot

    async def _ask(self) -> object:
        """Answered by the test."""
        self.questions.append(asyncio.get_running_loop().create_future())
        return await self.questions[-1]

    def stats(self) -> WorkerStats:
        return WorkerStats(running=len(self.active), exports=self.exports)

    async def close(self) -> None:
        pass

    def step(self, *segments: Segment, events: KvEvents | None = None, transfers: Sequence[TransferReport] = ()) -> None:
        assert self.emit is not None
        for segment in segments:
            if segment.terminal is not None:
                self.active.pop(segment.id, None)
        self.emit(segments, events, transfers)


class Wire:
    """A front end's socket, as far as the runtime sees it."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.takes = True

    def __call__(self, message: Message) -> bool:
        self.sent.append(message)
        return self.takes

    def segments(self) -> list[Segment]:
        return [segment for message in self.sent if isinstance(message, Step) for segment in message.segments]


async def make() -> tuple[WorkerRuntime, HandDriven, Wire, FrontEndPort]:
    backend, wire = HandDriven(), Wire()
    runtime = WorkerRuntime(backend)
    await runtime.start()
    return runtime, backend, wire, runtime.attach("front end", wire)


def say(runtime: WorkerRuntime, port: FrontEndPort, *messages: Message) -> None:
    for message in messages:
        runtime.handle(port, message)
    runtime.flush()


def begin(generation: bytes, offset: int = 0) -> Submit:
    return Submit(generation, (1, 2, 3), 50, 7, offset=offset)
