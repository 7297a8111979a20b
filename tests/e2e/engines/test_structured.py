"""Structured output and forced calls: the very text that the likeliest allowed tokens make."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

import openai
import pytest
import torch
from jsonschema import Draft202012Validator
from llguidance import LLMatcher, LLTokenizer

from chat_model import END_ID
from e2e.engines.asking import chat, complete
from e2e.engines.expected import Judge
from e2e.engines.setups import MODEL
from e2e.harness import Server

streamed_or_whole = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
PLACE = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["river", "lake", "sea"]},
        "depths": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 2, "maxItems": 3},
        "salty": {"type": "boolean"},
    },
    "required": ["name", "kind", "depths", "salty"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 10}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_time", "description": "What time it is.", "parameters": NOTHING}},
    {"type": "function", "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER}},
]
SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Allowed:
    """Only what a grammar of llguidance allows. Behind its end, whatever the model likes."""

    def __init__(self, judge: Judge, grammar: str) -> None:
        self._tokenizer = LLTokenizer(judge.tokenizer.to_str(), n_vocab=len(judge.pieces), eos_token=[END_ID])
        self._grammar = grammar

    def __call__(self, scores: torch.Tensor, before: Sequence[int]) -> torch.Tensor:
        if END_ID in before:
            return scores
        matcher = LLMatcher(self._tokenizer, self._grammar)
        assert matcher.consume_tokens(list(before)), matcher.get_error()
        bits = torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = (bits[:, None] >> torch.arange(8)).bitwise_and(1).bool().flatten()[: len(scores)]
        return scores.masked_fill(~allowed, -torch.inf)


@functools.cache
def greedy_place(judge: Judge) -> str:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(PLACE), overrides=SPACES)
    expected = judge.complete(judge.chat_ids([{"role": "user", "content": "Describe a place."}]), 120, Allowed(judge, grammar))
    assert expected.finish_reason == "stop"
    return expected.text


@streamed_or_whole
def test_a_strict_schema(server: Server, judge: Judge, stream: bool) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    answer = chat(server, "Describe a place.", stream, max_tokens=120, response_format=response_format)
    assert answer.finish_reasons[0] == "stop"
    Draft202012Validator(PLACE).validate(json.loads(answer.texts[0]))
    assert answer.texts[0] == greedy_place(judge)


def test_sampled_answers_are_valid_too(server: Server) -> None:
    response_format = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
    answer = chat(server, "Describe a place.", True, max_tokens=120, n=6, seed=1, temperature=1, response_format=response_format)
    assert len(set(answer.texts.values())) == 6
    for text in answer.texts.values():
        Draft202012Validator(PLACE).validate(json.loads(text))
    assert set(answer.finish_reasons.values()) == {"stop"}


@streamed_or_whole
@pytest.mark.parametrize(
    ("wanted", "regex"),
    [
        ({"regex": r"[0-9]{4}-[0-9]{2} (yes|no)"}, r"[0-9]{4}-[0-9]{2} (yes|no)"),
        ({"choice": ["a wide river", "a dam", "a wide lake"]}, "a wide river|a dam|a wide lake"),
        ({"grammar": 'start: ("ab" | "cd")+ "!"'}, r"(ab|cd)+!"),
        ({"json": {"type": "integer", "minimum": 10, "maximum": 99}}, "[1-9][0-9]"),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_other_grammars(server: Server, judge: Judge, wanted: dict[str, Any], regex: str, stream: bool) -> None:
    expected = judge.complete("Which one? ", 40, Allowed(judge, LLMatcher.grammar_from_regex(regex)))
    answer = complete(server, "Which one? ", stream, max_tokens=40, extra_body={"structured_outputs": wanted})
    assert re.fullmatch(regex, answer.texts[0])
    assert (answer.texts[0], answer.finish_reasons[0]) == (expected.text, "stop")
    # Where a grammar leaves nothing but the end, an engine may say so with a token that is no text, or just end.
    assert [token for token in answer.token_ids[0] if token != END_ID] == list(expected.token_ids[:-1])
    answer.check_usage(len(expected.prompt_ids), len(answer.token_ids[0]))


def test_many_grammars_beside_free_text(server: Server, judge: Judge) -> None:
    """None of them restricts another one's tokens."""
    free = judge.complete("The river runs", 48)
    wanted = {"structured_outputs": {"regex": "[0-9]{20}"}}
    bound = server.client.completions.create(
        model=MODEL, prompt=["one", "two", "three"], max_tokens=30, temperature=0, stream=True, extra_body=wanted
    )
    first = next(iter(bound))
    complete(server, "The river runs", True, max_tokens=48).check([free])
    texts = {first.choices[0].index: first.choices[0].text}
    for chunk in bound:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert all(re.fullmatch("[0-9]{20}", texts[index]) for index in range(3)), texts


@streamed_or_whole
def test_a_forced_call(server: Server, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "tools": TOOLS, "tool_choice": choice, "temperature": 0}
    asked |= {"max_tokens": 100, "parallel_tool_calls": False}
    whole = server.client.chat.completions.create(**asked)
    [call] = whole.choices[0].message.tool_calls or []
    assert call.type == "function"
    name, arguments, reason = call.function.name, call.function.arguments, whole.choices[0].finish_reason
    if stream:
        pieces = list(server.client.chat.completions.create(**asked, stream=True))
        calls = [call for piece in pieces for choice in piece.choices for call in choice.delta.tool_calls or []]
        assert {call.index for call in calls} == {0}
        assert len([call for call in calls if call.id]) == 1
        name = "".join(call.function.name or "" for call in calls if call.function)
        assert arguments == "".join(call.function.arguments or "" for call in calls if call.function)
        reason = next(choice.finish_reason for piece in reversed(pieces) for choice in piece.choices if choice.finish_reason)
    assert (name, reason) == ("get_weather", "tool_calls")
    Draft202012Validator(WEATHER).validate(json.loads(arguments))


def test_some_call_is_required(server: Server) -> None:
    answer = server.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Use a tool."}],
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    schema = next(tool["function"]["parameters"] for tool in TOOLS if tool["function"]["name"] == call.function.name)
    Draft202012Validator(schema).validate(json.loads(call.function.arguments))


def test_tools_that_are_not_called_leave_the_text(server: Server, judge: Judge) -> None:
    """The template tells of them, and the model, whose weights are random, does not care."""
    messages = [{"role": "user", "content": "Say hello."}]
    expected = judge.complete(judge.chat_ids(messages, TOOLS), 30)
    chat(server, messages, True, max_tokens=30, tools=TOOLS, tool_choice="auto").check([expected])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"properties": {"a": {"type": "integr"}}}}}},
            "response_format",
            "properties.a.type",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "a("}}}, "structured_outputs", "unclosed group at character 2 of the regex"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: nothing"}}}, "structured_outputs", "nothing"),
    ],
    ids=["schema", "regex", "grammar"],
)
def test_a_grammar_that_cannot_be(server: Server, judge: Judge, fields: dict[str, Any], param: str, message: str, stream: bool) -> None:
    """Refused before the answer begins, with the place of what is wrong, and nobody else is hurt."""
    with pytest.raises(openai.BadRequestError) as caught:
        chat(server, "Describe a place.", stream, max_tokens=20, **fields)
    assert (caught.value.code, caught.value.param) == ("invalid_grammar", param)
    assert message in caught.value.message
    complete(server, "once", stream, max_tokens=16).check([judge.complete("once", 16)])
