"""The header of a GGUF file: its metadata, and where its tensors are. Reads no tensor.

The gguf library makes a numpy object of every string. That takes seconds for a vocabulary; this takes a tenth.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.text.tokenizers.model_settings import ModelSettings
from penstock.wire.errors import ConfigError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMENSIONS = 4

# The type numbers of GGUF metadata.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor is. `dimensions` are in the file's order, the fastest first. `kind` is GGUF's number for its type."""

    name: str
    dimensions: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """The header. Tensor offsets count from the start of the file."""

    path: Path
    metadata: ModelSettings
    tensors: tuple[GgufTensor, ...]


def read_gguf(path: Path) -> GgufFile:
    """Raises ConfigError for a file that cannot be read or is not a known GGUF version."""
    try:
        if path.stat().st_size == 0:
            raise ConfigError(f"--model {path}: the file is empty: expected a GGUF model")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _header(path, _Cursor(path, data))
    except OSError as error:
        raise ConfigError(f"--model {path}: cannot read it: {error.strerror}") from error


def _header(path: Path, cursor: _Cursor) -> GgufFile:
    if cursor.take(len(MAGIC)) != MAGIC:
        cursor.fail("does not begin with 'GGUF': expected a GGUF model")
    version = cursor.number("I")
    if version not in VERSIONS:
        cursor.fail(f"GGUF version is {version}: expected one of {', '.join(map(str, VERSIONS))}, little-endian")
    tensor_count, value_count = cursor.number("Q"), cursor.number("Q")
    metadata = ModelSettings(f"--model {path}", dict(cursor.pair() for _ in range(value_count)))
    if metadata.integer("split.count", 1) > 1:
        raise metadata.wrong("split.count", "1: a model in one file (llama-gguf-split --merge makes one)")
    tensors = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.size("general.alignment", ALIGNMENT)
    start = -(-cursor.position // alignment) * alignment
    placed = (GgufTensor(name, dimensions, kind, start + offset) for name, dimensions, kind, offset in tensors)
    return GgufFile(path, metadata, tuple(placed))


class _Cursor:
    """Reads from a moving position, never beyond the end of the file."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self.position = 0

    def fail(self, what: str) -> NoReturn:
        raise ConfigError(f"--model {self._path}: {what}")

    def take(self, count: int) -> bytes:
        start = self._advance(count)
        return self._data[start : self.position]

    def number(self, code: str) -> Any:
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        start = self._advance(count * struct.calcsize(f"<{code}"))
        return struct.unpack_from(f"<{count}{code}", self._data, start)

    def string(self) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError as error:
            self.fail(f"a string before byte {self.position} is not UTF-8 ({error.reason}): the file is damaged")

    def pair(self) -> tuple[str, Any]:
        key, kind = self.string(), self.number("I")
        if kind != _ARRAY:
            return key, self._values(key, kind, 1)[0]
        element, count = self.number("I"), self.number("Q")
        return key, self._values(key, element, count)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        rank = self.number("I")
        if rank > MAX_DIMENSIONS:
            self.fail(f"tensor {name!r} has {rank} dimensions: expected at most {MAX_DIMENSIONS}")
        return name, self.numbers("Q", rank), self.number("I"), self.number("Q")

    def _values(self, key: str, kind: int, count: int) -> list[Any]:
        if kind in _NUMBERS:
            return list(self.numbers(_NUMBERS[kind], count))
        if kind != _STRING:
            self.fail(f"{key} has values of type {kind}: expected numbers or strings")
        return [self.string() for _ in range(count)]

    def _advance(self, count: int) -> int:
        start = self.position
        if count > self._size - start:
            self.fail(f"ends within its header, at byte {self._size}: the file is damaged or incomplete")
        self.position = start + count
        return start
