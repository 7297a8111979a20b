"""Clients that leave: the worker has nothing of theirs left. That the engine itself has stopped is shown by tests/contract/backends."""

from __future__ import annotations

from chat_model import random_prompt
from e2e.engines.asking import begin_raw, complete, is_idle
from e2e.engines.expected import Judge
from e2e.engines.setups import CONTEXT_LENGTH, MAX_BATCH
from e2e.harness import Server, wait_until

# It takes some seconds to make as many, so whoever is not stopped is still there when the test looks.
MANY = CONTEXT_LENGTH - 20


def running(server: Server) -> float:
    return server.metric("penstock_requests_running", role="worker", name="worker-0")


def queued(server: Server) -> float:
    return server.metric("penstock_requests_queued", role="worker", name="worker-0")


def test_in_mid_stream(server: Server, judge: Judge) -> None:
    wait_until(lambda: is_idle(server))
    before = server.metric("penstock_clients_left_total")
    with begin_raw(server, prompt=list(random_prompt(40, 10)), max_tokens=MANY, ignore_eos=True) as connection:
        assert b"200 OK" in connection.recv(4096)
        wait_until(lambda: running(server) == 1)
        assert connection.recv(4096)
    wait_until(lambda: is_idle(server))
    assert server.metric("penstock_clients_left_total") == before + 1
    complete(server, "still here", True, max_tokens=12).check([judge.complete("still here", 12)])


def test_before_the_first_token(server: Server, judge: Judge) -> None:
    """The engine computes as many as it can, and one more waits: it leaves, and the others do not notice. Then they leave, too."""
    wait_until(lambda: is_idle(server))
    first = [
        begin_raw(server, prompt=list(random_prompt(50 + number, 10)), max_tokens=MANY, ignore_eos=True) for number in range(MAX_BATCH)
    ]
    try:
        wait_until(lambda: running(server) == MAX_BATCH, timeout=60)
        last = begin_raw(server, prompt=list(random_prompt(60, 10)), max_tokens=MANY, ignore_eos=True)
        wait_until(lambda: queued(server) == 1)
        last.close()
        wait_until(lambda: queued(server) == 0)
        assert running(server) == MAX_BATCH, "none of the others was stopped with it, and none has ended"
    finally:
        for connection in first:
            connection.close()
    wait_until(lambda: is_idle(server))
    complete(server, "still here", True, max_tokens=12).check([judge.complete("still here", 12)])


def test_at_once(server: Server, judge: Judge) -> None:
    """Some of them while their prompt is being read, or on its way to the worker."""
    for number in range(20):
        begin_raw(server, prompt=list(random_prompt(70 + number, 600)), max_tokens=MANY, ignore_eos=True).close()
    wait_until(lambda: is_idle(server))
    complete(server, "still here", True, max_tokens=12).check([judge.complete("still here", 12)])


def test_a_client_that_waits_for_the_whole_answer(server: Server) -> None:
    wait_until(lambda: is_idle(server))
    with begin_raw(server, prompt=list(random_prompt(41, 10)), max_tokens=MANY, ignore_eos=True, stream=False):
        wait_until(lambda: running(server) == 1)
    wait_until(lambda: is_idle(server))


def test_an_answer_that_a_stop_string_ends(server: Server, judge: Judge) -> None:
    """No client leaves, but the engine is told just so: the front end has found the string, and no more is computed."""
    wait_until(lambda: is_idle(server))
    prompt = random_prompt(42, 10)
    free = judge.complete(prompt, 30)
    stop = next(free.text[start : start + 6] for start in range(8, 40) if free.text[start : start + 6].isascii())
    answer = complete(server, prompt, True, max_tokens=MANY, stop=stop, extra_body={"ignore_eos": True})
    assert (answer.texts[0], answer.finish_reasons[0]) == (free.text[: free.text.index(stop)], "stop")
    wait_until(lambda: is_idle(server), timeout=2)
