"""Values: JSON in pieces, Python literals, and text whose type the schema gives."""

from __future__ import annotations

import ast
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.text.formats.json_scanner import MAX_DEPTH, MAX_SCALAR_CHARACTERS, JsonScanner
from penstock.text.formats.pythonic_calls import Notation
from penstock.text.formats.source import Malformed, Source
from penstock.text.formats.tagged_calls import ANYTHING, NO_STRING, STRING, as_json, types_of_parameter

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def scanned(pieces: list[str]) -> tuple[str, bool, bool]:
    """The valid part of a text that comes in pieces, and whether it is done or broken."""
    scanner = JsonScanner()
    out: list[str] = []
    held = ""
    for piece in pieces:
        text = held + piece
        held = text[scanner.scan(text, 0, out) :]
    return "".join(out), scanner.is_done, scanner.is_broken


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda constant: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@given(JSON_VALUES, st.sampled_from([None, 1, "\t"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_json_is_followed_to_its_end(value: Any, indent: Any, ascii_only: bool) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=ascii_only)
    assert scanned([text]) == (text, True, False)
    assert scanned(list(text)) == (text, True, False)


@given(JSON_VALUES, st.integers(0, 10**6), st.sampled_from(list('{}[]",:\\ \n0-.etu1x/')), st.sampled_from(["insert", "replace", "delete"]))
@settings(max_examples=200, deadline=None)
def test_invalid_json_is_never_done(value: Any, place: int, character: str, change: str) -> None:
    """With one character added, changed or removed, it is done only if the json library reads it, too."""
    text = json.dumps({"a": value, "b": [value]}, ensure_ascii=False)
    place %= len(text)
    changed = text[:place] + ("" if change == "delete" else character) + text[place + (change != "insert") :]
    seen, is_done, is_broken = scanned(list(changed))
    assert (seen, is_done, is_broken) == scanned([changed])
    assert not (is_done and is_broken)
    if is_done:
        assert is_json(seen)
    # Newlines in strings are escaped; the json library would refuse them.
    assert is_done or not is_json(changed)


def test_json_has_limits() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert scanned([deep])[1]
    assert scanned(["[" + deep + "]"]) == ("[" * MAX_DEPTH, False, True)
    assert scanned(["[" + "1" * MAX_SCALAR_CHARACTERS + "]"])[1]
    assert scanned(["[" + "1" * (MAX_SCALAR_CHARACTERS + 1)]) == ("[", False, True)


def literal(text: str, size: int) -> str | None:
    """The JSON of a Python literal, read in pieces of this size. None if it is not a literal."""
    source = Source()
    out: list[str] = []
    steps = Notation().value(source, out.append)
    try:
        next(steps)
        for start in range(0, len(text), size):
            source.add(text[start : start + size])
            next(steps)
        source.ended = True
        next(steps)
    except StopIteration:
        return "".join(out)
    except Malformed:
        return None
    raise AssertionError("it waits at the end")


PYTHON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)


@given(PYTHON_VALUES)
@settings(max_examples=80, deadline=None)
def test_literals_are_what_python_says(value: Any) -> None:
    text = repr([value])
    expected = json.loads(json.dumps(ast.literal_eval(text)))
    for size in (1, 3, len(text)):
        made = literal(text, size)
        assert made is not None
        assert json.loads(made) == expected


@pytest.mark.parametrize(
    "text", ["[1, 2", "{1: 2}", "{a: 1}", "yes", "", "[1 2]", "f'x'", "'a", "--1", "[" * 100, "1_000", "{'a' 1}", "[,]", "]", "0x10", "1j"]
)
def test_invalid_literals(text: str) -> None:
    assert literal(text, 1) is None
    assert literal(text, 100) is None


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "string"}, STRING),
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "object"}, {"oneOf": [{"type": "number"}, {"const": True}]}]}, {"object", "number", "boolean"}),
        ({"enum": ["a", "b"]}, STRING),
        ({"enum": ["a", 1, None]}, {"string", "number", "null"}),
        ({"$ref": "#/$defs/word"}, STRING),
        ({"$ref": "#/$defs/loop"}, ANYTHING),
        ({"$ref": "#/nowhere"}, ANYTHING),
        ({"$ref": "elsewhere.json"}, ANYTHING),
        ({"description": "anything"}, ANYTHING),
        ({}, ANYTHING),
        (True, ANYTHING),
        ({"type": 5}, {"5"}),
        ({"anyOf": "wrong"}, ANYTHING),
    ],
)
def test_what_a_schema_says(schema: Any, types: frozenset[str]) -> None:
    root = {"properties": {"x": schema}, "$defs": {"word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert types_of_parameter(root, "x") == types
    assert types_of_parameter(root, "unknown") == ANYTHING
    assert types_of_parameter({"properties": 5}, "x") == ANYTHING


@pytest.mark.parametrize(
    ("text", "types", "made"),
    [
        ("5", {"number"}, "5"),
        (" 5\n", {"number"}, "5"),
        ("five", {"number"}, '"five"'),
        ("True", {"boolean"}, "true"),
        ("NONE", {"null", "number"}, "null"),
        ("None", {"null", "string"}, '"None"'),
        ("null", {"null", "string"}, "null"),
        ("5", {"number", "string"}, "5"),
        ("5", {"null", "string"}, '"5"'),
        ('"a"', {"null", "string"}, '"\\"a\\""'),
        ('"a"', NO_STRING, '"a"'),
        ('{"a": [1]}', {"object"}, '{"a": [1]}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[1]", {"object"}, "[1]"),
        ("5", ANYTHING, "5"),
        ("007", ANYTHING, '"007"'),
        ("True", ANYTHING, '"True"'),
        ("a b\n", ANYTHING, '"a b\\n"'),
        ('"a"', ANYTHING, '"\\"a\\""'),
        ("", ANYTHING, '""'),
        ("1e999", {"number"}, "1e999"),
    ],
)
def test_text_becomes_json(text: str, types: frozenset[str], made: str) -> None:
    assert as_json(text, frozenset(types)) == made
    assert is_json(made)


def test_any_text_becomes_json() -> None:
    chooser = random.Random(5)
    for _ in range(2000):
        text = "".join(chooser.choice('{}[]":, \n\\1a-.🙂truefalsn') for _ in range(chooser.randrange(12)))
        for types in (STRING, NO_STRING, ANYTHING, frozenset({"number", "string"})):
            assert is_json(as_json(text, types)), text
