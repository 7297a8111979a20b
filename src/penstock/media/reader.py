"""Reads the images of requests: each once, within limits, named by its content."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from hashlib import blake2b
from typing import NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec

from penstock.config.media import DEFAULTS, MediaSettings
from penstock.fairness import FairBudget, Share
from penstock.media.cache import FileKey, PictureCache
from penstock.media.decode import LOW_PIXELS, shrunk_size
from penstock.media.decoders import Answer, Decoders
from penstock.media.families import make as families
from penstock.media.file import EXPECTED, ImageFile, sent_file
from penstock.media.formats import Header, read_header
from penstock.media.job import Refused
from penstock.media.picture import ImageRef, Picture
from penstock.metrics.frontend import MediaReading
from penstock.wire.errors import RequestError
from penstock.wire.images import IMAGE_NAME_BYTES, PICTURE_BYTES, SEAL_BYTES, ImageRules

Result = TypeVar("Result")

MAX_WAIT_SECONDS = 30.0
"""For memory and a process. Then the request gets status 503."""

MAX_FETCH_WAIT_SECONDS = 5.0
"""For the memory of a file that is being fetched."""

MAX_HASHED_AT_ONCE = 64 * 1024
"""A longer file is hashed in a thread."""

BYTES_PER_PIXEL = 12
"""What decoding takes of memory for most pictures. What it takes at most is the limit of a process: decoders.BYTES_PER_PIXEL."""

HASH_THREADS = 2
_STATUS = {"killed": 503, "overloaded": 503, "missing": 501}


class Fetcher(Protocol):
    """Gets files from other servers."""

    turns: FairBudget

    async def fetch(self, url: str, lane: str, weight: float, take: Callable[[int], Awaitable[None]]) -> bytes | bytearray:
        """Awaits `take` before it keeps more bytes. Raises RequestError without a field."""


class Tenant(NamedTuple):
    """Whose images they are: `lane` and `weight` where it shares with others, the `root` of its KV."""

    lane: str
    weight: float
    root: bytes


class Counts:
    """What was read since the start. `images` is by source (data or http) and outcome, `bytes` by source."""

    def __init__(self) -> None:
        self.images: Counter[tuple[str, ...]] = Counter()
        self.bytes: Counter[str] = Counter()
        self.fetch_seconds = 0.0


class MediaReader:
    """The pictures of all requests of a front end, while anybody holds them. For one event loop.

    All memory is taken from one budget that tenants share: a picture that is read takes an estimate, one that was read its pixels and
    PICTURE_BYTES, until nobody holds it. The cache holds pictures only while nobody waits for memory.
    """

    def __init__(self, settings: MediaSettings = DEFAULTS, fetcher: Fetcher | None = None, decoders: Decoders | None = None) -> None:
        self._settings = settings
        self._fetcher = fetcher
        self._alive: WeakValueDictionary[bytes, Picture] = WeakValueDictionary()
        self._flights: dict[FileKey, _Flight] = {}
        self._hashing = ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="picture hashes")
        self._dropped: deque[tuple[Share, int]] = deque()
        self.memory = FairBudget(settings.memory, has_shares=True)
        self.cache = PictureCache()
        self.decoders = decoders or Decoders(settings.decoders, settings.max_bytes, settings.max_pixels)
        self.counts = Counts()
        self.held_bytes = 0
        """Of all pictures that anybody holds."""

    def __len__(self) -> int:
        """The number of pictures that anybody holds."""
        return len(self._alive)

    async def read(self, refs: Sequence[ImageRef], lane: str, root: bytes, rules: ImageRules, weight: float = 1.0) -> list[Picture]:
        """The picture of each image of a request, in order; equal ones are read once. `lane` and `weight` are those of its tenant, `root`
        that of its KV. `find` knows a picture only while somebody holds it.

        Raises RequestError, which names the field and what would be right.
        """
        if not refs:
            return []
        self.check_number(refs)
        tenant = Tenant(lane, weight, root)
        remotes: dict[str, _Remote] = {}
        sources: list[_Sent | _Remote] = []
        for ref in refs:
            with self._naming(ref):
                sources.append(await self._source(ref, tenant, remotes))
            # Looking at a header takes up to half a millisecond.
            await asyncio.sleep(0)
        needs = _Needs(self.memory.total, self._settings.max_bytes)
        # In the order in which they need least memory together: first what takes most for a while. What must be fetched comes last.
        begun = sorted(range(len(refs)), key=lambda index: _passing_bytes(refs[index], sources[index], rules), reverse=True)
        here = {index: source for index in begun if isinstance(source := sources[index], _Sent)}
        try:
            found = await _all_of([self._key(refs[index], sent, tenant, rules) for index, sent in here.items()])
            keys = dict(zip(here, found, strict=True))
            for index, key in keys.items():
                with self._naming(refs[index]):
                    needs.add(key, _kept_bytes(refs[index], here[index], rules), _decoding_bytes(here[index]))
            readings = [self._read(refs[index], sources[index], keys.get(index), tenant, rules, needs) for index in begun]
            pictures = dict(zip(begun, await _all_of(readings), strict=True))
            return [pictures[index] for index in range(len(refs))]
        finally:
            for remote in remotes.values():
                self._let_go(remote)

    async def fetch(self, refs: Sequence[ImageRef], lane: str, weight: float, check: Callable[[int], None]) -> dict[str, str]:
        """The files of those images that must be fetched, in base64, by their URLs: for a request that is stored with them.

        Raises RequestError as `read` does. `check` gets the bytes of all files that have come, with each of them, and may raise.
        """
        wanted = {ref.url: ref for ref in refs if ref.is_remote}
        if not wanted:
            return {}
        self.check_number(refs)
        tenant, remotes = Tenant(lane, weight, b""), dict[str, _Remote]()
        arrived = 0

        async def file(ref: ImageRef) -> str:
            nonlocal arrived
            with self._naming(ref):
                source = await self._source(ref, tenant, remotes)
                sent = source if isinstance(source, _Sent) else await self._fetched(source, tenant)
            arrived += sent.file.size
            check(arrived)
            return await asyncio.get_running_loop().run_in_executor(self._hashing, sent.file.as_base64)

        try:
            return dict(zip(wanted, await _all_of([file(ref) for ref in wanted.values()]), strict=True))
        finally:
            for remote in remotes.values():
                self._let_go(remote)

    def find(self, name: bytes) -> Picture | None:
        """The picture with this name. None if nobody holds it any more."""
        return self._alive.get(name)

    def observe(self) -> MediaReading:
        """For the metrics."""
        return MediaReading(
            images=self.counts.images,
            bytes=self.counts.bytes,
            seconds={"fetch": self.counts.fetch_seconds, "decode": self.decoders.seconds},
            decoders_lost=self.decoders.lost,
            pictures={"all": len(self), "cached": len(self.cache)},
            memory_bytes=self.memory.used,
            waiting=self.memory.waiting + self.decoders.turns.waiting + (0 if self._fetcher is None else self._fetcher.turns.waiting),
        )

    @property
    def max_images(self) -> int:
        """The most of a request."""
        return self._settings.max_images

    def check_number(self, refs: Sequence[ImageRef]) -> None:
        """Raises RequestError when these are too many for a request."""
        if len(refs) > self.max_images:
            first = refs[self.max_images]
            message = f"`{first.field}` is one of {len(refs)} images: expected at most {self.max_images} (--max-images)"
            raise RequestError(message, param=first.field, code="too_many_images", limit="max_images")

    def close(self) -> None:
        """Ends the processes and threads; what they do is lost."""
        self.decoders.close()
        self._hashing.shutdown(wait=False, cancel_futures=True)

    @contextlib.contextmanager
    def _naming(self, ref: ImageRef) -> Iterator[None]:
        """Errors get the name of the field, and are counted."""
        try:
            yield
        except RequestError as error:
            source = "http" if ref.is_remote else "data"
            self.counts.images[source, "refused" if error.status < 500 else "failed"] += 1
            message = f"`{ref.field}` cannot be read: {error.message}"
            named = RequestError(message, param=ref.field, code=error.code, status=error.status, limit=error.limit)
        else:
            return
        try:
            # Not from the other: it may be raised for several requests.
            raise named
        finally:
            # Here and below: an error refers to the frames that it passed, with all that they hold. Where one of them refers to the error,
            # all of it stays until the garbage collector comes, which is seldom.
            del named

    async def _source(self, ref: ImageRef, tenant: Tenant, remotes: dict[str, _Remote]) -> _Sent | _Remote:
        """Checks what costs next to nothing. Raises RequestError."""
        if ref.is_remote:
            if self._fetcher is None:
                raise RequestError(f"this server fetches no images (--allow-media-hosts): {EXPECTED}", code="media_not_allowed")
            remote = remotes.setdefault(ref.url, _Remote(ref.url, Share(tenant.lane, tenant.weight)))
            remote.images += 1
            return remote
        file = sent_file(ref)
        if file.has_lines:
            file = await asyncio.get_running_loop().run_in_executor(self._hashing, file.joined)
        return self._sent(file)

    def _sent(self, file: ImageFile) -> _Sent:
        """A file within the limits. Raises RequestError."""
        if file.size > self._settings.max_bytes:
            message = f"it has {file.size:,} bytes: expected at most {self._settings.max_bytes:,} (--max-image-bytes)"
            raise RequestError(message, code="image_too_large", limit="max_image_bytes")
        try:
            header = read_header(file)
        except ValueError as error:
            raise RequestError(str(error), code="invalid_image") from error
        if header.pixels > self._settings.max_pixels:
            message = f"it has {header.width} × {header.height} pixels: expected at most {self._settings.max_pixels:,} (--max-image-pixels)"
            raise RequestError(message, code="image_too_large", limit="max_image_pixels")
        return _Sent(file, header)

    async def _read(
        self, ref: ImageRef, source: _Sent | _Remote, key: FileKey | None, tenant: Tenant, rules: ImageRules, needs: _Needs
    ) -> Picture:
        """`key` is that of a file that is here. The needs of one that must be fetched are not known before."""
        with self._naming(ref):
            sent = source if isinstance(source, _Sent) else await self._fetched(source, tenant, needs)
            if key is None:
                key = await self._key(ref, sent, tenant, rules)
                needs.add(key, _kept_bytes(ref, sent, rules), _decoding_bytes(sent), sent.file.stored)
            picture, outcome = await self._find_or_decode(key, sent, tenant, rules, needs.turn)
        origin = "data" if isinstance(source, _Sent) else "http"
        self.counts.images[origin, outcome] += 1
        self.counts.bytes[origin] += sent.file.size
        if isinstance(source, _Remote):
            source.images -= 1
            if not source.images:
                self._let_go(source)
                needs.fetches.release()
        return picture

    def _let_go(self, remote: _Remote) -> None:
        remote.fetching = None
        self.memory.release(remote.share)

    async def _fetched(self, remote: _Remote, tenant: Tenant, needs: _Needs | None = None) -> _Sent:
        """Equal URLs of a request are fetched once. With `needs`, the file is let go when its pictures are decoded."""
        if remote.fetching is None:
            remote.fetching = asyncio.create_task(self._fetch(remote, tenant, needs))
        return await remote.fetching

    async def _fetch(self, remote: _Remote, tenant: Tenant, needs: _Needs | None) -> _Sent:
        assert self._fetcher is not None
        if needs is not None:
            # After those that are here have taken their memory.
            async with needs.turn:
                pass
            await needs.fetches.acquire()
        began = time.monotonic()
        content = await self._fetcher.fetch(remote.url, tenant.lane, tenant.weight, partial(self._take_fetched, remote.share))
        self.counts.fetch_seconds += time.monotonic() - began
        return self._sent(ImageFile(content))

    async def _key(self, ref: ImageRef, sent: _Sent, tenant: Tenant, rules: ImageRules) -> FileKey:
        file = sent.file
        is_short = file.stored <= MAX_HASHED_AT_ONCE
        digest = file.digest() if is_short else await asyncio.get_running_loop().run_in_executor(self._hashing, file.digest)
        return FileKey(tenant.lane, tenant.root, msgspec.msgpack.encode(rules, order="sorted"), _is_low(ref, sent), digest)

    async def _find_or_decode(
        self, key: FileKey, sent: _Sent, tenant: Tenant, rules: ImageRules, turn: asyncio.Lock
    ) -> tuple[Picture, str]:
        """The picture of a file, and whether it was cached. It may be under way for another request of this tenant. It is given up when
        nobody waits for it, unless it is being decoded.

        The pictures of a request have their `turn` until they have memory. One that is cached may lose its place to those before it.
        """
        flight: _Flight | None = None
        try:
            async with turn:
                picture = self.cache.get(key)
                if picture is not None:
                    self._cache(key, picture)
                    return picture, "cached"
                flight = self._join(key, sent, tenant, rules)
                await flight.has_memory.wait()
            return await asyncio.shield(flight.task), "decoded"
        finally:
            if flight is not None:
                self._leave(key, flight)
            del flight

    def _join(self, key: FileKey, sent: _Sent, tenant: Tenant, rules: ImageRules) -> _Flight:
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight()
            flight.task = asyncio.create_task(self._decode(flight, key, sent, tenant, rules))
            flight.task.add_done_callback(partial(self._land, key, flight))
        flight.waiters += 1
        return flight

    def _leave(self, key: FileKey, flight: _Flight) -> None:
        flight.waiters -= 1
        if not flight.waiters and not flight.has_begun:
            flight.task.cancel()
            self._land(key, flight)

    def _land(self, key: FileKey, flight: _Flight, task: asyncio.Task[Picture] | None = None) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        flight.has_memory.set()
        if task is not None and not task.cancelled():
            # Perhaps nobody waits for it any more.
            task.exception()

    async def _decode(self, flight: _Flight, key: FileKey, sent: _Sent, tenant: Tenant, rules: ImageRules) -> Picture:
        share = Share(tenant.lane, tenant.weight)
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                await self._take(share, _decoding_bytes(sent))
                flight.has_memory.set()
                decoding = await self.decoders.begin(sent.file, sent.header, key.is_low, rules, tenant.lane, tenant.weight)
            flight.has_begun = True
            answer = await decoding
            return self._keep(key, answer, share, rules)
        except BaseException as error:
            self.memory.release(share)
            if isinstance(error, TimeoutError):
                raise self._no_room() from None
            raise
        finally:
            del flight

    async def _take(self, share: Share, amount: int) -> None:
        """Takes memory: what is free, then that of the cache; then it waits."""
        while self.memory.used + amount > self.memory.total and self.cache.evict():
            self._forget_dropped()
            # Freeing the largest pictures takes 10 ms each.
            await asyncio.sleep(0)
        if not self.memory.take(share, amount):
            await self.memory.wait(share, amount)

    async def _take_fetched(self, share: Share, amount: int) -> None:
        try:
            async with asyncio.timeout(MAX_FETCH_WAIT_SECONDS):
                await self._take(share, amount)
        except TimeoutError:
            raise self._no_room() from None

    def _no_room(self) -> RequestError:
        message = f"the server reads too many images now; its memory for them is {self.memory.total:,} bytes (--media-memory)"
        return RequestError(message, code="overloaded", status=503, limit="media_memory")

    def _keep(self, key: FileKey, answer: Answer, share: Share, rules: ImageRules) -> Picture:
        """There is one picture of each name. Its memory is in use until nobody holds it. Raises RequestError."""
        if isinstance(answer, Refused):
            raise RequestError(answer.reason, code="invalid_image", status=_STATUS.get(answer.why, 400))
        done, pixels = answer
        name = picture_name(done.content, key, done.seal)
        picture = self._alive.get(name)
        if picture is None:
            layout = families.layout(rules, name, done.size)
            picture = self._alive[name] = Picture(layout, layout.size, pixels)
            self.memory.settle(share, picture.memory)
            self.held_bytes += picture.memory
            weakref.finalize(picture, self._drop, asyncio.get_running_loop(), share, picture.memory).atexit = False
        else:
            self.memory.release(share)
        self._cache(key, picture)
        return picture

    def _cache(self, key: FileKey, picture: Picture) -> None:
        """Unless somebody waits for its memory: a request that ends would not free it."""
        if not self.memory.waiting:
            self.cache.put(key, picture)

    def _drop(self, loop: asyncio.AbstractEventLoop, share: Share, size: int) -> None:
        """Runs when nobody holds a picture any more: in any thread, in the middle of anything."""
        self._dropped.append((share, size))
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._forget_dropped)

    def _forget_dropped(self) -> None:
        while self._dropped:
            share, size = self._dropped.popleft()
            self.held_bytes -= size
            self.memory.release(share)

    def check_integrity(self) -> None:
        """Raises AssertionError unless all memory in use belongs to a picture. For a time when nothing is being read."""
        self._forget_dropped()
        assert not self._flights
        assert self.memory.used == self.held_bytes == sum(picture.memory for picture in self._alive.values())
        self.memory.check_integrity()
        self.decoders.turns.check_integrity()
        self.cache.check_integrity()


class _Sent(NamedTuple):
    """A file that is here, within the limits."""

    file: ImageFile
    header: Header


class _Remote:
    """A file that must be fetched, and the memory that it takes. `images` need it still."""

    def __init__(self, url: str, share: Share) -> None:
        self.url = url
        self.share = share
        self.images = 0
        self.fetching: asyncio.Task[_Sent] | None = None


class _Flight:
    """A picture that is being made, for all requests that wait for it."""

    task: asyncio.Task[Picture]

    def __init__(self) -> None:
        self.waiters = 0
        self.has_memory = asyncio.Event()
        """Or it has failed."""
        self.has_begun = False
        """It is being decoded, which cannot be stopped."""


class _Needs:
    """The memory that the pictures of one request take together: each is held until the request ends. Without bounds of its own, a request
    that fits would wait for itself.

    The pictures take their memory one after the other, in the order in which they are added: `turn`. The files that are being fetched, or
    wait to be decoded, take at most half of what the pictures that came with the request leave, or are one: `fetches`.
    """

    def __init__(self, total: int, max_file: int) -> None:
        self._total = total
        self._max_file = max_file
        self._held = 0
        self._known: set[FileKey] = set()
        self.turn = asyncio.Lock()

    @cached_property
    def fetches(self) -> asyncio.Semaphore:
        """The first one asks when the pictures that came with the request have been added."""
        return asyncio.Semaphore(max((self._total - self._held) // 2 // self._max_file, 1))

    def add(self, key: FileKey, kept: int, decoding: int, fetched: int = 0) -> None:
        """`fetched` is held while it is decoded. Raises RequestError if it does not fit beside those before it."""
        if key in self._known:
            return
        others, most = self._held + fetched, max(decoding, kept)
        # While nothing else is held, a picture never waits.
        if others and others + most > self._total:
            message = f"the images of this request need {others + most:,} bytes of memory at once"
            limit = f"expected at most {self._total:,} (--media-memory)"
            raise RequestError(f"{message}: {limit}", code="image_too_large", limit="media_memory")
        self._known.add(key)
        self._held += kept


async def _all_of(readings: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """All results. After an error the others are cancelled."""
    if len(readings) == 1:
        return [await readings[0]]
    try:
        first: BaseException | None = None
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(reading) for reading in readings]
        except BaseExceptionGroup as errors:
            # The frame of the group refers to them, too.
            first = errors.with_traceback(None).exceptions[0]
        if first is not None:
            raise first
        return [task.result() for task in tasks]
    finally:
        del first, group, tasks


def _is_low(ref: ImageRef, sent: _Sent) -> bool:
    """Whether it is shrunk."""
    return ref.detail == "low" and max(sent.header.width, sent.header.height) > LOW_PIXELS


def _decoding_bytes(sent: _Sent) -> int:
    """An estimate of what decoding takes."""
    return 2 * sent.file.stored + BYTES_PER_PIXEL * sent.header.pixels + PICTURE_BYTES


def _kept_bytes(ref: ImageRef, sent: _Sent, rules: ImageRules) -> int:
    """What the picture takes when it is decoded. 0 if the model's processor will refuse it."""
    size = sent.header.width, sent.header.height
    try:
        width, height = families.layout(rules, b"", shrunk_size(size) if _is_low(ref, sent) else size).size
    except RequestError:
        return 0
    return 3 * width * height + PICTURE_BYTES


def _passing_bytes(ref: ImageRef, source: _Sent | _Remote, rules: ImageRules) -> int:
    """What decoding takes beyond that. 0 if it is not here yet."""
    return max(_decoding_bytes(source) - _kept_bytes(ref, source, rules), 0) if isinstance(source, _Sent) else 0


def picture_name(content: bytes, key: FileKey, seal: bytes) -> bytes:
    """The name of a picture with this content: the pixels that the model gets are a function of what is hashed, and of nothing else."""
    how = msgspec.msgpack.encode((content, key.rules, key.is_low))
    return blake2b(how, digest_size=IMAGE_NAME_BYTES - SEAL_BYTES, key=key.root, person=b"picture").digest() + seal
