"""From the tokenizer that a worker announces to the tokenizer itself."""

from __future__ import annotations

from pathlib import Path

from penstock.text.tokenizers.tokenizer import Tokenizer
from penstock.text.tokenizers.words import WordTokenizer
from penstock.wire.errors import ConfigError

BUILT_IN = "words"


def load_tokenizer(name: str) -> Tokenizer:
    """`words`, a GGUF file or a model directory. Raises ConfigError when the file or directory cannot serve."""
    if name == BUILT_IN:
        return WordTokenizer()
    try:
        # Only a model's own tokenizer needs the libraries that these modules import.
        from penstock.text.tokenizers.gguf_tokenizer import read_gguf_tokenizer
        from penstock.text.tokenizers.model_dir import read_model_dir
    except ImportError as missing:
        raise ConfigError(f"a model's own tokenizer needs the package {missing.name!r}: pip install 'penstock[model]'") from missing
    path = Path(name)
    return read_gguf_tokenizer(path) if path.suffix == ".gguf" else read_model_dir(path)
