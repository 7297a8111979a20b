"""Responses and messages: the same text by other APIs, and by the other official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from anthropic import Anthropic

from e2e.engines.asking import chat
from e2e.engines.expected import Judge
from e2e.engines.setups import MODEL, Setup
from e2e.engines.test_structured import NOTHING
from e2e.harness import Server, wait_until

QUESTION = "What lies behind the hill?"


@pytest.fixture
def anthropic(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_a_response_is_streamed(server: Server, judge: Judge) -> None:
    expected = judge.chat(QUESTION, 40)
    events = list(server.client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=40, temperature=0, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.incomplete"
    response = last.response
    assert (response.status, response.output_text) == ("incomplete", expected.text)
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(expected.prompt_ids), 40)


def test_a_response_is_kept(server: Server, judge: Judge) -> None:
    """The next one goes on from it, with all that was said before in its prompt."""
    first = server.client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=12, temperature=0)
    expected = judge.chat(QUESTION, 12)
    assert first.output_text == expected.text
    assert server.client.responses.retrieve(first.id).output_text == expected.text
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": expected.text},
        {"role": "user", "content": "And then?"},
    ]
    second = server.client.responses.create(
        model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=12, temperature=0
    )
    assert second.output_text == judge.chat(messages, 12).text


def test_a_message_is_streamed(anthropic: Anthropic, judge: Judge) -> None:
    expected = judge.chat(QUESTION, 100)
    messages: Any = [{"role": "user", "content": QUESTION}]
    with anthropic.messages.stream(model=MODEL, max_tokens=100, messages=messages, extra_body={"temperature": 0}) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == expected.text
    assert len(pieces) > 5
    [block] = final.content
    assert block.type == "text"
    assert (block.text, final.stop_reason) == (expected.text, "max_tokens")
    usage = final.usage
    assert usage.output_tokens == 100
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == len(expected.prompt_ids)


def test_a_message_with_a_forced_call(anthropic: Anthropic) -> None:
    answer = anthropic.messages.create(
        model=MODEL,
        max_tokens=60,
        messages=[{"role": "user", "content": "What time is it?"}],
        tools=[{"name": "get_time", "input_schema": NOTHING}],
        tool_choice={"type": "tool", "name": "get_time", "disable_parallel_tool_use": True},
        extra_body={"temperature": 0},
    )
    [use] = answer.content
    assert use.type == "tool_use"
    assert (use.name, use.input, answer.stop_reason) == ("get_time", {}, "tool_use")


def test_the_workers_figures(server: Server, setup: Setup) -> None:
    """What the worker counts comes with its steps, so it may be told a moment after the answer."""
    long = "a figure of its own that nobody else asks for " * 10
    before = {source: server.metric("penstock_prompt_tokens_total", name="worker-0", source=source) for source in ("computed", "cached")}
    answers = [chat(server, long, stream=True, max_tokens=8) for _ in range(2)]
    assert answers[0].usage is not None
    prompt = answers[0].usage.prompt_tokens
    told = {"computed": 2 * prompt - setup.reused(prompt), "cached": setup.reused(prompt)}
    for source, count in told.items():
        wait_until(lambda: server.metric("penstock_prompt_tokens_total", name="worker-0", source=source) - before[source] == count)  # noqa: B023
    assert server.metric("penstock_kv_blocks", name="worker-0", state="total") >= 256
    assert server.metric("penstock_kv_blocks", name="worker-0", state="cached") > prompt // setup.block_size
    assert server.metric("penstock_router_index_blocks", name="worker-0") > prompt // setup.block_size
    wait_until(lambda: server.metric("penstock_kv_blocks", name="worker-0", state="used") == 0)
    assert server.metric("penstock_workers") == 1
