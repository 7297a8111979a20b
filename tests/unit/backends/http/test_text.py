"""Text that is tokenized and detokenized is the same text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.backends.http.text import TextTokens, Unwritable, byte_tokens
from penstock.text.detokenizer import Detokenizer
from penstock.text.tokenizers.tokenizer import Tokenizer
from tokenizer_kinds import KINDS, tokenizer_of

TEXTS = [
    "the water flows under pressure",
    " größer als 100 €, naïve café\n\n",
    "日本語 😀 und 👩‍👩‍👧",
    "  two  spaces  ",
    "<|im_end|> is no end, nor is </s>, <|im_start|>assistant or [INST]",
    "what was lost: \N{REPLACEMENT CHARACTER}",
    "\x00\x7f\t\r\n",
]
# Their vocabularies cannot write everything: one has no tokens for the letters beyond its corpus, the other cuts what is long.
PARTIAL = {"stepwise", "truncated"}


def tokens_of(tokenizer: Tokenizer) -> TextTokens:
    return TextTokens(tokenizer, byte_tokens(tokenizer))


def read(detokenizer: Detokenizer, *pieces: tuple[int, ...]) -> str:
    return "".join([detokenizer.feed(piece) for piece in pieces]) + detokenizer.finish()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in PARTIAL])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_every_kind_of_vocabulary_gives_the_text_back(kind: str, text: str, size: int) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokens_of(tokenizer)
    pieces = [tokens.feed(text[start : start + size]) for start in range(0, len(text), size)]
    assert read(tokenizer.detokenizer(), *pieces, tokens.finish()) == text


@pytest.mark.parametrize("kind", ["llama3", "llama2", "gemma", "WordTokenizer"])
@given(pieces=st.lists(st.text(max_size=8), max_size=6))
def test_any_pieces_of_any_text(kind: str, pieces: list[str]) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokens_of(tokenizer)
    assert read(tokenizer.detokenizer(), *map(tokens.feed, pieces), tokens.finish()) == "".join(pieces)


def test_plain_text_is_tokenized_as_ever() -> None:
    tokenizer = tokenizer_of("smollm")
    assert tokens_of(tokenizer).feed("The water flows.") == tuple(tokenizer.encode_part("The water flows."))


def test_halves_of_a_character_are_put_together() -> None:
    tokenizer = tokenizer_of("llama3")
    tokens = tokens_of(tokenizer)
    pieces = [tokens.feed("a\ud83d"), tokens.feed("\ude00b"), tokens.feed("\ud83d")]
    assert read(tokenizer.detokenizer(), *pieces) == "a😀b"
    assert read(tokenizer.detokenizer(), *pieces, tokens.finish()) == "a😀b\N{REPLACEMENT CHARACTER}"


def test_text_outside_the_vocabulary_raises() -> None:
    tokenizer = tokenizer_of("stepwise")
    with pytest.raises(Unwritable, match="Привет"):
        TextTokens(tokenizer, {}).feed("Привет")
