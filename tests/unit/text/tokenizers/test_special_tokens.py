"""Special tokens are shown as text on request, and left out otherwise, for every detokenizer and any cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from penstock.text.detokenizer import MAX_TABLES, ByteDetokenizer, ByteTables, StepDetokenizer
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from tokenizer_kinds import KINDS, byte_level, sentence_piece, tokenizer_of

EVERY_KIND = pytest.mark.parametrize("kind", ["smollm", "qwen", "llama2", "mistral", "gemma", "stepwise", "WordTokenizer"])
NONE: frozenset[str] = frozenset()


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    if isinstance(tokenizer, ModelTokenizer):
        return {tokenizer.token_bytes(index).decode(): index for index in sorted(tokenizer._special)}
    words = WordTokenizer()
    return {token: words.end_id + place for place, token in enumerate(("<|end|>", "<|message|>", "<|role|>"))}


def detokenized(tokenizer: Tokenizer, token_ids: Sequence[int], visible: frozenset[str], skip: bool, step: int) -> str:
    detokenizer = tokenizer.detokenizer(visible, skip)
    pieces = [detokenizer.feed(token_ids[start : start + step]) for start in range(0, len(token_ids), step)]
    return "".join(pieces) + detokenizer.finish()


@EVERY_KIND
def test_only_what_is_visible_is_shown(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    special = special_ids(tokenizer)
    first, second = list(special)[:2]
    water = tokenizer.encode_part("the water")
    token_ids = [special[first], *water, special[second], *water, special[first]]
    for step in (1, 2, len(token_ids)):
        assert detokenized(tokenizer, token_ids, NONE, True, step) == tokenizer.decode(token_ids)
        one = detokenized(tokenizer, token_ids, frozenset({second, "<no such token>"}), True, step)
        assert one == second.join(["the water", one.split(second)[1]])
        assert one.replace(second, "") == tokenizer.decode(token_ids)
        every = detokenized(tokenizer, token_ids, NONE, False, step)
        assert (every.count(first), every.count(second)) == (2, 1)
        assert every == detokenized(tokenizer, token_ids, frozenset({second}), False, step)
        assert every == detokenized(tokenizer, token_ids, frozenset(special), True, step)
        assert every.replace(first, "").replace(second, "").split() == tokenizer.decode(token_ids).split()


@EVERY_KIND
@given(data=st.data())
def test_any_cut_gives_the_same_text(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    special = special_ids(tokenizer)
    ids = st.one_of(st.integers(0, tokenizer.vocab_size - 1), st.sampled_from(list(special.values())))
    token_ids = data.draw(st.lists(ids, max_size=25))
    visible = frozenset(data.draw(st.lists(st.sampled_from(list(special)), max_size=3)))
    skip = data.draw(st.booleans())
    text = detokenized(tokenizer, token_ids, visible, skip, 25)
    assert text == detokenized(tokenizer, token_ids, visible, skip, 1)
    assert text == detokenized(tokenizer, token_ids, visible, skip, data.draw(st.integers(1, 24)))


def test_a_character_that_a_special_token_breaks_off_is_replaced() -> None:
    words = WordTokenizer()
    token_ids = [*"😀".encode()[:2], words.end_id, 97]
    assert detokenized(words, token_ids, frozenset({"<|end|>"}), True, 1) == "\N{REPLACEMENT CHARACTER}<|end|>a"


def test_steps_break_characters_off_as_well() -> None:
    library = byte_level(["</s>"])
    (end,), (letter,) = library.encode("</s>").ids, library.encode("a").ids
    detokenizer = StepDetokenizer(library.decode, {end: "</s>"})
    broken = library.encode("☃").ids[:-1]
    assert [detokenizer.feed([token_id]) for token_id in (*broken, end, letter, end)][-3:] == ["\N{REPLACEMENT CHARACTER}</s>", "a", "</s>"]
    assert detokenizer.finish() == ""


def test_there_are_two_kinds_of_detokenizers() -> None:
    kinds = {"smollm": ByteDetokenizer, "llama2": ByteDetokenizer, "stepwise": StepDetokenizer}
    assert {kind: type(tokenizer_of(kind).detokenizer(frozenset({"</s>"}))) for kind in kinds} == kinds


def test_tables_are_made_once_and_few_are_kept() -> None:
    tables = ByteTables([b"a", b"<x>", b"<y>"], {"<x>": 1, "<y>": 2})
    assert tables.find(NONE, True) is tables.plain
    assert list(tables.plain) == [b"a", b"", b""]
    assert tables.find(frozenset({"<y>"}), True) is tables.find(frozenset({"<y>"}), True)
    assert list(tables.find(frozenset({"<y>"}), True)) == [b"a", b"", b"<y>"]
    assert list(tables.find(NONE, False)) == [b"a", b"<x>", b"<y>"]
    for number in range(5 * MAX_TABLES):
        assert tables.find(frozenset({f"{number}"}), True) is tables.plain
    assert len(tables._tables) == MAX_TABLES


# Filling in the middle.


@pytest.mark.parametrize(
    ("prefix", "suffix", "middle"),
    [
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ],
)
def test_the_middle_is_filled_in(prefix: str, suffix: str, middle: str) -> None:
    library = byte_level(["<s>", "</s>", prefix, suffix, middle])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))])
    tokenizer = ModelTokenizer(library, {"eos_token": "</s>"})
    made = tokenizer.encode_infill("def f(x):\n", "\n  return y")
    assert made is not None
    shown = detokenized(tokenizer, made, NONE, False, 1)
    assert shown == f"<s>{prefix}def f(x):\n{suffix}\n  return y{middle}"


def test_code_llama_puts_no_space_before_the_suffix() -> None:
    library = sentence_piece(["<s>", "</s>", "▁<PRE>", "▁<SUF>", "▁<MID>"], None)
    tokenizer = ModelTokenizer(library, {"eos_token": "</s>"})
    made = tokenizer.encode_infill("the", "water")
    assert made is not None
    before, after, end = (library.token_to_id(token) for token in ("▁<PRE>", "▁<SUF>", "▁<MID>"))
    assert after is not None
    cut = made.index(after)
    assert (made[0], made[-1]) == (before, end)
    assert made[1:cut] == tokenizer.encode_part("the")
    assert b"".join(map(tokenizer.token_bytes, made[cut + 1 : -1])) == b"water"
    assert tokenizer.encode_infill("the", "") == [before, *tokenizer.encode_part("the"), after, end]


def test_codestral_has_the_suffix_first() -> None:
    library = sentence_piece(["<s>", "</s>", "[PREFIX]", "[SUFFIX]"], None)
    tokenizer = ModelTokenizer(library, {"eos_token": "</s>"})
    made = tokenizer.encode_infill("the", "water")
    assert made is not None
    ((suffix,), (prefix,)) = (library.encode(token, add_special_tokens=False).ids for token in ("[SUFFIX]", "[PREFIX]"))
    assert made[0] == suffix
    assert made[made.index(prefix) + 1 :] == tokenizer.encode_part("the")


def test_without_such_tokens_nothing_is_filled_in() -> None:
    for kind in KINDS:
        assert tokenizer_of(kind).encode_infill("a", "b") is None
    partial = ModelTokenizer(byte_level(["</s>", "<fim_prefix>", "<fim_suffix>"]), {"eos_token": "</s>"}, None)
    assert partial.encode_infill("a", "b") is None
