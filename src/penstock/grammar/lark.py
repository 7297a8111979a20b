"""Grammars in Lark, as they are written here: with JSON schemas, and with texts that a vocabulary may have as one token. Pure.

`%json {…}` is the library's own. Two more are made of what it has: `%token "…"` is that text, or the token that is it; `%upto ["…", "…"]`
is any text up to the first of these, and that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.grammar.json_schema import Schema, check_schema
from penstock.wire.errors import GrammarError

# The library recurses from rule to rule and overflows the stack beyond about 2,600 rules and brackets, one within the other.
MAX_GRAMMAR_LEVELS = 1000

_OWN_OPTIONS = "x-guidance"
# Comments, strings and regular expressions are read over.
_TOKENS = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|%(?P<directive>json|token|upto)\b\s*')
_ANY_TEXT = "(?s:.*)"


class LarkGrammar(NamedTuple):
    """A grammar that the library may see, and the schemas in it."""

    source: str
    schemas: list[Schema]


def read_lark(source: str, options: Mapping[str, Any], tokens: Mapping[str, int]) -> LarkGrammar:
    """The grammar with every schema given these options. `tokens` are the ids of texts that are tokens of their own.

    Raises GrammarError for schemas that are wrong, and for more levels than the library survives.
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
    """Collects a grammar: what stands in it, and what was made of its directives."""

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
                raise GrammarError(f"%{directive} is followed by {str(value)[:40]!r}: expected a text, or a list of them for %upto")

    def result(self) -> LarkGrammar:
        outside = "".join(self._outside)
        if "%json" in outside:
            # The library might see a schema where none was seen here, and that could refer to itself as deep as it likes.
            raise GrammarError("%json in a string, a comment or a regular expression is not supported")
        levels = sum(outside.count(mark) for mark in ":([")
        if levels > MAX_GRAMMAR_LEVELS:
            raise GrammarError(f"the grammar has {levels} rules and brackets: expected at most {MAX_GRAMMAR_LEVELS}")
        return LarkGrammar("\n".join(["".join(self._whole), *self._rules]), self._schemas)

    def _schema(self, schema: Schema) -> str:
        # The library would take options from here, and with them text that is no JSON.
        schema.pop(_OWN_OPTIONS, None)
        check_schema(schema)
        self._schemas.append(schema)
        return "%json " + json.dumps({**schema, _OWN_OPTIONS: self._options})

    def _token(self, text: str) -> list[str]:
        return [f"<[{self._tokens[text]}]>"] if text in self._tokens else []

    def _text_up_to(self, ends: list[str]) -> str:
        """Spelled out it is found by the library's own means; a token can only come after text that does not spell it out."""
        name = f"upto_{len(self._rules)}"
        either = "|".join(map(_regex, ends))
        self._rules.append(f"{name}[suffix=/{either}/]: /{_ANY_TEXT}/")
        tokens = [token for text in ends for token in self._token(text)]
        if not tokens:
            return name
        # What is not this regex is no text at all, too, such as a token that is none.
        self._rules.append(f"{name.upper()}: /{_ANY_TEXT}/ & ~/{_ANY_TEXT}({either}){_ANY_TEXT}/")
        return f"({name} | {name.upper()} ({' | '.join(tokens)}))"


def _value_at(source: str, start: int, directive: str) -> tuple[Any, int]:
    """The JSON that begins here, and where it ends."""
    try:
        return json.JSONDecoder().raw_decode(source, start)
    except (ValueError, RecursionError) as error:
        line = source.count("\n", 0, start) + 1
        raise GrammarError(f"line {line}: what comes after %{directive} is not valid JSON") from error


def _regex(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)
