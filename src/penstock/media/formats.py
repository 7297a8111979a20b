"""The formats of pictures: recognised by their content, with the size that their header tells, before any decoder sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from penstock.media.file import ImageFile

MAX_SEGMENTS = 1000
"""A JPEG tells its size after its metadata. Cameras write some ten segments."""

PNG_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset({0x01, *range(0xD0, 0xD9)})


class Header(NamedTuple):
    """What a file says of itself. `kind` is the name of its format."""

    kind: str
    width: int
    height: int

    @property
    def pixels(self) -> int:
        return self.width * self.height


def read_header(file: ImageFile) -> Header:
    """Raises ValueError, which says what is wrong with the file."""
    start = file.part(0, 32)
    for kind, (is_kind, read) in _KINDS.items():
        if is_kind(start):
            size = read(file, start)
            if size is None:
                raise ValueError(f"it is a {kind} whose header is cut off or has no width and height")
            if not (size[0] and size[1]):
                raise ValueError(f"its header says {size[0]} × {size[1]} pixels: expected at least 1 × 1")
            return Header(kind, *size)
    # Its bytes are not shown: they may be those of a server that only this one can reach.
    raise ValueError(f"it is {'not a picture' if start else 'empty'}: expected a PNG, JPEG, WebP or GIF")


def _png(_: ImageFile, start: bytes) -> tuple[int, int] | None:
    return (int.from_bytes(start[16:20]), int.from_bytes(start[20:24])) if len(start) >= 24 else None


def _gif(_: ImageFile, start: bytes) -> tuple[int, int] | None:
    return (int.from_bytes(start[6:8], "little"), int.from_bytes(start[8:10], "little")) if len(start) >= 10 else None


def _webp(_: ImageFile, start: bytes) -> tuple[int, int] | None:
    if len(start) < 30:
        return None
    match start[12:16]:
        case b"VP8X":
            return int.from_bytes(start[24:27], "little") + 1, int.from_bytes(start[27:30], "little") + 1
        case b"VP8L":
            bits = int.from_bytes(start[21:25], "little")
            return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            return int.from_bytes(start[26:28], "little") & 0x3FFF, int.from_bytes(start[28:30], "little") & 0x3FFF
    return None


def _jpeg(file: ImageFile, _: bytes) -> tuple[int, int] | None:
    place = 2
    for _segment in range(MAX_SEGMENTS):
        head = file.part(place, place + 9)
        if len(head) < 4 or head[0] != 0xFF:
            return None
        if head[1] == 0xFF:
            place += 1
        elif head[1] in _ALONE:
            place += 2
        elif head[1] in _SIZES:
            return (int.from_bytes(head[7:9]), int.from_bytes(head[5:7])) if len(head) == 9 else None
        else:
            place += 2 + int.from_bytes(head[2:4])
    return None


_KINDS: dict[str, tuple[Callable[[bytes], bool], Callable[[ImageFile, bytes], tuple[int, int] | None]]] = {
    "PNG": (lambda start: start.startswith(PNG_START), _png),
    "JPEG": (lambda start: start.startswith(b"\xff\xd8\xff"), _jpeg),
    "WebP": (lambda start: start[:4] == b"RIFF" and start[8:12] == b"WEBP", _webp),
    "GIF": (lambda start: start.startswith((b"GIF87a", b"GIF89a")), _gif),
}
