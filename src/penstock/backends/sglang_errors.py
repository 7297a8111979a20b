"""Why SGLang could not start. Its processes log a whole traceback as text, and then end; the worker's last line says what it comes to."""

from __future__ import annotations

import json
import logging
import multiprocessing
from pathlib import Path

from penstock.backends import engine_errors

TRACEBACK = "Traceback (most recent call last)"


class HasTraceback(logging.Filter):
    """Lets through what has a traceback in it, in processes that SGLang has started."""

    def filter(self, record: logging.LogRecord) -> bool:
        return TRACEBACK in record.getMessage() and multiprocessing.parent_process() is not None


class LastLine(logging.Formatter):
    """The exception alone: a traceback ends with it."""

    def format(self, record: logging.LogRecord) -> str:
        lines = [line for line in record.getMessage().splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""


def write_logging_config(directory: Path, level: str) -> Path:
    """See `engine_errors`, from which it differs in how an exception is told."""
    path = engine_errors.write_logging_config(directory, "sglang", level)
    config = json.loads(path.read_text(encoding="utf-8"))
    config["formatters"]["line"] = {"()": f"{__name__}.{LastLine.__name__}"}
    config["filters"]["children"] = {"()": f"{__name__}.{HasTraceback.__name__}"}
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
