"""How many source files a streaming chat touches, from the request to its last byte."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import penstock

SOURCE = Path(penstock.__file__).parent
MAX_FILES = 42

# `penstock`, which records between SIGUSR1 and SIGUSR2 which functions of its own run.
RECORDER = """
import json, os, signal, sys
from penstock.cli.main import main

source, target = os.environ["RECORDED_SOURCE"], os.environ["RECORDED_TO"]
called = set()

def note(frame, event, _):
    if event == "call" and frame.f_code.co_filename.startswith(source):
        called.add((os.path.relpath(frame.f_code.co_filename, source), frame.f_code.co_qualname))

def start(*_):
    called.clear()
    sys.setprofile(note)
    open(target + ".started", "w").close()

def stop(*_):
    sys.setprofile(None)
    os.unlink(target + ".started")
    with open(target + ".part", "w") as file:
        json.dump(sorted(called), file)
    os.rename(target + ".part", target)

signal.signal(signal.SIGUSR1, start)
signal.signal(signal.SIGUSR2, stop)
sys.exit(main())
"""


class Recorded:
    """A `penstock` command that records."""

    def __init__(self, target: Path, *arguments: str) -> None:
        self._target = target
        self._started = Path(f"{target}.started")
        environment = {**os.environ, "RECORDED_SOURCE": f"{SOURCE}/", "RECORDED_TO": str(target)}
        self.process = subprocess.Popen([sys.executable, "-c", RECORDER, *arguments], stderr=subprocess.PIPE, text=True, env=environment)

    def start(self) -> None:
        self.process.send_signal(signal.SIGUSR1)
        _until(self._started)

    def stop(self) -> set[tuple[str, str]]:
        """The files and functions that ran since `start`."""
        self.process.send_signal(signal.SIGUSR2)
        _until(self._target)
        found = {(file, function) for file, function in json.loads(self._target.read_text())}
        self._target.unlink()
        return found

    def end(self) -> None:
        self.process.terminate()
        self.process.communicate(timeout=30)


def _until(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.01)


def chat(connection: http.client.HTTPConnection) -> None:
    body = {"model": "simulator", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20, "stream": True}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read().endswith(b"data: [DONE]\n\n")


def test_a_streaming_chat_touches_few_files(tmp_path: Path) -> None:
    """One front end and one simulator worker, each a process. Some chats warm them up.

    Counted is every file under src/penstock in which a function runs in either process between the sending of one streaming chat of 20
    tokens and its last byte. What runs at import does not count. Functions that also run while nothing is asked, such as the timers that
    look for stalled readers, are no part of the chat.
    """
    socket = f"unix:{tmp_path / 'worker.sock'}"
    worker = Recorded(tmp_path / "worker", "worker", "--engine=simulator", f"--listen={socket}", "--name=worker")
    front_end = Recorded(tmp_path / "front-end", "frontend", f"--worker={socket}", "--port=0")
    both = (worker, front_end)
    try:
        assert front_end.process.stderr is not None
        port = next(int(found[1]) for line in front_end.process.stderr if (found := re.search(r"ready: .* on http://[^ ]*:(\d+)", line)))
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            for _ in range(3):
                chat(connection)
            idle = _record(both, lambda: time.sleep(1.5))
            touched = _record(both, lambda: chat(connection)) - idle
    finally:
        for process in both:
            process.end()
    files = sorted({file for file, _ in touched})
    assert len(files) <= MAX_FILES, "\n".join(files)
    assert len(files) > MAX_FILES / 2, "the recording misses most of the way"


def _record(processes: tuple[Recorded, ...], work: Callable[[], None]) -> set[tuple[str, str]]:
    for process in processes:
        process.start()
    work()
    return set.union(*(process.stop() for process in processes))
