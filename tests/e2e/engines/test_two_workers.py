"""Two workers of one engine behind one front end: prefixes find the worker that has them, and a worker's death is not seen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from chat_model import chat_model, random_prompt
from e2e.engines.asking import Answered, Reading, complete, is_idle, read_all
from e2e.engines.expected import Judge, sure_answers
from e2e.engines.setups import Setup, workers_of
from e2e.harness import Server, wait_until

WORKERS = ("worker-0", "worker-1")
PREFIX_TOKENS = 160
PREFIXES = 6
TOKENS = 400


@pytest.fixture(scope="module")
def cluster(setup: Setup) -> Iterator[Server]:
    """A router that expects nothing of where it has sent a prompt before: what it knows of prefixes, the workers have told it."""
    server = setup.start(chat_model(), "--workers", "2", "--router-sibling-seconds", "0")
    wait_until(lambda: server.metric("penstock_workers") == 2, timeout=setup.start_seconds)
    yield server
    assert server.stop(timeout=60) == 0, server.log


def index_blocks(server: Server, worker: str) -> float:
    return server.metric("penstock_router_index_blocks", name=worker)


def ask(server: Server, prompt: tuple[int, ...], tokens: int, **fields: Any) -> tuple[Answered, dict[str, Any]]:
    """The answer, and how its worker was chosen."""
    answer = complete(server, prompt, stream=True, max_tokens=tokens, extra_body={"nvext": {"extra_fields": ["route"]}}, **fields)
    assert answer.route is not None
    [route] = answer.route
    return answer, route


def test_a_prefix_goes_to_the_worker_that_has_it(cluster: Server, judge: Judge, setup: Setup) -> None:
    prefixes = [random_prompt(seed, PREFIX_TOKENS) for seed in range(7000, 7000 + PREFIXES)]
    homes = [first_request(cluster, judge, setup, prefix) for prefix in prefixes]
    assert set(homes) == set(WORKERS), "all went to one of them, so that nothing is shown"
    rounds = [number for number in range(PREFIXES) for _ in range(3)]
    random.Random(1).shuffle(rounds)
    for turn, number in enumerate(rounds):
        prompt = (*prefixes[number], *random_prompt(8000 + turn, 20))
        answer, route = ask(cluster, prompt, 6)
        answer.check([judge.complete(prompt, 6)])
        overlap = PREFIX_TOKENS // setup.block_size
        assert (route["worker"], route["reason"], route["overlap_blocks"]) == (homes[number], "prefix", overlap), (turn, number)
        assert answer.cached_tokens == PREFIX_TOKENS, (turn, number)
    assert cluster.metric("penstock_routing_decisions_total", reason="prefix") == len(rounds)
    for worker in WORKERS:
        wait_until(lambda: index_blocks(cluster, worker) == cluster.metric("penstock_kv_blocks", name=worker, state="cached"))  # noqa: B023


def first_request(server: Server, judge: Judge, setup: Setup, prefix: tuple[int, ...]) -> str:
    """Where a prefix goes that nobody has. Returns when that worker has told of it, and of what was generated behind it, which nobody
    could foretell."""
    known = {worker: index_blocks(server, worker) for worker in WORKERS}
    answer, route = ask(server, prefix, 70)
    answer.check([judge.complete(prefix, 70)])
    assert (route["overlap_blocks"], answer.cached_tokens) == (0, 0)
    home: str = route["worker"]
    blocks = (PREFIX_TOKENS + len(answer.token_ids[0]) - 1) // setup.block_size
    assert blocks > PREFIX_TOKENS // setup.block_size
    wait_until(lambda: index_blocks(server, home) == known[home] + blocks)
    return home


def test_a_killed_worker_is_not_noticed(cluster: Server, judge: Judge, setup: Setup) -> None:
    """The one with more streams is killed, with all processes of its engine. Its streams go on with the other; and it comes back, with
    nothing cached, which the router knows."""
    wait_until(lambda: is_idle(cluster))
    expected = sure_answers(judge, 9000, 8, TOKENS)
    before = cluster.metric("penstock_links_lost_total")
    workers = dict(zip(WORKERS, workers_of(cluster), strict=True))
    assert all(f"--name={name}" in worker.cmdline() for name, worker in workers.items())
    processes = {name: [*worker.children(recursive=True), worker] for name, worker in workers.items()}
    readings = [Reading(cluster, one, TOKENS) for one in expected]
    # Fast engines have ended the first by now.
    running = {name: cluster.metric("penstock_requests_running", role="worker", name=name) for name in WORKERS}
    victim, other = sorted(WORKERS, key=lambda name: -running[name])
    assert running[victim] >= 1, "nobody had anything to lose"
    for process in processes[victim]:
        process.kill()
    assert read_all(readings) == [one.text for one in expected]
    assert cluster.metric("penstock_links_lost_total") == before + 1
    assert 1 <= cluster.metric("penstock_migrations_total", reason="worker_lost") <= running[victim]
    wait_until(lambda: cluster.metric("penstock_workers") == 2, timeout=setup.start_seconds)
    assert not psutil.pid_exists(workers[victim].pid)
    assert index_blocks(cluster, victim) == 0
    assert index_blocks(cluster, other) > 0
