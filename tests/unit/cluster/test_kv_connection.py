"""One end of a connection for KV."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from penstock.cluster.kv.connection import BUFFER_BYTES, Connection
from penstock.cluster.kv.frames import KvMessage, Stop, encode
from penstock.wire.errors import LinkBroken, LinkError


class ClosesAtOnce(Connection):
    """It is closed by its first message, as one that has too many messages waiting."""

    def received(self, message: KvMessage) -> Sequence[memoryview]:
        self.close(LinkBroken("the peer reads nothing"))
        return ()

    def lost(self, error: LinkError) -> None:
        pass


async def test_nothing_is_made_ready_for_a_message_behind_the_end() -> None:
    """Its length was not checked: it may be one of 4 GiB."""
    own, peer = socket.socketpair()
    own.setblocking(False)
    connection = ClosesAtOnce(own)
    with peer:
        peer.sendall(encode(Stop(1)) + (64 << 20).to_bytes(4))
        connection._readable()
    assert connection.is_closed
    assert len(connection._buffer) == BUFFER_BYTES
