"""Wires the transport of KV: where a worker listens for others that pull from it, and how they find it."""

from __future__ import annotations

import ipaddress
import logging

from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links.security import LinkTls
from penstock.config.commands import WorkerSettings
from penstock.kv.moving import MovesKv
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.errors import ConfigError
from penstock.worker.backend import Backend
from penstock.worker.runtime import WorkerRuntime

log = logging.getLogger(__name__)


def open_transport(settings: WorkerSettings, backend: Backend, runtime: WorkerRuntime, tls: LinkTls | None) -> SocketTransport | None:
    """Starts it, if the engine's KV can move. Raises ConfigError if it cannot work and is asked for, by --kv-listen or --role."""
    engine = backend.kv if isinstance(backend, MovesKv) else None
    if engine is None:
        return None
    credentials = Credentials(settings.name, settings.secret, tls, LinkTls.load(settings.link_tls, "puller"))
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
    runtime.move_kv(str(place), engine.fingerprint, engine.memory.layout.slot_bytes)
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
