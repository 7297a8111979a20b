"""Workers in this process that move KV: a transport and an engine each."""

from __future__ import annotations

from pathlib import Path

from kv_engine import DictEngine
from kv_peers import SECRET
from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.puller import Patience
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links.security import LinkTls
from penstock.config.commands import LinkTlsSettings
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.messages import KvSource

QUICK = Patience(look_seconds=0.02, silent_looks=10, retry_seconds=0.05)


class Workers:
    """Transports in this process, each with its engine and thread."""

    def __init__(self, directory: Path, kind: str) -> None:
        self.kind = kind
        self.directory = directory
        self.secret = SECRET
        self.patience = QUICK
        self.tls: LinkTlsSettings | None = None
        self.transports: list[SocketTransport] = []

    def start(self, engine: DictEngine, *, streams: int = 4, faults: Faults | None = None) -> SocketTransport:
        name = f"worker-{len(self.transports)}"
        address: Address = UnixAddress(str(self.directory / f"{name}.kv")) if self.kind == "unix" else TcpAddress("127.0.0.1", 0)
        credentials = Credentials(name, self.secret)
        if self.tls is not None:
            credentials = Credentials(name, self.secret, LinkTls.load(self.tls, "source"), LinkTls.load(self.tls, "puller"))
        transport = SocketTransport(engine, credentials, address, patience=self.patience, streams=streams, faults=faults)
        engine.connect(transport)
        transport.start()
        self.transports.append(transport)
        return transport

    def close(self) -> None:
        for transport in self.transports:
            transport.close()
            transport.check_integrity()


def source_of(transport: SocketTransport, number: int = 1, *, waits: bool = False) -> KvSource:
    return KvSource(number.to_bytes(16), str(transport.address), waits)
