"""What a web page can do to a server without keys through its visitor's browser: the requests that browsers send."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable

import pytest

from e2e.harness import Server

BODY = json.dumps({"model": "simulator", "prompt": "x", "max_tokens": 1}).encode()
EVIL = "http://evil.example"


@pytest.mark.parametrize(
    ("method", "headers", "status", "names"),
    [
        # Its host name means this machine since a moment ago.
        (
            "POST",
            {"host": "evil.example:80", "origin": f"{EVIL}:80", "content-type": "application/json"},
            403,
            "--allowed-host evil.example",
        ),
        ("GET", {"host": "evil.example:8000"}, 403, "--allowed-host evil.example"),
        # fetch(…, {mode: "no-cors"}), a form, a beacon, a frame in a sandbox, a Blob without a type.
        ("POST", {"origin": EVIL, "content-type": "text/plain;charset=UTF-8", "sec-fetch-mode": "no-cors"}, 403, f"--cors-origin {EVIL}"),
        ("POST", {"origin": EVIL, "content-type": "application/x-www-form-urlencoded"}, 403, f"--cors-origin {EVIL}"),
        ("POST", {"origin": "null", "content-type": "text/plain"}, 403, "origin 'null'"),
        ("POST", {"origin": EVIL}, 403, f"--cors-origin {EVIL}"),
        # A browser that leaves Origin out.
        ("POST", {"content-type": "text/plain"}, 415, "expected application/json"),
        ("POST", {"content-type": "application/x-www-form-urlencoded"}, 415, "-H 'content-type: application/json'"),
    ],
)
def test_a_page_cannot_use_the_server(server: Server, method: str, headers: dict[str, str], status: int, names: str) -> None:
    path = "/v1/completions" if method == "POST" else "/v1/models"
    before = sum_of(server, "penstock_pages_refused_total")
    found, _, content = server.request(method, path, BODY if method == "POST" else None, headers)
    assert found == status, content
    assert names in content["error"]["message"]
    assert sum_of(server, "penstock_pages_refused_total") == before + 1


def sum_of(server: Server, name: str) -> float:
    _, _, text = server.request("GET", "/metrics")
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))


def test_programs_notice_nothing(server: Server) -> None:
    assert server.client.completions.create(model="simulator", prompt="x", max_tokens=1).choices
    for headers in ({}, {"content-type": "application/json"}, {"host": "localhost"}, {"host": f"[::1]:{server.port}"}):
        assert server.request("POST", "/v1/completions", BODY, headers)[0] == 200
    own = f"http://127.0.0.1:{server.port}"
    assert server.request("POST", "/v1/completions", BODY, {"origin": own, "content-type": "application/json"})[0] == 200


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_health_check_without_a_host_is_answered(server: Server, version: bytes) -> None:
    """As load balancers send it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(b"GET /ready HTTP/%s\r\nconnection: close\r\n\r\n" % version)
        assert connection.recv(100).split()[1] == b"200"


def test_a_server_on_all_addresses_has_its_own_name_and_those_that_are_given(serve: Callable[..., Server]) -> None:
    server = serve("--host", "0.0.0.0", "--allowed-host", "penstock", "--allowed-host", "llm.example.org")
    for host, status in (("penstock:8000", 200), ("llm.example.org", 200), ("10.1.2.3", 200), ("evil.example", 403)):
        assert server.request("GET", "/v1/models", headers={"host": host})[0] == status
    assert server.request("GET", "/v1/models", headers={"host": f"{socket.gethostname()}:1"})[0] == 200


def test_with_keys_no_page_can_do_anything_anyway(serve: Callable[..., Server]) -> None:
    server = serve(environment={"PENSTOCK_API_KEY": "one-key"})
    page = {"host": "evil.example", "origin": EVIL, "content-type": "text/plain"}
    assert server.request("POST", "/v1/completions", BODY, page)[0] == 401
    assert server.request("POST", "/v1/completions", BODY, {**page, "authorization": "Bearer one-key"})[0] == 200
