"""A real server in its own processes, as a user starts it."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import psutil
from openai import OpenAI

DEFAULT_MODEL = "SmolLM2-135M-Instruct"


class Server:
    """`penstock serve` on a free port. Its log is kept for failures, and for the tests that read it."""

    def __init__(
        self,
        *arguments: str,
        engine: str = "simulator",
        model: str | None = None,
        command: list[str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self.metrics_headers: dict[str, str] = {}
        self.model = model or (engine if engine == "simulator" else DEFAULT_MODEL)
        base = command or [sys.executable, "-m", "penstock", "serve", "--port", "0", "--engine", engine]
        self.process = subprocess.Popen(
            [*base, *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}, start_new_session=True
        )
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := re.search(r"ready: .* on (http://[^\s,]+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self, timeout: float = 60) -> Server:
        assert self._ready.wait(timeout), self.log
        assert self.url, self.log
        return self

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    @cached_property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def child(self, role: str) -> psutil.Process:
        """The process whose command line says that it is this: `worker` or `frontend`."""
        (found,) = [child for child in psutil.Process(self.process.pid).children() if role in child.cmdline()]
        return found

    def request(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> tuple[int, Any, Any]:
        """Status, headers and the decoded body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            content = response.read()
            is_json = (response.headers["content-type"] or "").startswith("application/json")
            return response.status, response.headers, json.loads(content) if is_json else content.decode()
        finally:
            connection.close()

    def post(self, path: str, **fields: object) -> tuple[int, Any, Any]:
        return self.request("POST", path, json.dumps({"model": self.model, **fields}).encode())

    def metric(self, name: str, /, **labels: str) -> float:
        """One sample of /metrics."""
        _, _, text = self.request("GET", "/metrics", headers=self.metrics_headers)
        for line in text.splitlines():
            if re.match(rf"{name}(\{{|\s)", line) and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(f"{name} {labels} not in\n{text}")

    def stop(self, number: signal.Signals = signal.SIGTERM, timeout: float = 30) -> int:
        """Sends the signal to the supervisor; returns its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.join(timeout)

    def join(self, timeout: float = 30) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            raise
        finally:
            if "client" in self.__dict__:
                self.client.close()
            self.process.wait()
            self._reader.join(10)
            assert self.process.stderr is not None
            self.process.stderr.close()


def wait_until(condition: Callable[[], bool], timeout: float = 10.0) -> None:
    """Polls until the condition is true. Fails after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.005)
