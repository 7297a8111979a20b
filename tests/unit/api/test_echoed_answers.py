"""Answers that come back: clients append what they got, with members of their own. The model sees the same as without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from front_end import FrontEnd, request, says
from penstock.api.anthropic.messages import parse_messages
from penstock.api.openai.chat import parse_chat
from penstock.api.responses.items import read_items

CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sea"}'}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}}]

# What each client sends back of an answer with text and one call, beside the role.
OF_CHAT: dict[str, dict[str, Any]] = {
    "litellm": {
        "content": "Well.",
        "tool_calls": [{**CALL, "index": 0, "provider_specific_fields": {"thought_signature": "abc"}}],
        "function_call": None,
        "provider_specific_fields": {"refusal": None},
        "annotations": [],
        "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}],
        "images": [],
    },
    "openai": {"content": "Well.", "refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": [CALL]},
    "openai, parsed": {
        "content": "Well.",
        "refusal": None,
        "parsed": {"at": ["sea"]},
        "tool_calls": [{**CALL, "function": {**CALL["function"], "parsed_arguments": {"at": "sea"}}}],
    },
    "openai, parts": {
        "content": [{"type": "text", "text": "We", "annotations": []}, {"type": "refusal", "refusal": "ll."}],
        "tool_calls": [CALL],
    },
    "openrouter": {
        "content": "Well.",
        "reasoning_details": [{"type": "reasoning.text", "text": "hm", "format": "x", "index": 0}],
        "tool_calls": [{**CALL, "index": 0}],
    },
    "gemini": {"content": "Well.", "tool_calls": [{**CALL, "extra_content": {"google": {"thought_signature": "abc"}}}]},
    "cache marks": {
        "content": "Well.",
        "cache_control": {"type": "ephemeral"},
        "tool_calls": [{**CALL, "cache_control": {"type": "ephemeral"}}],
    },
}


def chat_body(answer: dict[str, Any]) -> dict[str, Any]:
    result = {"role": "tool", "tool_call_id": "call_1", "content": "blue"}
    return {"model": "m", "messages": [{"role": "user", "content": "x"}, {"role": "assistant", **answer}, result], "tools": TOOLS}


@pytest.mark.parametrize("client", OF_CHAT)
async def test_members_of_a_chats_answer_that_nobody_knows_are_ignored(client: str) -> None:
    plain, _ = await parse_chat(*await request(chat_body({"content": "Well.", "tool_calls": [CALL]})))
    echoed, _ = await parse_chat(*await request(chat_body(OF_CHAT[client])))
    assert echoed.submits[0].token_ids == plain.submits[0].token_ids


OF_MESSAGES = [
    {"type": "thinking", "thinking": "hm", "signature": "", "provider": "x"},
    {"type": "text", "text": "Well.", "citations": None, "parsed_output": {"at": "sea"}},
    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}, "caller": {"type": "direct"}, "index": 0},
]
KNOWN = ("type", "thinking", "signature", "text", "id", "name", "input", "arguments", "call_id", "summary", "content", "role")


def without_extras(block: Any) -> Any:
    if isinstance(block, list):
        return [without_extras(each) for each in block]
    if not isinstance(block, dict):
        return block
    return {name: value if name == "input" else without_extras(value) for name, value in block.items() if name in KNOWN}


async def test_members_of_a_messages_answer_that_nobody_knows_are_ignored() -> None:
    def body(blocks: list[Any], **extras: Any) -> dict[str, Any]:
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue"}]}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": blocks, **extras}, result]
        return {"model": "m", "max_tokens": 5, "messages": messages}

    plain, _ = await parse_messages(*await request(body(without_extras(OF_MESSAGES))))
    echoed, _ = await parse_messages(*await request(body(OF_MESSAGES, id="msg_1", stop_reason="tool_use", usage={})))
    assert echoed.submits[0].token_ids == plain.submits[0].token_ids


OF_RESPONSES: list[dict[str, Any]] = [
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm", "index": 0}], "provider": "x"},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "Well.", "parsed": {}}], "x": 1},
    {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "look", "arguments": "{}", "parsed_arguments": {}, "provider_data": {}},
]


def test_members_of_a_responses_items_that_nobody_knows_are_ignored() -> None:
    assert read_items("input", OF_RESPONSES) == read_items("input", without_extras(OF_RESPONSES))


ANYTHING = [1, {"type": "input_text", "prompt_cache_breakpoint": 5}]


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "content": ANYTHING, "output": ANYTHING, "": ANYTHING},
        {"type": "message", "role": "assistant", "content": "Well.", "output": ANYTHING},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm", "prompt_cache_breakpoint": 5}]},
    ],
    ids=["call", "message", "reasoning"],
)
async def test_members_of_items_that_are_ignored_may_be_anything(item: dict[str, Any]) -> None:
    front_end = FrontEnd(says("x"))
    body = {"model": "m", "input": [item, {"role": "user", "content": "x"}], "store": False}
    await front_end.send("POST", "/v1/responses", json.dumps(body).encode())
    assert front_end.status == 200


@pytest.mark.parametrize(("mark", "status"), [({"mode": "explicit"}, 200), (None, 200), (5, 400)])
async def test_the_mark_of_an_image_is_read_although_the_image_is_not(mark: Any, status: int) -> None:
    front_end = FrontEnd(says("x"))
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "data:", "prompt_cache_breakpoint": mark}]}
    body = {"model": "m", "input": [image, {"role": "user", "content": "x"}], "store": False}
    await front_end.send("POST", "/v1/responses", json.dumps(body).encode())
    assert front_end.status == status


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/messages", {"messages": [{"role": "user", "content": "x", "id": "a"}], "max_tokens": 1}, "messages.0.id"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "parsed_output": 1}]}], "max_tokens": 1},
            "messages.0.content.0.parsed_output",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": "x", "parsed": 1}]}, "input[0].parsed"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "x", "parsed": 1}]},
            "input[0].parsed",
        ),
    ],
)
async def test_other_apis_name_what_others_say(path: str, body: dict[str, Any], param: str) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("POST", path, json.dumps({"model": "m", **body}).encode())
    assert front_end.status == 400
    # Anthropic writes a path without brackets.
    assert param in front_end.json["error"]["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "user", "content": "x", "parsed": None}, "messages[0].parsed"),
        ({"role": "tool", "content": "x", "tool_call_id": "a", "extra_content": {}}, "messages[0].extra_content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "annotations": []}]}, "messages[0].content[0].annotations"),
        # What is known must be right, and what would change the answer is not ignored.
        ({"role": "assistant", "content": 1}, "messages[0].content"),
        ({"role": "assistant", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "assistant", "function_call": {"name": "f"}}, "messages[0].function_call"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
    ],
)
async def test_everything_else_is_named(message: dict[str, Any], param: str) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("POST", "/v1/chat/completions", json.dumps({"model": "m", "messages": [message]}).encode())
    assert (front_end.status, front_end.json["error"]["param"]) == (400, param)
