"""Workers come and go, events and reports arrive, and requests get their workers."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
from msgspec import structs

from penstock.config.front_end import RouterSettings
from penstock.router.policy import Decision
from penstock.router.router import Assignment, Candidate, Router
from penstock.wire.messages import BlocksStored, Capability, KvEvents, ModelInfo, Snapshot, Tier, WorkerStats

WORKERS = ["a", "b", "c", "d"]
CANDIDATES = [Candidate(name) for name in WORKERS]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def model(name: str = "m", capabilities: tuple[Capability, ...] = ("kv_events",)) -> ModelInfo:
    return ModelInfo(name, "simulator", "words", 1000, 4096, 16, capabilities=capabilities)


def chain(name: str, length: int) -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(length)]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def router(clock: Clock) -> Iterator[Router]:
    router = Router(RouterSettings(), clock, random.Random(1).random)
    for name in WORKERS:
        assert router.join(name, model())
        router.load_snapshot(name, Snapshot(0, ()))
    yield router
    router.check_integrity()


def place(router: Router, names: Sequence[bytes], blocks: int, candidates: Sequence[Candidate] = CANDIDATES) -> tuple[Decision, Assignment]:
    decision = router.choose(candidates, names, blocks)
    assert decision is not None
    return decision, router.sent(decision, decision.names, blocks)


def never() -> Sequence[bytes]:
    raise AssertionError("the names were asked for")


@pytest.mark.parametrize("tail", [0, 1])
def test_siblings_with_a_new_prefix_go_to_one_worker(router: Router, tail: int) -> None:
    """Fifty at once, none begun: the same 40 blocks, then `tail` blocks of their own or one partly filled block."""
    names = [chain("prefix", 40) + chain(f"own {number}", tail) for number in range(50)]
    placed = Counter(place(router, own, 41)[0].worker for own in names)
    assert len(placed) == 1
    assert router.decisions == {"least_loaded": 1, "prefix": 49}


def test_siblings_do_not_starve_the_others(router: Router) -> None:
    """While one worker has the fifty, distinct prompts go to the other three."""
    (busy,) = {place(router, chain("prefix", 40), 41)[0].worker for _ in range(50)}
    others = Counter(place(router, chain(f"other {number}", 10), 11)[0].worker for number in range(9))
    assert others == {name: 3 for name in WORKERS if name != busy}


def test_distinct_prompts_spread_evenly(router: Router) -> None:
    placed = Counter(place(router, chain(f"prompt {number}", 40), 41)[0].worker for number in range(400))
    assert placed == dict.fromkeys(WORKERS, 100)


def test_distinct_prompts_of_any_length_spread_evenly_while_others_end(router: Router) -> None:
    generator = random.Random(5)
    running: list[Assignment] = []
    placed: Counter[str] = Counter()
    for number in range(2000):
        length = generator.choice([1, 5, 20, 60])
        decision, assignment = place(router, chain(f"prompt {number}", length), length + 1)
        placed[decision.worker] += length
        running.append(assignment)
        running[generator.randrange(len(running))].first_token()
        if len(running) > 40:
            running.pop(generator.randrange(len(running))).ended()
    assert max(placed.values()) < 1.25 * min(placed.values())


def test_one_prefix_that_all_share_does_not_fill_one_worker(router: Router) -> None:
    """A common system prompt attracts requests, but load counts as well."""
    placed: Counter[str] = Counter()
    for number in range(400):
        placed[place(router, chain("system", 10) + chain(f"own {number}", 30), 41)[0].worker] += 1
    assert max(placed.values()) < 1.3 * min(placed.values())


def test_a_long_common_prefix_is_computed_by_every_worker_in_the_end(router: Router) -> None:
    """Else the first worker, which is always cheaper, would get all the work."""
    placed: Counter[str] = Counter()
    for number in range(1000):
        placed[place(router, chain("system", 1000) + chain(f"own {number}", 5), 1006)[0].worker] += 1
    assert max(placed.values()) - min(placed.values()) <= router.settings.max_lead + 1


def test_events_tell_where_a_prompt_is_cached(router: Router) -> None:
    names = chain("cached", 30)
    assert not router.receive("c", KvEvents(0, (BlocksStored(b"", tuple(names)),)))
    decision, _ = place(router, names, 31)
    assert (decision.worker, decision.reason, decision.overlap) == ("c", "prefix", 30)


def test_a_gap_asks_for_a_snapshot(router: Router) -> None:
    assert router.receive("c", KvEvents(5, ()))
    router.load_snapshot("c", Snapshot(5, (BlocksStored(b"", tuple(chain("cached", 30))),)))
    assert place(router, chain("cached", 30), 31)[0].worker == "c"


def test_predictions_last_longer_for_engines_without_events(router: Router, clock: Clock) -> None:
    assert not router.join("silent", model(capabilities=()))
    candidates = [Candidate("silent"), Candidate("a")]
    router.sent(Decision("silent", "prefix"), chain("one", 10), 11).ended()
    router.sent(Decision("a", "prefix"), chain("two", 10), 11).ended()
    clock.now = 9.0
    assert place(router, chain("one", 10), 11, candidates)[0].overlap == 10
    assert router.choose(candidates, chain("two", 10), 11, policy=None).overlap == 10  # type: ignore[union-attr]
    clock.now = 100.0
    assert router.index.overlaps(chain("one", 10), clock.now) == {"silent": 10}
    assert router.index.overlaps(chain("two", 10), clock.now) == {}


def test_the_choices_of_a_prompt_are_predicted_once_per_worker(router: Router, clock: Clock) -> None:
    router.join("a", model(capabilities=()))
    names = chain("long", 100)
    decision, _ = place(router, names, 100, [Candidate("a"), Candidate("a")])
    router.index.removed("a", names)
    router.sent(decision, decision.names, 100)
    assert router.index.held("a") == (0, 0), "the second choice repeats nothing"
    clock.now += 1
    router.sent(decision, decision.names, 100)
    assert router.index.held("a") == (0, 100)


def test_nothing_is_hashed_without_need(router: Router) -> None:
    decision = router.choose(CANDIDATES[:1], never, 40)
    assert decision is not None
    assert (decision.worker, decision.reason, decision.names) == ("a", "only", ())
    for policy in ("round-robin", "least-loaded", "random"):
        assert router.choose(CANDIDATES, never, 40, policy=policy) is not None
    assert router.choose([], never, 40) is None
    lazily: Callable[[], Sequence[bytes]] = lambda: chain("lazy", 3)  # noqa: E731
    decision = router.choose(CANDIDATES, lazily, 4)
    assert decision is not None
    assert decision.names == chain("lazy", 3)


def test_a_prompt_without_a_full_block_predicts_nothing(router: Router) -> None:
    decision, assignment = place(router, [], 1)
    assert router.index.held(decision.worker) == (0, 0)
    assert router.load_of(decision.worker) == 2
    assignment.ended()
    assert router.load_of(decision.worker) == 0


def test_a_preferred_worker_is_charged_only_for_missing_blocks(router: Router) -> None:
    router.receive("b", KvEvents(0, (BlocksStored(b"", tuple(chain("session", 100))),)))
    decision = router.choose(CANDIDATES, chain("session", 101), 102, preferred="b", preferred_reason="session")
    assert decision is not None
    assert (decision.worker, decision.reason) == ("b", "session")
    router.sent(decision, decision.names, 102)
    assert router.load_of("b") == 4


def test_reasons_and_diversions_are_counted(router: Router) -> None:
    router.choose(CANDIDATES, [], 1, preferred="gone", preferred_reason="affinity")
    router.choose(CANDIDATES, [], 1, preferred="a", preferred_reason="affinity")
    assert router.decisions == {"least_loaded": 1, "affinity": 1}
    assert router.diversions == {"gone": 1}


def test_reports_of_others_load_move_new_work_away(router: Router) -> None:
    for name in WORKERS[:3]:
        router.report(name, WorkerStats(running=4, kv_blocks_used=100))
    assert {place(router, [], 1)[0].worker for _ in range(10)} == {"d"}


def test_a_worker_that_left_leaves_nothing_behind(router: Router) -> None:
    router.receive("a", KvEvents(0, (BlocksStored(b"", tuple(chain("cached", 30))),)))
    decision, assignment = place(router, chain("cached", 30), 31)
    assert decision.worker == "a"
    router.leave("a")
    router.leave("a")
    assert not router.receive("a", KvEvents(1, ()))
    router.load_snapshot("a", Snapshot(0, ()))
    router.report("a", WorkerStats())
    router.sent(decision, decision.names, 31).ended()
    assert router.choose(CANDIDATES, chain("cached", 30), 31).overlap == 0  # type: ignore[union-attr]
    # A new link, and then the last of the old one.
    assert router.join("a", model())
    place(router, chain("cached", 30), 31, CANDIDATES[:1])
    assignment.first_token()
    assignment.ended()
    assert router.load_of("a") == 62


def test_a_worker_that_joins_again_starts_empty(router: Router) -> None:
    router.receive("a", KvEvents(0, (BlocksStored(b"", tuple(chain("cached", 30))),)))
    assert router.join("a", model())
    assert router.index.held("a") == (0, 0)
    router.load_snapshot("a", Snapshot(0, ()))
    assert not router.receive("a", KvEvents(0, (BlocksStored(b"", (b"x",)),)))
    assert router.index.held("a") == (1, 0)


def test_each_model_has_its_own_round_robin(router: Router) -> None:
    for name in ("x", "y"):
        router.join(name, model("other"))
    placed: Counter[str] = Counter()
    for _ in range(4):
        for candidates in ([Candidate("x"), Candidate("y")], CANDIDATES[:2]):
            decision = router.choose(candidates, never, 1, policy="round-robin")
            assert decision is not None
            placed[decision.worker] += 1
    assert placed == {"x": 2, "y": 2, "a": 2, "b": 2}


def test_blocks_below_the_device_count_as_much_as_loading_them_saves(clock: Clock) -> None:
    """A block takes 0.8 ms to compute. One worker has 10 blocks on its device, another 40 in host memory, a third all 100 on disk."""
    names = chain("prefix", 100)
    told = {"a": (10, 0, 0), "b": (0, 40, 0), "c": (0, 0, 100)}

    def chosen(host_seconds: float, disk_seconds: float) -> str:
        router = Router(RouterSettings(), clock, random.Random(1).random)
        for worker, counts in told.items():
            router.join(worker, structs.replace(model(), kv_block_bytes=2_000_000))
            tiers: tuple[Tier, ...] = ("device", "host", "disk")
            events = [BlocksStored(b"", tuple(names[:count]), tier) for tier, count in zip(tiers, counts, strict=True) if count]
            router.load_snapshot(worker, Snapshot(0, tuple(events)))
            rates = 2_000_000 / host_seconds, 2_000_000 / disk_seconds
            router.report(worker, WorkerStats(prefill_rate=20_000, kv_host_total=1000, host_rate=rates[0], disk_rate=rates[1]))
        decision = router.choose([Candidate(name) for name in told], names, 101)
        assert decision is not None
        router.check_integrity()
        return decision.worker

    assert chosen(0.000_08, 0.000_1) == "c"
    assert chosen(0.000_08, 0.000_6) == "b"
    assert chosen(0.000_7, 0.000_7) == "a"
    assert chosen(0.001, 0.001) == "a"
