"""Two keys on a real server, one of which floods it: the other is served in turn, finds a place, and keeps what it has stored."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Server, wait_until

FLOOD, OTHER = "psk-that-floods", "psk-of-somebody-else"
KEYS = {"PENSTOCK_API_KEY": f"{FLOOD},{OTHER}"}


def ask(server: Server, key: str, method: str, path: str, **fields: object) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    body = json.dumps(fields).encode() if method == "POST" else None
    status, _, answer = server.request(method, path, body, headers)
    return status, answer


def complete(server: Server, key: str, max_tokens: int) -> int:
    return ask(server, key, "POST", "/v1/completions", model="simulator", prompt="x", max_tokens=max_tokens, ignore_eos=True)[0]


def waiting(server: Server) -> float:
    return server.metric("penstock_requests_queued", role="worker") + server.metric("penstock_generations_queued")


@pytest.mark.parametrize("worker_queue", ["4096", "1"])
def test_a_flood_of_one_key_does_not_make_another_wait_for_all_of_it(serve: Callable[..., Server], worker_queue: str) -> None:
    server = serve("--step-ms", "10", "--max-batch", "1", "--worker-queue", worker_queue, environment=KEYS)
    ended: list[str] = []

    def request(key: str) -> None:
        assert complete(server, key, 20) == 200
        ended.append(key)

    with ThreadPoolExecutor(45) as pool:
        flood = [pool.submit(request, FLOOD) for _ in range(40)]
        wait_until(lambda: waiting(server) >= 30)
        others = [pool.submit(request, OTHER) for _ in range(5)]
        for future in others:
            future.result(60)
        # Counted from the flood's queue: every second turn is the other's, and a few turns pass while its requests arrive.
        before = ended[: [index for index, key in enumerate(ended) if key == OTHER][-1]]
        left = sum(not future.done() for future in flood)
        for future in flood:
            future.result(60)
    assert left >= 15, before
    assert before.count(FLOOD) <= 25


@contextmanager
def stream(server: Server, key: str) -> Iterator[int]:
    """The status of a long stream, which goes on until the context is left."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)) as connection:
        body = {"model": "simulator", "prompt": "x", "max_tokens": 3000, "ignore_eos": True, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"authorization": f"Bearer {key}"})
        yield connection.getresponse().status


def test_long_streams_of_one_key_leave_places_to_another(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "20", "--max-generations", "4", "--max-batch", "3", environment=KEYS)
    with ExitStack() as stack:
        assert [stack.enter_context(stream(server, FLOOD)) for _ in range(4)] == [200, 200, 200, 429]
        # There is a generation for it, and a place in the batch: it is not only admitted.
        assert complete(server, OTHER, 3) == 200
        assert server.metric("penstock_preemptions_total") == 1


def test_a_key_that_fills_the_store_loses_its_own_and_pays_for_its_writes(serve: Callable[..., Server], tmp_path: Path) -> None:
    store = ("--response-store", str(tmp_path / "responses.db"), "--response-store-size", "1")
    server = serve("--step-ms", "1", *store, "--requests-per-minute", "40", environment=KEYS)

    def write(key: str, size: int) -> tuple[int, Any]:
        item = {"type": "message", "role": "user", "content": "x" * size}
        return ask(server, key, "POST", "/v1/conversations", items=[item])

    _, answer = ask(server, OTHER, "POST", "/v1/responses", model="simulator", input="x", max_output_tokens=3)
    status, conversation = write(OTHER, 1000)
    assert status == 200
    written = [write(FLOOD, 100_000) for _ in range(45)]
    assert [status for status, _ in written].count(200) >= 40
    assert written[-1][0] == 429, "a conversation is a request, too"
    assert ask(server, OTHER, "GET", f"/v1/conversations/{conversation['id']}")[0] == 200
    assert ask(server, OTHER, "GET", f"/v1/responses/{answer['id']}")[0] == 200
    assert ask(server, FLOOD, "GET", f"/v1/conversations/{written[0][1]['id']}")[0] == 404
    assert ask(server, FLOOD, "GET", f"/v1/conversations/{written[39][1]['id']}")[0] == 200
    assert server.metric("penstock_responses_evicted_total", reason="full") >= 25


def test_sessions_of_one_key_leave_room_for_those_of_another(serve: Callable[..., Server]) -> None:
    server = serve("--step-ms", "1", "--max-sessions", "4", environment=KEYS)

    def state(key: str, number: int) -> str:
        session = {"session_control": {"session_id": f"agent {number}", "action": "open"}}
        status, answer = ask(server, key, "POST", "/v1/completions", model="simulator", prompt="x y z", max_tokens=2, nvext=session)
        assert status == 200
        return str(answer["nvext"]["session"]["state"])

    assert [state(FLOOD, number) for number in range(6)] == ["open"] * 4 + ["over_quota"] * 2
    assert [state(OTHER, number) for number in range(3)] == ["open"] * 2 + ["over_quota"]
    assert server.metric("penstock_sessions_evicted_total") == 2
