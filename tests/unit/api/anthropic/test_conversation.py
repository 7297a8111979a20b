"""What Anthropic's requests say reaches the chat template: nothing is lost, nothing is in a place where templates do not look."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.api.anthropic.blocks import sealed, signature_of
from penstock.api.anthropic.conversation import Conversation
from penstock.api.anthropic.messages import read_chat, read_common
from penstock.api.anthropic.schema import AssistantMessage, Message, MessagesRequest, Role, SystemMessage, UserMessage
from penstock.api.openai.schema import MAX_TOOLS
from penstock.api.pipeline.plan import Chat, ToolChoice
from penstock.media.picture import ImageRef
from penstock.text.images import image_mark
from penstock.wire.errors import RequestError
from penstock.wire.messages import Grammar

SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
LOOK = {"name": "look", "description": "looks", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "sea"}}
MARK = {"type": "ephemeral"}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "blue"}


def request(*messages: dict[str, Any], **fields: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 10, "messages": messages or ({"role": "user", "content": "x"},), **fields}
    return msgspec.json.decode(msgspec.json.encode(body), type=MessagesRequest)


def dialogue(*messages: dict[str, Any], **fields: Any) -> Chat:
    return read_chat(request(*messages, **fields))


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if len(content) == 1 and isinstance(content[0], str) else list(content)}


def assistant(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


def text(value: str, **rest: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **rest}


def test_instructions_come_first_without_the_line_that_changes() -> None:
    blocks = [
        text("x-anthropic-billing-header: cc_version=2; cch=1a2b;"),
        text("Be brief."),
        text("Be kind.", cache_control=MARK),
    ]
    found = dialogue(user("Hello"), system=blocks)
    assert found.prompt.messages == [{"role": "system", "content": "Be brief.\n\nBe kind."}, {"role": "user", "content": "Hello"}]
    assert found.fields == ["system", "messages[0]"]
    assert dialogue(user("Hello"), system="Be brief.").prompt.messages[0] == {"role": "system", "content": "Be brief."}


def test_a_tool_loop_becomes_calls_and_results() -> None:
    other = {**USE, "id": "toolu_2", "input": {}}
    failed = {"type": "tool_result", "tool_use_id": "toolu_2", "content": [text("no"), text("way")], "is_error": True}
    found = dialogue(
        user("Look."),
        assistant({"type": "thinking", "thinking": "hm", "signature": "s"}, text("I look."), USE, other),
        user(RESULT, failed, text("Go on.")),
        tools=[LOOK],
    )
    call = {"id": "toolu_1", "type": "function", "function": {"name": "look", "arguments": {"at": "sea"}}}
    assert found.prompt.messages == [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call, {**call, "id": "toolu_2", "function": {"name": "look", "arguments": {}}}],
        },
        {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "Error: no\n\nway", "name": "look", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "Go on."},
    ]
    assert found.fields == ["messages[0]", "messages[1]", "messages[2].content[0]", "messages[2].content[1]", "messages[2]"]
    assert found.prompt.tools == [{"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}]
    assert found.prompt.begins_answer


def test_those_who_speak_twice_have_one_turn() -> None:
    found = dialogue(user("a"), user(text("b"), text("c")), assistant("d"), assistant(text("e"), text("f")), user("g"))
    assert [(message["role"], message["content"]) for message in found.prompt.messages] == [
        ("user", "a\n\nb\n\nc"),
        ("assistant", "d\n\nef"),
        ("user", "g"),
    ]


def test_instructions_within_a_chat_stay_where_templates_take_them() -> None:
    note = {"role": "system", "content": "mind the gap"}
    reminder = "<system-reminder>\nmind the gap\n</system-reminder>"
    first = dialogue(note, user("a"), system="Be brief.").prompt.messages
    assert first[0] == {"role": "system", "content": "Be brief.\n\nmind the gap"}
    after_user = dialogue(user("a"), note).prompt.messages
    assert after_user == [{"role": "user", "content": f"a\n\n{reminder}"}]
    after_result = dialogue(user("a"), assistant(USE), user(RESULT), note, tools=[LOOK]).prompt.messages
    assert [message["role"] for message in after_result] == ["user", "assistant", "tool"]
    assert after_result[-1]["content"] == f"blue\n\n{reminder}"
    passing = {**note, "clear_at": "next_user_message"}
    assert dialogue(user("a"), passing, assistant("b"), user("c")).prompt.messages[0]["content"] == "a"
    assert dialogue(user("a"), passing).prompt.messages[0]["content"] == f"a\n\n{reminder}"


def test_documents_that_are_text_are_text() -> None:
    plain = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "D"}, "title": "T", "context": "C"}
    parts = {"type": "document", "source": {"type": "content", "content": [text("E"), text("F")]}}
    assert dialogue(user(plain, parts, text("?"))).prompt.messages[0]["content"] == "T\n\nC\n\nD\n\nE\n\nF\n\n?"


def test_a_last_message_of_the_assistant_begins_the_answer() -> None:
    found = dialogue(user("a"), assistant("The answer is")).prompt
    assert (found.continues, found.begins_answer) == (True, False)
    assert found.messages[-1] == {"role": "assistant", "content": "The answer is"}
    empty = dialogue(user("a"), assistant("")).prompt
    assert (empty.continues, empty.begins_answer, len(empty.messages)) == (False, True, 1)


@pytest.mark.parametrize(
    ("fields", "arguments"),
    [
        ({}, {"enable_thinking": False}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"enable_thinking": True}),
        ({"output_config": {"effort": "low"}}, {"enable_thinking": False, "reasoning_effort": "low"}),
        ({"output_config": {"effort": "max"}}, {"enable_thinking": False, "reasoning_effort": "high"}),
    ],
)
def test_thinking_and_effort_are_arguments_of_the_template(fields: dict[str, Any], arguments: dict[str, Any]) -> None:
    assert dialogue(**fields).prompt.arguments == arguments


def test_thinking_that_was_not_shown_comes_back_in_its_signature() -> None:
    blocks = [{"type": "thinking", "thinking": "", "signature": sealed("so ä\n")}, text("b")]
    assert dialogue(user("a"), assistant(*blocks), user("c")).prompt.messages[1].get("reasoning_content") == "so ä\n"
    for signature in ("", "omitted.???", "omitted./w==", signature_of("so")):
        message = dialogue(user("a"), assistant({**blocks[0], "signature": signature}, text("b")), user("c")).prompt.messages[1]
        assert "reasoning_content" not in message
    redacted = {"type": "redacted_thinking", "data": "secret"}
    assert dialogue(user("a"), assistant(redacted, text("b")), user("c")).prompt.messages[1] == {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("all", ["one", "two", "three"]),
        ({"type": "all"}, ["one", "two", "three"]),
        ({"type": "thinking_turns", "value": 2}, ["one", "two", "three"]),
        ({"type": "thinking_turns", "value": 1}, ["two", "three"]),
        (None, ["two", "three"]),
    ],
)
def test_thinking_of_earlier_turns_is_cleared_as_asked(keep: Any, kept: list[str]) -> None:
    def thinking(value: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": value, "signature": "s"}

    found = dialogue(
        user("a"),
        assistant(thinking("one"), text("b")),
        user("c"),
        assistant(thinking("two"), USE),
        user(RESULT),
        assistant(thinking("three"), text("d")),
        user("e"),
        tools=[LOOK],
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": keep}]},
    )
    assert [message["reasoning_content"] for message in found.prompt.messages if "reasoning_content" in message] == kept


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        (None, ToolChoice("auto"), True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolChoice("auto"), False),
        ({"type": "any"}, ToolChoice("required"), True),
        ({"type": "tool", "name": "look", "disable_parallel_tool_use": True}, ToolChoice("named", "look"), False),
        ({"type": "none"}, ToolChoice("none"), True),
    ],
)
def test_tool_choice(choice: Any, expected: ToolChoice, parallel: bool) -> None:
    found = dialogue(tools=[LOOK], tool_choice=choice)
    assert (found.tool_choice, found.parallel_calls) == (expected, parallel)
    assert bool(found.prompt.tools) == (expected.mode != "none")


def test_examples_of_a_tool_are_described() -> None:
    [tool] = dialogue(tools=[{**LOOK, "input_examples": [{"at": "sea"}], "type": "custom", "defer_loading": True}]).prompt.tools
    assert tool["function"]["description"] == 'looks\nExamples of its input:\n{"at":"sea"}'


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_structured_output_is_a_grammar(field: str) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    found = dialogue(**{field: {"format": wanted} if field == "output_config" else wanted})
    assert found.grammar == Grammar("json_schema", '{"type":"object","properties":{"at":{"type":"string"}}}')
    assert found.grammar_field == ("output_config.format.schema" if field == "output_config" else "output_format.schema")


HOUR = {"type": "ephemeral", "ttl": "1h"}


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({}, []),
        ({"system": [text("abc", cache_control=HOUR), text("de", cache_control=MARK)]}, [(0, 3), (0, 7)]),
        # Templates write tools behind the instructions: both end where the messages begin.
        ({"tools": [{**LOOK, "cache_control": MARK}], "system": [text("abc", cache_control=MARK)]}, [(1, 0), (1, 0)]),
        ({"tools": [LOOK], "system": [text("abc", cache_control=MARK), text("de")]}, [(0, 3)]),
        ({"messages": [user(text("abc", cache_control=HOUR), text("de", cache_control=MARK), text("f"))]}, [(0, 3), (0, 7)]),
        ({"messages": [user("abc"), user(text("de", cache_control=MARK))]}, [(0, 7)]),
        ({"messages": [user("a"), assistant(text("bc", cache_control=MARK), text("d")), user("e")]}, [(1, 2)]),
        ({"messages": [assistant({**USE, "cache_control": MARK}), user(RESULT)]}, [(1, 0)]),
        ({"messages": [assistant(USE), user({**RESULT, "cache_control": MARK}, text("ab", cache_control=MARK))]}, [(1, 4), (2, 2)]),
        ({"messages": [assistant(USE), user({**RESULT, "content": [text("ab", cache_control=MARK), text("c")]})]}, [(1, 5)]),
    ],
)
def test_where_marks_are(fields: dict[str, Any], places: list[tuple[int, int]]) -> None:
    found = dialogue(**fields)
    assert [(mark.message, mark.characters) for mark in found.marked] == places


def test_more_marks_than_anthropic_takes_are_refused() -> None:
    marked = [text(letter, cache_control=MARK) for letter in "abcd"]
    assert len(dialogue(messages=[user(*marked)]).marked) == 4
    with pytest.raises(RequestError, match=r"maximum of 4 blocks with cache_control may be provided\. Found 5") as caught:
        dialogue(messages=[user(*marked)], system=[text("s", cache_control=MARK)])
    assert caught.value.param == "messages[0].content[3].cache_control"
    with pytest.raises(RequestError, match="Found 5"):
        dialogue(messages=[user(*marked)], cache_control=MARK)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [user(text("a", cache_control=MARK), text("b", cache_control=HOUR))]}, "messages[0].content[1].cache_control.ttl"),
        ({"tools": [{**LOOK, "cache_control": MARK}], "system": [text("a", cache_control=HOUR)]}, "system[0].cache_control.ttl"),
        ({"messages": [user(text("a", cache_control=MARK))], "cache_control": HOUR}, "cache_control.ttl"),
    ],
)
def test_a_longer_time_may_not_come_after_a_shorter_one(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError, match=r"is '1h': expected at most '5m', the ttl of the earlier `.*`") as caught:
        dialogue(**fields)
    assert caught.value.param == param


def test_settings_are_taken_over() -> None:
    found = read_common(request(stop_sequences=["a", "b"], temperature=0.5, top_p=0.9, top_k=7, stream=True))
    assert (found.stops, found.temperature, found.top_p, found.top_k, found.stream) == (["a", "b"], 0.5, 0.9, 7, True)


PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "aa"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aa"}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"messages": [user({"type": "image", "source": {"type": "file", "file_id": "f"}})]},
            "messages[0].content[0].source.type",
            "no files",
        ),
        ({"messages": [assistant(IMAGE)]}, "messages[0].content[0].type", "role assistant has no such block"),
        ({"messages": [{"role": "system", "content": [IMAGE]}]}, "messages[0].content[0].type", "role system has no such block"),
        ({"messages": [user(PDF)]}, "messages[0].content[0].document", "messages.0.content.0.document: Could not process PDF"),
        ({"messages": [user(RESULT)]}, "messages[0].content[0].tool_use_id", "toolu_1"),
        ({"messages": [user(USE)]}, "messages[0].content[0].type", "tool_use"),
        ({"messages": [assistant(RESULT)]}, "messages[0].content[0].type", "tool_result"),
        ({"messages": [user("a"), assistant("b \n")]}, "messages[1].content", "whitespace"),
        ({"messages": [user("a"), assistant(text("b"), USE)]}, "messages[1]", "tool_result"),
        ({"messages": [{"role": "system", "content": ""}]}, "messages", "nothing to answer"),
        ({"messages": [assistant("")]}, "messages", "nothing to answer"),
        ({"messages": [{**user("a"), "clear_at": "never"}]}, "messages.clear_at", "role system"),
        ({"messages": [user("a"), assistant("b")], "output_format": FORMAT}, "output_format.schema", "needs a user message at the end"),
        ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format", "cannot be combined"),
        ({"tools": [LOOK, LOOK]}, "tools[1].name", "look"),
        ({"tools": [{**LOOK, "allowed_callers": ["code_execution_20250825"]}]}, "tools[0].allowed_callers", "direct"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no `tools`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_chat(request(**fields))
    assert caught.value.param == param
    assert words in caught.value.message
    assert caught.value.status == 400


MESSAGES: dict[Role, type[Message]] = {"user": UserMessage, "assistant": AssistantMessage, "system": SystemMessage}


@pytest.mark.parametrize("role", MESSAGES)
def test_messages_of_one_role_are_joined(role: Role) -> None:
    texts = [f"{number} " + "x" * 1000 for number in range(100)]
    messages = [UserMessage("Hi"), *(MESSAGES[role](text) for text in texts)]
    conversation = Conversation(MessagesRequest(model="m", max_tokens=1, messages=messages))
    assert sum(message["content"].count("x" * 1000) for message in conversation.messages) == len(texts)


def test_a_note_is_cleared_where_the_user_speaks_after_it() -> None:
    note: Message = SystemMessage("note", clear_at="next_user_message")
    asked: Message = UserMessage("Hi")
    said: Message = AssistantMessage("Yes?")
    for messages, is_there in (([asked, note], True), ([asked, note, said], True), ([asked, note, said, asked], False)):
        conversation = Conversation(MessagesRequest(model="m", max_tokens=1, messages=messages))
        assert ("note" in str(conversation.messages)) is is_there


def test_what_is_not_text_in_a_result_leaves_a_placeholder() -> None:
    found = dialogue(user("a"), assistant(USE), user({**RESULT, "content": [text("seen"), IMAGE, PDF, text("end")]}))
    unseen = "[document left out: this model cannot read it]"
    assert found.prompt.messages[-1]["content"] == f"seen\n\n{image_mark(0)}\n\n{unseen}\n\nend"


def test_what_is_not_text_is_refused_only_in_the_last_message_of_the_user() -> None:
    note = {"role": "system", "content": "mind the gap"}
    for messages in ([user(text("a"), IMAGE)], [user("a"), assistant("b"), user(IMAGE), note]):
        assert [image.is_old for image in dialogue(*messages).images] == [False]
    for messages in ([user(text("a"), IMAGE), user("b")], [user(IMAGE), assistant("b"), user("c")]):
        assert [image.is_old for image in dialogue(*messages).images] == [True]


def test_images_are_marks_in_their_order() -> None:
    """Also those in results, which become messages before the user's own."""
    address = {"type": "image", "source": {"type": "url", "url": "https://example.com/b.png"}}
    found = dialogue(user(IMAGE, text("what?")), assistant(USE), user({**RESULT, "content": [IMAGE]}, text("and"), address))
    assert [message["content"] for message in found.prompt.messages if message["role"] != "assistant"] == [
        f"{image_mark(0)}\n\nwhat?",
        image_mark(1),
        f"and\n\n{image_mark(2)}",
    ]
    assert list(found.images) == [
        ImageRef("messages[0].content[0]", data="aa", is_old=True),
        ImageRef("messages[2].content[0].content[0]", data="aa", is_old=True),
        ImageRef("messages[2].content[2]", "https://example.com/b.png"),
    ]


def named(*names: str) -> dict[str, Any]:
    return user({**RESULT, "content": [{"type": "tool_reference", "tool_name": name} for name in names]})


def changes(*blocks: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": f"tool_{kind}", "tool": tool} for kind, tool in blocks]}


DIG = {"name": "dig", "description": "digs", "input_schema": SCHEMA}
FLY = {"name": "fly", "description": "flies", "input_schema": SCHEMA}
DIG_TEXT = '<functions>\n<function>{"description":"digs","name":"dig","parameters":' + msgspec.json.encode(SCHEMA).decode()
REFERENCE = {"type": "tool_reference", "name": "dig"}


def names(tools: Any) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def test_a_deferred_tool_is_described_where_it_is_first_named() -> None:
    before = dialogue(user("a"), assistant(USE), user(RESULT), tools=[LOOK, {**FLY, "defer_loading": True}])
    tools = [{**DIG, "defer_loading": True}, LOOK, {**FLY, "defer_loading": True}]
    after = dialogue(user("a"), assistant(USE), user(RESULT), assistant(USE), named("dig"), tools=tools)
    # What was there stays as it was: its KV can be used again.
    assert after.prompt.messages[: len(before.prompt.messages)] == before.prompt.messages
    assert after.prompt.tools == before.prompt.tools
    assert names(after.prompt.tools) == ["look"]
    assert after.prompt.messages[-1]["content"] == f"{DIG_TEXT}}}</function>\n</functions>"
    assert names(after.later_tools) == ["dig"]
    again = dialogue(user("a"), assistant(USE), named("dig"), assistant(USE), named("dig", "look", "gone"), tools=tools)
    assert again.prompt.messages[-1]["content"] == "The tool dig can be called.\nThe tool look can be called.\nThere is no tool gone."


def test_deferred_tools_without_any_other_are_described_at_the_head() -> None:
    found = dialogue(user("a"), assistant(USE), named("dig"), tools=[{**DIG, "defer_loading": True}])
    assert names(found.prompt.tools) == ["dig"]
    assert names(found.later_tools) == []


def test_with_a_search_of_the_servers_all_tools_are_described_at_the_head() -> None:
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    found = dialogue(tools=[search, LOOK, {**DIG, "defer_loading": True}])
    assert names(found.prompt.tools) == ["look", "dig"]
    with pytest.raises(RequestError, match=r"tools\[0\].input_schema. is required"):
        dialogue(tools=[{"name": "look"}])
    with pytest.raises(RequestError, match=r"messages\[1\].content\[0\].tool.definition.input_schema"):
        dialogue(user("a"), changes(("addition", {"type": "tool_definition", "definition": {"name": "fly"}})), tools=[LOOK])
    with pytest.raises(RequestError, match=r"messages\[1\].content\[0\].tool.definition.type. is 'tool_search_tool_regex_20251119'"):
        dialogue(user("a"), changes(("addition", {"type": "tool_definition", "definition": search})), tools=[LOOK])


def test_a_call_of_a_tool_that_a_message_defines_can_be_forced() -> None:
    added = changes(("addition", {"type": "tool_definition", "definition": FLY}))
    for choice in ({"type": "any"}, {"type": "tool", "name": "fly"}):
        assert names(dialogue(user("a"), added, tool_choice=choice).prompt.tools) == ["fly"]


def test_tools_of_messages_count_as_tools() -> None:
    added = [("addition", {"type": "tool_definition", "definition": {**FLY, "name": f"fly_{number}"}}) for number in range(MAX_TOOLS)]
    assert len(dialogue(user("a"), changes(*added[1:]), tools=[LOOK]).later_tools) == MAX_TOOLS - 1
    with pytest.raises(RequestError, match="`tools` has 1,025 tools, with those that messages add: expected at most 1,024"):
        dialogue(user("a"), changes(*added), tools=[LOOK])


def test_tools_come_and_go_within_a_chat() -> None:
    tools = [LOOK, DIG]
    added = changes(("addition", REFERENCE), ("addition", {"type": "tool_definition", "definition": FLY}))
    gone = changes(("removal", {"type": "tool_reference", "name": "look"}), ("removal", REFERENCE))
    found = dialogue(user("a"), added, tools=tools)
    assert names(found.prompt.tools) == ["look"]
    assert names(found.later_tools) == ["dig", "fly"]
    assert DIG_TEXT in found.prompt.messages[0]["content"]
    assert '"name":"fly"' in found.prompt.messages[0]["content"]
    left = dialogue(user("a"), added, assistant("b"), user("c"), gone, tools=tools)
    assert left.prompt.messages[0] == found.prompt.messages[0]
    assert left.prompt.tools == found.prompt.tools
    assert left.removed_tools == {"look", "dig"}
    assert "The tool look cannot be called any more." in left.prompt.messages[-1]["content"]
    back = dialogue(
        user("a"), added, assistant("b"), user("c"), gone, assistant("d"), user("e"), changes(("addition", REFERENCE)), tools=tools
    )
    assert back.removed_tools == {"look"}


def test_tools_that_only_messages_define_are_at_the_head_too() -> None:
    found = dialogue(user("a"), changes(("addition", {"type": "tool_definition", "definition": FLY})))
    assert names(found.prompt.tools) == ["fly"]


def test_a_tool_that_is_named_often_is_described_once() -> None:
    large = {**DIG, "description": "x" * 10_000, "defer_loading": True}
    found = dialogue(user("a"), assistant(USE), *([named("dig"), assistant(USE)] * 200), named(*["dig"] * 200), tools=[LOOK, large])
    assert sum(len(message["content"]) for message in found.prompt.messages) < 30_000


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_only_instructions_change_the_tools(role: str) -> None:
    with pytest.raises(RequestError, match="tool_addition"):
        dialogue({**changes(("addition", REFERENCE)), "role": role})
