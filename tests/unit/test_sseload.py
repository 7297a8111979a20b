"""The load client in C counts each kind of wrong reply, and takes every correct form of a reply as correct."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sseload import build_client

REQUESTS = 120
EVENTS = [
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"delta": {"content": "one"}, "finish_reason": null}]}\n\n',
    b': a comment\n\ndata:{"choices":[{"text":"two","finish_reason":null}]}\r\n\r\n',
    b'data: {"choices": [{"delta": {}, "finish_reason": "length"}]}\n\n',
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n',
]
DONE = b"data: [DONE]\n\n"
GOOD = b"".join(EVENTS) + DONE
HEAD = b"HTTP/1.1 %d X\r\ncontent-type: text/event-stream\r\n%s\r\n"


def chunked(body: bytes, size: int = 50, end: bytes = b"0\r\n\r\n") -> bytes:
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    return HEAD % (200, b"Transfer-Encoding: chunked\r\n") + b"".join([b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces]) + end


def with_length(body: bytes, status: int = 200, length: int | None = None) -> bytes:
    return HEAD % (status, b"Content-Length: %d\r\n" % (len(body) if length is None else length)) + body


# The reply, whether the server closes the connection behind it, and the counter that it raises.
REPLIES: dict[str, tuple[bytes, bool, str | None]] = {
    "chunked": (chunked(GOOD), False, None),
    "chunks of one byte": (chunked(GOOD, 1), False, None),
    "trailers": (chunked(GOOD, end=b"0\r\nx-more: y\r\n\r\n"), False, None),
    "content-length": (with_length(GOOD), False, None),
    "until the connection closes": (HEAD % (200, b"") + GOOD, True, None),
    "continue first": (b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(GOOD), False, None),
    "an error status": (with_length(b'{"error": "busy"}', 503), False, "http_error"),
    "no [DONE]": (chunked(b"".join(EVENTS)), False, "no_done"),
    "an event after [DONE]": (chunked(GOOD + EVENTS[0]), False, "after_done"),
    "an error event": (chunked(b'data: {"error":{"message":"no"}}\n\n' + GOOD), False, "error_events"),
    "cut off": (chunked(GOOD, end=b""), True, "truncated"),
    "too short": (with_length(GOOD, length=len(GOOD) + 1), True, "truncated"),
    "a token too few": (chunked(GOOD.replace(b'tokens": 2', b'tokens": 1')), False, "token_mismatch"),
    "no usage": (chunked(GOOD.replace(b"completion_tokens", b"tokens")), False, "usage_missing"),
    "two finish reasons": (chunked(GOOD.replace(EVENTS[3], 2 * EVENTS[3])), False, "finish_mismatch"),
    "more text": (chunked(GOOD.replace(EVENTS[1], 2 * EVENTS[1])), False, "content_mismatch"),
}


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fragment: int) -> None:
    """Request number N gets reply number N, in fragments of this size."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"POST /stream HTTP/1.1\r\n" in head
            assert b"x-test: yes\r\n" in head
            body = await reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
            reply, closes, _ = list(REPLIES.values())[int(json.loads(body)["id"]) % len(REPLIES)]
            for start in range(0, len(reply), fragment):
                writer.write(reply[start : start + fragment])
                await writer.drain()
            if closes:
                return
    except asyncio.IncompleteReadError:
        pass
    finally:
        writer.close()


async def figures(tmp_path: Path, fragment: int, *options: str) -> tuple[int | None, dict[str, Any]]:
    client = build_client()
    if client is None:
        pytest.skip("no C compiler")
    body = tmp_path / "body.json"
    body.write_text('{"id": "@@ID@@"}')
    server = await asyncio.start_server(lambda reader, writer: answer(reader, writer, fragment), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        arguments = ["-p", str(port), "-u", "/stream", "-b", str(body), "-c", "7", "-n", str(REQUESTS), "-H", "x-test: yes", "--quiet"]
        arguments += ["--expect-tokens", "2", "--expect-finishes", "1", "--expect-content", "2", "--timeout", "60", *options]
        process = await asyncio.create_subprocess_exec(client, *arguments, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
    # The connections end when the client does; their tasks, a moment later.
    while len(asyncio.all_tasks()) > 1:
        await asyncio.sleep(0)
    found: dict[str, Any] = json.loads(output)
    return process.returncode, found


@pytest.mark.parametrize("fragment", [7, 100_000])
@pytest.mark.parametrize("options", [(), ("--slow", "3", "--slow-bytes", "97", "--slow-ms", "1")], ids=["fast", "slow"])
async def test_each_reply_is_counted_as_what_it_is(tmp_path: Path, fragment: int, options: tuple[str, ...]) -> None:
    code, found = await figures(tmp_path, fragment, *options)
    counters = [counter for _, _, counter in REPLIES.values()]
    counts = Counter(counters[number % len(counters)] or "ok" for number in range(REQUESTS))
    assert found["finished"] == REQUESTS
    assert {name: found[name] for name in counts} == dict(counts)
    assert found["proto_errors"] == found["conn_errors"] == found["timed_out"] == 0
    assert found["status"] == {"200": REQUESTS - counts["http_error"], "503": counts["http_error"]}
    assert code == 3


async def test_the_figures_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "REPLIES", {"chunked": REPLIES["chunked"]})
    code, found = await figures(tmp_path, 100_000, "-l", "label", "--dump", str(tmp_path / "lines"))
    assert (code, found["ok"], found["label"], found["path"]) == (0, REQUESTS, "label", "/stream")
    assert found["events"] == REQUESTS * 6
    assert found["content_events"] == REQUESTS * 2
    assert found["usage_tokens"] == REQUESTS * 2
    assert found["finish_length"] == REQUESTS
    assert found["body_bytes"] == REQUESTS * len(GOOD)
    assert found["bytes"] == REQUESTS * len(REPLIES["chunked"][0])
    assert found["active_max"] == found["concurrency"] == 7
    assert found["tokens_per_s"] == pytest.approx(found["usage_tokens"] / found["wall_s"], rel=0.01)
    assert 0 < found["ttft_ms"]["p50"] <= found["ttft_ms"]["max"] <= found["total_ms"]["max"]
    lines = (tmp_path / "lines").read_text().splitlines()
    assert Counter(line.split("\t")[0] for line in lines) == {str(number): 7 for number in range(REQUESTS)}
