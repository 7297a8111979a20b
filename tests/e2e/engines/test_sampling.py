"""What a client can ask of the choice of tokens, and be told of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from chat_model import END_ID, random_prompt
from e2e.engines.asking import chat, complete
from e2e.engines.expected import Biased, Expected, Judge, late_end
from e2e.engines.setups import MODEL, Setup
from e2e.harness import Server

CLOSE = 1e-3
streamed_or_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def stopped(judge: Judge, free: Expected, stop: str) -> tuple[str, int]:
    """The text before a stop string, and how many tokens it took to complete that."""
    tokens = next(count for count in range(len(free.token_ids) + 1) if stop in judge.decode(free.token_ids[:count]))
    return free.text[: free.text.index(stop)], tokens


def over_a_boundary(judge: Judge, free: Expected) -> str:
    """A text of the answer's middle that begins in one token and ends in the next."""
    for place in range(len(free.token_ids) // 2, len(free.token_ids) - 1):
        first, second = (judge.pieces[token] for token in free.token_ids[place : place + 2])
        found = (first[-2:] + second[:2]).decode("ascii", "ignore")
        if len(found) == 4 and free.text.count(found) == 1:
            return found
    raise AssertionError(free.text)


@streamed_or_whole
def test_a_stop_string_over_a_boundary(server: Server, judge: Judge, stream: bool) -> None:
    free = judge.complete("The river runs", 100)
    stop = over_a_boundary(judge, free)
    text, tokens = stopped(judge, free, stop)
    answer = complete(server, "The river runs", stream, max_tokens=100, stop=["never this one", stop])
    assert (answer.texts[0], answer.finish_reasons[0]) == (text, "stop")
    answer.check_usage(len(free.prompt_ids), tokens)


@streamed_or_whole
def test_a_stop_string_of_one_choice_leaves_the_others(server: Server, judge: Judge, stream: bool) -> None:
    prompts = ["The river runs", "a heavy stone in cold water"]
    first, second = (judge.complete(prompt, 60) for prompt in prompts)
    stop = over_a_boundary(judge, second)
    assert stop not in first.text
    text, tokens = stopped(judge, second, stop)
    answer = complete(server, prompts, stream, max_tokens=60, stop=stop)
    assert (answer.texts[0], answer.texts[1]) == (first.text, text)
    assert (answer.finish_reasons[0], answer.finish_reasons[1]) == ("length", "stop")
    answer.check_usage(len(first.prompt_ids) + len(second.prompt_ids), 60 + tokens)


@streamed_or_whole
def test_stop_token_ids(server: Server, judge: Judge, stream: bool) -> None:
    """The token that stops is part of the answer, unlike a stop string."""
    free = judge.complete("a heavy stone in cold water", 40)
    token = next(token for place, token in enumerate(free.token_ids) if place > 9 and free.token_ids.index(token) == place)
    place = free.token_ids.index(token)
    answer = complete(server, "a heavy stone in cold water", stream, max_tokens=40, extra_body={"stop_token_ids": [token]})
    assert (answer.texts[0], answer.finish_reasons[0]) == (judge.decode(free.token_ids[: place + 1]), "stop")
    answer.check_usage(len(free.prompt_ids), place + 1)


@streamed_or_whole
def test_logprobs_of_a_chat(server: Server, judge: Judge, stream: bool) -> None:
    expected = judge.chat("Which way?", 24)
    fields: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Which way?"}], "max_tokens": 24, "temperature": 0}
    made: Any = server.client.chat.completions.create(**fields, logprobs=True, top_logprobs=5, stream=stream)
    told = [choice.logprobs for answer in (made if stream else [made]) for choice in answer.choices if choice.logprobs]
    entries = [entry for logprobs in told for entry in logprobs.content]
    assert [bytes(entry.bytes) for entry in entries] == [judge.pieces[token] for token in expected.token_ids]
    for place, entry in enumerate(entries):
        assert entry.logprob == pytest.approx(float(expected.logprobs[place, expected.token_ids[place]]), abs=CLOSE)
        best = expected.top(place, 5)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(list(best.values()), abs=CLOSE)
        assert {bytes(top.bytes) for top in entry.top_logprobs[:1]} == {judge.pieces[next(iter(best))]}


@streamed_or_whole
def test_logprobs_of_a_completion_and_its_echoed_prompt(server: Server, judge: Judge, stream: bool) -> None:
    """The first token of a prompt has none: nothing comes before it."""
    prompt, expected = "where the water is deep", judge.complete("where the water is deep", 20)
    fields: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 20, "temperature": 0, "echo": True, "logprobs": 3}
    made: Any = server.client.completions.create(**fields, stream=stream)
    choices = [choice for answer in (made if stream else [made]) for choice in answer.choices]
    assert "".join(choice.text for choice in choices) == prompt + expected.text
    values = [value for choice in choices if choice.logprobs for value in choice.logprobs.token_logprobs]
    tops = [top for choice in choices if choice.logprobs for top in choice.logprobs.top_logprobs]
    tokens = (*expected.prompt_ids, *expected.token_ids)
    logprobs = torch.cat([judge.prompt_logprobs(expected.prompt_ids), expected.logprobs])
    assert values[0] is tops[0] is None
    assert values[1:] == pytest.approx([float(logprobs[place, token]) for place, token in enumerate(tokens[1:])], abs=CLOSE)
    for place, top in enumerate(tops[1:]):
        best = logprobs[place].topk(3)
        for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            text = judge.pieces[token].decode("utf-8", "replace")
            # What is no text by itself is written as others are.
            assert "\N{REPLACEMENT CHARACTER}" in text or top[text] == pytest.approx(value, abs=CLOSE)


def test_echo_alone_computes_the_prompt_and_no_more(server: Server, judge: Judge) -> None:
    ids = judge.encode("in the deep forest")
    answer = server.client.completions.create(model=MODEL, prompt="in the deep forest", max_tokens=0, echo=True, logprobs=1)
    [choice] = answer.choices
    assert choice.text == "in the deep forest"
    assert choice.logprobs is not None
    values = choice.logprobs.token_logprobs or []
    logprobs = judge.prompt_logprobs(ids)
    assert values[1:] == pytest.approx([float(logprobs[place, token]) for place, token in enumerate(ids[1:])], abs=CLOSE)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 0)


@streamed_or_whole
def test_echo_without_logprobs(server: Server, judge: Judge, stream: bool) -> None:
    expected = judge.complete("Grüße an 世界", 12)
    answer = complete(server, "Grüße an 世界", stream, max_tokens=12, echo=True)
    assert answer.texts[0] == "Grüße an 世界" + expected.text
    answer.check_usage(len(expected.prompt_ids), 12)


def test_logit_bias_forces_and_forbids(server: Server, judge: Judge) -> None:
    forced = complete(server, "once", stream=True, max_tokens=3, logit_bias={"400": 100})
    assert forced.token_ids[0] == [400] * 3
    first = judge.complete("once", 20).token_ids[0]
    forbidden = judge.complete("once", 20, Biased({first: -100.0}))
    assert forbidden.token_ids[0] != first
    complete(server, "once", stream=True, max_tokens=20, logit_bias={str(first): -100}).check([forbidden])


class Penalized:
    """As OpenAI defines them: by what was generated, the one for having come at all, the other for every time. The `late` newest tokens
    are not seen yet."""

    def __init__(self, presence: float, frequency: float, late: int) -> None:
        self._presence, self._frequency, self._late = presence, frequency, late

    def __call__(self, scores: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
        seen = torch.tensor(before[: len(before) - self._late], dtype=torch.int64)
        counts = torch.bincount(seen, minlength=len(scores))
        return scores - self._presence * (counts > 0) - self._frequency * counts


def test_penalties(server: Server, judge: Judge, setup: Setup) -> None:
    """A bias makes the model repeat itself, and the penalties stop it after as many times as they must."""
    biased, penalized = Biased({400: 14.0, 401: 13.0}), Penalized(0.5, 1.5, late=int("counts in time" in setup.lacks))
    expected = judge.complete("again", 40, lambda scores, before: penalized(biased(scores, before), before))
    assert 3 <= expected.token_ids.count(400) <= 20
    fields = {"presence_penalty": 0.5, "frequency_penalty": 1.5, "logit_bias": {"400": 14, "401": 13}}
    complete(server, "again", stream=True, max_tokens=40, **fields).check([expected])


def test_at_least_so_many_tokens(server: Server, judge: Judge) -> None:
    """The end would come at once, if it could."""

    def later(scores: torch.Tensor, before: Any) -> torch.Tensor:
        return scores.index_fill(0, torch.tensor([END_ID]), -torch.inf if len(before) < 7 else 100.0)

    expected = judge.complete("not yet", 30, later)
    assert (len(expected.token_ids), expected.finish_reason) == (8, "stop")
    bias = {str(END_ID): 100}
    complete(server, "not yet", stream=True, max_tokens=30, logit_bias=bias, extra_body={"min_tokens": 7}).check([expected])
    assert complete(server, "not yet", stream=True, max_tokens=30, logit_bias=bias).token_ids[0] == [END_ID]


def test_the_end_can_be_ignored(server: Server, judge: Judge) -> None:
    prompt, bias, place = late_end(judge)
    fields: dict[str, Any] = {"max_tokens": 40, "logit_bias": {str(END_ID): bias}}
    answer = complete(server, prompt, stream=True, **fields, extra_body={"ignore_eos": True})
    assert (len(answer.token_ids[0]), answer.token_ids[0][place], answer.finish_reasons[0]) == (40, END_ID, "length")


def test_seeds(server: Server, setup: Setup) -> None:
    """A seed gives one text, whatever is computed beside it; another one another; and a choice of several has one of its own."""
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1}
    alone = complete(server, "Once upon a time", stream=False, seed=5, **fields)
    again = complete(server, "Once upon a time", stream=True, seed=5, **fields)
    other = complete(server, "Once upon a time", stream=True, seed=6, **fields)
    several = complete(server, "Once upon a time", stream=True, seed=5, n=4, **fields)
    assert alone.token_ids[0] != other.token_ids[0]
    assert len({several.texts[index] for index in range(4)}) == 4
    assert (alone.token_ids[0] == again.token_ids[0]) == ("seeds" not in setup.lacks)
    if "seeds" in setup.lacks:
        return
    assert several.token_ids[0] == alone.token_ids[0]
    assert several.texts == complete(server, "Once upon a time", stream=False, seed=5, n=4, **fields).texts


def test_without_a_seed_every_answer_is_another(server: Server) -> None:
    answer = complete(server, "Once upon a time", stream=False, max_tokens=16, temperature=1, n=3)
    assert len(set(answer.texts.values())) == 3


def test_only_the_likeliest(server: Server, judge: Judge) -> None:
    """Top-k of one is greedy at any temperature, as is a top-p that only the likeliest is in, or a min-p that no other reaches."""
    prompt = random_prompt(9, 20)
    expected = judge.complete(prompt, 20)
    for narrow in ({"top_p": 1e-9}, {"extra_body": {"top_k": 1}}, {"extra_body": {"min_p": 1.0}}):
        complete(server, prompt, stream=True, max_tokens=20, temperature=1.0, seed=1, **narrow).check([expected])


@streamed_or_whole
def test_a_chat_that_stops(server: Server, judge: Judge, stream: bool) -> None:
    free = judge.chat("Which way?", 60)
    stop = over_a_boundary(judge, free)
    text, tokens = stopped(judge, free, stop)
    answer = chat(server, "Which way?", stream, max_tokens=60, stop=stop)
    assert (answer.texts[0], answer.finish_reasons[0]) == (text, "stop")
    answer.check_usage(len(free.prompt_ids), tokens)
