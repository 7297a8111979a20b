"""Sessions: the same table whichever engine computes. What a lease does to the cache depends on whose cache it is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from contract.backends.rig import Rig
from contract.backends.setups import KV_TOKENS, MAX_SESSIONS
from penstock.kv.blocks import block_hashes
from penstock.wire.messages import Mark, SessionReport, SessionTurn

MANY = [f"one of many {number}" for number in range(MAX_SESSIONS)]
NAMES = ("aborted", "agent", "brief", "busy", "closed", "freed", "keeper", "longer", "nobody", "reborn", "refused", "two", *MANY)


@pytest.fixture(autouse=True)
def no_session_is_left(rig: Rig) -> Iterator[None]:
    """Of its name, that is: one that a failed test left would take the place of the next one's."""
    yield
    left = rig.backend.stats().sessions
    for report in rig.describe(*NAMES):
        rig.close_session(report.id, report.epoch)
    assert left == 0


def _turn(name: str, action: str = "continue", epoch: int = 1, timeout: float = 300.0) -> SessionTurn:
    return SessionTurn(name, action, timeout, epoch)  # type: ignore[arg-type]


async def _find(rig: Rig, name: str) -> SessionReport | None:
    found = await rig.backend.describe_sessions([name])
    return found[0] if found else None


async def _idle(rig: Rig, name: str) -> SessionReport | None:
    """Once its turns are over. The engine may hear of that a moment after the reader."""
    while (report := await _find(rig, name)) is not None and report.active_turns:
        await rig.breathe()
    return report


def _report(rig: Rig, name: str) -> SessionReport | None:
    return rig.run(_idle(rig, name))


def _known(rig: Rig, name: str) -> SessionReport:
    report = _report(rig, name)
    assert report is not None
    return report


def _close(rig: Rig, name: str, epoch: int = 1) -> None:
    async def gone() -> None:
        while await _find(rig, name) is not None:
            await rig.breathe()
        await rig.until(lambda: rig.backend.stats().sessions == 0)

    rig.close_session(name, epoch)
    rig.run(gone())


def test_open_continue_close(rig: Rig) -> None:
    assert _report(rig, "agent") is None
    prompt = rig.prompt("a session", 100)
    first = rig.turn(_turn("agent", "open"), prompt)
    assert (first.session, first.cached_tokens) == ("open", 0)
    opened = _known(rig, "agent")
    assert (opened.id, opened.epoch, opened.turns) == ("agent", 1, 1)
    assert rig.backend.stats().sessions == 1

    longer = (*prompt, *first.tokens, *rig.prompt("a session, again", 50))
    second = rig.turn(_turn("agent"), longer)
    assert second.session == "open"
    assert second.cached_tokens == 103 // rig.model.block_size * rig.model.block_size
    described = _known(rig, "agent")
    assert (described.turns, described.active_turns) == (2, 0)
    assert (described.prompt_tokens, described.cached_tokens, described.generated_tokens) == (254, second.cached_tokens, 8)
    assert described.expires_in is not None
    assert 290 < described.expires_in <= 300
    rig.check_exact(first, second)

    last = rig.turn(_turn("agent", "close"), (*longer, *second.tokens))
    assert last.session == "open"
    assert _report(rig, "agent") is None
    assert rig.turn(_turn("agent"), prompt).session == "unknown"


def test_a_generation_without_a_session_says_nothing_of_one(rig: Rig) -> None:
    assert rig.say(rig.prompt("no session", 20), 2).session is None


def test_a_turn_that_is_unknown_is_served_all_the_same(rig: Rig) -> None:
    generation = rig.turn(_turn("nobody"), rig.prompt("unknown session", 30), 10)
    assert generation.session == "unknown"
    generation.check()
    rig.check_exact(generation)


def test_closing_from_outside(rig: Rig) -> None:
    rig.turn(_turn("closed", "open"), rig.prompt("closed", 60))
    rig.close_session("closed", 2)
    rig.close_session("nobody", 1)
    assert _known(rig, "closed").epoch == 1, "closed for another epoch"
    _close(rig, "closed")


def test_closing_while_a_turn_runs_waits_for_its_end(rig: Rig) -> None:
    async def close() -> None:
        request = rig.request(rig.prompt("closed while it runs", 40), 100, session=_turn("busy", "open"))
        generation = rig.begin(request)
        await rig.has_made(generation, 2)
        rig.backend.close_session("busy", 1)
        running = await _find(rig, "busy")
        if generation.terminal is None:
            assert running is not None
            assert (running.active_turns, running.expires_in) == (1, None)
        await rig.ended(generation)
        generation.check()
        rig.check_exact(generation)
        assert await _idle(rig, "busy") is None

    rig.run(close())


def test_an_aborted_turn_is_over(rig: Rig) -> None:
    async def abort() -> None:
        generation = rig.begin(rig.request(rig.prompt("aborted turn", 40), 1000, session=_turn("aborted", "open")))
        await rig.has_made(generation, 5)
        await rig.cancel(generation)
        report = await _idle(rig, "aborted")
        assert report is not None
        assert (report.turns, report.prompt_tokens) == (1, 40)
        assert 5 <= report.generated_tokens < 1000

    rig.run(abort())
    _close(rig, "aborted")


def test_a_refused_turn_begins_nothing(rig: Rig) -> None:
    refused = rig.turn(_turn("refused", "open"), (-1, 2, 3))
    assert refused.fault.code == "invalid_token"
    assert _report(rig, "refused") is None


def test_it_runs_out(rig: Rig) -> None:
    """From the end of its last turn, and not from its beginning."""

    async def run_out() -> None:
        session = _turn("brief", "open", timeout=0.05)
        await rig.finish([rig.request(rig.prompt("brief", 40), 2, session=session)])
        while await _find(rig, "brief") is not None:
            await rig.breathe()
        await rig.until(lambda: rig.backend.stats().sessions == 0)

    rig.run(run_out())
    assert rig.turn(_turn("brief"), rig.prompt("brief", 40)).session == "unknown"


def test_it_does_not_run_out_while_a_turn_runs(rig: Rig) -> None:
    async def outlive() -> None:
        session = _turn("longer", "open", timeout=0.001)
        generation = rig.begin(rig.request(rig.prompt("longer", 40), 300, session=session))
        await rig.has_made(generation, 150)
        report = await _find(rig, "longer")
        assert generation.terminal is not None or report is not None
        await rig.ended(generation)
        rig.check_exact(generation)
        while await _find(rig, "longer") is not None:
            await rig.breathe()

    rig.run(outlive())


def test_a_later_epoch_takes_the_earlier_ones_place(rig: Rig) -> None:
    prompt = rig.prompt("epochs", 40)
    rig.turn(_turn("reborn", "open", epoch=1), prompt)
    assert rig.turn(_turn("reborn", "open", epoch=2), prompt).session == "open"
    report = _known(rig, "reborn")
    assert (report.epoch, report.turns) == (2, 1)
    assert rig.backend.stats().sessions == 1
    assert rig.turn(_turn("reborn", "continue", epoch=1), prompt).session == "unknown"
    assert rig.turn(_turn("reborn", "open", epoch=1), prompt).session == "unknown"
    assert _known(rig, "reborn").epoch == 2
    rig.close_session("reborn", 1)
    assert _known(rig, "reborn").epoch == 2
    _close(rig, "reborn", 2)


def test_over_quota_is_served_without_a_lease(rig: Rig) -> None:
    for name in MANY:
        assert rig.turn(_turn(name, "open"), rig.prompt(name, 30)).session == "open"
    over = rig.turn(_turn("one too many", "open"), rig.prompt("one too many", 30), 10)
    assert over.session == "over_quota"
    over.check()
    rig.check_exact(over)
    assert rig.backend.stats().sessions == MAX_SESSIONS
    assert {report.id for report in rig.describe(*MANY, "one too many")} == set(MANY)
    for name in MANY:
        rig.close_session(name, 1)
    rig.run(rig.until(lambda: rig.backend.stats().sessions == 0))
    assert not rig.describe(*MANY)


def test_two_turns_of_one_session_at_once(rig: Rig) -> None:
    async def two() -> None:
        await rig.finish([rig.request(rig.prompt("two turns", 40), 2, session=_turn("two", "open"))])
        generations = await rig.finish(
            [rig.request(rig.prompt(f"two turns {number}", 40), 40, session=_turn("two")) for number in range(2)]
        )
        for generation in generations:
            assert generation.session == "open"
            generation.check()
        rig.check_exact(*generations)
        report = await _idle(rig, "two")
        assert report is not None
        assert report.turns == 3

    rig.run(two())
    _close(rig, "two")


def test_a_lease_keeps_what_others_would_push_out(rig: Rig) -> None:
    size = rig.model.block_size
    prompt = rig.prompt("kept", 20 * size + 1)
    rig.turn(_turn("keeper", "open"), prompt)
    for number in range(KV_TOKENS // rig.model.context_length + 2):
        rig.say(rig.prompt(f"pushing {number}", rig.model.context_length - 100), 2)
    report = _known(rig, "keeper")
    again = rig.turn(_turn("keeper"), prompt, 10)
    assert again.session == "open"
    rig.check_exact(again)
    if rig.lacks("leases"):
        assert report.kv_blocks == 0
    else:
        assert report.kv_blocks == 20
        assert rig.backend.stats().kv_blocks_leased >= 20
        assert again.cached_tokens == 20 * size
    _close(rig, "keeper")


def test_closing_frees_what_only_it_held(rig: Rig) -> None:
    size = rig.model.block_size
    prompt = rig.prompt("freed", 6 * size + 1)
    names = block_hashes(prompt, size)
    rig.turn(_turn("freed", "open"), prompt)
    rig.run(rig.until(lambda: rig.tap.replay.overlap(names) == 6))
    _close(rig, "freed")
    if rig.lacks("leases"):
        assert rig.say(prompt, 4).cached_tokens in (0, 6 * size)
    else:
        rig.run(rig.until(lambda: rig.tap.replay.overlap(names) == 0))
        assert rig.say(prompt, 4).cached_tokens == 0


def test_what_is_reported_as_written_is_kept(rig: Rig) -> None:
    """An engine reports what it leases for marks, and what of it is new. One that cannot lease reports nothing."""
    size = rig.model.block_size
    prompt = rig.prompt("marked", 10 * size + 1)
    marks = (Mark(4 * size + 1, 60.0), Mark(8 * size, 30.0))
    first, second = (rig.say(prompt, 4, marks=marks) for _ in range(2))
    rig.check_exact(first)
    reports = [generation.report for generation in (first, second)]
    if rig.lacks("leases"):
        assert [(report.retained, report.written, report.tier) for report in reports] == [((), (), None)] * 2
        return
    kept = (Mark(4 * size, 60.0), Mark(8 * size, 30.0))
    assert [(report.retained, report.tier) for report in reports] == [(kept, "device")] * 2
    assert [report.written for report in reports] == [(4 * size, 4 * size), (0, 0)]


def test_retention_without_a_session(rig: Rig) -> None:
    """It is a wish, and hurts nobody: who asks for it is served like others, and the KV outlives the rest where that can be."""
    size = rig.model.block_size
    prompt = rig.prompt("retained", 10 * size + 1)
    generation = rig.say(prompt, 10, retention_seconds=30.0, priority=2)
    rig.check_exact(generation)
    for number in range(KV_TOKENS // rig.model.context_length + 2):
        rig.say(rig.prompt(f"pushing {number}", rig.model.context_length - 100), 2)
    again = rig.say(prompt, 4)
    rig.check_exact(again)
    assert again.cached_tokens == 10 * size or rig.lacks("leases")
