"""Async tests run on uvloop, as the product does, and leave no task behind."""

from __future__ import annotations

import asyncio
import inspect

import pytest
import uvloop
from hypothesis import settings

# How long an example takes says more about the machine than about the code.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")

ENGINES = ("simulator", "embedded", "vllm", "sglang")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--engine",
        action="append",
        choices=ENGINES,
        help="an engine that the tests of all engines run with; repeat for each. vllm and sglang must be installed where pytest is",
    )
    parser.addoption("--clients", action="store_true", help="run the tests with real clients, in tests/clients: see `make test-clients`")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests, and fails one whose tasks outlive it."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}

    async def run() -> None:
        await pyfuncitem.obj(**arguments)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left behind: {left}"

    uvloop.run(run())
    return True
