"""The load is our running generations plus what the worker reports beyond them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.router import Assignment, WorkerLoad
from penstock.wire.messages import WorkerStats


def test_a_generation_counts_twice_until_its_first_token_and_once_until_its_end() -> None:
    load = WorkerLoad()
    assignment = load.begin(40)
    assert (load.blocks, load.generations) == (80, 1)
    assignment.first_token()
    assignment.first_token()
    assert (load.blocks, load.generations) == (40, 1)
    assignment.ended()
    assignment.ended()
    assignment.first_token()
    assert (load.blocks, load.generations) == (0, 0)


def test_a_generation_that_ends_before_its_first_token_leaves_nothing() -> None:
    load = WorkerLoad()
    load.begin(40).ended()
    assert (load.blocks, load.generations) == (0, 0)


def test_the_work_of_other_front_ends_is_known_from_the_report() -> None:
    load = WorkerLoad()
    ours = load.begin(40)
    ours.first_token()
    load.report(WorkerStats(running=3, queued=0, kv_blocks_used=100))
    assert (load.blocks, load.generations) == (100, 3)
    ours.ended()
    assert (load.blocks, load.generations) == (60, 2)
    load.report(WorkerStats())
    assert (load.blocks, load.generations) == (0, 0)


def test_our_own_queued_generations_are_not_counted_as_others() -> None:
    load = WorkerLoad()
    for _ in range(3):
        load.begin(40)
    load.report(WorkerStats(running=1, queued=2, kv_blocks_used=40))
    assert (load.blocks, load.generations) == (240, 3)
    load.report(WorkerStats(running=1, queued=5, kv_blocks_used=40))
    assert (load.blocks, load.generations) == (240 + 2 * 40, 6)


def test_a_worker_whose_last_generation_ended_has_no_load_without_another_report() -> None:
    load = WorkerLoad()
    ours = load.begin(40)
    load.report(WorkerStats(running=1, kv_blocks_used=45))
    ours.ended()
    assert load.blocks == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), max_size=60))
def test_the_load_adds_up(steps: list[tuple[int, int]]) -> None:
    load = WorkerLoad()
    assignments: list[Assignment] = []
    for kind, number in steps:
        if kind == 0 or not assignments:
            assignments.append(load.begin(number))
        elif kind == 1:
            assignments[number % len(assignments)].first_token()
        elif kind == 2:
            assignments[number % len(assignments)].ended()
        else:
            load.report(WorkerStats(running=number % 5, queued=number % 3, kv_blocks_used=number))
        load.check_integrity()
    for assignment in assignments:
        assignment.ended()
    load.report(WorkerStats())
    load.check_integrity()
    assert (load.blocks, load.generations) == (0, 0)
