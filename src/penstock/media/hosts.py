"""From where images may be fetched: what a URL may look like, and which addresses are allowed. Pure: nothing is resolved or connected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import quote, urljoin

from penstock.config.media import ANY_HOST, MediaHost, is_name, is_numeric
from penstock.wire.errors import RequestError

Address = IPv4Address | IPv6Address

MAX_URL_CHARACTERS = 8192
_PORTS = {"http": 80, "https": 443}
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[^\]/?#]*\]|[^:/?#\[\]]*)(:(?P<port>[0-9]{0,5}))?(?P<path>[/?][^#]*)?(#.*)?",
    re.IGNORECASE | re.DOTALL | re.ASCII,
)
_USER = re.compile("https?:[/\\\\]*+[^/?#]*@", re.IGNORECASE | re.ASCII)
_BAD_CHARACTERS = re.compile(r"[\x00-\x20\x7f\\<>\"^`{|}\ud800-\udfff]")

_GLOBAL_IPV6 = ip_network("2000::/3")
# Within what is global by its form: other addresses hide in some (Teredo, 6to4), others are for documents. 168.63.129.16 is Azure's own.
_NOT_PUBLIC_IPV6 = [ip_network(each) for each in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")]
_NOT_PUBLIC_IPV4 = [ip_network(each) for each in ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "198.18.0.0/15")]


class Target(NamedTuple):
    """Where a URL leads. `host` is a name in lower case, or an address."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def address(self) -> Address | None:
        """None if the host is a name."""
        return ip_address(self.host) if ":" in self.host or is_numeric(self.host) else None

    @property
    def authority(self) -> str:
        """The host as a request names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}"


def parse_url(url: str) -> Target:
    """Raises RequestError for whatever clients and servers are known to read in different ways."""
    if len(url) > MAX_URL_CHARACTERS:
        raise _wrong(f"its URL has {len(url):,} characters: expected at most {MAX_URL_CHARACTERS:,}")
    if _USER.match(url):
        raise _wrong("its URL has a user name or a password: expected one without")
    found = _URL.fullmatch(url)
    if found is None or _BAD_CHARACTERS.search(url):
        raise _wrong(f"its URL is {url[:80]!r}: expected http:// or https://, a host and a path, without spaces and backslashes")
    scheme, host = found["scheme"].lower(), _host(found["host"].lower())
    port = int(found["port"]) if found["port"] else _PORTS[scheme]
    if not 0 < port < 65536:
        raise _wrong(f"its URL has the port {port}: expected 1 to 65535")
    # A path in other letters is sent as browsers send it.
    path = quote(found["path"] or "/", safe="!#$%&'()*+,/:;=?@[]~")
    return Target(scheme, host, port, path if path.startswith("/") else f"/{path}")


def parse_redirect(base: Target, location: str) -> Target:
    """Where a redirect leads. Raises RequestError as `parse_url` does."""
    if len(location) > MAX_URL_CHARACTERS or _BAD_CHARACTERS.search(location):
        raise _wrong("it redirects to a URL with characters that are not allowed, or too many")
    try:
        return parse_url(urljoin(base.url, location))
    except ValueError:
        raise _wrong(f"it redirects to {location[:80]!r}: expected a URL") from None


def _host(host: str) -> str:
    """A name, or an address in its plain form."""
    if host.startswith("["):
        try:
            return str(IPv6Address(host[1:-1] if "%" not in host else ""))
        except ValueError:
            raise _wrong(f"its URL has the host {host[:80]!r}: expected a name or an address") from None
    name = host.removesuffix(".")
    if is_numeric(name):
        try:
            return str(IPv4Address(name))
        except ValueError:
            raise _wrong(f"its URL has the host {host[:80]!r}: expected a name, or an address of four numbers up to 255") from None
    if not is_name(name):
        raise _wrong(f"its URL has the host {host[:80]!r}: expected a name of ASCII letters, digits and hyphens") from None
    return name


def _wrong(message: str) -> RequestError:
    return RequestError(message, code="invalid_url")


def is_public(address: Address) -> bool:
    """Whether anybody on the internet can reach it. An IPv6 address that carries one of IPv4 is not: 64:ff9b::10.0.0.1 is a private one."""
    if isinstance(address, IPv6Address) and (address not in _GLOBAL_IPV6 or address.scope_id is not None):
        return False
    if any(address in network for network in (_NOT_PUBLIC_IPV4 if address.version == 4 else _NOT_PUBLIC_IPV6)):
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class AllowedHosts:
    """The hosts of --allow-media-hosts."""

    def __init__(self, hosts: Sequence[MediaHost]) -> None:
        self._hosts = hosts

    def check_name(self, target: Target) -> None:
        """Raises RequestError if this host is not allowed, whatever its addresses are."""
        if not self._has_name(target) and not any(host.network for host in self._hosts):
            raise _refused(target)

    def check_addresses(self, target: Target, addresses: Iterable[Address]) -> None:
        """Raises RequestError unless each of its addresses is allowed. The message does not tell the address: that is not the client's
        to know."""
        has_name, is_named = self._has_name(target), self._has_name(target, ANY_HOST)
        if not all((has_name and is_public(each)) or self._is_listed(each, target.port, is_named) for each in addresses):
            raise _refused(target)

    def _has_name(self, target: Target, but: str | None = None) -> bool:
        """Whether a host other than `but` names it."""
        return any(host.name != but and host.has_name(target.host) and host.has_port(target.port) for host in self._hosts)

    def _is_listed(self, address: Address, port: int, is_named: bool) -> bool:
        """A host that is listed by its own name lends its port to a network, `*` does not."""
        return any(host.has_address(address) and (is_named or host.has_port(port)) for host in self._hosts)


def _refused(target: Target) -> RequestError:
    message = f"this server may not fetch images from {target.authority[:80]}: the host or its address is not allowed (--allow-media-hosts)"
    return RequestError(message, code="media_not_allowed", limit="allow_media_hosts")
