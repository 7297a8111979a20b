"""The worker runtime: it connects one backend with the front ends."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from penstock.stream.outbox import Outbox, Outgoing
from penstock.wire.errors import FrameMalformed, StreamError
from penstock.wire.messages import (
    GENERATION_ID_BYTES,
    TRANSFER_ID_BYTES,
    BlocksCleared,
    Cancel,
    CloseSession,
    Draining,
    DropPrompt,
    EndTransfer,
    Fault,
    Fetch,
    ImagePiece,
    ImageRefused,
    ImageSource,
    ImagesWanted,
    KvEvent,
    KvEvents,
    Message,
    ModelInfo,
    Prompt,
    Ready,
    Segment,
    SessionQuery,
    SessionReports,
    SnapshotRequest,
    Step,
    Submit,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import Backend

if TYPE_CHECKING:
    from penstock.worker.images import WantedImages

log = logging.getLogger(__name__)

Send = Callable[[Message], bool]
"""Writes one frame. Returns whether the socket takes another one at once."""

# A front end with open generations gets a step at least this often, even without new tokens: so it can tell a slow engine from a stalled
# one.
BEACON_SECONDS = 0.5

# Block names that may wait for one front end.
MAX_WAITING_BLOCKS = 65_536


class WaitingEvents:
    """The KV events that wait for one front end: the newest ones, without a gap between them.

    When too many wait, all are dropped. Then an empty KvEvents with the next number tells the front end, which asks for a snapshot.
    From that request until the snapshot is sent, events are held back. Events that the snapshot includes are not sent again.
    """

    def __init__(self, max_blocks: int = MAX_WAITING_BLOCKS) -> None:
        self.max_blocks = max_blocks
        self._first = 0
        self._skipped_to = 0
        self._events: list[KvEvent] = []
        self._blocks = 0
        self._has_dropped = False
        self.is_held = False
        """The front end asked for a snapshot: no events are sent before it."""

    def __bool__(self) -> bool:
        """Whether something may be sent now."""
        return (bool(self._events) or self._has_dropped) and not self.is_held

    def put(self, new: KvEvents, blocks: int) -> None:
        """Adds events that have `blocks` block names in all."""
        if new.first < self._skipped_to:
            new = KvEvents(self._skipped_to, new.events[self._skipped_to - new.first :])
            blocks = count_blocks(new.events)
            if not new.events:
                return
        if new.first != self._first + len(self._events):
            self._drop_before(new.first)
        self._events += new.events
        self._blocks += blocks
        if self._blocks > self.max_blocks:
            self._drop_before(new.first + len(new.events))
            self._has_dropped = True

    def take(self) -> KvEvents | None:
        """The events that wait; None when there are none or they are held back."""
        if not self:
            return None
        taken = KvEvents(self._first, tuple(self._events))
        self._has_dropped = False
        self._drop_before(self._first + len(self._events))
        return taken

    def skip_to(self, number: int) -> None:
        """Events before this number are never sent: the snapshot includes them."""
        self._skipped_to = number
        self._has_dropped = False
        known = number - self._first
        if 0 < known < len(self._events):
            self._first, self._events = number, self._events[known:]
            self._blocks = count_blocks(self._events)
        elif known > 0:
            self._drop_before(number)

    def _drop_before(self, number: int) -> None:
        self._first, self._events, self._blocks = number, [], 0


def _is_fault(segment: Segment) -> bool:
    return segment.delta is None and isinstance(segment.terminal, Fault)


def count_blocks(events: Sequence[KvEvent]) -> int:
    return sum([1 if isinstance(event, BlocksCleared) else len(event.blocks) for event in events])


class FrontEndPort:
    """One connected front end: what waits for it, and whether it takes a step now.

    It takes one when it has said Ready and its socket has room. Otherwise new segments wait and are merged.
    """

    def __init__(self, name: str, send: Send, clock: Callable[[], float]) -> None:
        self.name = name
        self.outbox = Outbox()
        self.events = WaitingEvents()
        self.prompts: dict[bytes, tuple[int, ...]] = {}
        """The prompts that its generations share, by name."""
        self.transfers: list[TransferReport] = []
        """Reports that wait for the next step."""
        self.open_generations = 0
        self.tasks: set[asyncio.Task[None]] = set()
        self.writable = True
        self.ready = True
        self._send = send
        self._clock = clock
        self._sent_stats = WorkerStats()
        self._last_step = clock()
        self._emits = 1

    @property
    def takes_step(self) -> bool:
        return self.ready and self.writable

    def flush(self, stats: WorkerStats) -> None:
        """Sends what waits, if the front end takes a step now."""
        if self.takes_step and (self.outbox.waiting or self.events or self.transfers or stats != self._sent_stats):
            self._send_step(stats)

    def flush_step(self, stats: WorkerStats, *, shows_life: bool) -> None:
        """After a step of the engine: sends what waits, or an empty step when the last one was BEACON_SECONDS ago."""
        self._emits += shows_life
        self.flush(stats)
        if self.open_generations and self.takes_step and self._clock() - self._last_step >= BEACON_SECONDS:
            self._send_step(stats)

    def keep_prompt(self, message: Prompt | DropPrompt) -> None:
        if isinstance(message, Prompt):
            self.prompts[message.name] = message.token_ids
        else:
            self.prompts.pop(message.name, None)

    def announce(self, message: Message) -> None:
        self.writable = self._send(message)

    def _send_step(self, stats: WorkerStats) -> None:
        self._sent_stats = stats
        self._last_step = self._clock()
        self.ready = False
        transfers, self.transfers = self.transfers, []
        self.writable = self._send(Step(self.outbox.drain(), stats, self.events.take(), tuple(transfers), self._emits))


class WorkerRuntime:
    """Routes submissions to the backend and each step's results to the front ends that own them.

    When a front end leaves, its generations are cancelled and its transfers of KV are ended at once; its sessions stay until they expire
    here. A generation that breaks the stream's contract ends in a fault. Tasks wait for slow answers of the engine, so these block nothing.
    """

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self.ports: list[FrontEndPort] = []
        """The connected front ends."""
        self._open: dict[bytes, tuple[FrontEndPort, Outgoing]] = {}
        self._transfers: dict[bytes, FrontEndPort] = {}
        # Generations that others continue: their KV may be pulled from here, under their ids.
        self._handed_over: set[bytes] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._draining = False
        self.late_segments = 0
        self._kv: dict[str, object] = {}
        self._images: WantedImages | None = None

    @property
    def model(self) -> ModelInfo:
        return structs.replace(self._backend.model, **self._kv)

    def move_kv(self, address: str, fingerprint: bytes, block_bytes: int) -> None:
        """Other workers can pull KV from here. Call it before the first front end connects."""
        known = self._backend.model.kv_block_bytes
        self._kv = {"kv_address": address, "kv_fingerprint": fingerprint, "kv_block_bytes": known or block_bytes}

    @property
    def is_idle(self) -> bool:
        """Whether no generation runs and nothing waits to be sent."""
        return not self._open and not any(port.outbox.waiting for port in self.ports)

    @property
    def wanted_images(self) -> int:
        """Images that the backend waits for."""
        return 0 if self._images is None else len(self._images)

    @property
    def open_transfers(self) -> int:
        """Transfers of KV that front ends have begun here and not ended."""
        return len(self._transfers)

    @property
    def has_sessions(self) -> bool:
        """Whether a front end may still move sessions from here, with their KV. It closes those that it has moved."""
        return bool(self.ports and self.model.kv_fingerprint) and self._backend.stats().sessions > 0

    @property
    def owes_kv(self) -> bool:
        """Whether other workers pull KV from here, or may still do so for a generation that was handed over."""
        return bool(self._handed_over) or self._backend.stats().exports > 0

    async def start(self) -> None:
        await self._backend.start(self._on_step, self._want_images)

    async def close(self) -> None:
        """Ends everything that it started, then the backend."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._backend.close()

    def attach(self, name: str, send: Send) -> FrontEndPort:
        """A front end has connected."""
        port = FrontEndPort(name, send, self._clock)
        self.ports.append(port)
        if self._draining:
            port.announce(Draining())
        port.flush(self._stats())
        return port

    def detach(self, port: FrontEndPort) -> None:
        """A front end is gone: its generations are cancelled and its questions are dropped."""
        self.ports.remove(port)
        for task in port.tasks:
            task.cancel()
        for generation in [generation for generation, (owner, _) in self._open.items() if owner is port]:
            self._forget(generation)
            self._backend.cancel(generation)
        self._end_transfers(port, [transfer for transfer, owner in self._transfers.items() if owner is port])
        if self._images is not None:
            self._images.left(port)
        self.flush()

    def resume(self, port: FrontEndPort) -> None:
        """The front end's socket takes bytes again."""
        port.writable = True
        port.flush(self._stats())

    def drain(self) -> None:
        """Takes no new work from now on. Running generations continue."""
        self._draining = True
        for port in self.ports:
            port.announce(Draining())

    def hand_over(self) -> None:
        """Ends running generations with a retryable fault, so that front ends continue them elsewhere. Their tokens are delivered first.
        Their KV can be pulled in transfers with their ids. Each is over when the front end ends it."""
        fault = Fault("draining", "the worker is shutting down and hands its work over", retryable=True)
        for generation, (port, slot) in list(self._open.items()):
            self._forget(generation)
            self._backend.cancel(generation)
            slot.end(fault)
            if self.model.kv_fingerprint:
                self._transfers[generation] = port
                self._handed_over.add(generation)
        self.flush()

    def handle(self, port: FrontEndPort, message: Message) -> None:
        """Acts on a message of a front end. Raises FrameMalformed for a message that front ends do not send."""
        match message:
            case Submit():
                self._submit(port, message)
            case Prompt() | DropPrompt():
                port.keep_prompt(message)
            case Fetch():
                self._fetch(port, message)
            case EndTransfer():
                self._end_transfers(port, message.ids)
            case Cancel():
                self._cancel(port, message.ids)
            case Ready():
                port.ready = True
            case CloseSession():
                self._backend.close_session(message.id, message.epoch, frees=message.frees)
            case SessionQuery():
                self._begin(port, self._describe_sessions(port, message))
            case SnapshotRequest():
                self._begin_snapshot(port)
            case _:
                self._take_image(port, message)

    def flush(self) -> None:
        """Sends what waits. Call it once after the messages of one read were handled."""
        stats = self._stats()
        for port in self.ports:
            port.flush(stats)

    def _stats(self) -> WorkerStats:
        return structs.replace(self._backend.stats(), other_front_ends=len(self.ports) - 1)

    def _submit(self, port: FrontEndPort, request: Submit) -> None:
        if len(request.id) != GENERATION_ID_BYTES or request.id in self._open:
            raise FrameMalformed(f"generation id {request.id.hex()} is not {GENERATION_ID_BYTES} bytes, or is in use")
        if request.prompt:
            request = structs.replace(request, token_ids=self._whole_prompt(port, request))
        slot = port.outbox.open(request.id, request.offset)
        if self._draining:
            slot.end(Fault("draining", "the worker is shutting down", retryable=True))
            return
        self._open[request.id] = port, slot
        port.open_generations += 1
        if request.export is not None:
            self._own_transfer(port, request.export.transfer)
        if request.source is not None:
            self._own_transfer(port, request.source.transfer)
        self._backend.submit(request)

    def _whole_prompt(self, port: FrontEndPort, request: Submit | Fetch) -> tuple[int, ...]:
        """The tokens with those of the shared prompt before them. Without tokens of its own: the one tuple that all share."""
        prompt = port.prompts.get(request.prompt)
        if prompt is None:
            raise FrameMalformed(f"a {type(request).__name__} shares the prompt {request.prompt.hex()}, which was not sent")
        return (*prompt, *request.token_ids) if request.token_ids else prompt

    def _fetch(self, port: FrontEndPort, request: Fetch) -> None:
        if self._draining:
            port.transfers.append(TransferReport(request.source.transfer, "failed", reason="the worker is shutting down"))
            return
        self._own_transfer(port, request.source.transfer)
        if request.prompt:
            request = structs.replace(request, token_ids=self._whole_prompt(port, request))
        self._backend.fetch(request)

    def _own_transfer(self, port: FrontEndPort, transfer: bytes) -> None:
        if len(transfer) != TRANSFER_ID_BYTES or self._transfers.setdefault(transfer, port) is not port:
            raise FrameMalformed(f"transfer id {transfer.hex()} is not {TRANSFER_ID_BYTES} bytes, or belongs to another front end")

    def _end_transfers(self, port: FrontEndPort, ids: Iterable[bytes]) -> None:
        for transfer in ids:
            if self._transfers.get(transfer) is port:
                del self._transfers[transfer]
                self._handed_over.discard(transfer)
                self._backend.end_transfer(transfer)

    def _cancel(self, port: FrontEndPort, ids: Iterable[bytes]) -> None:
        for generation in ids:
            # It may have ended while the cancel was under way; then its terminal is under way as well.
            owner, slot = self._open.get(generation, (None, None))
            if slot is not None and owner is port:
                self._forget(generation)
                self._backend.cancel(generation)
                slot.cancel()

    def _forget(self, generation: bytes) -> None:
        owner, _ = self._open.pop(generation)
        owner.open_generations -= 1
        if self._images is not None:
            self._images.forget(generation)

    def _begin(self, port: FrontEndPort, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"answering {port.name}")
        for tasks in (self._tasks, port.tasks):
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _describe_sessions(self, port: FrontEndPort, query: SessionQuery) -> None:
        reports = await self._backend.describe_sessions(query.ids, with_tokens=query.with_tokens)
        port.announce(SessionReports(query.number, tuple(reports)))

    def _begin_snapshot(self, port: FrontEndPort) -> None:
        # A snapshot that is being made answers this request as well.
        if not port.events.is_held:
            port.events.is_held = True
            self._begin(port, self._send_snapshot(port))

    async def _send_snapshot(self, port: FrontEndPort) -> None:
        try:
            snapshot = await self._backend.snapshot()
            if snapshot is not None:
                port.events.skip_to(snapshot.next_number)
                port.announce(snapshot)
        finally:
            port.events.is_held = False
        port.flush(self._stats())

    def _on_step(self, segments: Sequence[Segment], events: KvEvents | None, transfers: Sequence[TransferReport] = ()) -> None:
        open_generations = self._open
        for segment in segments:
            owned = open_generations.get(segment.id)
            if owned is None:
                self.late_segments += 1
                continue
            slot = owned[1]
            try:
                if segment.delta is not None:
                    slot.put(segment.delta)
                if segment.terminal is not None:
                    slot.end(segment.terminal)
                    self._forget(segment.id)
            except StreamError as error:
                self._breach(slot, error)
        self._note_transfers(transfers)
        if events is not None:
            blocks = count_blocks(events.events)
            for port in self.ports:
                port.events.put(events, blocks)
        # Faults and reports on transfers also come from a backend whose engine hangs: it refuses requests, and gives transfers up.
        shows_life = events is not None or not (segments or transfers) or not all(map(_is_fault, segments))
        stats = self._stats()
        for port in self.ports:
            port.flush_step(stats, shows_life=shows_life)

    def _note_transfers(self, reports: Sequence[TransferReport]) -> None:
        for report in reports:
            # One that its front end has ended meanwhile has nobody to report to.
            if (owner := self._transfers.get(report.id)) is not None:
                owner.transfers.append(report)

    def _want_images(self, wanted: ImagesWanted) -> None:
        if (owned := self._open.get(wanted.generation)) is not None:
            if self._images is None:
                # Imported where it is used: most models read only text.
                from penstock.worker.images import WantedImages

                self._images = WantedImages(self._backend)
            self._images.want(wanted, owned[0])

    def _take_image(self, port: FrontEndPort, message: Message) -> None:
        """Acts on what a front end says of an image that was asked for."""
        images = self._images
        match message:
            case ImagePiece() if images is not None:
                images.take_piece(port, message)
            case ImageSource() if images is not None:
                self._own_transfer(port, message.source.transfer)
                if images.take_answer(port, message.name):
                    self._backend.image_at(message.name, message.source)
                else:
                    port.transfers.append(TransferReport(message.source.transfer, "failed", reason="nobody waits for this image"))
            case ImageRefused() if images is not None:
                images.refuse(port, message)
            case _:
                raise FrameMalformed(f"a front end must not send {type(message).__name__}")

    def _breach(self, slot: Outgoing, error: StreamError) -> None:
        log.error("the engine broke the stream of generation %s: %s", slot.generation.hex(), error)
        self._forget(slot.generation)
        self._backend.cancel(slot.generation)
        slot.end(Fault("stream_breach", f"the engine broke the stream: {error}"))
