"""The processes of an engine: their end is told at once, and they end with whoever started them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from penstock.backends.external.child_processes import GONE, ChildWatch

# A process whose child ends with it and says that it will; both wait until they are ended.
PARENT = """
import os, signal, subprocess, sys
child = "import os, signal, sys; from penstock.backends.external.child_processes import end_with; "
child += "end_with(int(sys.argv[1])); print(os.getpid(), flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", child, str(os.getpid())])
signal.pause()
"""


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def told() -> tuple[asyncio.Future[str], Callable[[str], None]]:
    """A second call would raise, for the future has its result."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return future, future.set_result


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
async def test_a_kill_is_told_with_the_signal(number: int, name: str) -> None:
    reason, on_end = told()
    with started("input()") as process:
        watch = ChildWatch([(process.pid, "the engine")], on_end)
        process.send_signal(number)
        async with asyncio.timeout(5):
            assert await reason == f"the engine (process {process.pid}) was ended by {name}"
        # The status is still there for whoever started it.
        assert process.wait() == -number
        watch.close()


async def test_an_exit_is_told_with_its_status() -> None:
    reason, on_end = told()
    with started("import sys; sys.exit(3)") as process:
        ChildWatch([(process.pid, "the engine")], on_end)
        assert await reason == f"the engine (process {process.pid}) has ended with exit status 3"


async def test_of_several_the_first_is_told_and_no_other() -> None:
    reason, on_end = told()
    with started("input()") as one, started("input()") as other:
        ChildWatch([(one.pid, "one"), (other.pid, "other")], on_end)
        other.kill()
        assert (await reason).startswith("other ")
        one.kill()
        one.wait()
        await asyncio.sleep(0)


async def test_what_has_ended_before_is_told() -> None:
    reason, on_end = told()
    with started("") as process:
        process.wait()
    ChildWatch([(process.pid, "the engine")], on_end)
    assert await reason == f"the engine (process {process.pid}) {GONE}"


async def test_nothing_is_told_after_close() -> None:
    reason, on_end = told()
    with started("input()") as process:
        watch = ChildWatch([(process.pid, "the engine")], on_end)
        gone = ChildWatch([(2**22 + 1, "no process")], on_end)
        watch.close()
        gone.close()
        process.kill()
        process.wait()
        await asyncio.sleep(0)
    assert not reason.done()


@pytest.fixture
def parent() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process, and the child that has started."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process, child
        process.kill()
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_child_ends_with_its_parent(number: signal.Signals, parent: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child = parent
    reason, on_end = told()
    ChildWatch([(child, "the child")], on_end)
    process.send_signal(number)
    assert (await reason).startswith("the child ")


def test_a_child_ends_that_comes_too_late() -> None:
    with started("") as gone:
        gone.wait()
    code = f"import signal; from penstock.backends.external.child_processes import end_with; end_with({gone.pid}); signal.pause()"
    with started(code) as process:
        assert process.wait() == -signal.SIGKILL
