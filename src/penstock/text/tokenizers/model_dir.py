"""The tokenizer and chat template of a model directory in Hugging Face's layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from penstock.text.template import DEFAULT
from penstock.text.tokenizers.model_tokenizer import ModelTokenizer
from penstock.wire.errors import ConfigError

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


def read_model_dir(directory: Path) -> ModelTokenizer:
    """`tokenizer.json`, with what `tokenizer_config.json` says of it, and the chat templates. ConfigError when it cannot serve.

    Templates are in `chat_template.jinja`, further ones by name in `additional_chat_templates/`; what is not there is in the settings.
    """
    settings = _settings(directory)
    tokenizer = tokenizers.Tokenizer.from_str(_read(directory / "tokenizer.json"))
    named = {name: content for name in NAMED_TOKENS if (content := _content(settings.get(name)))}
    return ModelTokenizer(tokenizer, named, _templates(directory, settings))


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


def _templates(directory: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    templates = dict(_configured(directory, settings.get("chat_template")))
    path = directory / "chat_template.jinja"
    if path.exists():
        templates[DEFAULT] = _read(path)
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    return templates


def _configured(directory: Path, templates: Any) -> Iterator[tuple[str, str]]:
    """One template, or several that have names."""
    match templates:
        case None:
            return
        case str():
            yield DEFAULT, templates
        case list():
            for template in templates:
                match template:
                    case {"name": str(name), "template": str(source)}:
                        yield name, source
                    case _:
                        raise _no_template(directory, template)
        case _:
            raise _no_template(directory, templates)


def _no_template(directory: Path, value: Any) -> ConfigError:
    return ConfigError(
        f"--model {directory}: tokenizer_config.json: chat_template has {str(value)[:200]!r}: expected one template, or an array of "
        "objects with `name` and `template`"
    )
