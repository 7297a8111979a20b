"""Where a long text can be cut so that its tokens stay the same, with no special token near: at the ends of certain words.

Byte-level BPE never joins what its regular expressions cut apart, and those cut from left to right, looking ahead at most. Wherever they
are sure to cut, a text may be cut beforehand. They are after a letter, before a space and a letter, a digit, or a mark that ends a
sentence; that they really are is tried with each tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.text.tokenizers.vocabulary import is_byte_level_bpe, only_cuts

SLICE = 16_384
"""Characters of a slice, at least: some milliseconds of work."""

_LETTERS = "A-Za-z\u0430-\u044f\u0410-\u042f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
CUT = re.compile(rf"[{_LETTERS}](?= [{_LETTERS}]|[0-9,.;:!?\u3002\uff0c\u3001\uff1b\uff1a\uff01\uff1f])")

# What looks back, or asks where it is, could see a cut.
_LOOKS_BACK = re.compile(r"\(\?<|\\[bBAGK]|(?<!\[)\^")

# A token of several words, in the alphabet of byte-level vocabularies.
_SEVERAL_WORDS = re.compile("[A-Za-z]\u0120[A-Za-z]")

_LEFT = (
    "water",
    " the water",
    "\n\nwater",
    "12 water",
    "(water",
    "WATER",
    "waterFlows",
    "don't",
    "x",
    "\u6c34",
    "\u0432\u043e\u0434\u0430",
)
_RIGHT = (" water", " Water flows", " I'm", " \u6c34", ", and", ".\n\nAnd", ".5", "12345", "\u3002\u6c34", ": x", "?!", "; (", ".x", "!'s")


def slices(text: str) -> Iterator[str]:
    """A text, cut into slices that are tokenized one by one. Only for tokenizers that `can_slice`."""
    start = 0
    position = SLICE
    while position < len(text):
        # A piece at a time, so that no search takes long.
        found = CUT.search(text, position, position + SLICE)
        if found is None:
            position += SLICE - 2
        else:
            yield text[start : found.end()]
            start = found.end()
            position = start + SLICE
    yield text[start:]


def can_slice(described: Mapping[str, Any], encode: Callable[[str], Sequence[int]]) -> bool:
    """Whether the tokenizer so described makes the same tokens of slices as of the whole."""
    if not is_byte_level_bpe(described) or described["model"].get("dropout"):
        return False
    if described["normalizer"] not in (None, {"type": "NFC"}) or not only_cuts(described["pre_tokenizer"]):
        return False
    if any(_LOOKS_BACK.search(pattern) for pattern in _patterns(described["pre_tokenizer"])):
        return False
    if any(_is_cut_or_sees_cuts(token) for token in described["added_tokens"]) or _SEVERAL_WORDS.search(
        "\n".join(described["model"]["vocab"])
    ):
        return False
    return all([*encode(left), *encode(right)] == list(encode(left + right)) for left in _LEFT for right in _RIGHT)


def _patterns(pre_tokenizer: Mapping[str, Any]) -> Iterator[str]:
    for part in pre_tokenizer.get("pretokenizers", ()):
        yield from _patterns(part)
    if pre_tokenizer["type"] == "Split":
        # A plain string could contain a cut, and is not needed for the tokenizers there are.
        yield pre_tokenizer["pattern"].get("Regex", "^")


def _is_cut_or_sees_cuts(token: Mapping[str, Any]) -> bool:
    content = token["content"]
    return bool(token["lstrip"] or token["rstrip"] or token["single_word"] or any(map(str.isspace, content)) or CUT.search(content))
