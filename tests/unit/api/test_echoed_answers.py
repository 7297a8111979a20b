"""Answers that come back: clients append what they got, with members of their own. The model sees the same as without them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from front_end import FrontEnd, request, says
from penstock.api.openai.chat import parse_chat

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
