"""Structured output: whatever the model would like to say, the text is of the form that was asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from chat_model import END_ID
from contract.backends.rig import Generation, Rig
from penstock.wire.messages import Fault, Grammar, Sampling

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "color": {"enum": ["red", "green", "dark blue"]},
        "count": {"type": "integer", "minimum": 10, "maximum": 99},
        "name": {"type": "string", "pattern": "^[a-f]{12,20}$"},
    },
    "required": ["ok", "color", "count", "name"],
    "additionalProperties": False,
}


def _is_of_the_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == list(SCHEMA["properties"])
        and isinstance(value["ok"], bool)
        and value["color"] in ("red", "green", "dark blue")
        and 10 <= value["count"] <= 99
        and re.fullmatch("[a-f]{12,20}", value["name"]) is not None
    )


FORMS: dict[str, tuple[Grammar, Callable[[str], Any]]] = {
    "json_schema": (Grammar("json_schema", json.dumps(SCHEMA)), _is_of_the_schema),
    "regex": (Grammar("regex", r"[a-c]{3}-\d{4}( [x-z]{2,5}){3}!"), re.compile(r"[a-c]{3}-\d{4}( [x-z]{2,5}){3}!").fullmatch),
    "choice": (Grammar("choice", '["first choice", "second one", "a third"]'), {"first choice", "second one", "a third"}.__contains__),
    "lark": (
        Grammar("lark", 'start: "<" word (", " word)* ">"\nword: /[a-z]{2,6}/'),
        re.compile(r"<[a-z]{2,6}(, [a-z]{2,6})*>").fullmatch,
    ),
}


def _check_refused(generation: Generation) -> None:
    assert generation.fault.code == "unsupported"
    assert "grammar" in generation.fault.message


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_text_is_of_the_form(rig: Rig, form: str, temperature: float) -> None:
    grammar, is_right = FORMS[form]
    assert ("grammar" in rig.model.capabilities) == (not rig.lacks("grammar"))
    fields: dict[str, Any] = {"grammar": grammar, "sampling": Sampling(temperature=temperature), "ignore_eos": False}
    # Where the grammar lets it go on or end, the model would go on for long.
    bias = ((END_ID, 4.0),) if form == "lark" else ()
    generation = rig.say(rig.prompt(f"of the form {form}", 30), 600, logit_bias=bias, **fields)
    if rig.lacks("grammar"):
        _check_refused(generation)
        return
    generation.check("stop", len(generation.tokens))
    assert is_right(rig.text(generation.tokens)), rig.text(generation.tokens)


def test_a_json_object(rig: Rig) -> None:
    generation = rig.say(rig.prompt("any object", 30), 40, grammar=Grammar("json_object"), ignore_eos=False)
    if rig.lacks("grammar"):
        _check_refused(generation)
        return
    assert rig.text(generation.tokens).startswith("{")


def test_those_with_a_grammar_beside_those_without(rig: Rig) -> None:
    """Each has its own, and the free ones are exact."""
    forms = list(FORMS) * 2
    bound = [
        rig.request(rig.prompt(f"bound {number}", 20 + number), 400, grammar=FORMS[form][0], ignore_eos=False, logit_bias=((END_ID, 4.0),))
        for number, form in enumerate(forms)
    ]
    free = [rig.request(rig.prompt(f"free {number}", 20 + number), 60) for number in range(len(forms))]
    generations = rig.run(rig.finish([request for pair in zip(bound, free, strict=True) for request in pair]))
    rig.check_exact(*generations[1::2])
    for form, generation in zip(forms, generations[::2], strict=True):
        if rig.lacks("grammar"):
            _check_refused(generation)
        else:
            assert FORMS[form][1](rig.text(generation.tokens)), rig.text(generation.tokens)


@pytest.mark.parametrize("offset", [1, 7, 20])
@pytest.mark.parametrize("form", ["json_schema", "regex"])
def test_going_on_under_a_grammar(rig: Rig, form: str, offset: int) -> None:
    """What was made elsewhere counts, and the rest is what the first worker would have made."""
    grammar, is_right = FORMS[form]
    prompt = rig.prompt(f"going on {form}", 30)
    whole = rig.say(prompt, 300, seed=6, grammar=grammar, ignore_eos=False)
    if rig.lacks("grammar"):
        _check_refused(whole)
        return
    assert len(whole.tokens) > offset, "take a longer form"
    rest = rig.say((*prompt, *whole.tokens[:offset]), 300, seed=6, grammar=grammar, ignore_eos=False, offset=offset)
    assert rest.deltas[0].offset == offset
    rest.check("stop", len(whole.tokens) - offset)
    assert rest.tokens == whole.tokens[offset:]
    assert is_right(rig.text((*whole.tokens[:offset], *rest.tokens)))


def test_going_on_under_a_grammar_at_a_temperature(rig: Rig) -> None:
    """With a seed that nobody asked for, too. Where seeds are not heeded, it either ends or goes on with what fits the grammar."""
    grammar, is_right = FORMS["json_schema"]
    prompt = rig.prompt("going on at a temperature", 30)
    fields: dict[str, Any] = {"seed": 6, "is_seed_drawn": True, "grammar": grammar, "ignore_eos": False, "sampling": Sampling()}
    whole = rig.say(prompt, 300, **fields)
    if rig.lacks("grammar"):
        _check_refused(whole)
        return
    rest = rig.say((*prompt, *whole.tokens[:12]), 300, offset=12, **fields)
    if rig.lacks("seeds") and isinstance(rest.terminal, Fault):
        assert rest.fault.code == "grammar_diverged"
        return
    rest.check("stop", len(rest.tokens))
    assert is_right(rig.text((*whole.tokens[:12], *rest.tokens)))
    assert rig.lacks("seeds") or rest.tokens == whole.tokens[12:]


def test_the_length_ends_it_in_the_middle(rig: Rig) -> None:
    generation = rig.say(rig.prompt("cut off", 30), 5, grammar=FORMS["json_schema"][0], ignore_eos=False)
    if rig.lacks("grammar"):
        _check_refused(generation)
        return
    generation.check("length", 5)
    assert rig.text(generation.tokens).startswith('{"ok": ')


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("json_schema", "{"),
        Grammar("regex", "(unclosed"),
        Grammar("choice", "[]"),
        Grammar("lark", "start: missing"),
    ],
    ids=lambda grammar: f"{grammar.kind} {grammar.source}",
)
def test_a_wrong_grammar_hurts_nobody(rig: Rig, grammar: Grammar) -> None:
    async def wrong() -> tuple[Generation, Generation]:
        other = rig.begin(rig.request(rig.prompt("beside a wrong grammar", 30), 40))
        await rig.has_made(other, 1)
        (refused,) = await rig.finish([rig.request(rig.prompt("wrong", 20), 20, grammar=grammar)])
        await rig.ended(other)
        return refused, other

    refused, other = rig.run(wrong())
    if rig.lacks("grammar"):
        _check_refused(refused)
    else:
        assert refused.fault.code == "invalid_grammar"
        assert not refused.fault.retryable
    other.check()
    rig.check_exact(other)


def test_logprobs_under_a_grammar(rig: Rig) -> None:
    """One for each token, forced or not."""
    generation = rig.say(rig.prompt("logprobs, bound", 30), 300, grammar=FORMS["regex"][0], ignore_eos=False, logprobs=2)
    if rig.lacks("grammar"):
        _check_refused(generation)
        return
    generation.check("stop", len(generation.tokens))
    assert len(generation.logprobs) == len(generation.tokens)
