"""Marks: where the images of a chat are in its texts.

A mark has characters that no client can send: UTF-8 has no bytes for lone surrogates. So the content of a message stays a string, and
rewrites, templates and transcripts carry marks along with the text. Every mark has the same length: naming an image moves nothing.
"""

from __future__ import annotations

import re

from penstock.wire.images import IMAGE_NAME_BYTES

EDGE = "\ud807"
"""The first and the last character of each mark."""

_DIGITS = 2 * IMAGE_NAME_BYTES
IMAGE_MARK = re.compile(f"{EDGE}([0-9a-f]{{{_DIGITS}}}){EDGE}")
MARK_CHARACTERS = _DIGITS + 2


def image_mark(index: int) -> str:
    """The mark of an image that is not read yet: its place among the images of the request."""
    return f"{EDGE}{index:0{_DIGITS}d}{EDGE}"


def named_mark(name: bytes) -> str:
    """The mark of the image with this name."""
    return f"{EDGE}{name.hex()}{EDGE}"


def marked_name(mark: str) -> bytes:
    """The name in a named mark."""
    return bytes.fromhex(mark[1:-1])
