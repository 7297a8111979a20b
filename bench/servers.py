"""Servers for the benches: real processes on free ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import psutil

SECRET = "only for this run"


class Process:
    """One `penstock` command and its standard error."""

    def __init__(self, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "penstock", *arguments]
        self.log: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})})
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if found := re.search(r"ready: .* on (http://[^\s,]+)", line):
                self.url = found[1]
                self._ready.set()
        self._ready.set()

    def wait_ready(self, seconds: float = 120.0) -> None:
        assert self._ready.wait(seconds), self.log
        assert self.url, self.log

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def children(self, role: str) -> dict[str, psutil.Process]:
        """The processes of this role, by name."""
        found: dict[str, psutil.Process] = {}
        for child in psutil.Process(self.process.pid).children():
            try:
                words = child.cmdline()
            except psutil.NoSuchProcess:
                continue
            if role in words:
                name = next((word.removeprefix("--name=") for word in words if word.startswith("--name=")), role)
                found[name] = child
        return found

    def metric(self, name: str, /, **labels: str) -> float:
        """The sum of the samples of this name that have these labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        values = [float(line.rsplit(" ", 1)[1]) for line in lines if re.match(rf"{name}(\{{|\s)", line) and all(w in line for w in wanted)]
        return sum(values)

    def stop(self, seconds: float = 60.0) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                child.kill()
            self.process.kill()
            self.process.wait()
        self._reader.join(10)


@contextmanager
def serving(*arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Process]:
    """`penstock serve` with these arguments."""
    server = Process("serve", "--port=0", *arguments, environment=environment)
    try:
        server.wait_ready()
        yield server
    finally:
        server.stop()
