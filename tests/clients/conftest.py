"""The fixtures of the clients' tests, and the table at the end of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clients.scene import Scene, Stack, playing, running_stack
from clients.table import table
from clients.upstream import Script

Play = Callable[..., Scene]

MAX_SECONDS = 400


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """They need environments that only `make test-clients` sets up."""
    return None if config.getoption("clients") else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every program that a test runs has a limit of its own. The test's limit ends all of pytest, and leaves processes behind."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(MAX_SECONDS))


@pytest.fixture(scope="session")
def stacks() -> Iterator[Callable[..., Stack]]:
    """A server for each set of options, started once."""
    with contextlib.ExitStack() as running:
        started: dict[Any, Stack] = {}

        def stack(*arguments: str, **options: Any) -> Stack:
            key = arguments, tuple(sorted(options.items()))
            if key not in started:
                started[key] = running.enter_context(running_stack(*arguments, **options))
            return started[key]

        yield stack


@pytest.fixture
def play(stacks: Callable[..., Stack], record_property: Callable[[str, object], None]) -> Iterator[Play]:
    """`play(client, version, script, *arguments, **options)` begins a scene. Options are those of `running_stack`. At the end every
    scene is checked and goes into the table."""
    with contextlib.ExitStack() as running:
        scenes: list[Scene] = []

        def begin(client: str, version: str, script: Script, *arguments: str, **options: Any) -> Scene:
            scene = running.enter_context(playing(stacks(*arguments, **options), script, client, version))
            scenes.append(scene)
            return scene

        yield begin
        for scene in scenes:
            record_property("scene", scene.row())
        for scene in scenes:
            scene.check()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for found in terminalreporter.stats.values() for report in found if getattr(report, "when", "") == "teardown"]
    rows = [value for report in reports for name, value in report.user_properties if name == "scene"]
    if rows:
        terminalreporter.section("clients")
        terminalreporter.write_line(table(rows))
