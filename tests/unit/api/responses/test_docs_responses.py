"""docs/guides/responses.md says what the code does, and its examples are programs."""

from __future__ import annotations

import re
from pathlib import Path

from penstock.api.responses.rows import MAX_CHAIN
from penstock.api.responses.schema import UNSUPPORTED_RESPONSE
from penstock.config.front_end import ResumeLimits, StoreLimits

TEXT = (Path(__file__).parents[4] / "docs" / "guides" / "responses.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def stated(pattern: str) -> float:
    (found,) = re.findall(pattern, TEXT)
    return float(found)


def test_figures() -> None:
    assert stated(r"`--response-ttl` \| (\d+) seconds") == StoreLimits().seconds
    assert stated(r"`--response-store-size` \| (\d+) MiB") * 2**20 == StoreLimits().bytes
    assert stated(r"at most (\d+) responses") == MAX_CHAIN
    assert stated(r"`--resume-grace` \((\d+) seconds\)") == ResumeLimits().grace


def test_refused_fields_are_named() -> None:
    for field in ("prompt", "moderation", "context_management", "text.verbosity"):
        assert field in UNSUPPORTED_RESPONSE
        assert f"`{field}`" in TEXT


def test_examples_are_programs_for_any_server() -> None:
    assert len(PYTHON) == 5
    for source in PYTHON:
        compile(source, "docs/guides/responses.md", "exec")
        assert "PENSTOCK_URL" in source
