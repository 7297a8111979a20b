"""A model's own tokenizer and chat template, wherever they were read from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from penstock.text.detokenizer import ByteDetokenizer, Detokenizer
from penstock.text.separators import any_of, separators
from penstock.text.tokenizer import Answer, ChatMessage
from penstock.wire.errors import ConfigError, RequestError

# No character has more bytes, so what is incomplete after as many byte tokens will stay so.
LONGEST_CHARACTER = 4

# How a vocabulary without the byte-level alphabet writes single bytes.
BYTE_FALLBACK = re.compile("<0x[0-9A-F]{2}>")


class ModelTokenizer:
    """Text by the `tokenizers` library, the chat template rendered in Jinja's immutable sandbox.

    `named_tokens` are those that the template may use by name; `eos_token` must be one of them. `size` is that of the model's
    vocabulary, where it is known: ids beyond the tokenizer's own are holes.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, named_tokens: Mapping[str, str], template: str | None = None, size: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._named_tokens = named_tokens
        self._template = None if template is None else _compiled(template)
        definition = tokenizer.to_str()
        self.definition: str | None = definition
        described = json.loads(definition)
        self._decoder = described["decoder"]
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, description in added.items() if description.special}
        self._special_texts = any_of(added[token].content for token in self._special)
        # With a fixed length, or special tokens taken for text, the whole is more than its parts.
        whole_only = tokenizer.truncation is not None or tokenizer.padding is not None or tokenizer.encode_special_tokens
        self._separators = () if whole_only else separators(added.values())
        self._cuts = any_of(self._separators)
        self._lost_bytes = _lost_bytes(described)
        self.vocab_size = max(size, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
        self._pieces = _byte_pieces(tokenizer, self.vocab_size, _is_byte_level(self._decoder))
        self._table = [b"" if index in self._special else piece for index, piece in enumerate(self._pieces)]
        self.ordinary_ids: Sequence[int] = [index for index, piece in enumerate(self._table) if piece]
        self.end_id = self._find_end()
        self.max_token_bytes = max(map(len, self._pieces))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.encode_part(self.render_chat(messages))

    def render_chat(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._named_tokens)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def parts(self, rendered: str) -> list[str]:
        edges = [0, *(found.start() for found in self._cuts.finditer(rendered, 1)), len(rendered)]
        return [rendered[start:stop] for start, stop in pairwise(edges)]

    def begins_part(self, rendered: str, position: int) -> bool:
        return rendered.startswith(self._separators, position)

    def encode_part(self, part: str) -> list[int]:
        return list(self._tokenizer.encode(part, add_special_tokens=False).ids)

    def read_answer(self, before: str, token_ids: Sequence[int]) -> Answer | None:
        if not self._separators:
            return None
        if token_ids and token_ids[-1] in self._special:
            token_ids = token_ids[:-1]
        try:
            text = b"".join([self._pieces[token_id] for token_id in token_ids]).decode()
        except UnicodeDecodeError:
            return None
        # What prepends a space to a part would prepend it to this one, too.
        for candidate in dict.fromkeys((text, text.removeprefix(" "))):
            if self._is_answer(before, candidate, token_ids):
                return Answer(candidate, token_ids)
        return None

    def _is_answer(self, before: str, text: str, token_ids: Sequence[int]) -> bool:
        if any(found.end() > len(before) for found in self._special_texts.finditer(before + text)):
            return False
        if self._lost_bytes is not None:
            data = text.encode()
            return len(data.translate(None, self._lost_bytes)) == len(data)
        if not (_is_byte_level(self._decoder) or _is_sentence_piece(self._decoder)):
            return False
        generated = [*self.encode_part(before), *token_ids]
        return self._joined(generated) == self._joined(self.encode_part(before + text))

    def _joined(self, token_ids: Sequence[int]) -> bytes:
        return b"".join([self._table[token_id] for token_id in token_ids])

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def detokenizer(self) -> Detokenizer:
        if _is_byte_level(self._decoder):
            return ByteDetokenizer(self._table)
        if _is_sentence_piece(self._decoder):
            return PieceDetokenizer(self._table, strips=any(part["type"] == "Strip" for part in self._decoder["decoders"]))
        return StepDetokenizer(self._tokenizer)

    def _find_end(self) -> int:
        token = self._named_tokens.get("eos_token")
        found = None if token is None else self._tokenizer.token_to_id(token)
        if found is None:
            raise ConfigError(f"the tokenizer's eos_token is {token!r}: expected a token of the vocabulary")
        return int(found)


class PieceDetokenizer:
    """For SentencePiece vocabularies: every token stands for fixed bytes, but the text's first space only marks a word's beginning."""

    def __init__(self, table: Sequence[bytes], strips: bool) -> None:
        self._bytes = ByteDetokenizer(table)
        self._strips = strips

    def feed(self, token_ids: Sequence[int]) -> str:
        return self._stripped(self._bytes.feed(token_ids))

    def finish(self) -> str:
        return self._stripped(self._bytes.finish())

    def _stripped(self, text: str) -> str:
        if not self._strips or not text:
            return text
        self._strips = False
        return text.removeprefix(" ")


class StepDetokenizer:
    """For tokenizers whose text depends on the tokens around: each token is decoded with those before it.

    The window of tokens begins where text was last complete, so that its cost does not grow with the generation.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._known = 0
        """How many tokens of the window are text already."""

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._step(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._new_text()

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        held = len(self._window) - self._known
        if not text or (text.endswith("\N{REPLACEMENT CHARACTER}") and held < LONGEST_CHARACTER):
            return ""
        self._window = self._window[self._known :]
        self._known = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._known], skip_special_tokens=True)
        after = self._tokenizer.decode(self._window, skip_special_tokens=True)
        return str(after[len(before) :])


def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"the model's chat template is wrong in line {error.lineno}: {error.message}") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return all(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _lost_bytes(described: Mapping[str, Any]) -> bytes | None:
    """Text without special tokens is decoded to itself, but for these bytes, which the vocabulary lacks. None where this is not certain.

    It is certain of byte-level BPE that only cuts text into words.
    """
    model = described["model"]
    if model["type"] != "BPE" or model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    if not _is_byte_level(described["decoder"]) or described["normalizer"] is not None or not _only_cuts(described["pre_tokenizer"]):
        return None
    if any(token["lstrip"] or token["rstrip"] or not token["content"].isascii() for token in described["added_tokens"]):
        return None
    return bytes(byte for letter, byte in _byte_level_alphabet().items() if letter not in model["vocab"])


def _only_cuts(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    match pre_tokenizer:
        case {"type": "Sequence", "pretokenizers": [*first, last]}:
            return all(_loses_nothing(part) for part in first) and _only_cuts(last)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return True
    return False


def _loses_nothing(pre_tokenizer: Mapping[str, Any]) -> bool:
    match pre_tokenizer:
        case {"type": "Digits"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return bool(behavior != "Removed")
    return False


def _is_sentence_piece(decoder: Mapping[str, Any] | None) -> bool:
    """Whether decoding is no more than to join the tokens' bytes, and to strip a space."""
    known = (
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    )
    return decoder is not None and decoder["type"] == "Sequence" and all(part in known for part in decoder["decoders"])


def _byte_pieces(tokenizer: tokenizers.Tokenizer, size: int, byte_level: bool) -> list[bytes]:
    """The bytes of every id; added tokens stand for their own text."""
    added = tokenizer.get_added_tokens_decoder()
    undo = _byte_level_bytes(_byte_level_alphabet()) if byte_level else _sentence_piece_bytes
    pieces = [b""] * size
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        pieces[index] = token.encode() if index in added and not _is_byte_fallback(token) else undo(token)
    return pieces


def _byte_level_bytes(alphabet: Mapping[str, int]) -> Callable[[str], bytes]:
    def undo(token: str) -> bytes:
        foreign = any(character not in alphabet for character in token)
        return token.encode() if foreign else bytes([alphabet[character] for character in token])

    return undo


def _sentence_piece_bytes(token: str) -> bytes:
    return bytes([int(token[3:5], 16)]) if _is_byte_fallback(token) else token.replace("\u2581", " ").encode()


def _is_byte_fallback(token: str) -> bool:
    return BYTE_FALLBACK.fullmatch(token) is not None


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
