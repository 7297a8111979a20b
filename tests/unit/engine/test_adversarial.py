"""Two hundred sessions on a pool that holds twenty, and everything that clients can do to them, in any order.

Every request ends with exactly the tokens that it would have had alone, nothing waits for ever, and the cache is sound after each step.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, multiple, rule

from penstock.wire.messages import SessionTurn, Submit
from replayed_events import apply_events
from tiny_models import Collected, make_engine, make_submit, random_prompt, run

SESSIONS = 200
# A session's conversation takes about three pages, so that twenty fill the pool.
PAGES = 60
BRANCHES = 4
LONGEST_ANSWER = 24


@functools.cache
def prompt_of(session: int, branch: int) -> tuple[int, ...]:
    """All begin alike, as with one system prompt; the branches of a session part at the end."""
    return (*random_prompt(0, 16), *random_prompt(session + 1, 20), *random_prompt(1000 + branch, 4 + branch * 5))


@functools.cache
def undisturbed() -> dict[tuple[int, ...], list[int]]:
    """What every prompt gives in an engine with room for all."""
    prompts = [prompt_of(session, branch) for session in range(SESSIONS) for branch in range(BRANCHES)]
    requests = [make_submit(number, prompt, LONGEST_ANSWER) for number, prompt in enumerate(prompts)]
    collected = run(make_engine(kv_pages=4096, token_budget=512), requests)
    return {request.token_ids: collected.tokens[request.id] for request in requests}


class Adversary(RuleBasedStateMachine):
    running = Bundle("running")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.engine = make_engine(
            clock=lambda: self.now, kv_pages=PAGES, token_budget=96, max_batch=24, max_sessions=SESSIONS - 20, lease_share=0.5
        )
        self.collected = Collected()
        self.known: set[bytes] = set()
        self.next_number = 0
        self.requests: dict[bytes, Submit] = {}
        self.epochs = [1] * SESSIONS
        self.submitted = 0

    @initialize(target=running)
    def open_all(self) -> object:
        """More sessions than there is room for, and more than the quota."""
        return multiple(*[self.turn(session, 0, 6, "open", 5.0 + session % 7, 0.0, 0) for session in range(SESSIONS)])

    @rule(
        target=running,
        session=st.integers(0, SESSIONS - 1),
        branch=st.integers(0, BRANCHES - 1),
        count=st.integers(1, LONGEST_ANSWER),
        action=st.sampled_from(["open", "continue", "continue", "close"]),
        timeout=st.sampled_from([0.5, 5.0, 60.0]),
        retention=st.sampled_from([0.0, 0.0, 3.0, 30.0]),
        priority=st.integers(0, 2),
    )
    def turn(self, session: int, branch: int, count: int, action: str, timeout: float, retention: float, priority: int) -> bytes:
        request = make_submit(
            self.submitted,
            prompt_of(session, branch),
            count,
            session=SessionTurn(f"session-{session}", action, timeout, self.epochs[session]),  # type: ignore[arg-type]
            retention_seconds=retention,
            priority=priority,
        )
        self.submitted += 1
        self.requests[request.id] = request
        self.engine.submit(request)
        return request.id

    @rule(target=running, session=st.integers(0, SESSIONS - 1), count=st.integers(2, 5), branch=st.integers(0, BRANCHES - 1))
    def overlapping_turns(self, session: int, count: int, branch: int) -> object:
        return multiple(*[self.turn(session, (branch + turn) % BRANCHES, 8 + turn, "continue", 5.0, 0.0, 0) for turn in range(count)])

    @rule(session=st.integers(0, SESSIONS - 1), is_late=st.booleans())
    def close(self, session: int, is_late: bool) -> None:
        self.engine.close_session(f"session-{session}", self.epochs[session] - is_late)

    @rule(session=st.integers(0, SESSIONS - 1))
    def new_epoch(self, session: int) -> None:
        self.epochs[session] += 1

    @rule(generation=consumes(running))
    def abort(self, generation: bytes) -> None:
        """In whatever state it is, or after its end."""
        self.engine.cancel(generation)
        if generation not in self.collected.terminals:
            del self.requests[generation]

    @rule(seconds=st.sampled_from([0.1, 1.0, 6.0, 100.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(steps=st.integers(1, 60))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.now += 0.01
            self.collected.step(self.engine)
        self.follow_events()

    def follow_events(self) -> None:
        """The events alone tell exactly what is cached."""
        events = self.engine.take_events()
        if events is not None:
            assert events.first == self.next_number
            self.next_number += len(events.events)
            apply_events(self.known, events.events)
        snapshot, cached = self.engine.snapshot(), set[bytes]()
        apply_events(cached, snapshot.events)
        assert snapshot.next_number == self.next_number
        assert cached == self.known

    def teardown(self) -> None:
        """Nothing waits for ever, and everybody has got the right tokens."""
        owed = sum(len(request.token_ids) + request.max_tokens for request in self.requests.values())
        for _ in range(10 * owed):
            if not self.engine.has_work:
                break
            self.now += 0.01
            self.collected.step(self.engine)
        assert not self.engine.has_work, self.engine.stats()
        self.engine.check_idle()
        assert self.collected.terminals.keys() >= self.requests.keys()
        for generation, request in self.requests.items():
            assert self.collected.tokens[generation] == undisturbed()[request.token_ids][: request.max_tokens]
        self.now += 1000.0
        self.engine.step()
        self.engine.check_integrity()
        self.follow_events()
        assert (self.engine.stats().sessions, self.engine.stats().kv_blocks_leased) == (0, 0)


@pytest.mark.timeout(600)
class TestAdversary(Adversary.TestCase):  # type: ignore[valid-type, misc]
    pass


TestAdversary.settings = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    # A failure is worth knowing now; making it small would take minutes.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
