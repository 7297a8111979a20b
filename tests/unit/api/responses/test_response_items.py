"""Items of a request, and the messages that the model sees."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.api.openai.schema import Marked, PromptCacheBreakpoint
from penstock.api.responses.items import MAX_DEPTH, Messages, check_outputs, cuts, read_items
from penstock.media.picture import ImageRef
from penstock.text.images import image_mark
from penstock.text.tokenizers.tokenizer import ChatMessage
from penstock.wire.errors import RequestError

CALL = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "seen"}


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[ChatMessage]:
    chat = Messages(instructions)
    read = read_items("input", items)
    chat.add(read, [f"input[{index}]" for index in range(len(read))])
    assert len(chat.fields) == len(chat.messages)
    return chat.messages


def test_a_string_is_a_message_of_the_user() -> None:
    (item,) = read_items("input", "Hello")
    assert item.pop("id").startswith("msg_")
    assert item == {"type": "message", "role": "user", "status": "completed", "content": [{"type": "input_text", "text": "Hello"}]}


@pytest.mark.parametrize("kind", [None, "message"])
@pytest.mark.parametrize(("role", "spoken"), [("user", "input_text"), ("assistant", "output_text"), ("developer", "input_text")])
def test_short_messages_get_the_full_form(kind: str | None, role: str, spoken: str) -> None:
    given = {"role": role, "content": "Hi", **({} if kind is None else {"type": kind})}
    (item,) = read_items("input", [given])
    assert item["content"][0]["type"] == spoken
    assert item["content"][0]["text"] == "Hi"


def test_items_of_an_answer_can_be_sent_back() -> None:
    answer = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "Hi", "annotations": [], "logprobs": []}],
    }
    reasoning = {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm"}],
        "status": "completed",
        "encrypted_content": "x",
    }
    call = {**CALL, "id": "fc_1", "status": "completed"}
    custom = {"id": "ctc_1", "type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***", "status": "completed"}
    given: list[dict[str, Any]] = [reasoning, answer, call, custom]
    assert read_items("input", given) == given


def test_one_answer_is_one_message() -> None:
    first, output, last = messages(
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": "Let me see."},
        CALL,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "***"},
        OUTPUT,
        {"role": "user", "content": "Well?"},
    )
    assert first["role"] == "assistant"
    assert first["reasoning_content"] == "Hm"
    assert first["content"] == "Let me see."
    assert [(call["id"], call["function"]) for call in first["tool_calls"]] == [
        ("c1", {"name": "look", "arguments": {"at": 1}}),
        ("c2", {"name": "patch", "arguments": {"input": "***"}}),
    ]
    assert output == {"role": "tool", "content": "seen", "tool_call_id": "c1"}
    assert last == {"role": "user", "content": "Well?"}


def test_text_after_a_call_is_a_new_message() -> None:
    roles = [message["role"] for message in messages(CALL, {"role": "assistant", "content": "Done."})]
    assert roles == ["assistant", "assistant"]


def test_encrypted_reasoning_is_ignored() -> None:
    assert messages({"type": "reasoning", "summary": [], "encrypted_content": "x"}, {"role": "user", "content": "a"}) == [
        {"role": "user", "content": "a"}
    ]


def test_instructions_come_first() -> None:
    assert messages({"role": "user", "content": "a"}, instructions="Be brief.")[0] == {"role": "system", "content": "Be brief."}


def test_the_parts_of_an_output_are_lines() -> None:
    """Codex sends `Output:` in one part and what an MCP server said in the next."""
    output = {**OUTPUT, "output": [{"type": "input_text", "text": "Output:"}, {"type": "input_text", "text": "seen"}]}
    assert messages(CALL, output)[1]["content"] == "Output:\nseen"


def test_what_cannot_be_read_is_refused_only_in_the_last_message() -> None:
    """A client that sends it again, before its next message, goes on."""
    audio = {"role": "user", "content": [{"type": "input_text", "text": "Listen:"}, {"type": "input_audio", "input_audio": {}}]}
    with pytest.raises(RequestError, match="audio is not supported by this model") as caught:
        read_items("input", [{"role": "user", "content": "Hi"}, audio], is_history=True)
    assert caught.value.param == "input[1].content[1].type"
    earlier, _ = read_items("input", [audio, {"role": "user", "content": "Hi"}], is_history=True)
    assert [part["type"] for part in earlier["content"]] == ["input_text", "input_text"]
    assert earlier["content"][1]["text"].startswith("[audio left out")
    with pytest.raises(RequestError, match="audio is not supported"):
        read_items("items", [audio, {"role": "user", "content": "Hi"}])


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aa", "detail": "high"}


def test_an_image_is_stored_as_it_was_sent_and_is_a_mark_in_the_prompt() -> None:
    text, output = {"type": "input_text", "text": "seen"}, {**OUTPUT, "output": [{"type": "input_text", "text": "Output:"}, IMAGE]}
    asked = {"role": "user", "content": [text, {**IMAGE, "detail": None}]}
    items = read_items("input", [CALL, output, asked], is_history=True)
    assert items[1]["output"][1] == IMAGE
    assert items[2]["content"] == [text, {**IMAGE, "detail": "auto"}]
    chat = Messages()
    chat.add(items, ["a", "b", "input[2]"])
    assert [message["content"] for message in chat.messages[1:]] == [f"Output:\n{image_mark(0)}", f"seen{image_mark(1)}"]
    url = IMAGE["image_url"]
    assert chat.images == [ImageRef("b.output[1]", url, detail="high", is_old=True), ImageRef("input[2].content[1]", url)]


def test_an_image_in_the_form_of_a_chat_is_stored_in_that_of_responses() -> None:
    part = {"type": "input_image", "image_url": {"url": "data:,", "detail": "low"}, "prompt_cache_breakpoint": {"mode": "explicit"}}
    [item] = read_items("input", [{"role": "user", "content": [part, {"type": "input_text", "text": "x"}]}])
    expected = {"type": "input_image", "image_url": "data:,", "detail": "low"}
    assert item["content"][0] == {**expected, "prompt_cache_breakpoint": {"mode": "explicit", "ttl": None}}
    chat = Messages()
    chat.add([item], ["input[0]"])
    assert [(mark.message, mark.characters) for mark in chat.marked] == [(0, len(image_mark(0)))]


@pytest.mark.parametrize(
    ("item", "param", "says"),
    [
        ({"role": "robot", "content": ""}, "input[0].role", "expected one of user, assistant, system, developer"),
        ({"role": "user"}, "input[0].content", "required"),
        ({"role": "user", "content": "", "mood": 1}, "input[0].mood", "unknown field"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "input[0].content[0].image_url", "required"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[0].content[0].file_id", "stores no files"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "u", "detail": "much"}]},
            "input[0].content[0].detail",
            "expected one of auto, low, high, original",
        ),
        (
            {"role": "assistant", "content": [{"type": "input_image", "image_url": "u"}]},
            "input[0].content[0].type",
            "a message of the assistant has no images",
        ),
        ({"role": "user", "content": [{"type": "input_poem"}]}, "input[0].content[0].type", "expected one of input_text"),
        ({"role": "user", "content": [{"type": "input_text"}]}, None, ""),
        ({"type": "web_search_call", "id": "x"}, "input[0].type", "no such tool"),
        ({"type": "magic"}, "input[0].type", "expected one of message, function_call"),
        ({"type": 7}, "input[0].type", "not a string"),
        ({"type": "function_call", "call_id": "a", "name": "b"}, "input[0].arguments", "required"),
        ({"type": "function_call", "call_id": "", "name": "b", "arguments": ""}, "input[0].call_id", "length >= 1"),
        ({"type": "item_reference"}, "input[0].id", "required"),
        ({"role": "user", "content": "", "id": "x" * 300}, "input[0].id", "has 300 characters: expected at most 256"),
    ],
)
def test_errors_name_the_field(item: dict[str, Any], param: str | None, says: str) -> None:
    if param is None:
        assert read_items("input", [item])[0]["content"] == [{"type": "input_text", "text": ""}]
        return
    with pytest.raises(RequestError) as caught:
        read_items("input", [item])
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message
    assert says in caught.value.message
    assert caught.value.status == 400


def test_depth() -> None:
    deep: Any = []
    for _ in range(MAX_DEPTH):
        deep = [deep]
    with pytest.raises(RequestError, match="nested more than 64 levels"):
        read_items("input", [{"role": "assistant", "content": [{"type": "output_text", "text": "", "annotations": deep}]}])


def test_an_output_needs_its_call() -> None:
    items = read_items("input", [OUTPUT, CALL])
    with pytest.raises(RequestError, match=r"`input\[0\]\.call_id` is 'c1': no function_call before it"):
        check_outputs(items, ["input[0]", "input[1]"])
    check_outputs(reversed(items), ["input[0]", "input[1]"])


def test_marks_for_the_cache() -> None:
    part = {"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    output = {**OUTPUT, "output": [{"type": "input_text", "text": "abc"}, {**part, "text": "de"}, {"type": "input_text", "text": "f"}]}
    read = read_items("input", [{"role": "user", "content": [part, {"type": "input_text", "text": "b"}]}, CALL, output])
    chat = Messages("Be brief.")
    chat.add(read, [f"input[{index}]" for index in range(len(read))])
    long = PromptCacheBreakpoint("explicit", "12h")
    assert chat.marked == [Marked(1, 1, None, long), Marked(3, 6, None, long)], "behind `a`, and behind two lines of the output"


def test_cuts_keep_calls_and_outputs_together() -> None:
    chat = Messages("Be brief.")
    read = read_items("input", [{"role": "user", "content": "a"}, CALL, OUTPUT, {"role": "user", "content": "b"}])
    chat.add(read, [f"input[{index}]" for index in range(len(read))])
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "tool", "user"]
    assert cuts(chat.messages) == [slice(1, 2), slice(1, 4)]
    assert cuts(chat.messages[1:]) == [slice(0, 1), slice(0, 3)], "without instructions, the first may go, too"


def test_cuts_keep_leading_instructions_of_every_role() -> None:
    chat = Messages("Be brief.")
    read = read_items("input", [{"role": role, "content": "a"} for role in ("developer", "system", "user", "developer", "user")])
    chat.add(read, [f"input[{index}]" for index in range(len(read))])
    assert cuts(chat.messages) == [slice(3, 4), slice(3, 5)]
    assert cuts(chat.messages[:2]) == []
