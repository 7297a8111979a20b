"""Wires the transport of KV: where a worker listens for others that pull from it, and how they find it."""

from __future__ import annotations

import ipaddress
import logging

from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links.security import LinkTls
from penstock.config.commands import WorkerSettings
from penstock.kv.moving import KvEngine, MovesFeatures, MovesKv
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.errors import ConfigError
from penstock.worker.backend import Backend
from penstock.worker.runtime import WorkerRuntime

log = logging.getLogger(__name__)


def open_transports(settings: WorkerSettings, backend: Backend, runtime: WorkerRuntime, tls: LinkTls | None) -> list[SocketTransport]:
    """Starts one for KV, if the engine's KV can move, and one that pulls features of images, if its model reads images. Raises ConfigError
    if one cannot work and is asked for, by --kv-listen or --role."""
    credentials = Credentials(settings.name, settings.secret, tls, LinkTls.load(settings.link_tls, "puller"))
    engine = backend.kv if isinstance(backend, MovesKv) else None
    features = backend.features if isinstance(backend, MovesFeatures) else None
    opened = [] if engine is None else [_open(settings, engine, runtime, credentials)]
    if features is not None:
        # A second one, since blocks of KV and of features differ in size and memory. It does not listen: encode workers are pulled from.
        puller = SocketTransport(features, credentials, None, streams=settings.kv_streams)
        puller.start()
        features.connect(puller)
        opened.append(puller)
    return [transport for transport in opened if transport is not None]


def _open(settings: WorkerSettings, engine: KvEngine, runtime: WorkerRuntime, credentials: Credentials) -> SocketTransport | None:
    try:
        address, host = kv_place(settings)
        transport = SocketTransport(
            engine, credentials, address, advertised_host=host, streams=settings.kv_streams, faults=Faults(settings.simulator.fault)
        )
        place = transport.start()
    except ConfigError as error:
        if settings.kv_listen is not None or settings.role != "aggregated":
            raise
        log.warning("no KV moves from or to this worker: %s", error)
        return None
    engine.connect(transport)
    # What an encode worker has is not KV.
    fingerprint = b"" if settings.role == "encode" else engine.fingerprint
    runtime.move_kv(place, fingerprint, engine.memory.layout.slot_bytes)
    return transport


def kv_place(settings: WorkerSettings) -> tuple[Address, str]:
    """Where it listens, and the host under which others know it; "" for a unix socket. Raises ConfigError."""
    assert settings.listen is not None
    listen, address = settings.listen, settings.kv_listen
    if address is None:
        address = UnixAddress(f"{listen.path}.kv") if isinstance(listen, UnixAddress) else TcpAddress(listen.host, 0)
    if isinstance(address, UnixAddress):
        return address, ""
    # Links are reached under the advertised host, and a certificate for TLS has it.
    if isinstance(settings.advertise, TcpAddress) and (settings.kv_listen is None or _is_wildcard(address.host)):
        return address, settings.advertise.host
    if not _is_wildcard(address.host):
        return address, address.host
    given = f"--listen {settings.listen}" if settings.kv_listen is None else f"--kv-listen {settings.kv_listen}"
    raise ConfigError(f"{given} has no host that other workers can use: give this machine's address, or --advertise")


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
