"""POST /v1/messages through Anthropic's own client, and as Claude Code sends it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic
from anthropic.types import MessageParam, ToolParam, Usage
from jsonschema import Draft202012Validator

from e2e.harness import DEFAULT_MODEL, Server

WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TIME: ToolParam = {"name": "get_time", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
# The client has no argument for it.
GREEDY = {"temperature": 0}
DOCS = (Path(__file__).parents[2] / "docs" / "guides" / "claude-code.md").read_text(encoding="utf-8")


def connect(server: Server, **options: Any) -> Anthropic:
    return Anthropic(base_url=server.url, **{"api_key": "none", "max_retries": 0, **options})


@pytest.fixture
def client(server: Server) -> Iterator[Anthropic]:
    with connect(server) as client:
        yield client


@pytest.fixture
def model_client(model_server: Server) -> Iterator[Anthropic]:
    with connect(model_server) as client:
        yield client


def said(content: str) -> list[MessageParam]:
    return [{"role": "user", "content": content}]


def prompt_tokens(usage: Usage) -> int:
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)


def test_a_message(model_client: Anthropic) -> None:
    response = model_client.messages.with_raw_response.create(
        model=DEFAULT_MODEL, max_tokens=20, extra_body=GREEDY, messages=said("What is the capital of France?")
    )
    message = response.parse()
    [block] = message.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert (message.role, message.stop_reason, message.model) == ("assistant", "end_turn", DEFAULT_MODEL)
    assert message.usage.output_tokens > 0
    assert response.headers["request-id"].startswith("req_")


def test_a_stream_is_the_same_message_in_pieces(model_client: Anthropic) -> None:
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "max_tokens": 12, "extra_body": GREEDY, "messages": said("Name three fruits.")}
    whole = model_client.messages.create(**asked)
    with model_client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert len(pieces) > 3
    assert final.content[0].type == whole.content[0].type == "text"
    assert "".join(pieces) == final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert prompt_tokens(final.usage) == prompt_tokens(whole.usage)


def test_a_tool_loop(model_client: Anthropic) -> None:
    messages = said("What is the weather in Paris, in celsius? Use the tools.")
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "extra_body": GREEDY, "tools": [WEATHER, TIME]}
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    first = model_client.messages.create(**asked, max_tokens=80, messages=messages, tool_choice=choice)
    assert first.stop_reason == "tool_use"
    [use] = [block for block in first.content if block.type == "tool_use"]
    Draft202012Validator((WEATHER if use.name == "get_weather" else TIME)["input_schema"]).validate(use.input)
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "18 and sunny"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = model_client.messages.create(**asked, max_tokens=8, messages=messages, tool_choice={"type": "none"})
    assert second.content[0].type == "text"
    assert second.stop_reason in ("end_turn", "max_tokens")


def test_the_input_of_a_tool_grows_in_a_stream(model_client: Anthropic) -> None:
    with model_client.messages.stream(
        model=DEFAULT_MODEL,
        max_tokens=80,
        extra_body=GREEDY,
        messages=said("What is the weather in Paris, in celsius?"),
        tools=[TIME, WEATHER],
        tool_choice={"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True},
    ) as stream:
        snapshots = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    [use] = final.content
    assert use.type == "tool_use"
    assert use.name == "get_weather"
    assert len(snapshots) > 3
    assert snapshots[-1] == use.input
    Draft202012Validator(WEATHER["input_schema"]).validate(use.input)
    assert final.stop_reason == "tool_use"


def test_structured_output(model_client: Anthropic) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}
    message = model_client.messages.create(
        model=DEFAULT_MODEL,
        max_tokens=50,
        extra_body=GREEDY,
        messages=said("What is the capital of France? Answer in JSON."),
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.content[0].type == "text"
    assert json.loads(message.content[0].text) == {"city": "Paris"}


def test_a_beginning_is_continued(model_client: Anthropic) -> None:
    messages = said("What is the capital of France?")
    messages.append({"role": "assistant", "content": "The capital of France is the city of"})
    message = model_client.messages.create(model=DEFAULT_MODEL, max_tokens=5, extra_body=GREEDY, messages=messages)
    assert message.content[0].type == "text"
    assert message.content[0].text.strip().startswith("Paris")


def test_stop_sequences_and_limits(model_client: Anthropic) -> None:
    messages: list[MessageParam] = [*said("Count from 1 to 9."), {"role": "assistant", "content": "1, 2, 3,"}]
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "extra_body": GREEDY, "messages": messages}
    stopped = model_client.messages.create(**asked, max_tokens=20, stop_sequences=["5", "nothing like this"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "5")
    assert stopped.content[0].type == "text"
    assert stopped.content[0].text.strip(" ,\n") == "4"
    cut = model_client.messages.create(**asked, max_tokens=3)
    assert (cut.stop_reason, cut.stop_sequence, cut.usage.output_tokens) == ("max_tokens", None, 3)
    warmed = model_client.messages.create(**asked, max_tokens=0)
    assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)


def test_counted_tokens_are_those_of_the_message(model_client: Anthropic) -> None:
    asked: dict[str, Any] = {
        "model": DEFAULT_MODEL,
        "system": [{"type": "text", "text": "You are brief."}],
        "messages": [
            *said("What is the weather?"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "get_time", "input": {}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"}, {"type": "text", "text": "So?"}],
            },
        ],
        "tools": [WEATHER, TIME],
    }
    counted = model_client.messages.count_tokens(**asked).input_tokens
    usage = model_client.messages.create(**asked, max_tokens=2).usage
    assert counted == prompt_tokens(usage) > 50


def test_the_second_turn_reads_what_the_first_has_written(model_client: Anthropic) -> None:
    """The instructions are written for an hour and read afterwards. The last message is written for five minutes, the rest is input."""
    system: Any = [
        {"type": "text", "text": "You know the rivers of this world. " * 12, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    ]
    asked: dict[str, Any] = {"model": DEFAULT_MODEL, "max_tokens": 6, "extra_body": GREEDY, "system": system}
    messages = said("Name a river in the north.")
    first = model_client.messages.create(**asked, messages=messages)
    created = first.usage.cache_creation
    assert created is not None
    assert created.ephemeral_1h_input_tokens == first.usage.cache_creation_input_tokens
    counted = model_client.messages.count_tokens(model=DEFAULT_MODEL, system=system, messages=messages).input_tokens
    assert prompt_tokens(first.usage) == counted
    assert 0 < first.usage.input_tokens < 40, "what comes after the mark"
    kept = (first.usage.cache_creation_input_tokens or 0) + (first.usage.cache_read_input_tokens or 0)
    assert kept > 80
    [retained] = (first.model_extra or {})["nvext"]["retained"]
    assert (retained["tokens"], retained["tier"]) == (kept, "device")
    assert 3_500 < retained["retained_until"] - time.time() <= 3_600
    marked: Any = [
        {"type": "text", "text": "And in the south? " * 12, "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Well?"},
    ]
    longer: Any = [*messages, {"role": "assistant", "content": first.content}, {"role": "user", "content": marked}]
    with model_client.messages.stream(**asked, messages=longer) as stream:
        started = next(iter(stream))
        second = stream.get_final_message()
    usage = second.usage
    assert started.type == "message_start"
    assert started.message.usage.cache_creation == usage.cache_creation
    assert usage.cache_creation is not None
    assert (usage.cache_read_input_tokens or 0) >= kept
    assert usage.cache_creation.ephemeral_1h_input_tokens == 0
    assert 40 < usage.cache_creation.ephemeral_5m_input_tokens == usage.cache_creation_input_tokens
    assert usage.input_tokens < 40


def test_errors_have_their_classes(client: Anthropic, serve: Callable[..., Server]) -> None:
    with pytest.raises(anthropic.NotFoundError, match="this server has `simulator`"):
        client.messages.create(model="claude", max_tokens=5, messages=said("x"))
    with pytest.raises(anthropic.BadRequestError, match="colour: Extra inputs are not permitted") as refused:
        client.messages.create(model="simulator", max_tokens=5, messages=said("x"), extra_body={"colour": "blue"})
    assert refused.value.request_id == refused.value.response.json()["request_id"]
    assert refused.value.type == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 50\d\d tokens > 4096 maximum'"):
        client.messages.create(model="simulator", max_tokens=5, messages=said("word " * 5000))
    with pytest.raises(anthropic.BadRequestError, match="no tools of its own"):
        client.messages.create(
            model="simulator", max_tokens=5, messages=said("x"), tools=[{"type": "web_search_20250305", "name": "web_search"}]
        )
    locked = serve("--api-key", "right")
    with connect(locked, api_key="wrong") as stranger, pytest.raises(anthropic.AuthenticationError) as unknown:
        stranger.messages.create(model="simulator", max_tokens=5, messages=said("x"))
    assert unknown.value.type == "authentication_error"
    with connect(locked, api_key=None, auth_token="right") as friend:
        assert friend.messages.create(model="simulator", max_tokens=5, messages=said("x")).usage.output_tokens == 5


CLAUDE_CODE_HEADERS = {
    "x-api-key": "none",
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,prompt-caching-scope-2026-01-05",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.1.0 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-claude-code-session-id": "7d0f4d4e-3f5e-4dd4-9d51-6f0a2c9b6e51",
    "content-type": "application/json",
}


def claude_code_body(question: str, *history: dict[str, Any], line: str = "1a2b3") -> dict[str, Any]:
    """A request as Claude Code makes it, with fewer and shorter tools and instructions."""
    reminder = "<system-reminder>\nThe date is 2026-01-01.\n</system-reminder>"
    mark = {"type": "ephemeral"}
    return {
        "model": "simulator",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": reminder}, {"type": "text", "text": question, "cache_control": mark}]},
            *history,
            {"role": "system", "content": "The skills that can be used: none."},
        ],
        "system": [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={line};"},
            {"type": "text", "text": "You are a tool for programmers.", "cache_control": {**mark, "scope": "global"}},
            {"type": "text", "text": "Answer briefly. " * 30, "cache_control": {**mark, "ttl": "1h"}},
        ],
        "tools": [
            {
                "name": "Bash",
                "description": "Runs a command.",
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"command": {"description": "what to run", "type": "string"}, "timeout": {"type": "number"}},
                    "required": ["command"],
                    "additionalProperties": False,
                },
                "eager_input_streaming": True,
            },
            {"name": "mcp__files__read", "input_schema": {"type": "object", "properties": {}}, "defer_loading": True, "strict": False},
        ],
        "metadata": {"user_id": json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": "7d0f4d4e"})},
        "max_tokens": 32_000,
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "medium"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "diagnostics": {"previous_message_id": None},
        "temperature": 1,
        "stream": True,
    }


def claude_code(server: Server, path: str, body: dict[str, Any]) -> str:
    status, headers, answer = server.request("POST", path, json.dumps(body).encode(), CLAUDE_CODE_HEADERS)
    assert status == 200, answer
    assert headers["request-id"]
    return answer if isinstance(answer, str) else json.dumps(answer)


def usage_of(stream: str) -> dict[str, int]:
    found: dict[str, int] = json.loads(re.findall(r"event: message_delta\ndata: (.*)", stream)[-1])["usage"]
    return found


def test_claude_code(server: Server) -> None:
    first = claude_code(server, "/v1/messages?beta=true", claude_code_body("List the files."))
    names = re.findall(r"^event: (\w+)$", first, re.MULTILINE)
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    use = {"type": "tool_use", "id": "toolu_01", "name": "Bash", "input": {"command": "ls"}, "caller": {"type": "direct"}}
    history: list[dict[str, Any]] = [
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I look."}, use],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_01",
                    "content": "a.py",
                    "is_error": False,
                    "cache_control": {"type": "ephemeral"},
                }
            ],
        },
    ]
    second_body = claude_code_body("List the files.", *history, line="9f8e7")
    counted = json.loads(claude_code(server, "/v1/messages/count_tokens?beta=true", {**second_body, "stream": False}))
    usage = usage_of(claude_code(server, "/v1/messages?beta=true", second_body))
    # The line of accounting has changed, and still all of the beginning is found again.
    assert usage["cache_read_input_tokens"] > 0.6 * counted["input_tokens"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == counted["input_tokens"]


def test_the_settings_of_the_guide_for_claude_code(server: Server) -> None:
    [source] = re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL)
    shown = 'echo "$ANTHROPIC_BASE_URL $ANTHROPIC_MODEL $ANTHROPIC_DEFAULT_HAIKU_MODEL $CLAUDE_CODE_MAX_CONTEXT_TOKENS"'
    environment = {**os.environ, "PENSTOCK_URL": server.url}
    done = subprocess.run(["bash", "-euc", f"{source}\n{shown}"], env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [server.url, "simulator", "simulator", "4096"], done.stderr
