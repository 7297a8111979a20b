"""How a connection for KV is opened: TLS, proofs of the link secret both ways, and the file of the source's slots."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from penstock.cluster.kv.frames import LENGTH, Expected, KvMessage, SourceWelcome, decode, encode, length_of
from penstock.cluster.kv.lookups import Lookups
from penstock.cluster.links.link import check_version, tune
from penstock.cluster.links.security import (
    Handshake,
    LinkTls,
    check_owner,
    check_reached,
    end_of,
    needs_protection,
    peer_certificate,
    reason_of,
)
from penstock.kv.moving import SlotLayout
from penstock.wire.address import Address, UnixAddress
from penstock.wire.errors import FrameMalformed, HandshakeRefused, LinkBroken, LinkError
from penstock.wire.messages import PROTOCOL_VERSION, Challenge, Goodbye, Hello

Result = TypeVar("Result")


@dataclass(frozen=True)
class Credentials:
    """Who this worker is to other workers. It is a server to those that pull from it, and a client of those that it pulls from."""

    name: str
    secret: str = ""
    source_tls: LinkTls | None = None
    puller_tls: LinkTls | None = None


@dataclass(frozen=True)
class Offer:
    """What a source shows each puller. `file` has its slots, read-only; -1: there is none to share."""

    fingerprint: bytes
    layout: SlotLayout
    file: int = -1


class Dialog:
    """A new connection: one whole frame after the other, until both sides have agreed. Owns the socket and the files that came."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.files: list[int] = []
        self._loop = asyncio.get_running_loop()
        self._is_unix = connection.family == socket.AF_UNIX
        connection.setblocking(False)

    async def start_tls(self, tls: LinkTls, host: str | None, peer: str) -> None:
        """As the client of `host`, or as the server. Raises HandshakeRefused."""
        self.socket = tls.context.wrap_socket(
            self.socket, server_side=host is None, server_hostname=host, do_handshake_on_connect=False, suppress_ragged_eofs=True
        )
        try:
            await self._when_ready(self.socket.do_handshake)
        except OSError as error:
            raise HandshakeRefused(tls.refusal(error, peer)) from None

    def extra(self) -> asyncio.BaseTransport:
        """What the checks of links want to know of a connection."""
        encrypted = self.socket if isinstance(self.socket, ssl.SSLSocket) else None
        known = {"socket": self.socket, "peername": self.socket.getpeername(), "sockname": self.socket.getsockname()}
        return asyncio.BaseTransport({**known, "ssl_object": encrypted})

    async def read(self, kind: type[Expected]) -> Expected:
        """The next message, which must be of this kind."""
        length = length_of(await self._exactly(LENGTH.size))
        message = decode(await self._exactly(length))
        if isinstance(message, kind):
            return message
        if isinstance(message, Goodbye):
            raise HandshakeRefused(f"the peer closed the connection: {message.code}: {message.message}")
        raise FrameMalformed(f"expected {kind.__name__}, got {type(message).__name__}")

    async def write(self, message: KvMessage, file: int = -1) -> None:
        """A file can be passed over a unix socket only."""
        data = memoryview(encode(message))
        if file >= 0:
            sent = await self._when_ready(partial(socket.send_fds, self.socket, [data], [file]), "write")
            data = data[sent:]
        while data:
            sent = await self._when_ready(partial(self.socket.send, data), "write")
            data = data[sent:]

    def refuse(self, error: LinkError) -> None:
        """Ends it, and tells the peer why if the socket takes it at once."""
        with contextlib.suppress(OSError):
            self.socket.send(encode(Goodbye(error.code, str(error))))
        self.close()

    def close(self) -> None:
        self.socket.close()
        while self.files:
            os.close(self.files.pop())

    async def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = await self._when_ready(partial(self._receive, count - len(data)))
            if not part:
                raise LinkBroken("the peer closed the connection")
            data += part
        return data

    def _receive(self, count: int) -> bytes:
        if not self._is_unix:
            return self.socket.recv(count)
        data, files, *_ = socket.recv_fds(self.socket, count, 1, socket.MSG_CMSG_CLOEXEC)
        self.files += files
        if len(self.files) > 1:
            raise FrameMalformed("the peer passed more than one file")
        return data

    async def _when_ready(self, action: Callable[[], Result], waits_to: Literal["read", "write"] = "read") -> Result:
        """Does it as soon as the socket lets it."""
        while True:
            try:
                return action()
            except ssl.SSLWantWriteError:
                await self._ready("write")
            except ssl.SSLWantReadError:
                await self._ready("read")
            except BlockingIOError:
                await self._ready(waits_to)

    async def _ready(self, waits_to: Literal["read", "write"]) -> None:
        ready = asyncio.Event()
        add, remove = (
            (self._loop.add_reader, self._loop.remove_reader) if waits_to == "read" else (self._loop.add_writer, self._loop.remove_writer)
        )
        number = self.socket.fileno()
        add(number, ready.set)
        try:
            await ready.wait()
        finally:
            remove(number)


async def welcome_puller(dialog: Dialog, credentials: Credentials, advertised: Address, offer: Offer) -> Hello:
    """The source's side. Raises LinkError."""
    nonce, tls = secrets.token_bytes(32), None if isinstance(advertised, UnixAddress) else credentials.source_tls
    if tls is not None:
        await dialog.start_tls(tls, None, "a puller")
    await dialog.write(Challenge(PROTOCOL_VERSION, nonce))
    hello = await dialog.read(Hello)
    check_version(hello.version)
    if dialog.files:
        raise FrameMalformed("the puller passed a file")
    extra = dialog.extra()
    handshake = Handshake.of(nonce, hello, b"" if tls is None else tls.certificate, peer_certificate(extra))
    handshake.check(hello.proof, credentials.secret, "puller")
    if tls is None:
        check_reached(hello, end_of(extra, "sockname"), advertised)
    file = offer.file if isinstance(advertised, UnixAddress) else -1
    proof = handshake.proof(credentials.secret, "source", credentials.name)
    await dialog.write(SourceWelcome(credentials.name, proof, offer.fingerprint, offer.layout, file >= 0), file)
    return hello


async def reach_source(address: Address, credentials: Credentials, lookups: Lookups) -> tuple[Dialog, SourceWelcome]:
    """The puller's side. Raises LinkError, and leaves nothing open."""
    if needs_protection(address, credentials.secret, credentials.puller_tls):
        raise HandshakeRefused(f"{address} is not used: KV over TCP needs PENSTOCK_LINK_SECRET or TLS (--link-tls-cert)")
    try:
        dialog = Dialog(await _connected(address, lookups))
    except (OSError, ValueError) as error:
        raise LinkBroken(f"cannot connect to {address}: {reason_of(error)}") from error
    try:
        return dialog, await _greet_source(dialog, address, credentials)
    except OSError as error:
        dialog.close()
        raise LinkBroken(f"the connection to {address} broke: {reason_of(error)}") from error
    except BaseException:
        dialog.close()
        raise


async def _greet_source(dialog: Dialog, address: Address, credentials: Credentials) -> SourceWelcome:
    tls = None if isinstance(address, UnixAddress) else credentials.puller_tls
    if not credentials.secret:
        check_owner(dialog.extra(), os.geteuid())
    if tls is not None and not isinstance(address, UnixAddress):
        await dialog.start_tls(tls, address.host, str(address))
    challenge = await dialog.read(Challenge)
    check_version(challenge.version)
    extra = dialog.extra()
    nonce, reached = secrets.token_bytes(32), end_of(extra, "peername")
    handshake = Handshake(
        challenge.nonce,
        nonce,
        credentials.name,
        str(address),
        reached,
        peer_certificate(extra),
        b"" if tls is None else tls.certificate,
    )
    proof = handshake.proof(credentials.secret, "puller")
    await dialog.write(Hello(PROTOCOL_VERSION, credentials.name, nonce, proof, str(address), reached))
    welcome = await dialog.read(SourceWelcome)
    handshake.check(welcome.proof, credentials.secret, "source", welcome.name)
    if welcome.is_shared != bool(dialog.files):
        raise FrameMalformed("the source shares its slots, but no file came" if welcome.is_shared else "a file came that is not announced")
    return welcome


async def _connected(address: Address, lookups: Lookups) -> socket.socket:
    if isinstance(address, UnixAddress):
        return await _connect(socket.AF_UNIX, address.path)
    *others, last = await lookups.places(address)
    for place in others:
        with contextlib.suppress(OSError):
            return await _connect(*place)
    return await _connect(*last)


async def _connect(family: int, place: object) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, place)  # type: ignore[arg-type]
    except BaseException:
        connection.close()
        raise
    tune(connection)
    return connection
