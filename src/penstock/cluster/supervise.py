"""Supervises local child processes: starts them, restarts them with back-off, stops them in order."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

log = logging.getLogger(__name__)

# A child that exits with this status at its first start has a wrong setting; a restart cannot help. At a later start the same settings
# worked before, and what is missing, such as an engine at another address, may come back.
EXIT_CONFIG = 2
MIN_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 5.0
# What children that cut off their work may take, after a second signal.
CUT_SECONDS = 3.0
# The back-off starts again for a child that lived this long.
HEALTHY_SECONDS = 3.0


@dataclass(frozen=True)
class ChildSpec:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]


class Child:
    """One supervised process. Its standard input is a pipe from us, so it notices when we die."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.restarts = 0
        self._process: asyncio.subprocess.Process | None = None
        self._stop_requested = asyncio.Event()

    async def run(self) -> int:
        """Restarts it until `stop`, unless its first start fails with EXIT_CONFIG. Returns its last exit status."""
        delay = MIN_DELAY_SECONDS
        while True:
            began = time.monotonic()
            status = await self._run_once()
            if self._stop_requested.is_set() or (status == EXIT_CONFIG and self.restarts == 0):
                return status
            if status != EXIT_CONFIG and time.monotonic() - began > HEALTHY_SECONDS:
                delay = MIN_DELAY_SECONDS
            log.error("%s died (%s); restarting in %.1f s", self.spec.name, _described(status), delay)
            await self._pause(delay)
            if self._stop_requested.is_set():
                return status
            delay = min(delay * 2, MAX_DELAY_SECONDS)
            self.restarts += 1

    async def _run_once(self) -> int:
        # Its own process session: Ctrl-C in the terminal reaches only the supervisor, which stops its children in order.
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command, stdin=asyncio.subprocess.PIPE, env=dict(self.spec.environment), start_new_session=True
        )
        log.info("%s is process %d", self.spec.name, self._process.pid)
        if self._stop_requested.is_set():
            self._process.terminate()
        return await self._process.wait()

    async def _pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._stop_requested.wait()
        except TimeoutError:
            pass

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends the signal. The process is not restarted."""
        self._stop_requested.set()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)


class Supervisor:
    """Runs a front end and its workers. Stops the front end first, so that running requests can end, then the workers."""

    def __init__(self, front_end: ChildSpec, workers: Sequence[ChildSpec], grace: float) -> None:
        self._front_end = Child(front_end)
        self._workers = [Child(spec) for spec in workers]
        self._grace = grace
        self._stop = asyncio.Event()
        self._cut = False

    def request_stop(self) -> None:
        """First call: drain and stop. Second call: stop now, in order. Third call: kill."""
        if not self._stop.is_set():
            log.info("stopping: running requests may take up to %g s; press Ctrl-C again to stop now", self._grace)
            self._stop.set()
        elif not self._cut:
            log.warning("a second signal: stopping now")
            self._cut = True
            # For each of them this is the second signal, or the first of two.
            self._signal_all(signal.SIGTERM)
            asyncio.get_running_loop().call_later(CUT_SECONDS, self._signal_all, signal.SIGKILL)
        else:
            self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for child in (self._front_end, *self._workers):
            child.stop(number)

    async def run(self) -> int:
        """Runs until it is stopped or a child cannot start at all. Returns the exit status."""
        tasks = {asyncio.create_task(child.run(), name=child.spec.name): child for child in (*self._workers, self._front_end)}
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
        failed = next((task.result() for task in tasks if task in done), 0)
        self._stop.set()
        await stop
        front_end = [task for task, child in tasks.items() if child is self._front_end]
        workers = [task for task, child in tasks.items() if child is not self._front_end]
        await self._stop_all([self._front_end], front_end)
        await self._stop_all(self._workers, workers)
        if self._cut:
            return 128 + signal.SIGINT
        return failed

    async def _stop_all(self, children: Sequence[Child], tasks: Sequence[asyncio.Task[int]]) -> None:
        """Asks them to end, and kills them when they take longer than the grace time."""
        for child in children:
            child.stop()
        _, late = await asyncio.wait(tasks, timeout=self._grace + 5)
        if late:
            for child in children:
                child.stop(signal.SIGKILL)
            await asyncio.wait(late)


def _described(status: int) -> str:
    return f"signal {-status}" if status < 0 else f"exit status {status}"
