"""Servers for the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from e2e.harness import Server


@pytest.fixture(scope="session", autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers keep their state in the tests' folder, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers. Stops those that the test has not stopped."""
    servers: list[Server] = []

    def start(*arguments: str, **rest: Any) -> Server:
        server = Server(*arguments, **rest)
        servers.append(server)
        return server.wait_ready()

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server for all tests that only ask questions."""
    server = Server("--step-ms", "2", "--context-length", "4096").wait_ready()
    yield server
    assert server.stop() == 0, server.log
    assert not [line for line in server.log if "ERROR" in line or "Traceback" in line], server.log


@pytest.fixture(scope="session")
def model_server() -> Iterator[Server]:
    """The default engine with the default model, as `make serve` starts it."""
    server = Server(engine="embedded").wait_ready()
    yield server
    assert server.stop() == 0, server.log
    assert not [line for line in server.log if "ERROR" in line or "Traceback" in line], server.log
