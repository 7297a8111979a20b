"""POST /v1/chat/completions through the real client."""

from __future__ import annotations

from e2e.harness import Server
from e2e.predicted import predicted


def test_whole(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="simulator",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
        max_completion_tokens=12,
        seed=4,
    )
    assert answer.choices[0].message.content == predicted(4, 12)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12


def test_streamed_choices(server: Server) -> None:
    stream = server.client.chat.completions.create(
        model="simulator",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=12,
        seed=4,
        n=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = ["", "", ""]
    roles: list[int] = []
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles.append(choice.index)
    assert texts == [predicted(4 + index, 12) for index in range(3)]
    assert sorted(roles) == [0, 1, 2], "each choice names its role once"
    assert usage is not None
    assert usage.completion_tokens == 36


def test_logprobs(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="simulator", messages=[{"role": "user", "content": "Hello"}], max_tokens=5, seed=4, logprobs=True, top_logprobs=3
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == predicted(4, 5)
    assert bytes(logprobs.content[0].bytes or ()).decode() == logprobs.content[0].token
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [3] * 5


def test_without_a_limit_it_ends_by_itself(server: Server) -> None:
    answer = server.client.chat.completions.create(model="simulator", messages=[{"role": "user", "content": "Hello"}], seed=4)
    assert answer.choices[0].finish_reason == "stop"


def test_a_format_of_text_asks_for_nothing(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model="simulator",
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=6,
        seed=4,
        response_format={"type": "text"},
        logit_bias={"5": 10},
    )
    assert answer.choices[0].message.content == predicted(4, 6)


def test_models(server: Server) -> None:
    (model,) = server.client.models.list().data
    assert model.id == "simulator"
    assert model.owned_by == "penstock"
