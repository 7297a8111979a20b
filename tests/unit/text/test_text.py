"""Text does not depend on how its tokens were cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from penstock.text.detokenizer import ByteDetokenizer, StopMatcher, TextAssembler, TextPart
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.text.tokenizers.words import WordTokenizer
from tokenizer_kinds import encode_chat

WORDS = WordTokenizer()
TOKEN_IDS = st.lists(st.integers(0, WORDS.vocab_size - 1), max_size=40)
CUTS = st.lists(st.integers(0, 40), max_size=8)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


def pieces(sequence: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(sequence), *(min(cut, len(sequence)) for cut in cuts)})
    return [sequence[start:stop] for start, stop in pairwise(edges)]


@given(st.text())
def test_encoding_and_decoding_are_inverse(text: str) -> None:
    assert WORDS.decode(WORDS.encode(text)) == text


@given(TOKEN_IDS)
def test_generated_words_are_tokens_again(numbers: list[int]) -> None:
    token_ids = [WORDS.ordinary_ids[number % len(WORDS.ordinary_ids)] for number in numbers]
    assert WORDS.encode(WORDS.decode(token_ids)) == token_ids


@given(st.lists(st.integers(0, 255), max_size=30), CUTS)
@example([0xF0, 0x9F, 0x98, 0x80], [1, 2, 3])
@example([0xE2, 0x82, 0x41], [1, 2])
def test_detokenizing_is_the_same_for_any_cut(bytes_: list[int], cuts: list[int]) -> None:
    detokenizer = WORDS.detokenizer()
    text = "".join([detokenizer.feed(piece) for piece in pieces(bytes_, cuts)]) + detokenizer.finish()
    assert text == bytes(bytes_).decode("utf-8", "replace")


def test_incomplete_characters_are_held_back() -> None:
    detokenizer = ByteDetokenizer([b"\xf0\x9f", b"\x98\x80", b"x"])
    assert detokenizer.feed([0]) == ""
    assert detokenizer.feed([1, 2]) == "😀x"
    assert detokenizer.feed([0]) == ""
    assert detokenizer.finish() == "\N{REPLACEMENT CHARACTER}"


def assemble(token_ids: list[int], cuts: list[int], stops: list[str], includes_stop: bool = False) -> TextPart:
    """Fed piece by piece, until it stops, as the front end does."""
    assembler = TextAssembler(WORDS.detokenizer(), stops, includes_stop)
    text, tokens = "", 0
    for piece in pieces(token_ids, cuts):
        part = assembler.feed(piece)
        text, tokens = text + part.text, tokens + part.tokens
        assert part.stopped == (assembler.matched is not None)
        if part.stopped:
            assert assembler.matched in stops
            assert assembler.feed([97]) == assembler.finish() == TextPart("", 0, True)
            return TextPart(text, tokens, True)
    part = assembler.finish()
    return TextPart(text + part.text, tokens, part.stopped)


@given(st.lists(st.sampled_from([97, 98, 10]), max_size=30), CUTS, STOPS)
def test_stop_strings_are_the_same_for_any_cut(token_ids: list[int], cuts: list[int], stops: list[str]) -> None:
    assert assemble(token_ids, cuts, stops) == assemble(token_ids, [], stops)


@given(st.lists(st.sampled_from([97, 98, 10]), max_size=30), STOPS)
def test_a_stop_string_ends_the_text_at_the_token_that_completed_it(token_ids: list[int], stops: list[str]) -> None:
    text = bytes(token_ids).decode()
    ends = {text.find(stop) + len(stop): stop for stop in stops if stop in text}
    part = assemble(token_ids, [], stops)
    if not ends:
        assert part == TextPart(text, len(token_ids), False)
    else:
        end = min(ends)
        assert part.stopped
        assert part.tokens == end
        assert text.startswith(part.text)
        assert any(text[len(part.text) : end] == stop for stop in stops)


@given(st.lists(st.sampled_from([97, 98, 10]), max_size=30), CUTS, STOPS)
def test_a_stop_string_is_included_on_request(token_ids: list[int], cuts: list[int], stops: list[str]) -> None:
    without, including = assemble(token_ids, cuts, stops), assemble(token_ids, cuts, stops, includes_stop=True)
    assert (without.tokens, without.stopped) == (including.tokens, including.stopped)
    assert including.text.startswith(without.text)
    rest = including.text.removeprefix(without.text)
    assert rest in stops if without.stopped else not rest
    assert bytes(token_ids[: including.tokens]).decode() == including.text


def test_the_stop_string_that_ended_a_text_is_named() -> None:
    assembler = TextAssembler(WORDS.detokenizer(), ["never", "END"], includes_stop=True)
    named = [assembler.matched]
    assert assembler.feed(list(b"so EN")) == TextPart("so ", 5, False)
    named.append(assembler.matched)
    assert assembler.feed(list(b"D more")) == TextPart("END", 1, True)
    assert [*named, assembler.matched] == [None, None, "END"]
    assert TextAssembler(WORDS.detokenizer()).matched is None


def test_a_stop_string_across_tokens_is_removed_completely() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("so E") == "so "
    assert matcher.feed("ND more") == ""
    assert matcher.matched == "END"
    assert matcher.feed("and more") == ""


def test_the_start_of_a_stop_string_is_delivered_if_it_does_not_complete() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.feed("E") == ""
    assert matcher.feed("N") == ""
    assert matcher.feed("x") == "ENx"
    assert matcher.feed("EN") == ""
    assert matcher.finish() == "EN"


def test_a_chat_names_its_roles_and_ends_with_the_assistants_turn() -> None:
    token_ids = encode_chat(WORDS, ChatPrompt([{"role": "user", "content": "hello water"}]))
    assert WORDS.decode(token_ids) == "userhello waterassistant"
    assert WORDS.end_id in token_ids
