"""Server-sent events: the cuts between reads never change the events."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.http.sse import EventReader, EventTooLarge

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
def test_any_cut_of_a_known_stream_gives_the_same_events(cuts: list[int]) -> None:
    reader, edges = EventReader(1000), [0, *cuts, len(STREAM)]
    found = [event for start, stop in pairwise(edges) for event in reader.feed(STREAM[start:stop])]
    assert found == EVENTS


def test_byte_by_byte() -> None:
    reader = EventReader(1000)
    assert [event for byte in STREAM for event in reader.feed(bytes([byte]))] == EVENTS


@pytest.mark.parametrize("endless", [b"x" * 50, b"data: " + b"x" * 45, b"data: 123456789\n" * 5, b"data\n" * 50])
def test_an_event_over_the_limit_raises(endless: bytes) -> None:
    reader = EventReader(40)
    assert reader.feed(b"data: fits\n\n") == [b"fits"]
    with pytest.raises(EventTooLarge, match="40 bytes"):
        reader.feed(endless)


DATA = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=12), max_size=6)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def fed(parts: list[bytes]) -> list[bytes]:
    reader = EventReader()
    return [event for part in parts for event in reader.feed(part)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    return [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]


def cuts(data: bytes) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(data)), max_size=10).map(sorted)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """A stream with any line ends and with lines to ignore, cut anywhere; and its events."""
    events = draw(DATA)
    end = draw(ENDS)
    noise = st.sampled_from(["", f": a comment{end}", f"event: chunk{end}", f"id: 7{end}", end])
    text = "".join(f"{draw(noise)}data: {event}{end}{end}" for event in events)
    data = text.encode()
    return cut(data, draw(cuts(data))), [event.encode() for event in events]


@given(streams())
def test_any_cut_gives_the_same_events(stream: tuple[list[bytes], list[bytes]]) -> None:
    parts, events = stream
    assert fed(parts) == events


@given(st.binary(max_size=60).map(lambda data: data.replace(b"x", b"\ndata:").replace(b"y", b"\r\n")), st.data())
def test_any_cut_of_any_bytes_gives_the_same_events(data: bytes, drawn: st.DataObject) -> None:
    assert fed(cut(data, drawn.draw(cuts(data)))) == fed([data]) == fed([data[index : index + 1] for index in range(len(data))])


@pytest.mark.parametrize(
    ("data", "events"),
    [
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data:a\n\ndata\n\n", [b"a", b""]),
        (b"data:  a \n\n", [b" a "]),
        (b"data: a\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (b"data: never ended\n", []),
        (b": ping\n\nevent: x\n\n", []),
        (b"database: a\n\n", []),
    ],
)
def test_it_follows_the_standard(data: bytes, events: list[bytes]) -> None:
    assert fed([data]) == events
