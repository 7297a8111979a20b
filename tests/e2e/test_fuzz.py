"""The fuzzers, each with a few hundred requests; `make fuzz` sends tens of thousands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[2] / "bench" / "fuzz.py"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("what", "cases"), [("schemathesis", 200), ("bodies", 800)])
def test_whatever_is_sent_is_only_refused(what: str, cases: int) -> None:
    command = [sys.executable, str(FUZZ), what, f"--cases={cases}", "--seed=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (sent,) = re.findall(r"^total\s+([0-9,]+)", done.stdout, re.MULTILINE)
    assert int(sent.replace(",", "")) >= cases
    for status in ("200", "400", "404"):
        assert f" {status}: " in done.stdout, "nothing came of it"
