"""Grammars for calls and for answers after reasoning: the parser reads what they allow."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import numpy
import pytest
import tokenizers

from answers.all_formats import BY_TOOL_FORMAT
from penstock.engine.checkpoints.checkpoint import find_default_model
from penstock.grammar.grammar import MAX_SOURCE_BYTES, GrammarCompiler, GrammarMatcher
from penstock.text.formats.grammar import MAX_GRAMMAR_BYTES, after_reasoning, tool_grammar
from penstock.text.formats.make import make_parser
from penstock.text.formats.tables import REASONING_FORMATS, TOOL_FORMATS
from penstock.text.output import CallArguments, CallBegin, CallEnd, Part, Reasoning, joined
from penstock.text.tokenizers.source import pack_tokenizer
from penstock.wire.errors import GrammarError, RequestError
from penstock.wire.messages import Grammar
from schemas import CASES

SPECIAL = ["<|eos|>", "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"]
END_IDS = frozenset({0, SPECIAL.index("<|call|>"), SPECIAL.index("<|return|>")})
CORPUS = [
    '<tool_call>\n{"name": "value", "arguments": {"city": "Paris"}}\n</tool_call>',
    "<think>\nHm.\n</think>\n\nHere is my thought process: so. Here is my response:",
    "assistant analysis commentary to=functions. json final",
]
LONGEST = 600
TOOLS: Mapping[str, Mapping[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    'odd "name/é.1': {"type": "object", "properties": {}, "additionalProperties": False},
    "untold": {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"enum": [1, "x"]}}, "additionalProperties": False},
}
NAMED = {"get_weather": TOOLS["get_weather"]}


def make_tokenizer() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    # Added tokens that are not special, as in Qwen.
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    return tokenizer


TOKENIZER = make_tokenizer()
VOCAB_SIZE = TOKENIZER.get_vocab_size()
COMPILER = GrammarCompiler(TOKENIZER.to_str(), VOCAB_SIZE, END_IDS)


def allowed(matcher: GrammarMatcher) -> list[int]:
    words = numpy.zeros(-(-VOCAB_SIZE // 32), dtype=numpy.int32)
    matcher.fill_mask(words.ctypes.data, words.nbytes)
    bits = numpy.unpackbits(words.view(numpy.uint8), bitorder="little")
    return [int(token_id) for token_id in bits[:VOCAB_SIZE].nonzero()[0]]


def walk(grammar: Grammar, seed: int, begins: str = "") -> str:
    """A random text that follows the grammar. It starts with `begins`, and ends as soon as it can."""
    chooser = random.Random(seed)
    matcher = COMPILER.compile(grammar)
    token_ids = TOKENIZER.encode(begins).ids
    matcher.replay(token_ids)
    while len(token_ids) < LONGEST:
        choices = allowed(matcher)
        assert choices, TOKENIZER.decode(token_ids, skip_special_tokens=False)
        if END_IDS & set(choices):
            return str(TOKENIZER.decode(token_ids, skip_special_tokens=False))
        token_id = chooser.choice(choices)
        matcher.advance(token_id)
        token_ids.append(token_id)
    raise AssertionError(f"it does not end: {TOKENIZER.decode(token_ids)}")


def takes(grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows exactly this text."""
    matcher = COMPILER.compile(grammar)
    try:
        matcher.replay(TOKENIZER.encode(text).ids)
    except GrammarError:
        return False
    return bool(END_IDS & set(allowed(matcher))) or matcher.is_finished


def parts_of(text: str, tools: str | None, reasoning: str | None, schemas: Mapping[str, Mapping[str, Any]], inside: bool) -> list[Part]:
    parser = make_parser(tools, reasoning, schemas, inside)
    assert parser is not None
    return joined([*parser.feed(text), *parser.finish()])


def check_calls(parts: Sequence[Part], tools: Mapping[str, Mapping[str, Any]], most: int) -> None:
    """At least one call and nothing else, each valid by its schema."""
    assert parts
    assert len(parts) % 3 == 0
    assert len(parts) // 3 <= most
    for begin, arguments, end in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        assert isinstance(begin, CallBegin)
        assert isinstance(arguments, CallArguments)
        assert isinstance(end, CallEnd)
        jsonschema.validate(json.loads(arguments.text), dict(tools[begin.name]))


SENSIBLE = {name: schema for name, schema in TOOLS.items() if '"' not in name}


@pytest.mark.parametrize("tool_format", [None, *TOOL_FORMATS])
@pytest.mark.parametrize("parallel", [False, True])
def test_any_text_that_follows_the_grammar_is_a_call(tool_format: str | None, parallel: bool) -> None:
    for tools in (SENSIBLE, NAMED):
        read_with, grammar = tool_grammar(tool_format, tools, parallel, None, False)
        for seed in range(5):
            # The reasoning could go on for ever.
            text = walk(grammar, seed, begins="<|channel|>commentary" if read_with == "harmony" else "")
            check_calls(parts_of(text, read_with, None, tools, False), tools, most=16 if parallel else 1)


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "phi4", "json"])
def test_several_calls(tool_format: str) -> None:
    read_with, grammar = tool_grammar(tool_format, SENSIBLE, True, None, False)
    _, single = tool_grammar(tool_format, SENSIBLE, False, None, False)
    assert read_with == tool_format
    written = TOOL_FORMATS[tool_format].written
    assert written is not None
    call = f'{{"name": "get_weather", "{written.arguments}": {{"city": "Rome"}}}}'
    for count in (1, 2, 16, 17):
        text = written.before + written.between.join([call] * count) + written.after
        assert takes(grammar, text) is (count <= 16)
        assert takes(single, text) is (count == 1)
        if count <= 16:
            parts = parts_of(text, read_with, None, SENSIBLE, False)
            check_calls(parts, SENSIBLE, most=count)
            assert len(parts) == 3 * count


def test_odd_names_can_be_written() -> None:
    _, grammar = tool_grammar("hermes", TOOLS, False, None, False)
    assert takes(grammar, '<tool_call>\n{"name": "odd \\"name/é.1", "arguments": {}}\n</tool_call>')


TEXT_REASONING = [name for name in REASONING_FORMATS if name != "harmony"]


@pytest.mark.parametrize("reasoning_format", TEXT_REASONING)
def test_calls_after_reasoning(reasoning_format: str) -> None:
    reasoning = REASONING_FORMATS[reasoning_format]
    opens, closes = reasoning.opens.strings[-1], reasoning.closes.strings[-1]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    _, outside = tool_grammar("hermes", NAMED, False, reasoning_format, False)
    _, inside = tool_grammar("hermes", NAMED, False, reasoning_format, True)
    assert takes(outside, call)
    assert takes(outside, f"{opens}\nI think {{so}}.\n{closes}\n\n{call}")
    assert not takes(outside, f"I think.{closes}{call}")
    assert takes(inside, f"I think.\n{closes}\n\n{call}")
    assert takes(inside, f"{closes}{call}")
    assert not takes(inside, call)
    assert not takes(inside, f"I think.{closes}I think.{call}")
    for seed in range(4):
        text = walk(inside, seed, begins=f"I think.{closes}")
        parts = parts_of(text, "hermes", reasoning_format, NAMED, True)
        assert parts[0] == Reasoning("I think.")
        check_calls(parts[1:], NAMED, most=1)


@pytest.mark.parametrize("reasoning_format", TEXT_REASONING)
@pytest.mark.parametrize(
    ("grammar", "text", "wrong"),
    [
        (Grammar("json_schema", json.dumps(TOOLS["get_weather"])), '{"city": "Rome"}', '{"town": "Rome"}'),
        (Grammar("json_object"), '{"any": [1, {}]}', "[1]"),
        (Grammar("choice", json.dumps(['say "yes"', "no/\\\n"])), 'say "yes"', "say"),
        (Grammar("choice", json.dumps(['say "yes"', "no/\\\n"])), "no/\\\n", "maybe"),
        (Grammar("regex", r"a+/b\/[\n/]\d{2}"), "aa/b//42", "a/b/42"),
        (Grammar("lark", 'start: word ("," word)*\nword: /[a-z]+/ | "}"'), "ab,}", "ab;c"),
    ],
)
def test_answers_after_reasoning(reasoning_format: str, grammar: Grammar, text: str, wrong: str) -> None:
    reasoning = REASONING_FORMATS[reasoning_format]
    opens, closes = reasoning.opens.strings[0], reasoning.closes.strings[0]
    outside = after_reasoning(grammar, reasoning_format, False)
    inside = after_reasoning(grammar, reasoning_format, True)
    thought = f"Hm, {wrong}.\n{closes}\n\n"
    assert takes(outside, text)
    assert takes(outside, f"{opens}{thought}{text}")
    assert takes(inside, thought + text)
    assert takes(inside, closes + text)
    assert not takes(inside, text)
    for grammar_after, before in ((outside, ""), (outside, f"{opens}{thought}"), (inside, thought)):
        assert not takes(grammar_after, before + wrong)
        assert not takes(grammar_after, before)


def test_markers_may_be_tokens_and_may_be_spelled_out() -> None:
    """The library does not take such tokens for text."""
    _, grammar = tool_grammar("hermes", NAMED, False, "think", False)
    first = {TOKENIZER.id_to_token(token_id) for token_id in allowed(COMPILER.compile(grammar))}
    assert {"<think>", "<tool_call>", "<"} <= first
    assert "{" not in first
    spelled = [token_id for piece in ("<", "think", ">", "so", "</", "think", ">", "<") for token_id in TOKENIZER.encode(piece).ids]
    matcher = COMPILER.compile(grammar)
    matcher.replay(spelled)
    assert len(spelled) > 7
    # The spelled-out marker also ends the reasoning.
    assert TOKENIZER.token_to_id("</think>") not in allowed(matcher)


def test_nothing_changes_without_reasoning() -> None:
    grammar = Grammar("regex", "a")
    assert after_reasoning(grammar, None, False) is grammar


FORMAT = Grammar("json_schema", json.dumps(TOOLS["get_weather"]))
IN_JSON = ("hermes", "llama3_json", "phi4", "granite", "json")
FREE = [name for name in TOOL_FORMATS if name not in (*IN_JSON, "harmony")]


@pytest.mark.parametrize("tool_format", FREE)
def test_the_model_may_call_instead_of_writing_text_that_follows_a_format(tool_format: str) -> None:
    grammar = after_reasoning(FORMAT, None, False, tool_format, NAMED)
    thinking = after_reasoning(FORMAT, "think", True, tool_format, NAMED)
    openings = tuple(each.marker for each in TOOL_FORMATS[tool_format].openings if not each.is_bare)
    calls = [one.text for one in BY_TOOL_FORMAT[tool_format] if one.text.startswith(openings) and isinstance(one.parts[-1], CallEnd)]
    assert calls
    for text in calls:
        assert takes(grammar, text), text
        assert takes(thinking, f"Hm.</think>\n\n{text}"), text
    for before, each in (("", grammar), ("Hm.</think>\n\n", thinking)):
        assert takes(each, before + '{"city": "Rome"}')
        assert not takes(each, before + '{"town": "Rome"}')
        assert not takes(each, before + "Rome")
        assert not takes(each, before + "Rome" + calls[0])


CALL = '{"name": "get_weather", "arguments": {"anything": [1]}}'
OTHER = CALL.replace("get_weather", "untold")
LLAMA_CALL, LLAMA_OTHER = (call.replace("arguments", "parameters") for call in (CALL, OTHER))


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>"),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{OTHER}\n</tool_call>\n"),
        ("llama3_json", LLAMA_CALL),
        ("llama3_json", f"{LLAMA_CALL}; {LLAMA_OTHER}"),
        ("llama3_json", f"<|python_tag|>{LLAMA_CALL}"),
        ("phi4", f"functools[{CALL}, {OTHER}]"),
        ("phi4", f"<|tool_call|>[{CALL}]<|/tool_call|>"),
        ("granite", f"<|tool_call|>[{CALL}, {OTHER}]</tool_call>"),
        ("granite", f"<tool_call>{CALL}</tool_call>"),
        ("json", f"[{LLAMA_CALL}, {LLAMA_OTHER}]"),
    ],
)
def test_an_answer_beside_a_format_is_the_format_or_whole_calls(tool_format: str, text: str) -> None:
    for reasoning, before in ((None, ""), ("think", "Hm.</think>\n\n")):
        grammar = after_reasoning(FORMAT, reasoning, reasoning is not None, tool_format, SENSIBLE)
        assert takes(grammar, before + text)
        free: dict[str, dict[str, Any]] = {name: {} for name in SENSIBLE}
        calls = [part for part in parts_of(text, tool_format, None, free, False) if not isinstance(part, CallArguments)]
        assert all(isinstance(part, CallBegin | CallEnd) for part in calls)
        for changed in (
            text.replace(CALL, "I cannot."),
            text.replace("get_weather", "unknown"),
            text.replace('{"anything": [1]}', "[1]"),
            text + " Done.",
            text.replace('"name"', '"nome"'),
        ):
            assert changed == text or not takes(grammar, before + changed), changed
        assert not takes(grammar, before + text[:-3])
        assert takes(grammar, before + '{"city": "Rome"}')
        assert not takes(grammar, before + '{"town": "Rome"}')
        assert not takes(grammar, before + "Rome" + text)


def test_harmony_may_call_instead() -> None:
    grammar = after_reasoning(FORMAT, "harmony", False, "harmony", ["look"])
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for before in ("", thought):
        assert takes(grammar, before + '<|channel|>final<|message|>{"city": "Rome"}')
        assert takes(grammar, before + '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"a": 1}')
        assert takes(grammar, before + '<|channel|>commentary to=functions.look<|message|>{"a": 1}')
        assert not takes(grammar, before + "<|channel|>final<|message|>Rome")
        assert not takes(grammar, before + "<|channel|>commentary<|message|>Rome")
        assert not takes(grammar, before + "<|channel|>commentary to=functions.look<|message|>Rome")
        assert not takes(grammar, before + '<|channel|>commentary to=functions.feel<|message|>{"a": 1}')


@pytest.mark.parametrize("name", CASES)
def test_schemas_after_reasoning(name: str) -> None:
    """A schema means the same inside a grammar and alone."""
    grammar = after_reasoning(Grammar("json_schema", json.dumps(CASES[name])), "think", True)
    for seed in range(3):
        text = walk(grammar, seed, begins="Hm.</think>").removeprefix("Hm.</think>")
        jsonschema.validate(json.loads(text), CASES[name])


def test_harmony() -> None:
    read_with, grammar = tool_grammar("harmony", SENSIBLE, True, "harmony", False)
    call = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Rome"}'
    thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
    assert takes(grammar, call)
    assert takes(grammar, thought + call)
    assert not takes(grammar, "<|channel|>final<|message|>Hello")
    parts = parts_of(thought + call, read_with, "harmony", SENSIBLE, False)
    assert parts == [Reasoning("Hm {."), CallBegin(0, "get_weather"), CallArguments(0, '{"city": "Rome"}'), CallEnd(0)]
    _, inside = tool_grammar("harmony", SENSIBLE, True, "harmony", True)
    assert takes(inside, f"Hm.<|end|><|start|>assistant{call}")
    assert not takes(inside, call)
    answer = after_reasoning(Grammar("json_schema", json.dumps(TOOLS["get_weather"])), "harmony", False)
    assert takes(answer, f'{thought}<|channel|>final<|message|>{{"city": "Rome"}}')
    assert takes(answer, '<|channel|>final<|message|>{"city": "Rome"}')
    assert not takes(answer, '<|channel|>final<|message|>{"town": "Rome"}')
    assert not takes(answer, '{"city": "Rome"}')


def test_a_grammar_that_is_too_long_is_refused() -> None:
    assert MAX_GRAMMAR_BYTES == MAX_SOURCE_BYTES
    tools = {f"tool_{number}": {"description": "x" * 3000} for number in range(100)}
    with pytest.raises(RequestError, match=r"`tools` need a grammar of 31\d,\d{3} bytes: expected at most 262,144"):
        tool_grammar("hermes", tools, True, None, False)
    with pytest.raises(RequestError, match="GBNF"):
        after_reasoning(Grammar("lark", 'root ::= "a"'), "think", False)


def test_many_tools() -> None:
    tools = {f"tool_{number}": TOOLS["get_weather"] for number in range(128)}
    for tool_format in ("hermes", "mistral", "harmony"):
        read_with, grammar = tool_grammar(tool_format, tools, True, None, False)
        text = walk(grammar, 1, begins="<|channel|>commentary" if read_with == "harmony" else "")
        check_calls(parts_of(text, read_with, None, tools, False), tools, most=16)


@pytest.mark.parametrize("tool_format", ["hermes", "llama3_json", "qwen3_coder", None])
def test_the_default_models_vocabulary(tool_format: str | None) -> None:
    """Its vocabulary has no token for the markers: they are spelled out."""
    tokenizer = pack_tokenizer(find_default_model()).load()
    assert tokenizer.definition is not None
    compiler = GrammarCompiler(tokenizer.definition, tokenizer.vocab_size, frozenset({tokenizer.end_id}))
    read_with, grammar = tool_grammar(tool_format, SENSIBLE, True, "think", False)
    written = TOOL_FORMATS[read_with].written
    assert written is not None
    call = f'{{"name": "get_weather", "{written.arguments}": {{"city": "Rome", "days": 3}}}}'
    for thought in ("", "<think>\nRome it is.\n</think>\n\n"):
        text = f"{thought}{written.before}{call}{written.between}{call}{written.after}"
        matcher = compiler.compile(grammar)
        matcher.replay(tokenizer.encode(text))
        matcher.advance(tokenizer.end_id)
        parts = parts_of(text, read_with, "think", SENSIBLE, False)
        assert parts[: bool(thought)] == [Reasoning("Rome it is.")][: bool(thought)]
        check_calls(parts[bool(thought) :], SENSIBLE, most=2)


def test_where_a_schema_is_wrong() -> None:
    _, grammar = tool_grammar("hermes", {"f": {"properties": {"x": {"type": "wrong"}}}}, True, None, False)
    with pytest.raises(GrammarError, match=r"`properties\.x\.type`"):
        COMPILER.compile(grammar)
