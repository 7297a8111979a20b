"""The engine's end: by a kill that no client sees, and by a signal, in order."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil

from e2e.engines.asking import Reading, begin_stalled, check_stalled, complete, read_all
from e2e.engines.expected import Judge, sure_answers
from e2e.engines.setups import Setup, workers_of
from e2e.harness import Server, wait_until

TOKENS = 400
FEWER = 200
QUESTION = "What do you hear at night?"


def test_killed_and_then_terminated(begin: Callable[..., Server], judge: Judge, setup: Setup) -> None:
    """One server for both, for some engines take a minute to start."""
    server = begin()
    kill_in_mid_stream(server, judge, setup)
    terminate_in_mid_stream(server, judge)


def kill_in_mid_stream(server: Server, judge: Judge, setup: Setup) -> None:
    """The process that computes is killed: the worker is started anew, and every answer, streamed or whole, is what it would have been."""
    *expected, whole = sure_answers(judge, 4000, 4, TOKENS)
    [worker] = workers_of(server)
    engine = setup.computing(worker)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(complete, server, whole.prompt_ids, stream=False, max_tokens=TOKENS, timeout=600)
        wait_until(lambda: server.metric("penstock_requests_running", role="worker", name="worker-0") == 1)
        readings = [Reading(server, one, TOKENS) for one in expected]
        engine.kill()
        assert read_all(readings) == [one.text for one in expected]
        waiting.result().check([whole])
    assert server.metric("penstock_migrations_total") >= len(expected)
    assert any("worker-0 died" in line for line in server.log), server.log
    [restarted] = workers_of(server)
    assert restarted.pid != worker.pid


def terminate_in_mid_stream(server: Server, judge: Judge) -> None:
    """What runs is finished, nothing new is taken, and of all processes none is left. The one that stalls keeps the server from ending
    before the test has seen that it is about to."""
    expected, long = sure_answers(judge, 5000, 3, FEWER), judge.chat(QUESTION, FEWER)
    processes = psutil.Process(server.process.pid).children(recursive=True)
    with begin_stalled(server, QUESTION, FEWER) as stalled:
        assert stalled.recv(1, socket.MSG_PEEK)
        readings = [Reading(server, one, FEWER) for one in expected]
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.request("GET", "/ready")[0] == 503)
        assert server.post("/v1/completions", prompt="x")[2]["error"]["code"] == "draining"
        assert read_all(readings) == [one.text for one in expected]
        check_stalled(stalled, long)
    assert server.join(timeout=60) == 0
    # The last to go, a helper of Python's, goes when it sees that its parent has gone.
    wait_until(lambda: not any(is_alive(process) for process in processes))


def is_alive(process: psutil.Process) -> bool:
    """One that has ended may still be listed, until whoever inherited it takes note."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
