"""Shows that different pictures never share a name or KV, and that equal pixels do, whatever file they come in.

    python bench/images/names.py [--pairs N] [--seed N]

Pairs of near-equal pictures: one pixel, swapped dimensions with the same bytes, another mode that looks the same, another palette, a colour
that is transparent in one, another orientation in the metadata. Both go through the product's reader, and into a prompt of the simulator's
layout: no two names are equal, and no block from the image on. Equal pixels as PNG, optimised PNG, lossless WebP and base64 without a URL
have one name.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import random
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

from PIL import Image

from penstock.config.media import MediaSettings
from penstock.kv.blocks import block_hashes
from penstock.media.families.simulator import make_rules
from penstock.media.picture import ImageRef, Picture
from penstock.media.reader import MediaReader
from penstock.wire.images import image_ids

RULES = make_rules()
ROOT = b"root of a tenant"
BLOCK_SIZE = 16
ORIENTATION = 0x0112

Pair = tuple[bytes, bytes]


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def drawn(draw: random.Random, mode: str = "RGB") -> Image.Image:
    width, height = draw.randrange(2, 90), draw.randrange(2, 90)
    depth = {"RGB": 3, "RGBA": 4, "L": 1, "P": 1}[mode]
    image = Image.frombytes(mode, (width, height), draw.randbytes(width * height * depth))
    if mode == "P":
        image.putpalette(draw.randbytes(768))
    return image


def one_pixel(draw: random.Random) -> Pair:
    image = drawn(draw, draw.choice(["RGB", "RGBA", "L", "P"]))
    place = draw.randrange(image.width), draw.randrange(image.height)
    other = image.copy()
    found = other.getpixel(place)
    values = list(found) if isinstance(found, tuple) else [int(found or 0)]
    channel = draw.randrange(len(values))
    values[channel] ^= 1
    other.putpixel(place, tuple(values) if len(values) > 1 else values[0])
    return saved(image), saved(other)


def swapped_dimensions(draw: random.Random) -> Pair:
    image = drawn(draw)
    while image.width == image.height:
        image = drawn(draw)
    return saved(image), saved(Image.frombytes("RGB", (image.height, image.width), image.tobytes()))


def other_mode(draw: random.Random) -> Pair:
    """The same to the eye: grey as RGB, RGB with an opaque alpha, a palette as RGB."""
    mode, other = draw.choice([("L", "RGB"), ("RGB", "RGBA"), ("P", "RGB"), ("L", "LA")])
    image = drawn(draw, mode)
    return saved(image), saved(image.convert(other))


def other_palette(draw: random.Random) -> Pair:
    image = drawn(draw, "P")
    palette = bytearray(image.getpalette() or [])
    palette[draw.randrange(3 * max(image.tobytes()) + 3)] ^= 1
    other = image.copy()
    other.putpalette(bytes(palette))
    return saved(image), saved(other)


def transparent_colour(draw: random.Random) -> Pair:
    image = drawn(draw, draw.choice(["P", "L", "RGB"]))
    colour = image.getpixel((0, 0))
    return saved(image), saved(image, transparency=colour)


def orientation(draw: random.Random) -> Pair:
    image, kind = drawn(draw), draw.choice(["PNG", "JPEG", "WEBP"])
    exif = Image.Exif()
    exif[ORIENTATION] = draw.randrange(2, 9)
    return saved(image, kind), saved(image, kind, exif=exif)


KINDS: tuple[Callable[[random.Random], Pair], ...] = (
    one_pixel,
    swapped_dimensions,
    other_mode,
    other_palette,
    transparent_colour,
    orientation,
)


def equals(draw: random.Random) -> list[bytes]:
    """Files with the same pixels."""
    image = drawn(draw)
    return [saved(image), saved(image, optimize=True, dpi=(72, 72)), saved(image, "WEBP", lossless=True, exact=True)]


def url(file: bytes) -> ImageRef:
    return ImageRef("image", url=f"data:image/png;base64,{base64.b64encode(file).decode()}")


def blocks(picture: Picture) -> list[bytes]:
    """The names of the blocks of a prompt: some text, the picture, some text."""
    text = list(range(BLOCK_SIZE - 1))
    return block_hashes([*text, *image_ids(picture.name, picture.layout.positions), *text], BLOCK_SIZE, ROOT)


async def run(pairs: int, seed: int) -> int:
    draw, reader, wrong = random.Random(seed), MediaReader(MediaSettings()), 0
    tried: Counter[str] = Counter()
    names: dict[bytes, str] = {}
    for number in range(pairs):
        kind = KINDS[number % len(KINDS)]
        first, second = await reader.read([url(file) for file in kind(draw)], "", ROOT, RULES)
        tried[kind.__name__] += 1
        shared = set(blocks(first)) & set(blocks(second))
        if first.name == second.name or shared:
            wrong += 1
            print(f"SHARED: {kind.__name__} {number}: {len(shared)} blocks", file=sys.stderr)
        for side, picture in enumerate((first, second)):
            other = names.setdefault(picture.name, f"{number}.{side}")
            if other != f"{number}.{side}":
                wrong += 1
                print(f"SHARED: {other} and {number}.{side}", file=sys.stderr)
    same = max(1, pairs // 10)
    for _ in range(same):
        files = equals(draw)
        found = await reader.read([*map(url, files), ImageRef("data", data=base64.b64encode(files[0]).decode())], "", ROOT, RULES)
        wrong += len({picture.name for picture in found}) != 1
    reader.close()
    print(
        f"{pairs:,} pairs ({', '.join(f'{kind} {count}' for kind, count in tried.items())}), {same:,} sets of equal pixels: {wrong} wrong"
    )
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    return asyncio.run(run(arguments.pairs, arguments.seed))


if __name__ == "__main__":
    sys.exit(main())
