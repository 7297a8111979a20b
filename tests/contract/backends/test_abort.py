"""Stopping a generation, in every phase: nothing more comes of it, nobody else notices, and all that it held is free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.backends.rig import Generation, Rig
from contract.backends.setups import MAX_BATCH
from penstock.wire.messages import Finish, Grammar


@pytest.fixture(autouse=True)
def all_is_free(rig: Rig) -> Iterator[None]:
    """A request that needs the whole context runs afterwards."""
    yield
    generation = rig.say(rig.prompt("after an abort", rig.model.context_length - 10), 10)
    generation.check()
    rig.check_exact(generation)


async def _fill(rig: Rig, name: str, max_tokens: int = 120) -> list[Generation]:
    """As many as are computed at once, all of which have begun."""
    filling = [rig.begin(rig.request(rig.prompt(f"{name} {number}", 20 + number), max_tokens)) for number in range(MAX_BATCH)]
    await rig.until(lambda: all(generation.made for generation in filling))
    return filling


async def _check_stopped(rig: Rig, stopped: Generation, others: list[Generation]) -> None:
    """It has been cancelled: from now on nothing comes of it, while the others go on to their end."""
    seen = stopped.tokens
    await rig.ended(*others)
    await rig.until(lambda: rig.is_quiet)
    assert (stopped.tokens, stopped.terminal) == (seen, None)
    for generation in others:
        generation.check()
    rig.check_exact(stopped, *others)


def test_queued_behind_a_full_batch(rig: Rig) -> None:
    async def abort() -> None:
        others = await _fill(rig, "full batch")
        queued = rig.begin(rig.request(rig.prompt("queued", 20), 50))
        after = rig.begin(rig.request(rig.prompt("queued after it", 20), 50))
        assert rig.backend.stats().running <= MAX_BATCH
        await rig.cancel(queued)
        await _check_stopped(rig, queued, [*others, after])
        assert not queued.tokens

    rig.run(abort())


def test_at_once(rig: Rig) -> None:
    """Before the engine has so much as seen it."""

    async def abort() -> None:
        other = rig.begin(rig.request(rig.prompt("beside", 30), 60))
        stopped = rig.begin(rig.request(rig.prompt("at once", 30), 60))
        await rig.cancel(stopped)
        await _check_stopped(rig, stopped, [other])

    rig.run(abort())


def test_before_the_first_token(rig: Rig) -> None:
    """While its prompt is computed, which is long."""

    async def abort() -> None:
        other = rig.begin(rig.request(rig.prompt("beside a long one", 30), 60))
        await rig.has_made(other, 1)
        stopped = rig.begin(rig.request(rig.prompt("long", rig.model.context_length - 100), 60))
        await rig.has_made(other, len(other.tokens) + 1)
        await rig.cancel(stopped)
        await _check_stopped(rig, stopped, [other])

    rig.run(abort())


@pytest.mark.parametrize("count", [1, 2, 40])
def test_in_the_middle(rig: Rig, count: int) -> None:
    async def abort() -> None:
        other = rig.begin(rig.request(rig.prompt("beside the middle", 30), 100))
        stopped = rig.begin(rig.request(rig.prompt("in the middle", 40), 1500))
        await rig.has_made(stopped, count)
        await rig.cancel(stopped)
        assert count <= len(stopped.tokens) < 1500
        await _check_stopped(rig, stopped, [other])

    rig.run(abort())


@pytest.mark.parametrize("before", [0, 1, 2])
def test_right_at_the_end(rig: Rig, before: int) -> None:
    """It has ended, and once, or it has not, and does not any more."""

    async def abort() -> None:
        other = rig.begin(rig.request(rig.prompt("beside the end", 30), 100))
        stopped = rig.begin(rig.request(rig.prompt("the end", 40), 30))
        await rig.has_made(stopped, 30 - before)
        await rig.cancel(stopped)
        seen = stopped.tokens, stopped.terminal
        await rig.ended(other)
        await rig.until(lambda: rig.is_quiet)
        assert (stopped.tokens, stopped.terminal) == seen
        assert stopped.terminal in (None, Finish("length"))
        assert before or stopped.terminal == Finish("length")
        rig.check_exact(stopped, other)

    rig.run(abort())


def test_twice(rig: Rig) -> None:
    async def abort() -> None:
        other = rig.begin(rig.request(rig.prompt("beside twice", 30), 60))
        stopped = rig.begin(rig.request(rig.prompt("twice", 40), 1500))
        await rig.has_made(stopped, 3)
        rig.backend.cancel(stopped.request.id)
        await rig.cancel(stopped)
        await rig.cancel(stopped)
        await _check_stopped(rig, stopped, [other])

    rig.run(abort())


def test_unknown_and_ended_ones_are_ignored(rig: Rig) -> None:
    async def abort() -> None:
        (ended,) = await rig.finish([rig.request(rig.prompt("ended", 30), 5)])
        other = rig.begin(rig.request(rig.prompt("beside the unknown", 30), 60))
        await rig.has_made(other, 1)
        await rig.cancel(ended)
        rig.backend.cancel(b"nobody knows me!")
        await rig.ended(other)
        other.check()
        rig.check_exact(ended, other)

    rig.run(abort())


def test_all_of_a_full_batch_and_its_queue(rig: Rig) -> None:
    async def abort() -> None:
        stopped = await _fill(rig, "all", 500)
        stopped += [rig.begin(rig.request(rig.prompt(f"all, queued {number}", 20), 500)) for number in range(MAX_BATCH)]
        for generation in stopped:
            rig.backend.cancel(generation.request.id)
        await rig.until(lambda: rig.is_quiet)
        assert {generation.terminal for generation in stopped} == {None}
        rig.check_exact(*stopped)

    rig.run(abort())


def test_their_places_in_the_batch_are_free(rig: Rig) -> None:
    """In the engine, too: others have them long before those that were stopped would have come to their end."""

    async def abort() -> None:
        # All of them fit into the KV to their end: where they do not, an engine may let the last begin when the first have ended.
        witness, *stopped = await _fill(rig, "places", 800)
        for generation in stopped:
            rig.backend.cancel(generation.request.id)
        await rig.finish([rig.request(rig.prompt(f"in their places {number}", 20), 5) for number in range(len(stopped))])
        assert witness.made < 400
        await rig.cancel(witness)

    rig.run(abort())


def test_the_id_can_be_used_again(rig: Rig) -> None:
    """A front end that goes on with a generation elsewhere may come back with it."""

    async def abort() -> None:
        request = rig.request(rig.prompt("again", 30), 60)
        stopped = rig.begin(request)
        await rig.has_made(stopped, 3)
        await rig.cancel(stopped)
        again = rig.begin(request)
        await rig.ended(again)
        again.check()
        rig.check_exact(again)

    rig.run(abort())


def test_while_its_grammar_is_compiled(rig: Rig) -> None:
    async def abort() -> None:
        other = rig.begin(rig.request(rig.prompt("beside a grammar", 30), 40))
        grammar = Grammar("regex", "[a-z]{1,40}(, [a-z]{1,40}){30}")
        stopped = rig.begin(rig.request(rig.prompt("a grammar", 30), 500, grammar=grammar))
        await rig.cancel(stopped)
        seen = stopped.tokens
        await rig.ended(other)
        await rig.until(lambda: rig.is_quiet)
        assert (stopped.tokens, stopped.terminal) == (seen, None)

    rig.run(abort())
