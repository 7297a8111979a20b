"""The store of a single front end: time, bounds, order, and no leftovers."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.router.affinity import Binding, Claim, MemoryStore, affinity_key, owner_key, session_key

Value = TypeVar("Value")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def bound(session: str, epoch: int, worker: str = "a", model: str = "m") -> Binding:
    return Binding(session, worker, model, epoch, 300.0, 1.0)


def test_keys_are_unambiguous() -> None:
    names = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", ""), ("", "a", "bc"), ("", "", "abc"), ("a:", "b", "c"), ("1:a", "b", "c")]
    keys = [make(*name) for name in names for make in (session_key, affinity_key)] + [owner_key("a"), owner_key("ab")]
    assert len(set(keys)) == len(keys)
    assert session_key("owner", "m", "s") == session_key("owner", "m", "s")
    assert {len(key) for key in keys} == {32}


async def test_epochs_grow_even_when_the_clock_does_not() -> None:
    wall = iter([5_000_000, 5_000_000, 1_000, 9_000_000])
    store = MemoryStore(wall_ns=lambda: next(wall))
    assert [await store.next_epoch() for _ in range(4)] == [5000, 5001, 5002, 9000]
    # Another front end, or this one after a restart.
    assert await MemoryStore(wall_ns=lambda: 9_001_000).next_epoch() > 9000


async def test_a_binding_ends_exactly_when_its_time_is_over() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    key = session_key("o", "m", "s")
    await store.claim(key, bound("s", 1), 10.0, "o")
    clock.now += 9.999
    assert await store.get(key) == bound("s", 1)
    assert await store.renew(key, 1, 10.0)
    clock.now += 9.999
    assert await store.renew(key, 1, 5.0)
    clock.now += 5.0
    assert await store.get(key) is None
    assert not await store.renew(key, 1, 10.0)
    assert not await store.release(key, 1)
    assert await store.list_sessions("o", 10) == []
    store.check_integrity()


async def test_a_shorter_renewal_counts() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    await store.claim("key", bound("", 1), 1000.0)
    assert await store.renew("key", 1, 1.0)
    clock.now += 1.0
    assert await store.get("key") is None
    store.check_integrity()


async def test_memory_goes_down_again() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    for number in range(100_000):
        name = str(number)
        await store.claim(session_key("o", "m", name), bound(name, 1), 60.0 + number % 7, "o")
    assert len(store) == 100_000
    clock.now += 100.0
    assert await store.list_sessions("o", 1) == []
    assert len(store) == 0
    store.check_integrity()


async def test_sessions_that_close_early_leave_no_memory() -> None:
    """Sessions with a long timeout that are closed at once, and a binding that is renewed all the time."""
    store = MemoryStore(Clock())
    await store.claim("kept", bound("", 1), 86_400.0)
    for number in range(20_000):
        key = session_key("o", "m", str(number))
        await store.claim(key, bound(str(number), number), 86_400.0, "o")
        assert await store.renew("kept", 1, 86_400.0 - number)
        assert await store.release(key, number)
        store.check_integrity()
    assert len(store) == 1
    store.check_integrity()


async def test_releasing_alone_makes_room() -> None:
    store = MemoryStore(Clock())
    for number in range(10_000):
        await store.claim(session_key("o", "m", str(number)), bound(str(number), 1), 86_400.0, "o")
    for number in range(10_000):
        assert await store.release(session_key("o", "m", str(number)), 1)
        if not number % 500:
            store.check_integrity()


async def test_affinity_keys_are_bounded_and_the_least_recently_used_goes() -> None:
    store = MemoryStore(Clock(), max_affinities=3)
    await store.claim(session_key("o", "m", "s"), bound("s", 1), 60.0, "o")
    for key in "abc":
        await store.claim(key, bound("", 1), 60.0)
    await store.get("a")
    await store.renew("b", 1, 60.0)
    await store.claim("d", bound("", 1), 60.0)
    assert [await store.get(key) is not None for key in "abcd"] == [True, True, False, True]
    # Sessions have a quota instead.
    assert await store.get(session_key("o", "m", "s")) is not None
    store.check_integrity()


async def test_a_full_store_stays_at_its_bound() -> None:
    store = MemoryStore(Clock(), max_affinities=100)
    for number in range(5000):
        await store.claim(str(number), bound("", 1), 60.0)
    assert len(store) == 100
    store.check_integrity()


async def test_a_session_must_have_its_own_key() -> None:
    with pytest.raises(AssertionError):
        await MemoryStore().claim("another", bound("s", 1), 60.0, "o")


@dataclass
class Known:
    binding: Binding
    ends: float
    owner: str | None


def done(call: Coroutine[None, None, Value]) -> Value:
    """The store never waits."""
    try:
        call.send(None)
    except StopIteration as stop:
        value: Value = stop.value
        return value
    raise AssertionError("it waits")


OWNERS = st.sampled_from(["o", "p", None])
SESSIONS = st.sampled_from(["", "s", "t", "ü"])
SECONDS = st.sampled_from([0.5, 1.0, 3.0, 50.0])


class AgainstAModel(RuleBasedStateMachine):
    """The same as a dict that is searched from end to end."""

    @initialize()
    def begin(self) -> None:
        self.clock = Clock()
        self.store = MemoryStore(self.clock)
        self.model: dict[str, Known] = {}
        self.epoch = 0

    def live(self) -> dict[str, Known]:
        self.model = {key: known for key, known in self.model.items() if known.ends > self.clock.now}
        return self.model

    def named(self, owner: str | None, session: str) -> tuple[str, Binding]:
        self.epoch += 1
        key = affinity_key("", "m", session) if owner is None else session_key(owner, "m", session)
        return key, bound(session, self.epoch)

    @rule(seconds=st.sampled_from([0.25, 1.0, 20.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(owner=OWNERS, session=SESSIONS, seconds=SECONDS, quota=st.sampled_from([None, 0, 2]))
    def claim(self, owner: str | None, session: str, seconds: float, quota: int | None) -> None:
        key, binding = self.named(owner, session)
        live = self.live()
        if key in live:
            expected = Claim(live[key].binding, won=False)
        elif owner is not None and quota is not None and sum(known.owner == owner for known in live.values()) >= quota:
            expected = Claim(None, won=False)
        else:
            live[key] = Known(binding, self.clock.now + seconds, owner)
            expected = Claim(binding, won=True)
        assert done(self.store.claim(key, binding, seconds, owner, quota)) == expected

    @rule(owner=OWNERS, session=SESSIONS, seconds=SECONDS, is_stale=st.booleans())
    def rebind(self, owner: str | None, session: str, seconds: float, is_stale: bool) -> None:
        key, binding = self.named(owner, session)
        known = self.live().get(key)
        old_epoch = known.binding.epoch if known is not None and not is_stale else -1
        if known is None or not is_stale:
            self.model[key] = known = Known(binding, self.clock.now + seconds, owner)
        assert done(self.store.rebind(key, old_epoch, binding, seconds, owner)) == known.binding

    @rule(owner=OWNERS, session=SESSIONS, seconds=SECONDS, is_stale=st.booleans())
    def renew(self, owner: str | None, session: str, seconds: float, is_stale: bool) -> None:
        key, _ = self.named(owner, session)
        known = self.live().get(key)
        epoch = known.binding.epoch if known is not None and not is_stale else -1
        assert done(self.store.renew(key, epoch, seconds)) == (known is not None and not is_stale)
        if known is not None and not is_stale:
            known.ends = self.clock.now + seconds

    @rule(owner=OWNERS, session=SESSIONS, is_stale=st.booleans())
    def release(self, owner: str | None, session: str, is_stale: bool) -> None:
        key, _ = self.named(owner, session)
        known = self.live().get(key)
        epoch = known.binding.epoch if known is not None and not is_stale else -1
        assert done(self.store.release(key, epoch)) == (known is not None and not is_stale)
        if not is_stale:
            self.model.pop(key, None)

    @rule(owner=st.sampled_from(["o", "p"]), limit=st.integers(0, 4), after=SESSIONS)
    def list_sessions(self, owner: str, limit: int, after: str) -> None:
        names = sorted(known.binding.session for known in self.live().values() if known.owner == owner)
        expected = [name for name in names if name > after or not after][:limit]
        assert [binding.session for binding in done(self.store.list_sessions(owner, limit, after))] == expected

    @invariant()
    def agrees(self) -> None:
        for key, known in self.live().items():
            assert done(self.store.get(key)) == known.binding
        assert done(self.store.get("nobody's")) is None
        assert len(self.store) == len(self.model)
        self.store.check_integrity()


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40)
