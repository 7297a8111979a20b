"""What an engine tells of its cached KV, as the router hears of it. After every test, a snapshot says what all events add up to."""

from __future__ import annotations

from contract.backends.rig import Rig
from contract.backends.setups import KV_TOKENS
from penstock.kv.blocks import block_hashes


def _names(rig: Rig, tokens: tuple[int, ...]) -> list[bytes]:
    return block_hashes(tokens, rig.model.block_size)


def test_it_tells_events(rig: Rig) -> None:
    assert "kv_events" in rig.model.capabilities
    assert rig.run(rig.tap.snapshot()) is not None


def test_a_prompt_is_in_the_index(rig: Rig) -> None:
    prompt = rig.prompt("indexed", 5 * rig.model.block_size + 3)
    names = _names(rig, prompt)
    replay = rig.tap.replay
    assert replay.overlap(names) == 0
    generation = rig.say(prompt, 4)
    rig.run(rig.until(lambda: replay.overlap(names) == 5))
    assert generation.cached_tokens == 0
    assert rig.say(prompt, 4).cached_tokens == 5 * rig.model.block_size


def test_the_index_knows_what_will_be_cached(rig: Rig) -> None:
    """As many blocks as it has of a prompt, so many tokens are told to have been cached: routing by it is not guessing."""
    size = rig.model.block_size
    first = rig.prompt("foretold", 3 * size)
    rig.say((*first, *rig.prompt("foretold, one end", size)), 2)
    other = (*first, *rig.prompt("foretold, another end", 2 * size + 1))
    rig.run(rig.until(lambda: rig.tap.replay.overlap(_names(rig, other)) == 3))
    assert rig.say(other, 2).cached_tokens == 3 * size


def test_what_is_generated_is_told_as_well(rig: Rig) -> None:
    prompt = rig.prompt("generated and told", rig.model.block_size // 2)
    generation = rig.say(prompt, 4 * rig.model.block_size)
    names = _names(rig, (*prompt, *generation.tokens))
    rig.run(rig.until(lambda: rig.tap.replay.overlap(names) == len(names)))


def test_many_at_once_with_one_prefix(rig: Rig) -> None:
    """The blocks that they share are stored once, whoever computed them."""
    size = rig.model.block_size
    common = rig.prompt("stored once", 2 * size)
    prompts = [(*common, *rig.prompt(f"stored once {number}", size + number)) for number in range(12)]
    rig.run(rig.finish([rig.request(prompt, 3) for prompt in prompts]))
    for prompt in prompts:
        names = _names(rig, prompt)
        rig.run(rig.until(lambda names=names: rig.tap.replay.overlap(names) == len(names)))  # type: ignore[misc]


def test_what_makes_room_is_told_to_be_gone(rig: Rig) -> None:
    """More prompts than the cache holds: the first is forgotten, and the index forgets it, too."""
    replay = rig.tap.replay
    first = rig.prompt("the oldest", rig.model.context_length - 100)
    names = _names(rig, first)
    rig.say(first, 2)
    rig.run(rig.until(lambda: replay.overlap(names) == len(names)))
    evicted = rig.backend.stats().kv_blocks_evicted
    for number in range(KV_TOKENS // rig.model.context_length + 2):
        rig.say(rig.prompt(f"the newer {number}", rig.model.context_length - 100), 2)
    rig.run(rig.until(lambda: replay.overlap(names) == 0))
    assert rig.backend.stats().kv_blocks_evicted > evicted
    assert len(replay.blocks) <= rig.backend.stats().kv_blocks_total
    again = rig.say(first, 10)
    assert again.cached_tokens == 0
    rig.check_exact(again)


def test_an_aborted_one_leaves_only_what_it_computed(rig: Rig) -> None:
    prompt = rig.prompt("aborted and told", 3 * rig.model.block_size + 5)

    async def abort() -> tuple[int, ...]:
        generation = rig.begin(rig.request(prompt, 1500))
        await rig.has_made(generation, 2 * rig.model.block_size)
        await rig.cancel(generation)
        await rig.until(lambda: rig.is_quiet)
        return generation.tokens

    made = rig.run(abort())
    names = _names(rig, (*prompt, *made))
    rig.run(rig.until(lambda: rig.tap.replay.overlap(names) >= 3))
    second = rig.say((*prompt, *made), 10)
    assert second.cached_tokens >= 3 * rig.model.block_size
    rig.check_exact(second)
