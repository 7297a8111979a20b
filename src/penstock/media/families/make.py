"""Families of processors by name: how a model's files say that it wants its images, the layout of one, and its pixels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from penstock.media.families import simulator
from penstock.wire.errors import ConfigError
from penstock.wire.images import ImageLayout, ImageRules

if TYPE_CHECKING:
    from pathlib import Path

    from PIL.Image import Image


class Family(Protocol):
    """What each module here has."""

    def layout(self, rules: ImageRules, name: bytes, size: tuple[int, int]) -> ImageLayout:
        """What stands for an image of this name, width and height. Raises RequestError, without a field, for one that cannot be shown."""

    def prepare(self, rules: ImageRules, image: Image) -> bytes:
        """The pixels of a picture in RGB, as a worker gets them: three bytes for each pixel of the layout's `size`."""


FAMILIES: dict[str, Family] = {"simulator": simulator}


def layout(rules: ImageRules, name: bytes, size: tuple[int, int]) -> ImageLayout:
    """What stands for a picture in a prompt. `size` is its width and height. Raises RequestError, without a field, for one that the
    model's processor refuses."""
    made = _family(rules).layout(rules, name, size)
    return made if rules.is_prepared else ImageLayout(name, made.pieces, made.grid, size)


def prepare(rules: ImageRules, image: Image) -> bytes:
    """The pixels of a picture in RGB, as a worker gets them: three bytes for each pixel of the layout's `size`."""
    return _family(rules).prepare(rules, image) if rules.is_prepared else image.tobytes()


def read_rules(directory: Path) -> ImageRules | None:  # noqa: ARG001
    """How the model in this directory wants its images. None: it reads only text, or its processor is not known.

    Raises ConfigError for settings of a known processor that cannot be followed.
    """
    return None


def _family(rules: ImageRules) -> Family:
    found = FAMILIES.get(rules.family)
    if found is None:
        raise ConfigError(f"the model's images are of the family {rules.family!r}: expected one of {', '.join(sorted(FAMILIES))}")
    return found
