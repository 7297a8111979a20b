"""The worker runtime: it stands between one backend and the front ends that are connected."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from penstock.stream.outbox import Outbox, Outgoing
from penstock.wire.errors import FrameMalformed, StreamError
from penstock.wire.messages import (
    GENERATION_ID_BYTES,
    Cancel,
    Draining,
    Fault,
    Message,
    ModelInfo,
    Ready,
    Segment,
    Step,
    Submit,
    WorkerStats,
)
from penstock.worker.backend import Backend

log = logging.getLogger(__name__)

Send = Callable[[Message], bool]
"""Writes one frame; says whether the socket could take another at once."""


class FrontEndPort:
    """One connected front end: its outbox, and whether it takes a step now.

    It does when it has said that it is ready for another and its socket has room; else what comes waits, and is merged.
    """

    def __init__(self, name: str, send: Send) -> None:
        self.name = name
        self.outbox = Outbox()
        self._send = send
        self.writable = True
        self.ready = True
        self._sent_stats = WorkerStats()

    def flush(self, stats: WorkerStats) -> None:
        """Sends what waits, if the front end takes it now."""
        if self.ready and self.writable and (self.outbox.waiting or stats != self._sent_stats):
            self._sent_stats = stats
            self.ready = False
            self.writable = self._send(Step(self.outbox.drain(), stats))

    def announce(self, message: Message) -> None:
        self.writable = self._send(message)


class WorkerRuntime:
    """Routes submissions to the backend and each step's results to the front ends that own them.

    A front end that leaves has its generations aborted at once. A generation that breaks the stream's contract ends in a fault.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._ports: list[FrontEndPort] = []
        self._open: dict[bytes, tuple[FrontEndPort, Outgoing]] = {}
        self._draining = False
        self.late_segments = 0

    @property
    def model(self) -> ModelInfo:
        return self._backend.model

    @property
    def is_idle(self) -> bool:
        """No generation runs, and nothing waits to be sent."""
        return not self._open and not any(port.outbox.waiting for port in self._ports)

    async def start(self) -> None:
        await self._backend.start(self._on_step)

    async def close(self) -> None:
        await self._backend.close()

    def attach(self, name: str, send: Send) -> FrontEndPort:
        """A front end has connected."""
        port = FrontEndPort(name, send)
        self._ports.append(port)
        if self._draining:
            port.announce(Draining())
        port.flush(self._backend.stats())
        return port

    def detach(self, port: FrontEndPort) -> None:
        """A front end is gone: nobody will read its generations."""
        self._ports.remove(port)
        for generation in [generation for generation, (owner, _) in self._open.items() if owner is port]:
            del self._open[generation]
            self._backend.cancel(generation)
        self._flush_all()

    def resume(self, port: FrontEndPort) -> None:
        """The front end's socket takes bytes again."""
        port.writable = True
        port.flush(self._backend.stats())

    def drain(self) -> None:
        """Takes no new work from now on; what runs is finished."""
        self._draining = True
        for port in self._ports:
            port.announce(Draining())

    def handle(self, port: FrontEndPort, message: Message) -> None:
        """Acts on what a front end says. Raises FrameMalformed for what it should not have said."""
        match message:
            case Submit():
                self._submit(port, message)
            case Cancel():
                for generation in message.ids:
                    self._cancel(port, generation)
            case Ready():
                port.ready = True
            case _:
                raise FrameMalformed(f"a front end may send Submit, Cancel and Ready, not {type(message).__name__}")

    def flush(self) -> None:
        """To be called once after the messages of one read were handled."""
        self._flush_all()

    def _submit(self, port: FrontEndPort, request: Submit) -> None:
        if len(request.id) != GENERATION_ID_BYTES or request.id in self._open:
            raise FrameMalformed(f"generation id {request.id.hex()} is not {GENERATION_ID_BYTES} bytes, or is in use")
        slot = port.outbox.open(request.id, request.offset)
        if self._draining:
            slot.end(Fault("draining", "the worker is shutting down", retryable=True))
            return
        self._open[request.id] = port, slot
        self._backend.submit(request)

    def _cancel(self, port: FrontEndPort, generation: bytes) -> None:
        # It may have ended while the cancel was on its way; then its terminal is on its way, too.
        owner, slot = self._open.get(generation, (None, None))
        if slot is not None and owner is port:
            del self._open[generation]
            self._backend.cancel(generation)
            slot.cancel()

    def _on_step(self, segments: Sequence[Segment]) -> None:
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
                    del open_generations[segment.id]
            except StreamError as error:
                self._breach(slot, error)
        self._flush_all()

    def _breach(self, slot: Outgoing, error: StreamError) -> None:
        log.error("the engine broke the stream of generation %s: %s", slot.generation.hex(), error)
        del self._open[slot.generation]
        self._backend.cancel(slot.generation)
        slot.end(Fault("stream_breach", f"the engine broke the stream: {error}"))

    def _flush_all(self) -> None:
        stats = self._backend.stats()
        for port in self._ports:
            port.flush(stats)
