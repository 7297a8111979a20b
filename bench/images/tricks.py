"""Tricks that make a server fetch from where it must not: a URL, what its host resolves to, and how hosts on the way redirect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

# fmt: off
# Where a trick leads: this machine, private networks, the services of clouds, and IPv6 forms of all of them.
FORBIDDEN = (
    "127.0.0.1", "127.255.255.254", "0.0.0.0", "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.254", "192.168.0.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "192.0.2.1", "198.18.0.1", "203.0.113.9", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "168.63.129.16", "192.88.99.1", "::", "::1", "fe80::1", "fc00::1", "fd00:ec2::254", "ff02::1",
    "fec0::1", "100::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::127.0.0.1", "::10.0.0.1",
    "64:ff9b::7f00:1", "64:ff9b::a00:1", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:a00:1::1", "2001:0:a00:1::", "2001:10::1",
    "3fff::1", "5f00::1", "4000::1",
)
# fmt: on
PUBLIC = "93.184.216.34"
ALLOWED = "pictures.example.com"
"""The only host that may be fetched from."""


class Trick(NamedTuple):
    """`addresses` is what each lookup of a host returns, one after the other; the last one stays. `redirects` is by URL."""

    name: str
    url: str
    addresses: dict[str, list[list[str]]]
    redirects: dict[str, str]


def _plain(name: str, url: str) -> Trick:
    return Trick(name, url, {ALLOWED: [[PUBLIC]]}, {})


def _shown(address: str) -> str:
    return f"[{address}]" if ":" in address else address


# fmt: off
# How people write addresses that are none at first sight.
HOSTS = (
    "2130706433", "0x7f000001", "017700000001", "0177.0.0.1", "0x7f.0.0.1", "127.1", "127.0.1", "0", "0x0", "00", "127.0.0.1.",
    "0300.0250.1", "127.0.0.01", "127.00.0.1", "127.0.0.0x1", "3232235521", "0xa9fea9fe", "2852039166", "0251.0376.0251.0376",
    "169.254.43518", "1.1.1.256", "１２７.0.0.1", "127。0。0。1", "①②⑦.⓪.⓪.①", "ⓛⓞⓒⓐⓛⓗⓞⓢⓣ", "localhost", "LOCALHOST", "localhost.",
    "localhost.localdomain", "ip6-localhost", "[::1%25lo]", "[::1%lo]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]",
    "[::127.0.0.1]", "[::]", "[0000::1]", "[fe80::1%25eth0]", "[v1.x]", "127.0.0.1.nip.io", "10.0.0.1.sslip.io",
    "metadata.google.internal", "metadata", "kubernetes.default.svc", "instance-data", "xn--", "-a.com",
    "pictures.example.com.evil.com", "evilpictures.example.com", "pictures.example.comevil.com", "example.com",
    "a.pictures.example.com", "*", "", ".", "..", "a..b", "pictures.example.com..", "pictures_example.com%00.evil.com",
    "pictures.example.com%2eevil.com", "[127.0.0.1]", "[]",
)
# fmt: on
# fmt: off
# The first host is allowed, but it is not the one that is meant.
URLS = (
    f"http://{ALLOWED}@127.0.0.1/", f"http://{ALLOWED}:80@127.0.0.1/", f"http://a:b@{ALLOWED}/", f"http://{ALLOWED}%40127.0.0.1/",
    f"http://{ALLOWED}\\@127.0.0.1/", f"http://127.0.0.1\\@{ALLOWED}/", f"http://127.0.0.1#@{ALLOWED}/",
    f"http://127.0.0.1?@{ALLOWED}/", f"http://127.0.0.1;{ALLOWED}/", f"http://127.0.0.1 {ALLOWED}/", f"http://127.0.0.1\t.{ALLOWED}/",
    f"http://{ALLOWED}\n@127.0.0.1/", f"http://{ALLOWED}:22/", f"http://{ALLOWED}:6379/", f"http://{ALLOWED}:0/",
    f"http://{ALLOWED}:65616/", f"http://{ALLOWED}:80:22/", f"http://{ALLOWED}:+22/", f"http://{ALLOWED}:٢٢/", f"http:/{ALLOWED}/",
    f"http:{ALLOWED}/", f"http:\\\\{ALLOWED}/", f"//{ALLOWED}/", "file:///etc/passwd", "ftp://127.0.0.1/",
    "gopher://127.0.0.1:6379/_INFO", "dict://127.0.0.1:11211/", "jar:http://127.0.0.1!/", "unix:/x", "ldap://127.0.0.1/",
    "ws://127.0.0.1/", "javascript:1", "blob:http://127.0.0.1/", "view-source:http://127.0.0.1/", "http+unix://x/",
    " http://127.0.0.1/", "\thttp://127.0.0.1/", "http://[::1]:80@127.0.0.1/", "http://[::1/", "http://::1/",
    "http://127.0.0.1:80\r\nHost: x/", "HTTP://127.0.0.1/",
)
# fmt: on


def tricks() -> Iterator[Trick]:
    """All of them. None may lead to a connection to a forbidden address, or to a host that is not allowed."""
    for address, scheme in product(FORBIDDEN, ("http", "https")):
        yield _plain("address in the URL", f"{scheme}://{_shown(address)}/cat.png")
    for host in HOSTS:
        yield _plain("odd host", f"http://{host}/cat.png")
    for url in URLS:
        yield _plain("odd URL", url)
    for address in FORBIDDEN:
        yield Trick("name of a forbidden address", f"http://{ALLOWED}/", {ALLOWED: [[address]]}, {})
        yield Trick("one forbidden address of two", f"http://{ALLOWED}/", {ALLOWED: [[PUBLIC, address]]}, {})
        url = f"http://{ALLOWED}/cat.png"
        # The first answer is a redirect to the same name, which has another address then.
        yield Trick("rebinding", url, {ALLOWED: [[PUBLIC], [address]]}, {url: "/again"})
        for scheme in ("http", "https"):
            yield Trick("redirect", url, {ALLOWED: [[PUBLIC]]}, {url: f"{scheme}://{_shown(address)}/"})
        second = f"http://{ALLOWED}/second"
        yield Trick("second redirect", url, {ALLOWED: [[PUBLIC]]}, {url: second, second: f"//{_shown(address)}/"})
    for target in (*URLS, *(f"http://{host}/" for host in HOSTS)):
        url = f"https://{ALLOWED}/cat.png"
        yield Trick("redirect to an odd URL", url, {ALLOWED: [[PUBLIC]]}, {url: target})
