"""The worker's end of its links."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from pathlib import Path

from penstock.cluster.links.link import HANDSHAKE_TIMEOUT, LinkProtocol, check_proof, check_version, proof, unexpected
from penstock.wire.address import Address, UnixAddress
from penstock.wire.errors import ConfigError, FrameMalformed, HandshakeRefused, LinkError
from penstock.wire.messages import (
    PROTOCOL_VERSION,
    TOKENIZER_PIECE_BYTES,
    Challenge,
    Goodbye,
    Hello,
    Message,
    TokenizerPiece,
    TokenizerRequest,
    Welcome,
)
from penstock.worker.runtime import FrontEndPort, WorkerRuntime

log = logging.getLogger(__name__)

MAX_UNREAD_PIECES = 4
"""Pieces of the tokenizer that wait for one socket. A front end asks for the next one when it has the last."""


class WorkerServer:
    """Listens for front ends and gives each its own port of the runtime. `tokenizer` is what front ends may fetch, packed."""

    def __init__(self, runtime: WorkerRuntime, name: str, address: Address, secret: str, tokenizer: bytes = b"") -> None:
        if not isinstance(address, UnixAddress) and not secret:
            raise ConfigError(f"--listen {address}: a worker on TCP needs a shared secret; set PENSTOCK_LINK_SECRET")
        self.runtime = runtime
        self.name = name
        self.secret = secret
        self.tokenizer = tokenizer
        self.links: set[FrontEndLink] = set()
        self._address = address
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(self._address, UnixAddress):
                self._server = await loop.create_unix_server(lambda: FrontEndLink(self), sock=_bind_unix(self._address.path))
            else:
                self._server = await loop.create_server(lambda: FrontEndLink(self), self._address.host, self._address.port)
        except OSError as error:
            raise ConfigError(f"--listen {self._address}: {error.strerror or error}") from error
        log.info("%s listens on %s", self.name, self._address)

    @property
    def port(self) -> int:
        """The TCP port in use, also when 0 was given."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for link in list(self.links):
            link.close(LinkError(f"{self.name} is shutting down"))
        while self.links:
            await asyncio.wait([link.lost for link in self.links])
        if self._server is not None:
            await self._server.wait_closed()


def _bind_unix(path: str) -> socket.socket:
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
        super().__init__()
        self._server = server
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

    def messages_received(self, messages: list[Message]) -> None:
        runtime = self._server.runtime
        for message in messages:
            if self._port is None:
                self._port = self._greet(message)
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
        check_proof(self._server.secret, "frontend", self._nonce, message.proof)
        self._cancel_deadline()
        self.established()
        self.send(Welcome(self._server.name, proof(self._server.secret, "worker", message.nonce), self._server.runtime.model))
        log.info("front end %s is connected", message.name)
        return self._server.runtime.attach(message.name, self.send)

    def _give_up(self) -> None:
        self.close(HandshakeRefused(f"no valid hello within {HANDSHAKE_TIMEOUT:g} s"))

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
