"""Grammars: whatever is drawn from the masks is what was asked for, and what cannot be is refused with its place."""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import numpy
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer, grammar_from

from penstock.grammar.grammar import MAX_SOURCE_BYTES, GrammarCompiler, GrammarMatcher
from penstock.wire.errors import ConfigError, GrammarError
from penstock.wire.messages import Grammar, GrammarKind
from schemas import CASES

CORPUS = ['{"name": "value", "count": 10, "list": [1, 2, 3], "done": true, "none": null}', "the quick brown fox, größe 名前 🙂", "abc " * 9]
END_IDS = frozenset({0, 2})
LONGEST = 400


def make_tokenizer() -> tokenizers.Tokenizer:
    """Byte-level BPE, with three special tokens before the others."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|end|>", "<|start|>", "<|turn|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


TOKENIZER = make_tokenizer()
# As models have it: more logits than tokens, and not a multiple of 32.
VOCAB_SIZE = TOKENIZER.get_vocab_size() + 13
COMPILER = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, END_IDS)


def token(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text).ids
    return int(token_id)


def compiled(kind: GrammarKind, source: object = "") -> GrammarMatcher:
    return COMPILER.compile(Grammar(kind, source if isinstance(source, str) else json.dumps(source)))


def mask_of(matcher: GrammarMatcher) -> bytes:
    words = numpy.zeros(-(-VOCAB_SIZE // 32), dtype=numpy.int32)
    matcher.fill_mask(words.ctypes.data, words.nbytes)
    return words.tobytes()


def allowed(matcher: GrammarMatcher) -> list[int]:
    bits = numpy.unpackbits(numpy.frombuffer(mask_of(matcher), dtype=numpy.uint8), bitorder="little")
    return [int(token_id) for token_id in bits[:VOCAB_SIZE].nonzero()[0]]


def walk(matcher: GrammarMatcher, seed: int) -> list[int]:
    """Random allowed tokens up to the end, without it."""
    chooser = random.Random(seed)
    token_ids: list[int] = []
    while len(token_ids) < LONGEST:
        choices = allowed(matcher)
        assert choices, f"nothing is allowed after {TOKENIZER.decode(token_ids)!r}"
        token_id = chooser.choice(choices)
        matcher.advance(token_id)
        if token_id in END_IDS:
            assert matcher.is_finished
            return token_ids
        token_ids.append(token_id)
    raise AssertionError(f"no end: {TOKENIZER.decode(token_ids)!r}")


def texts(matcher: GrammarMatcher, walks: int) -> list[str]:
    return [TOKENIZER.decode(walk(matcher.clone(), seed), skip_special_tokens=False) for seed in range(walks)]


@pytest.mark.parametrize("name", CASES)
def test_every_walk_through_a_schema_is_valid_under_it(name: str) -> None:
    schema = CASES[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    for text in texts(compiled("json_schema", schema), 4):
        validator.validate(json.loads(text))


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 64


def test_json_object() -> None:
    matcher = compiled("json_object")
    for seed in range(20):
        chooser, token_ids = random.Random(seed), [token("{")]
        one = matcher.clone()
        one.replay(token_ids)
        while not one.is_finished:
            # Strings are endless at random: closing characters are taken where they may come.
            choices = allowed(one)
            closing = [choice for choice in choices if TOKENIZER.id_to_token(choice) in ('"', "}", "]")]
            token_ids.append(chooser.choice(closing if closing and chooser.random() < 0.5 else choices))
            one.advance(token_ids[-1])
        text = TOKENIZER.decode(token_ids, skip_special_tokens=True)
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(
    "regex", ["[0-9]{3}-[0-9]{4}", "(yes|no|maybe)!?", r"a{2,5}\.[^\n]{1,3}", "(?i)hello", "größe|名前", r"\w{1,4} \d{2}", "^ab?$"]
)
def test_every_walk_through_a_regex_matches_it(regex: str) -> None:
    for text in texts(compiled("regex", regex), 10):
        assert re.fullmatch(regex, text), text


def test_choices_whatever_characters_they_have() -> None:
    choices = ["yes", "yes, but", "no (really)", "a|b", 'say "hi"\n', "back\\slash", "größe 🙂", "[x]", "{2}", "^$."]
    seen = texts(compiled("choice", choices), 200)
    assert set(seen) == set(choices)


def test_lark_and_gbnf() -> None:
    lark = compiled("lark", 'start: word ("," word){0,3}\nword: /[a-z]{1,4}/')
    gbnf = compiled("lark", 'root ::= word ("," word)? ("," word)?\nword ::= [a-z] [a-z]?')
    for text in texts(lark, 10) + texts(gbnf, 10):
        assert re.fullmatch("[a-z]{1,4}(,[a-z]{1,4}){0,3}", text), text


def test_json_has_no_whitespace_but_a_space_after_separators() -> None:
    matcher = compiled("json_schema", {"type": "array", "items": {"const": {"a": 1, "b": 2}}, "minItems": 2, "maxItems": 2})
    assert texts(matcher, 1) == ['[{"a": 1, "b": 2}, {"a": 1, "b": 2}]']


def test_a_schema_cannot_bring_options_of_its_own() -> None:
    options = {"lenient": True, "whitespace_flexible": True, "item_separator": ";"}
    with pytest.raises(GrammarError, match="`not`"):
        compiled("json_schema", {"x-guidance": options, "not": {"type": "null"}})
    assert texts(compiled("json_schema", {"x-guidance": options, "const": [1, 2]}), 3) == ["[1, 2]"] * 3


# ---- the end


def test_every_end_id_is_allowed_where_the_text_may_end_and_nowhere_else() -> None:
    matcher = compiled("regex", "ab|abc")
    assert not END_IDS & set(allowed(matcher))
    matcher.replay(TOKENIZER.encode("ab").ids)
    assert set(allowed(matcher)) > END_IDS
    assert not matcher.is_finished
    for end_id in END_IDS:
        other = matcher.clone()
        other.advance(end_id)
        assert other.is_finished
        assert set(allowed(other)) == END_IDS


def test_when_it_can_only_end_nothing_but_the_end_is_allowed() -> None:
    matcher = compiled("choice", ["abc"])
    matcher.replay(TOKENIZER.encode("abc").ids)
    assert matcher.is_finished
    assert set(allowed(matcher)) == END_IDS
    with pytest.raises(GrammarError):
        matcher.advance(token("a"))


def test_an_end_id_too_soon_does_not_fit() -> None:
    matcher = compiled("json_object")
    with pytest.raises(GrammarError):
        matcher.advance(2)
    assert not matcher.is_finished
    with pytest.raises(GrammarError):
        matcher.advance(token("{"))


def test_special_tokens_are_no_text() -> None:
    matcher = compiled("regex", "(?s:.)*")
    assert 1 not in allowed(matcher)
    assert set(allowed(matcher)) >= END_IDS
    assert max(allowed(matcher)) < TOKENIZER.get_vocab_size()


# ---- replay and clone


def test_replay_stands_where_the_first_stood() -> None:
    schema = CASES["order"]
    token_ids = walk(compiled("json_schema", schema), seed=1)
    first = compiled("json_schema", schema)
    for count, token_id in enumerate(token_ids):
        again = compiled("json_schema", schema)
        again.replay(token_ids[:count])
        assert mask_of(again) == mask_of(first)
        first.advance(token_id)


def test_replay_of_what_does_not_fit() -> None:
    with pytest.raises(GrammarError):
        compiled("regex", "[0-9]+").replay(TOKENIZER.encode("12x").ids)


def test_a_clone_goes_its_own_way() -> None:
    matcher = compiled("regex", "a*b")
    clone = matcher.clone()
    clone.replay(TOKENIZER.encode("b").ids)
    assert clone.is_finished
    assert not matcher.is_finished
    matcher.replay(TOKENIZER.encode("aa").ids)


def test_compiling_in_threads() -> None:
    with ThreadPoolExecutor(4) as executor:
        matchers = list(executor.map(lambda schema: compiled("json_schema", schema), CASES.values()))
    for matcher, schema in zip(matchers, CASES.values(), strict=True):
        assert mask_of(matcher) == mask_of(compiled("json_schema", schema))


# ---- what cannot be


@pytest.mark.parametrize(
    ("schema", "place", "says"),
    [
        ({"type": "strnig"}, "`type`", "strnig"),
        ({"properties": {"age": {"type": "intt"}}}, "`properties.age.type`", "intt"),
        ({"properties": {"a": {"items": {"type": "nope"}}, "b": {"type": "null"}}}, "`properties.a.items.type`", "nope"),
        ({"properties": {"a": {"$ref": "#/$defs/no"}}}, "`properties.a.$ref`", "no such part"),
        ({"$defs": {"x": {"$ref": "#/$defs/y"}}, "$ref": "#/$defs/x"}, "`$defs.x.$ref`", "no such part"),
        ({"$ref": "https://example.org/schema"}, "`$ref`", "within the schema"),
        ({"$ref": 5}, "`$ref`", "within the schema"),
        ({"properties": {"a": {"type": "string", "pattern": "x(ab"}}}, "`properties.a.pattern`", "unclosed group at character 2"),
        ({"type": "string", "pattern": "a(?=b)"}, "`pattern`", "look-around"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "`minimum`", "greater than maximum"),
        (
            {"type": "object", "properties": {"n": {"type": "number", "minimum": 5, "maximum": 3}}, "required": ["n"]},
            "`properties.n.minimum`",
            "unsatisfiable",
        ),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "`exclusiveMinimum`", "use `minimum`"),
        ({"anyOf": [{"type": "null"}, {"type": "array", "prefixItems": [{"type": "foo"}]}]}, "`anyOf[1].prefixItems[0].type`", "foo"),
        ({"$defs": {"n": {"type": "foo"}}, "items": {"$ref": "#/$defs/n"}}, "`$defs.n.type`", "foo"),
        ({"type": "array", "items": 5}, "`items`", "object or boolean"),
        ({"enum": []}, "`enum`", "empty"),
        ({"properties": {"x": {"not": {"type": "string"}}}}, "`properties.x.not`", "Unimplemented"),
        ({"type": "array", "uniqueItems": True}, "`uniqueItems`", "Unimplemented"),
        ({"type": "string", "format": "nope"}, "`format`", "nope"),
        ({"type": "string", "minLength": -1}, "`minLength`", "positive integer"),
        ({"properties": 5}, "`properties`", "must be an object"),
        ({"required": "a"}, "`required`", "array"),
        ({"type": "object", "required": ["b"], "additionalProperties": False}, "`required`", "unsatisfiable"),
        ({"properties": {"z": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, "`properties.z.oneOf`", "overlap"),
        ({"$ref": "#"}, "`$ref`", "no text can satisfy it"),
    ],
)
def test_a_wrong_schema_is_refused_with_the_place(schema: dict[str, Any], place: str, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled("json_schema", schema)
    assert str(caught.value).startswith(place)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "source", "says"),
    [
        ("json_schema", "{", "not valid JSON"),
        ("json_schema", "[" * 100_000, "not valid JSON"),
        ("json_schema", "true", "not an object"),
        ("json_schema", '{"allOf":[' * 40 + "{}" + "]}" * 40, "more than 64 levels"),
        ("regex", "x(ab", "unclosed group at character 2"),
        ("regex", "[z-a]", "invalid character class range"),
        ("regex", "(" * 1000 + ")" * 1000, "nest"),
        ("lark", "start: A\nA: " + " & ".join(f"/.*(a|b).{{{n}}}(c|d).*/" for n in range(20, 60, 3)), "fuel exhausted"),
        ("regex", "a" * (MAX_SOURCE_BYTES + 1), "over the limit of 262,144 bytes"),
        ("choice", "[]", "no choices"),
        ("choice", "[1]", "list of strings"),
        ("lark", "", "Empty"),
        ("lark", 'x: "a"', "no start rule"),
        ("lark", "start: foo", 'line 1, column 8: unknown name: "foo"'),
        ("lark", 'start: "a" b\nb: /(/', "line 2, column 4: unclosed group at character 1"),
        ("lark", "start: start", "no text can satisfy it"),
        ("lark", 'start: "a" b\nb: %json {"type"', "line 2: the value after %json is not valid JSON"),
        ("lark", 'start: "a" b\nb: %json true', "the schema after %json is not an object"),
        ("lark", 'start: %json {"$ref": "#/$defs/a"}', "`$ref` is '#/$defs/a'"),
        ("lark", 'start: "a" %json {"type": "object", "properties": {"x": {"type": "wrong"}}}', "`properties.x.type`"),
        ("lark", "start: %json " + '{"not":' * 200 + "true" + "}" * 200, "nested more than 64 levels"),
        ("lark", 'start: "a" // %json {}', "%json in a string, a comment"),
        ("lark", 'start: "%json {}"', "%json in a string, a comment"),
        ("lark", "root ::= foo", "'foo' not found"),
        ("lark", "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(15_000)), "rules and brackets"),
    ],
)
def test_what_is_no_grammar(kind: GrammarKind, source: str, says: str) -> None:
    with pytest.raises(GrammarError) as caught:
        compiled(kind, source)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_chain_of_references_that_would_overflow_the_stack_is_refused() -> None:
    definitions: dict[str, Any] = {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(5000)}
    with pytest.raises(GrammarError, match="levels"):
        compiled("json_schema", {"$ref": "#/$defs/d0", "$defs": {**definitions, "d5000": {"type": "null"}}})


def test_a_grammar_that_grows_too_complex_ends_in_an_error() -> None:
    matcher = compiled("lark", 'start: s\ns: s s s s | "a"')
    with pytest.raises(GrammarError, match="items"):
        matcher.replay([token("a")] * 2000)
    assert set(allowed(matcher)) == END_IDS
    assert not matcher.is_finished
    with pytest.raises(GrammarError):
        matcher.advance(0)


def test_a_tokenizer_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match="100 logits"):
        GrammarCompiler(TOKENIZER.to_str(), 100, END_IDS)
    with pytest.raises(ConfigError, match="no end token"):
        GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, frozenset())


def test_a_schema_within_a_grammar() -> None:
    """It is kept as if it were alone: our options, not the schema's own."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"const": "x"}}, "required": ["a", "b"]}
    source = json.dumps({**schema, "additionalProperties": False, "x-guidance": {"whitespace_flexible": True}})
    for seed in range(20):
        text = TOKENIZER.decode(walk(compiled("lark", f'start: "<" %json {source} ">"  // a comment'), seed))
        assert text in ('<{"a": 1, "b": "x"}>', '<{"a": 2, "b": "x"}>')


def test_texts_that_may_be_tokens() -> None:
    source = 'start: %token "<|start|>" %token "ab" %upto ["!", "<|start|>"] "x"'
    start = token("<|start|>")
    for begins in ([start], [token_id for part in ("<", "|", "start", "|", ">") for token_id in TOKENIZER.encode(part).ids]):
        matcher = compiled("lark", source)
        matcher.replay([*begins, *TOKENIZER.encode("ab").ids, token("z")])
        assert {start, token("!")} <= set(allowed(matcher))
        for ends in (start, token("!")):
            ended = matcher.clone()
            ended.advance(ends)
            assert allowed(ended) == [token("x")]


@pytest.mark.parametrize("source", ["start: %token 5", "start: %upto []", 'start: %upto "a"', "start: %upto [1]", "start: %token"])
def test_texts_that_are_none(source: str) -> None:
    with pytest.raises(GrammarError, match=r"%(token|upto)"):
        compiled("lark", source)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}),
        ("json_object", ""),
        ("regex", r'a/b"[0-9]{2}\/ \n'),
        ("choice", ['red/"blue"\n', "grün", "a|b"]),
        ("lark", 'start: "a" %json {"type": "boolean"} | %token "<|turn|>" | %upto ["end"]'),
        ("lark", 'root ::= "yes" | "no"'),
    ],
)
def test_in_lark_a_grammar_allows_the_same(kind: GrammarKind, source: object) -> None:
    """As an engine of others would compile it: by the library's own function for whatever users call a grammar."""
    grammar = Grammar(kind, source if isinstance(source, str) else json.dumps(source))
    handed_over = grammar_from("grammar", COMPILER.lark(grammar))
    for seed in range(5):
        ours = COMPILER.compile(grammar)
        theirs = GrammarMatcher(LLMatcher(LLTokenizer(TOKENIZER.to_str(), n_vocab=VOCAB_SIZE, eos_token=sorted(END_IDS)), handed_over))
        numbers = random.Random(seed)
        for _ in range(60):
            if ours.is_finished:
                break
            choices = allowed(ours)
            assert allowed(theirs) == choices
            chosen = numbers.choice(choices)
            ours.advance(chosen)
            theirs.advance(chosen)


def test_in_lark_what_is_wrong_is_told_the_same_way() -> None:
    for grammar in (
        Grammar("regex", "a("),
        Grammar("json_schema", '{"type": "thing"}'),
        Grammar("lark", "start: nothing"),
        Grammar("choice", "[]"),
    ):
        with pytest.raises(GrammarError) as compiling:
            COMPILER.compile(grammar)
        with pytest.raises(GrammarError) as converting:
            COMPILER.lark(grammar)
        assert str(converting.value) == str(compiling.value)
