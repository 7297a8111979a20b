"""Answers that take long to render are rendered in pieces, and are the same as in one piece."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from front_end import FrontEnd, Produce, Turns
from penstock.api.pipeline.choice import MAX_WEIGHT, pieces_of, weight_of
from penstock.api.pipeline.response import MAX_PIECE_BYTES, regrouped
from penstock.stream.mailbox import Arrival, Mailbox
from penstock.wire.codec import pack_logprobs, unpack_logprobs
from penstock.wire.errors import FrameMalformed
from penstock.wire.messages import Delta, Fault, Finish, PromptReport, Submit, TokenLogprob

PROMPT = 20_000
TOP = ((66, -0.5), (67, -1.5), (68, -2.5))


def entry(number: int) -> TokenLogprob:
    return TokenLogprob(-float(number % 7), TOP)


def says_much(tokens: int = 0, prompt: bool = False, end: str = "") -> Produce:
    """All in one delta, with logprobs: of the prompt, of `tokens` tokens, then `end`."""

    async def produce(request: Submit, mailbox: Mailbox) -> None:
        token_ids = (65,) * tokens + tuple(end.encode())
        asked = request.logprobs is not None
        of_prompt = pack_logprobs([None, *map(entry, range(1, len(request.token_ids)))]) if prompt else None
        logprobs = tuple(map(entry, range(len(token_ids)))) if asked else None
        mailbox.put(Delta(0, token_ids, logprobs, PromptReport(0, of_prompt)))
        mailbox.end(Finish("stop"))
        await asyncio.sleep(0)

    return produce


async def answered(produce: Produce, path: str = "/v1/completions", **fields: Any) -> tuple[FrontEnd, int]:
    """The front end with the answer, and how many turns others had meanwhile."""
    front_end = FrontEnd(produce, path=path, context_length=100_000)
    prompt: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": [65] * PROMPT}
    body = json.dumps({"model": "m", "max_tokens": 50_000, **prompt, **fields}).encode()
    async with Turns() as turns:
        await front_end.send("POST", path, body)
        assert front_end.status == 200, front_end.body
        return front_end, turns.count


def weight(tokens: int) -> int:
    return tokens * (1 + len(TOP))


async def test_an_echo_with_logprobs_is_rendered_in_pieces() -> None:
    front_end, turns = await answered(says_much(prompt=True, end="end"), echo=True, logprobs=3, n=4, max_tokens=10)
    assert turns > 2 * weight(PROMPT) // MAX_WEIGHT
    for choice in front_end.json["choices"]:
        logprobs = choice["logprobs"]
        assert choice["text"] == "A" * PROMPT + "end"
        assert logprobs["tokens"] == [*["A"] * PROMPT, "e", "n", "d"]
        assert logprobs["token_logprobs"] == [None, *(entry(number).logprob for number in range(1, PROMPT)), 0, -1, -2]
        assert logprobs["text_offset"] == list(range(PROMPT + 3))
        assert logprobs["top_logprobs"][:2] == [None, {"B": -0.5, "C": -1.5, "D": -2.5}]
    assert front_end.json["usage"]["completion_tokens"] == 12


async def test_a_streamed_echo_with_logprobs_is_rendered_in_pieces() -> None:
    front_end, turns = await answered(says_much(prompt=True, end="end"), echo=True, logprobs=3, n=2, stream=True, max_tokens=10)
    assert turns > weight(PROMPT) // MAX_WEIGHT
    for index in (0, 1):
        choices = [choice for event in front_end.events for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == "A" * PROMPT + "end"
        shown = [choice["logprobs"] for choice in choices if choice["logprobs"] is not None]
        assert max(len(logprobs["tokens"]) for logprobs in shown) <= MAX_WEIGHT
        assert [offset for logprobs in shown for offset in logprobs["text_offset"]] == list(range(PROMPT + 3))
        assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert front_end.body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_long_answer_with_logprobs_is_rendered_in_pieces(stream: bool) -> None:
    fields = {"logprobs": True, "top_logprobs": 3, "stream": stream}
    front_end, turns = await answered(says_much(20_000), "/v1/chat/completions", **fields)
    assert turns > weight(20_000) // MAX_WEIGHT // 2
    if stream:
        shown = [entry for event in front_end.events for entry in (event["choices"][0]["logprobs"] or {}).get("content", ())]
    else:
        (choice,) = front_end.json["choices"]
        shown = choice["logprobs"]["content"]
        assert choice["message"]["content"] == "A" * 20_000
    assert [entry["logprob"] for entry in shown] == [entry(number).logprob for number in range(20_000)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_in_an_early_piece_ends_the_answer(stream: bool) -> None:
    front_end, _ = await answered(says_much(0, end="AAstop" + "B" * 20_000), logprobs=3, stop="stop", stream=stream)
    choices = [event["choices"][0] for event in front_end.events] if stream else front_end.json["choices"]
    assert "".join(choice["text"] for choice in choices) == "AA"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]


async def test_tokens_that_many_stop_strings_are_looked_for_in_are_rendered_in_pieces() -> None:
    stops = ["never" * 400 + str(number) for number in range(16)]
    front_end, _ = await answered(says_much(20_000), stop=stops, stream=True)
    texts = [event["choices"][0]["text"] for event in front_end.events]
    assert "".join(texts) == "A" * 20_000
    assert max(map(len, texts)) <= MAX_WEIGHT / len(stops)


@pytest.mark.parametrize("fields", [{"return_token_ids": True}, {"echo": True}])
async def test_choices_that_repeat_a_long_prompt_are_sent_one_by_one(fields: dict[str, Any]) -> None:
    prompt = "word " * 90_000
    front_end, _ = await answered(says_much(1, end="x"), prompt=prompt, max_tokens=2, n=4, stream=True, **fields)
    assert front_end.tally.writes >= 4, "each prompt in a write of its own"
    texts = ["".join(event["choices"][0]["text"] for event in front_end.events if event["choices"][0]["index"] == n) for n in range(4)]
    assert texts == [(prompt if "echo" in fields else "") + "Ax"] * 4


async def test_thousands_of_choices_are_rendered_in_pieces() -> None:
    prompts = [[65]] * 2000
    front_end, turns = await answered(says_much(1, end="x"), prompt=prompts, max_tokens=2, stream=True)
    assert turns > 2000 * 8 // MAX_WEIGHT
    assert len({event["choices"][0]["index"] for event in front_end.events}) == 2000


@given(st.integers(0, 20_000), st.none() | st.integers(0, 5), st.none() | st.integers(1, 3000), st.booleans(), st.sampled_from([0.25, 34]))
def test_the_pieces_of_an_arrival_are_the_arrival(tokens: int, top: int | None, prompt: int | None, fails: bool, each: float) -> None:
    logprobs = None if top is None else tuple([TokenLogprob(-float(number), TOP[:top]) for number in range(tokens)])
    packed = None if prompt is None else pack_logprobs([None, *map(entry, range(1, prompt))])
    delta = Delta(7, tuple(range(tokens)), logprobs, PromptReport(3, packed, "open"))
    terminal = Fault("lost", "lost") if fails else Finish("stop")
    pieces = list(pieces_of(Arrival(5, delta, terminal), each))
    deltas = [piece.delta for piece in pieces if piece.delta is not None]
    assert all(weight_of(piece, each) <= 2 * MAX_WEIGHT for piece in pieces)
    assert [piece.terminal for piece in pieces] == [*[None] * (len(pieces) - 1), terminal]
    assert sum([piece.token_ids for piece in deltas], ()) == delta.token_ids
    assert sum([piece.logprobs or () for piece in deltas], ()) == (logprobs or ())
    assert tuple([part for piece in deltas if piece.prompt is not None for part in piece.prompt.logprobs or ()]) == (packed or ())
    assert deltas[0].prompt is not None
    assert (deltas[0].prompt.cached_tokens, deltas[0].prompt.session) == (3, "open")


def test_logprobs_that_are_none_are_refused() -> None:
    with pytest.raises(FrameMalformed):
        unpack_logprobs(b"\xc1")


@given(st.lists(st.integers(0, 3 * MAX_PIECE_BYTES), max_size=8))
def test_pieces_of_a_body_are_regrouped(sizes: list[int]) -> None:
    pieces = [bytes([number + 65]) * size for number, size in enumerate(sizes)]
    sent = list(regrouped(pieces))
    assert b"".join(sent) == b"".join(pieces)
    assert all(len(piece) <= MAX_PIECE_BYTES for piece in sent)
    assert all(len(piece) == MAX_PIECE_BYTES for piece in sent[:-1])
