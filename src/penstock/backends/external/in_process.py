"""What vLLM and SGLang share: a Python library in the worker's process that computes in child processes of its own.

Here is how such an engine is loaded, watched, asked and closed, and how the reason is found when it cannot start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import select
import shutil
import signal
import socket
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from penstock.backends.external.engine import EngineDied, EngineFacts
from penstock.backends.external.images import Placeholder
from penstock.config.engines import EngineSettings
from penstock.wire.errors import ConfigError

Answer = TypeVar("Answer")

# While an abandoned load still runs, the processes that it starts are killed this often.
ABANDON_SECONDS = 0.1
GONE = "has ended"

_ERRORS_FILE = "errors"
_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Before every record in the file of errors: a record may have many lines.
_RECORD_MARK = "\x1e"
_TRACEBACK = "Traceback (most recent call last):"
_CODE_LINES = ("    ", '  File "')


@dataclass(frozen=True)
class EnginePackage:
    """An engine's Python package and its supported versions: from `oldest` to below `before`.

    `logger` is the engine's root logger. `failure_logger` tells why a process failed; the others may log every bad request.
    `log_variable` is the environment variable for the file with the engine's logging configuration.
    """

    name: str
    title: str
    oldest: tuple[int, ...]
    before: tuple[int, ...]
    distributions: tuple[str, ...]
    logger: str
    failure_logger: str
    log_variable: str

    @property
    def supported(self) -> str:
        return f"{_dotted(self.oldest)} to below {_dotted(self.before)}"

    def version(self) -> str | None:
        """The installed version. None if the package is not installed."""
        for name in self.distributions:
            with contextlib.suppress(metadata.PackageNotFoundError):
                return metadata.version(name)
        return None

    def problem(self, version: str | None, *, any_version: bool = False) -> str | None:
        """Why this version cannot be used. None if it can."""
        install = f"pip install '{self.name}>={_dotted(self.oldest)},<{_dotted(self.before)}'"
        if version is None:
            return f"--engine {self.name} needs the package {self.name}: {install}"
        if any_version or self.oldest <= version_numbers(version) < self.before:
            return None
        unsupported = f"{self.title} {version} is installed, but only {self.supported} is supported"
        return f"{unsupported}: {install}, or try --any-engine-version"


def version_numbers(version: str) -> tuple[int, ...]:
    """The first three numbers of a version: 0.5.23.post1 is (0, 5, 23)."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+", 1)[0])[:3])


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


class InProcessEngine(ABC):
    """The part of an `ExternalEngine` that is the same for all libraries. `_engine` is the library's own object, once it is loaded."""

    package: EnginePackage

    def __init__(self, settings: EngineSettings, placeholder: Placeholder | None = None) -> None:
        """`placeholder`: the model reads images, and this stands for one."""
        self._placeholder = placeholder
        self._settings = settings
        self._engine: Any = None
        self._directory: Path | None = None
        self._loading: asyncio.Future[Any] | None = None
        self._watch: ChildWatch | None = None
        self._on_death: Callable[[str], None] | None = None
        self._death: str | None = None

    @abstractmethod
    def _load(self, directory: Path) -> Any:
        """Makes the library's engine. Runs in a thread, because it takes up to minutes. Files go to the directory."""

    @abstractmethod
    async def _establish(self) -> EngineFacts:
        """Runs after the load, on the event loop: watches the processes and finds out what the engine can do."""

    @abstractmethod
    def _kill_processes(self) -> None:
        """Kills the engine's processes while it is still loading. Runs in a thread."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """Ends the engine's processes and frees what the library holds. `_engine` is None if nothing was loaded."""

    async def start(self, on_death: Callable[[str], None]) -> EngineFacts:
        problem = self.package.problem(self.package.version(), any_version=self._settings.any_version)
        if problem is not None:
            raise ConfigError(problem)
        loop = asyncio.get_running_loop()
        self._died: asyncio.Future[None] = loop.create_future()
        self._directory = Path(tempfile.mkdtemp(prefix=f"penstock-{self.package.name}-"))
        # The kernel ends SGLang's processes together with the thread that started them, so the thread lives until `close`.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=self.package.name)
        try:
            self._loading = loop.run_in_executor(self._thread, self._load_or_explain, self._directory)
            self._engine = await asyncio.shield(self._loading)
            facts = await self._establish()
        except BaseException as error:
            await self.close()
            if isinstance(error, EngineDied):
                raise ConfigError(f"{self.package.title} does not start: {error}") from error
            raise
        self._on_death = on_death
        return facts

    async def close(self) -> None:
        if self._directory is None:
            return
        directory, self._directory = self._directory, None
        self._on_death = None
        self._die("the engine is being closed")
        if self._watch is not None:
            self._watch.close()
        await self._end_loading()
        await self._shut_down()
        self._engine = None
        await asyncio.to_thread(self._thread.shutdown)
        if os.environ.get(self.package.log_variable, "").startswith(f"{directory}/"):
            del os.environ[self.package.log_variable]
        forget_directory(directory, self.package.logger)
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)

    def _load_or_explain(self, directory: Path) -> Any:
        """Raises ConfigError for everything that goes wrong, with the engine's own reason."""
        title = self.package.title
        try:
            return self._load(directory)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"--engine {self.package.name}: {title} cannot be imported: {one_line(error)}") from error
        except (Exception, SystemExit) as error:
            reason = first_error(directory) or f"{type(error).__name__}: {one_line(error)}"
            raise ConfigError(f"{title} cannot run --model {self._settings.model}: {reason}") from error

    async def _end_loading(self) -> None:
        """Without its processes, a load that nobody waits for fails soon."""
        if self._loading is None:
            return
        while not self._loading.done():
            await asyncio.to_thread(self._kill_processes)
            await asyncio.wait([self._loading], timeout=ABANDON_SECONDS)
        if not self._loading.cancelled() and self._loading.exception() is None:
            self._engine = self._loading.result()

    def _set_up_logging(self, directory: Path, level: str) -> None:
        """Makes the engine log in our format and write its errors to a file, unless the user configures its logging."""
        package = self.package
        if package.log_variable not in os.environ:
            path = write_logging_config(directory, package.logger, level.upper(), package.failure_logger)
            os.environ[package.log_variable] = str(path)

    def _watch_processes(self, pids: Iterable[int], name: str) -> None:
        self._watch = ChildWatch([(pid, name) for pid in pids], self._die)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDied(self._death)

    async def _answer(self, question: Awaitable[Answer]) -> Answer:
        """Waits for the engine's answer. Raises EngineDied if it dies first; the libraries themselves would wait for ever."""
        asked = asyncio.ensure_future(question)
        try:
            await asyncio.wait((asked, self._died), return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._check_alive()
            return asked.result()
        finally:
            asked.cancel()

    def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        self._death = reason
        self._died.set_result(None)
        if self._on_death is not None:
            self._on_death(reason)


class ChildWatch:
    """Calls `on_end` with the reason when the first of these processes ends: once, on the event loop, never after `close`.

    The kernel reports it through one file descriptor per process: no polling, no signal handler, and the exit status stays for the
    process's owner. Processes that ended before the watch began are reported, too.
    """

    def __init__(self, processes: Iterable[tuple[int, str]], on_end: Callable[[str], None]) -> None:
        """`processes` are pairs of process id and a name for the reason."""
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
        self._tell(f"{name} {_describe_end(descriptor)}")

    def _tell(self, reason: str) -> None:
        if not self._is_closed:
            self.close()
            self._on_end(reason)


def _describe_end(descriptor: int) -> str:
    """How the process ended, in words. Leaves its exit status to be collected; it may be collected already."""
    result = None
    with contextlib.suppress(ChildProcessError):
        result = os.waitid(os.P_PIDFD, descriptor, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return GONE
    if result.si_code == os.CLD_EXITED:
        return f"has ended with exit status {result.si_status}"
    # Not every signal number has a name.
    names = {number.value: number.name for number in signal.Signals}
    return f"was ended by {names.get(result.si_status, f'signal {result.si_status}')}"


def free_port(host: str) -> int:
    """A port that nothing listens on now."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        return int(taken.getsockname()[1])


def end_with(pid: int) -> None:
    """Kills the calling process when process `pid` ends, or now if it has ended already.

    Otherwise an engine's process outlives its worker and holds the memory that the next worker needs.
    """
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return

    def wait() -> None:
        # `select.select` takes no descriptor above 1,023.
        ended = select.poll()
        ended.register(descriptor, select.POLLIN)
        ended.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name=f"end with process {pid}", daemon=True).start()


def write_logging_config(directory: Path, logger: str, level: str, failure_logger: str) -> Path:
    """Writes a file for `logging.config.dictConfig`: the engine logs to standard error in our format, and its errors also to a file in
    `directory`, where `first_error` finds why a process of the engine failed.

    Only `failure_logger` writes to the file of errors: others may log every client's mistake and fill it. The configuration refers to
    nothing in Penstock, because the engine starts programs that read it and cannot import Penstock.
    """
    stderr = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "ours", "level": level}
    errors = {"class": "logging.FileHandler", "filename": str(directory / _ERRORS_FILE), "delay": True, "formatter": "record"}
    errors |= {"level": "ERROR", "filters": ["failures"]}
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": {"format": _LOG_FORMAT}, "record": {"format": f"{_RECORD_MARK}%(message)s"}},
        "filters": {"failures": {"name": failure_logger}},
        "handlers": {"stderr": stderr, "errors": errors},
        "loggers": {logger: {"handlers": ["stderr", "errors"], "level": level, "propagate": False}},
    }
    path = directory / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def first_error(directory: Path) -> str | None:
    """The first exception in the file of errors: the later ones follow from it. None if there is none."""
    try:
        records = (directory / _ERRORS_FILE).read_text(encoding="utf-8", errors="replace").split(_RECORD_MARK)
    except FileNotFoundError:
        return None
    return next((_exception(record) for record in records if _TRACEBACK in record), None)


def _exception(record: str) -> str:
    """The text after the last line of code in a traceback, on one line."""
    lines = record.rstrip().splitlines()
    code = max((number for number, line in enumerate(lines) if line.startswith(_CODE_LINES) or line == _TRACEBACK), default=-1)
    return " ".join(" ".join(lines[code + 1 :] or lines[-1:]).split())


def forget_directory(directory: Path, logger: str) -> None:
    """Stops this process from logging to files in the directory."""
    engine = logging.getLogger(logger)
    for handler in [*engine.handlers]:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == directory:
            engine.removeHandler(handler)
            handler.close()


def one_line(error: object) -> str:
    """An error's message on one line, without pydantic's details for developers."""
    text = str(error) or type(error).__name__
    # pydantic adds a heading, and after each message its input and a link.
    text = re.sub(r"\d+ validation errors? for \S+\s*", "", text)
    text = re.sub(r"\[type=.*?(?=\n|$)|^\s*For further information visit .*$", "", text, flags=re.MULTILINE)
    return " ".join(text.split()).removeprefix("Value error, ").rstrip(".")
