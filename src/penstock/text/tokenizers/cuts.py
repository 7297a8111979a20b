"""Where a text can be cut so that its parts, tokenized one by one, give the tokens of the whole.

At special tokens: the `tokenizers` library first looks for added tokens, from left to right, the longest first. It tokenizes the pieces
between them independently; only the first piece of a text is treated differently. So a text can be cut before a special token, if the
library finds that token after any text.

At the ends of words, in a long text without special tokens: byte-level BPE never joins what its regular expressions split. They read
from left to right, and may look ahead but not back. They always split after a letter if a digit, a punctuation mark, or a space and
a letter follow. This is checked for each tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken

from penstock.text.tokenizers.vocabulary import is_byte_level_bpe, only_cuts


def separators(added: Collection[AddedToken]) -> tuple[str, ...]:
    """The special tokens that are always found and do not change what stands before them."""
    contents = [token.content for token in added]
    endings = {content[start:] for content in contents for start in range(1, len(content))}
    together = "\0".join(contents)
    return tuple(token.content for token in added if _separates(token, endings, together))


def _separates(token: AddedToken, endings: Collection[str], together: str) -> bool:
    content = token.content
    if not content or not token.special or token.normalized or token.lstrip or token.single_word:
        return False
    # A token before it may take spaces to its right, or require that no word follows.
    if content[0].isspace() or content[0].isalnum() or content[0] == "_":
        return False
    # Another token that contains it, or whose end is its start, could be found in its place.
    return together.count(content) == 1 and not any(content[:length] in endings for length in range(1, len(content) + 1))


def by_first_letter(separators: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Patterns that together find all separators, which never overlap. Each starts with a fixed letter: ten times as fast as one pattern
    for all in a long text."""
    letters: dict[str, list[str]] = {}
    for separator in separators:
        letters.setdefault(separator[0], []).append(separator)
    return tuple(any_of(group) for group in letters.values())


def any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Finds them from left to right, the longest first. Without contents it finds nothing."""
    longest_first = sorted(filter(None, contents), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


SLICE = 16_384
"""Minimum characters per slice: some milliseconds of work."""

MAX_SLICE = 4 * SLICE
"""A slice is cut here even if no word ends. Tokenizing takes a hundred times the slice in memory and cannot be interrupted. The text stays
the same, but the two tokens at such a cut may differ from those of the whole text."""

_LETTERS = "A-Za-z\u0430-\u044f\u0410-\u042f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
CUT = re.compile(rf"[{_LETTERS}](?= [{_LETTERS}]|[0-9,.;:!?\u3002\uff0c\u3001\uff1b\uff1a\uff01\uff1f])")

# A pattern that looks back, or depends on its position, could notice a cut.
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
    """A text, cut into slices to tokenize one by one. Only for tokenizers that `can_slice`."""
    start = 0
    position = SLICE
    while position < len(text):
        # Searches a limited range at a time, so that no search takes long.
        found = CUT.search(text, position, position + SLICE)
        if found is None and position - start < MAX_SLICE:
            position += SLICE - 2
            continue
        end = _forced_cut(text, position) if found is None else found.end()
        yield text[start:end]
        start, position = end, end + SLICE
    yield text[start:]


def _forced_cut(text: str, position: int) -> int:
    """Before the last line or space that is near, so that few words are cut."""
    near = position - SLICE + 2
    return next((cut for mark in ("\n", " ") if (cut := text.rfind(mark, near, position)) > 0), position)


def can_slice(described: Mapping[str, Any], encode: Callable[[str], Sequence[int]]) -> bool:
    """Whether this tokenizer makes the same tokens of the slices as of the whole."""
    if not is_byte_level_bpe(described) or described["model"].get("dropout"):
        return False
    if described["normalizer"] not in (None, {"type": "NFC"}) or not only_cuts(described["pre_tokenizer"]):
        return False
    if any(_LOOKS_BACK.search(pattern) for pattern in _patterns(described["pre_tokenizer"])):
        return False
    if any(map(_is_cut_or_sees_cuts, described["added_tokens"])) or _SEVERAL_WORDS.search("\n".join(described["model"]["vocab"])):
        return False
    return all([*encode(left), *encode(right)] == list(encode(left + right)) for left in _LEFT for right in _RIGHT)


def _patterns(pre_tokenizer: Mapping[str, Any]) -> Iterator[str]:
    for part in pre_tokenizer.get("pretokenizers", ()):
        yield from _patterns(part)
    if pre_tokenizer["type"] == "Split":
        # A plain string could contain a cut. No known tokenizer has one, so it is refused.
        yield pre_tokenizer["pattern"].get("Regex", "^")


def _is_cut_or_sees_cuts(token: Mapping[str, Any]) -> bool:
    content = token["content"]
    return bool(token["lstrip"] or token["rstrip"] or token["single_word"] or any(map(str.isspace, content)) or CUT.search(content))
