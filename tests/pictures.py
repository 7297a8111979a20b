"""Pictures for tests: small files of every format, and how a request sends them."""

from __future__ import annotations

import base64
import io
import random
from typing import Any

from PIL import Image

from penstock.media.picture import Detail, ImageRef


def noise(mode: str = "RGB", size: tuple[int, int] = (24, 16), seed: int = 0) -> Image.Image:
    """A picture of this mode that is not like any other."""
    depth = {"RGB": 3, "RGBA": 4, "LA": 2, "L": 1, "P": 1, "CMYK": 4, "I;16": 2}.get(mode, 1)
    image = Image.frombytes(mode, size, random.Random(seed).randbytes(size[0] * size[1] * depth))
    if mode == "P":
        image.putpalette(random.Random(seed + 1).randbytes(768))
    return image


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The picture's file. WebP keeps every pixel."""
    file = io.BytesIO()
    image.save(file, kind, **({"lossless": True, "exact": True} | options if kind.upper() == "WEBP" else options))
    return file.getvalue()


def data_url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def sent(file: bytes | Image.Image, detail: Detail = "auto", field: str = "messages[0].content[1].image_url.url") -> ImageRef:
    """What a parser makes of a request with this file."""
    return ImageRef(field, url=data_url(file if isinstance(file, bytes) else saved(file)), detail=detail)
