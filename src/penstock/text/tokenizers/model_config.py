"""What a model directory's config files say that has nothing to do with weights."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.text.tokenizers.settings import ModelSettings
from penstock.wire.errors import ConfigError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def read_settings(path: Path) -> ModelSettings:
    """Raises ConfigError when the file cannot be read, or is no object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model {path.parent}: cannot read {path.name}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--model {path.parent}: {path.name} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--model {path.parent}: {path.name} is not an object")
    return ModelSettings(f"--model {path.parent}: {path.name}", values)


def read_end_ids(directory: Path) -> frozenset[int]:
    """The tokens with which the model ends its text; none where the files name none."""
    end_ids = _end_ids(read_settings(directory / CONFIG))
    if (directory / GENERATION_CONFIG).exists():
        end_ids |= _end_ids(read_settings(directory / GENERATION_CONFIG))
    return end_ids


def read_vocab_size(directory: Path) -> int | None:
    """How many rows the model's scores have; models for text and images have it in a part of their own."""
    settings = read_settings(directory / CONFIG)
    if not settings.has("vocab_size") and isinstance(settings.values.get("text_config"), dict):
        settings = ModelSettings(f"{settings.source}: text_config", settings.values["text_config"])
    return settings.size("vocab_size") if settings.has("vocab_size") else None


def _end_ids(settings: ModelSettings) -> frozenset[int]:
    if not settings.has("eos_token_id"):
        return frozenset()
    if isinstance(settings.values["eos_token_id"], list):
        return frozenset(settings.integers("eos_token_id"))
    return frozenset({settings.integer("eos_token_id")})
