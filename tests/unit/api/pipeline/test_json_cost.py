"""No body holds the event loop for long: it is decoded quickly, or refused before."""

from __future__ import annotations

import gc
import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from front_end import FrontEnd, Turns, says
from penstock.api.anthropic.schema import MessagesRequest
from penstock.api.openai.schema import ChatRequest, CompletionRequest
from penstock.api.pipeline.json_cost import MAX_COST, MIN_BYTES, PIECE_BYTES, is_slow, piece_costs
from penstock.api.pipeline.request import MAX_TYPED_BYTES, decode_body
from penstock.wire.errors import RequestError

MIB = 2**20
COMPLETION = msgspec.json.Decoder(CompletionRequest)


def repeated(element: str, size: int = MIB) -> bytes:
    return f'{{"model": "m", "prompt": [{",".join([element] * (size // (len(element) + 1)))}]}}'.encode()


@pytest.mark.parametrize(
    "body",
    [
        repeated("[]"),  # 25 ms
        repeated('{"a":1}'),  # 28 ms
        repeated("1e308", 64 * 1024),  # 140 ms
        repeated("9e-323", 8 * 1024),  # 25 ms
        repeated("1" * 4300),  # 30 ms
        repeated('""', 2 * MIB),  # 12 ms
        b'{"model": "m", "prompt": "' + b"\\n" * 2 * MIB + b'"}',  # 12 ms
        b" " * 8 * MIB + b'{"model": "m", "prompt": "x"}',  # 17 ms
        json.dumps({"model": "m", "prompt": [{f"{number:x}": 1} for number in range(60_000)]}).encode(),
    ],
    ids=["arrays", "objects", "large floats", "small floats", "long numbers", "strings", "escapes", "spaces", "keys"],
)
async def test_json_that_is_slow_to_decode_is_refused(body: bytes) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("POST", "/v1/completions", body)
    assert (front_end.status, front_end.json["error"]["code"]) == (413, "body_too_complex")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": list(range(100_000, 300_000))},
        {"prompt": 'Some, [text] {with}: "JSON", 1e308, and\nlines. ' * 80_000},
        {"prompt": "水" * MIB},
        {"prompt": ["word"] * 100_000},
        {"prompt": [0.125] * 1000, "user": "1e308, " * 1000},
    ],
    ids=["token ids", "text", "other scripts", "many texts", "floats"],
)
async def test_what_people_send_is_decoded(fields: dict[str, Any]) -> None:
    request = await decode_body(json.dumps({"model": "m", **fields}).encode(), COMPLETION, frozenset())
    assert request.prompt == fields["prompt"]


async def test_others_go_on_while_a_long_body_is_looked_at() -> None:
    body = json.dumps({"model": "m", "prompt": "word " * 400_000}).encode()
    async with Turns() as turns:
        await decode_body(body, COMPLETION, frozenset())
        assert turns.count >= len(body) // PIECE_BYTES


CHAT, MESSAGES = msgspec.json.Decoder(ChatRequest), msgspec.json.Decoder(MessagesRequest)
LONG = "word " * (MAX_TYPED_BYTES // 5)


def last(text: str) -> dict[str, Any]:
    """A message with the tag of each object at its end."""
    inner = {"source": {"content": [{"text": text, "type": "text"}], "type": "content"}, "type": "document"}
    return {"content": [{"content": [inner], "tool_use_id": "a", "type": "tool_result"}], "role": "user"}


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (CHAT, {"content": [{"text": LONG, "type": "text"}], "role": "user"}),
        (CHAT, {"role": "user", "content": LONG}),
        (MESSAGES, last(LONG)),
    ],
    ids=["tags last", "tags first", "nested"],
)
async def test_a_long_body_is_read_once(decoder: Any, message: dict[str, Any]) -> None:
    """The typed decoder is not asked: wherever tags stand, plain values come first, and then their types, each in its own turn."""
    body = json.dumps({"model": "m", "max_tokens": 1, "messages": [message]}).encode()

    class Untouched:
        type = decoder.type

    taken = []

    async def turn() -> None:
        taken.append(1)

    found: Any = await decode_body(body, Untouched(), frozenset(), turn=turn)  # type: ignore[arg-type]
    assert found == decoder.decode(body)
    assert len(taken) >= len(body) // PIECE_BYTES + 2


@pytest.mark.parametrize(
    ("message", "param"),
    [({"content": LONG, "role": "robot"}, "messages[0].role"), ({"content": LONG, "x": 1, "role": "user"}, "messages[0].x")],
)
async def test_what_is_wrong_in_a_long_body_is_named(message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        await decode_body(json.dumps({"model": "m", "messages": [message]}).encode(), CHAT, frozenset())
    assert caught.value.param == param


async def test_others_go_on_while_an_error_is_explained() -> None:
    body = json.dumps({"model": "m", "prompt": "word", "n": "x", "user": "y" * MIN_BYTES}).encode()
    async with Turns() as turns:
        with pytest.raises(RequestError, match="`n` is"):
            await decode_body(body, COMPLETION, frozenset())
        assert turns.count >= 2, "between decoding, decoding again, and explaining"


@pytest.mark.parametrize(
    ("body", "quick"),
    [
        (json.dumps({"model": "m", "prompt": "Some, [text] with: 1e308, 2e308. " * 100}).encode(), False),
        (json.dumps({"model": "m", "prompt": "Some text, of [many] words: and numbers, 1, 2.5. " * 80}).encode(), True),
        (json.dumps({"model": "m", "prompt": list(range(1000, 1600))}).encode(), True),
        (repeated("1e308", 400), True),
        (repeated("1e308", 1000), False),
        (repeated("1" * 20, 4000), False),
        (json.dumps({"model": "m", "prompt": [1e308] * 490, "user": "y" * 30_000}).encode(), False),
        (json.dumps({"model": "m", "prompt": "word " * 10_000}).encode(), True),
    ],
)
async def test_short_bodies_with_slow_numbers_take_turns(body: bytes, quick: bool) -> None:
    taken = []

    async def turn() -> None:
        taken.append(1)

    await decode_body(body, COMPLETION, frozenset(), turn=turn)
    assert len(taken) == (0 if len(body) <= MIN_BYTES else 1) if quick else len(taken) >= 2


@pytest.mark.parametrize("before", range(PIECE_BYTES - 6, PIECE_BYTES + 2))
@pytest.mark.parametrize("text", ['\\"[[[[', '\\\\\\"[[[[', "\\\\\\\\[[[["])
def test_strings_are_told_from_values_wherever_a_piece_ends(text: str, before: int) -> None:
    string = '"' + "x" * before + text + '"'
    values = ",[],{}"
    outside = sum(piece_costs(values.encode())) - len(values) // 3
    alone = sum(piece_costs(string.encode()))
    assert abs(sum(piece_costs((string + values).encode())) - alone - outside) <= len(values)
    assert alone < 2 * before, "brackets in a string are text"


@pytest.mark.parametrize(
    ("text", "slow"),
    [
        ('{"path": "a.py", "lines": [1, 2, 3]}', False),
        ('{"x": 1e-5, "y": 0.12345678901234567890}', False),
        (json.dumps({"text": "word, " * 10_000}), False),
        (f"[{','.join(['1e308'] * 10)}]", True),
        (f"[{','.join(['[]'] * 200_000)}]", True),
        ('"\ud800' + "x" * MIN_BYTES, False),
    ],
)
def test_json_inside_a_string(text: str, slow: bool) -> None:
    assert is_slow(text) is slow


def test_the_most_messages_are_decoded() -> None:
    messages = [{"role": "user", "content": "x"}] * 16_384
    assert sum(piece_costs(json.dumps({"model": "m", "messages": messages}).encode())) < MAX_COST


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "stop": ["y"] * 1000}),
        ("/v1/completions", {"prompt": "x", "n": "many"}),
        ("/v1/completions", {"prompt": "x", "unknown": 1}),
        ("/v1/completions", {"prompt": "word " * 20_000}),
        ("/v1/completions", {"prompt": [1e308] * 2000}),
        ("/v1/completions", {"prompt": "x", "model": "unknown"}),
        ("/v1/completions", {"prompt": "x", "temperature": 9}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 20_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "unknown"}]}),
        ("/v1/responses", {"input": [{"role": "nobody", "content": "x"}]}),
        ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "unknown"}]}]}),
    ],
)
async def test_a_refused_body_is_not_kept(path: str, fields: dict[str, Any]) -> None:
    """A cycle of references keeps it until the garbage collector runs, which may be after hundreds of such bodies."""
    body = json.dumps({"model": "m", **fields, "user": "y" * MIB}).encode()
    front_end = FrontEnd(says("x"))
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        for _ in range(5):
            await front_end.send("POST", path, bytes(bytearray(body)))
            assert front_end.status >= 400
        assert tracemalloc.get_traced_memory()[0] < 3 * MIB
    finally:
        tracemalloc.stop()
        gc.enable()
