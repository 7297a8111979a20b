"""Compressed bodies: decoded within the limits, or refused with the reason."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from typing import Any

import pytest

from penstock.api.pipeline.content_encoding import MIN_ALLOWED_BYTES, PIECE_BYTES, find_coding, find_zstd
from penstock.api.pipeline.request import coding_of, decode_sent, read_body
from penstock.config.front_end import Limits
from penstock.fairness import FairBudget, Share
from penstock.wire.errors import RequestError

MIB = 2**20
CODINGS: dict[str, Any] = {"gzip": gzip.compress, "x-gzip": gzip.compress, "GZIP": gzip.compress, "deflate": zlib.compress}
if (ZSTD := find_zstd()) is not None:
    CODINGS["zstd"] = ZSTD.compress


def words(size: int) -> bytes:
    """Text that shrinks, but not much."""
    chance = random.Random(size)
    return b"".join(chance.choice([b"river ", b"sluice ", b"gate ", b"%d " % chance.randrange(10**9)]) for _ in range(size // 6 + 1))[:size]


async def read(body: bytes, encoding: str, limit: int = 32 * MIB, bodies: FairBudget | None = None, pieces: int = 3) -> bytes:
    size = len(body) // pieces + 1
    parts = [body[start : start + size] for start in range(0, len(body), size)] or [b""]

    async def receive() -> Any:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    scope = {"headers": [(b"content-length", b"%d" % len(body)), (b"content-encoding", encoding.encode())]}
    limits, bodies, share = Limits(max_body_bytes=limit), bodies or FairBudget(100 * MIB), Share()
    coding = coding_of(scope)
    sent = await read_body(scope, receive, limits, bodies, share)
    return sent if coding is None else await decode_sent(sent, coding, limits, bodies, share)


async def refused(body: bytes, encoding: str, **settings: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await read(body, encoding, **settings)
    return caught.value


@pytest.mark.parametrize("size", [0, 1, 5000, PIECE_BYTES, 3 * MIB])
@pytest.mark.parametrize("encoding", CODINGS)
async def test_what_was_compressed_is_read_whole(encoding: str, size: int) -> None:
    body, bodies = words(size), FairBudget(100 * MIB)
    compressed = CODINGS[encoding](body)
    assert await read(compressed, encoding, bodies=bodies) == body
    assert bodies.used == len(compressed) + len(body), "both are in memory, and are counted"


async def test_identity_is_no_encoding() -> None:
    assert await read(b"{}", "identity", pieces=1) == b"{}"


@pytest.mark.parametrize("encoding", CODINGS)
async def test_a_decoded_body_may_not_be_over_the_limit(encoding: str) -> None:
    compressed = CODINGS[encoding](words(300_000))
    assert len(compressed) < 200_000
    error = await refused(compressed, encoding, limit=200_000)
    assert (error.status, error.code, error.limit) == (413, "body_too_large", "max_body_bytes")
    assert "over 200,000 bytes when it is decoded" in error.message


@pytest.mark.parametrize("encoding", CODINGS)
async def test_a_bomb_is_refused_long_before_it_is_decoded(encoding: str) -> None:
    bodies = FairBudget(100 * MIB)
    bomb = CODINGS[encoding](bytes(32 * MIB))
    error = await refused(bomb[:20_000], encoding, bodies=bodies)
    assert (error.status, error.code) == (413, "body_too_large")
    assert bodies.used <= 20_000 + max(MIN_ALLOWED_BYTES, 100 * len(bomb[:20_000])) + PIECE_BYTES


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda body: body[:-9], "it ends too early"),
        (lambda body: body + b"more", "there are bytes after its end"),
        (lambda body: b"{" + body, ""),
        (lambda _: b'{"model": "m"}', ""),
        (lambda _: b"", "it ends too early"),
    ],
    ids=["cut", "longer", "shifted", "not compressed", "empty"],
)
@pytest.mark.parametrize("encoding", CODINGS)
async def test_what_cannot_be_decoded_is_refused(encoding: str, damage: Any, says: str) -> None:
    error = await refused(damage(CODINGS[encoding](words(5000))), encoding, pieces=1)
    assert (error.status, error.code) == (400, "invalid_encoding")
    assert says in error.message


@pytest.mark.parametrize("encoding", ["br", "gzip, gzip", "snappy", "x" * 1000, ""])
async def test_an_unknown_encoding_is_refused_by_name(encoding: str) -> None:
    error = await refused(b"{}", encoding)
    assert (error.status, error.code, error.param) == (415, "unsupported_encoding", "content-encoding")
    assert repr(encoding[:80]) in error.message
    assert "expected gzip" in error.message


def test_without_the_package_zstd_is_refused_with_what_it_needs() -> None:
    with pytest.raises(RequestError, match=r"pip install 'penstock\[zstd\]'") as caught:
        find_coding(b"zstd", None)
    assert caught.value.status == 415


async def test_other_work_goes_on_while_a_body_is_decoded() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    compressed = gzip.compress(words(8 * MIB), 1)
    before = turns
    await read(compressed, "gzip")
    counting.cancel()
    await asyncio.wait([counting])
    assert turns - before >= 8 * MIB // PIECE_BYTES, "at least one turn of the loop for every piece"


@pytest.mark.skipif(ZSTD is None, reason="zstd is not installed")
async def test_a_window_that_would_take_much_memory_is_refused() -> None:
    assert ZSTD is not None
    compressed = ZSTD.compress(words(64 * MIB), options={ZSTD.CompressionParameter.window_log: 27})
    error = await refused(compressed, "zstd", limit=100 * MIB)
    assert (error.status, error.code) == (400, "invalid_encoding")
