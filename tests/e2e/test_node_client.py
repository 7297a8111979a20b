"""OpenAI's client for Node drives the server. The scripts are in `node/`; the client is installed once, outside the checkout."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

import programs
from e2e.harness import DEFAULT_MODEL, Server
from penstock.cli.keys import new_key
from penstock.config.front_end import QuotaLimits

SOURCES = Path(__file__).parent / "node"
MAX_SECONDS = 280


@pytest.fixture(scope="session")
def node() -> tuple[str, list[str]]:
    """The program, and the command that starts npm."""
    found = programs.node()
    if found is None:
        reason = "needs node and npm: run `make setup`, which installs both"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def scripts(node: tuple[str, list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts and the installed client."""
    folder = tmp_path_factory.mktemp("node")
    for source in SOURCES.glob("*.mjs"):
        shutil.copy(source, folder)
    (folder / "node_modules").symlink_to(installed(node[1]) / "node_modules")
    return folder


def installed(npm: list[str]) -> Path:
    """The packages of the lock, installed once for all checkouts with the same lock."""
    lock = hashlib.sha256((SOURCES / "package-lock.json").read_bytes()).hexdigest()[:16]
    caches = programs.cache_folder()
    target = caches / f"node-{lock}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=caches) as work:
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(SOURCES / name, work)
        done = subprocess.run([*npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=work, capture_output=True, text=True)
        assert done.returncode == 0, f"npm ci: {done.stderr}"
        whole = Path(work) / "whole"
        whole.mkdir()
        (Path(work) / "node_modules").rename(whole / "node_modules")
        try:
            whole.rename(target)
        except OSError:
            # Another run was faster.
            assert target.is_dir()
    return target


def run(node: tuple[str, list[str]], scripts: Path, name: str, server: Server, **environment: str) -> None:
    variables = {"PENSTOCK_URL": server.url, "PENSTOCK_MODEL": server.model, "NO_PROXY": "127.0.0.1", **environment}
    command = [node[0], "--test", "--test-reporter=tap", name]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=MAX_SECONDS, env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    # Node exits with 0, too, when it finds no script or no test in it.
    assert int(re.findall(r"^# pass (\d+)", done.stdout, re.MULTILINE)[0]) >= 2, done.stdout


@pytest.mark.timeout(MAX_SECONDS + 20)
@pytest.mark.parametrize("name", sorted(source.name for source in SOURCES.glob("*.test.mjs") if source.name != "errors.test.mjs"))
def test_the_client_for_node(node: tuple[str, list[str]], scripts: Path, model_server: Server, name: str) -> None:
    assert model_server.model == DEFAULT_MODEL
    run(node, scripts, name, model_server)


def test_errors_have_the_right_classes(node: tuple[str, list[str]], scripts: Path, serve: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key = new_key(keys, "patient", QuotaLimits())
    hasty = new_key(keys, "hasty", QuotaLimits(requests_per_minute=1))
    server = serve("--step-ms", "1", "--key-file", str(keys))
    run(node, scripts, "errors.test.mjs", server, PENSTOCK_KEY=key, PENSTOCK_HASTY_KEY=hasty)
