"""The store that several front ends share: bindings and membership in Redis. While Redis is down, each front end works alone."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError

from penstock.config.setting import without_password
from penstock.router.affinity import Binding, Claim, owner_key, session_key
from penstock.wire.errors import ConfigError

log = logging.getLogger(__name__)

CALL_SECONDS = 0.5
# The time limit of a call runs in this many parts, one timer after the other. A process that was paused for a while then still looks
# for the answer before it gives up: the pause uses up one part at most.
PARTS_PER_CALL = 5
# An answer is slow when this many parts pass before it. After MAX_SLOW more slow answers than others, Redis counts as lost.
SLOW_PARTS = 2
MAX_SLOW = 16
PROBE_SECONDS = 1.0
MAX_CALLS_AT_ONCE = 32
SWEEP = 1000
# uvloop raises RuntimeError for a connection that was just closed.
FAILURES = (RedisError, OSError, TimeoutError, RuntimeError, msgspec.DecodeError)

_FUNCTIONS = ("claim", "rebind", "renew", "release", "sweep_owner", "next_epoch", "register", "deregister", "members")

Answer = TypeVar("Answer")


class RedisStore:
    """An AffinityStore and the list of workers, shared by all processes with the same URL and prefix.

    After `start` no method raises. When Redis fails, is missing or takes longer than CALL_SECONDS, one error is logged, and every call
    answers at once as if this process were alone: `get` and the lists find nothing, claims and rebinds succeed and are not stored,
    renewals and releases succeed, members are unknown. Epochs then come from this process's clock. A call that was cut off may have
    been carried out. Redis also counts as failed when its answers are slow again and again.

    At most MAX_CALLS_AT_ONCE calls are under way. No call takes longer than CALL_SECONDS, with its wait for a turn. If it waited for
    most of that time, only this call is answered as if this process were alone.

    A probe notices within about PROBE_SECONDS that Redis fails, or is back and fast. If Redis lost a binding meanwhile, its next renewal
    returns False.
    """

    def __init__(self, url: str, prefix: str = "penstock:", probe_seconds: float = PROBE_SECONDS) -> None:
        """Raises ConfigError for a wrong URL."""
        self._shown = without_password(url)
        self._prefix = prefix
        self._probe_seconds = probe_seconds
        self._is_available = False
        self._lost_at = 0.0
        self._epoch = 0
        self._probing: asyncio.Task[None] | None = None
        self._turns = asyncio.Semaphore(MAX_CALLS_AT_ONCE)
        # How many more answers than others were slow.
        self._slow = 0
        self._decoder = msgspec.json.Decoder(Binding)
        try:
            # Time limits are set with _TimeLimit.
            self._redis: Any = Redis.from_url(
                url, protocol=2, socket_timeout=None, socket_connect_timeout=None, retry=Retry(NoBackoff(), 0)
            )
        except ValueError:
            # Without the error's own text: it may quote the URL.
            raise self._unusable("expected a redis://, rediss:// or unix:// URL") from None
        functions = Path(__file__).with_suffix(".lua").read_text(encoding="utf-8")
        # Each calls a function of redis_store.lua, as one atomic step of Redis.
        self._scripts: dict[str, Any] = {name: self._redis.register_script(f"{functions}return {name}()") for name in _FUNCTIONS}

    async def start(self) -> None:
        """Connects. If Redis cannot be reached, that is logged and the service starts without it.

        Raises ConfigError for a wrong password or unknown options.
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
            raise self._unusable("it has unknown options") from None
        self._probing = asyncio.create_task(self._probe(), name="probe of the store")

    async def close(self) -> None:
        """Ends the probe and the connections. Calls after it are answered as without a Redis."""
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
        return await self._call(None, self._decode, self._redis.hget, self._binding(key), "binding")

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        assert owner is None or key == session_key(owner, binding.model, binding.session)
        arguments = [*self._bound(binding, seconds, owner), "" if quota is None else quota]
        return await self._call(Claim(binding, won=True), self._claimed, self._scripts["claim"], [self._binding(key)], arguments)

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        assert owner is None or key == session_key(owner, binding.model, binding.session)
        arguments = [*self._bound(binding, seconds, owner), old_epoch]
        return await self._call(binding, self._decoder.decode, self._scripts["rebind"], [self._binding(key)], arguments)

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        """Without a Redis: True."""
        return await self._call(True, bool, self._scripts["renew"], [self._binding(key)], [epoch, _milliseconds(seconds)])

    async def release(self, key: str, epoch: int) -> bool:
        """Without a Redis: True. The binding then ends with its time."""
        return await self._call(True, bool, self._scripts["release"], [self._binding(key)], [epoch])

    async def list_sessions(self, owner: str, limit: int, after: str = "") -> list[Binding]:
        return await self._call([], list, self._list, owner, limit, after)

    async def next_epoch(self) -> int:
        """Without a Redis: from this process's clock."""
        given = await self._call(0, int, self._scripts["next_epoch"], [self._prefix + "epoch"], [self._epoch])
        epoch = given or max(self._epoch + 1, time.time_ns() // 1000)
        self._epoch = max(self._epoch, epoch)
        return epoch

    async def register(self, name: str, address: str, seconds: float) -> bool:
        """The worker is a member for this many seconds, instead of any other of that name. False: Redis is down."""
        return await self._call(False, lambda _: True, self._scripts["register"], self._workers(), [name, address, _milliseconds(seconds)])

    async def deregister(self, name: str, address: str) -> None:
        """Removes the worker, unless one at another address has taken the name."""
        await self._call(None, lambda _: None, self._scripts["deregister"], self._workers(), [name, address])

    async def members(self) -> dict[str, str] | None:
        """Addresses by worker name; None while Redis is down."""
        return await self._call(None, _as_members, self._scripts["members"], self._workers())

    async def _list(self, owner: str, limit: int, after: str) -> list[Binding]:
        index = self._index(owner)
        while await self._scripts["sweep_owner"]([index], [SWEEP]) == SWEEP:
            pass
        found: list[Binding] = []
        # UTF-8 never has the byte 255, so this sorts after the id with any model.
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

    async def _call(
        self, fallback: Answer, decode: Callable[[Any], Answer], command: Callable[..., Awaitable[Any]], *arguments: Any
    ) -> Answer:
        """The decoded answer of Redis; `fallback` while it is lost."""
        if not self.is_available:
            return fallback
        called_at: int | None = None
        try:
            async with _TimeLimit() as limit, self._turns:
                # It may have been lost while we waited for our turn.
                if not self._is_available:
                    return fallback
                called_at = limit.parts
                answer = await command(*arguments)
                self._answered(limit.parts - called_at)
            return decode(answer)
        except FAILURES as error:
            # A call that waited for its turn most of the time says nothing about Redis.
            if not isinstance(error, TimeoutError) or (called_at is not None and limit.parts - called_at >= SLOW_PARTS):
                self._lose(error)
            return fallback

    def _answered(self, parts: int) -> None:
        """Redis answered, after this many parts of the time limit."""
        self._slow = max(0, self._slow + (1 if parts >= SLOW_PARTS else -1))
        if self._slow >= MAX_SLOW:
            self._lose(TimeoutError(f"it answers, but takes over {CALL_SECONDS * SLOW_PARTS / PARTS_PER_CALL:g} s"))

    def _decode(self, held: bytes | None) -> Binding | None:
        return None if held is None else self._decoder.decode(held)

    def _claimed(self, answer: tuple[int, bytes | None]) -> Claim:
        won, held = answer
        return Claim(self._decode(held), bool(won))

    def _lose(self, error: BaseException) -> None:
        if not self._is_available:
            return
        self._is_available = False
        self._lost_at = time.monotonic()
        log.error(
            "the store at %s is lost: %s. Until it is back, sessions and affinity are neither shared nor remembered",
            self._shown,
            _reason(error),
        )

    def _regain(self) -> None:
        if not self._is_available:
            self._is_available = True
            self._slow = 0
            log.warning("the store at %s is back after %.1f s", self._shown, time.monotonic() - self._lost_at)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(self._probe_seconds)
            try:
                parts = await self._try()
            except FAILURES as error:
                self._lose(error)
                # New connections look up the host again: it may have moved.
                with suppress(*FAILURES):
                    async with _TimeLimit():
                        await self._redis.connection_pool.disconnect(inuse_connections=False)
            else:
                self._answered(parts)
                if parts < SLOW_PARTS:
                    self._regain()

    async def _try(self) -> int:
        """Writes a key: a Redis that is full or has become a replica can be read but not written. Returns the parts that it took."""
        async with _TimeLimit() as limit:
            await self._redis.set(self._prefix + "probe", "", px=1000)
        return limit.parts

    def _unusable(self, reason: str) -> ConfigError:
        return ConfigError(f"--store {self._shown} cannot be used: {reason}")

    def _binding(self, key: str) -> str:
        return f"{self._prefix}binding:{key}"

    def _index(self, owner: str) -> str:
        return f"{self._prefix}owner:{owner_key(owner)}"

    def _workers(self) -> list[str]:
        return [f"{self._prefix}workers", f"{self._prefix}workers:ends"]

    def _bound(self, binding: Binding, seconds: float, owner: str | None) -> list[str | int | bytes]:
        index = "" if owner is None else self._index(owner)
        # Ids have no zero byte, and it sorts before all their bytes.
        name = f"{binding.session}\0{binding.model}"
        return [binding.epoch, msgspec.json.encode(binding), _milliseconds(seconds), index, name]


class _TimeLimit:
    """Raises TimeoutError inside after CALL_SECONDS. `parts` counts those that have passed. Raises CancelledError for a cancellation
    that was swallowed: `asyncio.wait_for`, which the library uses, may swallow one before Python 3.12."""

    def __init__(self) -> None:
        self.parts = 0
        self._loop = asyncio.get_running_loop()
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._cancellations = task.cancelling()
        self._timer = self._loop.call_later(CALL_SECONDS / PARTS_PER_CALL, self._end_part)
        await self._limit.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._timer.cancel()
        try:
            await self._limit.__aexit__(kind, error, traceback)
        finally:
            if self._task.cancelling() > self._cancellations:
                raise asyncio.CancelledError

    def _end_part(self) -> None:
        self.parts += 1
        if self.parts < PARTS_PER_CALL:
            self._timer = self._loop.call_later(CALL_SECONDS / PARTS_PER_CALL, self._end_part)
        else:
            self._limit.reschedule(self._loop.time())


def _as_members(flat: list[bytes]) -> dict[str, str]:
    names = [item.decode(errors="replace") for item in flat]
    return dict(zip(names[::2], names[1::2], strict=True))


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _milliseconds(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
