"""The tokenizer and chat template of a model directory in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.text.detokenizer import ByteDetokenizer, Detokenizer
from penstock.text.tokenizer import ChatMessage
from penstock.wire.errors import ConfigError, RequestError

try:
    import jinja2
    import jinja2.sandbox
    import tokenizers
except ImportError as missing:
    raise ConfigError(f"a model's own tokenizer needs the package {missing.name!r}: pip install 'penstock[model]'") from missing


# No character has more bytes, so what is incomplete after as many byte tokens will stay so.
LONGEST_CHARACTER = 4


class ModelDirTokenizer:
    """`tokenizer.json` read by the `tokenizers` library, `chat_template` rendered in Jinja's immutable sandbox."""

    def __init__(self, directory: Path) -> None:
        self._settings = _settings(directory)
        source = _read(directory / "tokenizer.json")
        self._tokenizer = tokenizers.Tokenizer.from_str(source)
        self._template = _template(directory, self._settings)
        self._special = {token for token, added in self._tokenizer.get_added_tokens_decoder().items() if added.special}
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self._pieces = _byte_pieces(self._tokenizer, self.vocab_size)
        self._is_byte_level = _is_byte_level(json.loads(source).get("decoder"))
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
            text = self._template.render(messages=messages, add_generation_prompt=True, **self._named_tokens())
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._table) if self._is_byte_level else StepDetokenizer(self._tokenizer)

    def _find_end(self) -> int:
        token = self._settings.get("eos_token")
        content = token.get("content") if isinstance(token, Mapping) else token
        found = self._tokenizer.token_to_id(content) if isinstance(content, str) else None
        if found is None:
            raise ConfigError(f"tokenizer_config.json: eos_token is {token!r}: expected a token of the vocabulary")
        return int(found)

    def _named_tokens(self) -> dict[str, str]:
        tokens = {name: self._settings.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return {name: token["content"] if isinstance(token, Mapping) else token for name, token in tokens.items() if token}


class StepDetokenizer:
    """For tokenizers whose text depends on the tokens around (SentencePiece): each token is decoded with those before it.

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


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--model {path.parent}: cannot read {path.name}: {error.strerror}") from error


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    if not path.exists():
        return {}
    settings = json.loads(_read(path))
    if not isinstance(settings, dict):
        raise ConfigError(f"--model {directory}: tokenizer_config.json is not an object")
    return settings


def _template(directory: Path, settings: Mapping[str, Any]) -> jinja2.Template | None:
    path = directory / "chat_template.jinja"
    source = _read(path) if path.exists() else settings.get("chat_template")
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(source)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return all(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")


def _byte_pieces(tokenizer: tokenizers.Tokenizer, size: int) -> list[bytes]:
    """The bytes of every id, with the byte-level alphabet undone; added tokens stand for their own text."""
    added = tokenizer.get_added_tokens_decoder()
    alphabet = _byte_level_alphabet()
    pieces = [b""] * size
    for token, index in tokenizer.get_vocab(with_added_tokens=True).items():
        if index in added or any(character not in alphabet for character in token):
            pieces[index] = token.replace("\u2581", " ").encode()
        else:
            pieces[index] = bytes([alphabet[character] for character in token])
    return pieces


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
