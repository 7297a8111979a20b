"""The hosts of sources of KV: a lookup that fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable

import pytest

from penstock.cluster.kv.lookups import Lookups
from penstock.wire.address import TcpAddress

ADDRESS = TcpAddress("source.invalid", 7)
FOUND = [(socket.AF_INET, ("127.0.0.1", 7))]


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """What the next lookups of a name raise."""
    failures: list[Exception] = []

    def look_up(host: str, port: int, *, flags: int = 0, **_: int) -> list[object]:
        if flags:
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is a name")
        if failures:
            raise failures.pop()
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return failures


@pytest.mark.usefixtures("failures")
def test_a_thread_that_cannot_begin_fails_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        lookups = Lookups()
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fail)
            with pytest.raises(OSError, match=r"the host source\.invalid cannot be looked up: can't start new thread"):
                await asyncio.wait_for(lookups.places(ADDRESS), 10)
        assert await asyncio.wait_for(lookups.places(ADDRESS), 10) == FOUND

    asyncio.run(run())


@pytest.mark.parametrize("error", [socket.gaierror, UnicodeError, MemoryError])
def test_a_lookup_that_fails_tells_who_waits_and_is_tried_again(failures: list[Exception], error: Callable[[str], Exception]) -> None:
    async def run() -> None:
        lookups = Lookups()
        failures.append(error("no luck"))
        with pytest.raises((OSError, ValueError), match="no luck"):
            await asyncio.wait_for(lookups.places(ADDRESS), 10)
        assert await asyncio.wait_for(lookups.places(ADDRESS), 10) == FOUND

    asyncio.run(run())
