"""The server that the fuzzers use, and their findings."""

from __future__ import annotations

import http.client
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from servers import Process, serving

MAX_BODY_BYTES = 4 * 2**20
MEMORY_MIB = 8
STORE_MIB = 16
STALL_SECONDS = 2.0
MAX_SHOWN = 20


@dataclass(frozen=True)
class Pace:
    """The longest answer in tokens and seconds. `growth`: bytes that the largest request needs while it is read; the allocator may
    keep them."""

    context_length: int
    seconds: float
    growth: int
    arguments: tuple[str, ...] = ()


PACES = {
    "simulator": Pace(1024, 30.0, 8 * 2**20, ("--step-ms=0", "--prefill-rate=10000000", "--kv-blocks=512")),
    "embedded": Pace(256, 120.0, 128 * 2**20),
}


class Findings:
    """Statuses by route, and problems."""

    def __init__(self) -> None:
        self.statuses: dict[str, Counter[str]] = {}
        self.problems: Counter[str] = Counter()
        self._shown = 0

    def count(self, route: str, status: str) -> None:
        self.statuses.setdefault(route, Counter())[status] += 1

    def report(self, problem: str, detail: str) -> None:
        self.problems[problem] += 1
        if self._shown < MAX_SHOWN:
            self._shown += 1
            print(f"{problem}: {detail[:1500]}")

    @property
    def cases(self) -> int:
        return sum(counter.total() for counter in self.statuses.values())

    def print(self) -> None:
        for route, counter in sorted(self.statuses.items()):
            listed = ", ".join(f"{status}: {count:,}" for status, count in sorted(counter.items()))
            print(f"{route:45} {counter.total():7,}   {listed}")
        print(f"{'total':45} {self.cases:7,}")
        for problem, count in self.problems.items():
            print(f"PROBLEM: {problem}: {count:,}")


class Target:
    """The server, its document, and a request with a known answer."""

    def __init__(self, server: Process, pace: Pace) -> None:
        self.server = server
        self.pace = pace
        self.document: dict[str, Any] = self.ask("GET", "/openapi.json")
        self.model: str = self.ask("GET", "/v1/models")["data"][0]["id"]
        self.conversation: str = self.ask("POST", "/v1/conversations", {})["id"]
        self._known = self._answer()

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=self.pace.seconds)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, (response.status, content)
            return json.loads(content)
        finally:
            connection.close()

    def known_id(self, path: str, method: str) -> str:
        """The id of an existing object. For DELETE, of one that no other request uses."""
        if "conversations" not in path:
            return self.model
        return str(self.ask("POST", "/v1/conversations", {})["id"]) if method == "DELETE" else self.conversation

    def check_answer(self, findings: Findings) -> None:
        """The answer at the end must equal the answer at the start."""
        try:
            answer = self._answer()
        except (OSError, AssertionError, http.client.HTTPException) as error:
            findings.report("no answer at the end", repr(error))
            return
        if answer != self._known:
            findings.report("a different answer at the end", f"{answer!r} instead of {self._known!r}")

    def _answer(self) -> str:
        body = {"model": self.model, "prompt": "The water", "max_tokens": 16, "temperature": 0, "seed": 7}
        return str(self.ask("POST", "/v1/completions", body)["choices"][0]["text"])

    def memory(self) -> dict[str, int]:
        """RSS in bytes by process name."""
        processes: dict[str, psutil.Process] = {**self.server.children("frontend"), **self.server.children("worker")}
        return {name: process.memory_info().rss for name, process in processes.items()}

    def check_log(self, findings: Findings) -> None:
        for line in self.server.log:
            if "Traceback" in line or " ERROR " in line:
                findings.report("an error in the log", line)


@contextmanager
def target(engine: str) -> Iterator[Target]:
    """Starts a fast server with small stores, so that they fill soon."""
    pace = PACES[engine]
    memory = (f"--transcript-memory={MEMORY_MIB}", f"--resume-memory={MEMORY_MIB}", f"--response-store-size={STORE_MIB}")
    limits = (
        f"--context-length={pace.context_length}",
        f"--max-body-bytes={MAX_BODY_BYTES}",
        f"--stall-timeout={STALL_SECONDS}",
        "--resume-keep=5",
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(f"--engine={engine}", f"--response-store={folder}/responses.db", *memory, *limits, *pace.arguments) as server,
    ):
        yield Target(server, pace)
