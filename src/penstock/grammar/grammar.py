"""Grammars: which tokens may come next. The only file that imports the `llguidance` library.

A compiled grammar is a matcher; every generation gets a copy of its own. In every step, each matcher writes a bitmask of the allowed
tokens while the model computes. The engine applies it to the logits and advances the matcher by the token that it draws.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

from penstock.grammar.json_schema import Schema, check_schema, locate
from penstock.grammar.lark import OWN_OPTIONS, escape_regex, read_lark
from penstock.wire.errors import ConfigError, GrammarError
from penstock.wire.messages import Grammar

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 256 * 1024
MAX_WAYS = 500
MAX_PROBLEM_LENGTH = 240

_SCHEMA_OPTIONS: JsonCompileOptions = {
    # One space after `,` and `:`, as in most JSON that models have read, and no other whitespace. Small models do not stop making
    # whitespace where it may come in runs, and spend tokens on it where it is optional.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # A schema that cannot be followed exactly is refused. The first would let branches of `oneOf` overlap, the second ignores keywords.
    "coerce_one_of": False,
    "lenient": False,
}

_LINE_AND_COLUMN = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_REGEX_PROBLEM = re.compile(r"regex parse error:\n {4}.*\n {4}(?P<indent> *)\^+\s*\nerror: (?P<problem>[^\n]*)")
_QUOTED_REGEX = re.compile(r'invalid regex ".*" \(in regex\): ', re.DOTALL)
_PLAINER = {
    "oneOf constraints are not supported": "its branches may overlap; make them distinct or use anyOf",
    "NoExtensionBias": "no text can satisfy it",
}


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Definition(msgspec.Struct):
    """The part of a `tokenizer.json` that is needed here."""

    added_tokens: list[_AddedToken] = []


class _LarkDefinition(msgspec.Struct):
    lark_grammar: str


class _Definitions(msgspec.Struct):
    """The library's form of a regex: a grammar in Lark."""

    grammars: list[_LarkDefinition]


class GrammarMatcher:
    """The place of one generation in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        """Whether the text is complete: only an end id is allowed, or was taken."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, token_id: int) -> None:
        """Takes the next token; an end id where the text may end. Raises GrammarError, now and at every later call, when the token does
        not fit or the grammar becomes too complex to continue."""
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advances by tokens that were generated before, perhaps by another worker."""
        for token_id in token_ids:
            self.advance(token_id)

    def fill_mask(self, address: int, byte_count: int) -> None:
        """Writes one bit per token, 1 when it may come next, into 32-bit words at this memory address. Runs without the GIL.

        It never raises because of the grammar: when that becomes too complex to continue, only end ids are allowed, and taking one raises.
        """
        self._matcher.unsafe_compute_mask_ptr(address, byte_count)

    def clone(self) -> GrammarMatcher:
        """A copy at the same place; cheap."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe to share between threads; compiling runs without the GIL."""

    def __init__(self, tokenizer_definition: str, vocab_size: int, end_ids: frozenset[int]) -> None:
        if not end_ids:
            raise ConfigError("the model has no end token: a text under a grammar could not end")
        try:
            self._tokenizer = LLTokenizer(tokenizer_definition, n_vocab=vocab_size, eos_token=sorted(end_ids))
        except ValueError as error:
            raise ConfigError(f"the model's tokenizer does not fit its {vocab_size} logits: {error}") from error
        # The library treats them all as special: text does not match them.
        self._added_tokens = _added_tokens(tokenizer_definition)
        # The library has limits of its own on time, memory and the size of the grammar.
        self._limits = LLParserLimits(verbose_errors=False)
        # An ambiguous grammar can be read in more ways with every token, and a step would take tenths of a second before the library's own
        # limit ends it. Schemas are less ambiguous, and wide ones need many ways: a grammar with schemas gets the library's limit.
        self._lark_limits = LLParserLimits(verbose_errors=False, max_items_in_row=MAX_WAYS)

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Raises GrammarError that says what is wrong and where."""
        if len(grammar.source.encode()) > MAX_SOURCE_BYTES:
            raise GrammarError(f"the grammar is over the limit of {MAX_SOURCE_BYTES:,} bytes")
        match grammar.kind:
            case "json_schema" | "json_object":
                return self._compile_schema(_schema_of(grammar))
            case "regex" | "choice":
                return self._compile_regex(_regex_of(grammar))
            case "lark":
                return self._compile_lark(grammar.source)

    def lark(self, grammar: Grammar) -> str:
        """The same grammar in Lark, for an engine that passes it to the library itself. Raises GrammarError like `compile`."""
        self.compile(grammar)
        match grammar.kind:
            case "json_schema" | "json_object":
                return f"start: %json {msgspec.json.encode({**_schema_of(grammar), OWN_OPTIONS: _SCHEMA_OPTIONS}).decode()}"
            case "regex" | "choice":
                (made,) = msgspec.json.decode(LLMatcher.grammar_from_regex(_regex_of(grammar)), type=_Definitions).grammars
                return made.lark_grammar
            case "lark":
                return _lark_definition(read_lark(grammar.source, _SCHEMA_OPTIONS, self._added_tokens).source)

    def _compile_schema(self, schema: Schema) -> GrammarMatcher:
        check_schema(schema)
        matcher = self._matcher(_schema_definition(schema))
        if problem := matcher.get_error():
            place = locate(schema, lambda changed: self._matcher(_schema_definition(changed)).get_error())
            raise GrammarError(f"`{place}`: {_plainly(problem)}")
        return GrammarMatcher(matcher)

    def _compile_regex(self, regex: str) -> GrammarMatcher:
        matcher = self._matcher(LLMatcher.grammar_from_regex(regex))
        if problem := matcher.get_error():
            # The position is in the grammar that the library makes of the regex, not in the regex.
            raise GrammarError(_plainly(_LINE_AND_COLUMN.sub("", problem, count=1)))
        return GrammarMatcher(matcher)

    def _compile_lark(self, source: str) -> GrammarMatcher:
        grammar = read_lark(source, _SCHEMA_OPTIONS, self._added_tokens)
        matcher = self._matcher(_lark_definition(grammar.source), self._limits if grammar.schemas else self._lark_limits)
        if problem := matcher.get_error():
            for schema in grammar.schemas:
                # If one of them is wrong, this says which part of it.
                self._compile_schema(schema)
            place = _LINE_AND_COLUMN.match(problem)
            where = f"line {place[1]}, column {place[2]}: " if place else ""
            raise GrammarError(where + _plainly(problem[place.end() :] if place else problem))
        return GrammarMatcher(matcher)

    def _matcher(self, definition: str, limits: LLParserLimits | None = None) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, definition, log_level=0, limits=limits or self._limits)
        # Some errors, such as a rule that contains only itself, are found only by this.
        matcher.compute_bitmask()
        return matcher


def _added_tokens(tokenizer_definition: str) -> dict[str, int]:
    return {token.content: token.id for token in msgspec.json.decode(tokenizer_definition, type=_Definition).added_tokens}


def _schema_of(grammar: Grammar) -> Schema:
    if grammar.kind == "json_object":
        return {"type": "object"}
    try:
        schema = msgspec.json.decode(grammar.source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("the schema is not an object")
    # The library would take options from here that allow text that is not JSON.
    schema.pop(OWN_OPTIONS, None)
    return schema


def _schema_definition(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=_SCHEMA_OPTIONS)


def _regex_of(grammar: Grammar) -> str:
    if grammar.kind == "regex":
        return grammar.source
    try:
        choices = msgspec.json.decode(grammar.source, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the choices are not a list of strings: {error}") from error
    if not choices:
        raise GrammarError("there are no choices")
    return "|".join(map(escape_regex, choices))


def _lark_definition(source: str) -> str:
    try:
        return grammar_from("gbnf" if "::=" in source else "lark", source)
    except ValueError as error:
        raise GrammarError(str(error)) from error


def _plainly(problem: str) -> str:
    """The library's message in one line, with the position that it draws put into words."""
    for start, plain in _PLAINER.items():
        if problem.startswith(start):
            return plain
    if regex := _REGEX_PROBLEM.search(problem):
        return f"{regex['problem']} at character {len(regex['indent']) + 1} of the regex"
    return _first_line(_QUOTED_REGEX.sub("", problem))


def _first_line(problem: str) -> str:
    """Cut to a readable length: the message may quote a whole regex."""
    return problem.split("\n", 1)[0][:MAX_PROBLEM_LENGTH]
