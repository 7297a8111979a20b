"""Fits the messages of chats to a chat template, so that no text is lost: tried when the template is loaded, checked in every prompt.

Published templates leave out messages of some roles, the text beside calls, or all calls but the first. Others raise for two messages of
one role in a row. For each such shape of a chat, its rewrites are tried in order; the first that loses no text is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

from penstock.text import rewrites as to
from penstock.text.images import EDGE, IMAGE_MARK, image_mark
from penstock.text.rewrites import Messages, Rewrite
from penstock.text.tokenizers.tokenizer import ChatMessage, ToolCall
from penstock.text.tool_prompt import calls_as_text
from penstock.wire.errors import RequestError

MAX_MISSES = 8
"""After this many messages that are not found, later ones are not searched for: they are looked for with marks."""

MAX_SEARCHED = 64 * 1024
"""Longer texts that are not found at once are looked for with marks: searching for megabytes keeps the GIL for a tenth of a second."""

NEAR, HEAD = 4096, 64

PLAIN = "messages of user and assistant"
"""The shape that every template must render."""

PROBE_TOOLS = [
    {
        "type": "function",
        "function": {"name": f"probe_{name}", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("one", "two")
]

# Put after a text to see whether the template renders it. UTF-8 has no bytes for a surrogate, so no message can contain it.
_MARK = "\ud804"
_MARKED = re.compile(f"{_MARK}([^{_MARK}]*){_MARK}")

Render = Callable[[Messages, Sequence[Rewrite], bool], str]
"""Renders messages after these rewrites, with the probes' tools or without tools. Raises RequestError."""


class Shape(NamedTuple):
    """Chats that some templates do not render as they are, and the ways to try then: rewrites that are done in this order.

    `in_order`: a way that keeps the order of the messages comes first. Some templates move later instructions to the head; then nothing
    of the turns before is found in the KV cache.
    """

    name: str
    chats: Sequence[Messages]
    ways: Sequence[Sequence[Rewrite]] = ()
    in_order: bool = False


def shapes() -> Iterator[Shape]:
    """In the order in which their rewrites are done. The first is what every template must render."""
    system, asked, answered, again = _say("system", "rules"), _say("user", "ask"), _say("assistant", "reply"), _say("user", "more")
    later, note, silent = _say("system", "later"), _say("assistant", "note"), _say("assistant", "")
    call, other, result, second = _call("one"), _call("two"), _result("one"), _result("two")
    called = _calling("", call)
    yield Shape(PLAIN, [[asked], [asked, answered, again]])
    # The last one: some templates show the instructions only if the user speaks last.
    yield Shape("a system message", [[system, asked], [system, asked, answered, again], [system, asked, answered]], [[to.system_in_user]])
    yield Shape("nothing but a system message", [[system]], [[to.user_first]])
    in_between = [[asked, answered, later, again], [system, asked, answered, again, later], [system, asked, later, answered]]
    yield Shape("a system message after the start", in_between, [[to.as_reminders], [to.as_reminders, to.merged]], in_order=True)
    in_a_row = [[asked, again], [asked, answered, again, _say("user", "last")], [asked, answered, note, again]]
    yield Shape("consecutive messages of one role", in_a_row, [[to.merged]])
    yield Shape("an assistant message at the start", [[answered, again], [system, answered, again]], [[to.user_first]])
    yield Shape("an empty assistant message", [[asked, silent, again]], [[to.filled]])
    calls = [[asked, called, result, answered, again], [asked, called, result, _calling("", other), second]]
    yield Shape("tool calls", calls, [[to.short_ids], [to.arguments_as_text], [calls_as_text], [calls_as_text, to.merged]])
    stray = [[asked, result, again], [asked, answered, result]]
    yield Shape("a tool result without its call", stray, [[to.stray_results_as_text], [to.stray_results_as_text, to.merged]])
    broken = _calling("", _call("one", "{key_one: value_one"))
    yield Shape("arguments of a tool call that are not a JSON object", [[asked, broken, result]], [[to.arguments_as_objects]])
    yield Shape("parallel tool calls", [[asked, _calling("", call, other), result, second, answered, again]], [[to.one_by_one]])
    beside = [asked, _calling("plan", call), result, answered, again, _calling("note", other), second]
    yield Shape("text beside tool calls", [beside[:3], beside], [[to.text_then_calls], [to.text_and_turn_then_calls]])
    unanswered = [[asked, called, result, again], [asked, called, again]]
    yield Shape("a user message after a tool call or its result", unanswered, [[to.answered_calls], [to.merged]])
    yield Shape("a system message after a tool result", [[system, asked, called, result, later]], [[to.as_reminders]])


def image_probes() -> Iterator[tuple[str, Messages]]:
    """For each role, a chat with one image in a message of that role."""
    asked, shown = _say("user", "ask"), f"probe «before»{image_mark(0)}probe «after»"
    yield "user", [ChatMessage(role="user", content=shown)]
    yield "system", [ChatMessage(role="system", content=shown), asked]
    yield "assistant", [asked, ChatMessage(role="assistant", content=shown), _say("user", "more")]
    yield "tool", [asked, _calling("", _call("one")), ChatMessage({**_result("one"), "content": shown})]


def fit(render: Render) -> tuple[list[Rewrite], list[str]]:
    """The rewrites that a template needs, and what it loses in spite of them. A template that loses plain chats is not tried further."""
    chosen: list[Rewrite] = []
    for shape in shapes():
        ways = [chosen, *([*chosen, *way] for way in shape.ways)]
        lossless: Iterator[list[Rewrite]] = (way for way in ways if _loss(render, shape, way) is None)
        if shape.in_order:
            found = list(lossless)
            lossless = iter([way for way in found if _is_in_order(render, shape, way)] or found)
        chosen = next(lossless, chosen)
        if not shape.ways and (loss := _loss(render, shape, chosen)) is not None:
            return chosen, [loss]
    return chosen, [loss for shape in shapes() if (loss := _loss(render, shape, chosen)) is not None]


def unseen(messages: Messages, rendered: str) -> list[int]:
    """The messages whose text is not in the prompt as it was written, in this order. Templates may have changed it or left it out."""
    missing: list[int] = []
    position = 0
    for index, message in enumerate(messages):
        if len(missing) == MAX_MISSES:
            return [*missing, *range(index, len(messages))]
        for text in _texts(message):
            # Most texts come soon. Then comparing is faster than searching.
            found = rendered.find(text[:HEAD], position, position + NEAR)
            if found < 0 or not rendered.startswith(text, found):
                text, found = _search(text, rendered, position)
            if found < 0:
                missing.append(index)
                break
            position = found + len(text)
    return missing


def _search(text: str, rendered: str, position: int) -> tuple[str, int]:
    """The text as it is, or in JSON, and where it is in the prompt after this position. -1: it is not there, or it is too long."""
    if len(text) > MAX_SEARCHED:
        return text, -1
    near = position + 2 * len(text) + NEAR
    for written in (text, json.dumps(text, ensure_ascii=False)[1:-1]):
        if (found := rendered.find(written, position, near)) >= 0:
            return written, found
    return text, rendered.find(text, position)


def marked(messages: Messages, places: Iterable[int]) -> list[ChatMessage]:
    """The messages with a mark after each text of those at these places."""
    # Results get their names before these are marked: a mark in a result's name does not show that its call is rendered.
    changed = list(to.named_results(messages))
    for place in places:
        message = changed[place] = ChatMessage({**changed[place]})
        if message["content"].strip():
            message["content"] += f"{_MARK}{place}{_MARK}"
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [_marked_call(call, f"{place}.{index}") for index, call in enumerate(calls)]
    return changed


def unmarked(messages: Messages, places: Iterable[int], rendered: str) -> list[int]:
    """The places whose marks are not all in the prompt."""
    found = set(_MARKED.findall(rendered))
    return [place for place in places if not found.issuperset(_marks(place, messages[place]))]


def _loss(render: Render, shape: Shape, rewrites: Sequence[Rewrite]) -> str | None:
    """What goes wrong with chats of this shape; None if their prompts have all of their text."""
    for chat, has_tools in product(shape.chats, (False, True)):
        try:
            rendered = render(chat, rewrites, has_tools)
        except RequestError as error:
            return f"{shape.name}: {error.message}"
        if not all(text in rendered for message in chat for text in (*_texts(message), *_argument_texts(message))):
            return f"{shape.name}: left out of the prompt"
    return None


def _is_in_order(render: Render, shape: Shape, rewrites: Sequence[Rewrite]) -> bool:
    """Whether the prompts of these chats, which have all texts, have them in the order of the messages."""
    for chat in shape.chats:
        rendered = render(chat, rewrites, False)
        places = [rendered.find(message["content"]) for message in chat]
        if places != sorted(places):
            return False
    return True


def _texts(message: ChatMessage) -> list[str]:
    content = message["content"].strip()
    texts = [content] if content else []
    if EDGE in content:
        texts = [text for each in IMAGE_MARK.split(content)[::2] if (text := each.strip())]
    if calls := message.get("tool_calls"):
        texts += [call["function"]["name"] for call in calls]
    return texts


def _argument_texts(message: ChatMessage) -> list[str]:
    return [word for call in message.get("tool_calls") or () for word in re.findall(r"\w+", str(call["function"]["arguments"]))]


def _marks(place: int, message: ChatMessage) -> list[str]:
    marks = [str(place)] if message["content"].strip() else []
    return marks + [f"{place}.{index}" for index in range(len(message.get("tool_calls") or ()))]


def _marked_call(call: ToolCall, mark: str) -> ToolCall:
    return {**call, "function": {**call["function"], "name": f"{call['function']['name']}{_MARK}{mark}{_MARK}"}}


def _say(role: str, word: str) -> ChatMessage:
    return ChatMessage(role=role, content=word and f"probe «{word}»")


def _call(name: str, arguments: dict[str, Any] | str | None = None) -> ToolCall:
    given = {f"key_{name}": f"value_{name}"} if arguments is None else arguments
    return {"id": f"call_of_probe_{name}", "type": "function", "function": {"name": f"probe_{name}", "arguments": given}}


def _calling(word: str, *calls: ToolCall) -> ChatMessage:
    return ChatMessage({**_say("assistant", word), "tool_calls": list(calls)})


def _result(name: str) -> ChatMessage:
    return ChatMessage(role="tool", content=f"probe «{name}»", tool_call_id=f"call_of_probe_{name}")
