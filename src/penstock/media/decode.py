"""From a file to pixels: decoded, turned upright, made RGB, hashed, and prepared for the model. Runs in a process of its own."""

from __future__ import annotations

from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, NamedTuple

from penstock.media.families import make as families
from penstock.wire.images import MAX_IMAGE_BYTES, seal_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from penstock.wire.images import ImageRules

LOW_PIXELS = 512
"""With `detail: low`, a picture is shrunk to fit into a square of this side."""

_HASHED_BYTES = 2**20
_ORIENTATION = 0x0112


class Decoded(NamedTuple):
    """A picture. `size` is its width and height before it was prepared; `content` is a hash of its pixels as they were decoded, `seal`
    of those that a worker gets."""

    size: tuple[int, int]
    content: bytes
    seal: bytes
    pixels: bytes


def decode(data: bytes, kind: str, most_pixels: int, is_low: bool, rules: ImageRules) -> Decoded:
    """Of an animation, the first frame. Raises what Pillow raises, ValueError if the picture has more pixels than its header said, and
    RequestError if the model's processor refuses it."""
    from PIL import Image, UnidentifiedImageError

    # The header was checked against our own limit.
    Image.MAX_IMAGE_PIXELS = None
    try:
        file = Image.open(BytesIO(data), formats=(kind.upper(),))
    except UnidentifiedImageError:
        # Pillow's own words show an address in memory.
        raise ValueError("its header is damaged") from None
    with file as opened:
        if opened.width * opened.height > most_pixels:
            raise ValueError(f"it has {opened.width} × {opened.height} pixels, more than its header says")
        opened.load()
        upright = _upright(opened)
    content = content_digest(upright)
    image = _rgb(upright)
    if is_low:
        image = shrunk(image)
    size = families.layout(rules, b"", image.size).size
    pixels = families.prepare(rules, image)
    if len(pixels) > MAX_IMAGE_BYTES:
        raise ValueError(f"the model's processor makes {len(pixels):,} bytes of it: expected at most {MAX_IMAGE_BYTES:,}")
    seal = seal_of(size)
    seal.update(pixels)
    return Decoded(image.size, content, seal.digest(), pixels)


def content_digest(image: Image) -> bytes:
    """A hash of the mode, the width and height, the palette, the colour that is transparent, and the pixels in this mode."""
    transparent = image.info.get("transparency")
    header = (image.mode, image.width, image.height, image.getpalette("RGBA"), transparent)
    hashed = sha256(repr(header).encode())
    rows = max(1, _HASHED_BYTES // max(1, 4 * image.width))
    for top in range(0, image.height, rows):
        hashed.update(image.crop((0, top, image.width, min(top + rows, image.height))).tobytes())
    return hashed.digest()


def shrunk(image: Image) -> Image:
    """Fits into LOW_PIXELS × LOW_PIXELS, with its proportions."""
    from PIL.Image import Resampling

    size = shrunk_size(image.size)
    return image if size == image.size else image.resize(size, Resampling.BICUBIC)


def shrunk_size(size: tuple[int, int]) -> tuple[int, int]:
    scale = LOW_PIXELS / max(size)
    return size if scale >= 1 else (max(1, round(size[0] * scale)), max(1, round(size[1] * scale)))


def _upright(image: Image) -> Image:
    """Turned and mirrored as its metadata says."""
    from PIL.Image import Transpose

    methods = (
        Transpose.FLIP_LEFT_RIGHT,
        Transpose.ROTATE_180,
        Transpose.FLIP_TOP_BOTTOM,
        Transpose.TRANSPOSE,
        Transpose.ROTATE_270,
        Transpose.TRANSVERSE,
        Transpose.ROTATE_90,
    )
    orientation = image.getexif().get(_ORIENTATION)
    if not isinstance(orientation, int) or not 2 <= orientation <= 8:
        return image
    return image.transpose(methods[orientation - 2])


def _rgb(image: Image) -> Image:
    """As the processors of transformers do it: what is transparent shows a white ground. 16 bits a pixel become 8: Pillow would clip."""
    from PIL.Image import alpha_composite, new

    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda value: value / 256).convert("L")
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return alpha_composite(new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")
