"""The examples of the guides are programs that run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.harness import Server

DOCS = Path(__file__).parents[2] / "docs"
# Examples that force calls or a form need a model.
SERVERS = {
    "quickstart": "server",
    "guides/chat": "model_server",
    "guides/responses": "server",
    "guides/anthropic": "model_server",
    "guides/structured-output": "model_server",
}
EXAMPLES = [
    pytest.param(server, source, id=f"{name}-{number}")
    for name, server in SERVERS.items()
    for number, source in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / f"{name}.md").read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("fixture", "source"), EXAMPLES)
def test_an_example_runs_and_says_something(request: pytest.FixtureRequest, fixture: str, source: str) -> None:
    running: Server = request.getfixturevalue(fixture)
    environment = {**os.environ, "PENSTOCK_URL": running.url}
    done = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
