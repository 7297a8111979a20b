"""Whatever a client sends is a request, or an error that says what is wrong."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.api.openai.schema import UNSUPPORTED_CHAT, UNSUPPORTED_COMPLETION, ChatRequest, CompletionRequest
from penstock.api.pipeline.request import decode_body
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
        decode_body(body, decoder, unsupported)
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
