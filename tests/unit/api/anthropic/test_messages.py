"""POST /v1/messages and /v1/messages/count_tokens through the whole front end, with a model that says what the test wants."""

from __future__ import annotations

import asyncio
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from front_end import MODEL, FrontEnd, Produce, request, says
from penstock.api.anthropic.errors import AnthropicErrors
from penstock.api.anthropic.messages import count_message_tokens, parse_messages
from penstock.api.anthropic.schema import CHOICES, UNSUPPORTED, ContentBlock, MessagesRequest
from penstock.api.pipeline.plan import Plan
from penstock.api.pipeline.request import PromptContext
from penstock.config.front_end import Limits
from penstock.stream.mailbox import Mailbox
from penstock.text.transcript import Transcripts
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Delta, Fault, Finish, PromptReport, Submit

URL = "/v1/messages"
LOOK = {"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}
WAIT = {"name": "wait", "description": "waits", "input_schema": {"type": "object"}}
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the \\"sea\\""}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
HELLO = [{"role": "user", "content": "x"}]
MARK = {"type": "ephemeral"}
MARKED = {"type": "text", "text": "s", "cache_control": {**MARK, "ttl": "1h"}}


def front_end(*pieces: str, produce: Produce | None = None, reasoning: str | None = None, limits: Limits | None = None) -> FrontEnd:
    return FrontEnd(produce or says(*pieces), limits, URL, tool_parser="hermes", reasoning_parser=reasoning)


async def post(front: FrontEnd, path: str = URL, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 500, "messages": HELLO, **fields}
    await front.send("POST", path, json.dumps({name: value for name, value in body.items() if value is not ...}).encode(), headers)
    return None if fields.get("stream") else front.json


def events(front: FrontEnd) -> list[tuple[str, Any]]:
    """Every event of a stream: its name, which its data repeats, and its data."""
    found = []
    *frames, rest = front.body.decode().split("\n\n")
    assert rest == ""
    for frame in frames:
        name, data = frame.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append((content["type"], content))
    return found


def reports(cached: int, *pieces: str) -> Produce:
    """Says the pieces, after finding so many of the prompt's tokens in the cache. It writes six tokens to the cache for each mark."""

    async def produce(submit: Submit, mailbox: Mailbox) -> None:
        offset = 0
        report = PromptReport(cached, retained=submit.marks, written=(6,) * len(submit.marks))
        for piece in pieces:
            mailbox.put(Delta(offset, tuple(piece.encode()), prompt=report if not offset else None))
            offset += len(piece)
            await asyncio.sleep(0)
        mailbox.end(Finish("stop"))

    return produce


def fails(fault: Fault, *pieces: str) -> Produce:
    async def produce(_: Submit, mailbox: Mailbox) -> None:
        offset = 0
        for piece in pieces:
            mailbox.put(Delta(offset, tuple(piece.encode())))
            offset += len(piece)
            await asyncio.sleep(0)
        mailbox.end(fault)

    return produce


async def test_a_whole_message() -> None:
    front = front_end("Hello", " there")
    message = await post(front)
    assert front.status == 200
    assert message["id"].startswith("msg_")
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "m")
    assert message["content"] == [{"type": "text", "text": "Hello there"}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["output_tokens"] == len("Hello there")
    assert (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (0, 0)
    assert b"request-id" in dict(front.sent[0]["headers"])


async def test_the_events_of_a_text() -> None:
    front = front_end("Hello", " there")
    await post(front, stream=True)
    assert [name for name, _ in events(front)] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


async def test_every_request_has_an_id_of_its_own() -> None:
    front = front_end("x")
    ids = {(await post(front, n=1))["request_id"] for _ in range(3)}
    assert len(ids) == 3


async def test_a_turn_with_everything() -> None:
    front = front_end("<think>hm, ", "well</think>", "\n\nI will look. ", CALL, "\n", OTHER, reasoning="think")
    message = await post(front, tools=[LOOK, WAIT], thinking={"type": "adaptive"})
    thinking, text, look, wait = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm, well")
    assert thinking["signature"]
    assert (text["type"], text["text"].strip()) == ("text", "I will look.")
    assert (look["type"], look["name"], look["input"]) == ("tool_use", "look", {"at": 'the "sea"'})
    assert (wait["name"], wait["input"]) == ("wait", {})
    assert look["id"].startswith("toolu_")
    assert look["id"] != wait["id"]
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["output_tokens_details"]["thinking_tokens"] == len("hm, well")


@pytest.mark.parametrize("size", [1, 3, 1000])
async def test_the_events_of_a_turn_with_everything(size: int) -> None:
    text = "<think>hm</think>\n\nI look. " + CALL + OTHER
    front = front_end(*(text[start : start + size] for start in range(0, len(text), size)), reasoning="think")
    await post(front, tools=[LOOK, WAIT], thinking={"type": "adaptive"}, stream=True)
    found = events(front)
    names = [name for name, _ in found if name != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert names == ["message_start", "ping", *block * 4, "message_delta", "message_stop"]
    numbers = [content["index"] for name, content in found if name.startswith("content_block")]
    assert numbers == sorted(numbers)
    assert [content["content_block"]["type"] for name, content in found if name == "content_block_start"] == [
        "thinking",
        "text",
        "tool_use",
        "tool_use",
    ]
    deltas = [content for name, content in found if name == "content_block_delta"]
    arguments = ["".join(content["delta"].get("partial_json", "") for content in deltas if content["index"] == number) for number in (2, 3)]
    assert [json.loads(argument) for argument in arguments] == [{"at": 'the "sea"'}, {}]
    assert [content["delta"]["type"] for content in deltas if content["index"] == 0][-1] == "signature_delta"
    start, end = found[0][1]["message"], found[-2][1]
    assert (start["content"], start["stop_reason"], start["usage"]["output_tokens"]) == ([], None, 0)
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == len(text)
    assert end["usage"]["input_tokens"] == start["usage"]["input_tokens"] > 0


@pytest.mark.parametrize("stream", [True, False])
async def test_thinking_can_be_left_out_and_is_not_lost(stream: bool) -> None:
    front = front_end("<think>hm</think>", "Yes.", reasoning="think")
    await post(front, thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, max_tokens=2000, stream=stream)
    assert b"hm" not in front.body
    assert b"omitted.aG0=" in front.body


@pytest.mark.parametrize("kind", [{"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}])
async def test_thinking_is_shown_to_those_who_want_updates(kind: dict[str, Any]) -> None:
    front = front_end("<think>hm</think>", "Yes.", reasoning="think")
    message = await post(front, thinking={**kind, "display": "updates"}, max_tokens=2000)
    assert message["content"][0]["thinking"] == "hm"


async def test_safeguards_are_refused() -> None:
    message = await post(front_end("x"), safeguards={"mode": "strict"})
    assert message["error"]["message"] == "safeguards: Extra inputs are not permitted"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_tool_that_came_later_can_be_called(stream: bool) -> None:
    front = front_end(CALL, "\n", OTHER)
    use = {"type": "tool_use", "id": "toolu_1", "name": "wait", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    messages = [*HELLO, {"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}}
    tools = [WAIT, {**LOOK, "defer_loading": True}]
    message = await post(front, messages=messages, tools=tools, stream=stream)
    assert b'"tool_use"' in front.body
    if not stream:
        assert [block["input"] for block in message["content"]] == [{"at": 'the "sea"'}, {}]
    for gone, status in (([], 200), ([{"role": "system", "content": [removal]}], 400)):
        forced = front_end(CALL)
        await post(forced, messages=[*messages, *gone], tools=tools, tool_choice={"type": "tool", "name": "look"})
        assert forced.status == status


@pytest.mark.parametrize("stream", [True, False])
async def test_a_broken_call_is_text_and_no_use_of_a_tool(stream: bool) -> None:
    broken = '<tool_call>\n{"name": "look", "arguments": {"at": oops}}\n</tool_call>'
    front = front_end("Well. ", broken)
    message = await post(front, tools=[LOOK], stream=stream)
    if stream:
        assert "".join(content["delta"].get("text", "") for name, content in events(front) if name == "content_block_delta").endswith(
            broken
        )
        reason = events(front)[-2][1]["delta"]["stop_reason"]
    else:
        [block] = message["content"]
        assert block["text"].endswith(broken)
        reason = message["stop_reason"]
    assert reason == "end_turn"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_sequence_is_named(stream: bool) -> None:
    front = front_end("one two", " three four")
    message = await post(front, stop_sequences=["four", " three"], stream=stream)
    ended = events(front)[-2][1]["delta"] if stream else message
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", " three")
    if not stream:
        assert message["content"] == [{"type": "text", "text": "one two"}]


async def until_the_limit(request: Submit, mailbox: Mailbox) -> None:
    mailbox.put(Delta(0, (97,) * request.max_tokens))
    mailbox.end(Finish("length"))


async def test_the_limit_is_that_of_the_request_or_of_the_context() -> None:
    front = front_end(produce=until_the_limit)
    message = await post(front, max_tokens=7)
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == ("max_tokens", 7)
    message = await post(front, max_tokens=32_000)
    usage = message["usage"]
    assert message["stop_reason"] == "model_context_window_exceeded"
    assert usage["input_tokens"] + usage["output_tokens"] == MODEL.context_length


@pytest.mark.parametrize(
    ("marks", "created"),
    [
        ({}, (0, 0)),
        ({"cache_control": MARK}, (6, 0)),
        ({"system": [MARKED]}, (0, 6)),
        ({"system": [MARKED], "cache_control": MARK}, (6, 6)),
        ({"nvext": {"cache_control": {"ttl": "90s"}}}, (6, 0)),
    ],
)
async def test_every_token_of_the_prompt_is_counted_once(marks: dict[str, Any], created: tuple[int, int]) -> None:
    front = front_end(produce=reports(5, "a", "b"))
    message = await post(front, **marks)
    usage = message["usage"]
    total = (await post(front, f"{URL}/count_tokens", **marks))["input_tokens"]
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"] == total
    assert usage["cache_creation_input_tokens"] == sum(created)
    assert usage["cache_creation"] == {"ephemeral_5m_input_tokens": created[0], "ephemeral_1h_input_tokens": created[1]}
    await post(front, stream=True, **marks)
    for _, content in events(front)[:1] + events(front)[-2:-1]:
        streamed = content.get("message", content)["usage"]
        assert {**streamed, "output_tokens": 2} == usage


async def plan(headers: list[tuple[bytes, bytes]] | None = None, **fields: Any) -> Plan:
    incoming, library = await request({"model": "m", "max_tokens": 9, "messages": HELLO, **fields})
    return (await parse_messages(type(incoming)(incoming.body, headers or [], incoming.tenant), library))[0]


async def test_counting_leaves_the_session_as_it_is() -> None:
    incoming, empty = await request({"model": "m", "messages": HELLO, "max_tokens": 9})
    asked = type(incoming)(incoming.body, [(b"x-claude-code-session-id", b"abc")], incoming.tenant)
    context = PromptContext(empty.models, Transcripts(1 << 20))
    counted = await count_message_tokens(asked, context)
    assert len(context.transcripts) == 0
    found, _ = await parse_messages(asked, context)
    assert found.prompt_tokens == counted.input_tokens
    assert len(context.transcripts) == 1


async def test_wishes_reach_the_submit() -> None:
    found = await plan(system=[MARKED], temperature=0.25, top_k=3)
    [submit] = found.submits
    assert (submit.max_tokens, submit.retention_seconds) == (9, 0.0)
    [mark] = submit.marks
    assert (0 < mark.tokens < len(submit.token_ids), mark.seconds) == (True, 3600.0)
    assert (submit.sampling.temperature, submit.sampling.top_k) == (0.25, 3)
    session = (await plan([(b"x-claude-code-session-id", b"abc")])).hints.session
    assert session is not None
    assert session.id == "abc"
    forced = await plan(tools=[LOOK], tool_choice={"type": "any"})
    assert forced.submits[0].grammar is not None


async def test_a_budget_for_thinking_is_below_the_limit_unless_it_is_for_a_whole_turn() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for headers in ([], [(b"anthropic-beta", b"claude-code-20250219")]):
        with pytest.raises(RequestError, match=r"thinking\.budget_tokens"):
            await plan(headers, thinking=thinking)
    await plan([(b"anthropic-beta", b"claude-code-20250219,interleaved-thinking-2025-05-14")], thinking=thinking)


async def test_counting_takes_the_body_of_a_message() -> None:
    front = front_end("x")
    await post(front, f"{URL}/count_tokens", stream=True, temperature=1, metadata={"user_id": "u"})
    counted = front.json
    assert counted == await post(front, f"{URL}/count_tokens?beta=true", max_tokens=...)
    longer = await post(front, f"{URL}/count_tokens", max_tokens=..., tools=[LOOK])
    assert longer["input_tokens"] > counted["input_tokens"]
    # Even one that would not fit.
    long = await post(front, f"{URL}/count_tokens", messages=[{"role": "user", "content": "x" * 1500}])
    assert long["input_tokens"] > MODEL.context_length


WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": ...}, "max_tokens: Field required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}]},
            "messages.0.content.0.b: Extra inputs are not permitted",
        ),
        ({"n": 2}, "n: Extra inputs are not permitted"),
        ({"messages": [{"role": "tool", "content": "a"}]}, '`messages[0].role` is "tool": expected one of user, assistant, system'),
        (
            {"messages": [{"role": "user", "content": [{"type": "x"}]}]},
            '`messages[0].content[0].type` is "x": expected one of text',
        ),
        ({"temperature": 1.5}, "`temperature` is 1.5"),
        ({"top_p": 0}, "`top_p` is 0"),
        ({"max_tokens": -1}, "`max_tokens` is -1"),
        ({"stop_sequences": [""]}, "`stop_sequences[0]`"),
        ({"tools": [LOOK, WEB_SEARCH]}, "`tools[1].type` is 'web_search_20250305': this server has no tools of its own"),
        ({"tools": [{"name": "look"}]}, "tools.0.input_schema: Field required"),
        ({"tools": [{**LOOK, "colour": 1}]}, "tools.0.colour: Extra inputs are not permitted"),
        ({"tools": [{**LOOK, "name": "a b"}]}, "`tools[0].name`"),
        ({"mcp_servers": [{"type": "url"}]}, "`mcp_servers` is not supported yet"),
        ({"container": "c"}, "`container` is not supported yet"),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "`context_management.edits[0].type`"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "`thinking.budget_tokens` is 100"),
        ({"tools": [LOOK], "tool_choice": {"type": "tool", "name": "leap"}}, "`tool_choice` names 'leap'"),
        ({"messages": [{"role": "user", "content": "x" * 1500}]}, "prompt is too long"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], message: str) -> None:
    front = front_end("x")
    error = await post(front, **fields)
    assert front.status == 400
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].startswith(message)
    assert dict(front.sent[0]["headers"])[b"request-id"].decode() == error["request_id"]


async def test_the_statuses_of_errors() -> None:
    front = front_end("x", limits=Limits(max_body_bytes=200))
    assert (await post(front, model="other"))["error"]["type"] == "not_found_error"
    assert front.status == 404
    assert (await post(front, system="x" * 300))["error"]["type"] == "request_too_large"
    assert front.status == 413
    await front.send("GET", URL)
    assert (front.status, front.json["error"]["type"]) == (405, "invalid_request_error")
    await front.send("POST", f"{URL}/batches")
    assert (front.status, front.json["error"]["type"]) == (404, "not_found_error")
    full = front_end("x", limits=Limits(max_generations=0))
    assert (await post(full))["error"]["type"] == "overloaded_error"
    assert full.status == 529
    assert dict(full.sent[0]["headers"])[b"retry-after"] == b"1"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("no_worker", 529, "overloaded_error"),
        ("queue_full", 529, "overloaded_error"),
        ("invalid_grammar", 400, "invalid_request_error"),
        ("odd", 500, "api_error"),
    ],
)
async def test_a_fault_before_the_answer_has_a_status(code: str, status: int, kind: str) -> None:
    front = front_end(produce=fails(Fault(code, "why")))
    error = await post(front, tools=[LOOK], tool_choice={"type": "any"})
    assert (front.status, error["error"]["type"]) == (status, kind)
    assert error["error"]["message"] == ("`tool_choice`: why" if code == "invalid_grammar" else "why")


async def test_a_fault_in_mid_stream_is_an_event() -> None:
    front = front_end(produce=fails(Fault("engine_failed", "why"), "Hello", " there"))
    await post(front, stream=True)
    found = events(front)
    assert front.status == 200
    assert found[-1] == ("error", {"type": "error", "error": {"type": "overloaded_error", "message": "why"}})
    assert "message_stop" not in dict(found)


def test_a_limit_of_ones_own_is_no_overload() -> None:
    error = RequestError("slow down", code="rate_limit_exceeded", status=429)
    status, body = AnthropicErrors().render(error)
    assert status == 429
    assert json.loads(body)["error"]["type"] == "rate_limit_error"
    assert AnthropicErrors().render(GenerationFault(Fault("draining", "")))[0] == 529


FIELDS = sorted({*MessagesRequest.__struct_fields__, "type", "content", "role", "text", "unknown"})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "text", "user", "tool_use"])
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3))


@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_values_of_any_fields_are_answered(fields: dict[str, Any]) -> None:
    async def answered() -> None:
        front = front_end("x")
        await post(front, **{"max_tokens": 5, **fields})
        assert front.status in (200, 400, 404)
        if front.status != 200:
            assert front.json["error"]["message"]

    asyncio.run(answered())


def test_errors_name_the_blocks_that_there_are() -> None:
    def tags(union: Any) -> set[Any]:
        return {kind.__struct_config__.tag for kind in get_args(union)}

    assert tags(ContentBlock) == set(CHOICES["messages.content.type"])
    assert {path.split(".")[0] for path in (*CHOICES, *UNSUPPORTED)} <= set(MessagesRequest.__struct_fields__)
