"""Where a worker listens: `unix:/path` or `tcp://host:port`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire.errors import ConfigError


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


def parse_address(text: str) -> Address:
    """Raises ConfigError for what is neither."""
    if text.startswith("unix:") and len(text) > len("unix:"):
        return UnixAddress(text.removeprefix("unix:"))
    host, _, port = text.removeprefix("tcp://").rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if text.startswith("tcp://") and host and port.isascii() and port.isdigit() and int(port) < 65536:
        return TcpAddress(host, int(port))
    raise ConfigError(f"address {text!r} is not understood; expected unix:/path or tcp://host:port")
