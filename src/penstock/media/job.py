"""What the front end and a process that decodes pictures tell each other, a line of JSON each way.

Files and pixels are in memory that they share.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from penstock.wire.images import ImageRules


class Job(Struct, frozen=True, tag=True):
    """Decode the file of `length` bytes at the start of the shared memory. `most_pixels`: as many as its header says."""

    length: int
    is_base64: bool
    kind: str
    most_pixels: int
    is_low: bool
    rules: ImageRules
    cpu_seconds: float


class Done(Struct, frozen=True, tag=True):
    """`length` bytes of pixels are at the start of the shared memory. `content` is the digest of the decoded picture, `seal` ends its
    name: see wire.images.seal_of."""

    size: tuple[int, int]
    content: bytes
    seal: bytes
    length: int


class Refused(Struct, frozen=True, tag=True):
    """The picture cannot be decoded. broken, slow, crashed: it is the file's fault; killed, overloaded: it is not; missing: there is no
    decoder here."""

    why: Literal["broken", "slow", "crashed", "killed", "overloaded", "missing"]
    reason: str
