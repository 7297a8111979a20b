"""Events cut anywhere are the same events."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.http.sse_lines import EventLines, EventTooLarge

STREAM = (
    b": a comment\r\n\r\n"
    b'data: {"text": "gr\xc3\xb6\xc3\x9fer"}\n\n'
    b"event: other\rdata:no space\r\r"
    b"data: two\r\ndata\r\ndata:  lines\r\n\r\n"
    b"id: 5\n\n"
    b"data: [DONE]\n\n"
    b"data: never ended"
)
EVENTS = [b'{"text": "gr\xc3\xb6\xc3\x9fer"}', b"no space", b"two\n\n lines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    lines, edges = EventLines(1000), [0, *cuts, len(STREAM)]
    found = [event for start, stop in pairwise(edges) for event in lines.feed(STREAM[start:stop])]
    assert found == EVENTS


def test_byte_by_byte() -> None:
    lines = EventLines(1000)
    assert [event for byte in STREAM for event in lines.feed(bytes([byte]))] == EVENTS


@pytest.mark.parametrize("endless", [b"x" * 50, b"data: " + b"x" * 45, b"data: 123456789\n" * 5])
def test_no_more_is_held_than_the_limit(endless: bytes) -> None:
    lines = EventLines(40)
    assert lines.feed(b"data: fits\n\n") == [b"fits"]
    with pytest.raises(EventTooLarge, match="40 bytes"):
        lines.feed(endless)


def seconds(pieces: list[bytes], expected: list[bytes]) -> float:
    """Of the processor's time, to read these events."""
    lines, began = EventLines(2**26), time.process_time()
    events = [event for piece in pieces for event in lines.feed(piece)]
    taken = time.process_time() - began
    assert events == expected
    return taken


def test_a_long_line_is_searched_once() -> None:
    """Each of its pieces is looked at, and not all of them again with each."""
    count, piece = 5000, b"x" * 1000
    of_one_each = seconds([b"data: " + piece + b"\n\n"] * count, [piece] * count)
    assert seconds([b"data: ", *[piece] * count, b"\n\n"], [piece * count]) < 10 * of_one_each


def test_many_lines_at_once_cost_no_more_than_in_pieces() -> None:
    """Each is looked for once, whatever waits behind it."""
    size, expected = 4096, [b"x" * 200] * 10_000
    stream = b"".join([b"data: " + event + b"\n\n" for event in expected])
    in_pieces = seconds([stream[start : start + size] for start in range(0, len(stream), size)], expected)
    assert seconds([stream], expected) < 5 * in_pieces
