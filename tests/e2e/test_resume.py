"""A client whose connection is cut again and again has the whole text in the end, of chat and of completions."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from e2e.harness import Server

CUTS = 20


class Reader:
    """Reads a resumable stream, and loses its connection when the test wants it."""

    def __init__(self, server: Server, path: str) -> None:
        self._port = server.port
        self._path = path
        self.stream_id = ""
        self.last = -1
        self.events: list[Any] = []
        self.done = False

    def begin(self, body: dict[str, Any], events: int) -> None:
        self._read("POST", self._path, json.dumps(body).encode(), {}, events)

    def resume(self, events: int) -> None:
        self._read("GET", f"{self._path}/{self.stream_id}", None, {"last-event-id": str(self.last)}, events)

    def _read(self, method: str, path: str, body: bytes | None, headers: dict[str, str], events: int) -> None:
        """Reads so many events, and cuts the connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            assert response.status == 200, response.read()
            while events and not self.done:
                events -= self._take(response.readline())
        finally:
            connection.close()

    def _take(self, line: bytes) -> bool:
        if line.startswith(b"id: "):
            number = int(line[4:])
            assert number == self.last + 1
            self.last = number
        elif line == b"data: [DONE]\n":
            self.done = True
        elif line.startswith(b"data: "):
            self.events.append(json.loads(line[6:]))
            self.stream_id = self.events[-1]["id"]
            return True
        return False


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_twenty_cuts_cost_nothing(server: Server, path: str) -> None:
    prompt: dict[str, Any] = {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": "simulator", **prompt, "max_tokens": 1200, "ignore_eos": True, "seed": 5}
    _, _, whole = server.request("POST", path, json.dumps(body).encode())
    expected = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
    reader = Reader(server, path)
    reader.begin({**body, "stream": True, "stream_options": {"resumable": True, "include_usage": True}}, 7)
    for cut in range(CUTS):
        reader.resume(1 + cut)
        assert not reader.done
    reader.resume(10**6)
    assert reader.done
    choices = [event["choices"][0] for event in reader.events if event["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    assert text == expected
    assert reader.events[-1]["usage"]["completion_tokens"] == 1200


def test_another_key_finds_no_stream(server: Server) -> None:
    body = {"model": "simulator", "prompt": "x", "max_tokens": 2, "stream": True, "stream_options": {"resumable": True}}
    reader = Reader(server, "/v1/completions")
    reader.begin(body, 10)
    status, _, answer = server.request("GET", f"/v1/completions/{reader.stream_id}", headers={"authorization": "Bearer another"})
    assert (status, answer["error"]["code"]) == (404, "stream_not_found")
