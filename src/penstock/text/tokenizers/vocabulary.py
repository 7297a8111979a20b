"""Facts about a vocabulary: the bytes of its tokens, how text becomes tokens, and its tokens for filling in the middle."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import tokenizers

# Single bytes in a vocabulary without the byte-level alphabet.
BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


def is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return all(is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def is_sentence_piece(decoder: Mapping[str, Any] | None) -> bool:
    """Whether decoding only joins the tokens' bytes and strips a space."""
    known = (
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    )
    return decoder is not None and decoder["type"] == "Sequence" and all(part in known for part in decoder["decoders"])


def lost_bytes(described: Mapping[str, Any]) -> bytes | None:
    """The bytes that the vocabulary lacks. All other text without special tokens decodes to itself. None if this is not certain.

    It is certain for byte-level BPE that only splits text into words.
    """
    if not is_byte_level_bpe(described) or described["normalizer"] is not None or not only_cuts(described["pre_tokenizer"]):
        return None
    if any(token["lstrip"] or token["rstrip"] or not token["content"].isascii() for token in described["added_tokens"]):
        return None
    vocabulary = described["model"]["vocab"]
    return bytes(byte for letter, byte in _byte_level_alphabet().items() if letter not in vocabulary)


def is_byte_level_bpe(described: Mapping[str, Any]) -> bool:
    model = described["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    return is_byte_level(described["decoder"])


def only_cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether it splits text into words and changes nothing else."""
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*first, last]}:
            return all(_loses_nothing(part) for part in first) and only_cuts(last)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
    return False


def _loses_nothing(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return bool(kind == "Digits" or (kind == "Split" and pre_tokenizer["behavior"] != "Removed"))


def byte_pieces(tokenizer: tokenizers.Tokenizer, size: int, byte_level: bool) -> list[bytes]:
    """The bytes of every id. Added tokens stand for their own text."""
    added = tokenizer.get_added_tokens_decoder()
    undo = partial(_byte_level_bytes, _byte_level_alphabet()) if byte_level else _sentence_piece_bytes
    pieces = [b""] * size
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        pieces[index] = token.encode() if index in added and not BYTE_FALLBACK.fullmatch(token) else undo(token)
    return pieces


def _byte_level_bytes(alphabet: Mapping[str, int], token: str) -> bytes:
    foreign = any(character not in alphabet for character in token)
    return token.encode() if foreign else bytes([alphabet[character] for character in token])


def _sentence_piece_bytes(token: str) -> bytes:
    return bytes([int(token[3:5], 16)]) if BYTE_FALLBACK.fullmatch(token) else token.replace("\u2581", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """The byte for each printable character of byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


class InfillStyle(NamedTuple):
    """The tokens before prefix and suffix, and which text comes first. `middle` comes last, if the model has such a token."""

    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool = False

    def join(self, prefix: Sequence[int], suffix: Sequence[int]) -> list[int]:
        before, after = [self.prefix, *prefix], [self.suffix, *suffix]
        ending = [] if self.middle is None else [self.middle]
        return [*after, *before, *ending] if self.suffix_first else [*before, *after, *ending]


# The tokens before prefix and suffix, and in the middle.
_KNOWN_INFILL = (
    # StarCoder, Granite, Stable Code, SmolLM
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    # Qwen Coder, CodeGemma
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    # DeepSeek Coder
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    # Code Llama
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    # Codestral: the suffix comes first.
    ("[PREFIX]", "[SUFFIX]"),
)


def find_infill_style(token_id: Callable[[str], int | None]) -> InfillStyle | None:
    """The first known style whose tokens are all in the vocabulary."""
    for tokens in _KNOWN_INFILL:
        match [token_id(token) for token in tokens]:
            case [int(prefix), int(suffix), int(middle)]:
                return InfillStyle(prefix, suffix, middle)
            case [int(prefix), int(suffix)]:
                return InfillStyle(prefix, suffix, None, suffix_first=True)
    return None
