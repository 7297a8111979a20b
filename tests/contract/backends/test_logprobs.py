"""Log probabilities: of the token that came, of the likeliest, and of the prompt; one for each token, however they are delivered."""

from __future__ import annotations

import pytest

from contract.backends.rig import Rig
from penstock.wire.codec import PACKED_ENTRIES, unpack_logprobs
from penstock.wire.messages import PromptReport, TokenLogprob


def unpacked(report: PromptReport) -> list[TokenLogprob | None]:
    assert report.logprobs is not None
    pieces = [unpack_logprobs(piece) for piece in report.logprobs]
    assert all(len(piece) == PACKED_ENTRIES for piece in pieces[:-1])
    return [entry for piece in pieces for entry in piece]


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_logprobs_of_what_came_and_of_the_likeliest(rig: Rig, top: int) -> None:
    generation = rig.say(rig.prompt(f"logprobs {top}", 40), 50, logprobs=top)
    generation.check()
    rig.check_exact(generation)
    rig.judge.check_logprobs(generation.request, generation.tokens, generation.logprobs)


def test_none_unless_they_are_asked_for(rig: Rig) -> None:
    generation = rig.say(rig.prompt("no logprobs", 40), 10)
    assert all(delta.logprobs is None for delta in generation.deltas)
    assert generation.report.logprobs is None


def test_those_who_ask_beside_those_who_do_not(rig: Rig) -> None:
    tops = [None, 0, 3, None, 10, 1, None, 2, 5, None]
    requests = [rig.request(rig.prompt(f"mixed {number}", 20 + 7 * number), 40, logprobs=top) for number, top in enumerate(tops)]
    for generation in rig.run(rig.finish(requests)):
        generation.check()
        rig.check_exact(generation)
        if generation.request.logprobs is None:
            assert all(delta.logprobs is None for delta in generation.deltas)
        else:
            rig.judge.check_logprobs(generation.request, generation.tokens, generation.logprobs)


def test_going_on_from_the_middle(rig: Rig) -> None:
    prompt = rig.prompt("logprobs in the middle", 40)
    whole = rig.say(prompt, 40, seed=9, logprobs=2)
    rest = rig.say((*prompt, *whole.tokens[:25]), 40, seed=9, logprobs=2, offset=25)
    rig.judge.check_logprobs(rest.request, rest.tokens, rest.logprobs)
    assert [token for logprob in rest.logprobs for token, _ in logprob.top] == [
        token for logprob in whole.logprobs[25:] for token, _ in logprob.top
    ]


@pytest.mark.parametrize("length", [1, 2, 70, 600])
def test_logprobs_of_the_prompt(rig: Rig, length: int) -> None:
    assert "prompt_logprobs" in rig.model.capabilities
    generation = rig.say(rig.prompt(f"prompt logprobs {length}", length), 5, prompt_logprobs=True, logprobs=2)
    generation.check()
    rig.judge.check_prompt_logprobs(generation.request, unpacked(generation.report))
    rig.judge.check_logprobs(generation.request, generation.tokens, generation.logprobs)


def test_logprobs_of_a_prompt_that_is_cached(rig: Rig) -> None:
    """They must be computed again, and whatever is told of cached tokens, all of them come."""
    prompt = rig.prompt("a cached prompt", 150)
    rig.say(prompt, 5)
    generation = rig.say(prompt, 5, prompt_logprobs=True)
    rig.judge.check_prompt_logprobs(generation.request, unpacked(generation.report))
    assert all(delta.logprobs is None for delta in generation.deltas)
    rig.check_exact(generation)


def test_logprobs_of_the_prompt_alone(rig: Rig) -> None:
    generation = rig.say(rig.prompt("echo", 80), 0, prompt_logprobs=True, logprobs=3)
    generation.check("length", 0)
    rig.judge.check_prompt_logprobs(generation.request, unpacked(generation.report))
