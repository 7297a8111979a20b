"""The processes that decode pictures, as the front end sees them."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import msgspec

from penstock.fairness import FairBudget, Share
from penstock.media.file import ImageFile
from penstock.media.formats import Header
from penstock.media.job import Done, Job, Refused
from penstock.wire.images import MAX_IMAGE_BYTES, ImageRules

CPU_SECONDS = 10.0
"""A picture of 50 million pixels takes 1 to 3."""

STUCK_SECONDS = 60.0
"""Without an answer for this long, a process is given up."""

# What a process needs besides the picture, and for each byte and pixel of it.
BASE_BYTES = 512 * 2**20
BYTES_PER_BYTE, BYTES_PER_PIXEL = 4, 32

_MAX_LINE_BYTES = 4096
_KILLED = "the process that decoded it was killed"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")

Answer = tuple[Done, bytes] | Refused


class Decoders:
    """At most `processes` of them, started when they are needed. One that ends is replaced. Tenants take turns. For one event loop.

    `lost` counts pictures that a process died of or was stopped for, by reason. `seconds` is what decoding took, without waiting.
    """

    def __init__(
        self,
        processes: int,
        max_bytes: int,
        max_pixels: int,
        *,
        cpu_seconds: float = CPU_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
        base_bytes: int = BASE_BYTES,
    ) -> None:
        self._memory = base_bytes + BYTES_PER_BYTE * max_bytes + BYTES_PER_PIXEL * max_pixels
        self._cpu_seconds = cpu_seconds
        self._stuck_seconds = stuck_seconds
        self._executor = ThreadPoolExecutor(processes, thread_name_prefix="pictures")
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._is_closed = False
        self.turns = FairBudget(processes)
        """A picture that is being decoded takes 1."""
        self.lost: Counter[str] = Counter()
        self.seconds = 0.0

    async def begin(
        self, file: ImageFile, header: Header, is_low: bool, rules: ImageRules, lane: str = "", weight: float = 1.0
    ) -> asyncio.Future[Answer]:
        """Waits for its turn. What it returns cannot be stopped; it ends with the process, at the latest after STUCK_SECONDS."""
        job = Job(file.stored, file.is_base64, header.kind, header.pixels, is_low, rules, self._cpu_seconds)
        turn = Share(lane, weight)
        try:
            if not self.turns.take(turn, 1):
                await self.turns.wait(turn, 1)
            running = asyncio.get_running_loop().run_in_executor(self._executor, self._decode, file, job)
        except BaseException:
            self.turns.release(turn)
            raise
        running.add_done_callback(lambda _: self.turns.release(turn))
        return running

    @property
    def pids(self) -> list[int]:
        """Of the processes that run."""
        return [process.pid for process in list(self._all) if process.is_alive]

    def close(self) -> None:
        """Ends all processes. Does not wait for threads: what they wait for has ended."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for process in list(self._all):
            process.kill()
        while self._idle:
            self._idle.pop().close()

    def _decode(self, file: ImageFile, job: Job) -> Answer:
        """In a thread. A process that somebody else killed is replaced once."""
        began = time.monotonic()
        found = self._try(file, job)
        if isinstance(found, Refused) and found.why == "killed" and not self._is_closed:
            found = self._try(file, job)
        if isinstance(found, Refused) and found.why != "broken":
            self.lost[found.why] += 1
        self.seconds += time.monotonic() - began
        return found

    def _try(self, file: ImageFile, job: Job) -> Answer:
        try:
            process = self._idle_process() or _Process(self._memory, self._stuck_seconds)
        except OSError as error:
            return Refused("overloaded", f"no process can be started: {error.strerror}")
        self._all.add(process)
        try:
            found = process.decode(file, job)
        except (OSError, MemoryError, msgspec.DecodeError) as error:
            # There is no memory to share, or it answers nonsense.
            process.kill()
            found = Refused("overloaded", f"the process that decodes it failed: {error}")
        if process.is_alive and not self._is_closed:
            self._idle.append(process)
        else:
            self._forget(process)
        return found

    def _idle_process(self) -> _Process | None:
        """One that waits for a picture. Somebody may have killed them all."""
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            self._forget(process)
        return None

    def _forget(self, process: _Process) -> None:
        self._all.discard(process)
        process.close()


class _Process:
    """One process and the memory that it shares with us. Its methods block; only one thread uses it at a time."""

    def __init__(self, memory: int, stuck_seconds: float) -> None:
        self._stuck_seconds = stuck_seconds
        self._shared = os.memfd_create("penstock-picture")
        # -P: the directory that the server was started in has no modules for it.
        command = [sys.executable, "-P", "-m", "penstock.media.child", str(self._shared), str(memory)]
        # No secret of ours is there.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(  # noqa: S603
                command, stdin=pipe, stdout=pipe, bufsize=0, pass_fds=(self._shared,), env=environment, start_new_session=True
            )
        except OSError:
            os.close(self._shared)
            raise
        self.pid = self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def decode(self, file: ImageFile, job: Job) -> Answer:
        assert self._process.stdin is not None
        try:
            os.lseek(self._shared, 0, os.SEEK_SET)
            file.write(self._shared)
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            line = self._read_line(time.monotonic() + self._stuck_seconds)
        except BrokenPipeError:
            # It had ended before.
            return Refused("killed", _KILLED)
        except TimeoutError:
            self.kill()
            return Refused("overloaded", f"it was not decoded within {self._stuck_seconds:g} seconds")
        if not line:
            return self._died(job)
        found = msgspec.json.decode(line, type=Done | Refused)
        if isinstance(found, Done):
            if os.fstat(self._shared).st_size != found.length or found.length > MAX_IMAGE_BYTES:
                raise OSError(f"it says that it made {found.length:,} bytes")
            pixels = os.pread(self._shared, found.length, 0)
        os.ftruncate(self._shared, 0)
        return (found, pixels) if isinstance(found, Done) else found

    def kill(self) -> None:
        """May be called from another thread while `decode` waits: that returns."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._shared)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read_line(self, deadline: float) -> bytes:
        """What it answers; empty if it has ended. Raises TimeoutError."""
        assert self._process.stdout is not None
        output, line = self._process.stdout.fileno(), b""
        waiting = select.poll()
        waiting.register(output, select.POLLIN)
        while not line.endswith(b"\n"):
            if len(line) > _MAX_LINE_BYTES or not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            if not (read := os.read(output, _MAX_LINE_BYTES)):
                return b""
            line += read
        return line

    def _died(self, job: Job) -> Refused:
        match -self._process.wait():
            case signal.SIGPROF:
                return Refused("slow", f"decoding it takes more than {job.cpu_seconds:g} seconds")
            case signal.SIGKILL | signal.SIGTERM:
                return Refused("killed", _KILLED)
            case _:
                return Refused("crashed", f"the decoder of {job.kind} crashed on it")
