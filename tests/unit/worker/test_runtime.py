"""The worker runtime: steps go to their owners, wait merged while these are busy, and end with them."""

from __future__ import annotations

import pytest

from penstock.wire.errors import FrameMalformed
from penstock.wire.messages import (
    Cancel,
    Delta,
    Draining,
    Fault,
    Finish,
    Message,
    ModelInfo,
    Ready,
    Segment,
    Step,
    Submit,
    Welcome,
    WorkerStats,
)
from penstock.worker.backend import Emit
from penstock.worker.runtime import FrontEndPort, WorkerRuntime

MODEL = ModelInfo("m", "by hand", "words", 10, 100, 16)
FIRST, SECOND = b"1" * 16, b"2" * 16


class HandDriven:
    """A backend whose steps the test makes."""

    def __init__(self) -> None:
        self.model = MODEL
        self.active: dict[bytes, Submit] = {}
        self.cancelled: list[bytes] = []
        self.emit: Emit | None = None

    async def start(self, emit: Emit) -> None:
        self.emit = emit

    def submit(self, request: Submit) -> None:
        self.active[request.id] = request

    def cancel(self, generation: bytes) -> None:
        if self.active.pop(generation, None) is not None:
            self.cancelled.append(generation)

    def stats(self) -> WorkerStats:
        return WorkerStats(running=len(self.active))

    async def close(self) -> None:
        pass

    def step(self, *segments: Segment) -> None:
        assert self.emit is not None
        for segment in segments:
            if segment.terminal is not None:
                self.active.pop(segment.id, None)
        self.emit(segments)


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


async def test_one_frame_a_step_for_all_its_generations() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), begin(SECOND))
    say(runtime, port, Ready())
    wire.sent.clear()
    backend.step(Segment(FIRST, Delta(0, (5,))), Segment(SECOND, Delta(0, (6,))))
    assert wire.sent == [Step([Segment(FIRST, Delta(0, (5,))), Segment(SECOND, Delta(0, (6,)))], WorkerStats(running=2))]


async def test_steps_merge_until_the_front_end_is_ready() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST))
    for offset in range(5):
        backend.step(Segment(FIRST, Delta(offset, (offset,)), Finish("stop") if offset == 4 else None))
    assert wire.segments() == []
    say(runtime, port, Ready())
    assert wire.segments() == [Segment(FIRST, Delta(0, (0, 1, 2, 3, 4)), Finish("stop"))]
    assert not port.ready


async def test_steps_merge_while_the_socket_is_full() -> None:
    runtime, backend, wire, port = await make()
    wire.takes = False
    say(runtime, port, begin(FIRST), Ready())
    assert not port.writable
    say(runtime, port, Ready())
    backend.step(Segment(FIRST, Delta(0, (1,))))
    backend.step(Segment(FIRST, Delta(1, (2,))))
    assert wire.segments() == []
    runtime.resume(port)
    assert wire.segments() == [Segment(FIRST, Delta(0, (1, 2)))]


async def test_each_front_end_gets_its_own_only() -> None:
    runtime, backend, wire, port = await make()
    other_wire = Wire()
    other = runtime.attach("other", other_wire)
    say(runtime, port, begin(FIRST))
    say(runtime, other, begin(SECOND))
    while not (port.ready and other.ready):
        say(runtime, port, Ready())
        say(runtime, other, Ready())
    backend.step(Segment(FIRST, Delta(0, (5,))), Segment(SECOND, Delta(0, (6,))))
    assert [segment.id for segment in wire.segments()] == [FIRST]
    assert [segment.id for segment in other_wire.segments()] == [SECOND]
    runtime.handle(other, Cancel((FIRST,)))
    assert backend.cancelled == [], "a front end cancelled what is another's"


async def test_a_front_end_that_leaves_has_its_generations_aborted() -> None:
    runtime, backend, _, port = await make()
    other = runtime.attach("other", Wire())
    say(runtime, port, begin(FIRST))
    say(runtime, other, begin(SECOND))
    runtime.detach(port)
    assert backend.cancelled == [FIRST]
    assert list(backend.active) == [SECOND]


async def test_a_cancel_ends_the_generation_and_late_tokens_are_counted() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), Ready())
    say(runtime, port, Ready())
    backend.step(Segment(FIRST, Delta(0, (5,))))
    say(runtime, port, Cancel((FIRST,)), Cancel((FIRST, SECOND)))
    backend.step(Segment(FIRST, Delta(1, (6,))))
    say(runtime, port, Ready())
    assert wire.segments() == [Segment(FIRST, Delta(0, (5,))), Segment(FIRST, None, Finish("cancelled"))]
    assert runtime.late_segments == 1
    assert runtime.is_idle


async def test_an_engine_that_skips_a_token_gets_a_fault_and_hurts_no_other() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), begin(SECOND), Ready())
    backend.step(Segment(FIRST, Delta(0, (1,))), Segment(SECOND, Delta(0, (1,))))
    backend.step(Segment(FIRST, Delta(2, (3,))), Segment(SECOND, Delta(1, (2,))))
    say(runtime, port, Ready())
    say(runtime, port, Ready())
    ended = [segment for segment in wire.segments() if segment.terminal is not None]
    assert [segment.id for segment in ended] == [FIRST]
    assert isinstance(ended[0].terminal, Fault)
    assert ended[0].terminal.code == "stream_breach"
    assert backend.cancelled == [FIRST]
    assert sum(len(s.delta.token_ids) for s in wire.segments() if s.id == SECOND and s.delta) == 2


async def test_draining_refuses_new_work_and_finishes_the_old() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), Ready())
    runtime.drain()
    assert Draining() in wire.sent
    say(runtime, port, begin(SECOND), Ready())
    assert isinstance(wire.segments()[-1].terminal, Fault)
    assert not runtime.is_idle
    backend.step(Segment(FIRST, Delta(0, (1,)), Finish("stop")))
    say(runtime, port, Ready())
    assert wire.segments()[-1].terminal == Finish("stop")
    assert runtime.is_idle


@pytest.mark.parametrize("message", [Draining(), Welcome("w", b"", MODEL), begin(b"short"), Step([], WorkerStats())])
async def test_what_a_front_end_may_not_say_is_refused(message: Message) -> None:
    runtime, _, _, port = await make()
    with pytest.raises(FrameMalformed):
        runtime.handle(port, message)


async def test_an_id_in_use_is_refused() -> None:
    runtime, _, _, port = await make()
    say(runtime, port, begin(FIRST))
    with pytest.raises(FrameMalformed, match="in use"):
        runtime.handle(port, begin(FIRST))


async def test_a_generation_goes_on_from_its_offset() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST, offset=2), Ready())
    say(runtime, port, Ready())
    backend.step(Segment(FIRST, Delta(2, (9,))))
    assert wire.segments() == [Segment(FIRST, Delta(2, (9,)))]
