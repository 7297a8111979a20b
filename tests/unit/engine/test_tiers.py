"""KV that was in host memory or on disk gives the tokens that it gave before."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.disk_tier import DiskTier
from penstock.engine.engine import Engine
from penstock.wire.messages import Finish, Sampling, SessionTurn, Submit
from tiny_models import Collected, generation_id, make_engine, make_submit, random_prompt

AGENTS, TURNS, TOKENS = 5, 2, 20
PAGES = 14
"""Enough for one agent, and hardly for another."""
DRAWN = Sampling(temperature=0.8, top_p=0.9)


def drive(engine: Engine, requests: Sequence[Submit], news: threading.Event, earlier: Collected | None = None) -> Collected:
    """Steps until all have ended. While the engine waits for its disk, so does this."""
    collected = Collected() if earlier is None else earlier
    for request in requests:
        engine.submit(request)
    while not collected.terminals.keys() >= {request.id for request in requests}:
        news.clear()
        collected.step(engine)
        if not engine.has_work and not collected.terminals.keys() >= {request.id for request in requests}:
            engine.check_idle()
            assert news.wait(10)
    assert all(terminal == Finish("length") for terminal in collected.terminals.values())
    return collected


def settle(engine: Engine, news: threading.Event) -> None:
    """Until all that is in host memory is on disk."""
    while engine.has_work or engine.stats().kv_disk_blocks > engine.stats().kv_tier_events.get("disk stored", 0):
        news.clear()
        Collected().step(engine)
        if not engine.has_work and engine.stats().kv_disk_blocks > engine.stats().kv_tier_events.get("disk stored", 0):
            assert news.wait(10)


class SlowClock:
    """Each look at it takes 10 ms. So computing is slow, and blocks are worth loading on any machine."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 0.01
        return self.now


class Agents:
    """Conversations that grow turn by turn, some of them at the same time."""

    def __init__(self, engine: Engine, news: threading.Event | None = None) -> None:
        self.engine = engine
        self.news = news or threading.Event()
        self.conversations = [random_prompt(number, 40 + 11 * number) for number in range(AGENTS)]
        self.number = 0
        self.cached: list[int] = []

    def turn(self, agents: Sequence[int], **fields: Any) -> None:
        requests = []
        for agent in agents:
            self.number += 1
            session = SessionTurn(f"agent {agent}", "open", epoch=1) if agent % 2 else None
            requests.append(make_submit(self.number, self.conversations[agent], TOKENS, seed=self.number, session=session, **fields))
        collected = drive(self.engine, requests, self.news)
        for agent, request in zip(agents, requests, strict=True):
            self.conversations[agent] += collected.tokens[request.id] + [3, 4, 5]
            report = collected.deltas[request.id][0].prompt
            assert report is not None
            self.cached.append(report.cached_tokens)

    def all_turns(self, **fields: Any) -> list[list[int]]:
        for _ in range(TURNS):
            for first in range(AGENTS):
                self.turn([first, (first + 2) % AGENTS], **fields)
        return self.conversations


def with_tiers(host_slots: int, disk: Path | None = None, **settings: Any) -> tuple[Engine, threading.Event]:
    engine = make_engine(clock=SlowClock(), kv_pages=PAGES, host_slots=host_slots, **settings)
    assert engine.copies is not None
    size = engine.copies.slots.layout.slot_bytes
    engine.use_tiers(None if disk is None else DiskTier(disk, engine.fingerprint(), size, 1000 * (size + 64)))
    news = threading.Event()
    engine.on_news(news.set)
    return engine, news


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """By an engine with pages for all."""
    return {"greedy": Agents(make_engine(kv_pages=512)).all_turns(), "drawn": Agents(make_engine(kv_pages=512)).all_turns(sampling=DRAWN)}


@pytest.mark.parametrize(("host_slots", "has_disk"), [(200, False), (20, True)])
def test_tokens_are_those_of_an_engine_with_pages_for_all(
    expected: dict[str, list[list[int]]], host_slots: int, has_disk: bool, tmp_path: Path
) -> None:
    engine, news = with_tiers(host_slots, tmp_path if has_disk else None)
    agents = Agents(engine, news)
    assert agents.all_turns() == expected["greedy"]
    events = engine.stats().kv_tier_events
    assert events["host loaded"] > 0
    assert bool(events.get("disk stored")) == has_disk
    assert "disk corrupt" not in events
    engine.close()


def test_drawn_tokens_too(expected: dict[str, list[list[int]]]) -> None:
    engine, news = with_tiers(200)
    agents = Agents(engine, news)
    assert agents.all_turns(sampling=DRAWN) == expected["drawn"]
    # Whatever was computed is never computed again.
    conversations = Agents(make_engine(kv_pages=512))
    conversations.all_turns(sampling=DRAWN)
    assert sum(agents.cached) >= 0.95 * sum(conversations.cached)


def test_a_restart_loads_from_disk(expected: dict[str, list[list[int]]], tmp_path: Path) -> None:
    engine, news = with_tiers(200, tmp_path)
    agents = Agents(engine, news)
    for _ in range(TURNS - 1):
        for first in range(AGENTS):
            agents.turn([first, (first + 2) % AGENTS])
    # Agents without a session are saved when they are evicted.
    settle(engine, news)
    before = engine.stats().kv_disk_blocks
    engine.close()
    assert before
    agents.engine, agents.news = with_tiers(200, tmp_path)
    assert agents.engine.stats().kv_disk_blocks == before
    for first in range(AGENTS):
        agents.turn([first, (first + 2) % AGENTS])
    assert agents.conversations == expected["greedy"]
    assert agents.engine.stats().kv_tier_events["disk loaded"] > 0
    agents.engine.close()


def test_a_close_frees_what_is_in_host_memory() -> None:
    engine, news = with_tiers(200)
    drive(engine, [make_submit(1, random_prompt(1, 100), 20, session=SessionTurn("agent", "open", epoch=1))], news)
    drive(engine, [make_submit(2, random_prompt(2, 200), 4)], news)
    assert engine.stats().kv_host_blocks >= 7
    engine.close_session("agent", 1)
    engine.check_integrity()
    assert engine.stats().kv_host_blocks == 0
    engine.close()


def test_a_session_says_where_its_kv_is(tmp_path: Path) -> None:
    engine, news = with_tiers(10, tmp_path)
    drive(engine, [make_submit(1, random_prompt(1, 100), 20, session=SessionTurn("agent", "open", epoch=1))], news)
    settle(engine, news)
    assert [report.tier for report in engine.describe_sessions(["agent"])] == ["device"]
    drive(engine, [make_submit(2, random_prompt(2, 200), 4)], news)
    assert [report.tier for report in engine.describe_sessions(["agent"])] == ["host"]
    for number in (3, 4, 5):
        drive(engine, [make_submit(number, random_prompt(number, 200), 4, session=SessionTurn(f"{number}", "open", epoch=1))], news)
        settle(engine, news)
    assert [report.tier for report in engine.describe_sessions(["agent"])] == ["disk"]
    engine.close()


def test_what_a_turn_supersedes_gives_way_first_where_it_is() -> None:
    """Nothing of it is on the device any more."""
    engine, news = with_tiers(26)
    once, other, then = random_prompt(1, 128), random_prompt(2, 220), random_prompt(3, 64)
    session = SessionTurn("agent", "open", epoch=1)
    drive(engine, [make_submit(1, [*once, 1], 1, session=session)], news)
    drive(engine, [make_submit(2, other, 1)], news)
    assert engine.stats().kv_blocks_leased == 0
    drive(engine, [make_submit(3, [*then, 1], 1, session=session)], news)
    for number in (4, 5):
        drive(engine, [make_submit(number, random_prompt(number, 220), 1)], news)
    assert engine.stats().kv_tier_events["host evicted"] == 12
    settle(engine, news)
    again = drive(engine, [make_submit(6, other, 1)], news)
    report = again.deltas[generation_id(6)][0].prompt
    assert report is not None
    assert report.cached_tokens == 144, "13 blocks, without the 4 that gave way behind the 8 of the session"
    engine.close()


def test_making_room_for_a_load_does_not_push_out_what_is_loaded() -> None:
    """What is evicted for it goes to the same tier, where the blocks that come are the oldest."""
    engine, news = with_tiers(20)
    prompts = [random_prompt(number, 150) for number in range(3)]
    for number, prompt in enumerate(prompts):
        drive(engine, [make_submit(number, prompt, 2)], news)
    again = drive(engine, [make_submit(10, [*prompts[0], 1], 2)], news)
    report = again.deltas[generation_id(10)][0].prompt
    assert report is not None
    assert report.cached_tokens == 144
    engine.close()


def test_generations_cancelled_while_they_load_leave_nothing(tmp_path: Path) -> None:
    engine, news = with_tiers(200, tmp_path)
    prompts = [random_prompt(number, 150) for number in range(4)]
    for number, prompt in enumerate(prompts):
        drive(engine, [make_submit(number, prompt, 2)], news)
    for number, prompt in enumerate(prompts, 10):
        engine.submit(make_submit(number, [*prompt, 1], 2))
        assert engine.transfers.imports == 1
        for _ in range(number % 3):
            Collected().step(engine)
        engine.cancel(generation_id(number))
        engine.check_integrity()
        while engine.has_work or engine.transfers.imports:
            Collected().step(engine)
        assert not engine.transfers.held_pages
    engine.close()


def test_a_prompt_in_a_tier_that_waits_for_pages_is_looked_up_again_only_when_they_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, news = with_tiers(200)
    assert engine.tiers is not None
    prompt = random_prompt(1, 150)
    for number, each in enumerate((prompt, random_prompt(2, 200))):
        drive(engine, [make_submit(number, each, 2)], news)
    collected, running = Collected(), make_submit(3, random_prompt(3, 120), 60)
    engine.submit(running)
    collected.step(engine)
    plan, planned = engine.tiers.plan, []

    def count(names: Iterable[bytes]) -> int:
        planned.append(len(collected.tokens[running.id]))
        return plan(names)

    monkeypatch.setattr(engine.tiers, "plan", count)
    again = drive(engine, [waiting := make_submit(4, [*prompt, 1], 2)], news, collected)
    assert len(again.tokens[running.id]) == 60, "it had to wait for all of it"
    # When it came, in its first step, and when the pages were free: then for each part that was loaded.
    assert len([tokens for tokens in planned if tokens < 59]) <= 2
    report = again.deltas[waiting.id][0].prompt
    assert report is not None
    assert report.cached_tokens == 144
    engine.close()
