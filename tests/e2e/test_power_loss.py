"""A network that is cut without a word, as when a host loses power. Needs a network namespace of its own, which some machines forbid."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

SIOCSIFFLAGS = 0x8914
IFF_UP, IFF_LOOPBACK_RUNNING = 0x1, 0x48
UNSHARE = ("unshare", "--map-root-user", "--net")
# Much less than --worker-stall, much more than the 3 s that it takes: the machine may be busy.
NOTICED_SECONDS = 15.0


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode != 0,
    reason="this machine gives no network namespace",
)
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_both_ends_notice_that_the_other_host_is_gone(state: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [*UNSHARE, sys.executable, __file__, state, str(tmp_path)], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr


class Log:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.file = path.open("wb")

    def wait_for(self, text: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while text not in self._path.read_text(encoding="utf-8"):
            if time.monotonic() > deadline:
                raise SystemExit(f"{text!r} is not in {self._path.read_text(encoding='utf-8')}")
            time.sleep(0.01)


def switch_network(*, on: bool) -> None:
    """The only network of this namespace. When it is off, packets vanish; nobody is told."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_LOOPBACK_RUNNING | (IFF_UP if on else 0)))


def start_stream(port: int) -> socket.socket:
    body = json.dumps({"model": "simulator", "prompt": "x", "stream": True, "max_tokens": 50_000, "ignore_eos": True}).encode()
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    while b"data:" not in connection.recv(65536):
        pass
    return connection


def main(state: str, folder: Path) -> None:
    switch_network(on=True)
    environment = {**os.environ, "PENSTOCK_LINK_SECRET": "s", "XDG_STATE_HOME": str(folder)}
    worker, front_end = Log(folder / "worker"), Log(folder / "front_end")
    command = [sys.executable, "-m", "penstock"]
    words = [
        (worker, [*command, "worker", "--engine=simulator", "--step-ms=20", "--listen=tcp://127.0.0.1:7000"]),
        (front_end, [*command, "frontend", "--port=8000", "--worker=tcp://127.0.0.1:7000"]),
    ]
    processes = [subprocess.Popen(each, stderr=log.file, env=environment) for log, each in words]
    try:
        front_end.wait_for("ready:")
        stream = start_stream(8000) if state == "busy" else None
        switch_network(on=False)
        front_end.wait_for("worker worker-0 is gone", NOTICED_SECONDS)
        worker.wait_for("front end frontend is gone", NOTICED_SECONDS)
        if stream is not None:
            stream.close()
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
