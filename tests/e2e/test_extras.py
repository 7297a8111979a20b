"""What an extra of the package installs is enough for what it is for: tried in an environment that has nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import tomllib
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import penstock
from chat_model import chat_model
from e2e.harness import Server

REPOSITORY = Path(__file__).parents[2]


def required(extra: str) -> Iterator[Requirement]:
    """What pyproject.toml names for `penstock[extra]`."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    waiting = [*project["dependencies"], *extras[extra]]
    for text in waiting:
        requirement = Requirement(text)
        if requirement.name == "penstock":
            waiting += [text for name in requirement.extras for text in extras[name]]
        else:
            yield requirement


def distributions(extra: str) -> dict[str, importlib.metadata.Distribution]:
    """The installed distributions that pip would install for it, with all that they need themselves."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = list(required(extra))
    for requirement in waiting:
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found[name] = importlib.metadata.distribution(name)
            needed = map(Requirement, found[name].requires or ())
            waiting += [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture
def python(tmp_path: Path) -> str:
    """The interpreter of an environment with what `pip install penstock[http]` installs, linked from this one, and with nothing else."""
    venv.create(tmp_path / "venv", symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for distribution in distributions("http").values():
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (packages / top).symlink_to(Path(str(distribution.locate_file(top))))
    (packages / "penstock.pth").write_text(str(Path(penstock.__file__).parents[1]))
    return str(tmp_path / "venv" / "bin" / "python")


def test_the_http_extra_serves_a_model_with_a_tokenizer(python: str, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    upstream = serve("--model", str(chat_model()), "--step-ms", "1", "--served-name", "upstream", model="upstream")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    for package in ("torch", "llguidance", "numpy"):
        found = subprocess.run([python, "-c", f"import {package}"], check=False, capture_output=True, text=True, env={**os.environ})
        assert "ModuleNotFoundError" in found.stderr
    command = [python, "-m", "penstock", "serve", "--port", "0", "--engine", "http"]
    arguments = ("--url", upstream.url, "--model", str(chat_model()), "--served-name", "behind")
    stack = serve(*arguments, command=command, model="behind")
    asked = {"prompt": "The water", "max_tokens": 16, "seed": 5, "ignore_eos": True}
    (expected,), (seen,) = (server.post("/v1/completions", **asked)[2]["choices"] for server in (upstream, stack))
    assert seen["text"] == expected["text"] != ""
    assert any("structured output is off: it needs the package 'llguidance'" in line for line in stack.log)
