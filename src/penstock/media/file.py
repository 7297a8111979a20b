"""The file of a picture, as a client sent it: bytes, or base64 that is not decoded yet."""

from __future__ import annotations

import os
import re
from binascii import Error as Base64Error
from binascii import a2b_base64, b2a_base64
from collections.abc import Iterable
from hashlib import sha256

from penstock.media.picture import ImageRef
from penstock.wire.errors import RequestError

PIECE_CHARACTERS = 2**20
"""Copied in one go: 0.2 ms, in which the event loop waits."""

MAX_HEAD_CHARACTERS = 256
"""Of a data URL, up to its comma."""

EXPECTED = "expected data:image/png;base64,… with a PNG, JPEG, WebP or GIF"

_LINE_CHARACTERS = 100
_DATA = re.compile(r"data:[^,]*;base64,", re.IGNORECASE | re.ASCII)
_SPACES = "\r\n\t "


class ImageFile:
    """A file that stays as it came: a data URL of 27 MB costs the front end a hash, and only a process that decodes it makes bytes of it.

    Each method takes time in proportion to what it reads; `digest` and `write` release the GIL.
    """

    def __init__(self, content: bytes | bytearray | str, start: int = 0) -> None:
        """`content` is text: it is base64 from `start` on."""
        self._content = content
        self._start = start
        self.is_base64 = isinstance(content, str)

    @property
    def stored(self) -> int:
        """The number of bytes that `write` writes."""
        return len(self._content) - self._start

    @property
    def size(self) -> int:
        """The length of the file in bytes. A few too many if its base64 is padded."""
        return self.stored * 3 // 4 if self.is_base64 else self.stored

    @property
    def has_lines(self) -> bool:
        """It is base64 in lines: read `joined` instead. What is not ASCII is no base64, and is refused as it is."""
        text, start = self._content, self._start
        return isinstance(text, str) and text.isascii() and any(space in text[start : start + _LINE_CHARACTERS] for space in _SPACES)

    def joined(self) -> ImageFile:
        """Without the ends of its lines. Takes about 1 ms for each megabyte: for a thread."""
        return ImageFile(b"".join([piece.translate(None, _SPACES.encode()) for piece in self._pieces()]).decode())

    def part(self, start: int, end: int) -> bytes:
        """The bytes of the file from `start` to `end`; fewer where it ends. Raises ValueError if this part is not base64."""
        if not isinstance(self._content, str):
            return bytes(self._content[start:end])
        first = start // 3
        text = self._content[self._start + 4 * first : self._start + 4 * -(-end // 3)]
        try:
            return decode_base64(text)[start - 3 * first : end - 3 * first]
        except ValueError as error:
            raise ValueError(f"it is not base64: {error}") from None

    def digest(self) -> bytes:
        """A hash of what was sent. The same file has another as base64 than as bytes."""
        hashed = sha256(b"base64" if self.is_base64 else b"bytes")
        for piece in self._pieces():
            hashed.update(piece)
        return hashed.digest()

    def as_base64(self) -> str:
        """The file as base64: piece by piece, so that other threads go on."""
        if isinstance(self._content, str):
            return self._content[self._start :]
        piece = PIECE_CHARACTERS // 4 * 3
        pieces = [self._content[place : place + piece] for place in range(0, len(self._content), piece)]
        return b"".join([b2a_base64(each, newline=False) for each in pieces]).decode()

    def write(self, descriptor: int) -> None:
        """Writes it as it was sent, from the start of an empty file."""
        for piece in self._pieces():
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]

    def _pieces(self) -> Iterable[bytes | bytearray]:
        if not isinstance(self._content, str):
            return [self._content]
        text, places = self._content, range(self._start, len(self._content), PIECE_CHARACTERS)
        # What is not ASCII is not base64: that is found where it is decoded.
        return (text[place : place + PIECE_CHARACTERS].encode("ascii", "replace") for place in places)


def sent_file(ref: ImageRef) -> ImageFile:
    """The file in a request. Raises RequestError without a field, also for a file that is elsewhere."""
    if ref.data:
        return ImageFile(ref.data)
    head = ref.url[:MAX_HEAD_CHARACTERS]
    start = head.find(",") + 1
    if not start or not _DATA.match(head[:start]):
        raise RequestError(f"it begins with {head[:40]!r}: {EXPECTED}")
    return ImageFile(ref.url, start)


def decode_base64(text: str | bytes) -> bytes:
    """Raises binascii.Error. Padding may be missing."""
    missing = -len(text) % 4
    if missing == 3:
        raise Base64Error("it has one character too many")
    return a2b_base64(text + (b"=" * missing if isinstance(text, bytes) else "=" * missing), strict_mode=True)  # type: ignore[operator]
