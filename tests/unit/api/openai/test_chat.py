"""What /v1/chat/completions makes of tools and reasoning: the same streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from front_end import FrontEnd, request, says
from penstock.api.openai.chat import parse_chat, read_chat
from penstock.api.openai.schema import ChatRequest

TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "description": "looks", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "wait"}},
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sea\\""}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'


def chat(*pieces: str, reasoning: str | None = None) -> FrontEnd:
    return FrontEnd(says(*pieces), path="/v1/chat/completions", tool_parser="hermes", reasoning_parser=reasoning)


def collected(events: list[Any]) -> dict[str, Any]:
    """A stream put together, as a client does it."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish_reason": None}
    for event in events:
        choice = event["choices"][0]
        delta = choice["delta"]
        message["content"] += delta.get("content") or ""
        message["reasoning"] += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls", []):
            known = message["calls"].setdefault(call["index"], {"id": None, "name": None, "arguments": ""})
            known["id"] = call.get("id", known["id"])
            known["name"] = call["function"].get("name", known["name"])
            known["arguments"] += call["function"]["arguments"]
        message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


async def test_calls_come_whole() -> None:
    front_end = chat("I will look. ", CALL, "\n", OTHER)
    await front_end.post(tools=TOOLS)
    [choice] = front_end.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I will look."
    first, second = choice["message"]["tool_calls"]
    assert (first["type"], first["function"]["name"]) == ("function", "look")
    assert json.loads(first["function"]["arguments"]) == {"at": 'the "sea"'}
    assert second["function"] == {"name": "wait", "arguments": "{}"}
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_calls_come_in_pieces(size: int) -> None:
    text = "I will look. " + CALL + OTHER
    front_end = chat(*(text[start : start + size] for start in range(0, len(text), size)))
    await front_end.post(tools=TOOLS, stream=True)
    message = collected(front_end.events)
    assert (message["content"], message["finish_reason"]) == ("I will look.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in message["calls"].values()] == [
        ("look", {"at": 'the "sea"'}),
        ("wait", {}),
    ]
    assert all(call["id"].startswith("call_") for call in message["calls"].values())


async def test_a_call_without_any_text_has_no_content() -> None:
    front_end = chat(CALL)
    await front_end.post(tools=TOOLS)
    assert front_end.json["choices"][0]["message"]["content"] is None


@pytest.mark.parametrize("stream", [True, False])
async def test_a_broken_call_is_text(stream: bool) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"at": oops}}\n</tool_call>'
    front_end = chat("Well. ", broken)
    await front_end.post(tools=TOOLS, stream=stream)
    if stream:
        message = collected(front_end.events)
        content, reason = message["content"], message["finish_reason"]
    else:
        [choice] = front_end.json["choices"]
        content, reason = choice["message"]["content"], choice["finish_reason"]
        assert "tool_calls" not in choice["message"]
    assert broken in content
    assert reason == "stop"


async def test_without_tools_nothing_is_a_call() -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        front_end = chat(CALL)
        await front_end.post(**fields)
        assert front_end.json["choices"][0]["message"]["content"] == CALL


async def test_an_event_has_one_call() -> None:
    """As with OpenAI. Clients such as llama-index read only the first."""
    front_end = chat(f"I will look. {CALL}\n{OTHER}\n{CALL}")
    await front_end.post(stream=True, tools=TOOLS, stream_options={"include_usage": True}, return_token_ids=True)
    choices = [choice for event in front_end.events for choice in event["choices"]]
    assert [[call["index"] for call in choice["delta"].get("tool_calls", [])] for choice in choices if choice["delta"]] == [[0], [1], [2]]
    assert collected([event for event in front_end.events if event["choices"]])["calls"].keys() == {0, 1, 2}
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["tool_calls"]
    assert len([event for event in front_end.events if event.get("prompt_token_ids")]) == 1
    assert len([choice for choice in choices if choice.get("token_ids")]) == 1


async def test_reasoning_is_apart_and_counted() -> None:
    front_end = chat("<think>hm, ", "well</think>", "\n\nYes.", reasoning="think")
    await front_end.post(tools=TOOLS)
    message = front_end.json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm, well", "Yes.")
    assert front_end.json["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("hm, well")
    await front_end.post(stream=True)
    streamed = collected(front_end.events)
    assert (streamed["reasoning"], streamed["content"]) == ("hm, well", "Yes.")


async def test_a_forced_call_is_a_grammar() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        plan, _ = await parse_chat(*await request({**body, "tool_choice": choice}))
        assert plan.submits[0].grammar is not None
        assert plan.grammar_field == "tool_choice"
        # A format is for text, and a forced call has none.
        formatted, _ = await parse_chat(*await request({**body, "tool_choice": choice, "response_format": {"type": "json_object"}}))
        assert formatted.submits[0].grammar == plan.submits[0].grammar
    plan, _ = await parse_chat(*await request(body))
    assert plan.submits[0].grammar is None


async def test_a_format_is_for_text_so_the_model_may_still_call() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}

    async def source(**fields: object) -> str:
        plan, _ = await parse_chat(*await request({**body, **fields}))
        assert plan.submits[0].grammar is not None
        return plan.submits[0].grammar.source

    assert "<tool_call>" in await source(response_format={"type": "json_object"})
    assert "<tool_call>" not in await source(response_format={"type": "json_object"}, tool_choice="none")
    assert await source(structured_outputs={"regex": "a"}) == "a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "leap"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]},
            "messages[0].tool_calls",
        ),
        ({"store": True}, "store"),
        ({"functions": []}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"a": "b" * 513}}, None),
    ],
)
async def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    front_end = chat("x")
    await front_end.post(**fields)
    assert front_end.status == 400
    if param is not None:
        assert front_end.json["error"]["param"] == param


@pytest.mark.parametrize("size", [1, 5, 1000])
async def test_one_call_is_the_end_when_several_are_not_wanted(size: int) -> None:
    text = "I will. " + CALL + OTHER + " And so on."
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    front_end = chat(*pieces)
    await front_end.post(tools=TOOLS, parallel_tool_calls=False)
    [choice] = front_end.json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I will."
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["look"]
    assert front_end.json["usage"]["completion_tokens"] == len("I will. " + CALL) - len("\n</tool_call>")
    front_end = chat(*pieces)
    await front_end.post(tools=TOOLS, parallel_tool_calls=False, stream=True)
    streamed = collected(front_end.events)
    assert [call["name"] for call in streamed["calls"].values()] == ["look"]
    assert streamed["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("part", "param", "says"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,aa"}}, "", "images are not supported by this model, `m`"),
        ({"type": "image_url", "image_url": "https://example.com/a.png"}, "", "no model at this server reads images"),
        ({"type": "input_image", "image_url": "data:,"}, "", "images are not supported by this model"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, ".type", "audio is not supported by this model"),
        ({"type": "audio_url", "audio_url": {"url": "u"}}, ".type", "audio is not supported by this model"),
        ({"type": "video_url", "video_url": {"url": "u"}}, ".type", "videos are not supported by this model"),
        ({"type": "input_video", "video_url": "u"}, ".type", "videos are not supported by this model"),
        ({"type": "file", "file": {"file_id": "f"}}, ".type", "files are not supported by this model"),
    ],
)
async def test_what_is_not_text_is_refused_in_the_last_message_unless_a_tool_says_it(part: dict[str, Any], param: str, says: str) -> None:
    result = {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen: "}, part]}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    front_end = chat("x")
    asked = {"role": "user", "content": "Look."}
    await front_end.post(messages=[asked, {"role": "assistant", "content": None, "tool_calls": [call]}, result], tools=TOOLS)
    assert front_end.status == 200
    await front_end.post(messages=[{"role": "user", "content": [{"type": "text", "text": "a"}, part]}])
    error = front_end.json["error"]
    assert (front_end.status, error["param"]) == (400, f"messages[0].content[1]{param}")
    assert says in error["message"]
    # A client that keeps it in its history goes on.
    await front_end.post(messages=[{"role": "user", "content": [part]}, {"role": "user", "content": "Go on."}])
    assert front_end.status == 200


async def test_an_answer_that_comes_back_has_no_images() -> None:
    front_end = chat("x")
    await front_end.post(messages=[{"role": "assistant", "content": [{"type": "image_url", "image_url": "data:,"}]}])
    assert front_end.json["error"]["message"] == '`messages[0].content[0].type` is "image_url": expected one of text'


def test_the_model_reads_a_placeholder() -> None:
    part = {"type": "input_audio", "input_audio": {}, "cache_control": {"type": "ephemeral"}}
    body = {"model": "m", "messages": [{"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "seen: "}, part]}]}
    [message] = read_chat(msgspec.convert(body, ChatRequest)).prompt.messages
    assert message["content"] == "seen: [audio left out: this model cannot read it]"
