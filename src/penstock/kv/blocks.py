"""KV blocks as others see them: their names, and the numbered log of what happens to them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

from penstock.wire.messages import BlocksRemoved, BlocksStored, KvEvent, KvEvents, Tier

ROOT = b""
"""The parent of the first block of a sequence that all tenants share. Other sequences have a root of their own."""

# Nobody can make two blocks, or two roots, with the same name on purpose: that takes about 2**64 attempts.
NAME_BYTES = 16

# Far more than one step makes. Events are dropped only when nobody takes any.
MAX_WAITING_EVENTS = 65_536


# Named in one go: about 1 ms.
PIECE_BLOCKS = 1024


def tenant_root(owner: str) -> bytes:
    """The root of a tenant's blocks: no other tenant has blocks with the same names. It is the same on every machine."""
    return blake2b(owner.encode(), digest_size=NAME_BYTES, person=b"tenant root").digest()


def salted_root(root: bytes, salt: str) -> bytes:
    """The root of the blocks under this root that a client has set apart with a salt."""
    return blake2b(salt.encode(), digest_size=NAME_BYTES, key=root, person=b"salted root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The name of the block with these tokens that follows the block `parent`. It is the same on every machine."""
    try:
        return blake2b(parent + array("I", token_ids).tobytes(), digest_size=NAME_BYTES).digest()
    except OverflowError:
        # It has positions of an image.
        return blake2b(parent + array("Q", token_ids).tobytes(), digest_size=NAME_BYTES, person=b"image block").digest()


def block_hashes(token_ids: Sequence[int], block_size: int, parent: bytes = ROOT) -> list[bytes]:
    """The names of all full blocks. `parent` is the root, or the block before them."""
    return [name for piece in block_hash_pieces(token_ids, block_size, parent) for name in piece]


def block_hash_pieces(token_ids: Sequence[int], block_size: int, parent: bytes = ROOT) -> Iterator[list[bytes]]:
    """The same names, at most PIECE_BLOCKS at a time."""
    try:
        packed = array("I", token_ids).tobytes()
    except OverflowError:
        yield from _image_hash_pieces(token_ids, block_size, parent)
        return
    width = block_size * array("I").itemsize
    end = len(packed) - width + 1
    for first in range(0, end, width * PIECE_BLOCKS):
        piece: list[bytes] = []
        for start in range(first, min(end, first + width * PIECE_BLOCKS), width):
            parent = blake2b(parent + packed[start : start + width], digest_size=NAME_BYTES).digest()
            piece.append(parent)
        yield piece


def _image_hash_pieces(token_ids: Sequence[int], size: int, parent: bytes) -> Iterator[list[bytes]]:
    """`block_hash_pieces` of a prompt with images."""
    blocks = len(token_ids) // size
    for first in range(0, blocks, PIECE_BLOCKS):
        piece: list[bytes] = []
        for start in range(first * size, min(blocks, first + PIECE_BLOCKS) * size, size):
            parent = block_hash(parent, token_ids[start : start + size])
            piece.append(parent)
        yield piece


class KvEventLog:
    """Events are numbered without a gap. When too many wait, the oldest are dropped; the numbers then show the gap."""

    def __init__(self, max_waiting: int = MAX_WAITING_EVENTS) -> None:
        self.next_number = 0
        self._max_waiting = max_waiting
        self._waiting: list[KvEvent] = []

    def stored(self, parent: bytes, blocks: Sequence[bytes], tier: Tier = "device") -> None:
        """A chain of new blocks behind `parent`, in this tier."""
        self._add(BlocksStored(parent, tuple(blocks), tier))

    def removed(self, blocks: Sequence[bytes], tier: Tier = "device") -> None:
        self._add(BlocksRemoved(tuple(blocks), tier))

    def take(self) -> KvEvents | None:
        """The events since the last call; None when there are none."""
        if not self._waiting:
            return None
        taken = KvEvents(self.next_number - len(self._waiting), tuple(self._waiting))
        self._waiting = []
        return taken

    def _add(self, event: KvEvent) -> None:
        self._waiting.append(event)
        self.next_number += 1
        if len(self._waiting) > self._max_waiting:
            del self._waiting[: self._max_waiting // 2]
