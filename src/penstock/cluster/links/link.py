"""What both ends of a link share: frames over an asyncio transport, and the proof of the secret."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import socket
from abc import abstractmethod
from typing import cast

from penstock.wire.codec import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, FrameReader, encode_frame
from penstock.wire.errors import FrameMalformed, HandshakeRefused, LinkBroken, LinkError
from penstock.wire.messages import PROTOCOL_VERSION, Goodbye, Message

log = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT = 5.0


class LinkProtocol(asyncio.Protocol):
    """One end of a link: frames in, frames out. An error closes this link, names the reason to the peer, and affects no other link."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._writable = True
        self._error: LinkError | None = None
        self.is_established = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        # Nothing waits in the transport: while the socket is busy, tokens wait in the outbox, where they are merged.
        transport.set_write_buffer_limits(high=0)
        _tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            messages = self._reader.feed(data)
            if messages:
                self.messages_received(messages)
        except LinkError as error:
            self.close(error)

    def connection_lost(self, error: Exception | None) -> None:
        reason = self._error or LinkBroken(f"the connection was closed{f': {error}' if error else ''}")
        self._error = reason
        self.link_lost(reason)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True

    def send(self, message: Message) -> bool:
        """Writes one frame. Returns whether the socket can take another at once."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_frame(message))
        return self._writable

    def close(self, error: LinkError) -> None:
        """Ends the link, and tells the peer why if the socket takes it."""
        if self._transport is None or self._transport.is_closing():
            return
        self._error = error
        self.send(Goodbye(error.code, str(error)))
        self._transport.close()

    def abort(self) -> None:
        """Ends the link now, even if something waits to be written."""
        if self._transport is not None:
            self._transport.abort()

    def established(self) -> None:
        """The handshake is done: larger frames are allowed."""
        self.is_established = True
        self._reader.limit = MAX_FRAME_BYTES

    @abstractmethod
    def messages_received(self, messages: list[Message]) -> None:
        """Gets all messages that one read completed. May raise LinkError, which closes the link."""

    @abstractmethod
    def link_lost(self, reason: LinkError) -> None:
        """Called once, when the connection has ended."""


def check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise HandshakeRefused(f"the peer speaks version {version} of the link protocol; this is version {PROTOCOL_VERSION}")


def proof(secret: str, side: str, nonce: bytes) -> bytes:
    """Proof of the secret, made from the other side's nonce. The secret itself is never sent."""
    return hmac.digest(secret.encode(), side.encode() + b":" + nonce, hashlib.sha256)


def check_proof(secret: str, side: str, nonce: bytes, given: bytes) -> None:
    if not hmac.compare_digest(proof(secret, side, nonce), given):
        raise HandshakeRefused("the peer does not know this link's secret; give both ends the same one")


def unexpected(message: Message, expected: str) -> LinkError:
    """The error for an unexpected message: the peer's goodbye, or a message that is not allowed here."""
    if isinstance(message, Goodbye):
        kind = HandshakeRefused if message.code == HandshakeRefused.code else LinkBroken
        return kind(f"the peer closed the link: {message.code}: {message.message}")
    return FrameMalformed(f"expected {expected}, got {type(message).__name__}")


def _tune(connection: socket.socket | None) -> None:
    if connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
