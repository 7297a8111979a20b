"""What the simulator must say."""

from __future__ import annotations

from penstock.backends.simulator import tokens_between
from penstock.text.tokenizers.words import WordTokenizer

WORDS = WordTokenizer()


def predicted(seed: int, count: int) -> str:
    """The text of the first `count` tokens of a generation with this seed."""
    return WORDS.decode(tokens_between(seed, 0, count, WORDS.ordinary_ids))
