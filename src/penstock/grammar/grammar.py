"""Grammars: which tokens may come next. The one file that knows the `llguidance` library.

A grammar is compiled once a generation, beside the engine's thread, and gives a matcher. Every step, each matcher fills its row of a
bitmask while the model computes; the engine applies it to the logits and advances the matcher by the token that it drew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from penstock.grammar.json_schema import Schema, check_schema, locate
from penstock.grammar.lark import read_lark
from penstock.wire.errors import ConfigError, GrammarError
from penstock.wire.messages import Grammar

try:
    import torch
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
except ImportError as missing:
    raise ConfigError(f"the engine needs the package {missing.name!r}: pip install 'penstock[engine]'") from missing

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_SOURCE_BYTES = 256 * 1024
MAX_WAYS = 500
LONGEST_PROBLEM = 240
WORD_BITS = 32
MASK_THREADS = 4

_OWN_OPTIONS = "x-guidance"
_ANY_OBJECT: Schema = {"type": "object"}
_SCHEMA_OPTIONS: JsonCompileOptions = {
    # One space after `,` and `:`, as in most JSON that models have read, and no other whitespace: where it may come in runs, small
    # models do not stop making it, and where it is optional they spend tokens on it.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # What cannot be kept is refused: the one would let branches of `oneOf` overlap, the other would drop keywords.
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
    """What is needed here of a `tokenizer.json`."""

    added_tokens: list[_AddedToken] = []


class _LarkDefinition(msgspec.Struct):
    lark_grammar: str


class _Definitions(msgspec.Struct):
    """What the library makes of a regex: a grammar in Lark."""

    grammars: list[_LarkDefinition]


class GrammarMatcher:
    """Where one generation stands in its grammar. For one thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        """Whether nothing more can come: only an end id is allowed, or has been taken."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, token_id: int) -> None:
        """Takes the next token; an end id where the text may end. Raises GrammarError, now and from then on, when it does not fit, or
        when the grammar turns out too complex to go on."""
        self._matcher.consume_token(token_id)
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))

    def replay(self, token_ids: Sequence[int]) -> None:
        """Advances by all that was generated elsewhere."""
        for token_id in token_ids:
            self.advance(token_id)

    def fill_mask(self, row: torch.Tensor) -> None:
        """Writes a bit for each token, 1 when it may be next, into an int32 row on the CPU. Runs without the GIL.

        It never raises over the grammar: when that turns out too complex to go on, only end ids are allowed, and taking one raises.
        """
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())

    def clone(self) -> GrammarMatcher:
        """Another that stands at the same place; cheap."""
        return GrammarMatcher(self._matcher.deep_copy())


class GrammarCompiler:
    """Compiles grammars for one vocabulary. Safe to share between threads; compiling runs without the GIL."""

    def __init__(self, tokenizer_definition: str, vocab_size: int, end_ids: frozenset[int]) -> None:
        if not end_ids:
            raise ConfigError("the model names no end token: a text under a grammar could not end")
        try:
            self._tokenizer = LLTokenizer(tokenizer_definition, n_vocab=vocab_size, eos_token=sorted(end_ids))
        except ValueError as error:
            raise ConfigError(f"the model's tokenizer does not fit its {vocab_size} logits: {error}") from error
        # The library takes them for special, whatever they are: text does not match them.
        self._added_tokens = _added_tokens(tokenizer_definition)
        # The other limits are the library's own: on time, on memory, on the size of the grammar.
        self._limits = LLParserLimits(verbose_errors=False)
        # An ambiguous grammar has more ways to be read with every token, and a step takes tenths of a second before the library's limit
        # ends it. Schemas are not so ambiguous, and wide ones need it: a grammar that has some may have as many as they may.
        self._lark_limits = LLParserLimits(verbose_errors=False, max_items_in_row=MAX_WAYS)

    def compile(self, grammar: Grammar) -> GrammarMatcher:
        """Raises GrammarError that says what is wrong, and where."""
        if len(grammar.source.encode()) > MAX_SOURCE_BYTES:
            raise GrammarError(f"the grammar is over the limit of {MAX_SOURCE_BYTES:,} bytes")
        match grammar.kind:
            case "json_schema":
                return self._compile_schema(_parsed_schema(grammar.source))
            case "json_object":
                return self._compile_schema(_ANY_OBJECT)
            case "choice":
                return self._compile_regex(_choice_regex(grammar.source))
            case "regex":
                return self._compile_regex(grammar.source)
            case "lark":
                return self._compile_lark(grammar.source)

    def lark(self, grammar: Grammar) -> str:
        """The same grammar in Lark, for an engine that gives it to the library itself. Raises GrammarError as `compile` does."""
        self.compile(grammar)
        match grammar.kind:
            case "json_schema":
                return _schema_in_lark(_parsed_schema(grammar.source))
            case "json_object":
                return _schema_in_lark(_ANY_OBJECT)
            case "choice":
                return _regex_in_lark(_choice_regex(grammar.source))
            case "regex":
                return _regex_in_lark(grammar.source)
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
            # The library makes a grammar of it, in whose first line nobody is interested.
            raise GrammarError(_plainly(_LINE_AND_COLUMN.sub("", problem, count=1)))
        return GrammarMatcher(matcher)

    def _compile_lark(self, source: str) -> GrammarMatcher:
        grammar = read_lark(source, _SCHEMA_OPTIONS, self._added_tokens)
        matcher = self._matcher(_lark_definition(grammar.source), self._limits if grammar.schemas else self._lark_limits)
        if problem := matcher.get_error():
            for schema in grammar.schemas:
                # Where one of them is to blame, this says which part of it.
                self._compile_schema(schema)
            place = _LINE_AND_COLUMN.match(problem)
            where = f"line {place[1]}, column {place[2]}: " if place else ""
            raise GrammarError(where + _plainly(problem[place.end() :] if place else problem))
        return GrammarMatcher(matcher)

    def _matcher(self, definition: str, limits: LLParserLimits | None = None) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, definition, log_level=0, limits=limits or self._limits)
        # Some that cannot begin, such as a rule that is only itself, are found out no sooner than this.
        matcher.compute_bitmask()
        return matcher


class MaskPool:
    """Fills the masks of several matchers in threads, while the caller does something else.

    `begin`, then `masks`; between the two the matchers are the pool's. The bitmask is the pool's own and changes with the next `begin`.
    """

    def __init__(self, vocab_size: int, threads: int = MASK_THREADS) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="grammar masks")
        self._bitmask = torch.zeros((0, -(-vocab_size // WORD_BITS)), dtype=torch.int32)
        self._filling: list[Future[None]] = []

    def begin(self, jobs: Sequence[tuple[GrammarMatcher, int]]) -> None:
        """Starts to fill the row that is given with each matcher. What other rows hold means nothing."""
        self.masks()
        self._grow(1 + max((row for _, row in jobs), default=-1))
        shares = [jobs[start :: self._threads] for start in range(min(self._threads, len(jobs)))]
        self._filling = [self._executor.submit(_fill, share, self._bitmask) for share in shares]

    def masks(self) -> torch.Tensor:
        """The bitmask, int32 of [rows, words], when all that was begun is there."""
        filling, self._filling = self._filling, []
        for share in filling:
            share.result()
        return self._bitmask

    def close(self) -> None:
        """Waits for what was begun and ends the threads."""
        self._executor.shutdown()

    def _grow(self, rows: int) -> None:
        held, words = self._bitmask.shape
        if rows > held:
            self._bitmask = torch.zeros((max(rows, 2 * held), words), dtype=torch.int32)


def apply_mask(logits: torch.Tensor, rows: Sequence[int], bitmask: torch.Tensor) -> None:
    """Sets the logits that the bitmask's row of the same number forbids to minus infinity, in these rows, in place."""
    if not rows:
        return
    chosen = bitmask[list(rows)].view(torch.uint8).to(logits.device)
    # Each byte is looked up as the eight elements that its bits become, which are eight bytes: that is one number a byte to fetch.
    is_unset = (torch.arange(256, device=logits.device).unsqueeze(1) >> torch.arange(8, device=logits.device)) & 1 == 0
    forbidden = is_unset.view(torch.int64).flatten()[chosen.long()].view(torch.bool)[:, : logits.shape[1]]
    if list(rows) == list(range(logits.shape[0])):
        logits.masked_fill_(forbidden, float("-inf"))
    else:
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, float("-inf"))


def _added_tokens(tokenizer_definition: str) -> dict[str, int]:
    return {token.content: token.id for token in msgspec.json.decode(tokenizer_definition, type=_Definition).added_tokens}


def _fill(jobs: Sequence[tuple[GrammarMatcher, int]], bitmask: torch.Tensor) -> None:
    for matcher, row in jobs:
        matcher.fill_mask(bitmask[row])


def _parsed_schema(source: str) -> Schema:
    try:
        schema = msgspec.json.decode(source)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the schema is not valid JSON: {error}") from error
    if not isinstance(schema, dict):
        raise GrammarError("the schema is not an object")
    # The library would take options from here, and with them text that is no JSON.
    schema.pop(_OWN_OPTIONS, None)
    return schema


def _schema_definition(schema: Schema) -> str:
    return LLMatcher.grammar_from_json_schema(msgspec.json.encode(schema).decode(), overrides=_SCHEMA_OPTIONS)


def _schema_in_lark(schema: Schema) -> str:
    return f"start: %json {msgspec.json.encode({**schema, _OWN_OPTIONS: _SCHEMA_OPTIONS}).decode()}"


def _regex_in_lark(regex: str) -> str:
    (grammar,) = msgspec.json.decode(LLMatcher.grammar_from_regex(regex), type=_Definitions).grammars
    return grammar.lark_grammar


def _choice_regex(source: str) -> str:
    try:
        choices = msgspec.json.decode(source, type=list[str])
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"the choices are not a list of strings: {error}") from error
    if not choices:
        raise GrammarError("there are no choices")
    return "|".join("".join(map(_escaped, choice)) for choice in choices)


def _escaped(character: str) -> str:
    return character if character.isalnum() else f"\\x{{{ord(character):x}}}"


def _lark_definition(source: str) -> str:
    try:
        return grammar_from("gbnf" if "::=" in source else "lark", source)
    except ValueError as error:
        raise GrammarError(str(error)) from error


def _plainly(problem: str) -> str:
    """What the library says, in a line, with the position that it draws put into words."""
    for start, plain in _PLAINER.items():
        if problem.startswith(start):
            return plain
    if regex := _REGEX_PROBLEM.search(problem):
        return f"{regex['problem']} at character {len(regex['indent']) + 1} of the regex"
    return _first_line(_QUOTED_REGEX.sub("", problem))


def _first_line(problem: str) -> str:
    """It may quote the whole regex or token, and is cut."""
    return problem.split("\n", 1)[0][:LONGEST_PROBLEM]
