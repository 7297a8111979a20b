"""What both ends of a link share: frames over an asyncio transport, and how a lost peer is noticed."""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from abc import abstractmethod
from typing import TypeGuard, cast

from penstock.cluster.links.security import LinkTls
from penstock.wire.codec import MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, FrameReader, encode_frame
from penstock.wire.errors import FrameMalformed, HandshakeRefused, LinkBroken, LinkError, PeerLeft
from penstock.wire.messages import PROTOCOL_VERSION, Goodbye, Message

HANDSHAKE_TIMEOUT = 5.0

HEARTBEAT_SECONDS = 1.0
"""How often each end looks whether the other has sent anything. The front end asks for an answer where it may get none otherwise."""
# A host whose kernel acknowledges nothing for this long is gone. A kernel acknowledges for a process that is busy, too.
DEAD_HOST_SECONDS = 2
MIN_RETRANSMITS = 2
# Of Linux' struct tcp_info: retransmits; unacked; last_data_sent and last_ack_recv, in milliseconds before now.
_TCP_INFO = struct.Struct("=2xB21xI16xI8xI")


class LinkProtocol(asyncio.Protocol):
    """One end of a link: frames in, frames out. An error closes this link, names the reason to the peer, and affects no other link."""

    def __init__(self, tls: LinkTls | None = None) -> None:
        self.tls = tls
        self._transport: asyncio.Transport | None = None
        self._reader = FrameReader(MAX_HANDSHAKE_BYTES)
        self._writable = True
        self._error: LinkError | None = None
        self.is_established = False
        self.has_heard = True
        """Whether any byte has come since this was last set to False."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self._transport = transport
        # Nothing waits in the transport: while the socket is busy, tokens wait in the outbox, where they are merged. With TLS, a limit
        # of 0 would also pause when nothing waits.
        transport.set_write_buffer_limits(high=0 if self.tls is None else 1, low=0)
        tune(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
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

    def break_off(self, error: LinkError) -> None:
        """Ends the link now, and tells the peer why if the socket takes it at once."""
        self.close(error)
        self.abort()

    def established(self) -> None:
        """The handshake is done: larger frames are allowed."""
        self.is_established = True
        self._reader.limit = MAX_FRAME_BYTES

    def is_host_gone(self) -> bool:
        """See the function of this name."""
        if self._transport is None or self._transport.is_closing():
            return False
        return is_host_gone(self._transport.get_extra_info("socket"))

    @abstractmethod
    def messages_received(self, messages: list[Message]) -> None:
        """Gets all messages that one read completed. May raise LinkError, which closes the link."""

    @abstractmethod
    def link_lost(self, reason: LinkError) -> None:
        """Called once, when the connection has ended."""


def is_host_gone(connection: socket.socket | None) -> bool:
    """Whether the kernel has sent something again and again, and nothing came back for DEAD_HOST_SECONDS.

    Not TCP_USER_TIMEOUT: that also ends links to a process that is busy, when its buffers are full and its kernel says so.
    """
    if sys.platform != "linux" or not _is_tcp(connection):
        return False
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    retransmits, unacked, sent, acknowledged = _TCP_INFO.unpack(info)
    return bool(unacked and retransmits >= MIN_RETRANSMITS and acknowledged >= DEAD_HOST_SECONDS * 1000 and sent < acknowledged)


def check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise HandshakeRefused(f"the peer speaks version {version} of the link protocol; this is version {PROTOCOL_VERSION}")


def unexpected(message: Message, expected: str) -> LinkError:
    """The error for an unexpected message: the peer's goodbye, or a message that is not allowed here."""
    if isinstance(message, Goodbye):
        kind = HandshakeRefused if message.code == HandshakeRefused.code else PeerLeft
        return kind(f"the peer closed the link: {message.code}: {message.message}")
    return FrameMalformed(f"expected {expected}, got {type(message).__name__}")


def _is_tcp(connection: socket.socket | None) -> TypeGuard[socket.socket]:
    return connection is not None and connection.family in (socket.AF_INET, socket.AF_INET6)


def tune(connection: socket.socket | None) -> None:
    """Sends small frames at once, and notices a host that is gone."""
    if _is_tcp(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_KEEPIDLE"):  # Linux. For a link on which nothing waits to be acknowledged.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, DEAD_HOST_SECONDS)
