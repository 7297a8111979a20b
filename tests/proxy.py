"""A real proxy between two Unix sockets: it counts what passes, and can make the way back slow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self


class Proxy:
    """Forwards every connection to `path` on to `target`. Answers wait `delay` seconds, each connection's on their own."""

    def __init__(self, target: str | Path, path: str | Path) -> None:
        self.target = str(target)
        self.path = str(path)
        self.delay = 0.0
        self.bytes_forward = 0
        """Bytes that went to the target."""
        self._pumps: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(self.target)
        for pump in (self._forward(reader, far_writer), self._back(far_reader, writer)):
            task = asyncio.create_task(pump)
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with _closing(writer):
            while data := await reader.read(2**20):
                self.bytes_forward += len(data)
                writer.write(data)
                await writer.drain()

    async def _back(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with _closing(writer):
            while data := await reader.read(2**20):
                if self.delay:
                    await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()


@contextmanager
def _closing(writer: asyncio.StreamWriter) -> Iterator[None]:
    try:
        with suppress(ConnectionError):
            yield
    finally:
        writer.transport.abort()
