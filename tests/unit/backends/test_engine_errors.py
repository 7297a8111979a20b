"""Why an engine's process could not start, as its worker says it."""

from __future__ import annotations

import json
import logging
import logging.config
import multiprocessing
from pathlib import Path

from penstock.backends.engine_errors import first_error, write_logging_config

LOGGER = "an_engine"


def fail(config: Path) -> None:
    """In a process of its own: as an engine does that finds its first mistake in a helper of its own."""
    logging.config.dictConfig(json.loads(config.read_text(encoding="utf-8")))
    log = logging.getLogger(f"{LOGGER}.core")
    log.error("something is wrong")
    for error in (ValueError("no room\n  for the KV"), RuntimeError("a helper has failed")):
        try:
            raise error
        except (ValueError, RuntimeError):
            log.exception("could not start")


def test_the_first_exception_is_the_reason(tmp_path: Path) -> None:
    config = write_logging_config(tmp_path, LOGGER, "ERROR")
    process = multiprocessing.get_context("spawn").Process(target=fail, args=(config,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert first_error(tmp_path) == "ValueError: no room for the KV"


def test_what_is_logged_here_is_not_written_down(tmp_path: Path) -> None:
    fail(write_logging_config(tmp_path, LOGGER, "ERROR"))
    logging.getLogger(LOGGER).handlers.clear()
    assert first_error(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["logging.json"]
