"""A real Redis for tests, on a Unix socket in its own directory. It keeps nothing on disk."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import pytest

import programs

START_SECONDS = 20.0


class RedisServer:
    """Runs inside its `with` block. It can be killed and started again; it comes back empty."""

    def __init__(self, *options: str) -> None:
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._program = redis_server_program()
        # Not pytest's directory: the path of a socket must be short.
        self._directory = Path(tempfile.mkdtemp(prefix="redis-"))
        self._socket = self._directory / "socket"
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def url(self) -> str:
        return f"unix://{self._socket}"

    def url_with_password(self, password: str) -> str:
        return f"unix://:{password}@{self._socket}"

    def start(self) -> None:
        """Returns when it answers."""
        assert self._process is None
        where = ["--port", "0", "--unixsocket", str(self._socket), "--dir", str(self._directory), "--save", "", "--appendonly", "no"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen([self._program, *where, *self._options], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"redis-server does not start: {(self._directory / 'log').read_text()[-2000:]}")
            time.sleep(0.005)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def suspend(self) -> None:
        """It still takes connections, but answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(str(self._socket))
                connection.sendall(b"PING\r\n")
                # A server that asks for a password answers, too.
                return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


def redis_server_program() -> str:
    """Its path. Without one the test is skipped; in CI it fails, because nothing may go untested there unnoticed."""
    program = programs.redis_server()
    if program is None:
        reason = "needs redis-server: run `make setup`, which installs one"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return program
