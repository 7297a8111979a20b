"""The HTTP server: granian on our listening socket, and a 503 for connections without a file descriptor."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import resource
import socket
import struct
import termios
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.net import SocketHolder  # type: ignore[attr-defined]
from granian.server.embed import Server
from starlette.types import ASGIApp

from penstock.api.errors import error_body
from penstock.metrics.frontend import Tally
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

BACKLOG = 4096
# The kernel's send buffer of one connection. Without a bound it grows to megabytes for a slow reader, and tokens in it
# can no longer be merged.
SEND_BUFFER_BYTES = 128 * 1024
# Granian's buffer of one connection: what a client does not read, and the longest head of a request.
SERVER_BUFFER_BYTES = 64 * 1024
# Descriptors reserved for links, logs and refusals.
RESERVED_FILES = 64
# Refusals start this many descriptors before granian stops accepting, because granian does that silently.
REFUSE_EARLY = 16
# In milliseconds, a 32-bit number.
MAX_USER_TIMEOUT = 2**31 - 1
GUARD_SECONDS = 0.05
LINGER_SECONDS = 0.5
MAX_LINGERING = 32


def raise_file_limit() -> int:
    """Raises the soft limit of open files to the hard limit, and returns it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 1 << 20
    with contextlib.suppress(ValueError, OSError):  # some systems do not allow that: keeps the current limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def open_listener(host: str, port: int, unread_seconds: float = 0.0) -> socket.socket:
    """The listening socket. Raises ConfigError when the address is not available.

    Where the kernel can, it closes a connection whose client takes nothing for `unread_seconds`, even if what it does not take fits into
    the buffers, where nobody else sees it. 0: never.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from error
    # Accepted connections inherit these options.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(round(unread_seconds * 1000), MAX_USER_TIMEOUT))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.setblocking(False)
    return listener


class HttpServer:
    """Serves an ASGI application on a listener until `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, file_limit: int, tally: Tally) -> None:
        self._port: int = listener.getsockname()[1]
        highest = file_limit - RESERVED_FILES
        self._guard = FileGuard(listener, file_limit, highest - REFUSE_EARLY, tally)
        max_connections = highest - _lowest_free_file(listener)
        if max_connections < 1:
            raise ConfigError(f"the limit of open files is {file_limit}: expected more than {file_limit - max_connections}; see ulimit -n")
        self._server = _Granian(app, listener, max_connections)

    async def serve(self) -> None:
        guard = asyncio.create_task(self._guard.run(), name="file guard")
        try:
            await self._server.serve()
        finally:
            guard.cancel()
            await asyncio.wait([guard])

    def stop(self) -> None:
        """Takes no more connections, and closes each that has nothing to send. Granian waits for the others without a limit."""
        self._server.stop()  # type: ignore[no-untyped-call]

    @property
    def is_sending(self) -> bool:
        """Whether a client has yet to take what the kernel has. Only then may granian have more: it writes what the kernel takes."""
        return any(_unsent(connection) for connection in self._connections())

    def cut(self) -> None:
        """Closes every connection now. What the kernel has of an answer is still sent."""
        for connection in self._connections():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _connections(self) -> Iterator[socket.socket]:
        """Copies, each closed when the next is taken."""
        for file in Path("/dev/fd").iterdir():
            with contextlib.suppress(OSError), _copied(int(file.name)) as connection:
                if connection.getsockname()[1] == self._port and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield connection


class _Granian(Server):
    """Granian in our event loop, on our socket."""

    def __init__(self, app: ASGIApp, listener: socket.socket, max_connections: int) -> None:
        super().__init__(
            app,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            http1_settings=HTTP1Settings(max_buffer_size=SERVER_BUFFER_BYTES),
            websockets=False,
            backlog=BACKLOG,
            backpressure=max_connections,
            # Endpoints log the errors of requests themselves.
            log_enabled=False,
        )
        self._listener = listener

    def _init_shared_socket(self) -> None:
        self._shd = SocketHolder(self._listener.fileno(), False, BACKLOG)  # type: ignore[assignment, call-arg]


class FileGuard:
    """Answers connections with 503 while file descriptors are short, instead of leaving them in the backlog."""

    def __init__(self, listener: socket.socket, limit: int, threshold: int, tally: Tally) -> None:
        self._listener = listener
        self._threshold = threshold
        self._tally = tally
        self._refusing = False
        self._lingering: deque[socket.socket] = deque()
        message = f"the server has no file descriptor for another connection (limit {limit}); try again later"
        body = error_body(message, "server_error", None, "too_many_connections")
        head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
        self._answer = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def run(self) -> None:
        """Checks the descriptors every GUARD_SECONDS. Runs until it is cancelled."""
        try:
            while True:
                self._look()
                await asyncio.sleep(GUARD_SECONDS)
        finally:
            asyncio.get_running_loop().remove_reader(self._listener)

    def _look(self) -> None:
        """Starts to refuse when descriptors are short, and stops when they are not."""
        short = _lowest_free_file(self._listener) >= self._threshold
        if short and not self._refusing:
            log.error("file descriptors are short: new connections get 503; raise ulimit -n")
            asyncio.get_running_loop().add_reader(self._listener, self._refuse)
        elif self._refusing and not short:
            log.info("file descriptors are available again: new connections are accepted")
            asyncio.get_running_loop().remove_reader(self._listener)
        self._refusing = short

    def _refuse(self) -> None:
        self._look()
        if not self._refusing:
            return  # granian accepts this connection
        with contextlib.suppress(OSError):  # the client may have gone
            connection, _ = self._listener.accept()
            self._tally.connections_refused += 1
            # Closing before the request has arrived resets the connection, and the client may not see the answer.
            self._lingering.append(connection)
            asyncio.get_running_loop().call_later(LINGER_SECONDS, connection.close)
            connection.setblocking(False)
            connection.send(self._answer)
            connection.shutdown(socket.SHUT_WR)
        if len(self._lingering) > MAX_LINGERING:
            self._lingering.popleft().close()


def _copied(number: int) -> socket.socket:
    """The TCP socket behind a descriptor, as a copy: granian may close its own at any moment. Raises OSError when it is none."""
    copy = os.dup(number)
    try:
        found = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        found.close()
        raise OSError(errno.EAFNOSUPPORT, "not TCP")
    return found


def _unsent(connection: socket.socket) -> bool:
    """Whether the kernel has bytes that the other side has not acknowledged."""
    return bool(struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0])


def _lowest_free_file(any_open: socket.socket) -> int:
    """The number of the next descriptor: all below it are in use."""
    try:
        free = os.dup(any_open.fileno())
    except OSError as error:
        if error.errno != errno.EMFILE:
            return 0  # the listener is closed
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    os.close(free)
    return free
