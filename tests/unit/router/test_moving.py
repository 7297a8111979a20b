"""What moving KV costs against computing it, and what is chosen."""

from __future__ import annotations

import pytest

from penstock.config.front_end import Disaggregation, RouterSettings
from penstock.router.moving import (
    MIN_MOVED_BLOCKS,
    PULL_SECONDS,
    STREAM_WEIGHT,
    UNMEASURED_PREFILL_RATE,
    UNMEASURED_PULL_RATE,
    Move,
    Place,
    Prompt,
    choose_prefill,
    choose_source,
    compute_cost,
    pull_seconds,
)
from penstock.router.policy import Decision
from penstock.router.router import Candidate, Router
from penstock.wire.messages import BlocksStored, KvEvents, ModelInfo, Snapshot, WorkerStats

LONG = Prompt(500, 16)
"""8,000 tokens."""
MB = 2**20


def place(name: str = "d", **fields: float) -> Place:
    known = {"prefill_rate": 10_000.0, "pull_rate": 1e9, "block_bytes": MB, **fields}
    return Place(name, **known)  # type: ignore[arg-type]


def test_costs_are_seconds_from_measured_rates() -> None:
    stats = WorkerStats(prefill_rate=2_000.0, pull_rate=5e8, tokens_to_compute=3_000)
    measured = Place.of("a", 0, waiting_tokens=1_000, streams=2, block_bytes=MB, stats=stats)
    assert compute_cost(measured, 1_000) == pytest.approx((3_000 + 1_000 * (1 + 2 * STREAM_WEIGHT)) / 2_000)
    assert pull_seconds(measured, 100) == pytest.approx(PULL_SECONDS + 100 * MB / 5e8)
    unmeasured = Place.of("a", 0, waiting_tokens=500, streams=0, block_bytes=MB, stats=WorkerStats())
    assert compute_cost(unmeasured, 1_000) == pytest.approx(1_500 / UNMEASURED_PREFILL_RATE)
    assert pull_seconds(unmeasured, 1) == pytest.approx(PULL_SECONDS + MB / UNMEASURED_PULL_RATE)


@pytest.mark.parametrize(
    ("target", "helper", "choice"),
    [
        (place(streams=8), place("p"), "elsewhere"),
        (place(), place("p"), "here"),
        (place(waiting_tokens=40_000), place("p"), "elsewhere"),
        (place(streams=8), place("p", waiting_tokens=200_000), "here"),
        (place(streams=8, overlap=500), place("p"), "cached"),
        (place(streams=8, overlap=500 - MIN_MOVED_BLOCKS + 1), place("p"), "cached"),
        (place(streams=8, pull_rate=1e7), place("p"), "here"),
        (place(streams=8), place("p", prefill_rate=500.0), "here"),
        (place(streams=1), place("p", prefill_rate=100_000.0), "elsewhere"),
    ],
    ids=["busy", "idle", "waits", "helper waits", "cached", "nearly cached", "slow link", "slow helper", "fast helper"],
)
def test_a_prompt_is_computed_where_that_costs_less(target: Place, helper: Place, choice: str) -> None:
    chosen, move = choose_prefill(target, LONG, [helper], "auto")
    assert chosen == choice
    assert (move is not None) == (choice == "elsewhere")


@pytest.mark.parametrize(("wish", "choice"), [("always", "elsewhere"), ("never", "here"), ("auto", "here")])
def test_a_setting_decides_instead_of_the_costs(wish: Disaggregation, choice: str) -> None:
    assert choose_prefill(place(), LONG, [place("p")], wish)[0] == choice
    assert choose_prefill(place(overlap=500), LONG, [place("p")], wish) == ("cached", None)


def test_the_cheapest_helper_is_taken_and_its_time_expected() -> None:
    helpers = [place("busy", waiting_tokens=50_000), place("knows", overlap=400), place("idle")]
    _, move = choose_prefill(place(streams=8), LONG, helpers, "auto")
    assert move is not None
    assert (move.worker, move.reason, move.overlap) == ("knows", "prefill", 400)
    assert move.seconds == pytest.approx(1_600 / 10_000 + pull_seconds(place(), 500))


def test_blocks_are_pulled_from_the_peer_with_the_most_if_that_is_cheaper() -> None:
    peers = [place("some", overlap=200), place("most", overlap=490)]
    assert choose_source(place(), LONG, peers, "peer") == Move("most", "peer", 490, *[pull_seconds(place(), 490)] * 2)
    assert choose_source(place(overlap=490 - MIN_MOVED_BLOCKS + 1), LONG, peers, "peer") is None, "too few to be worth it"
    assert choose_source(place(pull_rate=1e8), LONG, peers, "peer") is None, "computing is faster"
    assert choose_source(place(prefill_rate=1e6), LONG, peers, "peer") is None
    assert choose_source(place(), LONG, [], "peer") is None


def model(**fields: object) -> ModelInfo:
    known = {"capabilities": ("kv_events",), "kv_fingerprint": b"same", "kv_address": "unix:/kv", "kv_block_bytes": 1024, **fields}
    return ModelInfo("m", "by hand", "words", 100, 100_000, 16, **known)  # type: ignore[arg-type]


NAMES = [number.to_bytes(16, "big") for number in range(100)]


def router(**models: ModelInfo) -> Router:
    made = Router(RouterSettings())
    for name, info in models.items():
        made.join(name, info)
        made.load_snapshot(name, Snapshot(0, ()))
    return made


def has(made: Router, worker: str, blocks: int) -> None:
    made.receive(worker, KvEvents(0, (BlocksStored(b"", tuple(NAMES[:blocks])),)))


def test_a_peers_blocks_are_found_also_where_only_one_worker_takes_work() -> None:
    made = router(old=model(), new=model())
    has(made, "old", 90)
    decision = made.choose([Candidate("new")], NAMES, 100)
    assert decision is not None
    assert decision.move is not None
    assert (decision.worker, decision.move.worker, decision.move.reason) == ("new", "old", "peer")
    moved = made.choose([Candidate("new")], NAMES, 100, "old", "session")
    assert moved is not None
    assert moved.move is not None
    assert (moved.diverted, moved.move.reason) == ("gone", "session")
    made.leave("old")
    alone = made.choose([Candidate("new")], NAMES, 100)
    assert alone is not None
    assert (alone.move, alone.names) == (None, ())
    made.check_integrity()


@pytest.mark.parametrize("other", [model(kv_fingerprint=b"other"), model(kv_fingerprint=b""), model(kv_address="")])
def test_kv_moves_between_equal_workers_only(other: ModelInfo) -> None:
    made = router(old=other, new=model(), third=model())
    has(made, "old", 90)
    decision = made.choose([Candidate("new")], NAMES, 100, helpers=["old"])
    assert decision is not None
    assert decision.move is None
    assert made.inherit(decision, "old", 90) is None
    assert made.inherit(decision, "third", 90) is not None
    assert not made.prefill_choices


def test_half_a_prompt_is_worth_half_and_what_is_only_expected_nothing() -> None:
    made = router(old=model(), new=model())
    sent = made.choose([Candidate("old")], NAMES, 100)
    assert sent is not None
    made.sent(sent, sent.names, 100)
    decision = made.choose([Candidate("new")], NAMES, 100)
    assert decision is not None
    assert made.inherit(decision, "old", None) is None
    has(made, "old", 50)
    move = made.inherit(decision, "old", None)
    assert move is not None
    assert (move.overlap, move.reason) == (50, "drain")


def test_what_a_peer_has_is_pulled_and_not_computed_by_a_prefill_worker() -> None:
    made = router(p=model(), d=model(), peer=model())
    for _ in range(8):
        made.sent(Decision("d", "only"), (), 1)
    made.sent(Decision("peer", "only"), NAMES, 100)
    expected = made.choose([Candidate("d")], NAMES, 100, helpers=["p"])
    assert expected is not None
    assert expected.move is not None
    assert (expected.move.worker, expected.move.reason) == ("p", "prefill"), "the peer has not computed it yet"
    has(made, "peer", 99)
    decision = made.choose([Candidate("d")], NAMES, 100, helpers=["p"])
    assert decision is not None
    assert decision.move is not None
    assert (decision.move.worker, decision.move.reason) == ("peer", "peer")
    assert made.prefill_choices == {"elsewhere": 1, "cached": 1}


def test_who_computed_the_prompts_is_counted() -> None:
    made = router(p=model(), d=model())
    busy = [made.sent(decision, (), 1) for _ in range(8) if (decision := made.choose([Candidate("d")], NAMES[:1], 1)) is not None]
    assert len(busy) == 8
    decision = made.choose([Candidate("d")], NAMES, 100, helpers=["p"])
    assert decision is not None
    assert decision.move is not None
    assert (decision.worker, decision.move.worker, decision.move.reason) == ("d", "p", "prefill")
    has(made, "d", 100)
    made.choose([Candidate("d")], NAMES, 100, helpers=["p"])
    assert made.prefill_choices == {"elsewhere": 1, "cached": 1}
