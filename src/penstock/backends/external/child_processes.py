"""The processes that an engine starts: whoever started them learns at once when one ends, and they do not outlive it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from collections.abc import Callable, Iterable

GONE = "has ended"


class ChildWatch:
    """Calls `on_end` with the reason when the first of these processes ends; once, on the event loop, and never after `close`.

    The kernel tells it, through a file descriptor for each process: nothing is polled, no signal handler is taken, and the process's
    status is left for whoever is to collect it. Processes that have ended before are told of, too.
    """

    def __init__(self, processes: Iterable[tuple[int, str]], on_end: Callable[[str], None]) -> None:
        """`processes` are their ids, each with a name for the reason."""
        self._loop = asyncio.get_running_loop()
        self._on_end = on_end
        self._open: set[int] = set()
        self._is_closed = False
        for pid, name in processes:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(self._tell, f"{name} (process {pid}) {GONE}")
                continue
            self._open.add(descriptor)
            self._loop.add_reader(descriptor, self._ended, descriptor, f"{name} (process {pid})")

    def close(self) -> None:
        self._is_closed = True
        for descriptor in self._open:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._open.clear()

    def _ended(self, descriptor: int, name: str) -> None:
        self._tell(f"{name} {described_end(descriptor)}")

    def _tell(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(reason)


def described_end(descriptor: int) -> str:
    """How the process of this descriptor has ended, in words. Its status is not collected by this, and may have been already."""
    try:
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return GONE
    if result is None:
        return GONE
    if result.si_code == os.CLD_EXITED:
        return f"has ended with exit status {result.si_status}"
    # Not all of them have names.
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(result.si_status, f'signal {result.si_status}')}"


def end_with(pid: int) -> None:
    """Kills this process as soon as that one has ended, however that came about, and at once where it has already.

    An engine would otherwise go on without anyone to talk to, and keep the memory that its successor needs.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        # Not `select`, which takes no descriptor beyond 1,023.
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name=f"end with process {pid}", daemon=True).start()
