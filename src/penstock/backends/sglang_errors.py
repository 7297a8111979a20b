"""Why SGLang could not start: see `engine_errors`."""

from __future__ import annotations

import json
from pathlib import Path

from penstock.backends import engine_errors

LOGGER = "sglang"
# What it logs when its process fails, and little else. Others log every grammar that they cannot compile, and would fill the file.
FAILURES = "sglang.srt.managers.scheduler"


def write_logging_config(directory: Path, level: str) -> Path:
    path = engine_errors.write_logging_config(directory, LOGGER, level)
    config = json.loads(path.read_text(encoding="utf-8"))
    config["filters"] = {"failures": {"name": FAILURES}}
    config["handlers"]["errors"]["filters"] = ["failures"]
    path.write_text(json.dumps(config), encoding="utf-8")
    return path
