"""Merging: associative, lossless, loud."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.stream.slot import MERGE_RULES, Slot, merge, split
from penstock.wire.errors import GapError, OverlapError, UnmergeableError
from penstock.wire.messages import Delta, PromptReport, TokenLogprob

TOKENS = st.lists(st.integers(0, 200_000), max_size=12)


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(-token / 7, ((token, -token / 7), (token + 1, -9.5)))


@st.composite
def runs(draw: st.DrawFn) -> list[Delta]:
    """Deltas that follow each other: with logprobs on all or none, and perhaps a report on the prompt at the first."""
    offset = draw(st.integers(0, 1000))
    with_logprobs = draw(st.booleans())
    report = draw(st.none() | st.builds(PromptReport, st.integers(0, 100), st.none() | st.just((None, logprob(3)))))
    deltas: list[Delta] = []
    for tokens in draw(st.lists(TOKENS, min_size=1, max_size=8)):
        logprobs = tuple(map(logprob, tokens)) if with_logprobs else None
        deltas.append(Delta(offset, tuple(tokens), logprobs, None if deltas else report))
        offset += len(tokens)
    return deltas


def test_every_field_has_a_rule_in_its_place() -> None:
    assert list(MERGE_RULES) == [field.name for field in structs.fields(Delta)]


@given(runs())
def test_nothing_is_lost_repeated_or_reordered(deltas: list[Delta]) -> None:
    merged = merge(deltas)
    assert merged.offset == deltas[0].offset
    assert merged.token_ids == tuple(token for delta in deltas for token in delta.token_ids)
    if deltas[0].logprobs is not None:
        assert merged.logprobs == tuple(map(logprob, merged.token_ids))
    assert merged.prompt == deltas[0].prompt


@given(runs(), st.data())
def test_it_is_associative(deltas: list[Delta], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(deltas)))
    left, right = deltas[:cut], deltas[cut:]
    assert merge([merge(left), *right]) == merge(deltas)
    if right:
        assert merge([*left, merge(right)]) == merge(deltas)


@given(runs(), st.data())
def test_splitting_is_its_inverse(deltas: list[Delta], data: st.DataObject) -> None:
    whole = merge(deltas)
    count = data.draw(st.integers(0, len(whole.token_ids)))
    head, tail = split(whole, count)
    assert len(head.token_ids) == count
    assert merge([head, tail]) == whole


def test_it_shares_nothing_that_can_change() -> None:
    merged = merge([Delta(0, (1,), (logprob(1),)), Delta(1, (2,), (logprob(2),))])
    assert isinstance(merged.token_ids, tuple)
    assert isinstance(merged.logprobs, tuple)


def test_a_gap_raises() -> None:
    with pytest.raises(GapError, match="expected the token at offset 2, got a delta of 1 tokens at offset 3"):
        merge([Delta(0, (1, 2)), Delta(3, (4,))])


def test_an_overlap_raises() -> None:
    with pytest.raises(OverlapError):
        merge([Delta(0, (1, 2)), Delta(1, (2, 3))])


def test_logprobs_on_some_only_raise() -> None:
    with pytest.raises(UnmergeableError, match="logprobs"):
        merge([Delta(0, (1,), (logprob(1),)), Delta(1, (2,))])


def test_a_second_report_on_the_prompt_raises() -> None:
    with pytest.raises(UnmergeableError, match="prompt"):
        merge([Delta(0, (1,)), Delta(1, (2,), None, PromptReport(3))])


@pytest.mark.parametrize("count", [-1, 3])
def test_splitting_beyond_its_tokens_raises(count: int) -> None:
    with pytest.raises(ValueError, match="cannot split"):
        split(Delta(0, (1, 2)), count)


def _deltas(kinds: list[tuple[int, bool, bool]]) -> list[Delta]:
    """Consecutive deltas: how many tokens each has, whether it has logprobs, and whether it reports the prompt."""
    made: list[Delta] = []
    offset = 0
    for tokens, has_logprobs, reports in kinds:
        logprobs = tuple([logprob(1)] * tokens) if has_logprobs else None
        made.append(Delta(offset, tuple(range(offset, offset + tokens)), logprobs, PromptReport(1) if reports else None))
        offset += tokens
    return made


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.booleans()), min_size=1, max_size=200), st.integers(1, 50))
def test_what_a_slot_accepted_can_always_be_taken(kinds: list[tuple[int, bool, bool]], tokens: int) -> None:
    slot = Slot()
    taken: list[int] = []
    for delta in _deltas(kinds):
        before = slot.next_offset
        try:
            slot.put(Delta(before, delta.token_ids, delta.logprobs, delta.prompt))
        except UnmergeableError:
            assert slot.next_offset == before
    while not slot.is_empty:
        part, _ = slot.take(tokens)
        assert part is not None
        taken += part.token_ids
    assert len(taken) == slot.next_offset


@pytest.mark.parametrize("puts", [1_000, 100_000])
def test_tokens_that_nobody_takes_are_merged_only_a_few_times(puts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    merged = 0
    rule = MERGE_RULES["token_ids"]

    def count(deltas: Sequence[Delta]) -> object:
        nonlocal merged
        merged += sum(len(delta.token_ids) for delta in deltas)
        return rule(deltas)

    monkeypatch.setitem(MERGE_RULES, "token_ids", count)
    slot = Slot()
    for offset in range(puts):
        slot.put(Delta(offset, (offset,)))
    delta, _ = slot.take()
    assert delta is not None
    assert delta.token_ids == tuple(range(puts))
    assert merged <= puts * puts.bit_length()
