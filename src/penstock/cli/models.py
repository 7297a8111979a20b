"""Which model `--model` means, and what it is called."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.wire.errors import ConfigError

_QUANTIZATION = re.compile(r"[.-](I?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def model_name(path: Path) -> str:
    """The name of the file or directory, without its ending and its quantization."""
    return path.name if path.is_dir() else _QUANTIZATION.sub("", path.stem)


def find_model(model: Path, *, takes_gguf: bool = False) -> Path:
    """The directory or file itself, or where the hub's library has put the model of this name."""
    if model.is_dir() or (takes_gguf and model.is_file() and model.suffix == ".gguf"):
        return model.resolve()
    if model.exists() or not _HUB_NAME.fullmatch(str(model)):
        what = "is a file" if model.exists() else "does not exist"
        or_gguf = ", a GGUF file" if takes_gguf else ""
        raise ConfigError(f"--model {model} {what}: expected a directory in Hugging Face's layout{or_gguf}, or a model's name there")
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(str(model)))
    except ImportError as missing:
        raise ConfigError(
            f"--model {model} is no directory here, and without the package {missing.name!r} nothing can be fetched"
        ) from missing
    except (OSError, ValueError) as error:
        # All that the library raises is one of these two.
        first_line = str(error).strip().split("\n", 1)[0]
        raise ConfigError(f"--model {model} is no directory here, and could not be fetched: {first_line}") from error
