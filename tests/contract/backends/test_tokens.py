"""The tokens themselves: exactly those of the model, from the first to the last, alone or among others."""

from __future__ import annotations

import pytest

from contract.backends.rig import Rig
from contract.backends.setups import MAX_BATCH
from penstock.wire.messages import Delta


@pytest.mark.parametrize("length", [1, 5, 33, 150, 300])
def test_tokens_are_exact(rig: Rig, length: int) -> None:
    generation = rig.say(rig.prompt(f"exact {length}", length), 200)
    generation.check()
    rig.check_exact(generation)


def test_the_first_delta_starts_at_zero_and_nothing_is_empty(rig: Rig) -> None:
    generation = rig.say(rig.prompt("offsets", 40), 30)
    assert generation.deltas[0].offset == 0
    assert all(delta.token_ids for delta in generation.deltas)
    assert isinstance(generation.deltas[0].token_ids, tuple)


def test_twice_as_many_at_once_as_a_batch_takes(rig: Rig) -> None:
    requests = [rig.request(rig.prompt(f"at once {number}", 10 + 17 * number), 40 + number) for number in range(2 * MAX_BATCH)]
    generations = rig.run(rig.finish(requests))
    for generation in generations:
        generation.check()
    rig.check_exact(*generations)


def test_64_at_once_of_different_lengths(rig: Rig) -> None:
    requests = [rig.request(rig.prompt(f"one of 64: {number}", 3 + 5 * number), 20 + number) for number in range(64)]
    generations = rig.run(rig.finish(requests))
    for generation in generations:
        generation.check()
    rig.check_exact(*generations)


def test_the_same_prompt_many_times_at_once(rig: Rig) -> None:
    """They share what is computed of it, and nothing else."""
    prompt = rig.prompt("shared", 100)
    generations = rig.run(rig.finish([rig.request(prompt, 20 + number, seed=7) for number in range(12)]))
    rig.check_exact(*generations)
    for number, generation in enumerate(generations):
        generation.check(count=20 + number)
        assert generation.tokens == generations[-1].tokens[: 20 + number]


@pytest.mark.parametrize("offset", [1, 15, 16, 50, 99])
def test_going_on_from_the_middle_gives_the_rest(rig: Rig, offset: int) -> None:
    prompt = rig.prompt("the middle", 45)
    whole = rig.say(prompt, 100, seed=11)
    rest = rig.say((*prompt, *whole.tokens[:offset]), 100, seed=11, offset=offset)
    assert rest.deltas[0].offset == offset
    rest.check(count=100 - offset)
    assert rest.tokens == whole.tokens[offset:]


@pytest.mark.parametrize("offset", [0, 12])
def test_only_the_prompt(rig: Rig, offset: int) -> None:
    """Nothing is left to make: what is known of the prompt comes all the same, and then the end."""
    prompt = rig.prompt("only the prompt", 70)
    generation = rig.say(prompt, offset, offset=offset)
    generation.check("length", 0)
    (delta,) = generation.deltas
    assert delta == Delta(offset, (), None, delta.prompt)
    rig.check_exact(rig.say(prompt, 5))


def test_a_context_that_was_filled_elsewhere(rig: Rig) -> None:
    """All was made, and the worker was lost before it could say that this was the end."""
    generation = rig.say(rig.prompt("filled elsewhere", rig.model.context_length), 12, offset=12)
    generation.check("length", 0)
    assert [delta.token_ids for delta in generation.deltas] == [()]


def test_one_token(rig: Rig) -> None:
    generation = rig.say(rig.prompt("one token", 50), 1)
    generation.check("length", 1)
    rig.check_exact(generation)


def test_a_context_that_is_just_filled(rig: Rig) -> None:
    generation = rig.say(rig.prompt("full", rig.model.context_length - 8), 8)
    generation.check("length", 8)
    rig.check_exact(generation)


def test_many_small_ones_leave_nothing(rig: Rig) -> None:
    async def one_after_another() -> None:
        for number in range(200):
            (generation,) = await rig.finish([rig.request(rig.prompt(f"small {number % 20}", 6), 2)])
            generation.check()
            rig.check_exact(generation)

    before = rig.backend.stats()
    rig.run(one_after_another())
    after = rig.backend.stats()
    assert (after.running, after.queued, after.sessions) == (0, 0, before.sessions)
    assert after.prompt_tokens == before.prompt_tokens + 200 * 6
