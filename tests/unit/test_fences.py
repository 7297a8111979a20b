"""Imports point one way, heavy libraries stay where they belong, and the base needs no extra."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "penstock"

# Lowest first. Packages of the same layer do not import each other.
LAYERS = [
    {"wire"},
    {"stream", "metrics", "config"},
    {"text", "media", "grammar", "kv", "router", "worker"},
    {"engine"},
    {"backends"},
    {"cluster"},
    {"api"},
    {"bench"},
    {"cli"},
]
# Modules at the root of the package, which every package may import.
ROOT_MODULES = {"__version__", "fairness", "lazy_heap"}
RANK = {package: rank for rank, layer in enumerate(LAYERS) for package in layer}

# Where a library that is heavy, or does I/O, may be imported.
CONFINED = {
    "torch": {"engine", "cli"},
    "ray": {"cluster"},
    "redis": {"cluster"},
    "granian": {"api"},
    "starlette": {"api"},
    "aiohttp": {"bench", "backends"},
    "vllm": {"backends"},
    "sglang": {"backends"},
    "zmq": {"backends"},
    "huggingface_hub": {"cli"},
    "matplotlib": {"bench"},
    "rich": {"bench", "cli"},
    "psutil": {"bench"},
    "tokenizers": {"text"},
    "jinja2": {"text"},
    "gguf": {"text", "engine"},
    "safetensors": {"engine"},
    "numpy": {"text", "engine"},
    "transformers": set(),
    "PIL": {"media", "backends"},
    "llguidance": {"grammar"},
}
NO_IO = {"router", "engine", "kv", "grammar", "stream", "wire"}
IO_MODULES = {"socket", "ssl", "subprocess", "http", "urllib", "tempfile"}


def modules() -> list[tuple[str, Path]]:
    return [(path.relative_to(SOURCE).parts[0], path) for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE]


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names] if module == "penstock" else [module]
    return names


def test_every_package_has_a_place() -> None:
    packages = {package for package, _ in modules()}
    assert packages <= RANK.keys(), packages - RANK.keys()


def test_imports_point_one_way() -> None:
    wrong = []
    for package, path in modules():
        for name in imported(path):
            parts = name.split(".")
            if parts[0] != "penstock" or len(parts) < 2 or parts[1] in {package, *ROOT_MODULES}:
                continue
            if RANK[parts[1]] >= RANK[package]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_libraries_stay_in_their_packages() -> None:
    wrong = []
    for package, path in modules():
        for name in imported(path):
            root = name.split(".")[0]
            if root in CONFINED and package not in CONFINED[root]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {root}")
            if root in IO_MODULES and package in NO_IO:
                wrong.append(f"{path.relative_to(SOURCE)} does I/O: {root}")
            if root == "pickle":
                wrong.append(f"{path.relative_to(SOURCE)} imports pickle")
    assert not wrong, "\n".join(wrong)


def test_redis_is_in_one_file() -> None:
    found = {path.name for _, path in modules() for name in imported(path) if name.split(".")[0] == "redis"}
    assert found == {"redis_store.py"}


def test_the_base_imports_no_extra() -> None:
    extras = (
        "torch ray redis tokenizers jinja2 aiohttp matplotlib rich psutil numpy gguf safetensors llguidance transformers vllm sglang zmq"
        " huggingface_hub PIL"
    )
    program = f"""
import sys
import penstock.cli.main, penstock.cli.compose
found = [name for name in {extras.split()!r} if name in sys.modules]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], check=True)
