"""How long the event loop is held, and by what."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.metrics.frontend import Tally

log = logging.getLogger(__name__)

TICK_SECONDS = 0.005
STALL_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
MIN_STALL_SECONDS = 0.005
"""Shorter delays are not counted: other processes and the garbage collector cause them all the time."""

MAX_FRAMES = 4
_SOURCE = str(Path(__file__).parents[1])


class LoopWatch:
    """Measures how late a timer of TICK_SECONDS runs: that is how long the loop was held. A stall is measured up to TICK_SECONDS too short.

    The timer runs only while there are requests, so an idle process does not wake up for it. Every request calls `enter` and `leave`.
    """

    def __init__(self, tally: Tally, clock: Callable[[], float] = time.monotonic) -> None:
        self._tally = tally
        self._clock = clock
        self._requests = 0
        self._due = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampler: _Sampler | None = None

    def enter(self) -> None:
        self._requests += 1
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._schedule()

    def leave(self) -> None:
        self._requests -= 1

    def log_stalls(self, seconds: float) -> Callable[[], None]:
        """Logs each stall of at least `seconds`, and what the loop did meanwhile. Called in the loop's thread. Returns what ends it."""
        self._sampler = sampler = _Sampler(seconds, self._clock, threading.get_ident())
        return sampler.close

    def _schedule(self) -> None:
        assert self._loop is not None
        self._due = self._clock() + TICK_SECONDS
        self._loop.call_later(TICK_SECONDS, self._tick)
        if self._sampler is not None:
            self._sampler.expect(self._due)

    def _tick(self) -> None:
        late = self._clock() - self._due
        if late >= MIN_STALL_SECONDS:
            self._tally.stalls[bisect_left(STALL_BUCKETS, late)] += 1
            self._tally.stall_seconds += late
            self._tally.longest_stall = max(self._tally.longest_stall, late)
        if self._sampler is not None:
            self._sampler.report(late)
        if self._requests or self._tally.running or self._tally.queued:
            self._schedule()
        else:
            self._loop = None


class _Sampler:
    """A thread that looks what the loop's thread does when a tick is overdue. It sleeps while no tick is expected.

    Code that does not release the GIL is seen when it returns: its caller is on the stack still.
    """

    def __init__(self, seconds: float, clock: Callable[[], float], thread: int) -> None:
        self._seconds = seconds
        self._clock = clock
        self._watched = thread
        self._expects = threading.Event()
        self._due: float | None = None
        self._seen: tuple[float, str] | None = None
        self._is_closed = False
        threading.Thread(target=self._run, name="loop watch", daemon=True).start()

    def expect(self, due: float) -> None:
        self._due = due
        self._expects.set()

    def report(self, late: float) -> None:
        """The tick that was expected has come."""
        seen, due = self._seen, self._due
        self._due = None
        if late >= self._seconds:
            what = seen[1] if seen is not None and seen[0] == due else "nothing was seen"
            log.warning("the event loop was held for %.0f ms: %s", late * 1000, what)

    def close(self) -> None:
        self._is_closed = True
        self._expects.set()

    def _run(self) -> None:
        while not self._is_closed:
            due = self._due
            if due is None:
                # Between two ticks this lasts a moment, after the last request until the next one.
                self._expects.clear()
                if self._due is None:
                    self._expects.wait()
                continue
            time.sleep(self._seconds / 2)
            is_new = self._seen is None or self._seen[0] != due
            if self._due == due and is_new and self._clock() - due >= self._seconds / 2:
                self._seen = due, describe(sys._current_frames().get(self._watched))


def describe(frame: FrameType | None) -> str:
    """The innermost functions of ours on a stack, and the request they work for: what the `loop_label` of a method's object says."""
    places: list[str] = []
    labels: dict[str, None] = {}
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_SOURCE):
            if len(places) < MAX_FRAMES:
                places.append(f"{code.co_filename.removeprefix(_SOURCE)[1:]}:{frame.f_lineno} {code.co_name}")
            if (label := getattr(frame.f_locals.get("self"), "loop_label", None)) is not None:
                labels[str(label)] = None
        frame = frame.f_back
    return f"{' < '.join(places) or 'code outside Penstock'}{''.join(f', {label}' for label in labels)}"
