"""docs/guides/anthropic.md says what the code does; its examples and those of claude-code.md are programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from penstock.api.anthropic.errors import AnthropicErrors
from penstock.api.anthropic.schema import CHOICES, UNSUPPORTED, MessagesRequest
from penstock.api.openai.schema import MAX_STOPS, UNSUPPORTED_NVEXT
from penstock.text.formats.tables import JSON, TOOL_FORMATS
from penstock.wire.errors import RequestError

GUIDES = Path(__file__).parents[4] / "docs" / "guides"
TEXT = (GUIDES / "anthropic.md").read_text(encoding="utf-8")
CLAUDE_CODE = (GUIDES / "claude-code.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BASH = re.findall(r"```bash\n(.*?)```", CLAUDE_CODE, re.DOTALL)
WORDS = {word for span in re.findall(r"`([^`\n]+)`", PROSE) for word in re.findall(r"[\w.-]+", span)}


def test_every_field_is_named() -> None:
    assert set(MessagesRequest.__struct_fields__) <= WORDS


def test_every_block_and_choice_is_named() -> None:
    for path in ("messages.content.type", "tool_choice.type", "thinking.type", "context_management.edits.type"):
        assert set(CHOICES[path]) <= WORDS, path


def test_what_is_refused_is_named_as_refused() -> None:
    [row] = [line for line in PROSE.splitlines() if line.endswith("| refused, unless empty |")]
    assert set(re.findall(r"`(\w+)`", row)) == UNSUPPORTED - UNSUPPORTED_NVEXT


def test_statuses() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `(\w+)` \|", PROSE, re.MULTILINE)
    assert len(rows) == 7
    for status, kind in rows:
        told = 503 if status == "529" else int(status)
        error = RequestError("why", code="why", status=told)
        rendered, body = AnthropicErrors().render(error)
        assert rendered == int(status)
        assert f'"{kind}"'.encode() in body


def test_figures() -> None:
    assert f"`stop_sequences` (up to {MAX_STOPS})" in PROSE


def test_examples_are_programs_that_can_be_pointed_anywhere() -> None:
    assert len(PYTHON) == 2
    assert len(BASH) == 1
    for source in PYTHON:
        compile(source, "docs/guides/anthropic.md", "exec")
    for source in PYTHON + BASH:
        assert "PENSTOCK_URL" in source
        assert "http://localhost:8000" in source


def test_the_tool_formats_that_the_guide_names_are_all_there_are() -> None:
    [section] = re.findall(r"## The model\n(.*?)\n## ", CLAUDE_CODE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", section)) == TOOL_FORMATS.keys() - {JSON}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_shell_example_is_a_program() -> None:
    subprocess.run(["bash", "-n"], input=BASH[0], text=True, check=True)
