"""One tenant cannot see, close, continue or resume what belongs to another, by any route of the document that takes an id."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from e2e.harness import Server
from penstock.api.app import ROUTES

ALICE, MALLORY = "key-of-alice", "key-of-mallory"
# What belongs to nobody: models are for all.
PUBLIC = {("GET", "/v1/models/{id}")}
OWNED = [
    (route.method, route.documented_path) for route in ROUTES if "{" in route.path and (route.method, route.documented_path) not in PUBLIC
]


@dataclass(frozen=True)
class Property:
    """What Alice has."""

    server: Server
    ids: dict[str, dict[str, str]]
    """By the beginning of a route's path: the values of its parameters."""

    def path(self, route: str) -> str:
        (parameters,) = [values for beginning, values in self.ids.items() if route.startswith(f"{beginning}/{{")]
        for name, value in parameters.items():
            route = route.replace("{" + name + "}", value)
        assert "{" not in route, route
        return route


def ask(server: Server, key: str, method: str, path: str, **fields: object) -> tuple[int, Any]:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    body = json.dumps(fields).encode() if method == "POST" else None
    status, _, answer = server.request(method, path, body, headers)
    return status, answer


def begin_stream(server: Server, path: str, **fields: object) -> str:
    """A long stream that Alice asked for, and was cut off from. Returns its id."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        body = {"model": "simulator", "max_tokens": 3000, "ignore_eos": True, "stream": True, **fields}
        connection.request("POST", path, json.dumps(body), {"authorization": f"Bearer {ALICE}"})
        response = connection.getresponse()
        assert response.status == 200, response.read()
        while not (line := response.readline()).startswith(b"data: "):
            pass
        event = json.loads(line[6:])
        return str(event.get("id") or event["response"]["id"])
    finally:
        connection.close()


@pytest.fixture(scope="module")
def property_of_alice() -> Iterator[Property]:
    server = Server("--step-ms", "5", environment={"PENSTOCK_API_KEY": f"{ALICE},{MALLORY}"}).wait_ready()
    try:
        messages = [{"role": "user", "content": "x"}]
        resumable = {"stream_options": {"resumable": True}}
        session = {"session_control": {"session_id": "agent", "action": "open"}}
        status, answer = ask(server, ALICE, "POST", "/v1/completions", model="simulator", prompt="x", max_tokens=2, nvext=session)
        assert status == 200, answer
        status, conversation = ask(
            server, ALICE, "POST", "/v1/conversations", items=[{"type": "message", "role": "user", "content": "a secret"}]
        )
        assert status == 200, conversation
        status, items = ask(server, ALICE, "GET", f"/v1/conversations/{conversation['id']}/items")
        assert status == 200, items
        status, response = ask(
            server, ALICE, "POST", "/v1/responses", model="simulator", input="a secret", background=True, max_output_tokens=3000
        )
        assert status == 200, response
        ids = {
            "/v1/sessions": {"id": "agent"},
            "/v1/chat/completions": {"id": begin_stream(server, "/v1/chat/completions", messages=messages, **resumable)},
            "/v1/completions": {"id": begin_stream(server, "/v1/completions", prompt="x", **resumable)},
            "/v1/responses": {"id": response["id"], "response_id": response["id"]},
            "/v1/conversations": {
                "id": conversation["id"],
                "conversation_id": conversation["id"],
                "item_id": items["data"][0]["id"],
            },
        }
        yield Property(server, ids)
    finally:
        server.stop()


def seen_by_alice(found: Property) -> dict[str, int]:
    """What she finds of her own."""
    reads = [path for method, path in OWNED if method == "GET"]
    return {path: status_of_beginning(found.server, found.path(path)) for path in reads}


def status_of_beginning(server: Server, path: str) -> int:
    """The status alone: a stream would go on for long."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {ALICE}"})
        return connection.getresponse().status
    finally:
        connection.close()


def test_there_is_something_to_guard() -> None:
    assert len(OWNED) >= 10


@pytest.mark.parametrize(("method", "route"), OWNED)
def test_another_key_finds_nothing(property_of_alice: Property, method: str, route: str) -> None:
    server = property_of_alice.server
    before = seen_by_alice(property_of_alice)
    assert set(before.values()) == {200}, before
    path = property_of_alice.path(route)
    fields: dict[str, Any] = {}
    if method == "POST":
        fields = {"items": [{"type": "message", "role": "user", "content": "mine"}]} if route.endswith("/items") else {"metadata": {}}
    for query in ("", "?stream=true&starting_after=0") if route == "/v1/responses/{id}" and method == "GET" else ("",):
        status, answer = ask(server, MALLORY, method, path + query, **(fields if not route.endswith("/cancel") else {}))
        assert status == 404, answer
        # Nothing tells it from an id that nobody has.
        unknown = path
        for value in set(property_of_alice.ids[next(b for b in property_of_alice.ids if route.startswith(b + "/{"))].values()):
            unknown = unknown.replace(value, value[:-4] + "0000")
        _, other = ask(server, MALLORY, method, unknown + query, **(fields if not route.endswith("/cancel") else {}))
        assert other["error"]["code"] == answer["error"]["code"]
    assert "secret" not in json.dumps(answer)
    assert seen_by_alice(property_of_alice) == before


def test_another_key_cannot_continue(property_of_alice: Property) -> None:
    server, ids = property_of_alice.server, property_of_alice.ids
    _, mine = ask(server, ALICE, "POST", "/v1/responses", model="simulator", input="a secret", max_output_tokens=2)
    for fields in (
        {"previous_response_id": mine["id"]},
        {"conversation": ids["/v1/conversations"]["id"]},
        {"input": [{"type": "item_reference", "id": mine["output"][0]["id"]}]},
    ):
        asked: dict[str, Any] = {"model": "simulator", "input": "x", "max_output_tokens": 2, **fields}
        status, answer = ask(server, MALLORY, "POST", "/v1/responses", **asked)
        assert status in (400, 404), answer
        assert "secret" not in json.dumps(answer)
        status, answer = ask(server, ALICE, "POST", "/v1/responses", **asked)
        assert status == 200, answer


def test_lists_have_only_what_is_ones_own(property_of_alice: Property) -> None:
    server = property_of_alice.server
    assert [session["id"] for session in ask(server, ALICE, "GET", "/v1/sessions")[1]["data"] if session["id"] == "agent"] == ["agent"]
    assert ask(server, MALLORY, "GET", "/v1/sessions")[1]["data"] == []


def test_a_session_of_the_same_name_is_another(property_of_alice: Property) -> None:
    server = property_of_alice.server
    session = {"session_control": {"session_id": "agent", "action": "close"}}
    ask(server, MALLORY, "POST", "/v1/completions", model="simulator", prompt="x", max_tokens=2, nvext=session)
    assert ask(server, ALICE, "GET", "/v1/sessions/agent")[0] == 200


def test_no_key_no_answer(property_of_alice: Property) -> None:
    for method, route in OWNED:
        status, _, _ = property_of_alice.server.request(method, property_of_alice.path(route))
        assert status == 401
