"""POST /v1/completions through the real client, against predicted text."""

from __future__ import annotations

from collections import defaultdict

import pytest

from e2e.harness import Server
from e2e.predicted import WORDS, predicted


def test_whole(server: Server) -> None:
    answer = server.client.completions.create(model="simulator", prompt="hello water", max_tokens=20, seed=5)
    assert answer.choices[0].text == predicted(5, 20)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens == len(WORDS.encode("hello water"))


def test_streamed(server: Server) -> None:
    stream = server.client.completions.create(
        model="simulator", prompt="hello", max_tokens=20, seed=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == predicted(5, 20)
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_default_is_sixteen_tokens(server: Server) -> None:
    assert server.client.completions.create(model="simulator", prompt="hi", seed=1).choices[0].text == predicted(1, 16)


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("one", 1), (["one", "two"], 2), ([300, 301], 1), ([[300, 301], [302]], 2)],
)
def test_every_kind_of_prompt(server: Server, prompt: list[str], choices: int) -> None:
    answer = server.client.completions.create(model="simulator", prompt=prompt, max_tokens=4, seed=9)
    assert [choice.text for choice in answer.choices] == [predicted(9, 4)] * choices


def test_prompts_and_choices_run_at_once_and_interleave(server: Server) -> None:
    stream = server.client.completions.create(
        model="simulator", prompt=[f"prompt {n}" for n in range(8)], n=4, max_tokens=40, seed=100, stream=True
    )
    texts: dict[int, str] = defaultdict(str)
    first_seen: dict[int, int] = {}
    last_seen: dict[int, int] = {}
    finishes = 0
    for position, chunk in enumerate(stream):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        first_seen.setdefault(choice.index, position)
        last_seen[choice.index] = position
        finishes += choice.finish_reason is not None
    assert [texts[index] for index in range(32)] == [predicted(100 + index % 4, 40) for index in range(32)]
    assert finishes == 32
    assert max(first_seen.values()) < min(last_seen.values()), "they came one after the other"


def test_echo_gives_the_prompt_first(server: Server) -> None:
    answer = server.client.completions.create(model="simulator", prompt="Hello, 世界", max_tokens=3, seed=2, echo=True)
    assert answer.choices[0].text == "Hello, 世界" + predicted(2, 3)


def test_echo_alone_with_logprobs_of_the_prompt(server: Server) -> None:
    answer = server.client.completions.create(model="simulator", prompt="the water", max_tokens=0, echo=True, logprobs=1)
    (choice,) = answer.choices
    assert choice.text == "the water"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["t", "h", "e", " water"]
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[:1] == [None]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_it_and_what_lies_beyond_is_not_counted(server: Server, stream: bool) -> None:
    text = predicted(3, 50)
    words = text.split(" ")
    stop = f"{words[10][-2:]} {words[11][:2]}"  # over a token's boundary
    position = text.index(stop)
    completing = text[: position + len(stop)].count(" ")  # every token begins with a space
    if stream:
        chunks = list(
            server.client.completions.create(
                model="simulator",
                prompt="x",
                max_tokens=400,
                seed=3,
                stop=[stop, "never this"],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        got = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        reason = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1]
        usage = chunks[-1].usage
    else:
        answer = server.client.completions.create(model="simulator", prompt="x", max_tokens=400, seed=3, stop=stop)
        got, reason, usage = answer.choices[0].text, answer.choices[0].finish_reason, answer.usage
    assert got == text[:position]
    assert reason == "stop"
    assert usage is not None
    assert usage.completion_tokens == completing


def test_stopping_one_choice_leaves_the_others(server: Server) -> None:
    stop = predicted(7, 5).rsplit(" ", 1)[1]
    answer = server.client.completions.create(model="simulator", prompt="x", max_tokens=30, seed=6, n=2, stop=f" {stop}")
    assert answer.choices[1].text == predicted(7, 4)
    assert answer.choices[1].finish_reason == "stop"
    assert answer.choices[0].text == predicted(6, 30)


def test_logprobs_belong_to_their_tokens(server: Server) -> None:
    stream = server.client.completions.create(model="simulator", prompt="x", max_tokens=60, seed=3, logprobs=2, stream=True)
    tokens: list[str] = []
    offsets: list[int] = []
    for chunk in stream:
        probs = chunk.choices[0].logprobs
        assert probs is not None
        assert probs.tokens is not None
        assert probs.text_offset is not None
        tokens += probs.tokens
        offsets += probs.text_offset
    assert "".join(tokens) == predicted(3, 60)
    assert offsets == [len("".join(tokens[:index])) for index in range(60)]


def test_what_the_simulator_does_not_sample_by_is_accepted(server: Server) -> None:
    answer = server.client.completions.create(
        model="simulator", prompt="x", max_tokens=8, seed=3, logit_bias={"300": -100}, extra_body={"stop_token_ids": [300]}
    )
    assert answer.choices[0].text == predicted(3, 8)


def test_without_a_seed_every_answer_is_another(server: Server) -> None:
    answer = server.client.completions.create(model="simulator", prompt="x", max_tokens=10, n=3)
    assert len({choice.text for choice in answer.choices}) == 3


def test_it_ends_by_itself_unless_told_not_to(server: Server) -> None:
    free = server.client.completions.create(model="simulator", prompt="x", max_tokens=1500, seed=1)
    assert free.choices[0].finish_reason == "stop"
    forced = server.client.completions.create(model="simulator", prompt="x", max_tokens=1500, seed=1, extra_body={"ignore_eos": True})
    assert forced.choices[0].finish_reason == "length"
    assert forced.choices[0].text == predicted(1, 1500)
    longer = server.client.completions.create(model="simulator", prompt="x", max_tokens=1500, seed=1, extra_body={"min_tokens": 1300})
    assert longer.usage is not None
    assert longer.usage.completion_tokens == 1301


def test_a_repeated_prompt_says_what_was_cached(server: Server) -> None:
    prompt = list(range(300, 364))
    usages = [server.client.completions.create(model="simulator", prompt=prompt, max_tokens=2).usage for _ in range(2)]
    assert usages[1] is not None
    assert usages[1].prompt_tokens_details is not None
    assert usages[1].prompt_tokens_details.cached_tokens == 48
