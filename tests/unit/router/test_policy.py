"""The choice, case by case."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.front_end import RouterSettings
from penstock.router.policy import Decision, RouteRequest, WorkerView, choose

SETTINGS = RouterSettings(load_weight=0.5)


def decide(
    view: list[WorkerView], request: RouteRequest | None = None, settings: RouterSettings = SETTINGS, turn: int = 0, draw: float = 0.0
) -> Decision:
    decision = choose(view, request or RouteRequest(blocks=40), settings, turn, draw)
    assert decision is not None
    return decision


def test_no_worker_no_decision() -> None:
    assert choose([], RouteRequest(), SETTINGS, 0, 0.0) is None


def test_one_worker_is_the_only_one() -> None:
    decision = decide([WorkerView("a", overlap=3)])
    assert (decision.worker, decision.reason, decision.overlap) == ("a", "only", 3)


def test_the_lowest_cost_is_taken() -> None:
    decision = decide([WorkerView("a", load=10), WorkerView("b", overlap=20, load=49), WorkerView("c", overlap=20, load=51)])
    assert (decision.worker, decision.reason, decision.overlap) == ("b", "prefix", 20)
    assert decision.cost == 20 + 0.5 * 49
    assert decision.costs == (("a", 45.0), ("b", 44.5), ("c", 45.5))


def test_load_outweighs_overlap_in_the_end() -> None:
    assert decide([WorkerView("a", load=0), WorkerView("b", overlap=20, load=39)]).worker == "b"
    decision = decide([WorkerView("a", load=0), WorkerView("b", overlap=20, load=41)])
    assert (decision.worker, decision.reason) == ("a", "least_loaded")


def test_equal_workers_are_chosen_by_generations_then_in_turn() -> None:
    assert decide([WorkerView("a", active=2), WorkerView("b", active=1), WorkerView("c", active=2)]).worker == "b"
    equals = [WorkerView("a"), WorkerView("b"), WorkerView("c")]
    assert [decide(equals, turn=turn).worker for turn in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_a_worker_with_too_large_a_lead_is_not_taken_for_its_prefix() -> None:
    def chosen(active: int, fewest: int) -> str:
        view = [WorkerView("a", 1000, active=active), WorkerView("b", active=fewest), WorkerView("c", load=1, active=fewest)]
        return decide(view, RouteRequest(blocks=1000)).worker

    assert chosen(64, 0) == "a"
    assert chosen(65, 0) == "b"
    assert chosen(1500, 1000) == "a"
    assert chosen(1501, 1000) == "b"
    assert decide([WorkerView("a", active=1000), WorkerView("b", active=999, has_room=False)]).reason == "only"


def test_a_quiet_worker_is_avoided_before_a_full_one() -> None:
    quiet, full, good = WorkerView("quiet", 40, is_quiet=True), WorkerView("full", 40, has_room=False), WorkerView("good", load=500)
    assert decide([quiet, full, good]).worker == "good"
    assert decide([quiet, full]).worker == "full"
    assert decide([quiet]).worker == "quiet"
    assert decide([quiet, WorkerView("both", is_quiet=True, has_room=False)]).worker == "quiet"
    for policy in ("round-robin", "least-loaded", "random"):
        assert {decide([quiet, full, good], RouteRequest(policy=policy), turn=turn, draw=turn / 4).worker for turn in range(4)} == {"good"}


def test_each_policy_has_its_reason() -> None:
    view = [WorkerView("a", overlap=40, load=3), WorkerView("b", load=1), WorkerView("c", load=2)]

    def by(policy: Any, turn: int = 0, draw: float = 0.0) -> tuple[str, str]:
        decision = decide(view, RouteRequest(blocks=40, policy=policy), turn=turn, draw=draw)
        return decision.worker, decision.reason

    assert by(None) == by("kv") == ("a", "prefix")
    assert by("least-loaded") == ("b", "least_loaded")
    assert [by("round-robin", turn) for turn in range(4)] == [(name, "round_robin") for name in "abca"]
    assert [by("random", draw=draw) for draw in (0.0, 0.4, 0.99)] == [(name, "random") for name in "abc"]


PREFERRING = RouteRequest(blocks=40, preferred="p", preferred_reason="session")


def test_the_preferred_worker_is_taken_before_the_cheapest() -> None:
    for reason in ("session", "affinity", "parent"):
        request = RouteRequest(blocks=40, preferred="p", preferred_reason=reason)
        decision = decide([WorkerView("a", overlap=40), WorkerView("p", overlap=5, load=100)], request)
        assert (decision.worker, decision.reason, decision.diverted, decision.overlap) == ("p", reason, None, 5)


@pytest.mark.parametrize(
    ("preferred", "diverted"),
    [
        (None, "gone"),
        (WorkerView("p", 40, is_quiet=True), "quiet"),
        (WorkerView("p", 40, has_room=False), "overloaded"),
        (WorkerView("p", 40, load=9000), "overloaded"),
    ],
)
def test_a_diversion_has_a_reason(preferred: WorkerView | None, diverted: str) -> None:
    view = [WorkerView("a"), WorkerView("b"), *([preferred] if preferred is not None else [])]
    decision = decide(view, PREFERRING)
    assert (decision.worker, decision.reason, decision.diverted) == ("a", "least_loaded", diverted)


def test_a_preferred_worker_without_room_is_taken_when_no_other_has_room() -> None:
    decision = decide([WorkerView("a", 40, has_room=False), WorkerView("p", has_room=False)], PREFERRING)
    assert (decision.worker, decision.diverted) == ("p", None)


def test_overload_is_relative_to_the_least_loaded_to_the_prompt_and_to_a_bound() -> None:
    settings = RouterSettings(overload_blocks=256, overload_factor=4)

    def diverted(load: float, least: float, blocks: int) -> bool:
        request = RouteRequest(blocks=blocks, preferred="p")
        return decide([WorkerView("a", load=least), WorkerView("p", blocks, load=load)], request, settings).diverted is not None

    assert not diverted(256, 0, 10)
    assert diverted(257, 0, 10)
    assert not diverted(400, 0, 100)
    assert diverted(401, 0, 100)
    assert not diverted(2000, 500, 0)
    assert diverted(2001, 500, 0)


def test_a_single_worker_that_is_preferred_says_so() -> None:
    assert decide([WorkerView("p", is_quiet=True)], PREFERRING).reason == "session"
    decision = decide([WorkerView("a")], PREFERRING)
    assert (decision.reason, decision.diverted) == ("only", "gone")


def test_temperature_samples_by_cost() -> None:
    view = [WorkerView("a", overlap=40), WorkerView("b", overlap=20), WorkerView("c")]
    settings = RouterSettings(temperature=0.5)
    drawn = Counter(decide(view, settings=settings, draw=number / 1000).worker for number in range(1000))
    weights = {"a": 1.0, "b": math.exp(-1), "c": math.exp(-2)}
    for name, weight in weights.items():
        assert drawn[name] == pytest.approx(1000 * weight / sum(weights.values()), abs=2)
    assert decide(view, settings=settings).reason == "sampled"
    cold = RouterSettings(temperature=0.001)
    assert {decide(view, settings=cold, draw=number / 100).worker for number in range(100)} == {"a"}
    equals = Counter(decide([WorkerView("a"), WorkerView("b")], settings=settings, draw=number / 10).worker for number in range(10))
    assert equals == {"a": 5, "b": 5}


views = st.lists(
    st.builds(
        WorkerView,
        name=st.text("abcdef", min_size=1, max_size=1),
        overlap=st.integers(0, 40),
        load=st.floats(0, 1e6),
        active=st.integers(0, 9),
        has_room=st.booleans(),
        is_quiet=st.booleans(),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda worker: worker.name,
)
requests = st.builds(
    RouteRequest,
    blocks=st.just(40),
    preferred=st.sampled_from([None, "a", "b"]),
    policy=st.sampled_from([None, "kv", "round-robin", "least-loaded", "random"]),
)


@given(views, requests, st.floats(0, 3), st.integers(0, 10**9), st.floats(0, 1, exclude_max=True))
def test_there_is_always_a_choice_and_never_an_unusable_worker_without_need(
    view: list[WorkerView], request: RouteRequest, temperature: float, turn: int, draw: float
) -> None:
    decision = decide(view, request, RouterSettings(temperature=temperature), turn, draw)
    chosen = next(worker for worker in view if worker.name == decision.worker)
    assert chosen.is_quiet <= all(worker.is_quiet for worker in view)
    assert chosen.has_room >= any(worker.has_room and worker.is_quiet == chosen.is_quiet for worker in view)
    assert decision.overlap == chosen.overlap
    assert (decision.worker, decision.cost) in decision.costs
    if decision.reason == "session":
        assert decision.worker == request.preferred
    else:
        assert (decision.diverted is not None) == (request.preferred is not None)
