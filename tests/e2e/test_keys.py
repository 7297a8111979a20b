"""API keys on a real server: who comes in, what becomes of a key that is revoked, and that no key is to be seen anywhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from e2e.harness import Server, wait_until

FIRST, SECOND, THIRD = "psk-first-key-of-the-tests", "psk-second-key-of-the-tests", "psk-third-key-of-the-tests"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def status(server: Server, key: str) -> int:
    return server.request("GET", "/v1/models", headers=bearer(key))[0]


def new_key(path: Path, name: str, *limits: str) -> str:
    command = [sys.executable, "-m", "penstock", "key", "new", name, "--file", str(path), *limits]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


def test_only_known_keys_come_in_and_none_is_to_be_seen(serve: Callable[..., Server]) -> None:
    server = serve("--api-key", FIRST, "--step-ms", "1", environment={"PENSTOCK_API_KEY": f"{SECOND},{THIRD}"})
    for key in (FIRST, SECOND, THIRD):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
            assert client.completions.create(model="simulator", prompt="x", max_tokens=3).usage
    assert server.request("GET", "/v1/models", headers={"x-api-key": FIRST})[0] == 200
    with pytest.raises(openai.AuthenticationError) as caught:
        server.client.models.list()
    assert caught.value.code == "invalid_api_key"
    found, headers, body = server.request("POST", "/v1/messages", b"{}", {"x-api-key": "psk-wrong"})
    assert (found, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
    assert body["request_id"] == headers["request-id"]
    found, headers, _ = server.request("POST", "/v1/chat/completions", b"x" * 4_000_000)
    assert (found, headers["www-authenticate"]) == (401, "Bearer"), "a large body is not in the way of the answer"
    for path in ("/live", "/ready", "/health", "/metrics"):
        assert server.request("GET", path)[0] == 200
    assert server.metric("penstock_failed_authentications_total", reason="unknown") == 2
    assert server.metric("penstock_failed_authentications_total", reason="missing") == 1
    for child in psutil.Process(server.process.pid).children(recursive=True):
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes().decode()
        assert "penstock" in command
        assert "psk-" not in command
    assert "PENSTOCK_API_KEY" not in server.child("worker").environ(), "a worker has no use for it"
    _, _, metrics = server.request("GET", "/metrics")
    assert server.stop() == 0
    for shown in (metrics, "\n".join(server.log)):
        assert "psk-" not in shown
    assert any("API keys that are accepted: 3" in line for line in server.log)


def test_a_key_is_revoked_without_a_restart(serve: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    alice, bob = new_key(path, "alice"), new_key(path, "bob")
    server = serve("--key-file", str(path), "--step-ms", "20")
    assert [status(server, key) for key in (alice, bob, "psk-wrong")] == [200, 200, 401]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=alice, max_retries=0) as client:
        endless = {"ignore_eos": True}
        stream = iter(client.completions.create(model="simulator", prompt="x", max_tokens=150, stream=True, extra_body=endless))
        next(stream)
        front_end = server.child("frontend").pid
        command = [sys.executable, "-m", "penstock", "key", "remove", "alice", "--file", str(path)]
        subprocess.run(command, capture_output=True, check=True, timeout=30)
        wait_until(lambda: status(server, alice) == 401)
        assert status(server, bob) == 200
        assert list(stream)[-1].choices[0].finish_reason == "length", "what runs goes on to its end"
    carol = new_key(path, "carol")
    wait_until(lambda: status(server, carol) == 200)
    path.write_text("broken [")
    wait_until(lambda: any("the keys stay as they were" in line for line in server.log))
    assert [status(server, key) for key in (alice, bob, carol)] == [401, 200, 200]
    assert server.child("frontend").pid == front_end
    assert not [line for line in server.log if "psk-" in line]


def test_every_key_has_limits_of_its_own(serve: Callable[..., Server], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    often, rarely = new_key(path, "often"), new_key(path, "rarely", "--requests-per-minute", "2")
    one, few = new_key(path, "one", "--concurrency", "1"), new_key(path, "few", "--tokens-per-minute", "20")
    reader = {"PENSTOCK_METRICS_KEY": "for-prometheus"}
    server = serve("--key-file", str(path), "--step-ms", "20", "--requests-per-minute", "1000", environment=reader)
    server.metrics_headers = bearer("for-prometheus")

    def ask(key: str, **fields: object) -> tuple[int, Any, Any]:
        body = {"model": "simulator", "prompt": "x", "max_tokens": 2, "ignore_eos": True, **fields}
        return server.request("POST", "/v1/completions", json.dumps(body).encode(), bearer(key))

    assert [ask(key)[0] for key in (rarely, rarely, often, often, often)] == [200] * 5
    found, headers, body = ask(rarely)
    assert (found, body["error"]["code"], body["error"]["type"]) == (429, "rate_limit_exceeded", "rate_limit_error")
    assert "`requests_per_minute` of key `rarely` is 2: try again in " in body["error"]["message"]
    assert 20 <= int(headers["retry-after"]) <= 30
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("2", "0")
    assert ask(often)[0] == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=one, max_retries=0) as client:
        endless = {"ignore_eos": True}
        stream = client.completions.create(model="simulator", prompt="x", max_tokens=100_000, stream=True, extra_body=endless)
        next(iter(stream))
        found, headers, body = ask(one)
        assert (found, headers["retry-after"]) == (429, "1")
        assert "`concurrency` of key `one` allows 1 generations at once" in body["error"]["message"]
        stream.close()
        wait_until(lambda: ask(one)[0] == 200)
    found, _, body = ask(one, n=2)
    assert (found, body["error"]["code"]) == (400, "request_too_large")
    assert ask(few, max_tokens=30)[0] == 200, "nobody knows beforehand how long an answer will be"
    found, headers, body = ask(few)
    assert (found, "tokens_per_minute" in body["error"]["message"]) == (429, True)
    assert int(headers["retry-after"]) > 30
    assert server.metric("penstock_key_requests_total", key="rarely") == 2
    assert server.metric("penstock_key_tokens_total", key="few", kind="completion") == 30
    assert server.metric("penstock_quota_refusals_total", key="rarely", limit="requests_per_minute") == 1
    assert server.metric("penstock_quota_refusals_total", key="few", limit="tokens_per_minute") == 1


def test_a_hostile_body_costs_a_request_and_little_memory(serve: Callable[..., Server], tmp_path: Path) -> None:
    """Millions of empty prompts froze the event loop for seconds and took 400 MB, as often as the key liked."""
    path = tmp_path / "keys.toml"
    hostile, other = new_key(path, "hostile", "--requests-per-minute", "2"), new_key(path, "other")
    server = serve("--key-file", str(path), "--step-ms", "1")
    body = b'{"model":"simulator","prompt":[' + b'"",' * (4 * 2**20 // 3) + b'""]}'

    def ask(key: str, body: bytes) -> int:
        return server.request("POST", "/v1/completions", body, bearer(key))[0]

    assert ask(other, b'{"model":"simulator","prompt":"x"}') == 200
    status = Path(f"/proc/{server.child('frontend').pid}/status")

    def most_memory() -> int:
        (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024

    before = most_memory()
    assert [ask(hostile, body) for _ in range(4)] == [413, 413, 429, 429]
    assert most_memory() - before < 8 * len(body)
    assert server.metric("penstock_limits_reached_total", limit="body_cost") == 2, "what is refused by the rate is not looked at"
    assert server.metric("penstock_limits_reached_total", limit="requests_per_minute") == 2
    assert server.metric("penstock_body_bytes") == 0
    assert ask(other, b'{"model":"simulator","prompt":"x"}') == 200


def test_pages_of_named_origins_may_ask(serve: Callable[..., Server]) -> None:
    page = "https://chat.example.org"
    server = serve("--cors-origin", page, environment={"PENSTOCK_API_KEY": FIRST})
    preflight = {"origin": page, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    found, headers, _ = server.request("OPTIONS", "/v1/completions", headers=preflight)
    assert (found, headers["access-control-allow-origin"], headers["access-control-allow-headers"]) == (204, page, "authorization")
    body = json.dumps({"model": "simulator", "prompt": "x", "max_tokens": 3, "stream": True}).encode()
    found, headers, text = server.request("POST", "/v1/completions", body, {**bearer(FIRST), "origin": page})
    assert (found, headers["access-control-allow-origin"], headers["vary"]) == (200, page, "origin")
    assert text.endswith("data: [DONE]\n\n")


def test_without_the_flags_everything_is_as_ever(server: Server) -> None:
    found, headers, _ = server.request("OPTIONS", "/v1/completions", headers={"origin": "https://chat.example.org"})
    assert found == 405
    found, headers, _ = server.request("GET", "/v1/models", headers={"origin": "https://chat.example.org"})
    assert found == 403, "a server without keys answers no page of another origin"
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("key", [None, FIRST])
def test_an_open_door_to_other_machines_is_not_overlooked(serve: Callable[..., Server], key: str | None) -> None:
    server = serve("--host", "0.0.0.0", environment={"PENSTOCK_API_KEY": key} if key else None)
    assert server.stop(signal.SIGTERM) == 0
    ready = next(number for number, line in enumerate(server.log) if "ready: " in line)
    told = [number for number, line in enumerate(server.log) if "ANYONE CAN USE THIS SERVER" in line and "WARNING" in line]
    if key:
        assert not told
    else:
        assert len(told) == 2
        assert told[0] < ready < told[1], "at the start, and where the log ends"
        text = " ".join(server.log)
        assert "--key-file" in text
        assert "--api-key" in text


def test_an_empty_variable_is_no_open_door() -> None:
    command = [sys.executable, "-m", "penstock", "serve", "--engine", "simulator", "--port", "0"]
    environment = {**os.environ, "PENSTOCK_API_KEY": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=environment)
    assert done.returncode == 2
    assert "PENSTOCK_API_KEY is set but empty" in done.stderr
