"""Server-sent events: however the bytes are cut, the payloads are the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.sse import EventParser

PAYLOADS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=12), max_size=6)
ENDS = st.sampled_from(["\n", "\r\n", "\r"])


def fed(parts: list[bytes]) -> list[bytes]:
    parser = EventParser()
    return [payload for part in parts for payload in parser.feed(part)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    return [data[start:stop] for start, stop in zip([0, *places], [*places, len(data)], strict=True)]


def cuts(data: bytes) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(data)), max_size=10).map(sorted)


@st.composite
def events(draw: st.DrawFn) -> tuple[list[bytes], list[bytes]]:
    """A stream of events with any line ends and things to ignore, cut anywhere; and its payloads."""
    payloads = draw(PAYLOADS)
    end = draw(ENDS)
    noise = st.sampled_from(["", f": a comment{end}", f"event: chunk{end}", f"id: 7{end}", end])
    text = "".join(f"{draw(noise)}data: {payload}{end}{end}" for payload in payloads)
    data = text.encode()
    return cut(data, draw(cuts(data))), [payload.encode() for payload in payloads]


@given(events())
def test_any_cut_gives_the_same_payloads(stream: tuple[list[bytes], list[bytes]]) -> None:
    parts, payloads = stream
    assert fed(parts) == payloads


@given(st.binary(max_size=60).map(lambda data: data.replace(b"x", b"\ndata:").replace(b"y", b"\r\n")), st.data())
def test_any_cut_of_any_bytes_gives_the_same_payloads(data: bytes, drawn: st.DataObject) -> None:
    assert fed(cut(data, drawn.draw(cuts(data)))) == fed([data]) == fed([data[index : index + 1] for index in range(len(data))])


@pytest.mark.parametrize(
    ("data", "payloads"),
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
def test_it_follows_the_standard(data: bytes, payloads: list[bytes]) -> None:
    assert fed([data]) == payloads
