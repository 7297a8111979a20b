"""The index ends up with the worker's blocks, even if events are lost, repeated or late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.index import MAX_AT_ONCE, MAX_KEPT_EVENTS, TIERS, KvFeed, PrefixIndex
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot, Tier

NAMES = [bytes([number]) for number in range(20)]


class Worker:
    """A cache that numbers its events."""

    def __init__(self) -> None:
        self.cached: set[bytes] = set()
        self.next_number = 0

    def act(self, kind: int, names: list[bytes]) -> KvEvent:
        self.next_number += 1
        if kind == 0:
            self.cached.clear()
            return BlocksCleared()
        if kind == 1:
            self.cached.difference_update(names)
            return BlocksRemoved(tuple(names))
        self.cached.update(names)
        return BlocksStored(b"", tuple(names))

    def snapshot(self) -> Snapshot:
        return Snapshot(self.next_number, tuple(BlocksStored(b"", (name,)) for name in sorted(self.cached)))


def stored(*numbers: int) -> tuple[KvEvent, ...]:
    return tuple(BlocksStored(b"", (NAMES[number],)) for number in numbers)


def known(index: PrefixIndex) -> set[bytes]:
    return {name for name in NAMES if index.overlaps([name], 0.0)}


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex()
    index.join("w", 5.0)
    return index


@pytest.fixture
def feed(index: PrefixIndex) -> KvFeed:
    feed = KvFeed(index, "w")
    feed.load(Snapshot(10, stored(0)))
    return feed


def test_at_first_events_wait_for_the_snapshot_that_was_asked_for(index: PrefixIndex) -> None:
    feed = KvFeed(index, "w")
    assert not feed.receive(KvEvents(3, stored(3)))
    assert not feed.receive(KvEvents(4, stored(4)))
    assert not known(index)
    feed.load(Snapshot(4, stored(0)))
    assert known(index) == {NAMES[0], NAMES[4]}
    assert feed.is_current


def test_events_in_order_are_applied(index: PrefixIndex, feed: KvFeed) -> None:
    assert not feed.receive(KvEvents(10, stored(1)))
    assert not feed.receive(KvEvents(11, (BlocksRemoved((NAMES[0],)), *stored(2))))
    assert known(index) == {NAMES[1], NAMES[2]}
    assert not feed.receive(KvEvents(13, (BlocksCleared(),)))
    assert not known(index)


def test_tiers_are_kept_apart(index: PrefixIndex, feed: KvFeed) -> None:
    feed.receive(KvEvents(10, (*stored(1), BlocksStored(b"", (NAMES[1], NAMES[2]), "host"), BlocksRemoved((NAMES[1],)))))
    assert known(index) == {NAMES[0]}
    assert index.overlaps(NAMES[1:3], 0.0, "host") == {"w": 2}
    feed.load(Snapshot(20, (*stored(3), BlocksStored(b"", (NAMES[4],), "host"), BlocksStored(b"", (NAMES[5],), "disk"))))
    assert known(index) == {NAMES[3]}
    assert index.overlaps(NAMES[1:3], 0.0, "disk") == {}
    assert index.overlaps(NAMES[3:6], 0.0, "host") == {"w": 2}
    assert index.overlaps(NAMES[3:6], 0.0, "disk") == {"w": 3}
    feed.receive(KvEvents(20, (BlocksCleared(),)))
    assert index.overlaps(NAMES[3:6], 0.0, "disk") == {}


@pytest.mark.parametrize("tier", TIERS)
def test_many_blocks_come_in_pieces(index: PrefixIndex, feed: KvFeed, tier: Tier) -> None:
    """Taken at once, those of a large disk would hold up all streams."""
    names = [number.to_bytes(4) for number in range(2 * MAX_AT_ONCE + 5)]
    feed.load(Snapshot(20, (BlocksStored(b"", tuple(names), tier),)))
    assert index.overlaps(names, 0.0, tier) == {"w": MAX_AT_ONCE}
    feed.receive(KvEvents(20, (BlocksRemoved((names[0], names[-1]), tier),)))
    assert feed.load_more()
    assert not feed.load_more()
    assert index.overlaps(names, 0.0, tier) == {}, "what left meanwhile does not come back"
    assert index.overlaps(names[1:], 0.0, tier) == {"w": len(names) - 2}
    feed.load(Snapshot(30, (BlocksStored(b"", tuple(names[:3]), tier),)))
    while feed.load_more():
        pass
    assert index.overlaps(names, 0.0, tier) == {"w": 3}
    index.check_integrity()


class Counted(tuple[KvEvent, ...]):  # noqa: SLOT001, it counts
    """Events that know how many of them were read."""

    read = 0

    def __iter__(self) -> Iterator[KvEvent]:
        for event in super().__iter__():
            self.read += 1
            yield event


@pytest.mark.parametrize("tier", TIERS)
def test_a_snapshot_is_read_and_what_it_lacks_is_dropped_in_pieces(index: PrefixIndex, feed: KvFeed, tier: Tier) -> None:
    def chains(first: int) -> Counted:
        size = MAX_AT_ONCE // 2
        numbers = [range(first + start, first + start + size) for start in range(0, 6 * size, size)]
        return Counted([BlocksStored(b"", tuple([number.to_bytes(4) for number in each]), tier) for each in numbers])

    def count() -> tuple[int, int]:
        names = [number.to_bytes(4) for number in range(12 * MAX_AT_ONCE)]
        halves = names[: 6 * MAX_AT_ONCE], names[6 * MAX_AT_ONCE :]
        old, new = [sum(bool(index.overlaps([name], 0.0, tier)) for name in half) for half in halves]
        return old, new

    feed.load(Snapshot(20, chains(0)))
    while feed.load_more():
        pass
    feed.receive(KvEvents(30, ()))
    events, counts = chains(6 * MAX_AT_ONCE), [count()]
    feed.load(Snapshot(40, events))
    assert events.read <= 3
    counts.append(count())
    while feed.load_more():
        counts.append(count())
    counts.append(count())
    assert max(abs(old - before) + abs(new - known) for (old, known), (before, new) in pairwise(counts)) <= MAX_AT_ONCE
    assert (counts[0], counts[-1]) == ((3 * MAX_AT_ONCE, 0), (0, 3 * MAX_AT_ONCE))
    index.check_integrity()


def test_a_snapshot_may_come_while_another_is_loaded(index: PrefixIndex, feed: KvFeed) -> None:
    many = [number.to_bytes(4) for number in range(2 * MAX_AT_ONCE)]
    feed.load(Snapshot(20, (BlocksStored(b"", tuple(many)), *stored(1))))
    feed.receive(KvEvents(20, (*stored(2), BlocksRemoved((NAMES[1],)))))
    feed.receive(KvEvents(30, stored(4)))
    feed.load(Snapshot(30, stored(1, 3)))
    while feed.load_more():
        pass
    assert known(index) == {NAMES[1], NAMES[3], NAMES[4]}
    assert index.held("w") == (3, 0)
    index.check_integrity()


def test_blocks_that_are_cleared_while_a_snapshot_is_loaded_do_not_come_back(index: PrefixIndex, feed: KvFeed) -> None:
    many = tuple([number.to_bytes(4) for number in range(2 * MAX_AT_ONCE)])
    feed.load(Snapshot(20, (BlocksStored(b"", many), *stored(1))))
    feed.receive(KvEvents(20, (BlocksCleared(), *stored(2))))
    assert not feed.load_more()
    assert index.held("w") == (1, 0)
    index.check_integrity()


def test_many_blocks_are_cleared_in_pieces(index: PrefixIndex, feed: KvFeed) -> None:
    names = [number.to_bytes(4) for number in range(4 * MAX_AT_ONCE)]
    feed.receive(KvEvents(10, (BlocksStored(b"", tuple(names)), BlocksCleared(), *stored(2))))
    assert (index.held("w"), known(index), index.overlaps(names, 0.0)) == ((1, 0), {NAMES[2]}, {})
    assert index.leave_more()
    for number in (13, 14):
        assert not feed.receive(KvEvents(number, stored(3)))
    assert not index.leave_more(), "events that come later end it"
    assert known(index) == {NAMES[2], NAMES[3]}
    index.check_integrity()


def test_old_events_are_skipped_whole_and_in_part(index: PrefixIndex, feed: KvFeed) -> None:
    assert not feed.receive(KvEvents(5, stored(5, 6)))
    assert known(index) == {NAMES[0]}
    assert not feed.receive(KvEvents(8, stored(8, 9, 10, 11)))
    assert known(index) == {NAMES[0], NAMES[10], NAMES[11]}
    assert not feed.receive(KvEvents(12, stored(12)))
    assert feed.is_current


def test_a_gap_asks_once_until_the_snapshot_comes(index: PrefixIndex, feed: KvFeed) -> None:
    assert feed.receive(KvEvents(11, stored(1)))
    assert not feed.receive(KvEvents(12, stored(2)))
    assert known(index) == {NAMES[0]}
    feed.load(Snapshot(12, stored(7)))
    assert known(index) == {NAMES[7], NAMES[2]}
    assert feed.receive(KvEvents(14, stored(3)))


def test_a_snapshot_that_is_too_old_is_followed_by_another(index: PrefixIndex, feed: KvFeed) -> None:
    assert feed.receive(KvEvents(13, stored(3)))
    feed.load(Snapshot(11, stored(1)))
    assert not feed.is_current
    assert feed.receive(KvEvents(14, stored(4)))
    feed.load(Snapshot(13, stored(2)))
    assert known(index) == {NAMES[2], NAMES[3], NAMES[4]}


def test_a_snapshot_older_than_the_index_is_ignored(index: PrefixIndex, feed: KvFeed) -> None:
    feed.receive(KvEvents(10, stored(1)))
    feed.load(Snapshot(10, stored(5)))
    assert known(index) == {NAMES[0], NAMES[1]}
    feed.load(Snapshot(20, stored(6)))
    assert known(index) == {NAMES[6]}
    assert not feed.receive(KvEvents(19, stored(7, 8)))
    assert known(index) == {NAMES[6], NAMES[8]}


def test_kept_events_may_overlap(index: PrefixIndex, feed: KvFeed) -> None:
    assert feed.receive(KvEvents(12, stored(2, 3)))
    assert not feed.receive(KvEvents(12, stored(2, 3, 4)))
    assert not feed.receive(KvEvents(13, stored(3)))
    # Event 11 is in neither.
    feed.load(Snapshot(11, ()))
    assert not feed.is_current
    feed.load(Snapshot(13, ()))
    assert known(index) == {NAMES[3], NAMES[4]}


def test_kept_events_have_no_gap(index: PrefixIndex, feed: KvFeed) -> None:
    assert feed.receive(KvEvents(12, stored(2)))
    assert not feed.receive(KvEvents(14, stored(4)))
    # Event 13 is in neither.
    feed.load(Snapshot(13, ()))
    assert not feed.is_current
    assert feed.receive(KvEvents(15, stored(5)))
    feed.load(Snapshot(14, ()))
    assert known(index) == {NAMES[4], NAMES[5]}


def test_kept_events_are_bounded(index: PrefixIndex, feed: KvFeed) -> None:
    assert feed.receive(KvEvents(11, stored(*[1] * MAX_KEPT_EVENTS)))
    assert not feed.receive(KvEvents(11 + MAX_KEPT_EVENTS, stored(2)))
    assert len(feed._kept) == MAX_KEPT_EVENTS
    # The first of them is gone, so this one cannot be gone on from.
    feed.load(Snapshot(11, ()))
    assert feed.receive(KvEvents(12 + MAX_KEPT_EVENTS, stored(3)))


actions = st.lists(st.tuples(st.integers(0, 8), st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)), min_size=1, max_size=4)


@given(st.lists(actions, max_size=30), st.randoms(use_true_random=False), st.floats(0, 0.6), st.floats(0, 0.6))
def test_the_index_converges(batches: list[list[tuple[int, list[bytes]]]], chance: random.Random, trouble: float, delay: float) -> None:
    """Batches are lost, repeated and late; snapshots are late or come twice. When the link works again, the index is right."""
    index, worker = PrefixIndex(), Worker()
    index.join("w", 5.0)
    feed = KvFeed(index, "w")
    under_way: list[KvEvents | Snapshot] = [worker.snapshot()]

    def deliver(message: KvEvents | Snapshot) -> None:
        if isinstance(message, Snapshot):
            feed.load(message)
        elif feed.receive(message):
            under_way.append(worker.snapshot())

    for batch in batches:
        first = worker.next_number
        message = KvEvents(first, tuple(worker.act(*action) for action in batch))
        under_way += [message] * (0 if chance.random() < trouble else 2 if chance.random() < trouble else 1)
        while under_way and chance.random() > delay:
            position = 0 if chance.random() > trouble else chance.randrange(len(under_way))
            again = chance.random() < trouble / 2 and isinstance(under_way[position], Snapshot)
            deliver(under_way[position] if again else under_way.pop(position))
            if feed.is_current and feed._next_number == worker.next_number:
                assert known(index) == worker.cached
    for _ in range(4):
        under_way.append(KvEvents(worker.next_number, (worker.act(2, [NAMES[0]]),)))
        while under_way:
            deliver(under_way.pop(0))
    assert feed.is_current
    assert known(index) == worker.cached
    index.check_integrity()
