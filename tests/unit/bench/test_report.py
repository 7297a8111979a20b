"""The figures: percentiles, and token rates over time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.bench.plot import token_rates
from penstock.bench.report import first_waits, gaps, percentile, spread
from penstock.bench.stream import Stream


def stream(started: float, reads: list[tuple[float, int]], tokens: int | None) -> Stream:
    made = Stream(0, 0)
    made.started = started
    made.completion_tokens = tokens
    for moment, characters in reads:
        made.parts.append("x" * characters)
        made.times.append(moment)
        made.sizes.append(characters)
    return made


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([1.0, 2.0, 3.0, 5.0], share) for share in (0, 0.5, 1)] == [1, 2.5, 5]
    assert percentile([7.0], 0.99) == 7


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered(values: list[float]) -> None:
    figures = spread(values)
    assert figures is not None
    assert figures.count == len(values)
    shares = [figures.p50, figures.p90, figures.p99, figures.max]
    assert shares == pytest.approx(sorted(shares))


def test_no_values_have_no_percentiles() -> None:
    assert spread([]) is None


def test_waits_and_gaps() -> None:
    streams = [stream(1.0, [(1.5, 3), (1.75, 3), (2.75, 1)], 3), stream(1.0, [], None)]
    assert first_waits(streams) == [0.5]
    assert gaps(streams) == [0.25, 1.0]


def test_token_rates_count_every_token() -> None:
    streams = [stream(0, [(0.05, 10), (0.95, 30)], 8), stream(0, [(1.0, 4)], None)]
    edges, rates = token_rates(streams, 0.0, 1.0)
    assert edges == pytest.approx([index / 10 for index in range(11)])
    assert rates == pytest.approx([20, 0, 0, 0, 0, 0, 0, 0, 0, 70])
