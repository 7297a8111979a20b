"""Generations share KV only under the same root: what the engine reports, what it computes, and what the router hears of it."""

from __future__ import annotations

import pytest

from contract.backends.rig import Rig
from penstock.kv.blocks import ROOT, block_hashes, salted_root, tenant_root
from penstock.wire.messages import Grammar, SessionTurn

ALICE, MALLORY = tenant_root("alice"), tenant_root("mallory")
ROOTS = (ALICE, MALLORY, ROOT, salted_root(ALICE, "salt"))


def test_it_isolates(rig: Rig) -> None:
    assert "isolation" in rig.model.capabilities


def test_a_prompt_is_cached_under_its_root_only(rig: Rig) -> None:
    size = rig.model.block_size
    prompt = rig.prompt("rooted", 4 * size + 3)
    for root in ROOTS:
        generation = rig.say(prompt, 4, root=root)
        assert generation.cached_tokens == 0, root.hex()
        rig.check_exact(generation)
    for root in ROOTS:
        generation = rig.say(prompt, 4, root=root)
        assert generation.cached_tokens == 4 * size, root.hex()
        rig.check_exact(generation)


def test_the_router_hears_of_each_root(rig: Rig) -> None:
    """As many blocks as the index has under a root, so many tokens are cached under it."""
    size = rig.model.block_size
    prompt = rig.prompt("rooted and told", 3 * size + 1)
    names = {root: block_hashes(prompt, size, root) for root in ROOTS}
    replay = rig.tap.replay
    for count, root in enumerate(ROOTS, 1):
        generation = rig.say(prompt, 2 * size, root=root)
        longer = block_hashes((*prompt, *generation.tokens), size, root)
        rig.run(rig.until(lambda longer=longer: replay.overlap(longer) == len(longer)))  # type: ignore[misc]
        assert [replay.overlap(names[other]) for other in ROOTS] == [3] * count + [0] * (len(ROOTS) - count)


def test_those_at_once_do_not_wait_for_each_other(rig: Rig) -> None:
    """Two at once with one prompt: under one root the second may use what the first computes, under another root never."""
    size = rig.model.block_size
    prompt = rig.prompt("rooted at once", 6 * size + 1)
    generations = rig.run(rig.finish([rig.request(prompt, 3, root=root) for root in (ALICE, MALLORY)]))
    assert [generation.cached_tokens for generation in generations] == [0, 0]
    rig.check_exact(*generations)


def test_a_session_finds_what_is_under_its_root(rig: Rig) -> None:
    size = rig.model.block_size
    prompt = rig.prompt("rooted session", 3 * size + 1)
    for session, root in (("of alice", ALICE), ("of mallory", MALLORY)):
        turn = SessionTurn(session, "open", 60.0, 1)
        assert rig.turn(turn, prompt, root=root).cached_tokens == 0
        assert rig.turn(turn, prompt, root=root).cached_tokens >= 3 * size
        rig.close_session(session, 1)


def test_a_continued_generation_keeps_its_root(rig: Rig) -> None:
    size = rig.model.block_size
    prompt = rig.prompt("rooted and continued", 3 * size)
    first = rig.say(prompt, size, root=ALICE)
    continued = (*prompt, *first.tokens)
    rig.run(rig.until(lambda: rig.tap.replay.overlap(block_hashes(continued[:-1], size, ALICE)) >= 3))
    assert rig.say(continued, 2 * size, offset=size, root=MALLORY).cached_tokens == 0
    assert rig.say(continued, 2 * size, offset=size, root=ALICE).cached_tokens >= 3 * size


def test_a_grammar_under_a_root(rig: Rig) -> None:
    if rig.lacks("grammar"):
        pytest.skip(str(rig.lacks("grammar")))
    size = rig.model.block_size
    prompt = rig.prompt("rooted grammar", 2 * size + 1)
    found = [
        rig.say(prompt, 20, root=root, grammar=Grammar("regex", "[a-z]{3}"), ignore_eos=False).cached_tokens
        for root in (ALICE, MALLORY, ALICE, MALLORY)
    ]
    assert found == [0, 0, 2 * size, 2 * size]
