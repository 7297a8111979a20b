"""Who is at the other end of a link, or of a connection for KV: the proofs of the handshake, and TLS."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import socket
import ssl
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

import msgspec

from penstock.config.commands import LinkTlsSettings
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.errors import ConfigError, HandshakeRefused
from penstock.wire.messages import PROTOCOL_VERSION, Hello

Side = Literal["frontend", "worker", "puller", "source"]
"""A link has a front end and a worker. A connection for KV has two workers: one pulls from the other."""


class Handshake(msgspec.Struct, frozen=True, array_like=True):
    """What both sides of a handshake must agree on. Each proof covers all of it and the side that made it.

    `address` is the worker that the front end wants, `reached` where its connection ended. So a proof made for one worker is worth
    nothing at another one, and a relay between the two is found out. The certificates are hashes, empty without TLS.
    """

    worker_nonce: bytes
    front_end_nonce: bytes
    front_end: str
    address: str
    reached: str
    worker_certificate: bytes = b""
    front_end_certificate: bytes = b""
    version: int = PROTOCOL_VERSION

    @classmethod
    def of(cls, nonce: bytes, hello: Hello, worker_certificate: bytes = b"", front_end_certificate: bytes = b"") -> Self:
        """As the worker sees it, which sent this nonce."""
        return cls(nonce, hello.nonce, hello.name, hello.address, hello.reached, worker_certificate, front_end_certificate)

    def proof(self, secret: str, side: Side, worker: str = "") -> bytes:
        """Proof of the secret, which is never sent. The worker's proof also covers its name."""
        return hmac.digest(secret.encode(), msgspec.msgpack.encode(("penstock link", side, worker, self)), hashlib.sha256)

    def check(self, given: bytes, secret: str, side: Side, worker: str = "") -> None:
        if not hmac.compare_digest(self.proof(secret, side, worker), given):
            raise HandshakeRefused(
                "the peer does not know this link's secret: set the same PENSTOCK_LINK_SECRET on both ends. If it is the same, a relay is "
                "between them"
            )


def check_reached(hello: Hello, own: str, advertised: Address) -> None:
    """Raises HandshakeRefused unless the front end wanted this worker. Without TLS, nothing else stops a relay."""
    if own and hello.reached != own and hello.address != str(advertised):
        raise HandshakeRefused(
            f"the front end wanted {hello.address} and reached {hello.reached}, but this worker is at {own}: a relay is between. If it is "
            f"your own proxy or address translation, give the worker --advertise {hello.address}, or use TLS"
        )


def check_owner(transport: asyncio.BaseTransport, own: int) -> None:
    """Raises HandshakeRefused if a process of another user than `own` listens at this unix socket. Its permissions protect the worker
    only, and the store may name any path. Root may use everybody's."""
    connection = transport.get_extra_info("socket")
    if sys.platform != "linux" or not own or connection.family != socket.AF_UNIX:
        return
    _, owner, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if owner != own:
        raise HandshakeRefused(
            f"a process of user {owner} listens there: expected user {own}. If you trust that user, set PENSTOCK_LINK_SECRET on both ends"
        )


def end_of(transport: asyncio.BaseTransport, which: Literal["peername", "sockname"]) -> str:
    """One end of a TCP connection, as both sides see it. Empty for a unix socket."""
    name = transport.get_extra_info(which)
    if not isinstance(name, tuple):
        return ""
    host = ipaddress.ip_address(name[0].partition("%")[0])
    return str(TcpAddress(str(getattr(host, "ipv4_mapped", None) or host), name[1]))


def peer_certificate(transport: asyncio.BaseTransport) -> bytes:
    """The hash of the peer's certificate. Empty without TLS."""
    connection = transport.get_extra_info("ssl_object")
    return b"" if connection is None else _hash(connection.getpeercert(binary_form=True))


@dataclass(frozen=True)
class LinkTls:
    """TLS in which both sides show a certificate. The front end also checks that the worker's certificate has the host of its address."""

    context: ssl.SSLContext = field(repr=False)
    certificate: bytes = field(repr=False)
    """The hash of this side's own certificate."""
    settings: LinkTlsSettings

    @classmethod
    def load(cls, settings: LinkTlsSettings, side: Side) -> Self | None:
        """None without files. Raises ConfigError that names the file and what is wrong with it."""
        settings.check()
        if settings.cert is None or settings.key is None or settings.ca is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if side in ("worker", "source") else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            certificate = _hash(ssl.PEM_cert_to_DER_cert(_first_certificate(settings.cert)))
            _read("--link-tls-key", settings.key)
            _read("--link-tls-ca", settings.ca)
            context.load_cert_chain(settings.cert, settings.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            message = f"--link-tls-cert {settings.cert} and --link-tls-key {settings.key} are not a certificate and its key"
            raise ConfigError(f"{message}, in PEM: {reason_of(error)}") from error
        try:
            context.load_verify_locations(settings.ca)
        except ssl.SSLError as error:
            raise ConfigError(f"--link-tls-ca {settings.ca} has no certificates in PEM: {reason_of(error)}") from error
        return cls(context, certificate, settings)

    def refusal(self, error: Exception | None, peer: str) -> str:
        """In words: who refused what. A peer that refuses a certificate may just close the connection."""
        if isinstance(error, ssl.SSLCertVerificationError):
            return f"--link-tls-ca {self.settings.ca} does not accept the certificate of {peer}: {error.verify_message}"
        if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
            return f"{peer} does not use TLS, and this process has --link-tls-cert"
        reason = "" if error is None else f" ({reason_of(error)})"
        return f"{peer} ended the TLS handshake{reason}: see its log; it may not accept --link-tls-cert {self.settings.cert}"


def needs_protection(address: Address, secret: str, tls: LinkTls | None) -> bool:
    """Whether a link to this address would be open to everybody."""
    return not isinstance(address, UnixAddress) and not secret and tls is None


def reason_of(error: Exception) -> str:
    if isinstance(error, ssl.SSLError) and error.reason:
        return str(error.reason).replace("_", " ").lower()
    return str(getattr(error, "strerror", None) or error or type(error).__name__)


def _hash(certificate: bytes) -> bytes:
    return hashlib.sha256(certificate).digest()


def _first_certificate(path: Path) -> str:
    text = _read("--link-tls-cert", path).decode("latin-1")
    start, end = text.find(ssl.PEM_HEADER), text.find(ssl.PEM_FOOTER)
    if start < 0 or end < start:
        raise ValueError("there is no certificate in it")
    return text[start : end + len(ssl.PEM_FOOTER)]


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror or error}") from error


def _no_password() -> str:
    """Without it, OpenSSL would ask for the password on the terminal."""
    raise ValueError("the key has a password: give one without")
