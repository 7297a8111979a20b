"""Grammars in Lark with three directives. Pure.

`%json {…}` is a JSON schema; llguidance itself reads it. The other two are expanded here. `%token "…"` matches this text, either as plain
text or as one special token. `%upto ["…", "…"]` matches any text up to and including the first of these texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.grammar.json_schema import Schema, check_schema
from penstock.wire.errors import GrammarError

# The library recurses from rule to rule, and overflows the stack at about 2,600 nested rules and brackets.
MAX_GRAMMAR_LEVELS = 1000

OWN_OPTIONS = "x-guidance"
# Comments, strings and regular expressions are skipped.
_TOKENS = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%(?P<directive>json|token|upto)\b\s*')
_ANY_TEXT = "(?s:.*)"


class LarkGrammar(NamedTuple):
    """A grammar that is safe for the library, and the schemas in it."""

    source: str
    schemas: list[Schema]


def read_lark(source: str, options: Mapping[str, Any], tokens: Mapping[str, int]) -> LarkGrammar:
    """Expands the directives. Every schema gets these options; `tokens` are the ids of texts that are special tokens.

    Raises GrammarError for wrong schemas and for more levels than the library survives.
    """
    reader = _Reader(options, tokens)
    end = 0
    while found := _TOKENS.search(source, end):
        directive = found["directive"]
        reader.pass_on(source[end : found.start() if directive else found.end()])
        end = found.end()
        if directive:
            value, end = _value_at(source, end, directive)
            reader.expand(directive, value)
    reader.pass_on(source[end:])
    return reader.result()


class _Reader:
    """Collects a grammar: its own text, and the text that its directives expand to."""

    def __init__(self, options: Mapping[str, Any], tokens: Mapping[str, int]) -> None:
        self._options = options
        self._tokens = tokens
        self._whole: list[str] = []
        self._outside: list[str] = []
        self._schemas: list[Schema] = []
        self._rules: list[str] = []

    def pass_on(self, text: str) -> None:
        self._whole.append(text)
        self._outside.append(text)

    def expand(self, directive: str, value: Any) -> None:
        match directive, value:
            case "json", dict():
                self._whole.append(self._schema(value))
            case "token", str():
                self._whole.append(f"({' | '.join([*self._token(value), json.dumps(value)])})")
            case "upto", [str(), *_]:
                self._whole.append(self._text_up_to([str(text) for text in value]))
            case "json", _:
                raise GrammarError("the schema after %json is not an object")
            case _:
                raise GrammarError(f"%{directive} is followed by {str(value)[:40]!r}: expected a text, or a list of texts for %upto")

    def result(self) -> LarkGrammar:
        outside = "".join(self._outside)
        if "%json" in outside:
            # The library might read a schema here that was not checked.
            raise GrammarError("%json in a string, a comment or a regular expression is not supported")
        levels = sum(outside.count(mark) for mark in ":([")
        if levels > MAX_GRAMMAR_LEVELS:
            raise GrammarError(f"the grammar has {levels} rules and brackets: expected at most {MAX_GRAMMAR_LEVELS}")
        return LarkGrammar("\n".join(["".join(self._whole), *self._rules]), self._schemas)

    def _schema(self, schema: Schema) -> str:
        # The library would take options from here that allow text that is not JSON.
        schema.pop(OWN_OPTIONS, None)
        check_schema(schema)
        self._schemas.append(schema)
        return "%json " + json.dumps({**schema, OWN_OPTIONS: self._options})

    def _token(self, text: str) -> list[str]:
        return [f"<[{self._tokens[text]}]>"] if text in self._tokens else []

    def _text_up_to(self, ends: list[str]) -> str:
        """A spelled-out end is found by the library's `suffix`. An end that is a token comes after text without a spelled-out end."""
        name = f"upto_{len(self._rules)}"
        either = "|".join(map(escape_regex, ends))
        self._rules.append(f"{name}[suffix=/{either}/]: /{_ANY_TEXT}/")
        tokens = [token for text in ends for token in self._token(text)]
        if not tokens:
            return name
        # `~` alone would also match special tokens, which are not text.
        self._rules.append(f"{name.upper()}: /{_ANY_TEXT}/ & ~/{_ANY_TEXT}({either}){_ANY_TEXT}/")
        return f"({name} | {name.upper()} ({' | '.join(tokens)}))"


def _value_at(source: str, start: int, directive: str) -> tuple[Any, int]:
    """The JSON value at `start`, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(source, start)
    except (ValueError, RecursionError) as error:
        line = source.count("\n", 0, start) + 1
        raise GrammarError(f"line {line}: the value after %{directive} is not valid JSON") from error


def escape_regex(text: str) -> str:
    """A regex that matches exactly this text."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)
