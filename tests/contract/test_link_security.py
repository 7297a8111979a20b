"""Who may be at the other end of a link: relays, rogue addresses, reflected proofs, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from penstock.backends.simulator import Simulator, Vocabulary
from penstock.cluster.links.security import Handshake, LinkTls, Side
from penstock.cluster.links.worker_link import WorkerLink, connect
from penstock.cluster.links.worker_server import WorkerServer
from penstock.cluster.pool import WorkerPool
from penstock.config.commands import LinkTlsSettings
from penstock.config.engines import SimulatorConfig
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.codec import FrameReader, encode_frame
from penstock.wire.errors import ConfigError, HandshakeRefused
from penstock.wire.messages import PROTOCOL_VERSION, Challenge, Hello, Pong, Welcome
from penstock.worker.runtime import WorkerRuntime
from relay import Relay
from workers import SECRET, WORDS, expected, make_model, send, submit, until

CERTIFICATES = Path(__file__).parents[1] / "certificates"


def files(name: str, ca: str = "ca") -> LinkTlsSettings:
    return LinkTlsSettings(CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{ca}.pem")


def tls(name: str, side: Side, ca: str = "ca") -> LinkTls | None:
    return LinkTls.load(files(name, ca), side)


class TcpWorker:
    """A real worker in this process, on TCP."""

    def __init__(self, secret: str = SECRET, tls: LinkTls | None = None, advertised: Address | None = None) -> None:
        self.simulator = Simulator(SimulatorConfig(step_ms=0.5, kv_blocks=16_384), make_model(), Vocabulary(WORDS, 1))
        self.runtime = WorkerRuntime(self.simulator)
        self.server = WorkerServer(self.runtime, "a", TcpAddress("127.0.0.1", 0), secret, advertised=advertised, tls=tls)

    async def __aenter__(self) -> Self:
        await self.runtime.start()
        await self.server.start()
        self.address = TcpAddress("127.0.0.1", self.server.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()
        await self.runtime.close()


@asynccontextmanager
async def linked(address: Address, secret: str = SECRET, tls: LinkTls | None = None) -> AsyncIterator[WorkerLink]:
    link, _ = await connect(address, "test", secret, tls)
    try:
        yield link
    finally:
        link.abort()
        await link.lost


async def generate(link: WorkerLink, number: int, tokens: int) -> tuple[int, ...]:
    mailbox = Mailbox(Doorbell())
    generation = send(link, submit(number, tokens), mailbox)
    async with asyncio.timeout(20):
        await generation.done
    return tuple(mailbox.history)


# A relay between a front end and a worker, without TLS.


async def test_a_relay_to_the_real_worker_fails() -> None:
    """As a rogue does that registers its own address in Redis and passes the handshake on."""
    async with TcpWorker() as worker, Relay(worker.address) as rogue:
        with pytest.raises(
            HandshakeRefused, match=rf"wanted {rogue.address} and reached {rogue.address}.*{worker.address}: a relay is between"
        ):
            await connect(rogue.address, "test", SECRET)
        async with linked(worker.address) as link:
            assert await generate(link, 1, 20) == expected(1, 20)


async def test_a_worker_behind_a_proxy_of_its_own_says_so() -> None:
    async with TcpWorker() as hidden, Relay(hidden.address) as proxy:
        hidden.server.advertised = proxy.address
        async with linked(proxy.address) as link:
            assert await generate(link, 1, 20) == expected(1, 20)


async def test_a_relay_cannot_change_what_the_front_end_said() -> None:
    """It knows no secret, so what it puts into the hello itself does not fit the proof."""
    async with TcpWorker() as worker:

        async def rogue(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, to_worker = await asyncio.open_connection(worker.address.host, worker.address.port)
            writer.write(await frame(there))
            (hello,) = FrameReader().feed(await frame(reader))
            assert isinstance(hello, Hello)
            address = str(worker.address)
            to_worker.write(encode_frame(Hello(hello.version, hello.name, hello.nonce, hello.proof, address, address)))
            writer.write(await frame(there))
            for each in (writer, to_worker):
                each.close()

        async with await asyncio.start_server(rogue, "127.0.0.1", 0) as server:
            address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(HandshakeRefused, match=r"does not know this link's secret.* a relay is between them"):
                await connect(address, "test", SECRET)


async def frame(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readexactly(4)
    return head + await reader.readexactly(int.from_bytes(head))


@pytest.mark.parametrize("changed", ["worker_nonce", "front_end_nonce", "front_end", "address", "reached", "worker_certificate", "version"])
def test_a_proof_covers_both_nonces_and_both_ends(changed: str) -> None:
    said = Handshake(b"w" * 32, b"f" * 32, "front", "tcp://a:1", "tcp://10.0.0.1:1", b"c", b"d")
    value = said.version + 1 if changed == "version" else b"other"
    other = Handshake(**{**{name: getattr(said, name) for name in said.__struct_fields__}, changed: value})
    said.check(said.proof(SECRET, "worker", "a"), SECRET, "worker", "a")
    for wrong in (
        other.proof(SECRET, "worker", "a"),
        said.proof(SECRET, "frontend", "a"),
        said.proof(SECRET, "worker", "b"),
        said.proof("a guess", "worker", "a"),
    ):
        with pytest.raises(HandshakeRefused):
            said.check(wrong, SECRET, "worker", "a")


@pytest.mark.parametrize("echoes", ["proof", "nonce"])
async def test_a_reflected_proof_is_refused(echoes: str) -> None:
    """The impostor knows no secret: it sends the front end's own proof back, or uses its nonce."""
    connections: list[asyncio.StreamWriter] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(encode_frame(Challenge(PROTOCOL_VERSION, b"n" * 32)))
        (hello,) = FrameReader().feed(await frame(reader))
        assert isinstance(hello, Hello)
        if echoes == "nonce":
            writer.write(encode_frame(Challenge(PROTOCOL_VERSION, hello.nonce)))
            (hello,) = FrameReader().feed(await frame(reader))
            assert isinstance(hello, Hello)
        writer.write(encode_frame(Welcome("", hello.proof, make_model())))

    async with await asyncio.start_server(impostor, "127.0.0.1", 0) as server:
        with pytest.raises(HandshakeRefused, match="secret"):
            await connect(TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1]), "test", SECRET)
        for writer in connections:
            writer.close()


# Neither secret nor TLS.


async def test_a_front_end_refuses_a_worker_on_tcp_without_secret_and_tls(caplog: pytest.LogCaptureFixture) -> None:
    async def prepare(*_: object) -> None:
        pass

    with pytest.raises(HandshakeRefused, match="needs PENSTOCK_LINK_SECRET or TLS"):
        await connect(TcpAddress("127.0.0.1", 9), "test", "")
    async with WorkerPool([], "test", "", prepare) as pool:
        pool.discovered([TcpAddress("127.0.0.1", 9)])
        await until(lambda: "tcp://127.0.0.1:9 is not used: a link over TCP needs PENSTOCK_LINK_SECRET or TLS" in caplog.text)
        assert pool.members == []


# TLS.


@pytest.mark.parametrize("secret", ["", SECRET])
async def test_a_generation_arrives_complete_over_tls(secret: str) -> None:
    async with (
        TcpWorker(secret, tls("worker", "worker")) as worker,
        Relay(worker.address) as wire,
        linked(wire.address, secret, tls("front_end", "frontend")) as link,
    ):
        assert await generate(link, 7, 2000) == expected(7, 2000)
        several = await asyncio.gather(*(generate(link, number, 300) for number in range(50)))
        assert several == [expected(number, 300) for number in range(50)]
        assert wire.forwarded > 0
    assert await asyncio.wait_for(asyncio.shield(link.lost), 5)


async def test_tokens_wait_in_the_outbox_while_a_reader_over_tls_is_slow() -> None:
    """A front end that reads nothing for a while gets few, large steps afterwards, and nothing is stuck."""
    async with (
        TcpWorker("", tls("worker", "worker")) as worker,
        Relay(worker.address) as wire,
        linked(wire.address, "", tls("front_end", "frontend")) as link,
    ):
        boxes = [Mailbox(Doorbell()) for _ in range(100)]
        sent = [send(link, submit(number, 200), box) for number, box in enumerate(boxes)]
        await until(lambda: link.frames > 3)
        wire.flows.clear()
        await until(lambda: worker.simulator.stats().running == 0)
        frames = link.frames
        wire.flows.set()
        async with asyncio.timeout(10):
            await asyncio.gather(*(each.done for each in sent))
        assert [tuple(box.history) for box in boxes] == [expected(number, 200) for number in range(100)]
        assert link.frames - frames < 10


async def test_a_socket_that_takes_a_frame_over_tls_takes_the_next() -> None:
    """A transport with TLS may call itself full when nothing waits in it."""
    async with TcpWorker("", tls("worker", "worker")) as worker, linked(worker.address, "", tls("front_end", "frontend")):
        (link,) = worker.server.links
        assert [link.send(Pong()) for _ in range(5)] == [True] * 5


@pytest.mark.parametrize(
    ("worker", "worker_ca", "front_end", "told", "logged"),
    [
        (
            "expired",
            "ca",
            "front_end",
            r"ca\.pem does not accept the certificate of tcp://.*has expired",
            r"ended the TLS handshake.*expired\.pem",
        ),
        (
            "elsewhere",
            "ca",
            "front_end",
            r"does not accept the certificate of.*not valid for '127.0.0.1'",
            r"ended the TLS handshake.*elsewhere\.pem",
        ),
        ("stranger", "ca", "front_end", r"ca\.pem does not accept the certificate of.*issuer", r"ended the TLS handshake.*stranger\.pem"),
        ("worker", "ca", "stranger", r"ended the TLS handshake.*stranger\.pem", r"ca\.pem does not accept the certificate of.*issuer"),
        ("worker", "ca", "expired", r"ended the TLS handshake.*expired\.pem", r"ca\.pem does not accept the certificate of.*has expired"),
        (
            "worker",
            "other_ca",
            "front_end",
            r"ended the TLS handshake.*front_end\.pem",
            r"other_ca\.pem does not accept the certificate of",
        ),
    ],
)
async def test_a_wrong_certificate_is_named_on_both_sides(
    worker: str, worker_ca: str, front_end: str, told: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with TcpWorker(SECRET, tls(worker, "worker", worker_ca)) as there:
        with pytest.raises(HandshakeRefused, match=told):
            await connect(there.address, "test", SECRET, tls(front_end, "frontend"))
        await until(lambda: re.search(logged, caplog.text) is not None)
    (record,) = [record for record in caplog.records if "a connection was refused" in record.message]
    assert record.levelno == logging.WARNING
    assert "127.0.0.1" in record.message


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel does not tell who listens")
async def test_another_users_unix_socket_needs_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else whoever can write to the store could name a socket of their own: its permissions protect the worker only."""
    address = UnixAddress(str(tmp_path / "worker.sock"))
    for secret in ("", SECRET):
        runtime = WorkerRuntime(Simulator(SimulatorConfig(), make_model(), Vocabulary(WORDS, 1)))
        server = WorkerServer(runtime, "a", address, secret)
        await server.start()
        refused = contextlib.nullcontext() if secret else pytest.raises(HandshakeRefused, match="listens there: expected user 12345")
        try:
            async with linked(address, secret):
                pass
            with monkeypatch.context() as patch, refused:
                patch.setattr("os.geteuid", lambda: 12345)
                async with linked(address, secret):
                    pass
        finally:
            await server.close()


async def test_a_peer_that_leaves_before_tls_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with TcpWorker(SECRET, tls("worker", "worker")) as there:
        with socket.create_connection((there.address.host, there.address.port)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await until(lambda: "a connection was refused: a peer that has left ended the TLS handshake" in caplog.text)


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64])
async def test_a_name_that_no_host_can_have_is_refused(host: str) -> None:
    with pytest.raises(HandshakeRefused, match="is not used"):
        await connect(TcpAddress(host, 7000), "test", SECRET)


async def test_a_relay_with_a_certificate_of_its_own_fails() -> None:
    """It ends TLS on both sides with a certificate of the same CA, for the address that the front end wants. The proofs cover both
    certificates, and it has no secret."""
    async with TcpWorker(SECRET, tls("worker", "worker")) as worker:
        outer, inner = tls("front_end", "worker"), tls("front_end", "frontend")
        assert outer is not None
        assert inner is not None

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, to_worker = await asyncio.open_connection(
                worker.address.host, worker.address.port, ssl=inner.context, server_hostname="127.0.0.1"
            )
            writer.write(await frame(there))
            to_worker.write(await frame(reader))
            writer.write(await frame(there))
            for each in (writer, to_worker):
                each.close()

        async with await asyncio.start_server(relay, "127.0.0.1", 0, ssl=outer.context) as server:
            address = TcpAddress("127.0.0.1", server.sockets[0].getsockname()[1])
            with pytest.raises(HandshakeRefused, match="a relay is between them"):
                await connect(address, "test", SECRET, tls("front_end", "frontend"))


async def test_there_is_no_way_back_to_a_link_without_tls(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    async with TcpWorker(SECRET) as plain:
        with pytest.raises(HandshakeRefused, match="does not use TLS, and this process has --link-tls-cert"):
            await connect(plain.address, "test", SECRET, tls("front_end", "frontend"))
    monkeypatch.setattr("penstock.cluster.links.worker_link.HANDSHAKE_TIMEOUT", 0.2)
    async with TcpWorker(SECRET, tls("worker", "worker")) as secured:
        with pytest.raises(HandshakeRefused, match=r"did not finish its handshake.*does it expect TLS\?"):
            await connect(secured.address, "test", SECRET)
        reader, writer = await asyncio.open_connection(secured.address.host, secured.address.port)
        writer.write(encode_frame(Hello(PROTOCOL_VERSION, "plain", b"n" * 32, b"")))
        assert await reader.read() != b"" or reader.at_eof()
        writer.close()
        await until(lambda: "does not use TLS" in caplog.text)
        async with linked(secured.address, SECRET, tls("front_end", "frontend")) as link:
            assert await generate(link, 1, 20) == expected(1, 20)


async def test_a_worker_with_tls_and_a_unix_socket_uses_no_tls_there(tmp_path: Path) -> None:
    runtime = WorkerRuntime(Simulator(SimulatorConfig(), make_model(), Vocabulary(WORDS, 1)))
    address = UnixAddress(str(tmp_path / "a.sock"))
    server = WorkerServer(runtime, "a", address, "", tls=tls("worker", "worker"))
    await runtime.start()
    await server.start()
    async with linked(address, "", tls("front_end", "frontend")):
        pass
    await server.close()
    await runtime.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (LinkTlsSettings(Path("c.pem")), r"--link-tls-cert c.pem needs --link-tls-key and --link-tls-ca"),
        (LinkTlsSettings(None, None, Path("ca.pem")), r"--link-tls-ca ca.pem needs --link-tls-cert and --link-tls-key"),
        (files("nothing"), r"--link-tls-cert .*nothing.pem: No such file"),
        (LinkTlsSettings(files("worker").cert, Path("k.pem"), files("worker").ca), r"--link-tls-key k.pem: No such file"),
        (files("worker", "nothing"), r"--link-tls-ca .*nothing.pem: No such file"),
        (LinkTlsSettings(files("worker").cert, files("stranger").key, files("worker").ca), r"worker.pem and .*stranger.pem.*mismatch"),
        (LinkTlsSettings(CERTIFICATES / "make.sh", files("worker").key, files("worker").ca), r"make.sh .*there is no certificate in it"),
        (LinkTlsSettings(files("worker").cert, files("ca").cert, files("worker").ca), r"--link-tls-key .*ca.pem are not"),
        (
            LinkTlsSettings(files("worker").cert, files("worker").key, CERTIFICATES / "make.sh"),
            r"--link-tls-ca .*make.sh has no certificates",
        ),
    ],
)
def test_wrong_files_are_named(settings: LinkTlsSettings, message: str) -> None:
    for side in ("worker", "frontend"):
        with pytest.raises(ConfigError, match=message):
            LinkTls.load(settings, side)
