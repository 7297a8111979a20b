"""The processes of an engine: their end is reported at once, they end with their worker, and their errors are found."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.config import dictConfig
from pathlib import Path

import msgspec
import pytest

from penstock.backends.external.in_process import GONE, ChildWatch, first_error, forget_directory, one_line, write_logging_config

# A process whose child ends with it and says that it will; both wait until they are ended.
PARENT = """
import os, signal, subprocess, sys
child = "import os, signal, sys; from penstock.backends.external.in_process import end_with; "
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
    code = f"import signal; from penstock.backends.external.in_process import end_with; end_with({gone.pid}); signal.pause()"
    with started(code) as process:
        assert process.wait() == -signal.SIGKILL


LOGGER = "an_engine"

# As an engine does that finds a mistake in a helper of its own. It cannot import us.
ENGINE = """
import json, logging, logging.config, sys
sys.modules["penstock"] = None
logging.config.dictConfig(json.load(open(sys.argv[1])))
log = logging.getLogger("an_engine.core")
log.error("something is wrong")
log.warning("something is strange")
for error in (%s, RuntimeError("a helper has failed")):
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise error from inner
    except Exception:
        log.exception("could not start")
"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("ValueError('no room for the KV')", "ValueError: no room for the KV"),
        ("ValueError('no room\\n for the KV')", "ValueError: no room for the KV"),
        ("ValueError()", "ValueError"),
    ],
)
def test_the_first_exception_is_the_reason(error: str, expected: str, tmp_path: Path) -> None:
    config = write_logging_config(tmp_path, LOGGER, "WARNING", LOGGER)
    ran = subprocess.run([sys.executable, "-c", ENGINE % error, config], check=True, stderr=subprocess.PIPE, text=True)
    assert first_error(tmp_path) == expected
    # People read all of it.
    assert "WARNING an_engine.core: something is strange" in ran.stderr
    assert "RuntimeError: a helper has failed" in ran.stderr


def test_nothing_was_logged(tmp_path: Path) -> None:
    write_logging_config(tmp_path, LOGGER, "ERROR", LOGGER)
    assert first_error(tmp_path) is None


def test_here_nothing_is_written_once_the_directory_is_forgotten(tmp_path: Path) -> None:
    config = write_logging_config(tmp_path, LOGGER, "ERROR", LOGGER)
    dictConfig(msgspec.json.decode(config.read_bytes()))
    log = logging.getLogger(LOGGER)
    forget_directory(tmp_path / "another", LOGGER)
    assert len(log.handlers) == 2
    forget_directory(tmp_path, LOGGER)
    log.error("not written")
    log.handlers.clear()
    assert [path.name for path in tmp_path.iterdir()] == ["logging.json"]


PYDANTIC = """1 validation error for ModelConfig
  Value error, no such model. [type=value_error, input_value=ArgsKwargs((), {'m': [1]}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2/v/value_error"""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("two\n  lines."), "two lines"),
        (ValueError(), "ValueError"),
        (PYDANTIC, "no such model"),
    ],
)
def test_errors_in_one_line(error: object, expected: str) -> None:
    assert one_line(error) == expected
