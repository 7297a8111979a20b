"""Which exits of a child end the service, and which lead to a restart."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from penstock.cluster.supervise import EXIT_CONFIG, Child, ChildSpec

# Ends with the next status of the list at each of its starts. When there is none left, it says so and stays until it is told to end.
PROGRAM = """
import pathlib, signal, sys
starts, *statuses = sys.argv[1:]
number = len(pathlib.Path(starts).read_text())
pathlib.Path(starts).write_text("." * (number + 1))
if number < len(statuses):
    sys.exit(int(statuses[number]))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
pathlib.Path(starts + ".stays").touch()
signal.pause()
"""


def child(starts: Path, *statuses: int) -> Child:
    starts.write_text("")
    return Child(ChildSpec("a child", [sys.executable, "-c", PROGRAM, str(starts), *map(str, statuses)], dict(os.environ)))


async def test_a_wrong_setting_at_the_first_start_ends_the_service(tmp_path: Path) -> None:
    failing = child(tmp_path / "starts", EXIT_CONFIG)
    assert (await failing.run(), failing.restarts) == (EXIT_CONFIG, 0)


@pytest.mark.parametrize("statuses", [(1,), (1, EXIT_CONFIG, EXIT_CONFIG)], ids=["a death", "what it needs is away"])
async def test_a_child_that_has_run_before_is_restarted_until_it_runs(tmp_path: Path, statuses: tuple[int, ...]) -> None:
    """At a restart an engine behind HTTP may be away, or a port may be taken, for a while."""
    mended = child(tmp_path / "starts", *statuses)
    running = asyncio.create_task(mended.run())
    while not (tmp_path / "starts.stays").exists() and not running.done():
        await asyncio.sleep(0.02)
    mended.stop()
    assert (await running, mended.restarts) == (0, len(statuses))
