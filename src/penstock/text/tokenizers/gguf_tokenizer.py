"""The tokenizer and chat templates in the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from penstock.text.tokenizers.gguf_file import read_gguf
from penstock.text.tokenizers.model_settings import ModelSettings
from penstock.text.tokenizers.source import TokenizerSource
from penstock.text.tokenizers.tokenizer import DEFAULT_TEMPLATE
from penstock.wire.errors import ConfigError

KEY = "tokenizer.ggml"
SPACE = "\u2581"

# How Llama 3 and Qwen 2 split text into words: contractions, letters, digits, punctuation, line ends, spaces.
# They differ in how many digits make a word.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class TokenKind(IntEnum):
    """GGUF's numbers for the kinds of tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class ByteLevelStyle:
    """How a byte-level tokenizer differs from others."""

    pattern: str | None = None
    """How text is split into words. None: as GPT-2 does."""
    single_digits: bool = False
    """Every digit is a word."""
    whole_words_first: bool = False
    """A word that is in the vocabulary becomes that token, without merges."""
    composed: bool = False
    """Text is normalized to NFC."""
    begins: bool = False
    """Whether a prompt starts with the BOS token, if the file does not say."""

    def words(self) -> pre_tokenizers.PreTokenizer:
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        if self.pattern is not None:
            return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(self.pattern), "isolated"), as_bytes])
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), as_bytes]) if self.single_digits else as_bytes


_LLAMA3 = ByteLevelStyle(_WORDS % r"\p{N}{1,3}", whole_words_first=True, begins=True)
_QWEN2 = ByteLevelStyle(_WORDS % r"\p{N}", composed=True)

# The values of `tokenizer.ggml.pre`.
STYLES: Mapping[str, ByteLevelStyle] = {
    "default": ByteLevelStyle(),
    "gpt-2": ByteLevelStyle(),
    "smollm": ByteLevelStyle(single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_gguf_tokenizer(path: Path) -> TokenizerSource:
    """Reads only the header. Raises ConfigError when it has no known tokenizer."""
    metadata = read_gguf(path).metadata
    tokens = metadata.strings(f"{KEY}.tokens")
    definition = _tokenizer(metadata, tokens).to_str()
    return TokenizerSource(definition, _named_tokens(metadata, tokens), _templates(metadata), len(tokens))


def _templates(metadata: ModelSettings) -> dict[str, str]:
    """The default template, and the named ones."""
    key = "tokenizer.chat_template"
    names = metadata.strings("tokenizer.chat_templates") if metadata.has("tokenizer.chat_templates") else []
    named = {name: metadata.text(f"{key}.{name}") for name in names}
    return {**named, DEFAULT_TEMPLATE: metadata.text(key)} if metadata.has(key) else named


def _tokenizer(metadata: ModelSettings, tokens: Sequence[str]) -> Tokenizer:
    kinds = _kinds(metadata, tokens)
    # Unused tokens only fill up the vocabulary: no text becomes one.
    vocabulary = {token: index for index, token in enumerate(tokens) if kinds[index] != TokenKind.UNUSED}
    match metadata.text(f"{KEY}.model"):
        case "gpt2":
            style = _style(metadata)
            tokenizer, begins = _byte_level(metadata, style, vocabulary), style.begins
        case "llama":
            pieces = [token for token, index in vocabulary.items() if kinds[index] == TokenKind.NORMAL]
            tokenizer, begins = _sentence_piece(metadata, vocabulary, pieces), True
        case _:
            raise metadata.wrong(f"{KEY}.model", "'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)")
    tokenizer.add_special_tokens(_added(tokens, kinds, {TokenKind.CONTROL, TokenKind.UNKNOWN}))
    tokenizer.add_tokens(_added(tokens, kinds, {TokenKind.USER_DEFINED}))
    if metadata.flag(f"{KEY}.add_bos_token", begins):
        first = _token(metadata, "bos_token_id", tokens)
        first_id = metadata.integer(f"{KEY}.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(single=[first, "$A"], special_tokens=[(first, first_id)])
    return tokenizer


def _kinds(metadata: ModelSettings, tokens: Sequence[str]) -> Sequence[int]:
    kinds = metadata.integers(f"{KEY}.token_type")
    if len(kinds) != len(tokens):
        raise metadata.wrong(f"{KEY}.token_type", f"one for each of the {len(tokens)} tokens")
    return kinds


def _added(tokens: Sequence[str], kinds: Sequence[int], wanted: set[TokenKind]) -> list[AddedToken]:
    return [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind in wanted and token]


def _style(metadata: ModelSettings) -> ByteLevelStyle:
    style = STYLES.get(metadata.text(f"{KEY}.pre", "default"))
    if style is None:
        raise metadata.wrong(f"{KEY}.pre", f"one of {', '.join(STYLES)}")
    return style


def _byte_level(metadata: ModelSettings, style: ByteLevelStyle, vocabulary: dict[str, int]) -> Tokenizer:
    merges = [_pair(metadata, merge, vocabulary) for merge in metadata.strings(f"{KEY}.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=style.whole_words_first))
    if style.composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = style.words()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(metadata: ModelSettings, merge: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
        raise ConfigError(f"{metadata.source}: {KEY}.merges has {merge!r}: expected two tokens that join to a third token")
    return left, right


def _sentence_piece(metadata: ModelSettings, vocabulary: dict[str, int], pieces: Iterable[str]) -> Tokenizer:
    scores = metadata.numbers(f"{KEY}.scores")
    if len(scores) <= max(vocabulary.values()):
        raise metadata.wrong(f"{KEY}.scores", "one for each token")
    unknown_id = metadata.integer(f"{KEY}.unknown_token_id", 0)
    unknown = next((piece for piece, index in vocabulary.items() if index == unknown_id), None)
    merges = _merges(vocabulary, sorted(pieces, key=lambda piece: -scores[vocabulary[piece]]))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    to_text = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.flag(f"{KEY}.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        to_text.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(to_text)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], best_first: Iterable[str]) -> list[tuple[str, str]]:
    """The merges in order. SentencePiece joins the two pieces that make the piece with the best score."""
    merges = []
    for piece in best_first:
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        merges += [(left, right) for left, right in pairs if left in vocabulary and right in vocabulary]
    return merges


def _named_tokens(metadata: ModelSettings, tokens: Sequence[str]) -> dict[str, str]:
    keys = {"bos_token": "bos_token_id", "pad_token": "padding_token_id", "unk_token": "unknown_token_id"}
    found = {name: _token(metadata, key, tokens) for name, key in keys.items() if metadata.has(f"{KEY}.{key}")}
    return {"eos_token": _token(metadata, "eos_token_id", tokens), **found}


def _token(metadata: ModelSettings, key: str, tokens: Sequence[str]) -> str:
    index = metadata.integer(f"{KEY}.{key}")
    if not 0 <= index < len(tokens):
        raise metadata.wrong(f"{KEY}.{key}", f"an id below {len(tokens)}")
    return tokens[index]
