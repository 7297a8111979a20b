"""Frames: any message survives any cutting; bytes that are not a message are refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.wire.codec import FrameReader, encode_frame, pack_logprobs
from penstock.wire.errors import FrameMalformed, FrameTooLarge
from penstock.wire.messages import (
    Cancel,
    Challenge,
    Delta,
    Draining,
    Fault,
    Finish,
    Goodbye,
    Hello,
    Message,
    ModelInfo,
    PromptReport,
    Ready,
    Segment,
    Step,
    Submit,
    TokenLogprob,
    Welcome,
    WorkerStats,
)

NUMBERS = st.integers(0, 2**31)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
LOGPROBS = st.builds(TokenLogprob, FLOATS, st.lists(st.tuples(NUMBERS, FLOATS), max_size=3).map(tuple))
DELTAS = st.builds(
    Delta,
    NUMBERS,
    st.lists(NUMBERS, max_size=5).map(tuple),
    st.none() | st.lists(LOGPROBS, max_size=3).map(tuple),
    st.none() | st.builds(PromptReport, NUMBERS, st.none() | st.lists(st.none() | LOGPROBS, max_size=2).map(pack_logprobs)),
)
TERMINALS = st.builds(Finish, st.sampled_from(["stop", "length", "cancelled"])) | st.builds(Fault, st.text(), st.text(), st.booleans())
SEGMENTS = st.builds(Segment, st.binary(min_size=16, max_size=16), st.none() | DELTAS, st.none() | TERMINALS)
MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(Step, st.lists(SEGMENTS, max_size=4), st.builds(WorkerStats, NUMBERS, NUMBERS)),
    st.builds(
        Submit,
        st.binary(min_size=16, max_size=16),
        st.lists(NUMBERS, max_size=9).map(tuple),
        NUMBERS,
        st.integers(0, 2**64 - 1),
        is_seed_drawn=st.booleans(),
    ),
    st.builds(Cancel, st.lists(st.binary(), max_size=3).map(tuple)),
    st.builds(Challenge, NUMBERS, st.binary()),
    st.builds(Hello, NUMBERS, st.text(), st.binary(), st.binary()),
    st.builds(Welcome, st.text(), st.binary(), st.builds(ModelInfo, st.text(), st.text(), st.text(), NUMBERS, NUMBERS, NUMBERS)),
    st.builds(Goodbye, st.text(), st.text()),
    st.just(Draining()),
    st.just(Ready()),
)


@given(st.lists(MESSAGES, max_size=5), st.data())
def test_messages_survive_any_cutting(messages: list[Message], data: st.DataObject) -> None:
    wire = b"".join(map(encode_frame, messages))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=8)))
    reader = FrameReader()
    received = [message for start, stop in zip([0, *cuts], [*cuts, len(wire)], strict=True) for message in reader.feed(wire[start:stop])]
    assert received == messages
    assert reader.feed(encode_frame(Ready())) == [Ready()], "nothing is left in the buffer"


def test_a_frame_over_the_limit_is_refused_when_it_is_announced() -> None:
    reader = FrameReader(limit=100)
    with pytest.raises(FrameTooLarge, match="frame of 101 bytes; the limit is 100"):
        reader.feed((101).to_bytes(4))


@given(st.binary(min_size=1, max_size=60))
def test_random_bytes_are_a_message_or_a_named_error(body: bytes) -> None:
    reader = FrameReader()
    try:
        messages = reader.feed(len(body).to_bytes(4) + body)
    except FrameMalformed as error:
        assert "is not a message" in str(error)
    else:
        assert len(messages) == 1


def test_a_message_of_the_wrong_type_is_malformed() -> None:
    wrong = encode_frame(Cancel((b"x",)))[4:].replace(b"cancel", b"cancer")
    with pytest.raises(FrameMalformed):
        FrameReader().feed(len(wrong).to_bytes(4) + wrong)
