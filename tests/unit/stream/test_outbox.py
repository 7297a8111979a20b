"""The outbox: merged while it waits, cut to what a frame holds, nothing lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stream.outbox import FRAME_TOKENS, Outbox
from penstock.wire.codec import encode_frame, pack_logprobs
from penstock.wire.errors import UnmergeableError
from penstock.wire.messages import Delta, Fault, Finish, PromptReport, Segment, Step, TokenLogprob, WorkerStats


@given(
    steps=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), max_size=8), max_size=12),
    budgets=st.lists(st.integers(1, 40), min_size=1, max_size=12),
)
def test_every_generation_gets_its_tokens_in_order(steps: list[list[tuple[int, int]]], budgets: list[int]) -> None:
    outbox = Outbox()
    slots = [outbox.open(bytes([index])) for index in range(5)]
    put: list[list[int]] = [[] for _ in slots]
    drained: list[list[int]] = [[] for _ in slots]

    def drain(budget: int) -> None:
        segments = outbox.drain(budget)
        assert len({segment.id for segment in segments}) == len(segments)
        for segment in segments:
            got = drained[segment.id[0]]
            if segment.delta is not None:
                assert segment.delta.offset == len(got)
                got += segment.delta.token_ids
            if segment.terminal is not None:
                assert got == put[segment.id[0]], "the terminal overtook its tokens"

    for number, step in enumerate(steps):
        for index, count in step:
            tokens = list(range(len(put[index]), len(put[index]) + count))
            slots[index].put(Delta(len(put[index]), tuple(tokens)))
            put[index] += tokens
        drain(budgets[number % len(budgets)])
    for slot in slots:
        slot.end(Finish("stop"))
    while outbox.waiting:
        drain(7)
    assert drained == put


def test_a_cancelled_generation_ends_and_drops_its_tokens() -> None:
    outbox = Outbox()
    first, second = outbox.open(b"1"), outbox.open(b"2")
    first.put(Delta(0, (1,)))
    second.put(Delta(0, (2,)))
    first.cancel()
    assert outbox.drain() == [Segment(b"1", None, Finish("cancelled")), Segment(b"2", Delta(0, (2,)))]
    assert outbox.drain() == []


def test_a_generation_cancelled_before_its_first_token_ends() -> None:
    outbox = Outbox()
    outbox.open(b"1").cancel()
    assert outbox.drain() == [Segment(b"1", None, Finish("cancelled"))]


def test_a_generation_may_start_in_the_middle() -> None:
    outbox = Outbox()
    outbox.open(b"1", 40).put(Delta(40, (7,)))
    assert outbox.drain() == [Segment(b"1", Delta(40, (7,)))]


@pytest.mark.parametrize(
    "wrong",
    [
        Delta(1, (9,)),  # the one before has logprobs
        Delta(1, (9,), (TokenLogprob(-1.0),), PromptReport(3)),
    ],
)
def test_a_delta_that_cannot_be_merged_is_refused_when_it_is_put(wrong: Delta) -> None:
    """It breaks its own generation. The drain that follows has all others."""
    outbox = Outbox()
    slots = [outbox.open(bytes([number])) for number in range(5)]
    for slot in slots:
        slot.put(Delta(0, (7,), (TokenLogprob(-1.0),)))
    with pytest.raises(UnmergeableError):
        slots[1].put(wrong)
    assert slots[1].next_offset == 1, "an error leaves the slot as it was"
    slots[1].end(Fault("stream_breach", "broken"))
    drained = outbox.drain()
    assert [segment.id for segment in drained] == [slot.generation for slot in slots]
    assert [segment.terminal for segment in drained if segment.terminal] == [Fault("stream_breach", "broken")]
    assert all(segment.delta == Delta(0, (7,), (TokenLogprob(-1.0),)) for segment in drained)


def test_prompt_logprobs_count_as_what_a_frame_holds() -> None:
    """Many prompts with all their logprobs end in the same step: no frame is over its limit, which would end the link."""
    outbox = Outbox()
    entry = TokenLogprob(-1.5, tuple((100_000 + token, -2.5) for token in range(20)))
    report = PromptReport(0, pack_logprobs([entry] * (FRAME_TOKENS // 4)))
    for number in range(12):
        outbox.open(bytes([number])).put(Delta(0, (1,), None, report))
    drained: list[bytes] = []
    while outbox.waiting:
        segments = outbox.drain()
        assert len(segments) <= 4
        encode_frame(Step(segments, WorkerStats()))
        drained += [segment.id for segment in segments]
    assert drained == [bytes([number]) for number in range(12)]
