"""No chat template loses text: every shape of a chat, over every API, in every template there is. Run with `-s` for the figures.

Published templates are in `../shared/templates`, beside the checkout, where that exists.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pytest

from chat_model import chat_model
from chat_templates import DROPPING, PUBLISHED, REFUSING, TEMPLATES
from penstock.api.anthropic.messages import read_chat
from penstock.api.anthropic.schema import Prompted
from penstock.api.openai import chat as openai_chat
from penstock.api.openai.schema import ChatRequest
from penstock.api.responses.items import Messages, read_items
from penstock.api.responses.tools import read_tools
from penstock.engine.checkpoints.checkpoint import find_default_model
from penstock.text.template import ChatTemplates
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.text.tokenizers.tokenizer import ChatPrompt
from penstock.text.tokenizers.words import WordTokenizer
from penstock.wire.errors import RequestError

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}

Body = dict[str, Any]
Render = Callable[[ChatPrompt], str]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool_{name}",
            "description": f"describes_{name}",
            "parameters": {"type": "object", "properties": {f"key_{name}": {"type": "string", "description": f"explains_{name}"}}},
        },
    }
    for name in ("one", "two")
]


def say(role: str, *words: str) -> Body:
    """With several words: content in parts."""
    if len(words) == 1:
        return {"role": role, "content": words[0]}
    return {"role": role, "content": [{"type": "text", "text": word} for word in words]}


def call(*names: str, beside: str | None = None, arguments: str | None = None) -> Body:
    made = [
        {
            "id": f"call_{name}",
            "type": "function",
            "function": {"name": f"tool_{name}", "arguments": arguments or f'{{"key_{name}": "value_{name}"}}'},
        }
        for name in names
    ]
    return {"role": "assistant", "content": beside, "tool_calls": made}


def result(name: str, text: str | None = None) -> Body:
    return {"role": "tool", "tool_call_id": f"call_{name}", "content": f"result_{name}" if text is None else text}


SYSTEM, DEVELOPER, USER, AGAIN, ANSWER = (
    say("system", "rules"),
    say("developer", "wishes"),
    say("user", "asks"),
    say("user", "more"),
    say("assistant", "says"),
)
LATER = say("system", "later")
CHATS: Mapping[str, Sequence[Body]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "developer": [DEVELOPER, USER],
    "system twice": [SYSTEM, say("system", "norms"), USER, ANSWER, AGAIN],
    "system and developer": [SYSTEM, DEVELOPER, USER, ANSWER, AGAIN],
    "developer and system": [DEVELOPER, SYSTEM, USER],
    "system alone": [SYSTEM],
    "system after an answer": [SYSTEM, USER, ANSWER, LATER, AGAIN],
    "system after the user": [SYSTEM, USER, LATER, ANSWER, AGAIN],
    "system at the end": [SYSTEM, USER, ANSWER, AGAIN, LATER],
    "system only later": [USER, ANSWER, LATER, AGAIN],
    "developer later": [SYSTEM, USER, ANSWER, say("developer", "later"), AGAIN],
    "system after a result": [SYSTEM, USER, call("one"), result("one"), LATER],
    "system between calls": [SYSTEM, USER, call("one"), result("one"), LATER, call("two"), result("two"), ANSWER, AGAIN],
    "users in a row": [USER, AGAIN],
    "users in a row later": [SYSTEM, USER, ANSWER, AGAIN, say("user", "last")],
    "answers in a row": [USER, ANSWER, say("assistant", "adds"), AGAIN],
    "answer first": [ANSWER, AGAIN],
    "system and answer first": [SYSTEM, ANSWER, AGAIN],
    "answer last": [SYSTEM, USER, ANSWER],
    "empty answer": [USER, say("assistant", ""), AGAIN],
    "empty user": [USER, ANSWER, say("user", ""), say("assistant", "adds"), AGAIN],
    "empty system": [say("system", ""), USER],
    "parts": [say("system", "rules", "norms"), say("user", "asks", "begs"), say("assistant", "says", "adds"), say("user", "more", "last")],
    "call": [SYSTEM, USER, call("one"), result("one")],
    "call and answer": [SYSTEM, USER, call("one"), result("one"), ANSWER, AGAIN],
    "calls in turn": [USER, call("one"), result("one"), call("two"), result("two"), ANSWER],
    "parallel calls": [SYSTEM, USER, call("one", "two"), result("one"), result("two"), ANSWER, AGAIN],
    "results in another order": [USER, call("one", "two"), result("two"), result("one"), ANSWER, AGAIN],
    "text beside a call": [SYSTEM, USER, call("one", beside="plans"), result("one"), ANSWER, AGAIN],
    "text beside calls": [
        USER,
        call("one", "two", beside="plans"),
        result("one"),
        result("two"),
        call("one", beside="adds"),
        result("one"),
    ],
    "user after a result": [USER, call("one"), result("one"), AGAIN],
    "call without a result": [USER, call("one", beside="plans"), AGAIN],
    "nested arguments": [USER, call("one", arguments='{"outer": {"inner": ["deep", {"low": "end"}]}}'), result("one")],
    "arguments that are no object": [USER, call("one", arguments="{broken"), result("one")],
    "result as JSON": [USER, call("one"), result("one", '{"quoted": "line\\nbreak"}')],
    "empty result": [USER, call("one"), result("one", ""), ANSWER, AGAIN],
    "result without a call": [USER, result("one"), AGAIN],
    "function": [USER, {"role": "function", "name": "tool_one", "content": "result_one"}, AGAIN],
    "reasoning": [
        USER,
        {**ANSWER, "reasoning_content": "thinks"},
        AGAIN,
        {**call("one", beside="plans"), "reasoning_content": "thinks"},
        result("one"),
    ],
}


def over_chat(messages: Sequence[Body], tools: Sequence[Body]) -> ChatPrompt:
    return openai_chat.read_chat(msgspec.convert({"model": "m", "messages": messages, "tools": tools}, ChatRequest)).prompt


def over_responses(messages: Sequence[Body], tools: Sequence[Body]) -> ChatPrompt | None:
    items: list[Body] = []
    for message in messages:
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]})
            continue
        if message["role"] == "function":
            return None
        if message.get("reasoning_content"):
            items.append(
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": message["reasoning_content"]}], "summary": []}
            )
        if message["content"] is not None:
            kind = "output_text" if message["role"] == "assistant" else "input_text"
            content = message["content"]
            parts = content if isinstance(content, str) else [{"type": kind, "text": part["text"]} for part in content]
            items.append({"type": "message", "role": message["role"], "content": parts})
        items += [{"type": "function_call", "call_id": made["id"], **made["function"]} for made in message.get("tool_calls", ())]
    chat = Messages()
    chat.add(read_items("input", items), [f"input[{index}]" for index in range(len(items))])
    offered = read_tools([{"type": "function", **tool["function"]} for tool in tools], None).offered
    return ChatPrompt(messages=chat.messages, tools=offered)


def over_anthropic(messages: Sequence[Body], tools: Sequence[Body]) -> ChatPrompt | None:
    if {message["role"] for message in messages} & {"developer", "function"}:
        return None
    described = [
        {"name": tool["function"]["name"], "description": tool["function"]["description"], "input_schema": tool["function"]["parameters"]}
        for tool in tools
    ]
    said = [_anthropic_message(message) for message in messages]
    try:
        return read_chat(msgspec.convert({"model": "m", "messages": said, "tools": described}, Prompted)).prompt
    except (msgspec.ValidationError, RequestError, json.JSONDecodeError):
        return None  # not a chat of this API: a result without a call, arguments that are no object


def _anthropic_message(message: Body) -> Body:
    if message["role"] == "tool":
        block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
        return {"role": "user", "content": [block]}
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
    for made in message.get("tool_calls", ()):
        blocks.append(
            {"type": "tool_use", "id": made["id"], "name": made["function"]["name"], "input": _object(made["function"]["arguments"])}
        )
    return {"role": message["role"], "content": blocks}


def _object(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


APIS: Mapping[str, Callable[[Sequence[Body], Sequence[Body]], ChatPrompt | None]] = {
    "chat": over_chat,
    "responses": over_responses,
    "anthropic": over_anthropic,
}


def words(messages: Sequence[Body], tools: Sequence[Body]) -> Iterator[str]:
    """Every word that must be in the prompt: of contents, of calls, of tools."""
    shown = [message["content"] for message in messages]
    shown += [made["function"] for message in messages for made in message.get("tool_calls", ())]
    for text in _strings([shown, [tool["function"] for tool in tools]]):
        yield from set(re.findall(r"[a-z_]+", text)) - {
            "type",
            "text",
            "name",
            "arguments",
            "description",
            "parameters",
            "object",
            "string",
            "properties",
        }


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict():
            for name, member in value.items():
                if name != "type":
                    yield name
                    yield from _strings(member)
        case list():
            for member in value:
                yield from _strings(member)


class Sweep:
    """Renders every chat with one template after the other, and counts."""

    def __init__(self) -> None:
        self.templates = 0
        self.messages: Counter[str] = Counter()
        self.texts = 0
        self.refused: list[str] = []

    def run(self, name: str, render: Render) -> None:
        self.templates += 1
        for api, read in APIS.items():
            for shape, messages in CHATS.items():
                for tools in ([], TOOLS):
                    prompt = read(messages, tools)
                    if prompt is not None:
                        self._check(f"{name}, {api}, {shape}, {len(tools)} tools", render, prompt, [*words(messages, tools)])
                        self.messages.update(message["role"] for message in messages)

    def _check(self, where: str, render: Render, prompt: ChatPrompt, texts: Sequence[str]) -> None:
        try:
            rendered = render(prompt)
        except RequestError as error:
            assert error.status == 400
            assert error.param == "messages" or re.fullmatch(r"messages\[\d+\]", str(error.param)), where
            self.refused.append(f"{where}: {error.message}")
            return
        lost = [text for text in texts if text not in rendered]
        assert not lost, f"{where}: {lost} not in {rendered}"
        self.texts += len(texts)

    def report(self, capsys: pytest.CaptureFixture[str]) -> None:
        counts = ", ".join(f"{count:,} {role}" for role, count in sorted(self.messages.items()))
        with capsys.disabled():
            print(f"\n{self.templates} templates, {len(CHATS)} shapes of chats over {len(APIS)} APIs, with and without tools:")
            print(f"{sum(self.messages.values()):,} messages ({counts}), {self.texts:,} texts found, {len(self.refused)} chats refused")


def test_no_published_template_loses_text(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted(PUBLISHED.glob("*.jinja"))
    if not paths:
        pytest.skip(f"no published templates: {PUBLISHED} does not exist")
    sweep, unusable = Sweep(), []
    for path in paths:
        templates = ChatTemplates({"default": path.read_text()}, NAMED)
        sweep.run(path.stem, templates.render)
        unusable += [path.stem] if templates.losses else []
    sweep.report(capsys)
    # It asks for variables that no server gives it.
    assert unusable == ["fireworks-ai-llama-3-firefunction-v2"]
    assert all(refused.startswith(unusable[0]) for refused in sweep.refused), sweep.refused


def test_no_template_of_this_project_loses_text(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = Sweep()
    for name, source in {**TEMPLATES, **DROPPING, **REFUSING}.items():
        templates = ChatTemplates({"default": source}, NAMED)
        assert not templates.losses, (name, templates.losses)
        sweep.run(name, templates.render)
    for name, model in {"the default model": find_default_model(), "the model of the tests": chat_model()}.items():
        tokenizer = pack_tokenizer(model).load()
        assert not tokenizer.template_losses
        sweep.run(name, tokenizer.render_chat)
    sweep.run("the simulator", WordTokenizer().render_chat)
    sweep.report(capsys)
    assert sweep.refused == []
