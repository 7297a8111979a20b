"""An engine with a model that reads images, for all these tests of one family. Which engines: `--engine`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contract.backends.setups import SETUPS
from contract.images.looking import FAMILIES, VisionRig

HERE = Path(__file__).parent


def _pairs(config: pytest.Config) -> list[tuple[str, str]]:
    engines = config.getoption("engine") or []
    return [(engine, kind) for engine in engines for kind in FAMILIES.get(engine, ())]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make test` has no engine for them."""
    return True if collection_path.name.startswith("test_") and not _pairs(config) else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "rig" in metafunc.fixturenames:
        metafunc.parametrize("rig", _pairs(metafunc.config), indirect=True, scope="session", ids="-".join)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    longest = max([SETUPS[engine].start_seconds + 3 * SETUPS[engine].patience for engine, _ in _pairs(config)], default=0)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(longest))
            item.add_marker(pytest.mark.filterwarnings("ignore:::(?!penstock)"))


@pytest.fixture(scope="session")
def rig(request: pytest.FixtureRequest) -> Iterator[VisionRig]:
    with VisionRig(*request.param) as rig:
        yield rig


@pytest.fixture(autouse=True)
def settled(rig: VisionRig) -> Iterator[None]:
    """What a test leaves behind is its own failure, and not that of the next one."""
    rig.tap.asked.clear()
    yield
    rig.check_settled()
