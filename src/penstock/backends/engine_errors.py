"""Why an engine could not start, though it says so in a process of its own: that process writes it down for us, a line an exception.

An engine's log is for people, and goes to standard error as ours does. What is written here is for the one line that its worker ends with.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

ERRORS = "errors"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


class OfChildren(logging.Filter):
    """Lets through what tells of an exception, in processes that an engine has started."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is not None and multiprocessing.parent_process() is not None


class ExceptionLine(logging.Formatter):
    """The exception alone, in one line."""

    def format(self, record: logging.LogRecord) -> str:
        error = record.exc_info[1] if record.exc_info else None
        return " ".join(f"{type(error).__name__}: {error}".split())


def write_logging_config(directory: Path, logger: str, level: str) -> Path:
    """A file for `logging.config.dictConfig`, in this directory, by which an engine logs as we do, and writes down its exceptions there."""
    here = __name__
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": {"format": _FORMAT}, "line": {"()": f"{here}.{ExceptionLine.__name__}"}},
        "filters": {"children": {"()": f"{here}.{OfChildren.__name__}"}},
        "handlers": {
            "stderr": {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "ours", "level": level},
            "errors": {
                "class": "logging.FileHandler",
                "filename": str(directory / ERRORS),
                "delay": True,
                "formatter": "line",
                "filters": ["children"],
                "level": "ERROR",
            },
        },
        "loggers": {logger: {"handlers": ["stderr", "errors"], "level": level, "propagate": False}},
    }
    path = directory / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def first_error(directory: Path) -> str | None:
    """The first exception that was written down: those behind it came of it. None where there is none."""
    try:
        lines = (directory / ERRORS).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    return lines[0] if lines else None
