"""How tokens are chosen: bias, penalties, cuts, seeds. The simulator's choice follows from the seed, whatever else is asked."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from contract.backends.rig import GREEDY, Generation, Rig
from contract.backends.setups import MAX_BATCH
from penstock.wire.messages import Sampling

WARM = Sampling(temperature=1.0)


def _check_chosen(rig: Rig, generation: Generation, counted: tuple[int, ...] = ()) -> None:
    """The winners under the request's penalties and bias; of an engine without a choice, its own tokens."""
    generation.check()
    if rig.lacks("choice"):
        rig.check_exact(generation)
    else:
        habits = {"punishes_prompt": not rig.lacks("the prompt's repetition"), "is_late": bool(rig.lacks("counts in time"))}
        assert list(generation.tokens) == rig.chooser.adjusted(generation.request, generation.tokens, counted, **habits)


def test_a_bias_decides(rig: Rig) -> None:
    generation = rig.say(rig.prompt("bias", 40), 8, logit_bias=((700, 100.0),))
    _check_chosen(rig, generation)
    assert rig.lacks("choice") or generation.tokens == (700,) * 8


def test_a_bias_bans(rig: Rig) -> None:
    prompt = rig.prompt("ban", 40)
    banned = rig.say(prompt, 6, seed=2).tokens
    generation = rig.say(prompt, 30, seed=2, logit_bias=tuple((token, -100.0) for token in dict.fromkeys(banned)))
    _check_chosen(rig, generation)
    assert rig.lacks("choice") or not set(banned) & set(generation.tokens)


@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": 2.0}, {"frequency_penalty": 2.0}, {"presence_penalty": 1.5, "frequency_penalty": -0.5}], ids=str
)
def test_penalties(rig: Rig, penalties: dict[str, float]) -> None:
    """With a bias that makes some tokens come again and again, so that there is something to punish."""
    bias = tuple((token, 14.0) for token in (500, 501, 502))
    generation = rig.say(rig.prompt("penalties", 40), 40, sampling=replace(GREEDY, **penalties), logit_bias=bias)
    _check_chosen(rig, generation)
    _check_changed(rig, generation)


@pytest.mark.parametrize("repetition_penalty", [1.8, 0.8])
def test_repetition(rig: Rig, repetition_penalty: float) -> None:
    """Behind a prompt with a good part of the vocabulary. Alone: engines differ in what they add before it and what after."""
    sampling = replace(GREEDY, repetition_penalty=repetition_penalty)
    generation = rig.say(rig.prompt("repetition", 500), 80, sampling=sampling)
    _check_chosen(rig, generation)
    _check_changed(rig, generation)


def _check_changed(rig: Rig, generation: Generation) -> None:
    """Penalties that change nothing test nothing."""
    request = generation.request
    without = rig.say(request.token_ids, request.max_tokens, seed=request.seed, logit_bias=request.logit_bias)
    assert (without.tokens == generation.tokens) == bool(rig.lacks("choice"))


def test_penalties_count_what_was_made_elsewhere(rig: Rig) -> None:
    sampling = replace(GREEDY, presence_penalty=1.5, frequency_penalty=1.0)
    fields: dict[str, Any] = {"sampling": sampling, "seed": 4, "logit_bias": tuple((token, 12.0) for token in (500, 501, 502))}
    prompt = rig.prompt("counts of others", 40)
    whole = rig.say(prompt, 40, **fields)
    _check_chosen(rig, whole)
    rest = rig.say((*prompt, *whole.tokens[:20]), 40, offset=20, **fields)
    _check_chosen(rig, rest, () if rig.lacks("counts of others") else whole.tokens[:20])
    assert rig.lacks("counts of others") or rest.tokens == whole.tokens[20:]


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
def test_what_leaves_one_token_is_greedy(rig: Rig, cut: dict[str, float]) -> None:
    generation = rig.say(rig.prompt("cuts", 40), 40, sampling=replace(WARM, **cut))
    generation.check()
    rig.check_exact(generation)


def test_top_k_keeps_to_the_likeliest(rig: Rig) -> None:
    generation = rig.say(rig.prompt("top k", 40), 60, sampling=Sampling(temperature=2.0, top_k=3), logprobs=3)
    generation.check()
    if rig.lacks("choice"):
        rig.check_exact(generation)
        return
    for token, logprob in zip(generation.tokens, generation.logprobs, strict=True):
        assert token in [other for other, _ in logprob.top]
    assert list(generation.tokens) != rig.judge.expected(generation.request, generation.tokens), "nothing was drawn"


def test_the_same_seed_gives_the_same_tokens(rig: Rig) -> None:
    prompt = rig.prompt("seeds", 40)
    first, second, other = (rig.say(prompt, 50, seed=seed, sampling=WARM) for seed in (123, 123, 124))
    assert (first.tokens == second.tokens) == (not rig.lacks("seeds"))
    assert first.tokens != other.tokens


def test_a_seed_that_nobody_asked_for(rig: Rig) -> None:
    """Where the noise is the position's own it is of that seed; elsewhere it is the engine's own affair, and never the same."""
    prompt = rig.prompt("drawn seeds", 40)
    first, second = (rig.say(prompt, 50, seed=123, is_seed_drawn=True, sampling=WARM) for _ in range(2))
    assert (first.tokens == second.tokens) == (not rig.lacks("noise by position"))
    first.check()


def test_a_seed_does_not_depend_on_who_else_is_computed(rig: Rig) -> None:
    prompt = rig.prompt("seeds in company", 40)
    alone = rig.say(prompt, 40, seed=77, sampling=WARM)
    requests = [rig.request(rig.prompt(f"company {number}", 20 + number), 40, sampling=WARM) for number in range(MAX_BATCH - 1)]
    requests.insert(3, rig.request(prompt, 40, seed=77, sampling=WARM))
    together = rig.run(rig.finish(requests))[3]
    together.check()
    assert (together.tokens == alone.tokens) == (not rig.lacks("seeds"))


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1])
def test_any_seed_will_do(rig: Rig, seed: int) -> None:
    prompt = rig.prompt("any seed", 30)
    first, second = (rig.say(prompt, 20, seed=seed, sampling=WARM) for _ in range(2))
    assert (first.tokens == second.tokens) == (not rig.lacks("seeds"))
    first.check()


def test_going_on_at_a_temperature(rig: Rig) -> None:
    """Where the noise is the position's own, the rest is the same; elsewhere it is some other, and always the same other."""
    prompt = rig.prompt("going on at a temperature", 40)
    whole = rig.say(prompt, 40, seed=31, sampling=WARM)
    rests = [rig.say((*prompt, *whole.tokens[:15]), 40, seed=31, sampling=WARM, offset=15) for _ in range(2)]
    assert (rests[0].tokens == rests[1].tokens) == (not rig.lacks("seeds"))
    assert rig.lacks("noise by position") or rests[0].tokens == whole.tokens[15:]
    rests[0].check()


@pytest.mark.parametrize("top_k", [0, 50])
def test_at_a_temperature_tokens_are_drawn_as_likely_as_they_are(rig: Rig, top_k: int) -> None:
    """The first token, drawn by many seeds: the likeliest must come about as often as it should."""
    prompt = rig.prompt("drawn 6", 40)
    sampling = Sampling(temperature=1.0, top_k=top_k)
    requests = [rig.request(prompt, 1, seed=1000 + number, sampling=sampling, logprobs=1) for number in range(200)]
    generations = rig.run(rig.finish(requests))
    if rig.lacks("choice"):
        rig.check_exact(*generations)
        return
    rows = rig.chooser.probabilities(requests[0])
    likeliest, probability = max(enumerate(rows), key=lambda entry: entry[1])
    share = sum(generation.tokens == (likeliest,) for generation in generations) / len(generations)
    assert 0.2 < probability < 0.8, "take a prompt with more than one likely answer"
    assert abs(share - probability) < 0.15
