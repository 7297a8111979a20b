"""Cumulative engines, made disjoint."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stream.cumulative import CumulativeReader
from penstock.stream.merge import merge
from penstock.wire.errors import OverlapError
from penstock.wire.messages import Delta, TokenLogprob


@given(st.lists(st.integers(0, 9), max_size=30), st.lists(st.integers(0, 30), max_size=10), st.integers(0, 100))
def test_any_cumulative_chunking_gives_the_tokens_once(tokens: list[int], cuts: list[int], offset: int) -> None:
    reader = CumulativeReader(offset)
    deltas = [reader.read(tokens[:cut]) for cut in sorted(cuts)] + [reader.read(tokens)]
    new = [delta for delta in deltas if delta is not None]
    assert (merge(new) if new else Delta(offset, ())) == Delta(offset, tuple(tokens))


def test_a_list_that_the_engine_keeps_growing_is_copied() -> None:
    reader, live = CumulativeReader(), [1, 2]
    first = reader.read(live)
    live += [3]
    assert first == Delta(0, (1, 2))
    assert reader.read(live) == Delta(2, (3,))


def test_logprobs_are_cut_alike() -> None:
    reader = CumulativeReader()
    probs = [TokenLogprob(-1.0), TokenLogprob(-2.0), TokenLogprob(-3.0)]
    reader.read([1], probs[:1])
    assert reader.read([1, 2, 3], probs) == Delta(1, (2, 3), (probs[1], probs[2]))


def test_a_chunk_that_shrinks_is_refused() -> None:
    reader = CumulativeReader()
    reader.read([1, 2, 3])
    with pytest.raises(OverlapError, match="2 tokens came after one of 3"):
        reader.read([1, 2])


def test_a_chunk_that_was_rewritten_is_refused() -> None:
    reader = CumulativeReader()
    reader.read([1, 2])
    with pytest.raises(OverlapError, match="token 9 where 2 came before"):
        reader.read([1, 9, 3])
