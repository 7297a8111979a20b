"""The official clients reach every endpoint that they know, with the default model."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from anthropic import Anthropic

from e2e.harness import DEFAULT_MODEL, Server

BRIEF: Any = {"model": DEFAULT_MODEL, "max_output_tokens": 8}


def test_models(model_server: Server) -> None:
    client = model_server.client
    assert [model.id for model in client.models.list()] == [DEFAULT_MODEL]
    assert client.models.retrieve(DEFAULT_MODEL).id == DEFAULT_MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completions(model_server: Server) -> None:
    asked: Any = {"model": DEFAULT_MODEL, "prompt": "The water of the river", "max_tokens": 8, "temperature": 0}
    whole = model_server.client.completions.create(**asked).choices[0].text
    assert "".join(chunk.choices[0].text for chunk in model_server.client.completions.create(**asked, stream=True)) == whole
    best = model_server.client.completions.create(**{**asked, "temperature": 1}, n=1, best_of=3)
    assert best.usage is not None
    assert best.usage.completion_tokens > 8


def test_responses(model_server: Server) -> None:
    responses = model_server.client.responses
    made = responses.create(**BRIEF, input="Name a river.")
    assert made.output_text
    assert responses.retrieve(made.id).output_text == made.output_text
    assert [item.type for item in responses.input_items.list(made.id)] == ["message"]
    assert responses.input_tokens.count(model=DEFAULT_MODEL, input="Name a river.").input_tokens == made.usage.input_tokens
    following = responses.create(**BRIEF, input="And another.", previous_response_id=made.id)
    assert following.usage is not None
    assert following.usage.input_tokens > made.usage.input_tokens
    # The helper wants an answer that comes to its end.
    lake: Any = {"format": {"type": "json_schema", "name": "lake", "schema": {"enum": ["Como", "Garda"]}}}
    with responses.stream(model=DEFAULT_MODEL, max_output_tokens=20, input="Name a lake.", text=lake) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text
    responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(made.id)


def test_a_response_in_the_background(model_server: Server) -> None:
    responses = model_server.client.responses
    begun = responses.create(model=DEFAULT_MODEL, input="Tell me a very long story.", background=True, extra_body={"ignore_eos": True})
    assert begun.status in ("queued", "in_progress")
    with responses.retrieve(begun.id, stream=True) as stream:
        numbers = [event.sequence_number for event, _ in zip(stream, range(4), strict=False)]
    assert numbers == [0, 1, 2, 3]
    assert responses.cancel(begun.id).status == "cancelled"


def test_conversations(model_server: Server) -> None:
    conversations = model_server.client.conversations
    conversation = conversations.create(metadata={"about": "rivers"})
    model_server.client.responses.create(**BRIEF, input="Name a river.", conversation=conversation.id)
    items = list(conversations.items.list(conversation.id, order="asc"))
    assert [item.type for item in items] == ["message", "message"]
    assert conversations.retrieve(conversation.id).metadata == {"about": "rivers"}
    conversations.delete(conversation.id)
    with pytest.raises(openai.NotFoundError):
        conversations.retrieve(conversation.id)


def test_messages(model_server: Server) -> None:
    messages: Any = [{"role": "user", "content": "Name a river."}]
    with Anthropic(base_url=model_server.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model=DEFAULT_MODEL, messages=messages).input_tokens
        answer = client.messages.create(model=DEFAULT_MODEL, max_tokens=8, messages=messages)
        usage = answer.usage
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0) == counted
        with client.messages.stream(model=DEFAULT_MODEL, max_tokens=8, messages=messages) as stream:
            assert "".join(stream.text_stream)
