"""Tools and structured output by the official client, with the default model."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from e2e.harness import DEFAULT_MODEL, Server


class GetWeather(BaseModel):
    """Tells the weather of a city."""

    city: str
    unit: Literal["celsius", "fahrenheit"]


class Wait(BaseModel):
    """Waits for some seconds."""

    seconds: int


MODELS: dict[str, type[BaseModel]] = {"get_weather": GetWeather, "wait": Wait}
TOOLS: Any = [pydantic_function_tool(model, name=name) for name, model in MODELS.items()]
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris, in celsius?"}]


def test_a_loop_of_calls_and_answers(model_server: Server) -> None:
    """The model must call; the client runs the tool; the model answers with what it was told."""
    create = model_server.client.chat.completions.create
    messages = list(QUESTION)
    # One call: so small a model would go on calling.
    asked: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    first = create(model=DEFAULT_MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=100, **asked)
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function"
        MODELS[call.function.name].model_validate_json(call.function.arguments)
    messages.append(message.model_dump(exclude_none=True))
    messages += [{"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21, "sky": "clear"}'} for call in message.tool_calls]
    second = create(model=DEFAULT_MODEL, messages=messages, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=40)
    assert second.choices[0].message.content
    assert not second.choices[0].message.tool_calls
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens - 300


def test_a_named_tool_is_the_one_that_is_called(model_server: Server) -> None:
    for name, model in MODELS.items():
        answer = model_server.client.chat.completions.create(
            model=DEFAULT_MODEL,
            messages=QUESTION,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": name}},
            parallel_tool_calls=False,
            max_tokens=100,
            seed=1,
        )
        [call] = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == name
        model.model_validate_json(call.function.arguments)


def test_the_streaming_helper_puts_calls_together(model_server: Server) -> None:
    asked: Any = {"model": DEFAULT_MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 100, "parallel_tool_calls": False}
    tools = [pydantic_function_tool(GetWeather), pydantic_function_tool(Wait)]
    whole = model_server.client.chat.completions.create(**asked, tools=tools, tool_choice="required")
    with model_server.client.chat.completions.stream(**asked, tools=tools, tool_choice="required") as stream:
        pieces = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    called, streamed = whole.choices[0].message.tool_calls, final.choices[0].message.tool_calls
    assert called
    assert streamed
    assert [call.function.name for call in streamed] == [call.function.name for call in called if call.type == "function"]
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in called if call.type == "function"]
    assert "".join(pieces) == "".join(call.function.arguments for call in streamed)
    assert len(pieces) > 3
    assert isinstance(streamed[0].function.parsed_arguments, GetWeather | Wait)


def test_parse_gives_the_object(model_server: Server) -> None:
    answer = model_server.client.chat.completions.parse(
        model=DEFAULT_MODEL, messages=QUESTION, response_format=GetWeather, temperature=0, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, GetWeather)


def test_a_format_leaves_the_choice_to_the_model(model_server: Server) -> None:
    """The answer is text in the format, or calls."""
    schema = {"type": "object", "properties": {"sunny": {"type": "boolean"}}, "required": ["sunny"], "additionalProperties": False}
    answer = model_server.client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=QUESTION,
        tools=TOOLS,
        response_format={"type": "json_schema", "json_schema": {"name": "sky", "schema": schema}},
        max_tokens=24,
        temperature=0,
    )
    message = answer.choices[0].message
    # A call that was cut off comes back as text.
    assert message.tool_calls or (message.content or "").startswith(("{", "<tool_call>"))


def test_auto_leaves_the_choice_to_the_model(model_server: Server) -> None:
    answer = model_server.client.chat.completions.create(
        model=DEFAULT_MODEL, messages=[{"role": "user", "content": "Say hello."}], tools=TOOLS, max_tokens=30, temperature=0
    )
    message = answer.choices[0].message
    assert message.content or message.tool_calls


def test_a_transcript_with_calls_is_a_prompt(model_server: Server) -> None:
    """The template of the default model knows no tools: they are put into words for it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "wait", "arguments": json.dumps({"seconds": 3})}}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "waited"},
        {"role": "user", "content": "Thank you."},
    ]
    answer = model_server.client.chat.completions.create(model=DEFAULT_MODEL, messages=messages, max_tokens=5)
    assert answer.usage is not None
    _, _, tokens = model_server.post("/tokenize", messages=messages)
    assert tokens["count"] == answer.usage.prompt_tokens
    _, _, text = model_server.post("/detokenize", tokens=tokens["tokens"])
    assert "wait" in text["prompt"]
    assert "waited" in text["prompt"]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"model": "another"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"tool_choice": "required"}, openai.BadRequestError),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, openai.BadRequestError),
        ({"max_tokens": 10**9}, openai.BadRequestError),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError),
    ],
)
def test_what_is_wrong_is_the_clients_own_exception(model_server: Server, fields: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        model_server.client.chat.completions.create(**{"model": DEFAULT_MODEL, "messages": QUESTION, **fields})
