"""The one codec: length-prefixed msgpack frames, decoded by one typed decoder."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from penstock.wire.errors import FrameMalformed, FrameTooLarge
from penstock.wire.messages import Message, TokenLogprob

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

_LOGPROBS: msgspec.msgpack.Decoder[tuple[TokenLogprob | None, ...]] = msgspec.msgpack.Decoder(tuple[TokenLogprob | None, ...])

PACKED_ENTRIES = 256
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_HANDSHAKE_BYTES = 64 * 1024


def pack_logprobs(entries: Sequence[TokenLogprob | None]) -> tuple[bytes, ...]:
    """Logprobs in pieces of PACKED_ENTRIES; the last one may be shorter."""
    return tuple([_ENCODER.encode(entries[start : start + PACKED_ENTRIES]) for start in range(0, len(entries), PACKED_ENTRIES)])


def unpack_logprobs(piece: bytes) -> tuple[TokenLogprob | None, ...]:
    """Raises FrameMalformed for bytes that are not such a piece."""
    try:
        return _LOGPROBS.decode(piece)
    except msgspec.DecodeError as error:
        raise FrameMalformed(f"the peer sent logprobs that cannot be read: {error}") from error


def encode_frame(message: Message) -> bytes:
    """The frame's bytes. Raises FrameTooLarge for a frame that the peer would refuse."""
    body = _ENCODER.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"a {type(message).__name__} frame of {len(body):,} bytes is over the limit of {MAX_FRAME_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Cuts a byte stream into messages. Does no I/O.

    `feed` returns the messages that these bytes complete, in order. It raises FrameTooLarge as soon as a length over `limit` is
    announced, and FrameMalformed for bytes that are not a message. After an error the reader must not be used again.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        self._buffer += data
        messages: list[Message] = []
        start = 0
        with memoryview(self._buffer) as view:
            while len(view) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, start)
                if length > self.limit:
                    raise FrameTooLarge(f"the peer announced a frame of {length:,} bytes; the limit is {self.limit:,}")
                end = start + _LENGTH.size + length
                if end > len(view):
                    break
                with view[start + _LENGTH.size : end] as body:
                    messages.append(_decode(body))
                start = end
        del self._buffer[:start]
        return messages


def _decode(body: memoryview) -> Message:
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FrameMalformed(f"the peer sent a frame of {len(body):,} bytes that is not a message: {error}") from error
