"""Which URLs and addresses are allowed."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from images.tricks import FORBIDDEN
from penstock.config.media import parse_media_host
from penstock.media.file import sent_file
from penstock.media.hosts import AllowedHosts, is_public, parse_url
from penstock.media.picture import ImageRef
from penstock.wire.errors import RequestError


def allows(hosts: str, url: str, *addresses: str) -> bool:
    allowed = AllowedHosts([parse_media_host(host) for host in hosts.split()])
    target = parse_url(url)
    try:
        allowed.check_name(target)
        allowed.check_addresses(target, [ip_address(each) for each in addresses] if addresses else [ip_address(target.host)])
    except RequestError as error:
        assert error.code == "media_not_allowed"
        assert not any(each in error.message for each in addresses), "a client must not learn addresses"
        return False
    return True


@pytest.mark.parametrize("text", FORBIDDEN)
def test_forbidden_addresses_are_not_public(text: str) -> None:
    address = ip_address(text)
    assert not is_public(address)
    assert not allows("*", f"http://{f'[{text}]' if ':' in text else text}/")
    assert not allows("*", "http://a.com", text)
    assert allows(f"{text}", f"http://{f'[{text}]' if ':' in text else text}/"), "but it can be listed"


@pytest.mark.parametrize("text", ["1.1.1.1", "93.184.216.34", "172.32.0.1", "2606:4700:4700::1111", "2a00:1450:4001::1"])
def test_other_addresses_are_public(text: str) -> None:
    assert is_public(ip_address(text))


def test_names_ports_and_networks() -> None:
    public, private = "93.184.216.34", "10.1.2.3"
    assert allows("a.com", "http://a.com/x", public)
    assert allows("a.com", "https://A.COM./x", public)
    assert not allows("a.com", "http://b.a.com/x", public)
    assert not allows("a.com", "http://a.com:8080/x", public)
    assert allows("a.com:8080", "http://a.com:8080/x", public)
    assert not allows("a.com:8080", "http://a.com/x", public)
    assert allows("*.a.com", "http://c.b.a.com/x", public)
    assert not allows("*.a.com", "http://a.com/x", public)
    assert not allows("*.a.com", "http://ba.com/x", public)
    assert allows("*", "http://anything.org/", public)
    assert allows("*", "http://93.184.216.34/")
    assert not allows("a.com", "http://93.184.216.34/")
    assert not allows("a.com", "http://a.com/", private)
    assert not allows("a.com", "http://a.com/", public, private)
    assert allows("a.com 10.0.0.0/8", "http://a.com/", public, private)
    assert allows("10.0.0.0/8", "http://whatever.lan/", private)
    assert not allows("10.0.0.0/8", "http://whatever.lan/", public)
    assert not allows("10.0.0.0/8", "http://whatever.lan:8080/", private)
    assert allows("10.0.0.0/8:8080", "http://10.1.2.3:8080/")
    assert allows("a.com:8080 10.0.0.0/8", "http://a.com:8080/", private)
    assert allows("[fd00::/8]:81", "http://[fd00::1]:81/")
    assert not allows("::ffff:0:0/96", "http://10.1.2.3/"), "forms of IPv6 do not list those of IPv4"


def test_any_public_host_lends_its_ports_to_no_network() -> None:
    """A listed name does, on its own ports. `*` names nobody."""
    private = "10.0.0.5"
    assert not allows("* 10.0.0.5:8080", "http://10.0.0.5/")
    assert not allows("* 10.0.0.5:8080", "http://evil.com/", private)
    assert allows("* 10.0.0.5:8080", "http://10.0.0.5:8080/")
    assert allows("* 10.0.0.5:8080", "http://inner.lan:8080/", private)
    assert allows("* 10.0.0.5:8080", "http://evil.com/", "93.184.216.34")
    assert not allows("*:9000 10.0.0.0/8", "http://10.0.0.5:9000/")
    assert not allows("*:9000 10.0.0.0/8", "http://evil.com:9000/", private)
    assert allows("*:9000 10.0.0.0/8", "http://10.0.0.5/")
    assert allows("* a.com:81 10.0.0.0/8", "http://a.com:81/", private)
    assert not allows("* a.com:81 10.0.0.0/8", "http://evil.com:81/", private)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("HTTP://Example.COM", "http://example.com/"),
        ("https://example.com:443?a=b#c", "https://example.com/?a=b"),
        ("http://example.com:8080/a%20b/ü?q=ä", "http://example.com:8080/a%20b/%C3%BC?q=%C3%A4"),
        ("http://[0:0::1]:80/", "http://[::1]/"),
    ],
)
def test_a_url_is_read_in_one_way(url: str, shown: str) -> None:
    assert parse_url(url).url == shown


@pytest.mark.parametrize("url", ["http\u017f://a.com/", "HTTP\u017f://a.com:80/", "http\u017f://user@a.com/"])
def test_a_letter_that_is_only_like_one_of_ascii_is_another(url: str) -> None:
    """In lower case, a long s is no s, though upper case makes it one."""
    with pytest.raises(RequestError, match="expected http:// or https://") as raised:
        parse_url(url)
    assert (raised.value.status, raised.value.code) == (400, "invalid_url")
    assert not ImageRef("input", url).is_remote


def test_the_head_of_a_data_url_is_ascii() -> None:
    with pytest.raises(RequestError, match="expected data:image/png;base64"):
        sent_file(ImageRef("input", "data:image/png;ba\u017fe64,AAAA"))


@pytest.mark.parametrize(
    "text", ["", "a b", "a.com/", "http://a.com", "10.0.0.1/8", "300.0.0.1", "127.1", "a.com:0", "a.com:x", "*.*", "a*.com", "ü.com"]
)
def test_a_setting_that_cannot_work_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a name"):
        parse_media_host(text)


@pytest.mark.parametrize("text", ["a.com", "*.a.com:81", "*", "10.0.0.0/8:81", "127.0.0.1/32", "[fd00::/8]:81", "[::1/128]"])
def test_a_setting_is_forwarded_as_it_was_given(text: str) -> None:
    assert str(parse_media_host(text)) == text
    assert parse_media_host(str(parse_media_host(text))) == parse_media_host(text)
