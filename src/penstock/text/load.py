"""From the tokenizer that a worker announces to the tokenizer itself."""

from __future__ import annotations

from pathlib import Path

from penstock.text.tokenizer import Tokenizer
from penstock.text.words import WordTokenizer

BUILT_IN = "words"


def load_tokenizer(name: str) -> Tokenizer:
    """`words`, or a model directory. Raises ConfigError when the directory cannot serve."""
    if name == BUILT_IN:
        return WordTokenizer()
    # Only a model's own tokenizer needs the libraries that this module imports.
    from penstock.text.model_dir import ModelDirTokenizer

    return ModelDirTokenizer(Path(name))
