"""Bodies that their client has compressed: decoded in pieces, within the limits, beside the event loop."""

from __future__ import annotations

import asyncio
import functools
import importlib
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple, Protocol

from penstock.wire.errors import RequestError

PIECE_BYTES = 2**18
"""What is read and made in one step. No step takes a millisecond."""
MAX_EXPANSION = 100
"""Text of agents shrinks to a twentieth. What grows by more than this is made to fill memory, and is refused sooner than others."""
MIN_ALLOWED_BYTES = 2**20
# HTTP allows no larger window (RFC 9659). A decoder allocates all of it.
_MAX_ZSTD_WINDOW_BITS = 23
_GZIP_BITS = 16 + zlib.MAX_WBITS


class Decompressor(Protocol):
    """As in Python's own modules: while it does not need input, it is called with none."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Inflater:
    """Zlib's decompressor with that interface."""

    def __init__(self, bits: int) -> None:
        self._zlib = zlib.decompressobj(bits)

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(data or self._zlib.unconsumed_tail, max_length)


class Coding(NamedTuple):
    decompressor: Decompressor
    error: type[Exception]
    """What the decompressor raises for bytes that it cannot read."""


@functools.cache
def find_zstd() -> Any | None:
    """Python's own module, from 3.14 on, or the package with the same interface; None without both."""
    for name in ("compression.zstd", "backports.zstd"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    return None


def find_coding(encoding: bytes, zstd: Any | None) -> Coding:
    """For the value of `content-encoding`. Raises RequestError for what cannot be decoded here."""
    name = encoding.strip().lower()
    if name in (b"gzip", b"x-gzip"):
        return Coding(_Inflater(_GZIP_BITS), zlib.error)
    if name == b"deflate":
        return Coding(_Inflater(zlib.MAX_WBITS), zlib.error)
    if name == b"zstd" and zstd is not None:
        options = {zstd.DecompressionParameter.window_log_max: _MAX_ZSTD_WINDOW_BITS}
        return Coding(zstd.ZstdDecompressor(options=options), zstd.ZstdError)
    accepted = "gzip or deflate (zstd needs `pip install 'penstock[zstd]'` on the server)" if zstd is None else "gzip, deflate or zstd"
    message = f"`content-encoding` is {encoding[:80].decode('latin-1')!r}: expected {accepted}, or none"
    raise RequestError(message, param="content-encoding", code="unsupported_encoding", status=415)


async def decode_content(body: bytes, coding: Coding, limit: int, take: Callable[[int], Awaitable[None]]) -> bytearray:
    """The decoded body. `take` gets room for more of it. Raises RequestError: 413 for a body over the limit, 400 for one that is broken."""
    allowed = min(limit, max(MIN_ALLOWED_BYTES, MAX_EXPANSION * len(body)))
    decoded = bytearray()
    pieces = _pieces(body, coding.decompressor)
    while True:
        try:
            piece = await asyncio.to_thread(next, pieces, None)
        except coding.error as error:
            raise _broken(str(error)) from error
        if piece is None:
            return decoded
        if len(decoded) + len(piece) > allowed:
            message = f"the body of {len(body):,} bytes has over {allowed:,} bytes when it is decoded"
            raise RequestError(message, code="body_too_large", status=413, limit="max_body_bytes")
        await take(len(piece))
        decoded += piece


def _pieces(body: bytes, decompressor: Decompressor) -> Iterator[bytes]:
    at = 0
    while not decompressor.eof:
        needs_input = decompressor.needs_input
        data = body[at : at + PIECE_BYTES] if needs_input else b""
        at += len(data)
        piece = decompressor.decompress(data, PIECE_BYTES)
        if needs_input and not (data or piece or decompressor.eof):
            raise _broken("it ends too early")
        yield piece
    if decompressor.unused_data or at < len(body):
        raise _broken("there are bytes after its end")


def _broken(why: str) -> RequestError:
    return RequestError(f"the body does not fit its `content-encoding`: {why}", code="invalid_encoding")
