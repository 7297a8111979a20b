"""The engines that all these tests run with: those named by `--engine`, or those that need nothing but this project."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.backends.rig import Rig
from contract.backends.setups import BY_DEFAULT, SETUPS

HERE = Path(__file__).parent
LAST = "test_death.py"


def _engines(config: pytest.Config) -> list[str]:
    return config.getoption("engine") or list(BY_DEFAULT)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" in metafunc.fixturenames:
        metafunc.parametrize("rig", _engines(metafunc.config), indirect=True, scope="session")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An engine is killed when all else has been asked of it. It may take minutes to start, and warns of what is not ours."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[place] for place in places]
    order = [_engine_of(item) for item in ours]
    ours.sort(key=lambda item: (order.index(_engine_of(item)), item.path.name == LAST))
    for place, item in zip(places, ours, strict=True):
        items[place] = item
        setup = SETUPS.get(_engine_of(item))
        if setup is not None and setup.process is not None:
            item.add_marker(pytest.mark.timeout(setup.start_seconds + 3 * setup.patience))
            item.add_marker(pytest.mark.filterwarnings("ignore:::(?!penstock)"))


def _engine_of(item: pytest.Item) -> str:
    assert isinstance(item, pytest.Function)
    return str(item.callspec.params["rig"]) if hasattr(item, "callspec") else ""


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(SETUPS[request.param]) as rig:
        yield rig


@pytest.fixture(autouse=True)
def settled(rig: Rig) -> Iterator[None]:
    """What a test leaves behind is its own failure, and not that of the next one."""
    yield
    if not rig.has_died:
        rig.check_settled()
