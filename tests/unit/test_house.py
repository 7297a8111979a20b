"""The size and shape of the code, and the manners of the tests."""

from __future__ import annotations

import ast
import statistics
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TESTS = ROOT / "tests"

MAX_FILES = 285
MAX_LINES = 53_000
MAX_FILES_IN_A_FOLDER = 15
MAX_MEDIAN_FUNCTION_LINES = 6
MAX_P90_FUNCTION_LINES = 16
MAX_FUNCTION_LINES = 60
MAX_PRIVATE_ACCESSES = 10

Function = ast.FunctionDef | ast.AsyncFunctionDef
# Public methods and attributes of named tuples, in spite of their names.
OF_NAMED_TUPLES = {"_asdict", "_field_defaults", "_fields", "_make", "_replace"}
# They measure. `time.time` is not among them: it tells the date.
CLOCKS = {
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "thread_time_ns",
}


@cache
def parsed(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}


def functions() -> list[tuple[int, str]]:
    """The lines of each function, from `def` to its end, and where it is."""
    return [
        (node.end_lineno - node.lineno + 1, f"{path.relative_to(SOURCE)}: {node.name}")
        for path, tree in parsed(SOURCE).items()
        for node in ast.walk(tree)
        if isinstance(node, Function) and node.end_lineno is not None
    ]


def test_no_folder_is_crowded() -> None:
    """`__init__.py` is not counted."""
    for folder in (SOURCE, ROOT / "bench"):
        sizes = Counter(path.parent for path in folder.rglob("*.py") if path.name != "__init__.py")
        assert {str(name): size for name, size in sizes.items() if size > MAX_FILES_IN_A_FOLDER} == {}


def test_functions_are_short() -> None:
    sizes = sorted(functions())
    lines = [size for size, _ in sizes]
    assert [entry for entry in sizes if entry[0] > MAX_FUNCTION_LINES] == []
    assert statistics.median(lines) <= MAX_MEDIAN_FUNCTION_LINES
    assert lines[int(len(lines) * 0.9)] <= MAX_P90_FUNCTION_LINES


def test_the_source_is_small() -> None:
    files = list(parsed(SOURCE))
    assert len(files) <= MAX_FILES
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in files) <= MAX_LINES


def test_tests_leave_private_members_alone() -> None:
    """At most 10 accesses to private members of other packages in all tests.

    Counted is each expression `x._name`, but not:
    - `self._name` and `cls._name`, names with two underscores at both ends, and the public names of named tuples that begin with one,
    - a name that the test file itself defines,
    - in `tests/unit/PACKAGE/`, a name that `src/penstock/PACKAGE/` defines: a package's own tests may know how it works.

    A file defines a name by `def`, `class`, or an assignment to the name or to an attribute with it.
    """
    wrong = []
    for path, tree in parsed(TESTS).items():
        allowed = defined(tree) | own_package_names(path)
        wrong += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and is_private(node) and node.attr not in allowed
        ]
    assert len(wrong) <= MAX_PRIVATE_ACCESSES, "\n".join(wrong)


def is_private(node: ast.Attribute) -> bool:
    name = node.attr
    if not name.startswith("_") or (name.startswith("__") and name.endswith("__")) or name in OF_NAMED_TUPLES:
        return False
    return not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))


def own_package_names(test: Path) -> set[str]:
    """The private names of the package that this file tests."""
    parts = test.relative_to(TESTS).parts
    return names_in(parts[1]) if parts[0] == "unit" and len(parts) > 2 else set()


@cache
def names_in(name: str) -> set[str]:
    package = SOURCE / "penstock" / name
    return set().union(*(defined(tree) for path, tree in parsed(SOURCE).items() if path.is_relative_to(package)))


def defined(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names


def test_no_test_measures_time() -> None:
    """No difference is made with a clock that measures: `time.monotonic() - began` and the like.

    How long something takes depends on the machine, so `bench/` measures it. A time limit for a wait is allowed:
    `deadline = time.monotonic() + 10`, `assert time.monotonic() < deadline`.
    """
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"
        for path, tree in parsed(TESTS).items()
        if path.parts[len(TESTS.parts)] != "engines"
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and any(reads_a_clock(part) for part in (node.left, node.right))
    ]
    assert wrong == []


def reads_a_clock(node: ast.expr) -> bool:
    calls = (part.func for part in ast.walk(node) if isinstance(part, ast.Call))
    return any(name in CLOCKS or name.endswith(("loop.time", "loop().time")) for name in map(called_name, calls))


def called_name(function: ast.expr) -> str:
    """The function's name without its module; `loop.time` with the loop, as other objects have a `time`, too."""
    text = ast.unparse(function)
    return text if text.endswith(".time") else text.rsplit(".", 1)[-1]


def test_the_checks_see_what_they_look_for() -> None:
    def attributes(text: str) -> Iterator[ast.Attribute]:
        return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))

    for text in ("a._b", "a.b._c", "self.a._b", "f()._b", "del a._b"):
        assert any(is_private(node) for node in attributes(text)), text
    for text in ("a.b", "self._a", "cls._a", "a.__dict__", "a._replace(b=1)"):
        assert not any(is_private(node) for node in attributes(text)), text
    for text in ("time.monotonic()", "perf_counter()", "asyncio.get_running_loop().time()", "loop.time()", "float(time.process_time())"):
        assert reads_a_clock(ast.parse(text, mode="eval").body), text
    for text in ("time.time()", "began", "clock()"):
        assert not reads_a_clock(ast.parse(text, mode="eval").body), text
