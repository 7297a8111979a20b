"""A model's own tokenizer and chat template, wherever they were read from."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import tokenizers

from penstock.text.detokenizer import ByteDetokenizer, Detokenizer
from penstock.text.tokenizer import ChatMessage
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
        self._decoder = json.loads(definition)["decoder"]
        self._special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
        self.vocab_size = max(size, max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)
        self._pieces = _byte_pieces(tokenizer, self.vocab_size, _is_byte_level(self._decoder))
        self._table = [b"" if index in self._special else piece for index, piece in enumerate(self._pieces)]
        self.ordinary_ids: Sequence[int] = [index for index, piece in enumerate(self._table) if piece]
        self.end_id = self._find_end()
        self.max_token_bytes = max(map(len, self._pieces))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        if self._template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages", code="no_chat_template")
        try:
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._named_tokens)
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

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
