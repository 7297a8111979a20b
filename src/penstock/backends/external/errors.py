"""Why an engine could not start, though it says so in a process of its own: its log goes to a file as well, and there it is found.

An engine's log is for people, and goes to standard error as ours does. What is read here is for the one line that its worker ends with.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

_ERRORS = "errors"
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# Before every record: what follows it may have many lines.
_RECORD = "\x1e"
_TRACEBACK = "Traceback (most recent call last):"
_CODE = ("    ", '  File "')


def write_logging_config(directory: Path, logger: str, level: str, failures: str) -> Path:
    """A file for `logging.config.dictConfig`, in this directory, by which an engine logs as we do, and its errors there, too.

    `failures` is the logger that tells why a process fails: others may log every mistake of a client's, and fill the file. Nothing of
    ours is named: an engine starts programs that read it and cannot import us.
    """
    stderr = {"class": "logging.StreamHandler", "stream": "ext://sys.stderr", "formatter": "ours", "level": level}
    errors = {"class": "logging.FileHandler", "filename": str(directory / _ERRORS), "delay": True, "formatter": "record", "level": "ERROR"}
    errors["filters"] = ["failures"]
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"ours": {"format": _FORMAT}, "record": {"format": f"{_RECORD}%(message)s"}},
        "filters": {"failures": {"name": failures}},
        "handlers": {"stderr": stderr, "errors": errors},
        "loggers": {logger: {"handlers": ["stderr", "errors"], "level": level, "propagate": False}},
    }
    path = directory / "logging.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def first_error(directory: Path) -> str | None:
    """The first exception that was logged: those behind it came of it. None where there is none."""
    try:
        records = (directory / _ERRORS).read_text(encoding="utf-8", errors="replace").split(_RECORD)
    except FileNotFoundError:
        return None
    return next((_exception(record) for record in records if _TRACEBACK in record), None)


def _exception(record: str) -> str:
    """What stands behind the last line of a traceback's code, in one line."""
    lines = record.rstrip().splitlines()
    code = max((number for number, line in enumerate(lines) if line.startswith(_CODE) or line == _TRACEBACK), default=-1)
    return " ".join(" ".join(lines[code + 1 :] or lines[-1:]).split())


def forget_directory(directory: Path, logger: str) -> None:
    """In this process, nothing more is written there."""
    engine = logging.getLogger(logger)
    for handler in [*engine.handlers]:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == directory:
            engine.removeHandler(handler)
            handler.close()
