"""The settings of images: what a client may send, and from where it may be fetched."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_network
from typing import ClassVar

from penstock.config.front_end import MIB
from penstock.config.setting import count, setting
from penstock.wire.images import MAX_IMAGE_BYTES

ANY_HOST = "*"
WEB_PORTS = (80, 443)
MAX_PROCESSES = 64
_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER = re.compile(r"(.*\.)?(0x[0-9a-f]*|[0-9]+)")
_EXPECTED = "expected a name, *.name, * for any public host, an address or a network such as 10.0.0.0/8; each may end in :PORT"


@dataclass(frozen=True)
class MediaHost:
    """From where images may be fetched: a name or pattern of names, or a network. `port` None: 80 and 443."""

    name: str = ""
    network: IPv4Network | IPv6Network | None = None
    port: int | None = None

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        if isinstance(self.network, IPv6Network):
            return f"[{self.network}]{port}"
        return f"{self.name or self.network}{port}"

    def has_port(self, port: int) -> bool:
        return port in WEB_PORTS if self.port is None else port == self.port

    def has_name(self, name: str) -> bool:
        return self.name in (name, ANY_HOST) or (self.name.startswith("*.") and name.endswith(self.name[1:]))

    def has_address(self, address: IPv4Address | IPv6Address) -> bool:
        return self.network is not None and address.version == self.network.version and address in self.network


def is_numeric(name: str) -> bool:
    """Whether the last part of a name is a number: some resolvers take it for an address, such as 127.1 or 0x7f000001."""
    return _NUMBER.fullmatch(name) is not None


def is_name(name: str) -> bool:
    """A host's name in lower case."""
    return len(name) <= 253 and _NAME.fullmatch(name) is not None and not is_numeric(name) and not name.startswith("*")


def parse_media_host(text: str) -> MediaHost:
    """Raises ValueError."""
    host, port = _split(text.strip().lower())
    try:
        return MediaHost(network=ip_network(host), port=port)
    except ValueError as error:
        if host != ANY_HOST and not is_name(host.removeprefix("*.")):
            reason = f" ({error})" if "/" in host or is_numeric(host) else ""
            raise ValueError(f"{_EXPECTED}{reason}") from None
    return MediaHost(name=host, port=port)


def _split(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
    elif text.count(":") > 1:
        host, port = text, ""
    else:
        host, colon, port = text.partition(":")
        port = colon + port
    if not port:
        return host, None
    if not re.fullmatch(":[0-9]{1,5}", port) or not 0 < int(port[1:]) < 65536:
        raise ValueError(_EXPECTED)
    return host, int(port[1:])


@dataclass(frozen=True)
class MediaSettings:
    """What reading the images of requests may take. `memory` is in bytes."""

    GROUP: ClassVar[str] = "images"

    hosts: tuple[MediaHost, ...] = setting(
        (),
        "host from which the server may fetch the images that requests name by URL: a name, *.name, * (any public host), an address or a "
        "network such as 10.0.0.0/8. Without :PORT, the ports 80 and 443. Repeat for several. Private addresses are refused, also after a "
        "redirect, unless an address or network here contains them",
        name="allow_media_hosts",
        unit="HOST",
        parse=parse_media_host,
        unset="none: images come in data URLs",
    )
    max_images: int = count(100, "images per request; a request with more gets status 400", minimum=1)
    max_bytes: int = setting(
        20 * MIB, "largest file of an image; a larger one gets status 400", name="max_image_bytes", unit="BYTES", minimum=1
    )
    max_pixels: int = setting(
        50_000_000,
        "most pixels of an image, by its header; a larger image gets status 400 and is not decoded",
        name="max_image_pixels",
        unit="PIXELS",
        minimum=1,
        maximum=MAX_IMAGE_BYTES // 3,
    )
    timeout: float = setting(
        10.0, "how long fetching an image may take in all, redirects included", name="media_timeout", unit="SECONDS", above=0
    )
    max_redirects: int = count(3, "redirects that fetching an image follows", name="media_redirects", maximum=20)
    memory: int = setting(
        1024 * MIB,
        "memory for images: those that are read now, those that requests use, and a cache of earlier ones. A request that needs more "
        "waits; after 30 seconds it gets status 503. One whose images can never be in it together gets status 400",
        name="media_memory",
        unit="MIB",
        above=0,
        scale=MIB,
    )
    processes: int | None = count(
        None,
        "processes that decode images; they start with the first image",
        name="media_processes",
        minimum=1,
        maximum=MAX_PROCESSES,
        unset="one per core, at most 4",
    )
    drop_images: bool = setting(
        False,
        "for models that read only text: replace every image by a note. If false, an image in the last message gets status 400; only "
        "images in earlier messages and in results of tools become notes",
    )

    @property
    def decoders(self) -> int:
        return self.processes or min(4, os.cpu_count() or 1)


DEFAULTS = MediaSettings()
