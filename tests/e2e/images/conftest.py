"""A server for each engine that is tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from anthropic import Anthropic

from e2e.harness import Server
from e2e.images.setups import SETUPS, Seeing

HERE = Path(__file__).parent
ENGINES = ("simulator", "embedded")
"""Those that are tested without `--engine`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeing" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("engine") or ENGINES
        setups = [setup for setup in SETUPS.values() if setup.engine in wanted]
        if "source" in metafunc.fixturenames:
            # The examples of the guide do not depend on the engine.
            setups = setups[:1]
        metafunc.parametrize("seeing", setups, indirect=True, scope="session", ids=[setup.name for setup in setups])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The first test waits for the engine's start, which may take minutes."""
    wanted = config.getoption("engine") or ENGINES
    longest = max([setup.start_seconds for setup in SETUPS.values() if setup.engine in wanted], default=0)
    for item in items:
        if longest and HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(2 * longest))


@pytest.fixture(scope="session")
def seeing(request: pytest.FixtureRequest) -> Seeing:
    made: Seeing = request.param
    return made


@pytest.fixture(scope="session")
def server(seeing: Seeing) -> Iterator[Server]:
    """It has to end in order."""
    server = seeing.start()
    yield server
    assert server.stop(timeout=60) == 0, server.log
    assert not [line for line in server.log if "Traceback" in line], server.log


@pytest.fixture
def anthropic(server: Server) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client
