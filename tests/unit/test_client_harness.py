"""What the tests with real clients rely on: nothing is missed by the recorder, and shares are counted right."""

from __future__ import annotations

import gzip
import http.client
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from chat_model import make_tokenizer
from clients.prefixes import ANSWER, shared_tokens, turns
from clients.recorder import Outside, Recorder
from clients.setup import HERE, RECIPES, Recipe, cache_folder
from clients.table import table
from clients.upstream import InTurn, Prompt, Refused, Upstream, tool_call
from e2e.harness import wait_until
from penstock.text.tokenizers.source import pack_tokenizer


class Echo(http.server.BaseHTTPRequestHandler):
    """Answers in chunks, with what it was sent."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400 if self.path == "/wrong" else 200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for part in (b"data: ", body, b"\n\n", b"data: [DONE]\n\n"):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        if self.path == "/breaks":
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Recorder(f"http://127.0.0.1:{server.server_port}") as recorder:
            yield recorder
        server.shutdown()


def send(recorder: Recorder, *requests: tuple[str, str, bytes | None, dict[str, str]]) -> None:
    """All over one connection."""
    connection = http.client.HTTPConnection(recorder.url.removeprefix("http://"), timeout=10)
    for request in requests:
        connection.request(*request)
        try:
            connection.getresponse().read()
        except http.client.IncompleteRead:
            break
    connection.close()


def test_every_request_is_recorded_in_order(recorder: Recorder) -> None:
    one, zipped = json.dumps({"a": 1}).encode(), gzip.compress(b'{"b": 2}')
    send(
        recorder,
        ("POST", "/v1/one?x=1", one, {"X-Id": "7"}),
        ("GET", "/none", None, {}),
        ("POST", "/wrong", zipped, {"content-encoding": "gzip"}),
    )
    send(recorder, ("POST", "/two", one, {}))
    first, second, third, fourth = recorder.exchanges
    assert (first.method, first.path, first.json, first.status, first.events) == ("POST", "/v1/one?x=1", {"a": 1}, 200, [{"a": 1}])
    assert first.headers["x-id"] == "7"
    assert (second.method, second.status, second.answer) == ("GET", 204, b"")
    assert (third.json, third.status) == ({"b": 2}, 400)
    assert (fourth.path, fourth.is_whole) == ("/two", True)
    assert "/wrong -> 400" in str(third)


def test_an_answer_that_breaks_off_is_not_whole(recorder: Recorder) -> None:
    send(recorder, ("POST", "/breaks", b"1", {}))
    (only,) = recorder.exchanges
    assert (only.status, only.is_whole) == (200, False)


def test_bodies_in_chunks_and_answers_before_the_answer(recorder: Recorder) -> None:
    host, port = recorder.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(b"POST /a HTTP/1.1\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n12")
        seen = b""
        while not seen.endswith(b"0\r\n\r\n"):
            seen += client.recv(1000)
    assert b"100 Continue" in seen
    (only,) = recorder.exchanges
    assert (only.status, only.json, only.is_whole) == (200, 12, True)


def test_what_goes_outside_is_refused_and_kept() -> None:
    with Outside() as outside:
        connection = http.client.HTTPConnection(outside.url.removeprefix("http://"), timeout=10)
        connection.set_tunnel("telemetry.example", 443)
        with pytest.raises(OSError, match="403"):
            connection.request("GET", "/")
        assert outside.asked == ["CONNECT telemetry.example:443"]


def prompt(text: str, answer: str = "x") -> Prompt:
    """A token is a character. The answer ends with a token of its own."""
    whole = text + ANSWER
    return Prompt([ord(char) for char in whole], whole, {}, answer, [*(ord(char) for char in answer), 0])


def test_turns_are_compared_with_the_turn_before() -> None:
    first, other = prompt("system one. question", "yes"), prompt("quite another system. question")
    second = prompt(f"system one. question{ANSWER}yes. thanks")
    changed = prompt(f"System one. question{ANSWER}yes. thanks{ANSWER}x. again")
    found = turns([first, other, second, changed])
    assert [(turn.before, turn.prompt) for turn in found] == [(first, second)], "one shares nothing: it begins another conversation"
    assert (found[0].reusable, found[0].shared, found[0].share) == (len(first.known_ids), len(first.known_ids), 1.0)
    named = turns([first, other, second, changed], conversation=lambda one: one is other)
    assert [turn.share for turn in named] == [1.0, 0.0]
    assert "system" in str(named[1])
    assert turns([first, first]) == [], "without an answer in it, a prompt begins a conversation"
    again, broken = prompt("system one. question", "yes"), prompt("sYstem one. question", "yes")
    third = prompt(f"system one. question{ANSWER}yes. thanks{ANSWER}x. again")
    once = [first, second, third]
    assert [turn.share for turn in turns([*once, again, second, third])] == [1.0] * 4
    assert turns([*once, broken, second]) == turns(once), "a turn is not compared with the same chat over another API, which went on"
    assert (shared_tokens([1, 2], [1, 2, 3]), shared_tokens([], [1]), shared_tokens([1, 2], [1, 3])) == (2, 0, 1)


def test_the_table_has_a_line_for_each_client() -> None:
    row = {"client": "b", "version": "1", "requests": 3, "expected": 1, "unexpected": 0, "outside": 0, "turns": 2}
    rows = [{**row, "reusable": 100, "shared": 90, "lowest": 0.8}, {**row, "reusable": 100, "shared": 100, "lowest": 1.0}]
    rows += [{**row, "client": "a", "turns": 0, "reusable": 0, "shared": 0, "lowest": 1.0}]
    _, first, second = table(rows).splitlines()
    assert first.split() == ["a", "1", "1", "3", "1", "0", "0", "0", "-", "-"]
    assert second.split() == ["b", "1", "2", "6", "2", "0", "0", "4", "95.0%", "80.0%"]


def test_the_scripted_engine(tmp_path: Path) -> None:
    tokenizer = pack_tokenizer(make_tokenizer(tmp_path)).load()

    def ask(script: Any, max_tokens: int = 100) -> tuple[str, str]:
        upstream.begin(script)
        token_ids, finish = upstream.answer({"prompt": tokenizer.encode("<|im_start|>user"), "max_tokens": max_tokens})
        return tokenizer.decode(token_ids), finish

    with Upstream(tokenizer, 1000) as upstream:
        assert ask(lambda seen: f"{seen.text} and {tool_call('f', a=1)}") == (
            'user and \n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
            "stop",
        )
        assert upstream.prompts[0].text == "<|im_start|>user"
        assert ask(InTurn("one two three"), max_tokens=2)[1] == "length"
        with pytest.raises(Refused):
            ask(InTurn())
        assert "the script is over" in upstream.problems[0]


def test_environments_are_named_by_their_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = tmp_path / "a.lock"
    lock.write_text("x==1.2 \\\n")
    recipe = Recipe("a", (lock,))
    before = recipe.folder
    assert recipe.version("x") == "1.2"
    lock.write_text("x==1.3 \\\n")
    assert recipe.folder != before
    monkeypatch.setenv("PENSTOCK_CLIENTS", str(tmp_path))
    assert cache_folder() == tmp_path


def test_locks_are_complete() -> None:
    versions = {"litellm": "litellm", "libraries": "openai-agents", "codex": "@openai/codex", "claude": "@anthropic-ai/claude-code"}
    versions["opencode"] = "opencode-linux-x64-baseline"
    assert set(versions) == set(RECIPES)
    for name, package in versions.items():
        assert RECIPES[name].version(package)[0].isdigit()
        lock = RECIPES[name].files[-1].read_text()
        assert "sha512-" in lock or "--hash=sha256:" in lock
        assert "://" not in lock, "the index is the machine's affair"


def test_a_set_up_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    """And nothing that passes for complete."""
    for name, script in (("npm", "echo $$ >began; exec sleep 300"), ("node", "")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    cache = tmp_path / "cache"
    environment = {**os.environ, "PENSTOCK_CLIENTS": str(cache), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen([sys.executable, HERE / "setup.py", "codex", "claude"], env=environment)

    def begun() -> list[int]:
        return [int(path.read_text()) for path in cache.glob("*/began") if path.read_text().endswith("\n")]

    try:
        wait_until(lambda: len(begun()) == 2, timeout=30)
    finally:
        process.terminate()
    assert process.wait(timeout=30) != 0
    wait_until(lambda: not any(map(psutil.pid_exists, begun())), timeout=30)
    assert not list(cache.glob("*/.complete"))
