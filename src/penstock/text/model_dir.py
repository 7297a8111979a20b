"""The tokenizer and chat template of a model directory in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from penstock.text.model_tokenizer import ModelTokenizer
from penstock.wire.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_model_dir(directory: Path) -> ModelTokenizer:
    """`tokenizer.json`, with what `tokenizer_config.json` and `chat_template.jinja` say of it. ConfigError when it cannot serve."""
    settings = _settings(directory)
    tokenizer = tokenizers.Tokenizer.from_str(_read(directory / "tokenizer.json"))
    named = {name: content for name in NAMED_TOKENS if (content := _content(settings.get(name)))}
    return ModelTokenizer(tokenizer, named, _template(directory, settings))


def _content(token: Any) -> str | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


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


def _template(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.exists():
        return _read(path)
    template = settings.get("chat_template")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"--model {directory}: tokenizer_config.json: chat_template is {template!r}: expected one template")
    return template
