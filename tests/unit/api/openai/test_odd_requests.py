"""Requests that the fuzzers found to be answered wrongly, each as small as it can be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from starlette.types import Message

from front_end import FrontEnd, says

MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/responses", {"input": "x"}),
    ],
)
async def test_a_number_that_no_message_can_carry(path: str, body: dict[str, Any]) -> None:
    front_end = FrontEnd(says("x"))
    await front_end.send("POST", path, json.dumps({"model": "m", **body, "top_k": 2**64}).encode())
    assert front_end.status == 400
    assert "`top_k` is 18446744073709551616: expected" in front_end.json["error"]["message"]


async def test_a_response_to_items_that_say_nothing() -> None:
    front_end = FrontEnd(says("x"))
    items: list[dict[str, object]] = [{"type": "reasoning", "summary": [], "content": None}]
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        await front_end.send("POST", path, json.dumps({"model": "m", "input": items}).encode())
        assert (front_end.status, front_end.json["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
async def test_a_body_that_breaks_off_is_answered_if_anybody_is_there(path: str) -> None:
    front_end = FrontEnd(says("x"))
    messages: list[Message] = [{"type": "http.disconnect"}, {"type": "http.request", "body": b"{", "more_body": True}]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": [], "root_path": ""}
    await front_end.app(scope, receive, send)
    assert sent[0]["status"] == 400
    assert "broke off" in json.loads(sent[1]["body"])["error"]["message"]
    assert front_end.tally.clients_left == 1
