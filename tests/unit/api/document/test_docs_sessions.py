"""docs/guides/sessions.md says what the code does, and its examples are programs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest

from penstock.api.openai.answers import Session
from penstock.api.openai.schema import (
    CHOICES,
    MAX_SECONDS,
    UNSUPPORTED_NVEXT,
    AgentHints,
    CacheControl,
    Nvext,
    NvextCacheControl,
    PromptCacheBreakpoint,
    PromptCacheOptions,
    SessionControl,
)
from penstock.api.pipeline.hints import AFFINITY_HEADER, FINAL_HEADERS, MAX_ID_BYTES, ROUTER_HEADER, SESSION_HEADERS
from penstock.api.sessions import DEFAULT_LIMIT, MAX_LIMIT
from penstock.config.engines import EngineConfig
from penstock.config.front_end import MAX_PRIORITY, MIN_PRIORITY, POLICIES
from penstock.wire.messages import DEFAULT_SESSION_SECONDS

TEXT = (Path(__file__).parents[4] / "docs" / "guides" / "sessions.md").read_text(encoding="utf-8")
PROSE = re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BASH = re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
WORDS = {word for span in re.findall(r"`([^`\n]+)`", PROSE) for word in re.findall(r"[\w.-]+", span)}


def stated(pattern: str) -> float:
    found = re.findall(pattern, PROSE)
    assert len(found) == 1, f"{pattern} is there {len(found)} times"
    return float(found[0])


def test_figures() -> None:
    assert stated(r"default timeout is (\d+) seconds") == DEFAULT_SESSION_SECONDS
    assert stated(r"A timeout is above 0 and at most (\d+) seconds") == MAX_SECONDS
    assert stated(r"A session id is 1 to (\d+) bytes") == MAX_ID_BYTES
    assert stated(r"`limit` is 1 to (\d+)") == MAX_LIMIT
    assert stated(r"/v1/sessions\?limit=(\d+)") == DEFAULT_LIMIT
    assert stated(r"from (-\d+) to \d+, 0 by default") == MIN_PRIORITY
    assert stated(r"from -\d+ to (\d+), 0 by default") == MAX_PRIORITY


def test_quotas() -> None:
    config = EngineConfig(context_length=64, kv_pages=8)
    assert stated(r"`--max-sessions` \| (\d+)") == config.max_sessions
    assert stated(r"`--lease-share` \| ([\d.]+)") == config.lease_share
    assert stated(r"by itself (\d+) seconds after its timeout") == config.session_grace


def test_every_header_is_named() -> None:
    headers = {name for names in SESSION_HEADERS for name in names if name} | {AFFINITY_HEADER, ROUTER_HEADER, *FINAL_HEADERS}
    assert {name.decode() for name in headers} <= WORDS
    assert set(POLICIES) <= WORDS


def test_headers_are_named_in_order_of_precedence() -> None:
    table = PROSE[PROSE.index("| 2 | `x-session-id`") : PROSE.index("### Affinity alone")]
    places = [table.index(f"`{names.session.decode()}`") for names in SESSION_HEADERS]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "kind",
    [Nvext, AgentHints, SessionControl, NvextCacheControl, CacheControl, PromptCacheOptions, PromptCacheBreakpoint, Session],
)
def test_every_field_is_named(kind: type[msgspec.Struct]) -> None:
    parts = {part for word in WORDS for part in word.split(".")}
    assert set(kind.__struct_fields__) <= parts


def test_every_choice_is_named() -> None:
    paths = [path for path in CHOICES if path.startswith(("nvext", "prompt_cache", "cache_control"))]
    assert paths
    # `implicit` is what one gets without a mode.
    assert {choice for path in paths for choice in CHOICES[path]} - {"implicit"} <= WORDS


def test_refused_fields_are_named() -> None:
    refused = PROSE[PROSE.index("Refused, because") : PROSE.index("Unknown fields are refused")]
    assert {f"nvext.{name}" for name in re.findall(r"`(\w+)`", refused)} == UNSUPPORTED_NVEXT


def test_examples_are_programs_for_any_server() -> None:
    assert len(PYTHON) == 2
    assert len(BASH) == 1
    for source in PYTHON:
        compile(source, "docs/guides/sessions.md", "exec")
    for source in PYTHON + BASH:
        assert "PENSTOCK_URL" in source
        assert "http://localhost:8000" in source


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_the_shell_example_is_a_program() -> None:
    subprocess.run(["bash", "-n"], input=BASH[0], text=True, check=True)
