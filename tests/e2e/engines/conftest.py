"""One server of the engine that is tested, and the judge of its answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chat_model import chat_model
from e2e.engines.expected import Judge
from e2e.engines.setups import SETUPS, Setup
from e2e.harness import Server

STARTS_WITHIN_A_TEST = 4
HERE = Path(__file__).parent


def _engines(config: pytest.Config) -> list[str]:
    """Those of the command line that have a model; the simulator has none to be judged by."""
    return [name for name in config.getoption("engine") or ["embedded"] if name in SETUPS]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "setup" in metafunc.fixturenames:
        metafunc.parametrize("setup", [SETUPS[name] for name in _engines(metafunc.config)], indirect=True, scope="session", ids=_named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test may have to wait for engines to start, some of which take minutes."""
    longest = max([SETUPS[name].start_seconds for name in _engines(config)], default=0)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(STARTS_WITHIN_A_TEST * longest))


def _named(setup: Setup) -> str:
    return setup.engine


@pytest.fixture(scope="session")
def setup(request: pytest.FixtureRequest) -> Setup:
    made: Setup = request.param
    return made


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge(chat_model())


@pytest.fixture(scope="session")
def server(setup: Setup) -> Iterator[Server]:
    """For all tests that break nothing. They all go by one worker, and it has to end in order."""
    server = setup.start(chat_model())
    yield server
    assert server.stop(timeout=60) == 0, server.log
    assert not [line for line in server.log if "Traceback" in line], server.log


@pytest.fixture
def begin(setup: Setup) -> Iterator[Callable[..., Server]]:
    """Starts servers that the test may break, and stops those that it has not stopped."""
    servers: list[Server] = []

    def start(*arguments: str) -> Server:
        servers.append(setup.start(chat_model(), *arguments))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop(timeout=60)
