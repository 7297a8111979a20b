"""Records every HTTP request between a client and the server: a relay that passes bytes on as they come and reads them afterwards."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self
from urllib.parse import urlsplit

CHUNK_BYTES = 2**16


@dataclass
class Exchange:
    """A request and its answer. Names of headers are in small letters. `status` is 0 and `is_whole` false while the answer is missing or
    not complete, as when the client has left."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int = 0
    answer_headers: dict[str, str] = field(default_factory=dict)
    answer: bytes = b""
    is_whole: bool = False
    order: float = 0

    @cached_property
    def json(self) -> Any:
        """The request's body."""
        return json.loads(gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body)

    @cached_property
    def answer_json(self) -> Any:
        return json.loads(self.answer)

    @cached_property
    def events(self) -> list[Any]:
        """The data of the answer's whole events, decoded, without `[DONE]`."""
        lines = self.answer.decode(errors="replace").split("\n")[:-1]
        data = [line.removeprefix("data:").strip() for line in lines if line.startswith("data:")]
        return [json.loads(line) for line in data if line != "[DONE]"]

    @property
    def is_refused(self) -> bool:
        """A status of 4xx or 5xx, or an error in an event of a stream: clients try again after both, so the test may pass nevertheless."""
        if self.status >= 400 or not self.answer_headers.get("content-type", "").startswith("text/event-stream"):
            return self.status >= 400
        return any(event.get("error") or event.get("type") in ("error", "response.failed") for event in self.events)

    def __str__(self) -> str:
        return f"{self.method} {self.path} -> {self.status} {self.answer[:300].decode(errors='replace')}"


class Recorder:
    """Listens on a port of its own and relays each connection to the server. `exchanges` are in the order in which the requests came."""

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._connections: list[_Connection] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._connections:
            connection.close()

    @property
    def exchanges(self) -> list[Exchange]:
        return sorted((exchange for connection in list(self._connections) for exchange in connection.exchanges), key=lambda one: one.order)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection((self._target.hostname, self._target.port))
                connection = _Connection(client, server)
                self._connections.append(connection)
                connection.start()


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self._sockets = client, server
        self._asked, self._answered = bytearray(), bytearray()
        self._orders: list[tuple[int, float]] = []

    def start(self) -> None:
        client, server = self._sockets
        for ends in ((client, server, self._asked), (server, client, self._answered)):
            threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def close(self) -> None:
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _pump(self, source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_BYTES):
                if kept is self._asked:
                    self._orders.append((len(kept), _ORDER.next()))
                kept += data
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    @property
    def exchanges(self) -> Iterator[Exchange]:
        requests, answers = _Bytes(bytes(self._asked)), _Bytes(bytes(self._answered))
        while (found := read_request(requests)) is not None:
            begin, exchange = found
            exchange.order = max(order for offset, order in self._orders if offset <= begin)
            read_answer(answers, exchange)
            yield exchange


class _Counter:
    """Numbers what comes first, second, and so on, over all connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def next(self) -> int:
        with self._lock:
            self._count += 1
            return self._count


_ORDER = _Counter()


@dataclass
class _Bytes:
    """What one side has sent, read from front to back."""

    data: bytes
    place: int = 0

    def line(self) -> bytes | None:
        return self.until(b"\r\n")

    def until(self, mark: bytes) -> bytes | None:
        """None if the mark has not come yet."""
        end = self.data.find(mark, self.place)
        if end < 0:
            return None
        found, self.place = self.data[self.place : end], end + len(mark)
        return found

    def take(self, count: int) -> bytes:
        """As much of it as has come."""
        found = self.data[self.place : self.place + count]
        self.place += len(found)
        return found

    def body(self, headers: dict[str, str], *, is_answer: bool) -> tuple[bytes, bool]:
        """The body, and whether it is whole."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks()
        if "content-length" in headers:
            length = int(headers["content-length"])
            found = self.take(length)
            return found, len(found) == length
        return (self.take(len(self.data)), True) if is_answer else (b"", True)

    def _chunks(self) -> tuple[bytes, bool]:
        body = b""
        while (line := self.line()) is not None:
            length = int(line.split(b";")[0], 16)
            part = self.take(length)
            body += part
            if len(part) < length or self.line() is None:
                break
            if not length:
                return body, True
        return body, False


def _head(source: _Bytes) -> tuple[list[str], dict[str, str]] | None:
    """The words of the first line, and the headers."""
    head = source.until(b"\r\n\r\n")
    if head is None:
        return None
    first, *rest = head.decode("latin-1").split("\r\n")
    pairs = (line.split(":", 1) for line in rest)
    return first.split(" "), {name.lower(): value.strip() for name, value in pairs}


def read_request(source: _Bytes) -> tuple[int, Exchange] | None:
    """The next request and where it begins. None if no whole one has come."""
    begin, head = source.place, _head(source)
    if head is None:
        return None
    (method, path, *_), headers = head
    body, _ = source.body(headers, is_answer=False)
    return begin, Exchange(method, path, headers, body)


def read_answer(source: _Bytes, exchange: Exchange) -> None:
    """Fills in the answer as far as it has come. Answers that announce another (1xx) are skipped, except 101."""
    while (head := _head(source)) is not None:
        words, headers = head
        exchange.status, exchange.answer_headers = int(words[1]), headers
        if exchange.status == 101 or exchange.status >= 200:
            break
    else:
        exchange.status = 0
        return
    has_no_body = exchange.method == "HEAD" or exchange.status in (101, 204, 304)
    exchange.answer, exchange.is_whole = (b"", True) if has_no_body else source.body(exchange.answer_headers, is_answer=True)


class Outside:
    """Stands for everything that is not on this machine: clients get it as their proxy. It refuses and keeps what was asked for."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked: list[str] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._refuse, args=(client,), daemon=True).start()

    def _refuse(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if data := client.recv(CHUNK_BYTES):
                self.asked.append(" ".join(data.split(b"\r\n", 1)[0].decode("latin-1").split(" ")[:2]))
                client.sendall(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
