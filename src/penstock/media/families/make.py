"""Families of processors by name: how a model's files say that it wants its images, the layout of one, and its pixels."""

from __future__ import annotations

import json
import logging
import re
from typing import TYPE_CHECKING, Any, Protocol

from penstock.media.families import idefics3, qwen_vl, simulator
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


FAMILIES: dict[str, Family] = {"idefics3": idefics3, "qwen_vl": qwen_vl, "simulator": simulator}

# The names of Hugging Face's classes end in these: `Qwen2VLImageProcessorFast`.
_SUFFIX = re.compile("(Image)?Processor(Fast|Pil)?$")

log = logging.getLogger(__name__)


def layout(rules: ImageRules, name: bytes, size: tuple[int, int]) -> ImageLayout:
    """What stands for a picture in a prompt. `size` is its width and height. Raises RequestError, without a field, for one that the
    model's processor refuses."""
    made = _family(rules).layout(rules, name, size)
    return made if rules.is_prepared else ImageLayout(name, made.pieces, made.grid, size)


def prepare(rules: ImageRules, image: Image) -> bytes:
    """The pixels of a picture in RGB, as a worker gets them: three bytes for each pixel of the layout's `size`."""
    return _family(rules).prepare(rules, image) if rules.is_prepared else image.tobytes()


def read_rules(directory: Path) -> ImageRules | None:
    """How the model in this directory wants its images. None: it reads only text, or its processor is not known, which is logged.

    Raises ConfigError for settings of a known processor that cannot be followed.
    """
    model, processor = _read(directory / "config.json"), _read(directory / "processor_config.json")
    given = processor.get("image_processor") or _read(directory / "preprocessor_config.json")
    if not given:
        return None
    kind = str(given.get("image_processor_type") or given.get("processor_class") or processor.get("processor_class"))
    match _SUFFIX.sub("", kind):
        case "Qwen2VL" | "Qwen2_5_VL" | "Qwen3VL":
            return qwen_vl.make_rules(given)
        case "Idefics3" | "SmolVLM":
            return idefics3.make_rules(given, processor, model)
    log.warning("the model's image processor %s is not known: it reads only text", kind)
    return None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} is {type(found).__name__}: expected an object")
    return found


def _family(rules: ImageRules) -> Family:
    found = FAMILIES.get(rules.family)
    if found is None:
        raise ConfigError(f"the model's images are of the family {rules.family!r}: expected one of {', '.join(sorted(FAMILIES))}")
    return found
