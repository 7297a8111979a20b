"""A TCP relay between a front end and a worker. A test can make it a black hole, as a host that lost power is."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import struct
from pathlib import Path
from typing import Self

from penstock.wire.address import TcpAddress

SO_ATTACH_FILTER = 26
# A packet filter of one instruction: accept 0 bytes of each packet.
_DROP_ALL = ctypes.create_string_buffer(struct.pack("=HBBI", 0x06, 0, 0, 0))


def cut_power(ports: set[int]) -> None:
    """The kernel drops every packet of this process's connections from and to these ports."""
    for file in Path("/proc/self/fd").iterdir():
        if not file.is_socket():
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(file.name))) as found:
            if found.family == socket.AF_INET and {found.getsockname()[1], found.getpeername()[1]} & ports:
                found.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL)))


class Relay:
    """Forwards each connection to `target` and counts what it forwards. While `is_dark` it swallows everything and closes nothing."""

    def __init__(self, target: TcpAddress) -> None:
        self.is_dark = False
        self.flows = asyncio.Event()
        """Cleared: nothing is read from either side."""
        self.flows.set()
        self.forwarded = 0
        self.swallowed: list[bytes] = []
        self.seen: list[bytes] = []
        """What was forwarded, as it was read."""
        self.address = target
        self._target = target
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = TcpAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
        await self._server.wait_closed()

    def cut_power(self) -> None:
        """From now on the kernel drops every packet of these connections. For both ends, which must be in this process, the other host is
        gone."""
        cut_power({self.address.port, self._target.port})

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += writer, there[1]
        for source, sink in ((reader, there[1]), (there[0], writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                await self.flows.wait()
                if self.is_dark:
                    self.swallowed.append(data)
                else:
                    sink.write(data)
                    self.forwarded += len(data)
                    self.seen.append(data)
                    await sink.drain()
        except ConnectionError:
            pass
        finally:
            if not self.is_dark:
                sink.close()
