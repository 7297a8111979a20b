"""Stands in for torchvision, whose wheels where pip looks are built for CUDA and cannot be loaded beside a torch for CPUs.

SGLang imports it whatever the model, and so does transformers where it is found. Text needs none of it: names are found, and calling one
raises. Only `InterpolationMode` has values, because tables are made of them at import.
"""

from __future__ import annotations

import enum
import sys
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Absent:
    """A function or a class that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"{self._name} was called, but this is a stand-in for torchvision: it knows no images")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


def _add(name: str, **values: object) -> None:
    module = _Module(f"{__name__}.{name}")
    module.__path__ = []
    vars(module).update(values)
    parent, _, last = module.__name__.rpartition(".")
    sys.modules[module.__name__] = module
    setattr(sys.modules[parent], last, module)


_add("io")
_add("transforms", InterpolationMode=InterpolationMode)
_add("transforms.functional", InterpolationMode=InterpolationMode)
_add("transforms.v2")
_add("transforms.v2.functional", InterpolationMode=InterpolationMode)
