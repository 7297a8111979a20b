"""Fetches the files of images over http and https: one GET, to an address that was checked, with each redirect checked from the start."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from ipaddress import ip_address
from typing import NamedTuple

from penstock.config.media import MediaSettings
from penstock.fairness import FairBudget, Share
from penstock.media.hosts import AllowedHosts, Target, parse_redirect, parse_url
from penstock.wire.errors import RequestError

MAX_FETCHES = 32
"""At once. Tenants share them."""

MAX_TURN_SECONDS = 30.0
"""How long one waits for its turn, and for that of its lookup. Then it gets status 503. It is no part of --media-timeout."""

MAX_HEAD_BYTES = 32 * 1024
MAX_INTERIM = 4
PIECE_BYTES = 64 * 1024
REDIRECTS = frozenset({301, 302, 303, 307, 308})
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: .*)?")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):(.*)")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;.*)?\r\n", re.DOTALL)
_LENGTH = re.compile("[0-9]{1,15}")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
Connect = Callable[[str, int, ssl.SSLContext | None, str | None], Awaitable[Streams]]
Take = Callable[[int], Awaitable[None]]
Keep = Callable[[bytes], Awaitable[None]]


async def resolve(host: str, port: int) -> Sequence[str]:
    """The addresses of a name. Raises OSError.

    In a thread of its own: those of the loop are few and have other work. A lookup may hang for a minute, but the server need not wait for
    it to end.
    """
    found: Future[Sequence[str]] = Future()
    found.set_running_or_notify_cancel()

    def look_up() -> None:
        try:
            found.set_result([str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)])
        except (OSError, UnicodeError) as error:
            found.set_exception(error)

    threading.Thread(target=look_up, name="host of an image", daemon=True).start()
    return await asyncio.wrap_future(found)


async def connect(address: str, port: int, tls: ssl.SSLContext | None, name: str | None) -> Streams:
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=name, limit=MAX_HEAD_BYTES)


class _Fetch(NamedTuple):
    """One that is under way: `turn` is its place, `limit` the end of its time."""

    take: Take
    turn: Share
    limit: asyncio.Timeout


@contextlib.contextmanager
def _paused(limit: asyncio.Timeout) -> Iterator[None]:
    """What happens meanwhile takes none of its time. One that has just expired stays so."""
    ends, loop = limit.when(), asyncio.get_running_loop()
    if ends is None or limit.expired():
        yield
        return
    left = ends - loop.time()
    limit.reschedule(None)
    yield
    limit.reschedule(loop.time() + left)


class HttpFetcher:
    """Keeps nothing between two fetches: no cookies, no connections, no names. It sends no secret."""

    def __init__(
        self,
        settings: MediaSettings,
        *,
        resolve: Resolve = resolve,
        connect: Connect = connect,
        turn_seconds: float = MAX_TURN_SECONDS,
    ) -> None:
        self._settings = settings
        self._allowed = AllowedHosts(settings.hosts)
        self._resolve = resolve
        self._connect = connect
        self._turn_seconds = turn_seconds
        self._tls = ssl.create_default_context()
        self.turns = FairBudget(MAX_FETCHES)
        self.lookups = FairBudget(MAX_FETCHES)
        """One that nobody waits for any more has its place until it ends: it cannot be stopped."""

    async def fetch(self, url: str, lane: str, weight: float, take: Take) -> bytearray:
        """The file. Awaits `take` before it keeps more bytes. Raises RequestError without a field."""
        target = parse_url(url)
        self._allowed.check_name(target)
        turn = Share(lane, weight)
        try:
            if not self.turns.take(turn, 1):
                await self._wait(self.turns, turn)
            async with asyncio.timeout(self._settings.timeout) as limit:
                return await self._follow(target, _Fetch(take, turn, limit))
        except TimeoutError:
            if not limit.expired():
                raise
            raise _failed(f"it did not come within {self._settings.timeout:g} seconds (--media-timeout)") from None
        finally:
            self.turns.release(turn)

    async def _wait(self, budget: FairBudget, share: Share) -> None:
        """For others. Raises RequestError."""
        try:
            await budget.wait(share, 1, self._turn_seconds)
        except TimeoutError:
            message = f"the server fetches too many images now: it got no turn within {self._turn_seconds:g} seconds"
            raise RequestError(message, code="overloaded", status=503, limit="media_fetches") from None

    async def _follow(self, target: Target, fetch: _Fetch) -> bytearray:
        for _ in range(self._settings.max_redirects + 1):
            found = await self._get(target, fetch)
            if isinstance(found, bytearray):
                return found
            target = parse_redirect(target, found)
        raise _failed(f"its URL redirects more than {self._settings.max_redirects} times (--media-redirects)")

    async def _get(self, target: Target, fetch: _Fetch) -> bytearray | str:
        """The file, or where it is."""
        reader, writer = await self._open(target, fetch)
        try:
            writer.write(_request(target))
            status, headers = await _read_head(reader)
            if status in REDIRECTS and "location" in headers:
                return headers["location"]
            if status != 200:
                raise _failed(f"its server answers with status {status}")
            if headers.get("content-encoding", "identity").lower() != "identity":
                raise _failed(f"its server compresses it with {headers['content-encoding'][:40]!r}, which was not asked for")
            return await self._read_body(reader, headers, fetch.take)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise _failed(f"its server's answer is broken or ends early: {_said(error)}") from error
        finally:
            writer.transport.abort()

    async def _open(self, target: Target, fetch: _Fetch) -> Streams:
        """A connection to an address that was checked just before, never to the name."""
        self._allowed.check_name(target)
        try:
            literal = target.address
            texts = [target.host] if literal is not None else await self._look_up(target, fetch)
            addresses = [ip_address(text) for text in dict.fromkeys(texts)]
        except (OSError, UnicodeError, ValueError) as error:
            raise _failed(f"the host {target.host[:80]} is not found") from error
        if not addresses:
            raise _failed(f"the host {target.host[:80]} has no address")
        self._allowed.check_addresses(target, addresses)
        tls, name = (self._tls, target.host) if target.scheme == "https" else (None, None)
        for is_last, address in enumerate(addresses, 1 - len(addresses)):
            try:
                return await self._connect(str(address), target.port, tls, name)
            except OSError as error:
                if is_last == 0:
                    raise _failed(f"{target.authority[:80]} cannot be reached: {_said(error)}") from error
        raise AssertionError

    async def _look_up(self, target: Target, fetch: _Fetch) -> Sequence[str]:
        """Raises OSError."""
        place = Share(fetch.turn.lane, fetch.turn.weight)
        try:
            if not self.lookups.take(place, 1):
                with _paused(fetch.limit):
                    await self._wait(self.lookups, place)
            looking = asyncio.ensure_future(self._resolve(target.host, target.port))
        except BaseException:
            self.lookups.release(place)
            raise
        looking.add_done_callback(lambda _: self.lookups.release(place))
        return await asyncio.shield(looking)

    async def _read_body(self, reader: asyncio.StreamReader, headers: Mapping[str, str], take: Take) -> bytearray:
        body = bytearray()

        async def keep(piece: bytes) -> None:
            if len(body) + len(piece) > self._settings.max_bytes:
                raise self._too_large()
            await take(len(piece))
            body.extend(piece)

        coding, length = headers.get("transfer-encoding"), headers.get("content-length")
        if coding is not None:
            if coding.lower() != "chunked":
                raise _failed(f"its server sends it as {coding[:40]!r}: expected chunked")
            await _read_chunks(reader, keep)
        elif length is not None:
            if not _LENGTH.fullmatch(length):
                raise _failed(f"its server says that it has {length[:40]!r} bytes")
            if int(length) > self._settings.max_bytes:
                raise self._too_large()
            await _read_exactly(reader, int(length), keep)
        else:
            while piece := await reader.read(PIECE_BYTES):
                await keep(piece)
        return body

    def _too_large(self) -> RequestError:
        message = f"it has more than {self._settings.max_bytes:,} bytes: expected at most that many (--max-image-bytes)"
        return RequestError(message, code="image_too_large", limit="max_image_bytes")


def _request(target: Target) -> bytes:
    lines = (
        f"GET {target.path} HTTP/1.1",
        f"Host: {target.authority}",
        "Accept: image/png, image/jpeg, image/webp, image/gif",
        "Accept-Encoding: identity",
        "User-Agent: penstock",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", "")).encode("ascii")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    """Status and headers. Raises ValueError."""
    for _ in range(MAX_INTERIM):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[:-2]
        status = _STATUS.fullmatch(first)
        if status is None:
            raise ValueError("it is not HTTP/1.1")
        if int(status[1]) >= 200:
            return int(status[1]), read_headers(lines)
    raise ValueError("it has too many interim answers")


def read_headers(lines: Sequence[bytes]) -> dict[str, str]:
    """In time that grows with their length only. Raises ValueError."""
    headers: dict[str, str] = {}
    for line in lines:
        found = _HEADER.fullmatch(line)
        if found is None:
            raise ValueError("it has a header that cannot be read")
        name, value = found[1].decode("ascii").lower(), found[2].strip(b" \t").decode("utf-8", "replace")
        if headers.setdefault(name, value) != value and name in ("content-length", "transfer-encoding", "content-encoding", "location"):
            raise ValueError(f"it has two headers {name}")
    return headers


async def _read_chunks(reader: asyncio.StreamReader, keep: Keep) -> None:
    while True:
        found = _CHUNK.fullmatch(await reader.readuntil(b"\r\n"))
        if found is None:
            raise ValueError("the size of a chunk is not a number")
        size = int(found[1], 16)
        if not size:
            return
        await _read_exactly(reader, size, keep)
        if await reader.readexactly(2) != b"\r\n":
            raise ValueError("a chunk does not end where it should")
        # Thousands of small chunks may be here already.
        await asyncio.sleep(0)


async def _read_exactly(reader: asyncio.StreamReader, size: int, keep: Keep) -> None:
    while size:
        piece = await reader.read(min(PIECE_BYTES, size))
        if not piece:
            raise ValueError(f"{size:,} bytes are missing")
        size -= len(piece)
        await keep(piece)


def _said(error: Exception) -> str:
    """What the system says of it, without addresses and paths."""
    text = (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)
    return text[:120]


def _failed(message: str) -> RequestError:
    return RequestError(message, code="image_not_fetched")
