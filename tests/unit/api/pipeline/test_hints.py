"""Every spelling of a wish is read as what it means, and every mistake in one is named."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from front_end import at_once
from penstock.api.openai.schema import (
    MAX_SECONDS,
    UNSUPPORTED_CHAT,
    UNSUPPORTED_COMPLETION,
    AssistantMessage,
    ChatRequest,
    CompletionRequest,
    Message,
    SystemMessage,
    UserMessage,
)
from penstock.api.pipeline.hints import (
    SESSION_HEADERS,
    prompt_text,
    read_hints,
    without_billing_header,
)
from penstock.api.pipeline.request import decode_body
from penstock.kv.sessions import MAX_LEASE_SECONDS
from penstock.router.policy import Hints, PlacedMark, SessionWish
from penstock.wire.errors import RequestError
from penstock.wire.messages import DEFAULT_SESSION_SECONDS

CHAT = msgspec.json.Decoder(ChatRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


def encoded(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def chat(headers: dict[str, str] | None = None, content: object = "Hello", **fields: Any) -> Hints:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()
    return read_hints(at_once(decode_body(body, CHAT, UNSUPPORTED_CHAT)), encoded(headers or {}))


def completion(headers: dict[str, str] | None = None, **fields: Any) -> Hints:
    body = json.dumps({"model": "m", "prompt": "Hello", **fields}).encode()
    return read_hints(at_once(decode_body(body, COMPLETION, UNSUPPORTED_COMPLETION)), encoded(headers or {}))


def refused(headers: dict[str, str] | None = None, content: object = "Hello", **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as raised:
        chat(headers, content, **fields)
    assert raised.value.status == 400
    return raised.value


def test_nothing_is_asked_for() -> None:
    assert chat() == completion() == Hints()
    assert chat(nvext=None) == chat(nvext={}) == Hints()


# Sessions of the body.


def test_session_control() -> None:
    opened = {"session_id": "agent-7", "action": "open", "timeout": 60}
    assert chat(nvext={"session_control": opened}).session == SessionWish("agent-7", "open", 60.0)
    assert completion(nvext={"session_control": opened}).session == SessionWish("agent-7", "open", 60.0)
    assert chat(nvext={"session_control": {"session_id": "agent-7"}}).session == SessionWish("agent-7", "continue")
    assert chat(nvext={"session_control": {"session_id": "agent-7", "action": "close"}}).session == SessionWish("agent-7", "close")


def test_default_timeout_is_the_constant() -> None:
    session = chat(nvext={"session_control": {"session_id": "a", "action": "open"}}).session
    assert session is not None
    assert session.timeout == DEFAULT_SESSION_SECONDS


@pytest.mark.parametrize(
    ("control", "param", "value"),
    [
        ("agent-7", "nvext.session_control", "agent-7"),
        ({}, "nvext.session_control.session_id", "required"),
        ({"session_id": ""}, "nvext.session_control.session_id", '""'),
        ({"session_id": 7}, "nvext.session_control.session_id", "7"),
        ({"session_id": "x" * 257}, "nvext.session_control.session_id", "256 bytes"),
        ({"session_id": "é" * 129}, "nvext.session_control.session_id", "256 bytes"),
        ({"session_id": "a\nb"}, "nvext.session_control.session_id", "control characters"),
        ({"session_id": "a", "action": "bind"}, "nvext.session_control.action", "open, close"),
        ({"session_id": "a", "timeout": 0}, "nvext.session_control.timeout", "is 0"),
        ({"session_id": "a", "timeout": -1}, "nvext.session_control.timeout", "is -1"),
        ({"session_id": "a", "timeout": 86_401}, "nvext.session_control.timeout", "is 86401"),
        ({"session_id": "a", "timeout": "NaN"}, "nvext.session_control.timeout", "NaN"),
        ({"session_id": "a", "timeout": True}, "nvext.session_control.timeout", "true"),
        ({"session_id": "a", "ttl": 5}, "nvext.session_control.ttl", "unknown field"),
    ],
)
def test_wrong_session_control_is_named(control: object, param: str, value: str) -> None:
    error = refused(nvext={"session_control": control})
    assert error.param == param
    assert value in error.message


def test_a_timeout_that_is_no_json_number() -> None:
    assert refused(nvext={"session_control": {"session_id": "a", "timeout": float("nan")}}).code == "invalid_json"
    assert refused(nvext={"session_control": {"session_id": "a", "timeout": float("inf")}}).code == "invalid_json"


@pytest.mark.parametrize("session_id", ["x" * 256, "é" * 128, "a/b c?d%2F#", "会話"])
def test_ids_within_the_limit(session_id: str) -> None:
    session = chat(nvext={"session_control": {"session_id": session_id}}).session
    assert session is not None
    assert session.id == session_id


# Sessions of headers.


@pytest.mark.parametrize("name", [names.session.decode() for names in SESSION_HEADERS])
def test_a_session_header_opens_at_every_turn(name: str) -> None:
    assert chat({name: "abc"}).session == completion({name: " abc "}).session == SessionWish("abc", "open", DEFAULT_SESSION_SECONDS)


@pytest.mark.parametrize("names", [(names.session, names.parent) for names in SESSION_HEADERS if names.parent and not names.agent])
def test_the_parent_of_a_session(names: tuple[bytes, bytes]) -> None:
    session, parent = (name.decode() for name in names)
    assert chat({session: "child", parent: "main"}).session == SessionWish("child", parent="main")
    assert chat({session: "main", parent: "main"}).session == SessionWish("main"), "nobody is its own parent"
    assert chat({parent: "main"}).session is None


def test_subagents_of_claude_code_have_sessions_of_their_own() -> None:
    main = {"x-claude-code-session-id": "s1"}
    child = {**main, "x-claude-code-agent-id": "a1"}
    assert chat(main).session == SessionWish("s1")
    assert chat(child).session == SessionWish("s1/a1", parent="s1")
    grandchild = {**main, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
    assert chat(grandchild).session == SessionWish("s1/a2", parent="s1/a1")
    assert chat({**main, "x-claude-code-parent-agent-id": "a1"}).session == SessionWish("s1"), "a parent alone says nothing"
    assert chat({"x-claude-code-agent-id": "a1"}).session is None


def test_a_thread_of_codex_counts_more_than_its_session() -> None:
    headers = {"session-id": "s1", "thread-id": "t2", "x-codex-parent-thread-id": "t1"}
    assert chat(headers).session == SessionWish("t2", parent="t1")


def test_headers_of_opencode() -> None:
    headers = {"x-session-id": "ses_b", "x-parent-session-id": "ses_a", "x-session-affinity": "ses_b", "x-opencode-session": "ses_b"}
    assert chat(headers) == Hints(session=SessionWish("ses_b", parent="ses_a"), affinity="ses_b")


def test_body_before_headers_and_header_before_header() -> None:
    headers = {names.session.decode(): f"by {names.session.decode()}" for names in reversed(SESSION_HEADERS)}
    order = []
    while (session := chat(headers).session) is not None:
        order.append(session.id.removeprefix("by "))
        del headers[order[-1]]
    assert order == [names.session.decode() for names in SESSION_HEADERS]
    headers = {"x-session-id": "header", "x-session-affinity": "header"}
    hints = chat(headers, nvext={"session_control": {"session_id": "body"}}, prompt_cache_key="body")
    assert hints == Hints(session=SessionWish("body", "continue"), affinity="body")


@pytest.mark.parametrize("name", ["x-session-id", "x-parent-session-id", "x-session-affinity"])
@pytest.mark.parametrize("value", ["", "  ", "x" * 257, "a\tb", "a\x7f", "a\x85b"])
def test_a_malformed_header_is_named(name: str, value: str) -> None:
    error = refused({"x-session-id": "fine", name: value})
    assert error.param == name
    assert name in error.message


def test_a_header_that_is_no_text() -> None:
    request = at_once(decode_body(b'{"model": "m", "prompt": "x"}', COMPLETION, UNSUPPORTED_COMPLETION))
    with pytest.raises(RequestError, match="x-session-id"):
        read_hints(request, [(b"x-session-id", b"\xff")])


def test_session_and_agent_together_are_within_the_limit() -> None:
    error = refused({"x-claude-code-session-id": "s" * 128, "x-claude-code-agent-id": "a" * 128})
    assert error.param == "x-claude-code-agent-id"


def test_headers_that_do_not_count_are_not_looked_at() -> None:
    assert chat({"x-session-id": ""}, nvext={"session_control": {"session_id": "a"}}).session == SessionWish("a", "continue")


@pytest.mark.parametrize("name", ["x-session-id", "x-dynamo-session-id", "x-claude-code-session-id", "thread-id"])
@pytest.mark.parametrize("final", ["x-session-final", "x-dynamo-session-final"])
def test_the_last_turn_of_a_session_named_by_a_header(name: str, final: str) -> None:
    for value, is_final in {"true": True, "True": True, " 1 ": True, "false": False, "0": False}.items():
        assert chat({name: "a", final: value}).session == SessionWish("a", is_final=is_final)
    error = refused({name: "a", final: "yes"})
    assert (error.param, error.message) == (final, f'`{final}` is "yes": expected one of true, 1, false, 0')
    assert chat({final: "yes"}).session is None, "no session, so it is not looked at"


# Affinity, retention, priority, routing.


def test_affinity() -> None:
    assert chat(prompt_cache_key="team-a").affinity == completion(prompt_cache_key="team-a").affinity == "team-a"
    assert chat({"x-session-affinity": "team-a"}) == Hints(affinity="team-a"), "no session, so no lease"
    assert refused(prompt_cache_key="").param == "prompt_cache_key"
    assert refused(prompt_cache_key="x" * 257).param == "prompt_cache_key"


def part(**marks: object) -> dict[str, object]:
    return {"type": "text", "text": "Hello", **marks}


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"nvext": {"cache_control": {"type": "ephemeral"}}}, 300),
        ({"nvext": {"cache_control": {"ttl": "5m"}}}, 300),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}}}, 3_600),
        ({"nvext": {"cache_control": {"ttl": "90s"}}}, 90),
        ({"nvext": {"cache_control": {"ttl": "1.5m"}}}, 90),
        ({"nvext": {"cache_control": {"ttl": "24h"}}}, 86_400),
        ({"nvext": {"cache_control": {"ttl": 12.5}}}, 12.5),
        ({"nvext": {"cache_control": {"ttl": "1h", "retention_seconds": 20}}}, 20),
        ({"prompt_cache_retention": "24h"}, 86_400),
        ({"prompt_cache_retention": "in_memory"}, 0),
        ({"prompt_cache_retention": "in-memory"}, 0),
        ({"prompt_cache_options": {}}, 1_800),
        ({"prompt_cache_options": {"ttl": "30m"}}, 1_800),
        ({"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}}, 0),
        ({"cache_control": {"type": "ephemeral"}}, 300),
        ({"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}, 3_600),
        # Several: nvext, then OpenAI's, then Anthropic's.
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 1_800),
        ({"prompt_cache_retention": "in_memory", "cache_control": {"type": "ephemeral"}}, 0),
    ],
)
def test_retention(fields: dict[str, Any], seconds: float) -> None:
    assert chat(**fields) == completion(**fields) == Hints(marks=(PlacedMark(seconds),) if seconds else ())


def test_our_own_retention_keeps_the_answer_too() -> None:
    others: dict[str, Any] = {"prompt_cache_retention": "24h", "cache_control": {"type": "ephemeral"}}
    hints = chat(nvext={"cache_control": {"ttl": "1h"}, "retention_seconds": 8}, **others)
    assert hints == Hints(retention_seconds=8, marks=(PlacedMark(8),))
    assert hints.longest_retention == 8


def test_no_spelling_asks_for_more_than_a_worker_grants() -> None:
    spelled: list[dict[str, Any]] = [
        {"prompt_cache_retention": "24h"},
        {"prompt_cache_options": {"ttl": "12h"}},
        {"nvext": {"retention_seconds": MAX_SECONDS}},
    ]
    assert max(chat(**fields).longest_retention for fields in spelled) == MAX_SECONDS == MAX_LEASE_SECONDS


def placed(*marks: tuple[float, int | None, int]) -> tuple[PlacedMark, ...]:
    return tuple(PlacedMark(*mark) for mark in marks)


def test_marks_on_content() -> None:
    short, long = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}
    assert chat(content=[part(cache_control=short), part()]).marks == placed((300, 0, 5))
    assert chat(content=[part(cache_control=long), part(cache_control=short)]).marks == placed((3_600, 0, 5), (300, 0, 10))
    assert chat(content=[part(cache_control=short)], cache_control=long).marks == placed((300, 0, 5), (3_600, None, 0))
    marked = [part(), part(prompt_cache_breakpoint={"mode": "explicit"})]
    assert chat(content=marked).marks == placed((1_800, 0, 10))
    assert chat(content=marked, prompt_cache_options={"mode": "explicit", "ttl": "12h"}).marks == placed((43_200, 0, 10))
    assert chat(content=[part(prompt_cache_breakpoint={"mode": "explicit", "ttl": "12h"})]).marks == placed((43_200, 0, 5))
    assert chat(content=marked, prompt_cache_options={"ttl": "12h"}).marks == placed((43_200, 0, 10), (43_200, None, 0))


def test_the_last_breakpoints_count() -> None:
    many = [part(prompt_cache_breakpoint={"mode": "explicit"}) for _ in range(6)]
    assert [mark.characters for mark in chat(content=many).marks] == [15, 20, 25, 30]
    assert [mark.characters for mark in chat(content=many, prompt_cache_options={}).marks] == [20, 25, 30, 0]


def test_marks_on_tools_and_instructions() -> None:
    mark = {"type": "ephemeral"}
    tool = {"type": "function", "function": {"name": "look"}, "cache_control": mark}
    billing = part(text="x-anthropic-billing-header: cch=1;")
    instructions = [billing, part(cache_control=mark), part(cache_control=mark)]
    messages = [{"role": "system", "content": instructions}, {"role": "user", "content": "Hello", "cache_control": mark}]
    assert chat(messages=messages, tools=[tool]).marks == placed((300, 1, 0), (300, 0, 5), (300, 1, 0), (300, 1, 5))
    assert chat(messages=messages).marks == placed((300, 0, 5), (300, 0, 10), (300, 1, 5))


@pytest.mark.parametrize("ttl", ["", "5", "5 m", "m", "-5m", "0s", "25h", "1d", "5m ", "١m", "nan", 0, -1, 86_401, [5], True])
def test_a_wrong_ttl_is_named(ttl: object) -> None:
    assert refused(nvext={"cache_control": {"ttl": ttl}}).param == "nvext.cache_control.ttl"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"nvext": {"retention_seconds": 0}}, "nvext.retention_seconds"),
        ({"nvext": {"retention_seconds": 86_401}}, "nvext.retention_seconds"),
        ({"nvext": {"cache_control": {"type": "forever"}}}, "nvext.cache_control.type"),
        ({"nvext": {"cache_control": {"retention_seconds": -1}}}, "nvext.cache_control.retention_seconds"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prompt_cache_options": {"ttl": "5m"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"retention": "24h"}}, "prompt_cache_options.retention"),
        ({"cache_control": {"ttl": "1h"}}, "cache_control.type"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        (
            {"content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "ttl": 5}}]},
            "messages[0].content[0].cache_control.ttl",
        ),
        ({"nvext": {"agent_hints": {"priority": 11}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"priority": -11}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"priority": "high"}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"agent_hints": {"osl": "long"}}}, "nvext.agent_hints.osl"),
        ({"nvext": {"agent_hints": {"mood": 1}}}, "nvext.agent_hints.mood"),
        ({"nvext": {"extra_fields": ["router"]}}, "nvext.extra_fields[0]"),
        ({"nvext": {"extra_fields": "route"}}, "nvext.extra_fields"),
        ({"nvext": {"sesion_control": {}}}, "nvext.sesion_control"),
        ({"nvext": []}, "nvext"),
    ],
)
def test_other_mistakes_are_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize("priority", [-10, 0, 10])
def test_priority(priority: int) -> None:
    assert chat(nvext={"agent_hints": {"priority": priority}}) == Hints(priority=priority)


def test_what_only_dynamo_knows_is_ignored_when_it_changes_no_answer() -> None:
    hints = {"priority": 2, "strict_priority": 1, "osl": 1024, "speculative_prefill": True, "latency_sensitivity": 0.5}
    ignored = {
        "agent_hints": {**hints, "prefix_id": "p", "total_requests": 4, "iat": 250},
        "agent_context": {"session_id": "not a session of ours"},
        "annotations": ["formatted_prompt"],
        "backend_instance_id": 5,
        "decode_worker_id": 5,
        "prefill_worker_id": 6,
        "dp_rank": 0,
        "prefill_dp_rank": 0,
        "request_timestamp_ms": 12.5,
        "max_thinking_tokens": 100,
        "greed_sampling": False,
        "use_raw_prompt": False,
        "extra_fields": ["worker_id", "timing", "routed_experts", "engine_data", "stop_reason"],
    }
    assert chat(nvext=ignored) == completion(nvext=ignored) == Hints(priority=2)


@pytest.mark.parametrize("member", [{"greed_sampling": True}, {"use_raw_prompt": True}, {"token_data": [1]}])
def test_what_would_change_the_answer_is_refused(member: dict[str, Any]) -> None:
    error = refused(nvext=member)
    assert (error.param, error.code) == (f"nvext.{next(iter(member))}", "unsupported_field")


@pytest.mark.parametrize("salt", ["s", "x" * 128, "a/b@c\\d", "\U0001f512 \x01"])
def test_cache_salt(salt: str) -> None:
    assert (
        chat(cache_salt=salt)
        == chat(nvext={"cache_salt": salt})
        == chat(cache_salt=salt, nvext={"cache_salt": salt})
        == Hints(cache_salt=salt)
    )
    assert completion(cache_salt=salt) == Hints(cache_salt=salt)
    assert chat(cache_salt=None, nvext={"cache_salt": None}) == Hints()


def test_a_cache_salt_that_is_too_long_is_refused() -> None:
    for fields, param in (({"cache_salt": "x" * 129}, "cache_salt"), ({"nvext": {"cache_salt": "x" * 129}}, "nvext.cache_salt")):
        error = refused(**fields)
        assert (error.param, error.code, error.status) == (param, "too_long", 400)
        assert str(error) == f"`{param}` has 129 characters: expected at most 128"


@pytest.mark.parametrize("salt", ["", 5, ["s"], {}, True])
def test_a_bad_cache_salt_is_refused(salt: object) -> None:
    for fields, param in (({"cache_salt": salt}, "cache_salt"), ({"nvext": {"cache_salt": salt}}, "nvext.cache_salt")):
        error = refused(**fields)
        assert (error.param, error.code, error.status) == (param, "invalid_value", 400)
        assert f"`{param}` {'has 129 characters' if salt == 'x' * 129 else f'is {json.dumps(salt)}'}: expected " in str(error)


def test_two_cache_salts_are_refused() -> None:
    error = refused(cache_salt="a", nvext={"cache_salt": "b"})
    assert (error.param, str(error)) == (
        "nvext.cache_salt",
        '`nvext.cache_salt` is "b": expected the same as `cache_salt`, or only one of the two',
    )


def test_an_element_of_what_is_not_supported_names_the_whole() -> None:
    error = refused(modalities=["audio"])
    assert (error.param, error.code) == ("modalities", "unsupported_field")


def test_route() -> None:
    assert chat(nvext={"extra_fields": ["timing", "route"]}) == Hints(wants_route=True)


@pytest.mark.parametrize("name", ["kv", "round-robin", "least-loaded", "random"])
def test_router_of_one_request(name: str) -> None:
    assert chat({"x-penstock-router": name}).router == name


@pytest.mark.parametrize("value", ["", "KV", "kv,random", "\xff"])
def test_a_wrong_router_is_named(value: str) -> None:
    error = refused({"x-penstock-router": value})
    assert error.param == "x-penstock-router"
    assert "kv, round-robin, least-loaded, random" in error.message


NAMES = st.sampled_from([name for names in SESSION_HEADERS for name in names if name] + [b"x-session-affinity", b"x-penstock-router"])


@given(st.dictionaries(NAMES, st.binary(max_size=300), max_size=4))
def test_any_headers_are_hints_or_a_refusal(headers: dict[bytes, bytes]) -> None:
    request = at_once(decode_body(b'{"model": "m", "prompt": "x"}', COMPLETION, UNSUPPORTED_COMPLETION))
    try:
        hints = read_hints(request, headers.items())
    except RequestError as error:
        assert error.param is not None
        assert error.param.encode() in headers
    else:
        assert hints.session is None or 0 < len(hints.session.id.encode()) <= 256


# What changes on every call.

BILLING = "x-anthropic-billing-header: cc_version=2.1.77; cc_entrypoint=cli; cch=01234;"


@pytest.mark.parametrize("role", ["system", "developer"])
def test_billing_header_is_left_out_of_instructions(role: Any) -> None:
    content = [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief. "}, {"type": "text", "text": f"Not {BILLING}"}]
    message = msgspec.convert({"role": role, "content": content}, Message)
    assert prompt_text(message) == f"Be brief. Not {BILLING}"
    assert prompt_text(msgspec.convert({"role": role, "content": f"{BILLING}\nBe brief."}, Message)) == "Be brief."


def test_billing_header_in_what_the_user_says_stays() -> None:
    assert prompt_text(UserMessage(BILLING)) == BILLING
    assert prompt_text(msgspec.convert({"role": "user", "content": [{"type": "text", "text": BILLING}]}, Message)) == BILLING
    assert prompt_text(AssistantMessage(BILLING)) == BILLING
    assert prompt_text(SystemMessage()) == ""


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (BILLING, ""),
        (f"{BILLING}\n{BILLING}\r\n\nBe brief.\n{BILLING}", f"Be brief.\n{BILLING}"),
        (f"Be brief.\n{BILLING}", f"Be brief.\n{BILLING}"),
        ("x-anthropic-billing-header is a name", "x-anthropic-billing-header is a name"),
        ("\n\nBe brief.", "\n\nBe brief."),
    ],
)
def test_only_leading_lines_are_left_out(text: str, rest: str) -> None:
    assert without_billing_header(text) == rest
