"""Peers that speak the protocol of KV transfers by hand, over blocking sockets: they can lie, stall and leave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from penstock.cluster.kv.frames import LENGTH, MAX_MESSAGE_BYTES, Join, KvMessage, Pull, SourceWelcome, decode, encode, length_of
from penstock.cluster.links.security import Handshake
from penstock.kv.moving import SlotLayout
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.messages import PROTOCOL_VERSION, Challenge, Hello

SECRET = "only for this test"
Expected = TypeVar("Expected", bound=Struct)


class ByHand:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(10)

    def send(self, *messages: KvMessage | bytes) -> None:
        self.socket.sendall(b"".join([each if isinstance(each, bytes) else encode(each) for each in messages]))

    def read_bytes(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            if not part:
                raise ConnectionError("closed")
            data += part
        return data

    def read(self, kind: type[Expected]) -> Expected:
        """The next message of this kind. Others are passed over."""
        while True:
            message = decode(self.read_bytes(length_of(self.read_bytes(LENGTH.size), MAX_MESSAGE_BYTES)))
            if isinstance(message, kind):
                return message

    def until_closed(self) -> None:
        with self.socket:
            try:
                while self.socket.recv(65_536):
                    pass
            except ConnectionError:
                pass


class LyingSource:
    """Listens as a worker would, and follows a script for each connection. `asked` are the pulls that came."""

    def __init__(self, directory: Path, kind: str, layout: SlotLayout, script: Callable[[ByHand, Pull], None]) -> None:
        self.asked: list[Pull] = []
        self.connections = 0
        self.version = PROTOCOL_VERSION
        self.secret = SECRET
        self.fingerprint = b"equal"
        self.is_shared = False
        self.file: int | None = None
        self.layout = layout
        self._script = script
        self._path = directory / "liar.kv"
        if kind == "unix":
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(self._path))
            self._listener.listen()
            self.address: Address = UnixAddress(str(self._path))
        else:
            self._listener = socket.create_server(("127.0.0.1", 0))
            self.address = TcpAddress("127.0.0.1", self._listener.getsockname()[1])
        self._threads = [threading.Thread(target=self._serve, daemon=True)]

    @contextmanager
    def running(self) -> Iterator[None]:
        self._threads[0].start()
        try:
            yield
        finally:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for thread in self._threads:
                thread.join(10)
                assert not thread.is_alive()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            self._threads.append(threading.Thread(target=self._answer, args=(ByHand(connection),), daemon=True))
            self._threads[-1].start()

    def _answer(self, peer: ByHand) -> None:
        try:
            peer.send(Challenge(self.version, b"n" * 32))
            hello = peer.read(Hello)
            proof = Handshake.of(b"n" * 32, hello).proof(self.secret, "source", "liar")
            welcome = encode(SourceWelcome("liar", proof, self.fingerprint, self.layout, self.is_shared))
            if self.file is None:
                peer.send(welcome)
            else:
                socket.send_fds(peer.socket, [welcome], [self.file])
            peer.read(Join)
            while True:
                asked = peer.read(Pull)
                self.asked.append(asked)
                self._script(peer, asked)
        except OSError:
            pass  # The puller has left, or the script has.
        finally:
            peer.socket.close()


def connected_by_hand(address: Address | None) -> ByHand:
    if isinstance(address, UnixAddress):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.path)
        return ByHand(connection)
    assert address is not None
    return ByHand(socket.create_connection((address.host, address.port)))


def puller_by_hand(address: Address | None, *, version: int = PROTOCOL_VERSION, secret: str = SECRET, files: Sequence[int] = ()) -> ByHand:
    """Connects and sends its hello, with files over a unix socket. The answer is not read."""
    peer = connected_by_hand(address)
    say_hello(peer, address, version=version, secret=secret, files=files)
    return peer


def say_hello(
    peer: ByHand, address: Address | None, *, version: int = PROTOCOL_VERSION, secret: str = SECRET, files: Sequence[int] = ()
) -> None:
    assert address is not None
    reached = "" if isinstance(address, UnixAddress) else str(address)
    challenge = peer.read(Challenge)
    handshake = Handshake(challenge.nonce, b"p" * 32, "by hand", str(address), reached)
    hello = Hello(version, "by hand", b"p" * 32, handshake.proof(secret, "puller"), str(address), reached)
    if files:
        socket.send_fds(peer.socket, [encode(hello)], files)
    else:
        peer.send(hello)
