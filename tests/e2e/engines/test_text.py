"""Text, tokens, finish reasons and usage: to the letter what transformers makes of the same prompt."""

from __future__ import annotations

from itertools import pairwise

import pytest

from chat_model import END_ID, random_prompt
from e2e.engines.asking import chat, complete
from e2e.engines.expected import Biased, Judge, late_end
from e2e.engines.setups import CONTEXT_LENGTH, MODEL, Setup
from e2e.harness import Server

PROMPTS = ("The river runs", "a heavy stone in cold water", 'def sum(first, second):\n    return "', "Grüße an 世界 🌊", "x")
streamed_or_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@streamed_or_whole
@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_completion(server: Server, judge: Judge, prompt: str, stream: bool) -> None:
    answer = complete(server, prompt, stream, max_tokens=48)
    answer.check([judge.complete(prompt, 48)])


@streamed_or_whole
@pytest.mark.parametrize("content", PROMPTS)
def test_a_chat(server: Server, judge: Judge, content: str, stream: bool) -> None:
    answer = chat(server, content, stream, max_tokens=48)
    answer.check([judge.chat(content, 48)])


@streamed_or_whole
def test_a_conversation(server: Server, judge: Judge, stream: bool) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": "The long one."},
        {"role": "user", "content": "And where does it end?"},
    ]
    chat(server, messages, stream, max_tokens=32).check([judge.chat(messages, 32)])


def test_a_stream_comes_in_pieces(server: Server, judge: Judge) -> None:
    """Nobody reads so slowly that all of it would have become one event."""
    answer = complete(server, PROMPTS[0], stream=True, max_tokens=100)
    answer.check([judge.complete(PROMPTS[0], 100)])
    assert len(answer.order) > 5


def test_a_prompt_of_token_ids(server: Server, judge: Judge) -> None:
    prompt = random_prompt(1, 40)
    complete(server, prompt, stream=True, max_tokens=24).check([judge.complete(prompt, 24)])


def test_completions_have_sixteen_tokens_by_default(server: Server, judge: Judge) -> None:
    complete(server, "once", stream=False).check([judge.complete("once", 16)])


@streamed_or_whole
def test_one_token(server: Server, judge: Judge, stream: bool) -> None:
    complete(server, "once more", stream, max_tokens=1).check([judge.complete("once more", 1)])


def test_the_context_can_be_filled_to_the_last_token(server: Server, judge: Judge) -> None:
    prompt = random_prompt(2, CONTEXT_LENGTH - 8)
    complete(server, prompt, stream=True, max_tokens=8).check([judge.complete(prompt, 8)])


@streamed_or_whole
def test_prompts_and_choices(server: Server, judge: Judge, stream: bool) -> None:
    """Three choices for each of the prompts, which are as many as are computed at once and more."""
    answer = complete(server, list(PROMPTS), stream, max_tokens=40, n=3)
    expected = [judge.complete(prompt, 40) for prompt in PROMPTS for _ in range(3)]
    assert [answer.texts[index] for index in range(15)] == [one.text for one in expected]
    assert [answer.finish_reasons[index] for index in range(15)] == [one.finish_reason for one in expected]
    answer.check_usage(sum(len(judge.encode(prompt)) for prompt in PROMPTS), sum(len(one.token_ids) for one in expected))
    if stream:
        turns = [after for before, after in pairwise(answer.order) if before != after]
        assert len(turns) > 30, "they came one after the other"


@streamed_or_whole
def test_choices_of_a_chat(server: Server, judge: Judge, stream: bool) -> None:
    chat(server, "Tell me more.", stream, max_tokens=20, n=3).check([judge.chat("Tell me more.", 20)] * 3)


@streamed_or_whole
def test_the_end_of_a_message(server: Server, judge: Judge, stream: bool) -> None:
    """The model's own end is made likelier by so much that it comes, though not at once."""
    prompt, bias, place = late_end(judge)
    expected = judge.complete(prompt, 40, Biased({END_ID: bias}))
    assert (expected.finish_reason, len(expected.token_ids)) == ("stop", place + 1)
    complete(server, prompt, stream, max_tokens=40, logit_bias={str(END_ID): bias}).check([expected])


@streamed_or_whole
def test_what_is_cached_of_a_repeated_prompt(server: Server, judge: Judge, setup: Setup, stream: bool) -> None:
    for length in (40, 96, 97, 150):
        prompt = random_prompt(1000 * length + stream, length)
        first = complete(server, prompt, stream, max_tokens=4)
        again = complete(server, prompt, stream, max_tokens=4)
        assert (first.cached_tokens, again.cached_tokens) == (0, setup.reused(length)), length
        for answer in (first, again):
            answer.check([judge.complete(prompt, 4)])


def test_what_is_cached_of_a_longer_prompt(server: Server, judge: Judge, setup: Setup) -> None:
    """What was generated is reused, too: the next turn of an agent begins with it."""
    prompt = random_prompt(77, 50)
    first = complete(server, prompt, stream=True, max_tokens=80)
    longer = (*prompt, *first.token_ids[0], *random_prompt(78, 30))
    second = complete(server, longer, stream=True, max_tokens=10)
    second.check([judge.complete(longer, 10)])
    # The last token was never computed: nothing came behind it.
    assert second.cached_tokens == (50 + 80 - 1) // setup.block_size * setup.block_size


def test_the_model_is_told(server: Server, setup: Setup) -> None:
    [model] = server.client.models.list().data
    details = (model.model_extra or {})["penstock"]
    assert (model.id, details["engine"], details["context_length"]) == (MODEL, setup.engine, CONTEXT_LENGTH)
    assert {"kv_events", "sessions", "logprobs", "prompt_logprobs", "grammar"} <= set(details["capabilities"])
    assert details["tool_parser"] == "hermes"
