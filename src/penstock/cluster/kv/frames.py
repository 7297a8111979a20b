"""What two workers say to each other on a connection for KV: the messages, their limits, and the frames.

A frame is a length and a message in msgpack. Behind a `Blocks` message come the bytes of its blocks, which go straight into their slots.
A connection is used one way: the **puller** opened it, the **source** answers.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
from msgspec import Struct

from penstock.kv.blocks import NAME_BYTES
from penstock.kv.moving import SlotLayout
from penstock.wire.codec import MAX_HANDSHAKE_BYTES
from penstock.wire.errors import FrameMalformed, FrameTooLarge
from penstock.wire.messages import TRANSFER_ID_BYTES, Challenge, Goodbye, Hello

MAX_NAMES = 131_072
"""Blocks of one pull: 2 million tokens in blocks of 16."""
MAX_MESSAGE_BYTES = MAX_NAMES * NAME_BYTES + 1024
MAX_BLOCKS_PER_MESSAGE = 256
MAX_OPEN_PULLS = 4096
"""Of one puller, at one source."""
PIECE_BYTES = 1 << 20
"""A transfer sends about this much, then the next one has its turn. At least one block."""
SESSION_BYTES = 16
MAX_REASON_CHARACTERS = 200

LENGTH = struct.Struct(">I")


class SourceWelcome(Struct, frozen=True, tag="source_welcome"):
    """Source to puller, the end of the handshake: its proof, and what its KV is. `is_shared`: a file of its slots came with this message,
    and blocks are copied from there."""

    name: str
    proof: bytes
    fingerprint: bytes
    layout: SlotLayout
    is_shared: bool = False


class Join(Struct, frozen=True, tag="join"):
    """Puller to source, first: the connections with the same session belong together. Blocks come on any of them that is not
    `only_messages`: a message must not wait behind megabytes of blocks on a slow link."""

    session: bytes
    only_messages: bool = False


class Pull(Struct, frozen=True, tag="pull", gc=False):
    """Puller to source: send this chain of blocks. `names` has NAME_BYTES of each. `number` is new on this session."""

    number: int
    transfer: bytes
    names: bytes
    waits: bool

    @property
    def blocks(self) -> int:
        return len(self.names) // NAME_BYTES

    def check(self) -> None:
        if len(self.transfer) != TRANSFER_ID_BYTES or not self.names or len(self.names) % NAME_BYTES or self.blocks > MAX_NAMES:
            raise FrameMalformed(f"the puller asks for {len(self.names):,} bytes of names, under an id of {len(self.transfer)} bytes")


class Stop(Struct, frozen=True, tag="stop", gc=False):
    """Puller to source: it takes no more of this pull. Sent at the end of every pull."""

    number: int


class Blocks(Struct, frozen=True, tag="blocks", gc=False):
    """Source to puller: the blocks from `first` on. The bytes of their slots follow, unless the puller has the source's file: then
    `slots` says where they are."""

    number: int
    first: int
    names: bytes
    checksums: tuple[int, ...]
    slots: tuple[int, ...] = ()


class Ended(Struct, frozen=True, tag="ended", gc=False):
    """Source to puller: it sends only the first `blocks` blocks of this pull, for this reason. They may still be on their way."""

    number: int
    reason: str
    blocks: int = 0


class Waiting(Struct, frozen=True, tag="waiting", gc=False):
    """Source to puller, again and again: these pulls go on, and no others. Their blocks are computed, wait for their turn, or are on their
    way."""

    numbers: tuple[int, ...]


KvMessage = Challenge | Hello | SourceWelcome | Join | Pull | Stop | Blocks | Ended | Waiting | Goodbye
Expected = TypeVar("Expected", bound=Struct)

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[KvMessage] = msgspec.msgpack.Decoder(KvMessage)


def encode(message: KvMessage) -> bytes:
    body = _ENCODER.encode(message)
    return LENGTH.pack(len(body)) + body


def decode(body: memoryview | bytes) -> KvMessage:
    """Raises FrameMalformed for bytes that are not a message."""
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameMalformed(f"the peer sent a frame of {len(body):,} bytes that is not a message: {error}") from error


def length_of(header: memoryview | bytes, limit: int = MAX_HANDSHAKE_BYTES) -> int:
    """The length of the message behind this header. Raises FrameTooLarge."""
    length = int(LENGTH.unpack_from(header)[0])
    if length > limit:
        raise FrameTooLarge(f"the peer announced a frame of {length:,} bytes; the limit is {limit:,}")
    return length
