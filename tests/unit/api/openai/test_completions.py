"""What /v1/completions answers beyond its text."""

from __future__ import annotations

from typing import Any

import pytest

from front_end import FrontEnd, says
from penstock.api.openai.completions import parse_completion
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import RequestError
from penstock.wire.messages import Delta, Finish, Submit, TokenLogprob


def by_order(*answers: tuple[str, float]) -> Any:
    """The first generation is the first of these, and so on, every token with the logprob given."""
    left = list(answers)

    async def produce(request: Submit, mailbox: Mailbox) -> None:
        text, logprob = left.pop(0)
        token_ids = tuple(text.encode())
        logprobs = None if request.logprobs is None else tuple(TokenLogprob(logprob) for _ in token_ids)
        mailbox.put(Delta(0, token_ids, logprobs))
        mailbox.end(Finish("stop"))

    return produce


async def test_best_of_answers_with_the_likeliest() -> None:
    front_end = FrontEnd(by_order(("a" * 9, -0.5), ("b", -0.1), ("c", -3.0), ("d", -0.2)))
    await front_end.post(best_of=4, n=2)
    choices = front_end.json["choices"]
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in choices] == [(0, "b", None), (1, "d", None)]
    assert front_end.json["usage"]["completion_tokens"] == 12


async def test_best_of_works_a_prompt() -> None:
    front_end = FrontEnd(by_order(("a", -1.0), ("b", -0.1), ("c", -0.1), ("d", -0.2)))
    await front_end.post(prompt=["x", "y"], best_of=2, return_token_ids=True)
    choices = front_end.json["choices"]
    assert [choice["text"] for choice in choices] == ["b", "c"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[ord("x")], [ord("y")]]
    assert [choice["token_ids"] for choice in choices] == [[ord("b")], [ord("c")]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"suffix": "."}, "suffix"),
        ({"suffix": ".", "prompt": ["a", "b"]}, "suffix"),
        ({"suffix": ".", "prompt": [1, 2]}, "suffix"),
    ],
)
async def test_what_cannot_be_is_refused(fields: dict[str, Any], param: str) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.post(**fields)
    assert front_end.status == 400
    assert front_end.json["error"]["param"] == param


async def test_token_ids_come_with_every_event_and_the_prompts_with_the_first() -> None:
    front_end = FrontEnd(says("ab", "c"))
    await front_end.post(stream=True, return_token_ids=True)
    first, *others = front_end.events
    assert first["prompt_token_ids"] == [ord("x")]
    assert all("prompt_token_ids" not in event for event in others)
    assert [token for event in front_end.events for token in event["choices"][0]["token_ids"]] == list(b"abc")


async def test_without_being_asked_no_token_ids() -> None:
    front_end = FrontEnd(says("ab"))
    await front_end.post()
    assert "token_ids" not in front_end.json["choices"][0]
    assert "prompt_token_ids" not in front_end.json


async def test_continuous_usage_comes_with_every_event() -> None:
    front_end = FrontEnd(says("ab", "c"))
    await front_end.post(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    usages = [event["usage"]["completion_tokens"] for event in front_end.events]
    assert usages[-1] == 3
    assert usages == sorted(usages)
    assert None not in usages


async def test_the_service_tier_is_told_when_it_was_asked_for() -> None:
    front_end = FrontEnd(says("a"))
    await front_end.post(service_tier="flex")
    assert front_end.json["service_tier"] == "default"
    await front_end.post()
    assert "service_tier" not in front_end.json


async def test_a_stop_string_is_part_of_the_text_when_asked_for() -> None:
    front_end = FrontEnd(says("one, two", " three"))
    await front_end.post(stop=", t", include_stop_str_in_output=True)
    assert front_end.json["choices"][0]["text"] == "one, t"
    await front_end.post(stop=", t")
    assert front_end.json["choices"][0]["text"] == "one"


async def test_suffix_fills_in_the_middle_where_the_vocabulary_can() -> None:
    from front_end import request

    with pytest.raises(RequestError, match="no tokens to fill in the middle"):
        await parse_completion(*await request({"model": "m", "prompt": "x", "suffix": "y"}))
