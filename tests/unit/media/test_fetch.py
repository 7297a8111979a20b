"""Fetching images: only from allowed hosts, to the address that was checked, within limits."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from images.tricks import ALLOWED, PUBLIC, Trick, tricks
from penstock.config.media import DEFAULTS, MediaSettings, parse_media_host
from penstock.fairness import FairBudget, Share
from penstock.media.families.simulator import make_rules
from penstock.media.fetch import MAX_FETCHES, MAX_TURN_SECONDS, HttpFetcher, Streams, read_headers, resolve
from penstock.media.picture import ImageRef
from penstock.media.reader import MediaReader
from penstock.wire.errors import RequestError
from pictures import noise, saved

FILE = b"a picture" * 1000


class Web:
    """A server on this machine that stands for all hosts of the internet; who connected to which address, and what they asked."""

    def __init__(self, answer: Callable[[str], bytes | None]) -> None:
        self.answer = answer
        self.addresses: dict[str, list[list[str]]] = {ALLOWED: [[PUBLIC]]}
        self.lookups: list[str] = []
        self.connected: list[tuple[str, int, str | None]] = []
        self.requests: list[str] = []
        self.port = 0
        self.served: list[asyncio.Task[None]] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.lookups.append(host)
        found = self.addresses.get(host)
        if found is None:
            raise OSError("no such host")
        return found.pop(0) if len(found) > 1 else found[0]

    async def connect(self, address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:
        self.connected.append((address, port, name))
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            request = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(request)
            answer = self.answer(request.split()[1])
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()

    @contextlib.asynccontextmanager
    async def open(self, turn_seconds: float = MAX_TURN_SECONDS, **settings: object) -> AsyncIterator[HttpFetcher]:
        server = await asyncio.start_server(lambda *streams: self.served.append(asyncio.create_task(self.serve(*streams))), "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        chosen: MediaSettings = replace(DEFAULTS, **({"hosts": (parse_media_host(ALLOWED),)} | settings))  # type: ignore[arg-type]
        try:
            yield HttpFetcher(chosen, resolve=self.resolve, connect=self.connect, turn_seconds=turn_seconds)
        finally:
            server.close()
            await server.wait_closed()
            await asyncio.gather(*self.served)


def answer(body: bytes = FILE, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def raw(body: bytes, *headers: str) -> bytes:
    return "\r\n".join(["HTTP/1.1 200 OK", *headers, "", ""]).encode() + body


async def take(size: int) -> None:
    pass


async def fetched(fetcher: HttpFetcher, url: str = f"http://{ALLOWED}/cat.png") -> bytes:
    return bytes(await fetcher.fetch(url, "", 1.0, take))


async def failure(sent: bytes | None, **settings: Any) -> RequestError:
    async with Web(lambda _: sent).open(**settings) as fetcher:
        with pytest.raises(RequestError) as raised:
            await fetched(fetcher)
        fetcher.turns.check_integrity()
        assert fetcher.turns.used == 0
    assert raised.value.status == 400
    return raised.value


async def test_a_file_is_fetched_from_the_address_that_was_checked() -> None:
    web = Web(lambda _: answer())
    async with web.open() as fetcher:
        assert await fetched(fetcher, f"https://{ALLOWED}/a%20b?c#d") == FILE
    assert web.connected == [(PUBLIC, 443, ALLOWED)]
    assert web.lookups == [ALLOWED]
    request = web.requests[0].lower()
    assert request.startswith(f"get /a%20b?c http/1.1\r\nhost: {ALLOWED}\r\n")
    assert not any(secret in request for secret in ("cookie", "authorization", "referer"))


@pytest.mark.parametrize(
    "sent",
    [
        raw(FILE),
        raw(b"%x\r\n%s\r\n5;a=b\r\nhello\r\n0\r\n\r\n" % (len(FILE), FILE), "Transfer-Encoding: chunked"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(FILE, "200 OK", "Content-Encoding: identity", "Set-Cookie: a=b", "Set-Cookie: c=d"),
        answer(FILE, "200 OK", "Content-Type: text/html"),
    ],
)
async def test_answers_that_are_understood(sent: bytes) -> None:
    async with Web(lambda _: sent).open() as fetcher:
        assert (await fetched(fetcher)).startswith(FILE)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "ends early"),
        (b"220 smtp.example.com ESMTP\r\n\r\n", "it is not HTTP/1.1"),
        (answer(length=len(FILE) + 1), "1 bytes are missing"),
        (answer(b"", "404 Not Found"), "status 404"),
        (answer(FILE, "206 Partial Content"), "status 206"),
        (answer(b"", "302 Found"), "status 302"),
        (answer(FILE, "200 OK", "Content-Encoding: gzip"), "compresses it with 'gzip'"),
        (answer(FILE, "200 OK", "Content-Length: 1"), "two headers content-length"),
        (answer(FILE, "200 OK", " folded"), "header that cannot be read"),
        (raw(FILE, "Content-Length: -1"), "says that it has '-1' bytes"),
        (raw(FILE, "Transfer-Encoding: gzip, chunked"), "sends it as 'gzip, chunked'"),
        (raw(b"zz\r\n", "Transfer-Encoding: chunked"), "not a number"),
        (raw(b"5\r\nhelloworld\r\n", "Transfer-Encoding: chunked"), "does not end where it should"),
        (raw(b"ffffffff\r\nhello", "Transfer-Encoding: chunked"), "bytes are missing"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 10, "too many interim"),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 20_000, "broken or ends early"),
    ],
)
async def test_answers_that_are_refused(sent: bytes, reason: str) -> None:
    assert reason in (await failure(sent)).message


def test_a_header_of_spaces_is_read_in_one_pass() -> None:
    spaces = b" " * 1_000_000
    assert read_headers([b"A:" + spaces + b"x" + spaces + b"y" + spaces]) == {"a": f"x{spaces.decode()}y"}


@pytest.mark.parametrize("sent", [answer(), raw(FILE), raw(b"%x\r\n%s\r\n0\r\n\r\n" % (len(FILE), FILE), "Transfer-Encoding: chunked")])
async def test_a_file_that_is_too_large_is_not_read_to_its_end(sent: bytes) -> None:
    error = await failure(sent, max_bytes=1000)
    assert (error.code, error.limit) == ("image_too_large", "max_image_bytes")


async def test_a_server_that_says_nothing_is_given_up() -> None:
    assert "within 0.05 seconds" in (await failure(None, timeout=0.05)).message


async def test_redirects_are_followed_as_far_as_allowed() -> None:
    steps = {"/cat.png": "/1", "/1": f"https://{ALLOWED}:443/2", "/2": "3?x"}
    web = Web(lambda path: answer(b"", "302 Found", f"Location: {steps[path]}") if path in steps else answer())
    async with web.open() as fetcher:
        assert await fetched(fetcher) == FILE
    assert web.lookups == [ALLOWED] * 4, "each is resolved and checked again"
    assert [name for _, _, name in web.connected] == [None, None, ALLOWED, ALLOWED]
    loop = await failure(answer(b"", "301 Moved", "Location: /cat.png"))
    assert "redirects more than 3 times" in loop.message


async def test_a_redirect_may_have_letters_of_utf_8() -> None:
    web = Web(lambda path: answer() if path == "/%C3%BC" else b"HTTP/1.1 302 Found\r\nLocation: \t/\xc3\xbc \r\n\r\n")
    async with web.open() as fetcher:
        assert await fetched(fetcher) == FILE


def of_each_kind() -> list[Trick]:
    """A few of each name: bench/images/hostile.py tries all."""
    seen: dict[str, int] = {}
    chosen = []
    for trick in tricks():
        seen[trick.name] = seen.get(trick.name, 0) + 1
        if seen[trick.name] % 3 == 1:
            chosen.append(trick)
    return chosen


async def test_no_trick_leads_to_a_forbidden_address() -> None:
    async with (web := Web(lambda _: None)).open(timeout=5) as fetcher:
        for trick in of_each_kind():
            web.addresses = {host: list(found) for host, found in trick.addresses.items()}
            web.answer = partial(redirect, trick)
            with pytest.raises(RequestError) as raised:
                await fetched(fetcher, trick.url)
            assert raised.value.status == 400, trick
    assert {address for address, _, _ in web.connected} == {PUBLIC}
    assert {port for _, port, _ in web.connected} == {80, 443}
    assert set(web.lookups) == {ALLOWED}


def redirect(trick: Trick, path: str) -> bytes:
    found = next((target for url, target in trick.redirects.items() if url.endswith(path)), "http://127.0.0.1/")
    return b"HTTP/1.1 302 Found\r\nLocation: %s\r\n\r\n" % found.encode("utf-8")


async def test_equal_urls_of_a_request_are_fetched_once() -> None:
    file = saved(noise())
    web = Web(lambda path: answer(file if path == "/cat.png" else b"no picture"))
    async with web.open() as fetcher:
        reader = MediaReader(DEFAULTS, fetcher)
        try:
            cats = [ImageRef(f"messages[{index}]", url=f"http://{ALLOWED}/cat.png") for index in range(3)]
            pictures = await reader.read(cats, "", b"root", make_rules())
            assert pictures[0] is pictures[1] is pictures[2]
            assert len(web.requests) == 1
            await reader.read(cats[:1], "", b"root", make_rules())
            assert len(web.requests) == 2, "another request asks again: the file may have changed"
            assert reader.counts.images == {("http", "decoded"): 3, ("http", "cached"): 1}
            with pytest.raises(RequestError, match=r"`input\[1\]` cannot be read: it is not a picture: expected a PNG"):
                await reader.read([cats[0], ImageRef("input[1]", url=f"http://{ALLOWED}/dog.png")], "", b"root", make_rules())
            del pictures
            await asyncio.sleep(0)
            reader.check_integrity()
        finally:
            reader.close()


async def test_a_tenant_that_fetches_much_keeps_nobody_waiting() -> None:
    released = asyncio.Event()

    async def slow(size: int) -> None:
        await released.wait()

    async with Web(lambda _: answer()).open() as fetcher:
        flood = [asyncio.create_task(fetcher.fetch(f"http://{ALLOWED}/", "flood", 1.0, slow)) for _ in range(MAX_FETCHES + 5)]
        while fetcher.turns.waiting < 5:
            await asyncio.sleep(0.001)
        assert bytes(await fetcher.fetch(f"http://{ALLOWED}/", "other", 1.0, take)) == FILE
        released.set()
        assert {bytes(file) for file in await asyncio.gather(*flood)} == {FILE}
        assert fetcher.turns.used == 0


def fill(budget: FairBudget) -> list[Share]:
    """Takes all places for the tenant without a name, until they are released."""
    shares = [Share() for _ in range(MAX_FETCHES)]
    assert all(budget.take(share, 1) for share in shares)
    return shares


async def test_waiting_for_a_turn_is_no_part_of_the_fetch() -> None:
    """It has a limit and an error of its own: the host is not to blame for those who came before."""
    async with Web(lambda _: None).open(timeout=0.05) as fetcher:
        shares = fill(fetcher.turns)
        waiting = asyncio.create_task(fetched(fetcher))
        while not fetcher.turns.waiting:
            await asyncio.sleep(0)
        with pytest.raises(RequestError, match=r"it did not come within 0\.05 seconds \(--media-timeout\)"):
            await fetcher.fetch(f"http://{ALLOWED}/", "other", 1.0, take)
        assert not waiting.done(), "it began to wait before that"
        for share in shares:
            fetcher.turns.release(share)
        with pytest.raises(RequestError, match=r"within 0\.05 seconds"):
            await waiting


@pytest.mark.parametrize("what", ["turns", "lookups"])
async def test_a_fetch_that_gets_no_turn_is_told_so(what: str) -> None:
    async with (web := Web(lambda _: answer())).open(timeout=1000, turn_seconds=0.05) as fetcher:
        shares = fill(getattr(fetcher, what))
        with pytest.raises(RequestError, match=r"too many images now: it got no turn within 0\.05 seconds") as raised:
            await fetched(fetcher)
        assert (raised.value.status, raised.value.code, raised.value.limit) == (503, "overloaded", "media_fetches")
        for share in shares:
            getattr(fetcher, what).release(share)
        assert await fetched(fetcher) == FILE
        assert fetcher.turns.used == fetcher.lookups.used == 0
    assert len(web.requests) == 1


async def test_waiting_for_a_lookup_is_no_part_of_the_fetch() -> None:
    """Those of other hosts may hang for a minute."""
    async with Web(lambda _: answer()).open(timeout=0.05, turn_seconds=0.1) as fetcher:
        fill(fetcher.lookups)
        with pytest.raises(RequestError, match="it got no turn within"):
            await fetched(fetcher)


def test_lookups_do_not_wait_for_other_work_in_threads() -> None:
    async def look_up() -> None:
        released = threading.Event()
        with ThreadPoolExecutor(1) as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            blocked = asyncio.create_task(asyncio.to_thread(released.wait))
            await asyncio.sleep(0)
            try:
                async with asyncio.timeout(10):
                    assert await resolve("127.0.0.1", 80) == ["127.0.0.1"]
                    with pytest.raises(UnicodeError):
                        await resolve("a" * 64, 80)
            finally:
                released.set()
                await blocked

    # The loop of asyncio: another one has threads that cannot be kept busy.
    with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
        runner.run(look_up())


async def test_a_lookup_that_hangs_keeps_its_place_and_holds_up_no_other_tenant() -> None:
    """It cannot be stopped, so a tenant must not begin ever more of them."""
    released = asyncio.Event()

    async def hang(host: str, port: int) -> list[str]:
        await released.wait()
        return [PUBLIC]

    async with (web := Web(lambda _: answer())).open():
        fetcher = HttpFetcher(replace(DEFAULTS, hosts=(parse_media_host(ALLOWED),)), resolve=hang, connect=web.connect)
        for waiting in (0, MAX_FETCHES):
            flood = [asyncio.create_task(fetched(fetcher)) for _ in range(MAX_FETCHES)]
            while (fetcher.lookups.used, fetcher.lookups.waiting) != (MAX_FETCHES, waiting):
                await asyncio.sleep(0)
            for each in flood:
                each.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
            assert (fetcher.turns.used, fetcher.lookups.used, fetcher.lookups.waiting) == (0, MAX_FETCHES, 0)
        other = asyncio.create_task(fetcher.fetch(f"http://{ALLOWED}/", "other", 1.0, take))
        while fetcher.lookups.used == MAX_FETCHES:
            await asyncio.sleep(0)
        released.set()
        assert bytes(await other) == FILE
        assert await fetched(fetcher) == FILE
        assert fetcher.lookups.used == 0
