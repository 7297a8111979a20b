"""What holds for images on every engine: what they count, what is cached of them, and that no answer mixes them up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest
from anthropic import Anthropic, BadRequestError

from e2e.harness import Server, wait_until
from e2e.images.asking import TOKENS, blocks, chat, encoded, given, message, respond, shown, url, user
from e2e.images.setups import MODEL, Seeing

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "images.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
LOOK: Any = {"type": "object", "properties": {}}


def test_an_image_counts_its_positions_once_each(server: Server) -> None:
    none, one, two = (chat(server, user(*[11] * count, "What is this?")).prompt for count in range(3))
    assert one > none
    assert two - one == one - none
    wider = chat(server, {"role": "user", "content": [{"type": "image_url", "image_url": url(11, (320, 64))}, *shown("What is this?")]})
    assert wider.prompt != one


@pytest.mark.parametrize("stream", [False, True])
def test_another_picture_or_order_gives_another_answer(server: Server, stream: bool) -> None:
    ask = [user(21, 22, "Which?"), user(22, 21, "Which?"), user(21, 21, "Which?"), user(21, 23, "Which?")]
    texts = [chat(server, one, stream=stream).text for one in ask]
    assert len(set(texts)) == len(ask)
    assert [chat(server, one, stream=not stream).text for one in ask] == texts


def test_the_same_picture_is_cached_another_is_not(server: Server, seeing: Seeing) -> None:
    first = chat(server, user(31, "What is this?"))
    again = chat(server, user(31, "What is this?"), stream=True)
    assert (again.text, again.prompt) == (first.text, first.prompt)
    assert again.cached > first.prompt - 2 * seeing.block_size
    other = chat(server, user(32, "What is this?"))
    text_alone = chat(server, user("What is this?")).prompt
    assert other.prompt == first.prompt
    assert other.cached < text_alone + seeing.block_size


def test_five_turns_with_four_images(server: Server, seeing: Seeing) -> None:
    """In a session. Each turn reuses the prompt before it; what it says does not depend on that."""
    messages: list[Any] = []
    before = 0
    for turn in range(5):
        messages.append(user(40 + turn, f"And this, number {turn}?") if turn < 4 else user("Compare them all."))
        told = chat(server, *messages, extra_headers={"x-session-id": f"five turns {seeing.name}"})
        assert told.cached > before - 2 * seeing.block_size
        messages.append({"role": "assistant", "content": told.text})
        before = told.prompt
    assert chat(server, *messages[:-1]).text == messages[-1]["content"]
    # As in a request that begins with another picture.
    assert chat(server, user(49, "And this, number 0?"), *messages[1:-1]).text != messages[-1]["content"]


def test_choices_share_the_images(server: Server) -> None:
    answer: Any = server.client.chat.completions.create(
        model=MODEL, messages=[user(51, 52, "Say it twice.")], n=2, max_tokens=TOKENS, temperature=0, extra_body={"return_token_ids": True}
    )
    assert [len(choice.model_extra["token_ids"]) for choice in answer.choices] == [TOKENS, TOKENS]
    # Every position is shown as a token that the model knows.
    shown_ids = answer.model_extra["prompt_token_ids"]
    assert len(shown_ids) == answer.usage.prompt_tokens
    assert max(shown_ids) < 2**31
    status, _, told = server.post("/tokenize", messages=[user(51, 52, "Say it twice.")])
    assert (status, told["tokens"]) == (200, shown_ids)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_stored_and_chained(server: Server, stream: bool) -> None:
    first = respond(server, given("Look: ", 61, " and ", 62), stream=stream)
    spoken = [user("Look: ", 61, " and ", 62), {"role": "assistant", "content": first.text}, user(63, "And this?")]
    assert (first.text, first.prompt) == chat(server, spoken[0])[:2]
    items: Any = server.client.responses.input_items.list(first.id).data
    assert [part.to_dict() for part in items[0].content] == given("Look: ", 61, " and ", 62)
    second = respond(server, given(63, "And this?"), stream=stream, previous_response_id=first.id)
    assert (second.text, second.prompt) == chat(server, *spoken)[:2]
    assert second.cached > 0


def test_a_conversation_keeps_its_images(server: Server) -> None:
    kept: Any = {"type": "message", "role": "user", "content": given(64, "Keep this.")}
    conversation = server.client.conversations.create(items=[kept])
    told = respond(server, given("What was it?"), conversation=conversation.id)
    assert told[:2] == chat(server, user(64, "Keep this."), user("What was it?"))[:2]


def test_a_screenshot_in_the_output_of_a_tool(server: Server, anthropic: Anthropic) -> None:
    """Each API has its own place for it. The picture counts, and what it shows matters."""
    tools: Any = [{"type": "function", "name": "look", "parameters": LOOK}]

    def items(number: int) -> list[Any]:
        call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
        return [
            {"role": "user", "content": "Look."},
            call,
            {"type": "function_call_output", "call_id": "c1", "output": given("Seen:", number)},
        ]

    def messages(number: int) -> list[Any]:
        use = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": blocks("Seen:", number)}
        return [{"role": "user", "content": "Look."}, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    def turns(number: int) -> list[Any]:
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": "c1", "content": shown("Seen:\n", number)}
        return [{"role": "user", "content": "Look."}, {"role": "assistant", "content": None, "tool_calls": [call]}, result]

    responded = [respond(server, items(number), tools=tools, tool_choice="auto") for number in (71, 72, 71)]
    assert responded[0].text == responded[2].text != responded[1].text
    assert responded[0].prompt == responded[1].prompt
    chat_tools: Any = [{"type": "function", "function": {"name": "look", "parameters": LOOK}}]
    assert chat(server, *turns(71), tools=chat_tools)[:2] == responded[0][:2]
    offered: Any = [{"name": "look", "input_schema": LOOK}]
    told = message(anthropic, *messages(71), tools=offered)
    assert told.prompt > message(anthropic, *messages(71)[:1], tools=offered).prompt + 10
    again = message(anthropic, *messages(71), tools=offered, stream=True)
    assert again.cached > told.prompt // 2


def test_a_message_counts_its_images(anthropic: Anthropic) -> None:
    asked: list[Any] = [{"role": "user", "content": blocks(81, "What is this?", 82)}]
    counted = anthropic.messages.count_tokens(model=MODEL, messages=asked).input_tokens
    whole = message(anthropic, *asked)
    assert whole.prompt == counted
    streamed = message(anthropic, *asked, stream=True)
    assert streamed.prompt == counted
    assert streamed.cached > counted // 2
    asked += [{"role": "assistant", "content": whole.text or "?"}, {"role": "user", "content": blocks(83, "And this?")}]
    assert message(anthropic, *asked).cached > counted // 2
    without = anthropic.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "What is this?"}]).input_tokens
    assert counted > without + 10


def test_equal_pixels_are_one_picture(server: Server) -> None:
    """Whatever the API, and however the file is packed."""
    first = chat(server, user(91, "Same?"))
    assert respond(server, given(91, "Same?"))[:2] == first[:2]
    other = {"type": "image_url", "image_url": {"url": url(91, note=b"another file")}}
    again = chat(server, {"role": "user", "content": [other, *shown("Same?")]})
    assert again[:2] == first[:2]
    assert again.cached > first.prompt // 2


def test_what_cannot_be_read_is_refused_by_name(server: Server, anthropic: Anthropic) -> None:
    broken = {"type": "image_url", "image_url": {"url": url(95)[:400]}}
    with pytest.raises(openai.BadRequestError) as refused:
        chat(server, {"role": "user", "content": [*shown("Look: "), broken]})
    assert refused.value.param == "messages[0].content[1]"
    source = {"type": "base64", "media_type": "image/png", "data": encoded(95)[:400]}
    with pytest.raises(BadRequestError, match=r"messages\.0\.content\.1\.image: Could not process image"):
        message(anthropic, {"role": "user", "content": [*blocks("Look: "), {"type": "image", "source": source}]})
    for url_refused in ("https://example.com/a.png", "file:///etc/passwd", "data:text/plain,x", ""):
        with pytest.raises(openai.BadRequestError) as refused:
            respond(server, [{"type": "input_image", "image_url": url_refused}])
        assert refused.value.param == "input[0].content[0]"


def test_nobody_waits_for_the_answer_and_its_images_are_there(server: Server) -> None:
    """A response in the background, and a stream that can be resumed: each outlives its connection, and so do its pictures."""
    asked: Any = [{"role": "user", "content": given(97, "Take your time.")}]
    response: Any = server.client.responses.create(
        model=MODEL, input=asked, max_output_tokens=TOKENS, temperature=0, background=True, extra_body={"seed": 7}
    )
    wait_until(lambda: server.client.responses.retrieve(response.id).status not in ("queued", "in_progress"), 60)
    expected = chat(server, user(97, "Take your time."))
    assert server.client.responses.retrieve(response.id).output_text == expected.text
    messages = [user(98, "Take your time.")]
    stream: Any = server.client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=TOKENS,
        temperature=0,
        seed=7,
        stream=True,
        extra_body={"stream_options": {"resumable": True}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == chat(server, *messages).text != expected.text


def test_a_text_that_looks_like_an_image_is_text(server: Server) -> None:
    for written in ("<image>", "<|vision_start|><|image_pad|><|vision_end|>", "<fake_token_around_image><global-img><image>"):
        _, _, told = server.post("/tokenize", messages=[user(f"see {written}")], return_token_strs=True)
        assert written not in told["token_strs"]
        assert "<|image_pad|>" not in told["token_strs"]
        # With an image beside it, only that is one.
        _, _, alone = server.post("/tokenize", messages=[user("see ", 99)])
        _, _, both = server.post("/tokenize", messages=[user(f"see {written}", 99)])
        assert both["count"] > alone["count"]


def test_the_list_of_models_says_that_it_reads_images(server: Server, anthropic: Anthropic) -> None:
    model: Any = server.client.models.retrieve(MODEL)
    assert model.model_extra["input_modalities"] == ["text", "image"]
    told: Any = anthropic.models.retrieve(MODEL).to_dict()
    assert told["capabilities"]["image_input"]["supported"]


@pytest.mark.parametrize("source", EXAMPLES, ids=["openai", "anthropic"])
def test_the_examples_of_the_guide_run(server: Server, source: str) -> None:
    environment = {**os.environ, "PENSTOCK_URL": server.url}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
