"""What is certain comes at once. That the cost is linear is measured by `bench/costs.py`."""

from __future__ import annotations

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
    """Otherwise the result would depend on how a text is cut."""
    sets = marker_sets()
    assert len(sets) > 40
    for markers in sets:
        for one, other in combinations(markers.strings, 2):
            assert one not in other[:-1], (one, other)
            assert other not in one[:-1], (one, other)
