"""OpenAI's client for Node drives the server. Its scripts are in `node/`; the client itself is installed once, beside the checkout."""

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

from e2e.harness import DEFAULT_MODEL, Server
from penstock.api.auth.quota import QuotaLimits
from penstock.cli.keys import new_key

SOURCES = Path(__file__).parent / "node"
OLDEST_NODE = 18
LONGEST_SECONDS = 280


@pytest.fixture(scope="session")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the scripts, in which the client is found."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no node or no npm: the tests of OpenAI's client for Node need both")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(re.findall(r"\d+", version)[0]) < OLDEST_NODE:
        pytest.skip(f"node is {version}: the tests of OpenAI's client for Node need {OLDEST_NODE} or newer")
    folder = tmp_path_factory.mktemp("node")
    for source in SOURCES.glob("*.mjs"):
        shutil.copy(source, folder)
    (folder / "node_modules").symlink_to(installed(npm) / "node_modules")
    return folder


def installed(npm: str) -> Path:
    """What the lock names, installed once for all checkouts that have the same lock."""
    lock = hashlib.sha256((SOURCES / "package-lock.json").read_bytes()).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"
    try:
        caches.mkdir(parents=True, exist_ok=True)
    except OSError:
        caches = Path(tempfile.gettempdir()) / f"penstock-tests-{os.getuid()}"
        caches.mkdir(mode=0o700, exist_ok=True)
    target = caches / f"node-{lock}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=caches) as work:
        for name in ("package.json", "package-lock.json", ".npmrc"):
            shutil.copy(SOURCES / name, work)
        done = subprocess.run([npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=work, capture_output=True, text=True)
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


def run(scripts: Path, name: str, server: Server, **environment: str) -> None:
    variables = {"PENSTOCK_URL": server.url, "PENSTOCK_MODEL": server.model, "NO_PROXY": "127.0.0.1", **environment}
    command = ["node", "--test", "--test-reporter=tap", name]
    done = subprocess.run(command, cwd=scripts, capture_output=True, text=True, timeout=LONGEST_SECONDS, env={**os.environ, **variables})
    assert done.returncode == 0, done.stdout + done.stderr
    # Scripts that are not found, or have no test in them, end well, too.
    assert int(re.findall(r"^# pass (\d+)", done.stdout, re.MULTILINE)[0]) >= 2, done.stdout


@pytest.mark.timeout(LONGEST_SECONDS + 20)
@pytest.mark.parametrize("name", sorted(source.name for source in SOURCES.glob("*.test.mjs") if source.name != "errors.test.mjs"))
def test_the_client_for_node(scripts: Path, model_server: Server, name: str) -> None:
    assert model_server.model == DEFAULT_MODEL
    run(scripts, name, model_server)


def test_its_errors_are_of_the_right_classes(scripts: Path, serve: Callable[..., Server], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    key = new_key(keys, "patient", QuotaLimits())
    hasty = new_key(keys, "hasty", QuotaLimits(requests_per_minute=1))
    server = serve("--step-ms", "1", "--key-file", str(keys))
    run(scripts, "errors.test.mjs", server, PENSTOCK_KEY=key, PENSTOCK_HASTY_KEY=hasty)
