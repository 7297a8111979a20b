"""The watch of the event loop: what it counts, when it wakes up, and what it logs."""

from __future__ import annotations

import asyncio
import logging
import time

import pytest

from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally
from penstock.metrics.loop_watch import TICK_SECONDS, LoopWatch


class Clock:
    """A clock that the test moves. It counts how often it is read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reads = 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now

    async def until_read(self) -> None:
        before = self.reads
        while self.reads == before:
            await asyncio.sleep(0.001)


async def test_a_stall_is_counted_and_the_longest_is_told_once() -> None:
    tally, clock = Tally(), Clock()
    metrics = FrontEndMetrics(tally)
    metrics.observe(ClusterReading)
    watch = LoopWatch(tally, clock)
    watch.enter()
    for late in (0.004, 0.03, 0.3):
        clock.now += TICK_SECONDS + late
        await clock.until_read()
    watch.leave()
    shown = metrics.render().decode()
    assert 'penstock_loop_stall_seconds_bucket{le="0.02"} 0.0' in shown, "4 ms are no stall"
    assert 'penstock_loop_stall_seconds_bucket{le="0.05"} 1.0' in shown
    assert "penstock_loop_stall_seconds_count 2.0" in shown
    assert tally.stall_seconds == pytest.approx(0.33)
    assert "penstock_loop_longest_stall_seconds 0.3" in shown
    assert "penstock_loop_longest_stall_seconds 0.0" in metrics.render().decode(), "the longest since the last scrape"


async def test_a_process_without_requests_does_not_wake_up() -> None:
    tally, clock = Tally(), Clock()
    watch = LoopWatch(tally, clock)
    watch.enter()
    tally.running = 1
    watch.leave()
    for _ in range(3):
        await clock.until_read()  # an answer that outlives its connection is watched, too
    tally.running = 0
    await clock.until_read()
    reads = clock.reads
    await asyncio.sleep(10 * TICK_SECONDS)
    assert clock.reads == reads
    watch.enter()
    assert clock.reads > reads
    watch.leave()


async def test_what_holds_the_loop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    metrics = FrontEndMetrics(Tally())

    def read() -> ClusterReading:
        time.sleep(0.2)
        return ClusterReading()

    metrics.observe(read)
    close = metrics.loop.log_stalls(0.02)
    with caplog.at_level(logging.WARNING, "penstock.metrics.loop_watch"):
        metrics.loop.enter()
        metrics.render()
        metrics.loop.leave()
        while not caplog.records:
            await asyncio.sleep(0.001)
    close()
    (record,) = caplog.records
    assert "metrics/frontend.py" in record.getMessage()
    assert "collect < metrics/frontend.py" in record.getMessage(), "the innermost function first"
    assert "render" in record.getMessage()
