"""What several front ends share: affinity and membership in Redis, and what becomes of a request while there is none."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from penstock.cluster import redis_scripts as scripts
from penstock.router.affinity import Binding, Claim, owner_key, session_key
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

CALL_SECONDS = 0.5
# The time of a call passes in so many parts, each of which begins when the one before has been noticed: a process that was kept from
# running for a while has not waited for Redis meanwhile, and looks first whether the answer has come.
PARTS_OF_A_CALL = 5
PROBE_SECONDS = 1.0
CALLS_AT_ONCE = 32
SWEEP = 1000
# A RuntimeError is uvloop's, for a connection that was closed a moment ago.
FAILURES = (RedisError, OSError, TimeoutError, RuntimeError, msgspec.DecodeError)

Answer = TypeVar("Answer")


class RedisStore:
    """An AffinityStore and a Directory that every process with the same URL and prefix shares.

    Once it is started, nothing raises. When Redis fails, is not there yet or takes longer than
    CALL_SECONDS, that is logged once, as an error, and every call answers at once as if this process were alone: nothing is known,
    every claim is won and not remembered, what was bound is still ours, and the members are unknown. Epochs come from this
    process's clock then. A call that was cut off may have been carried out.

    A probe notices, within about PROBE_SECONDS, that Redis fails while nobody asks, and that it is back. What it has forgotten
    meanwhile is gone: the next renewal says so.
    """

    def __init__(self, url: str, prefix: str = "penstock:", probe_seconds: float = PROBE_SECONDS) -> None:
        """Raises ConfigError for what is no URL of a Redis."""
        self._shown = without_password(url)
        self._prefix = prefix
        self._probe_seconds = probe_seconds
        self._is_available = False
        self._lost_at = 0.0
        self._epoch = 0
        self._probing: asyncio.Task[None] | None = None
        # Whoever waits for a turn does not use up its time: many calls at once are no reason to believe that Redis is gone.
        self._turns = asyncio.Semaphore(CALLS_AT_ONCE)
        self._decoder = msgspec.json.Decoder(Binding)
        try:
            # The time limits are ours, below.
            self._redis: Any = Redis.from_url(
                url, protocol=2, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0)
            )
        except ValueError:
            # Not what it says: that may quote the URL.
            raise self._unusable("it is no redis://, rediss:// or unix:// URL") from None
        self._claim = self._script(scripts.CLAIM)
        self._rebind = self._script(scripts.REBIND)
        self._renew = self._script(scripts.RENEW)
        self._release = self._script(scripts.RELEASE)
        self._sweep_owner = self._script(scripts.SWEEP_OWNER)
        self._next_epoch = self._script(scripts.NEXT_EPOCH)
        self._register = self._script(scripts.REGISTER)
        self._deregister = self._script(scripts.DEREGISTER)
        self._members = self._script(scripts.MEMBERS)

    async def start(self) -> None:
        """Begins to use it, or to wait for it: one that cannot be reached is said, and must not keep a service from coming back.

        Raises ConfigError for a password that is not taken, and for options that are not understood.
        """
        self._is_available = True
        try:
            await self._try()
        except FAILURES as error:
            if isinstance(error, AuthenticationError) or isinstance(error.__cause__, AuthenticationError):
                await self._redis.aclose()
                raise self._unusable(_reason(error)) from None
            self._lose(error)
        except (TypeError, ValueError):
            await self._redis.aclose()
            raise self._unusable("it has options that are not understood") from None
        self._probing = asyncio.create_task(self._probe(), name="probe of the store")

    async def close(self) -> None:
        """Ends the probe and the connections. Calls are answered after it, too, as without a Redis."""
        self._is_available = False
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.gather(self._probing, return_exceptions=True)
            self._probing = None
        await self._redis.aclose()

    @property
    def is_available(self) -> bool:
        return self._is_available

    async def get(self, key: str) -> Binding | None:
        async def ask() -> Binding | None:
            held = await self._redis.hget(self._binding(key), "binding")
            return None if held is None else self._decoder.decode(held)

        return await self._call(ask, None)

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        async def ask() -> Claim:
            arguments = [*self._bound(binding, seconds, owner), "" if quota is None else quota]
            won, held = await self._claim([self._binding(key)], arguments)
            return Claim(None if held is None else self._decoder.decode(held), bool(won))

        assert owner is None or key == session_key(owner, binding.model, binding.session)
        return await self._call(ask, Claim(binding, won=True))

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        async def ask() -> Binding:
            return self._decoder.decode(await self._rebind([self._binding(key)], [*self._bound(binding, seconds, owner), old_epoch]))

        assert owner is None or key == session_key(owner, binding.model, binding.session)
        return await self._call(ask, binding)

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        async def ask() -> bool:
            return bool(await self._renew([self._binding(key)], [epoch, _milliseconds(seconds)]))

        return await self._call(ask, fallback=True)

    async def release(self, key: str, epoch: int) -> bool:
        """True also without a Redis, where it ends with its time."""

        async def ask() -> bool:
            return bool(await self._release([self._binding(key)], [epoch]))

        return await self._call(ask, fallback=True)

    async def list_sessions(self, owner: str, limit: int, after: str = "") -> list[Binding]:
        return await self._call(lambda: self._list(owner, limit, after), [])

    async def next_epoch(self) -> int:
        async def ask() -> int:
            return int(await self._next_epoch([self._prefix + "epoch"], [self._epoch]))

        epoch = await self._call(ask, 0) or max(self._epoch + 1, time.time_ns() // 1000)
        self._epoch = max(self._epoch, epoch)
        return epoch

    async def register(self, name: str, address: str, seconds: float) -> bool:
        """A member for so many seconds, in place of any of that name. False: nobody knows, for Redis is down."""

        async def ask() -> bool:
            await self._register(self._workers(), [name, address, _milliseconds(seconds)])
            return True

        return await self._call(ask, fallback=False)

    async def deregister(self, name: str, address: str) -> None:
        """No member any more, unless one at another address has taken the name."""

        async def ask() -> None:
            await self._deregister(self._workers(), [name, address])

        await self._call(ask, None)

    async def members(self) -> dict[str, str] | None:
        """The addresses by name; None when that cannot be known now."""

        async def ask() -> dict[str, str] | None:
            flat = [item.decode(errors="replace") for item in await self._members(self._workers())]
            return dict(zip(flat[::2], flat[1::2], strict=True))

        return await self._call(ask, None)

    async def _list(self, owner: str, limit: int, after: str) -> list[Binding]:
        index = self._index(owner)
        while await self._sweep_owner([index], [SWEEP]) == SWEEP:
            pass
        found: list[Binding] = []
        # No text has the byte 255, so this is after the id with any model.
        start = b"(" + after.encode() + b"\0\xff" if after else b"-"
        while len(found) < limit:
            wanted = limit - len(found)
            names = await self._redis.zrangebylex(f"{index}:names", start, "+", start=0, num=wanted)
            pipeline = self._redis.pipeline(transaction=False)
            for name in names:
                session, _, model = name.decode().partition("\0")
                pipeline.hget(self._binding(session_key(owner, model, session)), "binding")
            found += [self._decoder.decode(held) for held in await pipeline.execute() if held is not None]
            if len(names) < wanted:
                break
            start = b"(" + names[-1]
        return found

    async def _call(self, ask: Callable[[], Awaitable[Answer]], fallback: Answer) -> Answer:
        if not self._is_available:
            return fallback
        async with self._turns:
            return await self._ask(ask, fallback)

    async def _ask(self, ask: Callable[[], Awaitable[Answer]], fallback: Answer) -> Answer:
        # It may have been lost while we waited for our turn.
        if not self._is_available:
            return fallback
        try:
            return await _in_time(ask())
        except FAILURES as error:
            self._lose(error)
            return fallback

    def _lose(self, error: BaseException) -> None:
        if not self._is_available:
            return
        self._is_available = False
        self._lost_at = time.monotonic()
        log.error(
            "the store at %s is lost: %s. Until it is back, sessions and affinity are not shared, and not remembered",
            self._shown,
            _reason(error),
        )

    def _regain(self) -> None:
        if not self._is_available:
            self._is_available = True
            log.warning("the store at %s is back, after %.1f s", self._shown, time.monotonic() - self._lost_at)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._probe_seconds)
            try:
                await self._try()
            except FAILURES as error:
                self._lose(error)
                # The next attempt shall ask again where the host is: it may have moved.
                with suppress(*FAILURES):
                    await _in_time(self._redis.connection_pool.disconnect(inuse_connections=False))
            else:
                self._regain()

    async def _try(self) -> None:
        """Writes, for a Redis that is full, or has become a replica, can be read all the same."""
        await _in_time(self._redis.set(self._prefix + "probe", "", px=1000))

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(f"--store {self._shown} cannot be used: {reason}")

    def _script(self, body: str) -> Any:
        return self._redis.register_script(scripts.PRELUDE + body)

    def _binding(self, key: str) -> str:
        return f"{self._prefix}binding:{key}"

    def _index(self, owner: str) -> str:
        return f"{self._prefix}owner:{owner_key(owner)}"

    def _workers(self) -> list[str]:
        return [f"{self._prefix}workers", f"{self._prefix}workers:ends"]

    def _bound(self, binding: Binding, seconds: float, owner: str | None) -> list[str | int | bytes]:
        index = "" if owner is None else self._index(owner)
        # Ids have no zero byte, and it sorts before all that they have.
        name = f"{binding.session}\0{binding.model}"
        return [binding.epoch, msgspec.json.encode(binding), _milliseconds(seconds), index, name]


async def _in_time(answer: Awaitable[Answer]) -> Answer:
    """Raises TimeoutError after CALL_SECONDS of waiting. A cancellation that was lost on the way is made up for: `asyncio.wait_for`,
    which the library uses, may swallow one before Python 3.12, and then the caller would run on."""
    task = asyncio.current_task()
    assert task is not None
    cancellations = task.cancelling()
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def wait_on(parts: int) -> None:
        nonlocal timer
        if parts:
            timer = loop.call_later(CALL_SECONDS / PARTS_OF_A_CALL, wait_on, parts - 1)
        else:
            limit.reschedule(loop.time())

    try:
        async with asyncio.timeout(None) as limit:
            wait_on(PARTS_OF_A_CALL)
            return await answer
    finally:
        if timer is not None:
            timer.cancel()
        if task.cancelling() > cancellations:
            raise asyncio.CancelledError


def without_password(url: str) -> str:
    """A URL as it may be shown: no user, no password, no query. What is too odd to be sure is not shown at all."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    if not parts.scheme or "@" in parts.path + parts.query + parts.fragment or not (host or parts.scheme == "unix"):
        return "***"
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{port}{parts.path}"


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
