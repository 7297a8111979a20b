"""Why an engine's process could not start, as its worker says it."""

from __future__ import annotations

import logging
import subprocess
import sys
from logging.config import dictConfig
from pathlib import Path

import msgspec
import pytest

from penstock.backends.external.errors import first_error, forget_directory, write_logging_config

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
