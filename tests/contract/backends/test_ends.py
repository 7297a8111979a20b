"""How a generation ends: by its length, by the model's own end, by a token that was named; and when it must not."""

from __future__ import annotations

import pytest

from chat_model import END_ID
from contract.backends.rig import Rig
from penstock.backends.simulator import natural_length

SURE = 100.0
"""More than any other token's lead."""


@pytest.mark.parametrize("max_tokens", [1, 2, 15, 16, 17, 64])
def test_max_tokens_are_exact(rig: Rig, max_tokens: int) -> None:
    generation = rig.say(rig.prompt("length", 31), max_tokens)
    generation.check("length", max_tokens)


def test_the_models_own_end(rig: Rig) -> None:
    prompt = rig.prompt("own end", 40)
    if rig.lacks("choice"):
        seed = 5
        generation = rig.say(prompt, 1200, seed=seed, ignore_eos=False)
        generation.check("stop", natural_length(seed) + 1)
        assert generation.tokens[-1] == END_ID
        assert list(generation.tokens[:-1]) == rig.judge.expected(generation.request, generation.tokens[:-1])
        return
    generation = rig.say(prompt, 50, ignore_eos=False, logit_bias=((END_ID, SURE),))
    generation.check("stop", 1)
    assert generation.tokens == (END_ID,)


def test_the_end_comes_when_it_has_won(rig: Rig) -> None:
    """Not at the first token, but in the middle of others that are the model's own."""
    if rig.lacks("choice"):
        test_the_models_own_end(rig)
        return
    prompt = rig.prompt("won", 40)
    generation = rig.say(prompt, 400, ignore_eos=False, logit_bias=((END_ID, 12.0),))
    generation.check("stop", len(generation.tokens))
    assert len(generation.tokens) > 1
    assert generation.tokens[-1] == END_ID
    assert END_ID not in generation.tokens[:-1]
    assert list(generation.tokens) == rig.chooser.adjusted(generation.request, generation.tokens)


def test_an_end_that_is_ignored_is_a_token_like_others(rig: Rig) -> None:
    generation = rig.say(rig.prompt("ignored end", 40), 12, ignore_eos=True, logit_bias=((END_ID, SURE),))
    generation.check("length", 12)
    if rig.lacks("choice"):
        rig.check_exact(generation)
    else:
        assert generation.tokens == (END_ID,) * 12


def test_no_end_before_min_tokens(rig: Rig) -> None:
    prompt = rig.prompt("min tokens", 40)
    if rig.lacks("choice"):
        least = natural_length(5) + 20
        generation = rig.say(prompt, 1200, seed=5, ignore_eos=False, min_tokens=least)
        generation.check("stop", least + 1)
        return
    generation = rig.say(prompt, 50, ignore_eos=False, min_tokens=5, logit_bias=((END_ID, SURE),))
    generation.check("stop", 6)
    assert generation.tokens[-1] == END_ID
    assert END_ID not in generation.tokens[:-1]
    assert list(generation.tokens[:-1]) == rig.judge.expected(generation.request, generation.tokens[:-1])


def test_min_tokens_count_what_was_made_elsewhere(rig: Rig) -> None:
    prompt = rig.prompt("min tokens", 40)
    if rig.lacks("choice"):
        least = natural_length(5) + 20
        before = rig.say(prompt, 10, seed=5).tokens
        generation = rig.say((*prompt, *before), 1200, seed=5, ignore_eos=False, min_tokens=least, offset=10)
        generation.check("stop", least + 1 - 10)
        return
    before = rig.say(prompt, 3).tokens
    request = {"ignore_eos": False, "min_tokens": 5, "logit_bias": ((END_ID, SURE),)}
    generation = rig.say((*prompt, *before), 50, offset=3, **request)
    generation.check("stop", 3)
    assert generation.tokens[-1] == END_ID


@pytest.mark.parametrize("place", [0, 1, 20])
def test_a_stop_id_is_the_last_token(rig: Rig, place: int) -> None:
    prompt = rig.prompt("stop id", 44)
    whole = rig.say(prompt, 60, seed=3)
    stop = whole.tokens[place]
    generation = rig.say(prompt, 60, seed=3, stop_ids=(stop, END_ID))
    if rig.lacks("choice"):
        generation.check()
        assert generation.tokens == whole.tokens
        return
    first = whole.tokens.index(stop)
    generation.check("stop", first + 1)
    assert generation.tokens == whole.tokens[: first + 1]


def test_a_stop_id_at_the_very_end_is_a_stop(rig: Rig) -> None:
    """Both reasons hold at the same token; the text has ended as it should, so that is the one to tell."""
    prompt = rig.prompt("stop id", 44)
    whole = rig.say(prompt, 20, seed=3)
    first = whole.tokens.index(whole.tokens[-1])
    generation = rig.say(prompt, first + 1, seed=3, stop_ids=(whole.tokens[-1],))
    generation.check("length" if rig.lacks("choice") else "stop", first + 1)
    assert generation.tokens == whole.tokens[: first + 1]


def test_no_stop_id_before_min_tokens(rig: Rig) -> None:
    prompt = rig.prompt("stop id too early", 44)
    whole = rig.say(prompt, 30, seed=3)
    banned = whole.tokens[2]
    generation = rig.say(prompt, 30, seed=3, stop_ids=(banned,), min_tokens=10)
    if rig.lacks("choice"):
        assert generation.tokens == whole.tokens
        return
    assert banned not in generation.tokens[:10]
    assert generation.tokens[:2] == whole.tokens[:2]


def test_a_stop_id_in_the_prompt_stops_nothing(rig: Rig) -> None:
    prompt = rig.prompt("stop id in the prompt", 44)
    whole = rig.say(prompt, 10, seed=3)
    named = next(token for token in prompt if token not in whole.tokens)
    generation = rig.say(prompt, 10, seed=3, stop_ids=(named,))
    generation.check()
    assert generation.tokens == whole.tokens
