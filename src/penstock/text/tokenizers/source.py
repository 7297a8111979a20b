"""What a model's tokenizer is made from: read from its files, packed into bytes, named by a fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.text.tokenizers.model_settings import read_settings, read_text
from penstock.text.tokenizers.tokenizer import DEFAULT_TEMPLATE, Tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from penstock.wire.errors import ConfigError

BUILT_IN = "words"
"""The fingerprint of the built-in tokenizer, which needs no files."""

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TokenizerSource(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All that a model's tokenizer is made from, whatever file it was read from.

    `definition` is the text of a `tokenizer.json`, `named_tokens` are those that a template may use by name, `templates` are the chat
    templates by name. `size` is the size of the model's vocabulary, 0 if unknown.
    """

    definition: str
    named_tokens: dict[str, str]
    templates: dict[str, str]
    size: int = 0

    def load(self) -> Tokenizer:
        """Raises ConfigError when no tokenizer can be made from it."""
        try:
            # Only a model's own tokenizer needs the libraries that this module imports.
            from penstock.text.tokenizers.model_tokenizer import ModelTokenizer, read_definition
        except ImportError as missing:
            raise missing_library(missing) from missing
        return ModelTokenizer(read_definition(self.definition), self.named_tokens, self.templates, self.size)


class PackedTokenizer(NamedTuple):
    """A tokenizer's source as bytes, and the hash of them. No path and no file name is part of it."""

    fingerprint: str
    data: bytes = b""

    def load(self) -> Tokenizer:
        """Raises ConfigError when no tokenizer can be made from it."""
        if self.fingerprint == BUILT_IN:
            return WordTokenizer()
        try:
            source = msgspec.msgpack.decode(self.data, type=TokenizerSource)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"the tokenizer {self.fingerprint} cannot be unpacked: {error}") from error
        return source.load()


def pack_tokenizer(model: Path | None) -> PackedTokenizer:
    """The tokenizer of a model directory or GGUF file; None is the built-in one. Raises ConfigError when the files cannot serve."""
    if model is None:
        return PackedTokenizer(BUILT_IN)
    data = msgspec.msgpack.Encoder(order="deterministic").encode(read_source(model))
    return PackedTokenizer(fingerprint(data), data)


def fingerprint(packed: bytes) -> str:
    return hashlib.sha256(packed).hexdigest()


def read_source(model: Path) -> TokenizerSource:
    """The source in a GGUF file or a model directory. Raises ConfigError when there is none."""
    if model.suffix != ".gguf":
        return read_model_dir(model)
    try:
        from penstock.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
    except ImportError as missing:
        raise missing_library(missing) from missing
    return read_gguf_tokenizer(model)


def read_model_dir(directory: Path) -> TokenizerSource:
    """A model directory in Hugging Face's layout: `tokenizer.json`, `tokenizer_config.json` and the chat templates.

    Templates are in `chat_template.jinja`, further ones by name in `additional_chat_templates/`; others are in the settings.
    """
    path = directory / "tokenizer_config.json"
    settings = read_settings(path).values if path.exists() else {}
    named = {name: content for name in NAMED_TOKENS if (content := _content(settings.get(name)))}
    return TokenizerSource(read_text(directory / "tokenizer.json"), named, _templates(directory, settings))


def missing_library(missing: ImportError) -> ConfigError:
    return ConfigError(f"a model's own tokenizer needs the package {missing.name!r}: pip install 'penstock[model]'")


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _templates(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    templates = _configured(directory, settings.get("chat_template"))
    path = directory / "chat_template.jinja"
    if path.exists():
        templates[DEFAULT_TEMPLATE] = read_text(path)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = read_text(path)
    return templates


def _configured(directory: Path, configured: Any) -> dict[str, str]:
    """One template, or several with names."""
    if configured is None:
        return {}
    found: dict[str, str] = {}
    named = [{"name": DEFAULT_TEMPLATE, "template": configured}] if isinstance(configured, str) else configured
    for template in named if isinstance(named, list) else [named]:
        match template:
            case {"name": str(name), "template": str(source)}:
                found[name] = source
            case _:
                raise ConfigError(
                    f"--model {directory}: tokenizer_config.json: chat_template has {str(template)[:200]!r}: expected one template, or an "
                    "array of objects with `name` and `template`"
                )
    return found
