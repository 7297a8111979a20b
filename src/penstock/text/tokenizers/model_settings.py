"""The settings in a model's files, read with their types. A missing or wrong value is a ConfigError that names it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.wire.errors import ConfigError


class ModelSettings:
    """The values of a config file or GGUF header, by key. Null counts as missing. `source` names the file in errors."""

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        self.source = source
        self.values = values

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._typed(key, default, (int,), "a whole number"))

    def size(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise self.wrong(key, "1 or more")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._typed(key, default, (int, float), "a number"))

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not 0 < value < float("inf"):
            raise self.wrong(key, "a number above 0")
        return value

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._typed(key, default, (bool,), "true or false"))

    def text(self, key: str, default: str | None = None) -> str:
        return str(self._typed(key, default, (str,), "a string"))

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def strings(self, key: str) -> list[str]:
        return self._array(key, str, "an array of strings")

    def integers(self, key: str) -> list[int]:
        return self._array(key, int, "an array of whole numbers")

    def numbers(self, key: str) -> list[float]:
        return self._array(key, float, "an array of numbers")

    def wrong(self, key: str, expected: str) -> ConfigError:
        value = repr(self.values.get(key))
        shown = value if len(value) < 200 else f"{value[:200]}…"
        return ConfigError(f"{self.source}: {key} is {shown}: expected {expected}")

    def _typed(self, key: str, default: object, types: tuple[type, ...], expected: str) -> Any:
        value = self._value(key, default, expected)
        # A bool is an int in Python, but true is not a number.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise self.wrong(key, expected)
        return value

    def _value(self, key: str, default: object, expected: str) -> object:
        value = self.values.get(key)
        if value is not None:
            return value
        if default is None:
            raise ConfigError(f"{self.source}: {key} is missing: expected {expected}")
        return default

    def _array(self, key: str, element: type, expected: str) -> list[Any]:
        value = self._value(key, None, expected)
        if not isinstance(value, list) or not all(isinstance(one, element) for one in value):
            raise self.wrong(key, expected)
        return value


CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def read_text(path: Path) -> str:
    """A file of a model directory. Raises ConfigError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--model {path.parent}: cannot read {path.name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--model {path.parent}: {path.name} is not UTF-8: {error}") from error


def read_settings(path: Path) -> ModelSettings:
    """Raises ConfigError when the file cannot be read or is not a JSON object."""
    try:
        values = json.loads(read_text(path))
    except ValueError as error:
        raise ConfigError(f"--model {path.parent}: {path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--model {path.parent}: {path.name} is not an object")
    return ModelSettings(f"--model {path.parent}: {path.name}", values)


def read_end_ids(directory: Path) -> frozenset[int]:
    """The tokens that end the model's text; empty if the files name none."""
    end_ids = _end_ids(_with_text_settings(read_settings(directory / CONFIG), "eos_token_id"))
    if (directory / GENERATION_CONFIG).exists():
        end_ids |= _end_ids(read_settings(directory / GENERATION_CONFIG))
    return end_ids


def read_vocab_size(directory: Path) -> int | None:
    """How many logits the model has."""
    settings = _with_text_settings(read_settings(directory / CONFIG), "vocab_size")
    return settings.size("vocab_size") if settings.has("vocab_size") else None


def _with_text_settings(settings: ModelSettings, key: str) -> ModelSettings:
    """Where this key is: models for text and images have some in `text_config`."""
    if settings.has(key) or not isinstance(settings.values.get("text_config"), dict):
        return settings
    return ModelSettings(f"{settings.source}: text_config", settings.values["text_config"])


def read_image_token(directory: Path) -> int | None:
    """The token that stands for each position of an image. None if the files name none."""
    settings = read_settings(directory / CONFIG)
    return settings.integer("image_token_id") if settings.has("image_token_id") else None


def _end_ids(settings: ModelSettings) -> frozenset[int]:
    if not settings.has("eos_token_id"):
        return frozenset()
    if isinstance(settings.values["eos_token_id"], list):
        return frozenset(settings.integers("eos_token_id"))
    return frozenset({settings.integer("eos_token_id")})
