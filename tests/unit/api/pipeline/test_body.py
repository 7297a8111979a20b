"""Whatever a client sends is a request, or an error that says what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.types import Receive

from front_end import at_once
from penstock.api.openai.schema import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, ChatRequest, CompletionRequest
from penstock.api.pipeline.request import decode_body, read_body
from penstock.config.front_end import Limits
from penstock.fairness import FairBudget, Share
from penstock.wire.errors import RequestError

KINDS: list[tuple[msgspec.json.Decoder[Any], frozenset[str]]] = [
    (msgspec.json.Decoder(CompletionRequest), UNSUPPORTED_COMPLETION),
    (msgspec.json.Decoder(ChatRequest), UNSUPPORTED_CHAT),
]
FIELDS = sorted({*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__, "unknown", ""})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3))


def decode(body: bytes, kind: int) -> None:
    decoder, unsupported = KINDS[kind]
    try:
        at_once(decode_body(body, decoder, unsupported))
    except RequestError as error:
        assert error.message
        assert error.status == 400


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4), st.integers(0, 1))
def test_any_values_of_any_fields(fields: dict[str, Any], kind: int) -> None:
    decode(json.dumps({"model": "m", "prompt": "x", **fields}).encode(), kind)


@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 255)), max_size=4),
    st.integers(0, 1),
)
@example({"prompt": 5, "stop": "a"}, [(36, 0xDE)], 0)  # wrong in a field, and no JSON behind it
@example({"prompt": 5, "stop": "a"}, [(37, 0xFF)], 0)
def test_any_bytes_that_were_almost_a_request(fields: dict[str, Any], changes: list[tuple[int, int]], kind: int) -> None:
    body = bytearray(json.dumps({"model": "m", "prompt": "x", **fields}).encode())
    for position, byte in changes:
        body[position % len(body)] = byte
    decode(bytes(body), kind)


class Client:
    """Sends these pieces of a body one after the other, then nothing more."""

    def __init__(self, *pieces: bytes, headers: dict[bytes, bytes] | None = None) -> None:
        self.scope = {"headers": list((headers or {}).items())}
        self.pieces = list(pieces)

    async def receive(self) -> Any:
        if not self.pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": self.pieces.pop(0), "more_body": True}


def read(client: Client, receive: Receive, seconds: float) -> Awaitable[bytes]:
    limits = Limits(max_body_bytes=100, stall_seconds=seconds)
    return read_body(client.scope, receive, limits, FairBudget(100), Share())


@pytest.mark.parametrize("pieces", [(b"abcd",), (b"ab", b"", b"cd")])
async def test_a_body_of_known_length_ends_with_its_last_byte(pieces: tuple[bytes, ...]) -> None:
    client = Client(*pieces, b"of the next request", headers={b"content-length": b"4"})
    assert await read(client, client.receive, 10) == b"abcd"
    assert client.pieces == [b"of the next request"]


async def test_a_large_body_is_not_copied_at_its_end() -> None:
    pieces = [bytes([number]) * 2**18 for number in range(8)]
    client = Client(*pieces, headers={b"content-length": str(2**21).encode()})
    limits = Limits(max_body_bytes=2**21, stall_seconds=10)
    body = await read_body(client.scope, client.receive, limits, FairBudget(2**21), Share())
    assert body == b"".join(pieces)
    assert type(body).__name__ == "bytearray"


async def test_a_body_that_does_not_end_is_refused_and_nothing_else_is_cancelled() -> None:
    client = Client(b"ab")
    with pytest.raises(RequestError) as caught:
        await read(client, client.receive, 0.01)
    assert (caught.value.status, caught.value.code) == (408, "request_timeout")
    await asyncio.sleep(0)


async def test_a_body_that_trickles_is_refused_when_its_time_is_over() -> None:
    """Every piece is there at once, so the deadline never finds the task waiting."""
    client = Client()

    async def trickle() -> Any:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    with pytest.raises(RequestError) as caught:
        async with asyncio.timeout(10):
            await read(client, trickle, 0.01)
    assert caught.value.status == 408


async def test_bodies_of_known_length_do_not_wait_for_each_others_bytes() -> None:
    """Together they are too large. Byte by byte, each would get a part of the room, and neither would end."""
    limits, bodies = Limits(max_body_bytes=100, stall_seconds=10), FairBudget(100)
    shares = [Share("a"), Share("a")]
    clients = [Client(*[b"x" * 10] * 8, headers={b"content-length": b"80"}) for _ in shares]

    async def slowly(client: Client) -> Any:
        await asyncio.sleep(0)
        return await client.receive()

    async def body(client: Client, share: Share) -> bytes:
        try:
            return await read_body(client.scope, lambda: slowly(client), limits, bodies, share)
        finally:
            bodies.release(share)

    tasks = [asyncio.create_task(body(*each)) for each in zip(clients, shares, strict=True)]
    await asyncio.sleep(0)
    assert [share.held for share in shares] == [80, 0]
    async with asyncio.timeout(5):
        assert await asyncio.gather(*tasks) == [b"x" * 80] * 2
    assert bodies.used == 0
