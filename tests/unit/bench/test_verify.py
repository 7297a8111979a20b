"""Verification: what is lost, repeated and reordered is counted exactly, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_model import chat_model
from penstock.backends.simulator import tokens_between
from penstock.bench.stream import Stream
from penstock.bench.verify import Verdict, Verification, Verifier, classify, make_verifier
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from penstock.wire.errors import ConfigError

WORDS = WordTokenizer()
VERIFIER = Verifier(WORDS)
SEEDS = st.integers(0, 2**62)
TOKENS = 64


def made(seed: int) -> list[int]:
    return tokens_between(seed, 0, TOKENS, WORDS.ordinary_ids)


def judged(seed: int, received: list[int], complete: bool = True) -> Verdict:
    return VERIFIER.compare(VERIFIER.expected_text(seed, TOKENS), WORDS.decode(received), complete)


def finished(seed: int, tokens: list[int], usage: int | None) -> Stream:
    stream = Stream(0, seed)
    stream.parts.append(WORDS.decode(tokens))
    stream.completion_tokens, stream.done = usage, True
    return stream


@given(SEEDS)
def test_the_expected_text_is_right(seed: int) -> None:
    assert VERIFIER.expected_text(seed, TOKENS) == WORDS.decode(made(seed))
    assert WORDS.encode(VERIFIER.expected_text(seed, TOKENS)) == made(seed)
    assert judged(seed, made(seed)) == Verdict()


@given(SEEDS, st.sets(st.integers(0, TOKENS - 1), min_size=1))
def test_losses_are_counted(seed: int, places: set[int]) -> None:
    received = [token for place, token in enumerate(made(seed)) if place not in places]
    assert judged(seed, received) == Verdict(lost=len(places))


@given(SEEDS, st.integers(0, TOKENS - 1), st.integers(1, TOKENS))
def test_repeats_are_counted(seed: int, start: int, count: int) -> None:
    tokens = made(seed)
    chunk = tokens[start : start + count]
    assert judged(seed, tokens[:start] + chunk + chunk + tokens[start + count :]) == Verdict(repeated=len(chunk))


@given(st.permutations(range(TOKENS)), st.integers(0, TOKENS - 2))
def test_swapped_neighbours_count_as_one_reordered(tokens: list[int], place: int) -> None:
    swapped = [*tokens[:place], tokens[place + 1], tokens[place], *tokens[place + 2 :]]
    assert classify(tokens, swapped) == Verdict(reordered=1)


@given(st.permutations(range(TOKENS)), st.integers(0, TOKENS - 3), st.data())
def test_swapped_distant_tokens_count_as_two_reordered(tokens: list[int], first: int, data: st.DataObject) -> None:
    second = data.draw(st.integers(first + 2, TOKENS - 1))
    swapped = [*tokens]
    swapped[first], swapped[second] = swapped[second], swapped[first]
    assert classify(tokens, swapped) == Verdict(reordered=2)


@given(st.permutations(range(TOKENS)), st.integers(0, 20), st.integers(1, 20), st.integers(1, 20))
def test_swapped_chunks_count_as_the_shorter_one(tokens: list[int], start: int, first: int, second: int) -> None:
    middle, end = start + first, start + first + second
    swapped = tokens[:start] + tokens[middle:end] + tokens[start:middle] + tokens[end:]
    assert classify(tokens, swapped) == Verdict(reordered=min(first, second))


def test_the_kinds_are_counted_separately() -> None:
    #         1 moved behind 3     4 is lost      6 comes twice
    assert classify([1, 2, 3, 4, 5, 6, 7], [2, 3, 1, 5, 6, 6, 7]) == Verdict(lost=1, repeated=1, reordered=1)


def test_a_token_instead_of_another_is_lost_and_repeated() -> None:
    assert classify([1, 2, 3], [1, 9, 3]) == Verdict(lost=1, repeated=1)


@given(SEEDS, st.integers(0, TOKENS))
def test_a_stream_that_broke_off_is_right_as_far_as_it_came(seed: int, count: int) -> None:
    assert judged(seed, made(seed)[:count], complete=False) == Verdict()
    assert judged(seed, made(seed)[:count]) == Verdict(lost=TOKENS - count)


@given(st.permutations(range(TOKENS)), st.integers(2, TOKENS), st.data())
def test_a_loss_before_it_broke_off_is_counted(tokens: list[int], count: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, count - 2))
    assert classify(tokens, tokens[:lost] + tokens[lost + 1 : count], complete=False) == Verdict(lost=1)


def test_a_wrong_usage_is_a_failure_of_its_own() -> None:
    streams = [finished(1, made(1), TOKENS), finished(2, made(2), TOKENS - 1), finished(3, made(3), None), finished(4, made(4)[1:], TOKENS)]
    assert VERIFIER.verify(streams, TOKENS) == Verification(streams=4, wrong_streams=3, lost=1, usage_mismatch=2)


def test_a_stream_that_failed_has_no_usage_to_be_wrong() -> None:
    failed = finished(1, made(1)[:5], None)
    failed.error = "the connection broke during the answer"
    assert VERIFIER.verify([failed], TOKENS) == Verification(streams=1, incomplete=1)


@pytest.mark.parametrize(
    ("engine", "tokenizer", "message"),
    [
        (None, "", "this server does not name its engine"),
        ("vllm", "words", "this server has the engine 'vllm'"),
        ("simulator", "/no/such/model", "expected 'words' or a fingerprint"),
        ("simulator", "0" * 64, "give its model directory or GGUF file as --tokenizer"),
    ],
)
def test_other_servers_cannot_be_verified(engine: str | None, tokenizer: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_verifier(engine, tokenizer)


def test_a_tokenizer_is_found_in_a_model_directory() -> None:
    verifier = make_verifier("simulator", pack_tokenizer(chat_model()).fingerprint, chat_model())
    tokenizer = pack_tokenizer(chat_model()).load()
    assert verifier.expected_text(3, 9) == tokenizer.decode(tokens_between(3, 0, 9, tokenizer.ordinary_ids))


def test_the_simulator_can_be_verified() -> None:
    assert make_verifier("simulator", "words").expected_text(3, 9) == VERIFIER.expected_text(3, 9)
