"""From a wake-up to the socket: what a sink raises is raised where the stream is awaited, and nothing hangs."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from front_end import FrontEnd, says
from penstock.api.pipeline.response import Body, ClientWatch, ClientWatches, EventWriter


class Broken:
    """A sink that fails, at once or after it has waited."""

    def __init__(self, waits: bool) -> None:
        self.sending_since: float | None = None
        self.stalled = False
        self._waits = waits

    async def send_whole(self, status: int, body: Body) -> None:
        raise NotImplementedError

    async def send_events(self, events: bytes, last: bool = False) -> None:
        if self._waits:
            await asyncio.sleep(0)
        raise OSError("no such socket")

    async def send_idle(self, content: bytes) -> None:
        await self.send_events(content)

    async def send_blank(self) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("outcome", [None, "ok"])
async def test_a_sink_that_fails_ends_the_stream(waits: bool, outcome: str | None) -> None:
    rendered = 0

    def render() -> tuple[bytes, str | None]:
        nonlocal rendered
        rendered += 1
        return b"data: {}\n\n", outcome

    writer = EventWriter(Broken(waits), render)
    with pytest.raises(OSError, match="no such socket"):
        async with asyncio.timeout(10):
            await writer.run()
    writer.wake()
    assert rendered == 1, "nothing is rendered for nobody"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_sink_that_fails_while_its_client_waits_ends_the_stream(waits: bool) -> None:
    writer = EventWriter(Broken(waits), lambda: (b"", None))
    running = asyncio.create_task(writer.run())
    await asyncio.sleep(0)
    writer.send_idle(b": keep-alive\n\n")
    with pytest.raises(OSError, match="no such socket"):
        async with asyncio.timeout(10):
            await running


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": True, "stream_options": {"resumable": True}}, {}])
async def test_a_request_leaves_nothing_to_the_garbage_collector(fields: dict[str, Any]) -> None:
    """It comes rarely (see cli/compose.py), and what waits for it is memory that grows."""
    front_end = FrontEnd(says("abc", "def"))
    await front_end.post(**fields)
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            await front_end.post(**fields)
        front_end.sent = []
        await front_end.detached.close()
        assert gc.collect() < 5
    finally:
        gc.enable()


async def test_what_watches_a_client_does_not_keep_its_request() -> None:
    front_end = FrontEnd(says("abc"))
    await front_end.post(stream=True)
    assert not [kept for kept in gc.get_objects() if type(kept).__name__ == "_Run"]


async def test_a_watch_that_fails_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> Any:
        raise OSError("no such socket")

    async def has_left() -> Any:
        return {"type": "http.disconnect"}

    watches, left = ClientWatches(), asyncio.Event()
    for receive in (fails, has_left):
        watches.add(ClientWatch(receive, left.set))
    async with asyncio.timeout(10):
        await left.wait()
    assert "no such socket" in caplog.text
