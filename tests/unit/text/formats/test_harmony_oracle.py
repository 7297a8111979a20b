"""Harmony as `openai-harmony` itself reads it, token by token."""

from __future__ import annotations

import json
import os
import random
from functools import cache
from typing import Any

import pytest

from answers.transcript import TOOLS
from penstock.text.formats.make import make_parser
from penstock.text.output import CallArguments, CallBegin, CallEnd, Part, Reasoning, joined

library: Any = pytest.importorskip("openai_harmony")

pytestmark = pytest.mark.skipif(
    "TIKTOKEN_ENCODINGS_BASE" not in os.environ,
    reason="openai-harmony would download its vocabulary: make it with tests/harmony_vocabulary.py and set TIKTOKEN_ENCODINGS_BASE",
)

WORDS = ["Hello", " world", " a < b", "\n\n", "名前", " 🙂", "<|", "|>", " {", '"x": [1]}', " to=functions.ping", "analysis", " ", "é"]


@cache
def encoding() -> Any:
    return library.load_harmony_encoding(library.HarmonyEncodingName.HARMONY_GPT_OSS)


def expected(text: str) -> list[Part]:
    """What the library reads. Its parser is for whole messages; the last one may lack its end token."""
    parser = library.StreamableParser(encoding(), role=library.Role.ASSISTANT)
    for token_id in encoding().encode(text, allowed_special="all"):
        parser.process(token_id)
    parser.process_eos()
    parts: list[Part] = []
    calls = 0
    for message in parser.messages:
        content = "".join(part.text for part in message.content)
        if message.recipient is not None and message.recipient != "assistant":
            name = message.recipient.removeprefix("functions.")
            parts += [CallBegin(calls, name), CallArguments(calls, content), CallEnd(calls)]
            calls += 1
        elif content:
            parts.append(Reasoning(content) if message.channel == "analysis" else content)
    return joined(parts)


def parsed(text: str, size: int) -> list[Part]:
    parser = make_parser("harmony", "harmony", TOOLS, False)
    assert parser is not None
    parts = [part for start in range(0, len(text), size) for part in parser.feed(text[start : start + size])]
    return joined([*parts, *parser.finish()])


def some_text(chooser: random.Random) -> str:
    return "".join(chooser.choice(WORDS) for _ in range(chooser.randrange(1, 12)))


def some_message(chooser: random.Random) -> str:
    kind = chooser.randrange(5)
    if kind < 2:
        return f"<|channel|>analysis<|message|>{some_text(chooser)}<|end|>"
    if kind == 2:
        return f"<|channel|>commentary<|message|>{some_text(chooser)}<|end|>"
    name = chooser.choice(list(TOOLS))
    arguments = json.dumps({some_text(chooser): [some_text(chooser), chooser.randrange(99)]}, ensure_ascii=chooser.random() < 0.5)
    if kind == 3:
        return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
    return f" to=functions.{name}<|channel|>commentary <|constrain|>json<|message|>{arguments}<|call|>"


def test_conversations() -> None:
    chooser = random.Random(17)
    for _ in range(300):
        messages = [some_message(chooser) for _ in range(chooser.randrange(1, 5))]
        if chooser.random() < 0.5:
            end = chooser.choice(["<|return|>", ""])
            messages.append(f"<|channel|>final<|message|>{some_text(chooser)}{end}")
        text = "<|start|>assistant".join(messages)
        wanted = expected(text)
        assert parsed(text, len(text)) == wanted, text
        assert parsed(text, chooser.randrange(1, 6)) == wanted, text
