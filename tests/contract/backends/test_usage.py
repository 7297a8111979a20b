"""What is told of a prompt: how much of it needed no computing. It counts in money, so it is exact."""

from __future__ import annotations

import pytest

from contract.backends.rig import Rig


def _whole_blocks(rig: Rig, length: int) -> int:
    """The tokens of a prompt's whole blocks; the last token is always computed, for what follows it is wanted."""
    size = rig.model.block_size
    return (length - 1) // size * size


@pytest.mark.parametrize("length", [5, 100, 128, 129, 200])
def test_cached_tokens_are_the_whole_blocks(rig: Rig, length: int) -> None:
    prompt = rig.prompt(f"cached {length}", length)
    first, second = rig.say(prompt, 2), rig.say(prompt, 2)
    assert first.cached_tokens == 0
    assert second.cached_tokens == _whole_blocks(rig, length)
    rig.check_exact(first, second)


def test_what_was_generated_is_cached_too(rig: Rig) -> None:
    prompt = rig.prompt("a dialogue", 90)
    answer = rig.say(prompt, 60).tokens
    longer = (*prompt, *answer, *rig.prompt("the next question", 20))
    second = rig.say(longer, 10)
    # The last token of the answer was never put in: nothing followed it.
    assert second.cached_tokens == (90 + 59) // rig.model.block_size * rig.model.block_size
    rig.check_exact(second)


def test_a_prefix_in_common(rig: Rig) -> None:
    size = rig.model.block_size
    common = rig.prompt("in common", 3 * size)
    assert rig.say((*common, *rig.prompt("one end", size)), 2).cached_tokens == 0
    other = rig.say((*common, *rig.prompt("another end", size)), 20)
    assert other.cached_tokens == 3 * size
    rig.check_exact(other)


def test_a_block_that_differs_in_one_token_is_another(rig: Rig) -> None:
    size = rig.model.block_size
    prompt = rig.prompt("nearly the same", 4 * size + 1)
    rig.say(prompt, 2)
    changed = list(prompt)
    changed[2 * size - 1] ^= 1
    second = rig.say(changed, 10)
    assert second.cached_tokens == size
    rig.check_exact(second)


def test_going_on_counts_what_was_generated_before_as_prompt(rig: Rig) -> None:
    """As many as the prompt of the request has, never more."""
    prompt = rig.prompt("going on", 80)
    whole = rig.say(prompt, 50)
    rest = rig.say((*prompt, *whole.tokens[:20]), 50, seed=whole.request.seed, offset=20)
    assert rest.cached_tokens == _whole_blocks(rig, 100)


def test_the_worker_counts_what_it_was_asked(rig: Rig) -> None:
    before = rig.backend.stats()
    prompt = rig.prompt("counted", 100)
    rig.say(prompt, 3)
    rig.say(prompt, 3)
    after = rig.backend.stats()
    assert after.prompt_tokens - before.prompt_tokens == 200
    assert after.prompt_tokens_cached - before.prompt_tokens_cached == _whole_blocks(rig, 100)


def test_only_the_prompt_is_cached_as_well(rig: Rig) -> None:
    prompt = rig.prompt("warmed", 100)
    assert rig.say(prompt, 0).cached_tokens == 0
    assert rig.say(prompt, 3).cached_tokens == _whole_blocks(rig, 100)
