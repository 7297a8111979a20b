"""Requests by the official client, and raw ones; what came of them, streamed or whole, in one shape."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from openai.types import CompletionUsage

from e2e.engines.expected import Expected
from e2e.engines.setups import MAX_BATCH, MODEL
from e2e.harness import Server


@dataclass
class Answered:
    """One answer. Texts, tokens and reasons are by choice; `order` has the choices' indices as their events came."""

    texts: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    token_ids: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: CompletionUsage | None = None
    order: list[int] = field(default_factory=list)
    session: dict[str, Any] | None = None
    route: list[dict[str, Any]] | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        assert self.usage.prompt_tokens_details is not None
        assert self.usage.prompt_tokens_details.cached_tokens is not None
        return self.usage.prompt_tokens_details.cached_tokens

    def check(self, expected: Sequence[Expected]) -> None:
        """Raises AssertionError unless text, tokens, finish reasons and usage are these, one expected answer a choice."""
        count = range(len(expected))
        assert [self.texts[index] for index in count] == [one.text for one in expected]
        assert [self.token_ids[index] for index in count] == [list(one.token_ids) for one in expected]
        assert [self.finish_reasons[index] for index in count] == [one.finish_reason for one in expected]
        assert len(self.finish_reasons) == len(expected)
        self.check_usage(len(expected[0].prompt_ids), sum(len(one.token_ids) for one in expected))

    def check_usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        assert self.usage is not None
        assert (self.usage.prompt_tokens, self.usage.completion_tokens) == (prompt_tokens, completion_tokens)
        assert self.usage.total_tokens == prompt_tokens + completion_tokens


def complete(server: Server, prompt: str | list[str] | Sequence[int], stream: bool, **fields: Any) -> Answered:
    """A greedy completion, unless the fields say otherwise."""
    answers: Any = server.client.completions.create(prompt=prompt, **_request(stream, fields))
    return _collected(answers if stream else [answers], lambda choice: choice.text)


def chat(server: Server, content: str | Sequence[dict[str, Any]], stream: bool, **fields: Any) -> Answered:
    """A greedy turn of a chat, with a single message or with many."""
    messages: Any = [{"role": "user", "content": content}] if isinstance(content, str) else content
    answers: Any = server.client.chat.completions.create(messages=messages, **_request(stream, fields))
    return _collected(answers if stream else [answers], lambda choice: (choice.delta if stream else choice.message).content or "")


def _request(stream: bool, fields: dict[str, Any]) -> dict[str, Any]:
    extra = {"return_token_ids": True, **fields.pop("extra_body", {})}
    streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return {"model": MODEL, "temperature": 0, "timeout": 120, **streaming, **fields, "extra_body": extra}


def _collected(answers: Iterable[Any], text_of: Any) -> Answered:
    collected = Answered()
    for answer in answers:
        for choice in answer.choices:
            assert choice.index not in collected.finish_reasons, "an event after the last one"
            collected.texts[choice.index] += text_of(choice)
            collected.token_ids[choice.index] += (choice.model_extra or {}).get("token_ids") or []
            collected.order.append(choice.index)
            if choice.finish_reason is not None:
                collected.finish_reasons[choice.index] = choice.finish_reason
        collected.usage = answer.usage or collected.usage
        told = (answer.model_extra or {}).get("nvext") or {}
        collected.session = told.get("session", collected.session)
        collected.route = told.get("route", collected.route)
    return collected


class Reading:
    """A greedy stream of which the first event has been read."""

    def __init__(self, server: Server, one: Expected, tokens: int, **extra_body: Any) -> None:
        self._stream = iter(
            server.client.completions.create(
                model=MODEL,
                prompt=list(one.prompt_ids),
                max_tokens=tokens,
                temperature=0,
                stream=True,
                timeout=600,
                extra_body=extra_body,
            )
        )
        self._begun = next(self._stream).choices[0].text

    def rest(self) -> str:
        """The whole text, when the stream has ended."""
        return self._begun + "".join(chunk.choices[0].text for chunk in self._stream)


def read_all(readings: Sequence[Reading]) -> list[str]:
    """The texts of streams that are read at once."""
    with ThreadPoolExecutor(len(readings)) as pool:
        return list(pool.map(Reading.rest, readings))


def begin_raw(server: Server, path: str = "/v1/completions", receive_buffer: int | None = None, **fields: Any) -> socket.socket:
    """Sends a streaming request on a socket of its own, and reads nothing."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(120)
    connection.connect(("127.0.0.1", server.port))
    body = json.dumps({"model": MODEL, "temperature": 0, "stream": True, **fields}).encode()
    connection.sendall(b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body)
    return connection


def begin_stalled(server: Server, content: str, tokens: int) -> socket.socket:
    """Sends a greedy chat whose answer does not end while nobody reads it: its choices and logprobs are more than the socket holds."""
    asked = {"n": MAX_BATCH, "max_tokens": tokens, "logprobs": True, "top_logprobs": 20, "return_token_ids": True}
    return begin_raw(server, "/v1/chat/completions", receive_buffer=4096, messages=[{"role": "user", "content": content}], **asked)


def check_stalled(connection: socket.socket, expected: Expected) -> list[int]:
    """Reads it to its end; every choice must be this. Returns how many tokens each event had."""
    choices = [choice for event in read_events(connection) for choice in event["choices"]]
    for index in range(MAX_BATCH):
        pieces = [choice for choice in choices if choice["index"] == index]
        assert "".join(piece["delta"].get("content") or "" for piece in pieces) == expected.text
        assert [token for piece in pieces for token in piece.get("token_ids") or ()] == list(expected.token_ids)
        assert sum(len(piece["logprobs"]["content"]) for piece in pieces if piece["logprobs"]) == len(expected.token_ids)
        assert [piece["finish_reason"] for piece in pieces if piece["finish_reason"]] == [expected.finish_reason]
    return [len(choice.get("token_ids") or ()) for choice in choices]


def read_events(connection: socket.socket) -> list[Any]:
    """The events of a whole response, decoded, without the last, which says that it was whole."""
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        piece = connection.recv(65536)
        assert piece, f"the stream broke off: {data[-500:]!r}"
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    events = [line[6:] for line in _unchunked(body).split(b"\n") if line.startswith(b"data: ")]
    assert events.pop() == b"[DONE]", events[-1]
    return [json.loads(event) for event in events]


def _unchunked(body: bytes) -> bytes:
    """The payload of HTTP's chunked encoding."""
    parts = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        parts.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    return b"".join(parts)


def is_idle(server: Server) -> bool:
    """No worker has anything left to compute."""
    _, _, text = server.request("GET", "/metrics")
    lines = [line for line in text.splitlines() if line.startswith(("penstock_requests_running{", "penstock_requests_queued{"))]
    assert any('role="worker"' in line for line in lines), text
    return all(float(line.rsplit(" ", 1)[1]) == 0 for line in lines)
