"""Pictures of noise for the simulator: their bodies in requests, and what its text knows of them."""

from __future__ import annotations

import base64
import io
import random
from dataclasses import dataclass

from PIL import Image

from penstock.backends.simulated_images import seal_pixels


@dataclass(frozen=True)
class Noise:
    """`part` is its part of a chat message."""

    part: dict[str, object]
    seal: bytes


def noise(number: int, size: tuple[int, int] = (96, 64)) -> Noise:
    image = Image.frombytes("RGB", size, random.Random(number).randbytes(3 * size[0] * size[1]))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return Noise({"type": "image_url", "image_url": {"url": url}}, seal_pixels(image.size, image.tobytes()))
