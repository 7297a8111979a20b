"""What is certain comes at once, and reading costs in proportion to what is read."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from answers.transcript import TOOLS
from penstock.text.formats import harmony, json_calls, pythonic_calls, tables
from penstock.text.formats.make import make_parser
from penstock.text.formats.source import Markers
from penstock.text.output import CallArguments, CallBegin, CallBroken, CallEnd, OutputParser, Part, Reasoning, joined


def parser_of(tools: str | None, reasoning: str | None = None, inside: bool = False) -> OutputParser:
    parser = make_parser(tools, reasoning, TOOLS, inside)
    assert parser is not None
    return parser


STEPS: list[tuple[str, str | None, list[tuple[str, list[Part]]]]] = [
    (
        "hermes",
        "think",
        [
            ("<thi", []),
            ("nk>", []),
            ("\nI see", [Reasoning("I see")]),
            (" a < b", [Reasoning(" a < b")]),
            (" <", []),
            ("/think>", []),
            ("\n\n", []),
            ("Well", ["Well"]),
            (", then.\n", [", then."]),
            ("<tool_call>", []),
            ('{"name": "search', []),
            ('"', [CallBegin(0, "search")]),
            (', "arguments": {"que', [CallArguments(0, '{"que')]),
            ('ry": "a\\', [CallArguments(0, 'ry": "a')]),
            ("n b", [CallArguments(0, "\\n b")]),
            ('"}', [CallArguments(0, '"}')]),
            ("}", [CallEnd(0)]),
            ("</tool_call>", []),
        ],
    ),
    (
        "qwen3_coder",
        None,
        [
            ("<tool_call>\n<function=search>", [CallBegin(0, "search")]),
            ("\n<parameter=query>", [CallArguments(0, '{"query": '), CallArguments(0, '"')]),
            ("\nSELECT", [CallArguments(0, "SELECT")]),
            (' "x"\n', [CallArguments(0, ' \\"x\\"')]),
            ("FROM", [CallArguments(0, "\\nFROM")]),
            ("\n</parameter>", [CallArguments(0, '"')]),
            ("<parameter=tags>[1,", [CallArguments(0, ', "tags": ')]),
            (" 2]</parameter>", [CallArguments(0, "[1, 2]")]),
            ("</function>", [CallArguments(0, "}"), CallEnd(0)]),
        ],
    ),
    (
        "pythonic",
        None,
        [
            ("[", []),
            ("search", []),
            ("(", [CallBegin(0, "search")]),
            ("query='ab", [CallArguments(0, '{"query": '), CallArguments(0, '"'), CallArguments(0, "ab")]),
        ],
    ),
    ("harmony", None, [("<|channel|>analysis<|message|>Hm", [Reasoning("Hm")]), (" so", [Reasoning(" so")]), ("<|end|>", [])]),
    ("llama3_json", None, [("{", []), ('"answer"', []), (": 1", ['{"answer": 1']), ("}", ["}"])]),
    ("llama3_json", None, [("Hello", ["Hello"]), (" {", [" {"])]),
    (
        "hermes",
        None,
        [
            ('<tool_call>{"name": "ping", "arguments": {', [CallBegin(0, "ping"), CallArguments(0, "{")]),
            ("x", [CallBroken(0, '<tool_call>{"name": "ping", "arguments": {'), "x"]),
        ],
    ),
]


@pytest.mark.parametrize(("tools", "reasoning", "steps"), STEPS)
def test_what_is_certain_comes_at_once(tools: str, reasoning: str | None, steps: list[tuple[str, list[Part]]]) -> None:
    parser = parser_of(tools, reasoning)
    for text, parts in steps:
        assert joined(parser.feed(text)) == joined(parts), text


def seconds(tools: str, text: str) -> float:
    parser = parser_of(tools)
    started = time.process_time()
    for character in text:
        parser.feed(character)
    parser.finish()
    return time.process_time() - started


LONG: Mapping[str, tuple[str, str, str]] = {
    "text": ("hermes", "", "x"),
    "whitespace": ("hermes", "x", "\n"),
    "beginnings of markers": ("hermes", "", "<"),
    "whitespace where a call begins": ("llama3_json", "", " "),
    "a string": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": "', "x"),
    "arguments before the name": ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    "whitespace in JSON": ("hermes", '<tool_call>{"name": "ping", "arguments": {', " "),
    "digits": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": ', "1"),
    "brackets": ("hermes", '<tool_call>{"name": "ping", "arguments": {"a": ', "["),
    "openings": ("hermes", "", "<tool_call>"),
    "calls": ("hermes", "", '<tool_call>{"name": "ping"}'),
    "a value of a tag": ("qwen3_coder", "<tool_call><function=search><parameter=query>", "x"),
    "a value of a tag, held": ("qwen3_coder", "<tool_call><function=search><parameter=tags>", "["),
    "newlines in a tag": ("qwen3_coder", "<tool_call><function=search><parameter=query>", "\n"),
    "beginnings of an end": ("qwen3_coder", "<tool_call><function=search><parameter=query>", "</param"),
    "a name": ("mistral", "[TOOL_CALLS]", "x"),
    "a word": ("pythonic", "[", "x"),
    "a literal": ("pythonic", "[search(query='", "\\x41"),
    "lists": ("pythonic", "[search(tags=", "["),
    "messages": ("harmony", "", "<|channel|>final<|message|>x<|end|>"),
}


@pytest.mark.parametrize(("tools", "start", "more"), LONG.values(), ids=LONG.keys())
def test_the_cost_is_linear(tools: str, start: str, more: str) -> None:
    """Sixteen times the text takes some sixteen times as long, and not as often again."""
    size = 10_000
    short = min(seconds(tools, start + more * (size // len(more))) for _ in range(3))
    long = start + more * (16 * size // len(more))
    assert any(seconds(tools, long) < 24 * short + 0.05 for _ in range(3))


def marker_sets() -> list[Markers]:
    found: list[Markers] = []
    for module in (tables, harmony, json_calls, pythonic_calls):
        waiting: list[Any] = list(vars(module).values())
        while waiting:
            value = waiting.pop()
            if isinstance(value, Markers):
                found.append(value)
            elif isinstance(value, Mapping):
                waiting += value.values()
            elif isinstance(value, tuple):
                waiting += value
            elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
                waiting += vars(value).values()
                if isinstance(value, tables.ToolFormat):
                    found.append(Markers(*(opening.marker for opening in value.openings if not opening.is_bare)))
    return found


def test_no_marker_ends_within_another() -> None:
    """What is found first would otherwise depend on how a text is cut."""
    sets = marker_sets()
    assert len(sets) > 40
    for markers in sets:
        for one, other in combinations(markers.strings, 2):
            assert one not in other[:-1], (one, other)
            assert other not in one[:-1], (one, other)
