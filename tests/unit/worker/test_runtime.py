"""The worker runtime: steps go to their owners, wait merged while these are busy, and end with them."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import structs

from hand_driven import FIRST, MODEL, SECOND, HandDriven, Wire, begin, make, say
from penstock.wire.errors import FrameMalformed
from penstock.wire.messages import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    Cancel,
    CloseSession,
    Delta,
    Draining,
    EndTransfer,
    Export,
    Fault,
    Fetch,
    Finish,
    KvEvents,
    KvSource,
    Message,
    Prompt,
    Ready,
    Segment,
    SessionQuery,
    SessionReport,
    SessionReports,
    Snapshot,
    SnapshotRequest,
    Step,
    Submit,
    TokenLogprob,
    TransferReport,
    Welcome,
    WorkerStats,
)
from penstock.worker.runtime import BEACON_SECONDS, MAX_WAITING_BLOCKS, WorkerRuntime


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


async def turns(count: int = 5) -> None:
    """Lets the tasks that can go on do so."""
    for _ in range(count):
        await asyncio.sleep(0)


def stored(first: int, *counts: int) -> KvEvents:
    """Events that name so many blocks each."""
    return KvEvents(first, tuple([BlocksStored(b"", tuple([bytes(8)] * count)) for count in counts]))


def told(wire: Wire) -> list[KvEvents]:
    return [message.events for message in wire.sent if isinstance(message, Step) and message.events is not None]


async def test_one_frame_a_step_for_all_its_generations() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), begin(SECOND))
    say(runtime, port, Ready())
    wire.sent.clear()
    backend.step(Segment(FIRST, Delta(0, (5,))), Segment(SECOND, Delta(0, (6,))))
    assert wire.sent == [Step([Segment(FIRST, Delta(0, (5,))), Segment(SECOND, Delta(0, (6,)))], WorkerStats(running=2), emits=2)]


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


async def test_an_engine_that_forgets_logprobs_gets_a_fault_and_hurts_no_other() -> None:
    """The two deltas cannot be merged while the front end is busy. All others of that frame arrive."""
    runtime, backend, wire, port = await make()
    third = b"3" * 16
    say(runtime, port, begin(FIRST), begin(SECOND), begin(third))
    port.ready = False
    logprobs = (TokenLogprob(-1.0),)
    backend.step(*[Segment(each, Delta(0, (1,), logprobs)) for each in (SECOND, FIRST, third)])
    backend.step(Segment(SECOND, Delta(1, (2,), logprobs)), Segment(FIRST, Delta(1, (2,))), Segment(third, Delta(1, (2,), logprobs)))
    say(runtime, port, Ready())
    by_id = {segment.id: segment for segment in wire.segments()}
    assert by_id[FIRST].delta == Delta(0, (1,), logprobs)
    terminal = by_id[FIRST].terminal
    assert isinstance(terminal, Fault)
    assert terminal.code == "stream_breach"
    assert all(by_id[each] == Segment(each, Delta(0, (1, 2), logprobs * 2)) for each in (SECOND, third))
    assert backend.cancelled == [FIRST]


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


async def test_events_go_with_the_next_step_and_wait_in_order() -> None:
    runtime, backend, wire, port = await make()
    backend.step(events=stored(3, 1))
    backend.step(events=stored(4, 2, 1))
    backend.step()
    backend.step(events=KvEvents(6, (BlocksRemoved((b"x",)), BlocksCleared())))
    assert told(wire) == [stored(3, 1)], "the front end has not said that it takes another"
    say(runtime, port, Ready())
    assert told(wire)[1:] == [KvEvents(4, (*stored(4, 2, 1).events, BlocksRemoved((b"x",)), BlocksCleared()))]
    say(runtime, port, Ready())
    backend.step()
    assert len(told(wire)) == 2


async def test_too_many_waiting_events_are_dropped_and_the_numbers_tell() -> None:
    runtime, backend, wire, port = await make()
    backend.step(events=stored(0, 1))
    half = MAX_WAITING_BLOCKS // 2
    backend.step(events=stored(1, half))
    backend.step(events=stored(2, 5, half - 5))
    assert not port.ready
    say(runtime, port, Ready())
    assert told(wire)[1:] == [stored(1, half, 5, half - 5)], "just not too many"
    backend.step(events=stored(4, half))
    backend.step(events=stored(5, half))
    backend.step(events=stored(6, 1))
    say(runtime, port, Ready())
    assert told(wire)[2:] == [KvEvents(7, ())], "4 to 6 are missing, and are seen to be, at once"
    backend.step(events=stored(7, 2))
    say(runtime, port, Ready())
    assert told(wire)[3:] == [stored(7, 2)]


async def test_an_engine_that_lost_events_is_no_worse_through_the_runtime() -> None:
    runtime, backend, wire, port = await make()
    backend.step(events=stored(0, 1))
    backend.step(events=stored(1, 1))
    backend.step(events=stored(5, 1, 1))
    say(runtime, port, Ready())
    assert told(wire)[1:] == [stored(5, 1, 1)]


async def test_a_snapshot_comes_before_the_events_behind_it() -> None:
    runtime, backend, wire, port = await make()
    backend.step(events=stored(0, 1))
    say(runtime, port, Ready(), SnapshotRequest(), SnapshotRequest())
    await turns()
    assert len(backend.questions) == 1, "one at a time"
    backend.step(events=stored(1, 1, 1, 1))
    backend.step(Segment(FIRST, None))
    assert told(wire) == [stored(0, 1)]
    snapshot = Snapshot(3, (BlocksStored(b"", (b"a" * 8,)),))
    backend.questions[0].set_result(snapshot)
    await turns()
    assert wire.sent[-2:] == [snapshot, Step([], WorkerStats(), stored(3, 1), emits=4)]
    say(runtime, port, Ready(), SnapshotRequest())
    await turns()
    backend.questions[1].set_result(Snapshot(7, ()))
    await turns()
    # Taken between two steps: what came before it is told after it.
    backend.step(events=stored(4, 1, 1))
    backend.step(events=stored(6, 1, 1))
    assert told(wire)[-1] == stored(7, 1)
    await runtime.close()


async def test_a_snapshot_holds_up_nothing_else_and_may_be_none() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, SnapshotRequest(), begin(FIRST), Ready())
    await turns()
    say(runtime, port, Ready())
    backend.step(Segment(FIRST, Delta(0, (5,))))
    assert wire.segments() == [Segment(FIRST, Delta(0, (5,)))]
    backend.questions[0].set_result(None)
    await turns()
    assert not any(isinstance(message, Snapshot) for message in wire.sent)
    say(runtime, port, Ready())
    backend.step(events=stored(9, 1))
    assert told(wire) == [stored(9, 1)], "nothing is held back any more"
    assert not runtime._tasks


async def test_questions_about_sessions_are_answered_each_with_its_number() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, SessionQuery(7, ("a",)), SessionQuery(8, ("b",)), CloseSession("c", 3))
    assert backend.closed_sessions == [("c", 3)]
    await turns()
    report = SessionReport("b", 1, 2, 3, 0, 5, 6, 7, 8.0)
    backend.questions[1].set_result([report])
    await turns()
    backend.questions[0].set_result([])
    await turns()
    assert wire.sent[-2:] == [SessionReports(8, (report,)), SessionReports(7, ())]
    assert not runtime._tasks


async def test_questions_end_with_their_front_end_and_with_the_runtime() -> None:
    runtime, backend, wire, port = await make()
    other_wire = Wire()
    other = runtime.attach("other", other_wire)
    say(runtime, port, SessionQuery(1, ("a",)), SnapshotRequest())
    say(runtime, other, SessionQuery(2, ("a",)))
    await turns()
    sent = len(wire.sent)
    runtime.detach(port)
    await turns()
    assert [question.cancelled() for question in backend.questions] == [True, True, False]
    await runtime.close()
    assert backend.questions[2].cancelled()
    assert not runtime._tasks
    assert len(wire.sent) == sent


async def test_a_front_end_with_open_generations_hears_of_steps() -> None:
    backend, wire, clock = HandDriven(), Wire(), Clock()
    runtime = WorkerRuntime(backend, clock)
    await runtime.start()
    port = runtime.attach("front end", wire)
    clock.now += 10
    backend.step()
    assert wire.sent == [], "it has nothing that could stall"
    say(runtime, port, begin(FIRST))
    say(runtime, port, Ready())
    wire.sent.clear()
    clock.now += BEACON_SECONDS * 0.9
    backend.step()
    assert wire.sent == []
    clock.now += BEACON_SECONDS * 0.2
    say(runtime, port)
    assert wire.sent == [], "only a step is told as a step"
    backend.step()
    backend.step()
    assert wire.sent == [Step([], WorkerStats(running=1), emits=4)]
    clock.now += BEACON_SECONDS * 2
    backend.step()
    assert len(wire.sent) == 1, "it has not said that it takes another"
    say(runtime, port, Ready())
    backend.step()
    assert len(wire.sent) == 2
    say(runtime, port, Ready(), Cancel((FIRST,)))
    say(runtime, port, Ready())
    wire.sent.clear()
    clock.now += BEACON_SECONDS * 2
    backend.step()
    assert wire.sent == []


async def test_what_is_handed_over_can_go_on_elsewhere() -> None:
    runtime, backend, wire, port = await make()
    say(runtime, port, begin(FIRST), begin(SECOND), Ready())
    backend.step(Segment(FIRST, Delta(0, (5, 6))))
    say(runtime, port, Ready())
    backend.step(Segment(FIRST, Delta(2, (7,))))
    runtime.drain()
    runtime.hand_over()
    assert sorted(backend.cancelled) == [FIRST, SECOND]
    while not runtime.is_idle:
        say(runtime, port, Ready())
    ended = {segment.id: segment.terminal for segment in wire.segments() if segment.terminal is not None}
    assert ended.keys() == {FIRST, SECOND}
    for terminal in ended.values():
        assert isinstance(terminal, Fault)
        assert (terminal.code, terminal.retryable) == ("draining", True)
    tokens = [token for segment in wire.segments() if segment.delta for token in segment.delta.token_ids]
    assert tokens == [5, 6, 7], "what was made is delivered first"
    backend.step(Segment(FIRST, Delta(3, (8,))))
    assert runtime.late_segments == 1
    assert port.open_generations == 0


TRANSFER, OTHER_TRANSFER = b"t" * 16, b"o" * 16


def fetch(transfer: bytes = TRANSFER, token_ids: tuple[int, ...] = (1, 2, 3), prompt: bytes = b"") -> Fetch:
    return Fetch(KvSource(transfer, "unix:/other.kv"), token_ids, 5.0, prompt=prompt)


def reports(wire: Wire) -> list[TransferReport]:
    return [report for message in wire.sent if isinstance(message, Step) for report in message.transfers]


async def test_a_fetch_has_the_tokens_of_the_prompt_that_it_shares() -> None:
    runtime, backend, _, port = await make()
    say(runtime, port, Prompt(b"shared", (1, 2, 3)), fetch(token_ids=(), prompt=b"shared"), fetch(OTHER_TRANSFER, (4,), b"shared"))
    assert [request.token_ids for request in backend.fetches] == [(1, 2, 3), (1, 2, 3, 4)]
    with pytest.raises(FrameMalformed, match="was not sent"):
        say(runtime, port, fetch(b"x" * 16, (), b"unknown"))


async def test_the_owner_of_a_transfer_gets_its_report_with_the_next_step() -> None:
    runtime, backend, wire, port = await make()
    other = Wire()
    runtime.attach("another", other)
    say(runtime, port, fetch())
    done = TransferReport(TRANSFER, "done", 3, 300, 0.1)
    backend.step(transfers=[done])
    assert (reports(wire), reports(other)) == ([], []), "it has not said that it takes a step"
    say(runtime, port, Ready())
    assert (reports(wire), reports(other)) == ([done], [])
    say(runtime, port, Ready(), EndTransfer((TRANSFER,)))
    backend.step(transfers=[done])
    assert reports(wire) == [done], "nobody waits for it any more"


async def test_a_transfer_is_ended_by_its_owner_only_and_when_its_owner_leaves() -> None:
    runtime, backend, _, port = await make()
    other = runtime.attach("another", Wire())
    exporting = Submit(FIRST, (1, 2, 3), 1, 7, export=Export(TRANSFER, 5.0))
    importing = Submit(SECOND, (1, 2, 3), 1, 7, source=KvSource(OTHER_TRANSFER, "unix:/other.kv"))
    say(runtime, port, exporting, importing, fetch(b"f" * 16))
    say(runtime, other, EndTransfer((TRANSFER, OTHER_TRANSFER, b"f" * 16)))
    assert backend.ended_transfers == []
    say(runtime, port, EndTransfer((OTHER_TRANSFER, b"unknown")))
    assert backend.ended_transfers == [OTHER_TRANSFER]
    runtime.detach(port)
    assert sorted(backend.ended_transfers) == sorted([OTHER_TRANSFER, TRANSFER, b"f" * 16])


@pytest.mark.parametrize("transfer", [b"short", TRANSFER])
async def test_a_transfer_id_has_one_owner(transfer: bytes) -> None:
    runtime, _, _, port = await make()
    say(runtime, port, fetch())
    with pytest.raises(FrameMalformed, match="transfer id"):
        say(runtime, runtime.attach("another", Wire()), fetch(transfer))


async def test_a_worker_that_drains_pulls_nothing_and_says_so() -> None:
    runtime, backend, wire, port = await make()
    runtime.drain()
    say(runtime, port, Ready(), fetch())
    assert [report.outcome for report in reports(wire)] == ["failed"]
    assert backend.fetches == []


@pytest.mark.parametrize("leaves", [False, True], ids=["ended", "its front end leaves"])
async def test_the_kv_of_what_is_handed_over_is_owed_until_the_front_end_has_done_with_it(leaves: bool) -> None:
    runtime, backend, _, port = await make()
    backend.model = structs.replace(MODEL, kv_fingerprint=b"same")
    say(runtime, port, begin(FIRST), Ready())
    owed = [runtime.owes_kv]
    runtime.drain()
    runtime.hand_over()
    owed.append(runtime.owes_kv)
    if leaves:
        runtime.detach(port)
    else:
        say(runtime, port, EndTransfer((FIRST,)))
    owed.append(runtime.owes_kv)
    assert backend.ended_transfers == [FIRST]
    backend.exports = 1
    assert [*owed, runtime.owes_kv] == [False, True, False, True], "in the end another worker pulls from here"
