"""Where a worker listens: `unix:/path` or `tcp://host:port`."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True)
class UnixAddress:
    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


Address = UnixAddress | TcpAddress


def is_loopback(host: str) -> bool:
    """Whether a name or IP address is this machine's own, which nobody else can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")


def parse_address(text: str) -> Address:
    """Raises ValueError for other texts."""
    if text.startswith("unix:") and len(text) > len("unix:"):
        return UnixAddress(text.removeprefix("unix:"))
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if text.startswith("tcp://") and host and port.isascii() and port.isdigit() and int(port) < 65536:
        return TcpAddress(host, int(port))
    raise ValueError("expected unix:/path or tcp://host:port")


def parse_listener(text: str) -> TcpAddress:
    """host:port. Raises ValueError for other texts."""
    try:
        address = parse_address(f"tcp://{text}")
    except ValueError:
        address = None
    if not isinstance(address, TcpAddress) or "/" in address.host:
        raise ValueError("expected host:port, such as 127.0.0.1:9090")
    return address
