"""Both stores have the same contract. Processes that share a Redis agree, work without it, and use it again when it is back."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, TypeVar

import pytest
from redis.asyncio import Redis

from penstock.cluster.membership import Discovery, Registration
from penstock.cluster.redis_store import CALL_SECONDS, MAX_CALLS_AT_ONCE, RedisStore
from penstock.config.setting import without_password
from penstock.router.affinity import AffinityStore, Binding, Claim, MemoryStore, affinity_key, session_key
from penstock.wire.address import Address, TcpAddress, parse_address
from penstock.wire.errors import ConfigError
from proxy import Proxy
from redis_server import RedisServer

PROBE = 0.02
OWNER = "owner"

Answer = TypeVar("Answer")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[RedisServer]:
    """For a test that kills it."""
    with RedisServer() as running:
        yield running


@asynccontextmanager
async def redis_store(url: str, prefix: str = "penstock:", probe_seconds: float = PROBE) -> AsyncIterator[RedisStore]:
    store = RedisStore(url, prefix, probe_seconds)
    await store.start()
    try:
        yield store
    finally:
        await store.close()


Stores = Callable[[int], AbstractAsyncContextManager[list[AffinityStore]]]


@pytest.fixture(params=["memory", "redis"])
def stores(request: pytest.FixtureRequest) -> Stores:
    """Makes stores for several front ends that share their bindings. Memory: one store for all."""

    @asynccontextmanager
    async def in_memory(count: int) -> AsyncIterator[list[AffinityStore]]:
        store = MemoryStore()
        yield [store] * count
        store.check_integrity()

    if request.param == "memory":
        return in_memory
    server: RedisServer = request.getfixturevalue("server")

    @asynccontextmanager
    async def in_redis(count: int) -> AsyncIterator[list[AffinityStore]]:
        prefix = f"{os.urandom(8).hex()}:"
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(redis_store(server.url, prefix)) for _ in range(count)]
            await check_redis(server.url, prefix)

    return in_redis


async def check_redis(url: str, prefix: str) -> None:
    """Every key has a time to live."""
    async with Redis.from_url(url) as client:
        keys = [key async for key in client.scan_iter(match=prefix + "*", count=1000)]
        lives = [await client.pttl(key) for key in keys]
    # -2: gone since; -1: for ever.
    assert -1 not in lives, keys


async def until(condition: Callable[[], Awaitable[bool]], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.002)


async def until_available(store: RedisStore, is_available: bool) -> None:
    async def reached() -> bool:
        return store.is_available is is_available

    await until(reached)


def at_once(call: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a call that does not wait."""
    try:
        call.send(None)
    except StopIteration as end:
        answer: Answer = end.value
        return answer
    call.close()
    raise AssertionError("the call waits")


def bound(session: str, epoch: int, worker: str = "worker-0", model: str = "m") -> Binding:
    return Binding(session, worker, model, epoch, 300.0, 1_790_000_000.25)


def key_of(session: str, model: str = "m", owner: str = OWNER) -> str:
    return session_key(owner, model, session)


# Both stores.


async def test_the_first_claim_holds(stores: Stores) -> None:
    async with stores(2) as (one, other):
        key = key_of("s")
        assert await one.get(key) is None
        assert await one.claim(key, bound("s", 1), 60.0, OWNER) == Claim(bound("s", 1), won=True)
        assert await other.claim(key, bound("s", 2, "worker-1"), 60.0, OWNER) == Claim(bound("s", 1), won=False)
        assert await other.get(key) == bound("s", 1)
        assert one.is_available
        assert other.is_available


async def test_values_come_back_unchanged(stores: Stores) -> None:
    async with stores(2) as (one, other):
        binding = Binding('ü/"\\ 世界', "wörker:1 \n", "org/model", (1 << 62) + 1, 0.1, 1_790_000_000.123456)
        key = session_key("geheim ü", "org/model", binding.session)
        await one.claim(key, binding, 60.0, "geheim ü")
        assert await other.get(key) == binding
        assert await other.list_sessions("geheim ü", 5) == [binding]
        assert not await other.renew(key, binding.epoch - 1, 60.0)
        assert await other.renew(key, binding.epoch, 60.0)


async def test_a_late_renewal_or_release_touches_no_later_incarnation(stores: Stores) -> None:
    async with stores(2) as (one, other):
        key = key_of("s")
        await one.claim(key, bound("s", 1), 60.0, OWNER)
        assert await one.release(key, 1)
        assert not await one.release(key, 1)
        assert not await other.renew(key, 1, 60.0)
        await other.claim(key, bound("s", 2), 60.0, OWNER)
        assert not await one.release(key, 1)
        assert not await one.renew(key, 1, 60.0)
        assert await one.get(key) == bound("s", 2)
        assert [binding.epoch for binding in await one.list_sessions(OWNER, 9)] == [2]


async def test_only_the_first_rebinds(stores: Stores) -> None:
    async with stores(2) as (one, other):
        key = key_of("s")
        await one.claim(key, bound("s", 1), 60.0, OWNER)
        assert await one.rebind(key, 1, bound("s", 2, "worker-1"), 60.0, OWNER) == bound("s", 2, "worker-1")
        assert await other.rebind(key, 1, bound("s", 3, "worker-2"), 60.0, OWNER) == bound("s", 2, "worker-1")
        assert await other.list_sessions(OWNER, 9) == [bound("s", 2, "worker-1")]


async def test_rebinding_a_session_that_is_gone_makes_it_again(stores: Stores) -> None:
    async with stores(1) as (store,):
        assert await store.rebind(key_of("s"), 1, bound("s", 2), 60.0, OWNER) == bound("s", 2)
        assert await store.list_sessions(OWNER, 9) == [bound("s", 2)]
        assert (await store.claim(key_of("t"), bound("t", 3), 60.0, OWNER, quota=1)).binding is None


async def test_a_rebound_session_keeps_its_owner(stores: Stores) -> None:
    async with stores(1) as (store,):
        await store.claim(key_of("s"), bound("s", 1), 60.0, OWNER)
        await store.rebind(key_of("s"), 1, bound("s", 2), 60.0)
        assert await store.list_sessions(OWNER, 9) == [bound("s", 2)]
        assert await store.release(key_of("s"), 2)
        assert await store.list_sessions(OWNER, 9) == []
        assert (await store.claim(key_of("t"), bound("t", 3), 60.0, OWNER, quota=1)).won


async def test_a_binding_ends_by_itself_and_makes_room(stores: Stores) -> None:
    async with stores(2) as (one, other):
        await one.claim(key_of("long"), bound("long", 1), 60.0, OWNER)
        await one.claim(key_of("short"), bound("short", 1), 0.15, OWNER)
        assert (await other.claim(key_of("new"), bound("new", 2), 60.0, OWNER, quota=2)).binding is None

        async def is_gone() -> bool:
            return await other.get(key_of("short")) is None

        await until(is_gone)
        assert await other.list_sessions(OWNER, 9) == [bound("long", 1)]
        assert not await one.renew(key_of("short"), 1, 60.0)
        assert (await other.claim(key_of("new"), bound("new", 2), 60.0, OWNER, quota=2)).won


async def test_renewing_prolongs_and_shortens(stores: Stores) -> None:
    async with stores(1) as (store,):
        await store.claim(key_of("s"), bound("s", 1), 0.1, OWNER)
        assert await store.renew(key_of("s"), 1, 60.0)
        await store.claim("other", bound("", 1), 0.15)

        async def is_gone(key: str) -> bool:
            return await store.get(key) is None

        await until(lambda: is_gone("other"))
        assert await store.list_sessions(OWNER, 9) == [bound("s", 1)]
        assert await store.get(key_of("s")) == bound("s", 1)
        assert await store.renew(key_of("s"), 1, 0.05)
        await until(lambda: is_gone(key_of("s")))
        assert await store.list_sessions(OWNER, 9) == []


async def test_the_quota_is_per_owner_and_not_for_affinity(stores: Stores) -> None:
    async with stores(1) as (store,):
        for session in "ab":
            assert (await store.claim(key_of(session), bound(session, 1), 60.0, OWNER, quota=2)).won
        assert await store.claim(key_of("c"), bound("c", 1), 60.0, OWNER, quota=2) == Claim(None, won=False)
        assert await store.get(key_of("c")) is None
        # A session that exists is not a new one.
        assert await store.claim(key_of("a"), bound("a", 2), 60.0, OWNER, quota=2) == Claim(bound("a", 1), won=False)
        assert (await store.claim(session_key("other", "m", "c"), bound("c", 1), 60.0, "other", quota=2)).won
        assert (await store.claim(affinity_key(OWNER, "m", "c"), bound("", 1), 60.0)).won
        assert await store.release(key_of("a"), 1)
        assert (await store.claim(key_of("c"), bound("c", 1), 60.0, OWNER, quota=2)).won
        assert (await store.claim(key_of("d"), bound("d", 1), 60.0, OWNER, quota=0)).binding is None


async def test_sessions_are_listed_in_pages(stores: Stores) -> None:
    names = sorted(["a", "b", "a/1", "a b", "Z", "é", "世", "𝄞", *(f"n{number}" for number in range(40))])
    async with stores(2) as (one, other):
        for name in reversed(names):
            await one.claim(key_of(name), bound(name, 1), 60.0, OWNER)
        await one.claim(session_key("other", "m", "x"), bound("x", 1), 60.0, "other")
        await one.claim(affinity_key(OWNER, "m", "x"), bound("", 1), 60.0)
        listed: list[str] = []
        while page := await other.list_sessions(OWNER, 7, listed[-1] if listed else ""):
            listed += [binding.session for binding in page]
        assert listed == names
        assert await other.list_sessions(OWNER, 3, "nothing such, but in order") == await other.list_sessions(OWNER, 3, "n9")
        assert await other.list_sessions("nobody", 9) == []


async def test_a_session_id_may_be_used_with_several_models(stores: Stores) -> None:
    async with stores(1) as (store,):
        for session, model in [("s", "m2"), ("s", "m1"), ("s2", "m1")]:
            assert (await store.claim(key_of(session, model), bound(session, 1, model=model), 60.0, OWNER)).won
        listed = [(binding.session, binding.model) for binding in await store.list_sessions(OWNER, 9)]
        assert listed == [("s", "m1"), ("s", "m2"), ("s2", "m1")]
        assert [binding.session for binding in await store.list_sessions(OWNER, 9, "s")] == ["s2"]


async def test_one_of_fifty_wins(stores: Stores) -> None:
    async with stores(2) as both:
        for attempt in range(5):
            session = f"s{attempt}"
            claims = await asyncio.gather(
                *[both[number % 2].claim(key_of(session), bound(session, number), 60.0, OWNER, quota=100) for number in range(50)]
            )
            assert sum(claim.won for claim in claims) == 1
            assert {claim.binding for claim in claims} == {next(claim.binding for claim in claims if claim.won)}


async def test_one_of_fifty_rebinds(stores: Stores) -> None:
    async with stores(2) as both:
        await both[0].claim(key_of("s"), bound("s", 1), 60.0, OWNER)
        bindings = await asyncio.gather(*[both[number % 2].rebind(key_of("s"), 1, bound("s", number), 60.0) for number in range(2, 52)])
        assert len(set(bindings)) == 1


async def test_the_quota_holds_under_a_race(stores: Stores) -> None:
    async with stores(2) as both:
        claims = await asyncio.gather(
            *[both[number % 2].claim(key_of(str(number)), bound(str(number), 1), 60.0, OWNER, quota=7) for number in range(50)]
        )
        assert sum(claim.won for claim in claims) == 7
        assert sum(claim.binding is None for claim in claims) == 43
        assert len(await both[0].list_sessions(OWNER, 100)) == 7


async def test_epochs_are_never_given_twice(stores: Stores) -> None:
    async with stores(2) as both:
        last = 0
        for _ in range(5):
            epochs = await asyncio.gather(*[store.next_epoch() for store in both for _ in range(20)])
            assert len(set(epochs)) == 40
            assert min(epochs) > last
            last = max(epochs)
        assert abs(last / 1e6 - time.time()) < 60


# Redis alone.


async def test_ended_sessions_are_swept_from_the_index(server: RedisServer) -> None:
    """More than one sweep removes, all before a live one."""
    prefix = f"{os.urandom(8).hex()}:"
    async with redis_store(server.url, prefix) as store:
        # In groups: a call whose turn does not come in time is not carried out.
        for first in range(0, 2500, 50):
            await asyncio.gather(*[store.claim(key_of(f"a{n}"), bound(f"a{n}", 1), 60.0, OWNER) for n in range(first, first + 50)])
        await store.claim(key_of("b"), bound("b", 1), 60.0, OWNER)
        for first in range(0, 2500, 50):
            await asyncio.gather(*[store.renew(key_of(f"a{n}"), 1, 0.001) for n in range(first, first + 50)])

        async def is_alone() -> bool:
            return await store.list_sessions(OWNER, 3) == [bound("b", 1)]

        await until(is_alone)
        async with Redis.from_url(server.url) as client:
            keys = [key.decode() async for key in client.scan_iter(match=prefix + "owner:*")]
            assert sorted(key.rpartition(":")[2] for key in keys) == ["ends", "names"]
            assert [await client.zcard(key) for key in keys] == [1, 1]
        await store.release(key_of("b"), 1)
        async with Redis.from_url(server.url) as client:
            assert [key async for key in client.scan_iter(match=prefix + "owner:*")] == []


async def test_epochs_go_on_when_a_clock_goes_back_or_redis_forgets(server: RedisServer) -> None:
    prefix = f"{os.urandom(8).hex()}:"
    async with redis_store(server.url, prefix) as store, Redis.from_url(server.url) as client:
        future = 8_000_000_000_000_001
        await client.set(f"{prefix}epoch", future, ex=60)
        assert await store.next_epoch() == future + 1
        await client.delete(f"{prefix}epoch")
        assert await store.next_epoch() == future + 2


async def test_prefixes_separate_stores(server: RedisServer) -> None:
    async with redis_store(server.url, "one:") as one, redis_store(server.url, "two:") as two:
        assert (await one.claim("key", bound("", 1), 60.0)).won
        assert await two.get("key") is None
        await one.register("worker-0", "unix:/a", 10.0)
        assert await two.members() == {}


async def test_a_cancelled_call_spoils_no_other(server: RedisServer) -> None:
    """The late answer of a cancelled call must not be taken for the answer of another."""
    # With a time limit of the library's own, too, which makes it lose cancellations.
    async with redis_store(f"{server.url}?socket_timeout=5", f"{os.urandom(8).hex()}:") as store:
        await store.claim("a", bound("", 1), 60.0)
        await store.claim("b", bound("", 2), 60.0)
        for turns in range(12):
            task = asyncio.create_task(store.get("a"))
            for _ in range(turns):
                await asyncio.sleep(0)
            is_cancelled = task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() == is_cancelled
            assert await store.get("b") == bound("", 2)
        assert store.is_available


async def test_thousands_of_calls_at_once_are_not_an_outage(server: RedisServer) -> None:
    """Those whose turn does not come in time go on without the store. That says nothing about Redis."""
    async with redis_store(server.url, f"{os.urandom(8).hex()}:") as store:
        await store.claim("a", bound("", 1), 60.0)
        found = await asyncio.gather(*[store.get("a") for _ in range(5000)])
        assert found[: 2 * MAX_CALLS_AT_ONCE] == [bound("", 1)] * 2 * MAX_CALLS_AT_ONCE
        assert set(found) <= {bound("", 1), None}
        assert store.is_available
        assert await store.get("a") == bound("", 1)


@asynccontextmanager
async def slow_store(server: RedisServer) -> AsyncIterator[tuple[RedisStore, Proxy]]:
    """A store behind a proxy, with one binding and all its connections open."""
    folder = tempfile.mkdtemp(prefix="proxy-")
    try:
        async with (
            Proxy(server.url.removeprefix("unix://"), f"{folder}/socket") as proxy,
            redis_store(f"unix://{proxy.path}", f"{os.urandom(8).hex()}:") as store,
        ):
            await store.claim("a", bound("", 1), 60.0)
            await asyncio.gather(*[store.get("a") for _ in range(4 * MAX_CALLS_AT_ONCE)])
            yield store, proxy
    finally:
        shutil.rmtree(folder)


async def lookups(server: RedisServer) -> int:
    async with Redis.from_url(server.url) as redis:
        return int((await redis.info("commandstats"))["cmdstat_hget"]["calls"])


async def test_a_slow_redis_is_left_alone_until_it_is_fast_again(own_server: RedisServer) -> None:
    """Each answer comes just in time. Calls that wait for their turn must not wait for those before them as well."""
    async with slow_store(own_server) as (store, proxy):
        before = await lookups(own_server)
        proxy.delay = CALL_SECONDS * 0.8
        async with asyncio.timeout(CALL_SECONDS * 6):
            found = await asyncio.gather(*[store.get("a") for _ in range(20 * MAX_CALLS_AT_ONCE)])
        assert set(found) <= {bound("", 1), None}
        assert not store.is_available
        assert await lookups(own_server) - before <= 2 * MAX_CALLS_AT_ONCE
        assert [at_once(store.get("a")) for _ in range(100)] == [None] * 100
        proxy.delay = 0.0
        await until_available(store, is_available=True)
        assert await store.get("a") == bound("", 1)


async def test_waiting_for_a_turn_is_part_of_the_time_limit(own_server: RedisServer) -> None:
    """Redis is fast enough not to be given up, and not for this many at once."""
    async with slow_store(own_server) as (store, proxy):
        proxy.delay = CALL_SECONDS * 0.16
        async with asyncio.timeout(CALL_SECONDS * 6):
            found = await asyncio.gather(*[store.get("a") for _ in range(40 * MAX_CALLS_AT_ONCE)])
        answered = found.count(bound("", 1))
        assert MAX_CALLS_AT_ONCE <= answered < len(found) / 2, "the first are answered, the last go on without"
        assert store.is_available
        assert await store.get("a") == bound("", 1)


async def test_a_single_slow_answer_is_no_outage(own_server: RedisServer) -> None:
    async with slow_store(own_server) as (store, proxy):
        proxy.delay = CALL_SECONDS * 0.8
        assert await store.get("a") == bound("", 1)
        proxy.delay = 0.0
        assert store.is_available


async def test_a_process_that_was_paused_has_not_lost_its_redis(server: RedisServer) -> None:
    async with redis_store(server.url, f"{os.urandom(8).hex()}:") as store:
        await store.claim("a", bound("", 1), 60.0)
        asked = [asyncio.create_task(store.get("a")) for _ in range(3)]
        await asyncio.sleep(0)
        # As when others have the machine: nothing runs here, while Redis answers.
        time.sleep(CALL_SECONDS * 1.2)  # noqa: ASYNC251
        assert await asyncio.gather(*asked) == [bound("", 1)] * 3
        assert store.is_available


async def test_without_redis_calls_are_answered_as_if_alone(own_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock")
    async with redis_store(own_server.url) as store:
        await store.claim(key_of("s"), bound("s", 1), 60.0, OWNER)
        before = await store.next_epoch()
        own_server.kill()
        # In the middle of use: none of them fails.
        assert await asyncio.gather(*[store.renew(key_of("s"), 1, 60.0) for _ in range(50)]) == [True] * 50
        await until_available(store, is_available=False)

        assert at_once(store.get(key_of("s"))) is None
        assert at_once(store.claim(key_of("t"), bound("t", 2), 60.0, OWNER, quota=0)) == Claim(bound("t", 2), won=True)
        assert at_once(store.rebind(key_of("s"), 7, bound("s", 3), 60.0, OWNER)) == bound("s", 3)
        assert at_once(store.renew(key_of("s"), 3, 60.0))
        assert at_once(store.release(key_of("s"), 3))
        assert at_once(store.list_sessions(OWNER, 9)) == []
        assert at_once(store.members()) is None
        assert not at_once(store.register("worker-0", "unix:/a", 10.0))
        at_once(store.deregister("worker-0", "unix:/a"))
        during = [at_once(store.next_epoch()) for _ in range(3)]
        assert before < during[0] < during[1] < during[2]

        own_server.start()
        await until_available(store, is_available=True)
        assert await store.next_epoch() > during[-1]
        assert await store.get(key_of("t")) is None
        assert not await store.renew(key_of("s"), 1, 60.0)
        assert (await store.claim(key_of("s"), bound("s", 4), 60.0, OWNER)).won
        assert await store.get(key_of("s")) == bound("s", 4)
    said = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("penstock")]
    assert [level for level, _ in said] == ["ERROR", "WARNING"], said
    assert "is lost" in said[0][1]
    assert "is back" in said[1][1]


async def test_a_loss_is_noticed_without_any_call(own_server: RedisServer) -> None:
    async with redis_store(own_server.url) as store:
        own_server.kill()
        await until_available(store, is_available=False)
        own_server.start()
        await until_available(store, is_available=True)
        own_server.kill()
        await until_available(store, is_available=False)


async def test_a_redis_that_hangs_is_waited_for_once(own_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with redis_store(own_server.url) as store, redis_store(own_server.url) as other:
        await store.claim("key", bound("", 1), 60.0)
        own_server.suspend()
        try:
            # More calls than turns. Those that waited for a turn do not wait for Redis again: they end as soon as a turn is free.
            calls = [asyncio.create_task(store.get("key")) for _ in range(200)]
            await asyncio.wait(calls[:MAX_CALLS_AT_ONCE])
            for _ in range(200):
                await asyncio.sleep(0)
            assert all(call.done() for call in calls)
            assert [call.result() for call in calls] == [None] * 200
            assert not store.is_available
            assert [at_once(store.get("key")) for _ in range(100)] == [None] * 100
        finally:
            own_server.resume()
        await until_available(store, is_available=True)
        await until_available(other, is_available=True)
        # It has forgotten nothing.
        assert await store.get("key") == bound("", 1)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) <= 2


async def test_once_redis_is_lost_queued_calls_return_at_once(own_server: RedisServer) -> None:
    async with redis_store(own_server.url, probe_seconds=60.0) as store:
        own_server.suspend()
        try:
            waiting = [asyncio.create_task(store.get("key")) for _ in range(MAX_CALLS_AT_ONCE)]
            await asyncio.sleep(0)
            assert store._turns.locked()
            store._lose(TimeoutError("another call came first"))
            assert await store.get("key") is None
            assert not any(task.done() for task in waiting)
            await asyncio.wait(waiting)
        finally:
            own_server.resume()


async def test_a_redis_that_takes_no_writes_is_lost_until_it_does(own_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """A replica or a full Redis answers a ping but takes no writes."""
    async with redis_store(own_server.url) as store, Redis.from_url(own_server.url) as client:
        await client.config_set("maxmemory", "1")
        assert await store.claim("key", bound("", 1), 60.0) == Claim(bound("", 1), won=True)
        assert not store.is_available

        # It stays lost over many probes, and is not said to be back in between.
        async def probed() -> bool:
            return int((await client.info("errorstats")).get("errorstat_OOM", {"count": 0})["count"]) > 10

        await until(probed)
        assert not store.is_available
        await client.config_set("maxmemory", "0")
        await until_available(store, is_available=True)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_a_broken_binding_fails_no_request(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    prefix = f"{os.urandom(8).hex()}:"
    async with redis_store(server.url, prefix) as store, Redis.from_url(server.url) as client:
        await client.hset(f"{prefix}binding:key", mapping={"epoch": "1", "binding": '{"session": 5'})
        assert await store.get("key") is None
        await client.delete(f"{prefix}binding:key")
        await until_available(store, is_available=True)
    assert "ERROR" in [record.levelname for record in caplog.records]


async def test_calls_after_close_are_answered(own_server: RedisServer) -> None:
    store = RedisStore(own_server.url, probe_seconds=PROBE)
    await store.start()
    calls = [asyncio.create_task(store.get("key")) for _ in range(100)]
    await asyncio.sleep(0)
    await store.close()
    assert await asyncio.gather(*calls) == [None] * 100
    assert await store.renew("key", 1, 60.0)
    assert not store.is_available
    await store.close()
    async with Redis.from_url(own_server.url) as client:

        async def is_alone() -> bool:
            return len(await client.client_list()) == 1

        await until(is_alone)


@pytest.mark.parametrize("url", ["http://localhost:6379", "localhost:6379", "", "redis://localhost:port", "redis://localhost:99999"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--store .* cannot be used: expected a redis://, rediss:// or unix:// URL"):
        RedisStore(url)


async def test_unknown_options_are_refused_at_the_start() -> None:
    store = RedisStore("redis://127.0.0.1:1/?no_such_option=1")
    with pytest.raises(ConfigError, match=r"--store redis://127.0.0.1:1/ cannot be used: it has unknown options"):
        await store.start()
    await store.close()


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/at/all", "rediss://127.0.0.1:1/0"])
async def test_a_redis_that_cannot_be_reached_is_logged_and_waited_for(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with redis_store(url) as store:
        assert not store.is_available
        assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
        assert f"the store at {url} is lost" in caplog.text
        assert await store.get("key") is None
        assert (await store.claim("key", bound("", 1), 60.0)).won


async def test_a_redis_that_comes_later_is_used() -> None:
    with RedisServer() as server:
        server.kill()
        async with redis_store(server.url) as store:
            assert not store.is_available
            server.start()
            await until_available(store, is_available=True)
            assert (await store.claim("key", bound("", 1), 60.0)).won
            assert not (await store.claim("key", bound("", 2), 60.0)).won


async def test_only_redis_sees_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with RedisServer("--requirepass", "hunter2") as server:
        async with redis_store(server.url_with_password("hunter2")) as store:
            assert (await store.claim("key", bound("", 1), 60.0)).won
            server.kill()
            await until_available(store, is_available=False)
            server.start()
            await until_available(store, is_available=True)
        assert "***@" in caplog.text
        for password in ("wrong-hunter2", ""):
            with pytest.raises(ConfigError, match="--store") as refused:
                await RedisStore(server.url_with_password(password)).start()
            assert "hunter2" not in str(refused.value)
            assert refused.value.__suppress_context__
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost", "redis://localhost"),
        ("rediss://user:hunter2@redis.example:6380/3?ssl_cert_reqs=none", "rediss://***@redis.example:6380/3"),
        ("redis://:hunter2@[::1]:6379/0", "redis://***@::1:6379/0"),
        ("unix://:hunter2@/run/redis.sock", "unix://***@/run/redis.sock"),
        ("unix:///run/redis.sock?password=hunter2", "unix:///run/redis.sock"),
        ("redis://localhost?password=a@hunter2", "***"),
        ("redis://:hunter2/x@localhost", "***"),
        ("redis://:12/hunter2@localhost", "***"),
        ("redis://:hun?ter2@localhost", "***"),
        ("redis://:hun#ter2@localhost", "***"),
        ("redis://:hunter2:6379", "***"),
        ("redis://[hunter2", "***"),
        ("hunter2@localhost", "***"),
        ("hunter2", "***"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert without_password(url) == shown


# Membership.


class Seen:
    """The addresses that a front end was told, in order."""

    def __init__(self) -> None:
        self.told: list[frozenset[Address]] = []

    def __call__(self, addresses: frozenset[Address]) -> None:
        self.told.append(addresses)

    async def until(self, *addresses: Address) -> None:
        async def told() -> bool:
            return self.told[-1] == frozenset(addresses)

        await until(told)


HERE = parse_address("unix:/run/here")
THERE = TcpAddress("10.0.0.1", 7000)


async def test_workers_are_found_while_they_are_registered(server: RedisServer) -> None:
    prefix = f"{os.urandom(8).hex()}:"
    seen = Seen()
    async with redis_store(server.url, prefix) as of_worker, redis_store(server.url, prefix) as of_front_end:
        async with (
            Registration(of_worker, "worker-0", HERE),
            Discovery(of_front_end.members, seen, poll_seconds=0.01, linger_seconds=0.0),
        ):
            assert seen.told == [frozenset({HERE})]
            async with Registration(of_worker, "worker-1", THERE) as registration:
                await seen.until(HERE, THERE)
                assert await of_front_end.members() == {"worker-0": "unix:/run/here", "worker-1": "tcp://10.0.0.1:7000"}
                await registration.leave()
                assert await of_front_end.members() == {"worker-0": "unix:/run/here"}
                await seen.until(HERE)
        assert await of_front_end.members() == {}
        await check_redis(server.url, prefix)
    assert seen.told == [frozenset({HERE}), frozenset({HERE, THERE}), frozenset({HERE})]


async def test_a_dead_worker_is_no_longer_a_member(server: RedisServer) -> None:
    async with redis_store(server.url, f"{os.urandom(8).hex()}:") as store:
        await store.register("dead", "unix:/dead", 0.05)
        await store.register("alive", "unix:/alive", 60.0)

        async def is_noticed() -> bool:
            return await store.members() == {"alive": "unix:/alive"}

        await until(is_noticed)


async def test_a_restarted_worker_replaces_itself(server: RedisServer) -> None:
    async with redis_store(server.url, f"{os.urandom(8).hex()}:") as store:
        seen = Seen()
        async with Discovery(store.members, seen, poll_seconds=0.01), Registration(store, "worker-0", HERE) as former:
            await seen.until(HERE)
            async with Registration(store, "worker-0", THERE):
                # At once, for the name has moved.
                await seen.until(THERE)
                await former.leave()
                assert await store.members() == {"worker-0": str(THERE)}


async def test_a_worker_with_a_wrong_address_is_refused_by_name(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async with redis_store(server.url, f"{os.urandom(8).hex()}:") as store:
        seen = Seen()
        await store.register("odd", "http://odd", 60.0)
        async with Discovery(store.members, seen, poll_seconds=0.01), Registration(store, "worker-0", HERE):
            await seen.until(HERE)
            await store.deregister("odd", "http://odd")
    assert [record.getMessage() for record in caplog.records if "odd" in record.getMessage()] == [
        "worker odd cannot be used: its address is 'http://odd': expected unix:/path or tcp://host:port"
    ]


async def test_workers_stay_while_redis_is_lost_and_register_again(own_server: RedisServer) -> None:
    """Redis comes back empty. No front end loses a worker."""
    async with redis_store(own_server.url) as of_worker, redis_store(own_server.url) as of_front_end:
        seen = Seen()
        async with Registration(of_worker, "worker-0", HERE, renew_seconds=0.05), Discovery(of_front_end.members, seen, poll_seconds=0.01):
            own_server.kill()
            await until_available(of_front_end, is_available=False)
            await until_available(of_worker, is_available=False)
            assert await of_front_end.members() is None
            own_server.start()

            async def is_registered() -> bool:
                return await of_front_end.members() == {"worker-0": str(HERE)}

            await until(is_registered)
            assert seen.told == [frozenset({HERE})]


class Listing:
    """Gives a list of answers, one per poll."""

    def __init__(self, *answers: dict[str, str] | None) -> None:
        self.answers = list(answers)
        self.finished = asyncio.Event()

    async def register(self, name: str, address: str, seconds: float) -> bool:
        raise NotImplementedError

    async def deregister(self, name: str, address: str) -> None:
        raise NotImplementedError

    async def members(self) -> dict[str, str] | None:
        if len(self.answers) == 1:
            self.finished.set()
            return self.answers[0]
        return self.answers.pop(0)


async def test_a_worker_that_vanishes_stays_for_a_while() -> None:
    here = {"worker-0": str(HERE)}
    seconds = iter(range(1000))
    seen = Seen()
    # One second per poll. Seen at 0; unknown until 3, which counts as seen; vanished from 4 on, so gone at 7.
    directory = Listing(here, None, None, None, {}, {}, {}, {}, here, {})
    told_at: list[int] = []
    clock = 0.0

    def tick() -> float:
        nonlocal clock
        clock = float(next(seconds))
        return clock

    def on_change(addresses: frozenset[Address]) -> None:
        told_at.append(int(clock))
        seen(addresses)

    async with Discovery(directory.members, on_change, poll_seconds=0.0, linger_seconds=3.0, clock=tick):
        await directory.finished.wait()
    assert seen.told[:3] == [frozenset({HERE}), frozenset(), frozenset({HERE})]
    assert told_at[:3] == [0, 7, 8]
