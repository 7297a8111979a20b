"""Who may read the metrics, and where: on the port of the API, with a key, or on an address of their own."""

from __future__ import annotations

import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from e2e.harness import Server

BODY = json.dumps({"model": "simulator", "prompt": "x", "max_tokens": 3, "ignore_eos": True}).encode()
KEYS = {"PENSTOCK_API_KEY": "first-key,second-key"}


def ask(port: int, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, response.read().decode(), {name.lower(): value for name, value in response.getheaders()}
    finally:
        connection.close()


def own_port(server: Server) -> int:
    (found,) = [found for line in server.log if (found := re.search(r"metrics on http://127\.0\.0\.1:(\d+)/metrics", line))]
    return int(found[1])


def use(server: Server) -> None:
    for key in ("first-key", "second-key", "second-key"):
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        assert server.request("POST", "/v1/completions", BODY, headers)[0] == 200


def test_names_of_keys_are_not_on_the_port_of_the_api(serve: Callable[..., Server]) -> None:
    server = serve(environment=KEYS)
    use(server)
    status, text, _ = ask(server.port)
    assert status == 200
    assert "penstock_tokens_delivered_total 9.0" in text
    assert "api-key-" not in text
    assert "key=" not in text


def test_metrics_with_a_key_of_their_own(serve: Callable[..., Server]) -> None:
    server = serve(environment={**KEYS, "PENSTOCK_METRICS_KEY": "for-prometheus"})
    use(server)
    for headers in ({}, {"authorization": "Bearer first-key"}, {"authorization": "Bearer wrong"}):
        status, text, answered = ask(server.port, **headers)
        assert (status, answered["www-authenticate"]) == (401, "Bearer")
        assert "penstock_" not in text
    status, text, _ = ask(server.port, authorization="Bearer for-prometheus")
    assert status == 200
    assert 'penstock_key_requests_total{key="api-key-2"} 2.0' in text
    assert 'penstock_key_generations{key="api-key-1",state="waiting"} 0.0' in text
    assert ask(server.port, "/v1/models", authorization="Bearer for-prometheus")[0] == 401
    assert "for-prometheus" not in " ".join(server.log)


def test_metrics_on_their_own_address(serve: Callable[..., Server]) -> None:
    server = serve("--metrics-address", "127.0.0.1:0", environment=KEYS)
    use(server)
    port = own_port(server)
    assert ask(server.port)[0] == 404, "not on the port of the API any more"
    status, text, headers = ask(port)
    assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert 'penstock_key_tokens_total{key="api-key-2",kind="completion"} 6.0' in text
    assert 'penstock_key_generations{key="api-key-1",state="running"} 0.0' in text
    assert int(headers["content-length"]) == len(text.encode())
    assert ask(port, method="HEAD")[:2] == (200, "")
    assert ask(port, "/metrics?x=1")[0] == 200
    assert ask(port, "/v1/models", authorization="Bearer first-key")[0] == 404, "nothing else is there"
    assert ask(port, method="POST")[0] == 405
    status, text, _ = ask(port, host="evil.example")
    assert (status, "host_not_allowed" in text) == (403, True), "no web page, either"


def test_the_address_of_the_metrics_can_need_the_key_too(serve: Callable[..., Server]) -> None:
    server = serve("--metrics-address", "127.0.0.1:0", environment={**KEYS, "PENSTOCK_METRICS_KEY": "for-prometheus"})
    port = own_port(server)
    assert ask(port)[0] == 401
    assert ask(port, authorization="Bearer first-key")[0] == 401
    assert ask(port, authorization="Bearer for-prometheus", host="penstock")[0] == 200


def test_bad_connections_hold_nothing_up(serve: Callable[..., Server]) -> None:
    """Half a head, no head at all, a head that never ends, something that is not HTTP; then SIGTERM, while they are still open."""
    server = serve("--metrics-address", "127.0.0.1:0", "--grace", "1")
    port = own_port(server)
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for number, connection in enumerate(connections):
        connection.sendall((b"GET /metrics HTTP/1.1\r\nhost: l", b"", b"x" * 15_000, b"GET /metrics HTTP/1.1\r\n")[number % 4])
    assert ask(port)[0] == 200
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /metrics HTTP/1.1\r\n" + b"x: y\r\n" * 10_000)
        assert connection.recv(100) == b"", "its head is too long"
    assert server.stop() == 0
    for connection in connections:
        connection.close()
    assert not [line for line in server.log if "Traceback" in line or "ERROR" in line], server.log


def test_an_address_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        base = [sys.executable, "-m", "penstock", "frontend", "--port=0", f"--worker=unix:{tmp_path}/w"]
        done = subprocess.run([*base, f"--metrics-address=127.0.0.1:{port}"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert f"cannot listen on --metrics-address 127.0.0.1:{port}: " in done.stderr
    done = subprocess.run([*base, "--metrics-address=9090"], capture_output=True, text=True, timeout=60, check=False)
    assert "--metrics-address is '9090': expected host:port, such as 127.0.0.1:9090" in done.stderr
