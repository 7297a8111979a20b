"""The names of KV blocks: a hash over all tokens up to a block's end, the same wherever it is computed."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

ROOT = b""
"""What the first block of every sequence follows."""


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the block with these tokens, behind the block named `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=8).digest()


def block_hashes(token_ids: Sequence[int], block_size: int, parent: bytes = ROOT) -> list[bytes]:
    """One hash for each full block."""
    packed = array("I", token_ids).tobytes()
    width = block_size * array("I").itemsize
    hashes: list[bytes] = []
    for start in range(0, len(packed) - width + 1, width):
        parent = blake2b(parent + packed[start : start + width], digest_size=8).digest()
        hashes.append(parent)
    return hashes
