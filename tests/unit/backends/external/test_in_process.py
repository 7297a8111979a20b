"""The processes of an engine: their end is reported at once, they end with their worker, and their errors are found."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging.config import dictConfig
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.backends.external.engine import EngineDied, EngineFacts
from penstock.backends.external.in_process import (
    GONE,
    ChildWatch,
    EnginePackage,
    InProcessEngine,
    first_error,
    forget_directory,
    one_line,
    write_logging_config,
)
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError

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
    """A second call raises: the future already has its result."""
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    return future, future.set_result


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
async def test_a_kill_is_reported_with_the_signal(number: int, name: str) -> None:
    reason, on_end = told()
    with started("input()") as process:
        watch = ChildWatch([(process.pid, "the engine")], on_end)
        process.send_signal(number)
        async with asyncio.timeout(5):
            assert await reason == f"the engine (process {process.pid}) was ended by {name}"
        # The status is still there for whoever started it.
        assert process.wait() == -number
        watch.close()


async def test_an_exit_is_reported_with_its_status() -> None:
    reason, on_end = told()
    with started("import sys; sys.exit(3)") as process:
        ChildWatch([(process.pid, "the engine")], on_end)
        assert await reason == f"the engine (process {process.pid}) has ended with exit status 3"


async def test_only_the_first_end_is_reported() -> None:
    reason, on_end = told()
    with started("input()") as one, started("input()") as other:
        ChildWatch([(one.pid, "one"), (other.pid, "other")], on_end)
        other.kill()
        assert (await reason).startswith("other ")
        one.kill()
        one.wait()
        await asyncio.sleep(0)


async def test_an_earlier_end_is_reported() -> None:
    reason, on_end = told()
    with started("") as process:
        process.wait()
    ChildWatch([(process.pid, "the engine")], on_end)
    assert await reason == f"the engine (process {process.pid}) {GONE}"


async def test_nothing_is_reported_after_close() -> None:
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
    """A process and its running child."""
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


def test_a_child_of_a_dead_parent_ends_at_once() -> None:
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


def test_nothing_is_logged_to_a_forgotten_directory(tmp_path: Path) -> None:
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


FACTS = EngineFacts(context_length=100, block_size=16)


class Library(InProcessEngine):
    """An engine whose library starts one process, and then loads until it may end."""

    package = EnginePackage("by_hand", "By Hand", (1,), (1000,), ("pytest",), LOGGER, LOGGER, "AN_ENGINE_LOGGING")

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__(EngineSettings("/m"))
        self.deaths: list[str] = []
        self.error = error
        self.process: subprocess.Popen[bytes] | None = None
        self.directory: Path | None = None
        self.has_begun, self.may_load = threading.Event(), threading.Event()
        self.may_establish = asyncio.Event()
        self.may_establish.set()
        self.kills = 0
        self.shut_down: list[Any] = []

    def _load(self, directory: Path) -> Any:
        self.directory = directory
        self._set_up_logging(directory, "error")
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.has_begun.set()
        self.may_load.wait(10)
        if self.error is not None:
            raise self.error
        return "the library's engine"

    async def _establish(self) -> EngineFacts:
        assert self.process is not None
        self._watch_processes([self.process.pid], "the engine")
        await self._answer(self.may_establish.wait())
        return FACTS

    def _kill_processes(self) -> None:
        self.kills += 1
        # A library that loads notices it.
        self.may_load.set()

    async def _shut_down(self) -> None:
        self.shut_down.append(self._engine)
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    async def ask(self) -> None:
        await self._answer(asyncio.Event().wait())

    def check_closed(self) -> None:
        assert self.directory is not None
        assert not self.directory.exists()
        assert self.package.log_variable not in os.environ


async def test_an_engine_starts_answers_and_closes() -> None:
    engine = Library()
    engine.may_load.set()
    assert await engine.start(engine.deaths.append) == FACTS
    assert engine.directory is not None
    assert os.environ[engine.package.log_variable] == str(engine.directory / "logging.json")
    await engine.close()
    await engine.close()
    assert (engine.shut_down, engine.kills, engine.deaths) == (["the library's engine"], 0, [])
    engine.check_closed()


async def test_the_death_of_a_process_is_reported_once_and_ends_what_waits() -> None:
    engine = Library()
    engine.may_load.set()
    await engine.start(engine.deaths.append)
    asked = asyncio.create_task(engine.ask())
    await asyncio.sleep(0)
    assert engine.process is not None
    engine.process.kill()
    with pytest.raises(EngineDied, match="was ended by SIGKILL"):
        await asked
    with pytest.raises(EngineDied, match="was ended by SIGKILL"):
        await engine.ask()
    await engine.close()
    assert engine.deaths == [f"the engine (process {engine.process.pid}) was ended by SIGKILL"]


async def test_an_engine_that_dies_before_it_is_ready_does_not_start() -> None:
    engine = Library()
    engine.may_load.set()
    engine.may_establish.clear()
    starting = asyncio.create_task(engine.start(engine.deaths.append))
    await asyncio.to_thread(engine.has_begun.wait)
    assert engine.process is not None
    engine.process.kill()
    with pytest.raises(ConfigError, match=r"By Hand does not start: the engine .* was ended by SIGKILL"):
        await starting
    assert not engine.deaths
    engine.check_closed()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ConfigError("--engine-args: wrong"), "^--engine-args: wrong$"),
        (ImportError("no module"), "^--engine by_hand: By Hand cannot be imported: no module$"),
        (ValueError("two\nlines"), "^By Hand cannot run --model /m: ValueError: two lines$"),
        (SystemExit(1), "^By Hand cannot run --model /m: SystemExit: 1$"),
    ],
)
async def test_why_an_engine_does_not_load(error: BaseException, message: str) -> None:
    engine = Library(error=error)
    engine.may_load.set()
    with pytest.raises(ConfigError, match=message):
        await engine.start(engine.deaths.append)
    assert engine.shut_down == [None]
    engine.check_closed()


async def test_a_load_that_is_abandoned_ends_with_its_processes() -> None:
    engine = Library()
    starting = asyncio.create_task(engine.start(engine.deaths.append))
    await asyncio.to_thread(engine.has_begun.wait)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert engine.kills >= 1
    # It had loaded all the same.
    assert engine.shut_down == ["the library's engine"]
    engine.check_closed()


async def test_an_unsupported_version_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "package", dataclasses.replace(Library.package, before=(2,)))
    engine = Library()
    with pytest.raises(ConfigError, match=r"By Hand \d.* is installed, but only 1 to below 2 is supported"):
        await engine.start(engine.deaths.append)
    await engine.close()
    assert engine.directory is None
