"""Sessions in the engine: every row of the table in docs, each against a model that really computes."""

from __future__ import annotations

import math
from typing import Any

from penstock.engine.engine import Engine
from penstock.kv.cache import KVCache
from penstock.kv.radix import Node
from penstock.kv.sessions import MAX_LEASE_SECONDS, Sessions
from penstock.wire.messages import Mark, PromptReport, SessionAction, SessionReport, SessionTurn, Submit
from tiny_models import Collected, generation_id, make_engine, make_submit, random_prompt, reference_tokens, run


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turn(number: int, prompt: list[int], session: str, action: SessionAction = "continue", *, epoch: int = 1, **fields: Any) -> Submit:
    timeout = fields.pop("timeout", 300.0)
    return make_submit(number, prompt, fields.pop("max_tokens", 4), session=SessionTurn(session, action, timeout, epoch), **fields)


def state(collected: Collected, number: int) -> str | None:
    report = collected.deltas[generation_id(number)][0].prompt
    assert report is not None
    return report.session


def cached(collected: Collected, number: int) -> int:
    report = collected.deltas[generation_id(number)][0].prompt
    assert report is not None
    return report.cached_tokens


PROMPT = random_prompt(1, 64)
# A prompt of 64 tokens and 4 generated ones, of which the last has no KV: four full pages and a tail.
PAGES = 4


def test_open_continue_close() -> None:
    engine = make_engine()
    first = run(engine, [turn(0, PROMPT, "a", "open")])
    assert state(first, 0) == "open"
    assert engine.stats().kv_blocks_leased == PAGES
    longer = [*PROMPT, *first.tokens[generation_id(0)], *random_prompt(2, 30)]
    second = run(engine, [turn(1, longer, "a")])
    assert (state(second, 1), cached(second, 1)) == ("open", 64)
    session = engine.sessions.get("a")
    assert session is not None
    assert (session.usage.turns, session.usage.prompt_tokens, session.usage.cached_tokens) == (2, 64 + 98, 64)
    assert (session.usage.generated_tokens, session.pages) == (8, 6)
    assert engine.close_session("a", 1)
    assert (engine.stats().kv_blocks_cached, engine.stats().sessions) == (0, 0), "nobody else held any of it"
    assert state(run(engine, [turn(2, longer, "a")]), 2) == "unknown"
    assert not engine.close_session("a", 1)


def test_close_on_a_turn_is_carried_out_when_the_last_turn_ends() -> None:
    engine = make_engine()
    engine.submit(turn(0, PROMPT, "a", "open", max_tokens=30))
    collected = Collected()
    collected.step(engine)
    engine.submit(turn(1, [*PROMPT[:32], 1, 2, 3], "a", "close", max_tokens=5))
    while generation_id(1) not in collected.terminals:
        collected.step(engine)
    assert engine.sessions.get("a") is not None, "the other turn still runs"
    while engine.has_work:
        collected.step(engine)
    assert engine.sessions.get("a") is None
    assert engine.stats().kv_blocks_cached == 0
    assert collected.tokens[generation_id(0)] == reference_tokens("llama", PROMPT, 30)
    assert (state(collected, 0), state(collected, 1)) == ("open", "open")


def test_closing_frees_exactly_the_pages_that_only_it_held() -> None:
    engine = make_engine(kv_pages=128)
    common = random_prompt(7, 64)
    run(engine, [turn(0, common + random_prompt(1, 64), "a", "open"), turn(1, common + random_prompt(2, 32), "b", "open")])
    run(engine, [make_submit(2, common[:32] + random_prompt(3, 32), 4)])
    before = engine.stats()
    assert engine.close_session("a", 1)
    engine.check_integrity()
    assert before.kv_blocks_cached - engine.stats().kv_blocks_cached == 4, "its own four pages, not the four that it shared"
    assert cached(run(engine, [turn(3, common + random_prompt(2, 32), "b")]), 3) == 80
    assert engine.close_session("b", 1)
    engine.check_integrity()
    again = run(engine, [make_submit(4, [*common, 1, 2, 3], 1)])
    assert cached(again, 4) == 32, "the two pages that somebody without a session had used"


def test_a_late_finish_of_an_earlier_epoch_changes_nothing() -> None:
    engine = make_engine()
    engine.submit(turn(0, PROMPT, "a", "open", epoch=1, max_tokens=40))
    collected = Collected()
    collected.step(engine)
    assert state(run_one(engine, collected, turn(1, random_prompt(4, 64), "a", "open", epoch=2)), 1) == "open"
    session = engine.sessions.get("a")
    assert session is not None
    held, usage = set(session.lease.nodes), vars(session.usage).copy()
    ends_at = session.lease.ends_at
    assert not engine.close_session("a", 1), "a late close of the earlier epoch"
    while engine.has_work:
        collected.step(engine)
    assert engine.sessions.get("a") is session
    assert (session.lease.nodes, vars(session.usage), session.lease.ends_at) == (held, usage, ends_at)
    assert collected.tokens[generation_id(0)] == reference_tokens("llama", PROMPT, 40)
    late = run(engine, [turn(2, PROMPT, "a", epoch=1), turn(3, PROMPT, "a", "open", epoch=1)])
    assert (state(late, 2), state(late, 3)) == ("unknown", "unknown")
    assert vars(session.usage) == usage


def test_a_close_that_was_put_off_does_not_close_a_later_epoch() -> None:
    engine = make_engine()
    engine.submit(turn(0, PROMPT, "a", "open", epoch=1, max_tokens=40))
    collected = Collected()
    collected.step(engine)
    assert engine.close_session("a", 1)
    run_one(engine, collected, turn(1, random_prompt(4, 64), "a", "open", epoch=2))
    while engine.has_work:
        collected.step(engine)
    assert engine.sessions.get("a") is not None


def run_one(engine: Engine, collected: Collected, request: Submit) -> Collected:
    """Until this one has ended, whatever else runs."""
    engine.submit(request)
    while request.id not in collected.terminals:
        collected.step(engine)
    return collected


def test_the_lease_slides_from_the_end_of_the_last_active_turn() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    collected = Collected()
    engine.submit(turn(0, PROMPT, "a", "open", timeout=10, max_tokens=40))
    engine.submit(turn(1, PROMPT, "a", max_tokens=3))
    while generation_id(1) not in collected.terminals:
        collected.step(engine)
    clock.now = 100.0
    collected.step(engine)
    assert engine.sessions.get("a") is not None, "a turn that runs keeps it alive"
    while engine.has_work:
        collected.step(engine)
    assert engine.next_expiry == 110.0
    clock.now = 109.9
    engine.step()
    assert engine.sessions.get("a") is not None
    clock.now = 110.0
    engine.step()
    engine.check_integrity()
    assert engine.sessions.get("a") is None
    assert (engine.stats().kv_blocks_leased, engine.stats().kv_blocks_cached) == (0, 6), "nobody has closed it: its KV may still be of use"
    assert cached(run(engine, [turn(2, [*PROMPT, 1], "a", "open")]), 2) == 64


def test_a_turn_that_continues_stops_the_lease_from_running() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    run(engine, [turn(0, PROMPT, "a", "open", timeout=10)])
    clock.now = 9.0
    engine.submit(turn(1, PROMPT, "a", max_tokens=20))
    collected = Collected()
    collected.step(engine)
    clock.now = 30.0
    collected.step(engine)
    assert engine.sessions.get("a") is not None
    while engine.has_work:
        collected.step(engine)
    assert engine.next_expiry == 40.0


def test_a_turn_that_goes_on_from_elsewhere_counts_what_it_made_here() -> None:
    engine = make_engine()
    run(engine, [turn(0, [*PROMPT, 5, 6, 7], "a", "open", max_tokens=10, offset=3)])
    session = engine.sessions.get("a")
    assert session is not None
    assert session.usage.generated_tokens == 7


def test_the_worker_gives_the_front_end_a_grace_to_close_first() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, session_grace=5.0)
    run(engine, [turn(0, PROMPT, "a", "open", timeout=10)])
    assert engine.next_expiry == 15.0


def test_a_front_end_that_ends_a_session_says_whether_the_client_is_done_with_it() -> None:
    engine = make_engine()
    run(engine, [turn(0, PROMPT, "a", "open"), turn(1, random_prompt(9, 64), "b", "open")])
    assert engine.close_session("a", 1, frees=False)
    assert (engine.stats().kv_blocks_leased, engine.stats().kv_blocks_cached) == (PAGES, 2 * PAGES)
    engine.submit(turn(2, random_prompt(9, 64), "b"))
    assert engine.close_session("b", 1)
    assert engine.close_session("b", 1, frees=False), "it ran out while the close waited for the turn"
    run(engine, [])
    assert (engine.stats().kv_blocks_leased, engine.stats().kv_blocks_cached) == (0, PAGES)


def leased(engine: Engine, *prompts: list[int]) -> list[int]:
    """How many of the leading tokens of each prompt are leased."""
    engine.check_integrity()
    session = engine.sessions.get("a")
    assert session is not None
    keys = {node.key: node for node in session.lease.nodes}
    found = []
    for prompt in prompts:
        blocks = [tuple(prompt[start : start + 16]) for start in range(0, len(prompt), 16)]
        found.append(16 * next((number for number, block in enumerate(blocks) if block not in keys), len(blocks)))
    return found


THINKING, ANSWER, QUESTION, SUMMARY = (random_prompt(number, 32) for number in range(20, 24))


def test_a_turn_supersedes_what_it_does_not_continue() -> None:
    """Without its thinking, then a history that was made shorter: the rest loses the lease, and nothing is freed."""
    engine = make_engine()
    run(engine, [turn(0, [*PROMPT, *THINKING, *ANSWER, 1], "a", "open")])
    run(engine, [turn(1, [*PROMPT, *ANSWER, *QUESTION, 1], "a")])
    assert leased(engine, [*PROMPT, *THINKING], [*PROMPT, *ANSWER, *QUESTION]) == [64, 128]
    assert engine.stats().kv_blocks_leased == 8
    assert cached(run(engine, [make_submit(2, [*PROMPT, *THINKING, *ANSWER, 1], 1)]), 2) == 128, "it is cached still"
    run(engine, [turn(3, [*SUMMARY, *QUESTION, 1], "a")])
    assert leased(engine, PROMPT, [*SUMMARY, *QUESTION]) == [0, 64]
    assert engine.stats().kv_blocks_leased == 4


def test_what_was_superseded_is_evicted_first() -> None:
    engine = make_engine(kv_pages=16)
    run(engine, [make_submit(0, random_prompt(30, 64), 1)])
    run(engine, [turn(1, [*PROMPT, *THINKING, 1], "a", "open")])
    run(engine, [turn(2, [*PROMPT, *ANSWER, 1], "a")])
    run(engine, [make_submit(3, random_prompt(31, 80), 1)])
    assert cached(run(engine, [make_submit(4, [*random_prompt(30, 64), 1], 1)]), 4) == 64, "older, but of use to somebody"
    assert cached(run(engine, [make_submit(5, [*PROMPT, *THINKING, 1], 1)]), 5) == 64


def test_other_sessions_keep_what_one_has_superseded() -> None:
    engine = make_engine()
    run(engine, [turn(0, [*PROMPT, *THINKING, 1], "a", "open"), turn(1, [*PROMPT, *THINKING, 1], "a/sub", "open")])
    run(engine, [turn(2, [*SUMMARY, 1], "a")])
    other = engine.sessions.get("a/sub")
    assert other is not None
    assert (leased(engine, PROMPT), other.pages) == ([0], 6)


def test_turns_that_overlap_do_not_supersede_each_other() -> None:
    """Two branches run at once, and are continued at once. When one goes on alone, the other is superseded."""
    engine = make_engine()
    left, right = [*PROMPT, *THINKING], [*PROMPT, *ANSWER]
    run(engine, [turn(0, PROMPT, "a", "open")])
    run(engine, [turn(1, [*left, 1], "a", max_tokens=9), turn(2, [*right, 1], "a")])
    assert leased(engine, left, right) == [96, 96]
    run(engine, [turn(3, [*left, *QUESTION, 1], "a"), turn(4, [*right, *QUESTION, 1], "a", max_tokens=9)])
    assert leased(engine, [*left, *QUESTION], [*right, *QUESTION]) == [128, 128]
    run(engine, [turn(5, [*right, *QUESTION, *SUMMARY, 1], "a")])
    assert leased(engine, left, [*right, *QUESTION, *SUMMARY]) == [64, 160]


def test_a_turn_that_waits_keeps_the_branch_that_it_may_continue() -> None:
    engine = make_engine(max_batch=1)
    left, right = [*PROMPT, *THINKING], [*PROMPT, *ANSWER]
    run(engine, [turn(0, [*left, 1], "a", "open"), turn(1, [*right, 1], "a", "open")])
    collected = Collected()
    engine.submit(turn(2, [*left, *QUESTION, 1], "a"))
    engine.submit(turn(3, [*right, *QUESTION, 1], "a"))
    while generation_id(2) not in collected.terminals:
        collected.step(engine)
    assert leased(engine, right) == [96]
    while engine.has_work:
        collected.step(engine)
    assert cached(collected, 3) == 96
    assert leased(engine, [*left, *QUESTION], [*right, *QUESTION]) == [128, 128], "they overlapped"


def test_a_turn_that_was_cancelled_early_supersedes_nothing() -> None:
    engine = make_engine(token_budget=16)
    run(engine, [turn(0, [*PROMPT, *THINKING, 1], "a", "open")])
    engine.submit(turn(1, [*SUMMARY, *QUESTION, 1], "a"))
    engine.step()
    engine.cancel(generation_id(1))
    assert leased(engine, [*PROMPT, *THINKING]) == [96]
    run(engine, [turn(2, [*PROMPT, *ANSWER, 1], "a")])
    assert leased(engine, [*PROMPT, *ANSWER], [*PROMPT, *THINKING], SUMMARY) == [96, 64, 0]


def test_the_turns_of_a_conversation_that_only_grows_cost_nothing_more() -> None:
    """Each turn goes on from the one before: there is nothing to look for."""
    cache = KVCache(512, 4)
    sessions = Sessions(cache, 1, 0.0)
    session, _ = sessions.begin_turn(SessionTurn("a", "open"))
    assert session is not None
    path: list[Node] = []
    for number in range(100):
        parent = path[-1] if path else cache.root(b"")
        path += cache.commit(parent, [(number,) * 4], cache.allocate(1, 0.0), session.lease)
        sessions.supersede(session, number, path, [])
        assert (len(session.branches), session.pages) == (1, number + 1)


def test_over_quota_is_served_without_a_lease() -> None:
    engine = make_engine(max_sessions=1)
    collected = run(engine, [turn(0, PROMPT, "a", "open"), turn(1, PROMPT[:40], "b", "open"), turn(2, PROMPT, "a", "open")])
    assert [state(collected, number) for number in range(3)] == ["open", "over_quota", "open"]
    assert collected.tokens[generation_id(1)] == reference_tokens("llama", PROMPT[:40], 4)
    assert len(engine.sessions) == 1
    engine.close_session("a", 1)
    assert state(run(engine, [turn(3, PROMPT, "b", "open")]), 3) == "open"


def test_opening_again_takes_a_close_back() -> None:
    engine = make_engine()
    engine.submit(turn(0, PROMPT, "a", "open", max_tokens=20))
    collected = Collected()
    collected.step(engine)
    engine.close_session("a", 1)
    run_one(engine, collected, turn(1, PROMPT, "a", "open", timeout=77))
    while engine.has_work:
        collected.step(engine)
    session = engine.sessions.get("a")
    assert session is not None
    assert session.lease.seconds == 77


def test_an_aborted_turn_ends_like_any_other() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, token_budget=16)
    engine.submit(turn(0, PROMPT, "a", "open", timeout=10))
    engine.step()
    engine.submit(turn(1, PROMPT, "a", "close"))
    engine.cancel(generation_id(0))
    engine.cancel(generation_id(1))
    engine.check_integrity()
    assert engine.sessions.get("a") is None
    assert engine.stats().kv_blocks_cached == 0


def test_retention_outlives_others_and_then_is_ordinary() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, kv_pages=16, lease_share=1.0)
    run(engine, [make_submit(0, PROMPT, 4, retention_seconds=60.0)])
    for number in range(1, 6):
        run(engine, [make_submit(number, random_prompt(number + 10, 100), 4)])
    assert cached(run(engine, [make_submit(9, [*PROMPT, 1], 1)]), 9) == 64
    clock.now = 61.0
    engine.step()
    engine.check_integrity()
    assert engine.stats().kv_blocks_leased == 0
    for number in range(11, 16):
        run(engine, [make_submit(number, random_prompt(number + 10, 100), 4)])
    assert cached(run(engine, [make_submit(19, [*PROMPT, 1], 1)]), 19) == 0


def report(collected: Collected, number: int) -> PromptReport:
    found = collected.deltas[generation_id(number)][0].prompt
    assert found is not None
    return found


def leased_until(engine: Engine, prompt: list[int]) -> list[float]:
    """When the last lease ends on each of the prompt's full blocks."""
    blocks = [tuple(prompt[start : start + 16]) for start in range(0, len(prompt) - 15, 16)]
    held = [(node.key, lease.ends_at) for lease in engine.sessions.leases for node in lease.nodes]
    return [max((ends_at for key, ends_at in held if key == block), default=0.0) for block in blocks]


def test_marks_lease_the_prompt_up_to_their_place_each_for_its_time() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    told = run(engine, [make_submit(0, PROMPT, 40, marks=(Mark(20, 3600.0), Mark(50, 300.0)))])
    first = report(told, 0)
    assert first == PromptReport(0, None, None, (Mark(16, 3600.0), Mark(48, 300.0)), (16, 32), "device")
    assert leased_until(engine, [*PROMPT, *told.tokens[generation_id(0)]]) == [3600.0, 300.0, 300.0, 0.0, 0.0, 0.0], "not the answer"
    clock.now = 300.0
    engine.step()
    engine.check_integrity()
    assert leased_until(engine, PROMPT) == [3600.0, 0.0, 0.0, 0.0]
    again = report(run(engine, [make_submit(1, [*PROMPT, 1], 1, marks=(Mark(20, 3600.0), Mark(50, 300.0)))]), 1)
    assert again == PromptReport(64, None, None, (Mark(16, 3600.0), Mark(48, 300.0)), (0, 0), "device"), "read, not written"
    assert leased_until(engine, PROMPT) == [3900.0, 600.0, 600.0, 0.0], "and kept for longer"


def test_a_shorter_mark_is_not_counted_where_a_longer_one_is() -> None:
    engine = make_engine()
    run(engine, [make_submit(0, [*PROMPT[:16], 1], 1)])
    told = report(run(engine, [make_submit(1, PROMPT, 1, marks=(Mark(64, 3600.0), Mark(32, 300.0), Mark(10, 60.0)))]), 1)
    assert (told.cached_tokens, told.written) == (16, (48, 0, 0))
    assert told.retained == (Mark(64, 3600.0), Mark(32, 300.0), Mark(0, 60.0))
    assert report(run(engine, [make_submit(2, PROMPT, 1)]), 2).tier is None, "nothing was asked for"


def test_what_was_reported_is_leased_however_the_generation_ends() -> None:
    """A stop string of the client ends it by a cancel. Before the first token, nothing was reported."""
    clock = Clock()
    engine = make_engine(clock=clock, token_budget=16)
    collected = Collected()
    engine.submit(make_submit(0, PROMPT, 400, marks=(Mark(64, 300.0),)))
    collected.step(engine)
    engine.cancel(generation_id(0))
    assert engine.stats().kv_blocks_leased == 0
    engine.submit(make_submit(1, PROMPT, 400, marks=(Mark(64, 300.0),)))
    while generation_id(1) not in collected.deltas:
        collected.step(engine)
    assert report(collected, 1).retained == (Mark(64, 300.0),)
    assert leased_until(engine, PROMPT) == [300.0] * 4
    clock.now = 200.0
    engine.cancel(generation_id(1))
    engine.check_integrity()
    assert leased_until(engine, PROMPT) == [500.0] * 4, "from its end on"


def test_where_leases_protect_nothing_nothing_is_retained() -> None:
    engine = make_engine(lease_share=0.0)
    told = report(run(engine, [make_submit(0, PROMPT, 1, marks=(Mark(64, 300.0),))]), 0)
    assert (told.retained, told.written, told.tier) == ((), (), None)


def test_the_choices_of_a_request_lease_their_prompt_once() -> None:
    engine = make_engine()
    run(engine, [make_submit(number, PROMPT, 4, marks=(Mark(64, 300.0),)) for number in range(8)])
    assert len(engine.sessions.leases) == 1


def test_lease_times_are_clamped() -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    for number, timeout in enumerate([math.nan, -5.0, 0.0]):
        run(engine, [turn(number, PROMPT, f"session {number}", "open", timeout=timeout)])
        engine.step()
        assert len(engine.sessions) == 0
    run(engine, [turn(8, PROMPT, "for ever", "open", timeout=math.inf, retention_seconds=math.inf)])
    run(engine, [make_submit(9, random_prompt(5, 40), 4, retention_seconds=math.nan)])
    assert engine.next_expiry == MAX_LEASE_SECONDS
    clock.now = MAX_LEASE_SECONDS
    engine.step()
    assert (len(engine.sessions), engine.stats().kv_blocks_leased) == (0, 0)


def test_retention_again_and_again_takes_no_more_memory() -> None:
    engine = make_engine(kv_pages=8)
    for number in range(200):
        run(engine, [make_submit(number, PROMPT[:20], 1, retention_seconds=3600.0)])
    assert len(engine.sessions.leases) <= 2 * 8 + 64


def test_a_session_is_described() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, session_grace=5.0)
    collected = run(engine, [turn(0, PROMPT, "a", "open", timeout=100.0), turn(1, PROMPT, "b", "open", epoch=7)])
    engine.submit(turn(2, [*PROMPT, 1, 2], "b", epoch=7))
    clock.now = 15.0
    first, second = engine.describe_sessions(["nobody", "a", "b"])
    assert first == SessionReport("a", 1, PAGES, 1, 0, 64, cached(collected, 0), 4, 85.0, "device")
    assert (second.id, second.epoch, second.turns, second.active_turns, second.expires_in) == ("b", 7, 2, 1, None)


def test_a_hundred_thousand_sessions_come_and_go_in_no_time() -> None:
    """None is left, and none is looked at but those that end: with a look at all for each, this would take minutes."""
    sessions = Sessions(KVCache(4, 4), max_sessions=100_000, grace_seconds=0.0)
    for number in range(100_000):
        for _ in range(3):
            session, _ = sessions.begin_turn(SessionTurn(f"session {number}", "open", 10.0 + number % 7, 1))
            assert session is not None
            sessions.end_turn(session, number / 1000)
        sessions.expire(number / 1000)
    assert 10_000 < len(sessions) < 20_000
    sessions.expire(1000.0)
    assert (len(sessions), sessions.next_expiry) == (0, math.inf)


def test_a_turn_that_begins_just_before_the_end_keeps_the_session() -> None:
    sessions = Sessions(KVCache(4, 4), max_sessions=10, grace_seconds=0.0)
    session, _ = sessions.begin_turn(SessionTurn("a", "open", 10.0, 1))
    assert session is not None
    sessions.end_turn(session, 0.0)
    sessions.begin_turn(SessionTurn("a", "continue", 10.0, 1))
    sessions.expire(10.0)
    assert len(sessions) == 1
    sessions.end_turn(session, 12.0)
    sessions.expire(21.0)
    assert (len(sessions), sessions.next_expiry) == (1, 22.0)
    sessions.expire(22.0)
    assert len(sessions) == 0


def test_a_newer_incarnation_finds_what_the_earlier_one_left() -> None:
    engine = make_engine()
    run(engine, [turn(0, PROMPT, "a", "open", epoch=1)])
    leased = engine.stats().kv_blocks_leased
    collected = run(engine, [turn(1, [*PROMPT, 1, 2], "a", "open", epoch=2)])
    assert cached(collected, 1) == len(PROMPT), "the front end had forgotten the session, and not the worker"
    assert (len(engine.sessions), engine.stats().kv_blocks_leased >= leased) == (1, True)
    assert not engine.close_session("a", 1)
    assert engine.close_session("a", 2)
    assert engine.stats().kv_blocks_leased == engine.stats().kv_blocks_cached == 0
    engine.check_integrity()


def opened(sessions: Sessions, lane: str, number: int, now: float, timeout: float = 100.0) -> str | None:
    """The state of a new session of this tenant, after a turn that ended at once."""
    session, state = sessions.begin_turn(SessionTurn(f"{lane}{number}", "open", timeout, 1), lane)
    if session is not None:
        sessions.end_turn(session, now)
    return state


def test_a_tenant_below_its_share_opens_sessions_though_another_has_taken_all() -> None:
    sessions = Sessions(KVCache(8, 4), 8, 0.0)
    assert [opened(sessions, "a", number, float(number)) for number in range(9)] == ["open"] * 8 + ["over_quota"]
    assert [opened(sessions, "b", number, 50.0) for number in range(5)] == ["open"] * 4 + ["over_quota"]
    assert [session.id for session in sessions] == ["a4", "a5", "a6", "a7", "b0", "b1", "b2", "b3"], "those that would end first went"
    assert [opened(sessions, "c", number, 60.0) for number in range(3)] == ["open", "open", "over_quota"]
    assert sessions.evicted == 6
    assert opened(sessions, "a", 0, 70.0) == "over_quota", "it is at its share"


def test_only_tenants_below_their_share_take_sessions_from_others() -> None:
    sessions = Sessions(None, 10, 0.0)
    for lane, count in {"a": 6, "b": 3, "c": 1}.items():
        assert [opened(sessions, lane, number, 1.0) for number in range(count)] == ["open"] * count
    assert opened(sessions, "b", 9, 2.0) == "over_quota", "four of ten are more than a third"
    assert opened(sessions, "c", 9, 2.0) == "open"


def test_sessions_with_an_active_turn_are_not_taken_away() -> None:
    sessions = Sessions(KVCache(8, 4), 2, 0.0)
    active = [sessions.begin_turn(SessionTurn(f"a{number}", "open", 10.0, 1), "a")[0] for number in range(2)]
    assert opened(sessions, "b", 0, 1.0) == "over_quota"
    assert active[1] is not None
    sessions.end_turn(active[1], 2.0)
    assert opened(sessions, "b", 0, 3.0) == "open"
    assert active[0] is not None
    assert not active[0].is_over


def test_the_kv_of_a_session_that_made_room_stays_cached() -> None:
    engine = make_engine(max_sessions=1)
    run(engine, [turn(0, PROMPT, "a", "open", lane="a")])
    other = run(engine, [turn(1, random_prompt(5, 64), "b", "open", lane="b")])
    assert state(other, 1) == "over_quota", "one session is one tenant's share"
    engine = make_engine(max_sessions=2)
    run(engine, [turn(0, PROMPT, "a", "open", lane="a"), turn(1, random_prompt(4, 64), "c", "open", lane="a")])
    other = run(engine, [turn(2, random_prompt(5, 64), "b", "open", lane="b")])
    assert state(other, 2) == "open"
    again = run(engine, [turn(3, PROMPT, "a", "continue", lane="a")])
    assert state(again, 3) == "unknown"
    assert cached(again, 3) > 0
    assert engine.stats().sessions_evicted == 1


def test_tenants_that_come_and_go_leave_nothing_behind() -> None:
    sessions = Sessions(None, 4, 0.0)
    for number in range(100):
        assert opened(sessions, f"tenant {number}", 0, float(number), timeout=1.0) == "open"
        sessions.expire(number + 2.0)
    assert len(sessions) == 0
    assert [opened(sessions, "a", number, 200.0) for number in range(5)] == ["open"] * 4 + ["over_quota"]
