"""CPU time and memory of local processes while the load runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import dataclass, field

import psutil

from penstock.wire.errors import ConfigError

SAMPLE_SECONDS = 0.25
MAX_CANDIDATES = 8
MAX_COMMAND_CHARACTERS = 240


@dataclass
class Process:
    """One process: CPU seconds and RSS at the start and at the end, and the largest RSS between."""

    name: str
    pid: int
    cpu_start: float = 0.0
    cpu_end: float = 0.0
    rss_start: int = 0
    rss_max: int = 0
    rss_end: int = 0
    ended: bool = False
    handle: psutil.Process = field(default=None, repr=False)

    def start(self) -> None:
        """Raises ConfigError if there is no such process."""
        try:
            self.handle = psutil.Process(self.pid)
            self.sample()
        except psutil.Error as error:
            raise ConfigError(f"--process {self.name}={self.pid}: {error.msg or 'it cannot be read'}") from error
        if self.ended:
            raise ConfigError(f"--process {self.name}={self.pid}: there is no such process")
        self.cpu_start, self.rss_start = self.cpu_end, self.rss_end

    def sample(self) -> None:
        """A process that has ended keeps its last values."""
        try:
            times, rss = self.handle.cpu_times(), self.handle.memory_info().rss
        except psutil.NoSuchProcess:
            self.ended = True
            return
        self.cpu_end = times.user + times.system
        self.rss_end = rss
        self.rss_max = max(self.rss_max, rss)

    @property
    def cpu_seconds(self) -> float:
        return self.cpu_end - self.cpu_start


@contextlib.asynccontextmanager
async def watch(processes: Sequence[Process]) -> AsyncGenerator[None, None]:
    """Samples the processes at the start, every SAMPLE_SECONDS, and at the end."""
    for process in processes:
        process.start()
    samples = asyncio.create_task(_sample_often(processes), name="process samples")
    try:
        yield
    finally:
        samples.cancel()
        await asyncio.wait([samples])
        for process in processes:
            process.sample()


async def _sample_often(processes: Sequence[Process]) -> None:
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        for process in processes:
            process.sample()


def find_processes(texts: Iterable[str]) -> list[Process]:
    """This process, and those that `--process` names: as NAME=PID, or by a part of the command line.

    Raises ConfigError if a text matches no process, or several.
    """
    running: list[tuple[int, str]] | None = None
    found = [Process("bench", os.getpid())]
    for text in texts:
        name, equals, pid = text.rpartition("=")
        if equals and pid.isdecimal():
            found.append(Process(name, int(pid)))
            continue
        running = _command_lines() if running is None else running
        found.append(Process(text, _the_one(text, running)))
    names = [process.name for process in found]
    for name in names:
        if not name or names.count(name) > 1:
            raise ConfigError(f"--process: the name {name!r} is used twice or empty; name each process differently, as NAME=PID")
    return found


def _the_one(text: str, running: Sequence[tuple[int, str]]) -> int:
    """The process that `text` means: a Penstock command, else a `--name`, else any part of a command line."""
    for wanted in (f"penstock {text} ", f" --name={text} ", text):
        candidates = [(pid, command) for pid, command in running if wanted in command + " "]
        if len(candidates) == 1:
            return candidates[0][0]
        if candidates:
            raise ConfigError(f"--process {text}: it matches {len(candidates)} processes; choose one, as NAME=PID:{_listed(candidates)}")
    ours = [(pid, command) for pid, command in running if "penstock" in command]
    hint = f"; there are{_listed(ours)}" if ours else ""
    raise ConfigError(f"--process {text}: no command line on this machine contains it{hint}")


def _listed(processes: Sequence[tuple[int, str]]) -> str:
    lines = [f"\n  {pid}  {command[:MAX_COMMAND_CHARACTERS]}" for pid, command in processes[:MAX_CANDIDATES]]
    more = len(processes) - len(lines)
    return "".join(lines) + (f"\n  … and {more} more" if more > 0 else "")


def _command_lines() -> list[tuple[int, str]]:
    """All processes except this one and its parents: their command lines contain our own flags."""
    myself = psutil.Process()
    left_out = {myself.pid, *(parent.pid for parent in myself.parents())}
    listed = [(process.pid, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"])]
    return [(pid, command) for pid, command in listed if command and pid not in left_out]
