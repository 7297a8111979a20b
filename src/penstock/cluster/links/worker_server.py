"""The worker's end of its links."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import cast

from penstock.cluster.links.link import HANDSHAKE_TIMEOUT, HEARTBEAT_SECONDS, LinkProtocol, check_version, unexpected
from penstock.cluster.links.security import Handshake, LinkTls, check_reached, end_of, needs_protection, peer_certificate
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.errors import ConfigError, FrameMalformed, HandshakeRefused, LinkBroken, LinkError
from penstock.wire.messages import (
    PROTOCOL_VERSION,
    TOKENIZER_PIECE_BYTES,
    Challenge,
    Goodbye,
    Hello,
    Message,
    Ping,
    Pong,
    TokenizerPiece,
    TokenizerRequest,
    Welcome,
)
from penstock.worker.runtime import FrontEndPort, WorkerRuntime

log = logging.getLogger(__name__)

MAX_UNREAD_PIECES = 4
"""Pieces of the tokenizer that wait for one socket. A front end asks for the next one when it has the last."""


MAX_SILENT_LOOKS = 30
"""A front end that sent nothing at this many looks hangs: a live one sends at least a Ping every HEARTBEAT_SECONDS. More than the front
end allows a worker, because its generations are lost with it, and it may only be busy. A host that is gone is noticed sooner."""

CLOSE_SECONDS = 1.0
"""What a front end has not read this long after its worker closed the link, it does not get."""


class WorkerServer:
    """Listens for front ends and gives each its own port of the runtime.

    `tokenizer` is what front ends may fetch, packed. `advertised` is the address by which they know this worker, if it is another one.
    """

    def __init__(
        self,
        runtime: WorkerRuntime,
        name: str,
        address: Address,
        secret: str,
        tokenizer: bytes = b"",
        *,
        advertised: Address | None = None,
        tls: LinkTls | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ) -> None:
        if needs_protection(address, secret, tls):
            raise ConfigError(f"--listen {address}: a worker on TCP needs PENSTOCK_LINK_SECRET or TLS (--link-tls-cert)")
        self.runtime = runtime
        self.name = name
        self.secret = secret
        self.tokenizer = tokenizer
        self.advertised = advertised or address
        self.tls = None if isinstance(address, UnixAddress) else tls
        self.links: set[FrontEndLink] = set()
        self._address = address
        self._heartbeat_seconds = heartbeat_seconds
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(self._address, UnixAddress):
                self._server = await loop.create_unix_server(lambda: FrontEndLink(self), sock=bind_unix(self._address.path))
            else:
                self._server = await loop.create_server(self._accept, self._address.host, self._address.port)
        except OSError as error:
            raise ConfigError(f"--listen {self._address}: {error.strerror or error}") from error
        self._begin(self._watch())
        log.info("%s listens on %s", self.name, self._address)

    @property
    def port(self) -> int:
        """The TCP port in use, also when 0 was given."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        for link in list(self.links):
            link.close(LinkError(f"{self.name} is shutting down"))
        if self.links:
            await asyncio.wait([link.lost for link in self.links], timeout=CLOSE_SECONDS)
        while self.links:
            for link in list(self.links):
                link.abort()
            await asyncio.wait([link.lost for link in self.links])
        if self._server is not None:
            await self._server.wait_closed()

    def _accept(self) -> asyncio.Protocol:
        return FrontEndLink(self) if self.tls is None else _Accepted(lambda connection: self._begin(self._start_tls(connection)))

    async def _start_tls(self, connection: socket.socket) -> None:
        assert self.tls is not None
        peer = "a peer that has left"
        try:
            peer = str(TcpAddress(*connection.getpeername()[:2]))
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: FrontEndLink(self),
                connection,
                ssl=self.tls.context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT,
                ssl_shutdown_timeout=HEARTBEAT_SECONDS,
            )
        except OSError as error:
            connection.close()
            log.warning("a connection was refused: %s", self.tls.refusal(error, peer))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work, name=f"link server of {self.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watch(self) -> None:
        """Gives up front ends that are silent. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            for link in list(self.links):
                link.look()


class _Accepted(asyncio.Protocol):
    """Hands an accepted connection on before anything is read from it. A server of asyncio that starts TLS itself hides why that failed."""

    def __init__(self, start: Callable[[socket.socket], None]) -> None:
        self._start = start

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._start(socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())))
        transport.abort()


def bind_unix(path: str) -> socket.socket:
    """A socket that only this user can connect to. Removes a socket that an earlier worker left at this path."""
    if Path(path).is_socket():
        Path(path).unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(mask)
    return listener


class FrontEndLink(LinkProtocol):
    """The link to one front end."""

    def __init__(self, server: WorkerServer) -> None:
        super().__init__(server.tls)
        self._server = server
        self._silent_looks = 0
        self._nonce = secrets.token_bytes(32)
        self._port: FrontEndPort | None = None
        self._unread_pieces = 0
        self._deadline: asyncio.TimerHandle | None = None
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.links.add(self)
        self._deadline = asyncio.get_running_loop().call_later(HANDSHAKE_TIMEOUT, self._give_up)
        self.send(Challenge(PROTOCOL_VERSION, self._nonce))

    def look(self) -> None:
        """One look at whether the front end is still there. Counts looks, not seconds: a worker that was itself busy starts anew."""
        self._silent_looks = 0 if self.has_heard else self._silent_looks + 1
        self.has_heard = False
        if self.is_host_gone():
            self.break_off(LinkBroken("its host acknowledges nothing"))
        elif self._silent_looks == MAX_SILENT_LOOKS:
            self.break_off(LinkBroken(f"it has sent nothing for {MAX_SILENT_LOOKS} looks"))

    def messages_received(self, messages: list[Message]) -> None:
        runtime = self._server.runtime
        for message in messages:
            if self._port is None:
                self._port = self._greet(message)
            elif isinstance(message, Ping):
                self.send(Pong())
            elif isinstance(message, TokenizerRequest):
                self._send_tokenizer(message.offset)
            elif isinstance(message, Goodbye):
                raise unexpected(message, "work")
            else:
                runtime.handle(self._port, message)
        runtime.flush()

    def _send_tokenizer(self, offset: int) -> None:
        tokenizer = self._server.tokenizer
        if not 0 <= offset < len(tokenizer):
            raise FrameMalformed(f"asked for byte {offset:,} of a tokenizer of {len(tokenizer):,} bytes")
        if self._unread_pieces == MAX_UNREAD_PIECES:
            raise FrameMalformed("the front end asks for more of the tokenizer than it reads")
        if not self.send(TokenizerPiece(offset, len(tokenizer), tokenizer[offset : offset + TOKENIZER_PIECE_BYTES])):
            self._unread_pieces += 1

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_pieces = 0
        if self._port is not None:
            self._server.runtime.resume(self._port)

    def link_lost(self, reason: LinkError) -> None:
        self._cancel_deadline()
        self._server.links.discard(self)
        if not self.lost.done():
            self.lost.set_result(None)
        if self._port is None:
            log.warning("a connection ended before its hello: %s", reason)
            return
        log.info("front end %s is gone (%s); its generations are aborted", self._port.name, reason)
        self._server.runtime.detach(self._port)

    def _greet(self, message: Message) -> FrontEndPort:
        if not isinstance(message, Hello):
            raise unexpected(message, "Hello")
        check_version(message.version)
        assert self._transport is not None
        server, tls = self._server, self.tls
        handshake = Handshake.of(self._nonce, message, tls.certificate if tls is not None else b"", peer_certificate(self._transport))
        handshake.check(message.proof, server.secret, "frontend")
        if tls is None:
            check_reached(message, end_of(self._transport, "sockname"), server.advertised)
        self._cancel_deadline()
        self.established()
        self.send(Welcome(server.name, handshake.proof(server.secret, "worker", server.name), server.runtime.model))
        log.info("front end %s is connected", message.name)
        return server.runtime.attach(message.name, self.send)

    def _give_up(self) -> None:
        self.close(HandshakeRefused(f"no valid hello within {HANDSHAKE_TIMEOUT:g} s"))

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
