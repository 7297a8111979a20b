"""What decoding JSON costs, estimated before it is decoded: a decoder holds the event loop until it is done, in a thread, too."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator

from penstock.wire.errors import RequestError

MAX_COST = 12_000_000
"""About 12 ms. Each cost is the time in nanoseconds that the slowest JSON of its kind took when it was measured."""

MIN_BYTES = 4096
"""Shorter JSON is decoded as it is, unless it has many slow numbers."""

PIECE_BYTES = 64 * 1024
"""Looked at in one go: 1 to 3 ms."""

MAX_FEW = 500
"""So few values in one piece cannot take long, without slow numbers."""

MAX_SLOW = 64
"""So few slow numbers take 1 or 2 ms."""

MIN_SLOW_BYTES = 512
"""Shorter JSON has no more of them."""

# Inside strings.
ESCAPE_COST = 8
ASCII_BYTES_PER_COST = 3
# Outside.
BYTE_COST = 2
COMMA_COST = 30
COLON_COST = 250
CONTAINER_COST = 100
EXPONENT_COST = 23_000
"""Numbers at the ends of the range of floats, such as 1e308, are that slow to read."""
LONG_NUMBER_COST, DIGIT_COST = 15_000, 30

# A request can have thousands of strings with JSON inside. Without slow numbers, JSON costs less than this.
MAX_BYTE_COST, MAX_SHORT_COST = 300, 100_000

_EXPONENT = re.compile(rb"[0-9.][eE]")
_LONG_NUMBER = re.compile(rb"[0-9.]{20,}")
_SLOW_NUMBER = re.compile(r"[0-9.](?:[eE]|[0-9.]{19})")
_SLOW_NUMBERS = re.compile(rb"[0-9.](?:[eE]|[0-9.]{19})")
# A value follows each of these, or stands alone.
_BEFORE_VALUES = b",:["
_OTHERS = bytes(set(range(256)) - set(_BEFORE_VALUES))
_NO_DIGITS = bytes(set(range(256)) - set(b"0123456789"))
# Looking for a run of one byte is ten times as fast as looking for a pattern.
_DIGITS_AS_ZEROS = bytes(ord("0") if byte in b"0123456789." else 0 for byte in range(256))
_LONG_RUN = b"0" * 20


def is_quick(body: bytes) -> bool:
    """Whether the JSON is decoded in 1 or 2 ms, as that of nearly all requests: many may come at once."""
    if len(body) <= MIN_SLOW_BYTES:
        return True
    if len(body) > PIECE_BYTES:
        return False
    values = len(body.translate(None, _OTHERS))
    if values <= MAX_SLOW:
        return True
    # Looking for slow numbers costs more than counting digits.
    if len(body) <= MIN_BYTES and len(body.translate(None, _NO_DIGITS)) <= MAX_SLOW:
        return True
    return (len(body) <= MIN_BYTES or values <= MAX_FEW) and len(_SLOW_NUMBERS.findall(body)) <= MAX_SLOW


async def check_cost(body: bytes, turn: Callable[[], Awaitable[None]]) -> None:
    """Raises RequestError when the JSON takes too long to decode. Awaits a turn on the event loop for each piece, and one for decoding."""
    if is_quick(body):
        return
    cost = 0
    await turn()
    for piece in piece_costs(body):
        cost += piece
        if cost > MAX_COST:
            raise too_complex("the body")
        await turn()


def too_complex(what: str) -> RequestError:
    message = (
        f"{what} takes too long to decode: it has too many values, escapes, or numbers that are long or have an exponent; "
        "the limit is about 270,000 whole numbers, 40,000 object members or 500 numbers with an exponent"
    )
    return RequestError(message, code="body_too_complex", status=413, limit="body_cost")


def is_slow(text: str) -> bool:
    """Whether JSON inside a string takes too long to decode, by itself or for its length."""
    if len(text) <= MIN_BYTES and not _SLOW_NUMBER.search(text):
        return False
    return sum(piece_costs(text.encode("utf-8", "surrogatepass"))) > min(MAX_COST, MAX_BYTE_COST * len(text) + MAX_SHORT_COST)


def piece_costs(body: bytes) -> Iterator[int]:
    """The cost of each piece of the JSON, in order."""
    start = 0
    inside = False
    while start < len(body):
        piece = body[start : start + PIECE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:
            # An escape and what it escapes stay together.
            piece = body[start : start + PIECE_BYTES + 1]
        start += len(piece)
        size, escapes = len(piece), 0
        if b"\\" in piece:
            escapes = piece.count(b"\\")
            piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        outside = b"".join(parts[inside::2])
        inside ^= not len(parts) % 2
        yield (size // ASCII_BYTES_PER_COST if piece.isascii() else size) + escapes * ESCAPE_COST + _cost_outside(outside)


def _cost_outside(text: bytes) -> int:
    """The cost of what stands outside strings."""
    cost = len(text) * BYTE_COST + text.count(b",") * COMMA_COST + text.count(b":") * COLON_COST
    cost += (text.count(b"[") + text.count(b"{")) * CONTAINER_COST
    if b"e" in text or b"E" in text:
        cost += len(_EXPONENT.findall(text)) * EXPONENT_COST
    if _LONG_RUN in text.translate(_DIGITS_AS_ZEROS):
        cost += sum(LONG_NUMBER_COST + len(number) * DIGIT_COST for number in _LONG_NUMBER.findall(text))
    return cost
