"""Grammars that force a tool call, and grammars that allow reasoning before structured output, or calls instead of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import msgspec

from penstock.text.formats.json_calls import JsonCalls
from penstock.text.formats.parser import Schemas
from penstock.text.formats.tables import HARMONY, JSON, REASONING_FORMATS, TOOL_FORMATS, Opening, ToolFormat, Written
from penstock.wire.errors import RequestError
from penstock.wire.messages import Grammar

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CALLS = 16
"""The limit for parallel calls: a small model that may always begin another call never ends."""

_ANY_TEXT = "/(?s:.*)/"
_SOME_TEXT = "/(?s:.+)/"
_GAP = r"/[ \n]{0,4}/"
_REGEX_PARTS = re.compile(r"\\.|/|\n", re.DOTALL)
_REGEX_ESCAPES = {"/": r"\/", "\n": r"\n"}
_ANALYSIS = f'<|channel|> "analysis" <|message|> {_ANY_TEXT} <|end|> <|start|> "assistant"'
_ANALYSIS_GOES_ON = f'{_ANY_TEXT} <|end|> <|start|> "assistant"'


def tool_grammar(
    tool_format: str | None, tools: Schemas, parallel: bool, reasoning_format: str | None, inside_reasoning: bool
) -> tuple[str, Grammar]:
    """A grammar that forces a call of one of these tools, after optional reasoning, and the name of the format to read it with.

    The format is the model's own if its markers are text, and `json` if they are tokens that a grammar cannot name in every vocabulary.
    One call, or several with `parallel`. Raises RequestError when the grammar is too long.
    """
    if HARMONY in (tool_format, reasoning_format):
        # A message is one call, and the token after it ends the answer.
        return HARMONY, _grammar([_start(HARMONY, inside_reasoning), *_harmony_calls(tools)], "tools")
    name = tool_format if tool_format is not None and TOOL_FORMATS[tool_format].written is not None else JSON
    written = TOOL_FORMATS[name].written
    assert written is not None
    rules = [_start(reasoning_format, inside_reasoning), *_calls(TOOL_FORMATS[name], written, tools, MAX_CALLS if parallel else 1)]
    return name, _grammar(rules, "tools")


def after_reasoning(
    grammar: Grammar, reasoning_format: str | None, inside_reasoning: bool, tool_format: str | None = None, tools: Collection[str] = ()
) -> Grammar:
    """The grammar with the model's reasoning before it: required if the prompt has begun it, else optional.

    With a tool format, the answer may be calls of these tools instead: the grammar is only for text. In formats with JSON, the result
    describes whole calls, with any object as arguments, so the answer is text or calls and nothing else. In other formats, anything may
    follow the opening of a call, as without a grammar. A bare opening, such as a bracket, is not allowed there: it could be text.

    Raises RequestError for a grammar in GBNF, which cannot be extended, and when the result is too long.
    """
    calls = [] if tool_format is None else _auto_calls(tool_format, tools)
    if reasoning_format is None and not calls:
        return grammar
    try:
        text = _answer(grammar)
    except msgspec.DecodeError:
        # The worker reports what is wrong with it.
        return grammar
    answer = '<|channel|> "final" <|message|> text' if HARMONY in (reasoning_format, tool_format) else "text"
    # The text comes first, so that line numbers in errors stay the same.
    rules = [f"text: {text}", f"answer: {' | '.join([answer, *calls])}", _start(reasoning_format, inside_reasoning)]
    if calls:
        rules.append(f"call: {_any_call(tool_format, tools)}")
    return _grammar(rules, "grammar")


def _auto_calls(tool_format: str, tools: Collection[str]) -> list[str]:
    """Calls in the model's own format, as the alternatives of a rule. A call in JSON is the rule `call`."""
    if tool_format == HARMONY:
        names = " | ".join(map(_literal, tools))
        return [f'<|channel|> "commentary to=functions." ({names}) (" "? <|constrain|> "json" | " json")? <|message|> call']
    in_json = [(each, each.body) for each in TOOL_FORMATS[tool_format].openings if isinstance(each.body, JsonCalls)]
    if in_json:
        return [_whole_calls(opening, body) for opening, body in in_json]
    openings = [opening.marker for opening in TOOL_FORMATS[tool_format].openings if not opening.is_bare]
    tokens = sorted({*openings, *TOOL_FORMATS[tool_format].tokens})
    inside = " | ".join([_SOME_TEXT, *(f"%token {_literal(token)}" for token in tokens)])
    return [f"({' | '.join(f'%token {_literal(opening)}' for opening in openings)}) ({inside})*"]


def _whole_calls(opening: Opening, body: JsonCalls) -> str:
    """Calls in JSON: one after the other, or in a list."""
    listed = f'{_GAP} {_separated(",")} {_GAP} "]"'
    if opening.marker.endswith("["):
        return f"{_literal(opening.marker)} {listed}"
    row = _separated(body.separator) if body.separator else "call"
    if opening.is_bare:
        return row
    section = f'%token {_literal(opening.marker)} {_GAP} ({row} | "[" {listed}) {_GAP}'
    closes = " | ".join(f"%token {_literal(marker)}" for marker in body.closes.strings)
    return f"({section} ({closes}) {_GAP}){{1,{MAX_CALLS}}}" if closes else section


def _separated(separator: str) -> str:
    return f"call ({_GAP} {_literal(separator)} {_GAP} call){{0,{MAX_CALLS - 1}}}"


def _any_call(tool_format: str | None, tools: Collection[str]) -> str:
    """A call of one of these tools, with any arguments. In Harmony, only its arguments are JSON."""
    if tool_format is None or tool_format == HARMONY:
        return _schema({})
    written = TOOL_FORMATS[tool_format].written
    arguments = "arguments" if written is None else written.arguments
    properties = {"name": {"enum": list(tools)}, arguments: {"type": "object"}}
    return _schema({"properties": properties, "required": [*properties], "additionalProperties": False})


def _grammar(rules: Iterable[str], field: str) -> Grammar:
    source = "\n".join(rules) + "\n"
    size = len(source.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise RequestError(f"`{field}` need a grammar of {size:,} bytes: expected at most {MAX_GRAMMAR_BYTES:,}", param=field)
    return Grammar("lark", source)


def _start(reasoning_format: str | None, inside: bool) -> str:
    """The start rule. It ends with the rule `answer`."""
    if reasoning_format is None:
        return "start: answer"
    if reasoning_format == HARMONY:
        return f"start: {_ANALYSIS_GOES_ON if inside else f'({_ANALYSIS})?'} answer"
    reasoning = REASONING_FORMATS[reasoning_format]
    thinking = f"%upto {_literal(list(reasoning.closes.strings))} {_GAP}"
    opens = " | ".join(f"%token {_literal(marker)}" for marker in reasoning.opens.strings)
    return f"start: {thinking} answer" if inside else f"start: (({opens}) {thinking})? answer"


def _calls(tool_format: ToolFormat, written: Written, tools: Schemas, most: int) -> list[str]:
    tokens = tool_format.tokens | {opening.marker for opening in tool_format.openings if not opening.is_bare}
    before, between, after = (_literals(text, tokens) for text in (written.before, written.between, written.after))
    more = f"({between} call){{0,{most - 1}}}" if most > 1 else ""
    numbered = list(enumerate(tools.items()))
    rules = [f"answer: {before} call {more} {after}", "call: " + " | ".join(f"call_{number}" for number, _ in numbered)]
    for number, (name, schema) in numbered:
        head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{written.arguments}": '
        rules.append(f'call_{number}: {_literal(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: {_schema(schema)}")
    return rules


def _harmony_calls(tools: Schemas) -> list[str]:
    numbered = list(enumerate(tools.items()))
    recipients = " | ".join(f"{_literal(name)} {_HARMONY_BODY} arguments_{number}" for number, (name, _) in numbered)
    rules = [f'answer: <|channel|> "commentary to=functions." ({recipients})']
    return rules + [f"arguments_{number}: {_schema(schema)}" for number, (_, schema) in numbered]


_HARMONY_BODY = '" " <|constrain|> "json" <|message|>'


def _answer(grammar: Grammar) -> str:
    """A grammar as the body of a rule."""
    match grammar.kind:
        case "json_schema":
            return f"%json {grammar.source}"
        case "json_object":
            return _schema({})
        case "choice":
            return " | ".join(map(_literal, msgspec.json.decode(grammar.source, type=list[str])))
        case "regex":
            return _regex(grammar.source)
        case "lark":
            if "::=" in grammar.source:
                raise RequestError("the grammar is in GBNF: expected Lark, because this model reasons first", param="grammar")
            return f"%lark {{ {grammar.source}\n}}"


def _schema(schema: Mapping[str, Any]) -> str:
    """Arguments are an object, even if their schema does not say so."""
    return "%json " + json.dumps({"type": "object", **schema}, ensure_ascii=False)


def _literal(text: str | list[str]) -> str:
    return json.dumps(text, ensure_ascii=False)


def _literals(text: str, tokens: frozenset[str]) -> str:
    """A text in which these strings may be tokens."""
    pieces = re.split("|".join(["(?!)", *(f"({re.escape(token)})" for token in sorted(tokens))]), text)
    return " ".join(("%token " if piece in tokens else "") + _literal(piece) for piece in pieces if piece)


def _regex(source: str) -> str:
    return f"/{_REGEX_PARTS.sub(lambda part: _REGEX_ESCAPES.get(part[0], part[0]), source)}/" if source else '""'
