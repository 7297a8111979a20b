"""Pages, the tree over them, who goes first, and what is told of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.blocks import ROOT, KvEventLog, block_hash, block_hash_pieces, block_hashes, salted_root, tenant_root
from penstock.kv.cache import KVCache
from penstock.kv.radix import Lease, Node
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents

SIZE = 4
ALICE, MALLORY = tenant_root("alice"), tenant_root("mallory")
ROOTS = (ROOT, ALICE, salted_root(ALICE, "salt"), salted_root(ROOT, "salt"), MALLORY)


def tokens(start: int, pages: int) -> list[int]:
    return [start * 1000 + index for index in range(pages * SIZE)]


def fill(
    cache: KVCache, token_ids: list[int], lease: Lease | None = None, now: float = 0.0, priority: int = 0, root: bytes = ROOT
) -> list[Node]:
    """What a sequence does with its prompt: reuses what is there, computes the rest. Returns its path, in use."""
    path = cache.match(root, [*token_ids, -1])
    cache.acquire(path, lease, priority)
    keys = [tuple(token_ids[start : start + SIZE]) for start in range(len(path) * SIZE, len(token_ids), SIZE)]
    assert cache.can_allocate(len(keys))
    pages = cache.allocate(len(keys), now)
    return path + cache.commit(path[-1] if path else cache.root(root), keys, pages, lease, priority)


def keep(cache: KVCache, token_ids: list[int], lease: Lease | None = None, now: float = 0.0, priority: int = 0, root: bytes = ROOT) -> None:
    cache.release(fill(cache, token_ids, lease, now, priority, root))


def known(cache: KVCache, token_ids: list[int], root: bytes = ROOT) -> int:
    return len(cache.match(root, [*token_ids, -1]))


def test_the_longest_prefix_is_found_and_one_token_left_to_compute() -> None:
    cache = KVCache(16, SIZE)
    keep(cache, tokens(1, 3))
    assert len(cache.match(ROOT, tokens(1, 3))) == 2, "the last page is computed again: its logits are needed"
    assert len(cache.match(ROOT, [*tokens(1, 3), 5])) == 3
    assert len(cache.match(ROOT, [*tokens(1, 2), 9, 9, 9, 9, 9])) == 2
    assert cache.match(ROOT, tokens(2, 3)) == []


def test_two_roots_never_match() -> None:
    """The same tokens under five roots: each finds its own pages, and no other's."""
    cache = KVCache(64, SIZE)
    for count, root in enumerate(ROOTS):
        assert [known(cache, tokens(1, 3), other) for other in ROOTS] == [3] * count + [0] * (5 - count)
        keep(cache, tokens(1, 3), root=root)
    assert cache.cached == 15
    held = [{node.page for node in cache.match(root, [*tokens(1, 3), 5])} for root in ROOTS]
    assert len(set.union(*held)) == 15
    cache.check_integrity([], [], [])


def test_equal_names_do_not_share_pages() -> None:
    """The tree compares tokens under a root, never names: whoever made two blocks with one name would still find only its own."""
    cache = KVCache(16, SIZE)
    parent = cache.root(ALICE)
    keep(cache, tokens(1, 1), root=ALICE)
    (child,) = parent.children.values()
    # The block's name as a root: its blocks have the names of those that follow the block.
    keep(cache, tokens(2, 1), root=child.name)
    assert known(cache, tokens(1, 1) + tokens(2, 1), ALICE) == 1
    keep(cache, tokens(1, 1) + tokens(2, 1), root=ALICE)
    assert known(cache, tokens(3, 1), child.name) == 0
    assert cache.cached == 3


def test_a_root_without_blocks_is_forgotten() -> None:
    """A client may choose any number of salts."""
    cache = KVCache(4, SIZE)
    roots: list[weakref.ref[Node]] = []
    for number in range(1000):
        root = salted_root(ALICE, str(number))
        keep(cache, tokens(1, 3), root=root)
        roots.append(weakref.ref(cache.root(root)))
    assert [known(cache, tokens(1, 3), salted_root(ALICE, str(number))) for number in (0, 997, 998, 999)] == [0, 0, 1, 3]
    assert [root() is not None for root in roots] == [False] * 998 + [True] * 2
    cache.check_integrity([], [], [])


def test_roots_are_apart_and_the_same_everywhere() -> None:
    assert (
        len({ROOT, ALICE, MALLORY, salted_root(ROOT, "a"), salted_root(ALICE, "a"), salted_root(MALLORY, "a"), salted_root(ALICE, "b")})
        == 7
    )
    assert ALICE.hex() == "c102c9423647dbd4194e19370daff8d9"
    assert salted_root(ALICE, "a").hex() == "d445421b887f16e5a7901dddfa3a172a"
    assert all(len(name) == 16 for name in block_hashes(tokens(1, 3), SIZE, ALICE)), "too long to be met by trying"


def test_two_that_compute_the_same_keep_one_page() -> None:
    cache = KVCache(16, SIZE)
    tails = [cache.allocate(2, 0.0) for _ in range(2)]
    keys = [tuple(tokens(1, 2)[:SIZE]), tuple(tokens(1, 2)[SIZE:])]
    first = cache.commit(cache.root(ROOT), keys, tails[0], None)
    second = cache.commit(cache.root(ROOT), keys, tails[1], None)
    assert first == second
    assert (cache.used, cache.free) == (2, 14)
    cache.check_integrity([first, second], [], [])


def test_the_oldest_leaf_goes_first_and_parents_after_their_children() -> None:
    cache = KVCache(6, SIZE)
    keep(cache, tokens(1, 3))
    keep(cache, tokens(2, 3))
    keep(cache, tokens(1, 1))  # only its first page is used again
    cache.give_back(cache.allocate(3, 0.0))
    assert (known(cache, tokens(1, 3)), known(cache, tokens(2, 3))) == (1, 2), "the first page is younger than the other branch"
    cache.check_integrity([], [], [])


def test_a_leased_parent_stays_when_its_plain_child_goes() -> None:
    cache = KVCache(6, SIZE)
    lease = Lease(100, ends_at=100)
    keep(cache, tokens(1, 2), lease)
    keep(cache, [*tokens(1, 2), *tokens(2, 2)])
    keep(cache, tokens(3, 2))
    cache.give_back(cache.allocate(3, 0.0))
    assert (known(cache, [*tokens(1, 2), *tokens(2, 2)]), known(cache, tokens(3, 2))) == (2, 1)
    cache.check_integrity([], [], [lease])


def test_low_priority_goes_before_old() -> None:
    cache = KVCache(4, SIZE)
    keep(cache, tokens(1, 2), priority=1)
    keep(cache, tokens(2, 2), priority=0)
    cache.give_back(cache.allocate(2, 0.0))
    assert (known(cache, tokens(1, 2)), known(cache, tokens(2, 2))) == (2, 0)


def test_what_is_used_is_never_evicted() -> None:
    cache = KVCache(6, SIZE)
    path = fill(cache, tokens(1, 3))
    keep(cache, tokens(2, 3))
    assert not cache.can_allocate(4)
    assert cache.can_allocate(3)
    tail = cache.allocate(3, 0.0)
    assert (known(cache, tokens(1, 3)), known(cache, tokens(2, 3))) == (3, 0)
    assert not cache.can_allocate(1)
    cache.check_integrity([path], [tail], [])


def test_unleased_goes_before_leased_and_then_the_least_weight() -> None:
    cache = KVCache(9, SIZE, lease_share=1.0)
    short, long = Lease(10, ends_at=10), Lease(100, ends_at=100)
    keep(cache, tokens(1, 3), short)
    keep(cache, tokens(2, 3), long)
    keep(cache, tokens(3, 3))
    cache.give_back(cache.allocate(3, 5.0))
    assert [known(cache, tokens(number, 3)) for number in (1, 2, 3)] == [3, 3, 0]
    keep(cache, tokens(3, 3))
    # Half of the short lease is left, 95 % of the long one.
    cache.give_back(cache.allocate(5, 5.0))
    assert [known(cache, tokens(number, 3)) for number in (1, 2, 3)] == [1, 3, 0]
    cache.check_integrity([], [], [short, long])


def test_the_weight_of_a_lease_falls_with_time() -> None:
    old, new = Lease(100, ends_at=100), Lease(10, ends_at=95)
    assert old.weight(50) == 0.5
    assert old.weight(90) < new.weight(90)
    assert Lease(10).weight(1e9) == 1.0, "held by a turn that runs"
    assert old.weight(200) == 0.0


def test_leases_protect_at_most_their_share() -> None:
    cache = KVCache(8, SIZE, lease_share=0.25)
    lease = Lease(100, ends_at=100)
    keep(cache, tokens(1, 4), lease)
    keep(cache, tokens(2, 4))
    cache.give_back(cache.allocate(3, 0.0))
    # Two of its pages are beyond the share, and older than the others: they go first; then the others do.
    assert (known(cache, tokens(1, 4)), known(cache, tokens(2, 4))) == (2, 3)
    cache.check_integrity([], [], [lease])


def test_ending_a_lease_frees_exactly_what_only_it_held() -> None:
    cache = KVCache(16, SIZE)
    mine, other = Lease(100, ends_at=100, is_session=True), Lease(100, ends_at=100, is_session=True)
    shared_by_all, shared_by_two = tokens(1, 2), [*tokens(1, 2), *tokens(2, 1)]
    keep(cache, [*shared_by_two, *tokens(3, 2)], mine)
    keep(cache, [*shared_by_two, *tokens(4, 1)], other)
    keep(cache, [*shared_by_all, *tokens(5, 1)])
    assert cache.end_lease(mine, free_exclusive=True) == 2
    assert known(cache, [*shared_by_two, *tokens(3, 2)]) == 3
    assert known(cache, [*shared_by_two, *tokens(4, 1)]) == 4
    cache.check_integrity([], [], [other])
    assert cache.end_lease(other, free_exclusive=True) == 2, "its own, and what it shared with the one that is gone"
    assert known(cache, shared_by_two) == 2, "somebody without a session uses these"
    cache.check_integrity([], [], [])


def test_a_lease_does_not_free_what_runs() -> None:
    cache = KVCache(16, SIZE)
    lease = Lease(100, is_session=True)
    path = fill(cache, tokens(1, 3), lease)
    assert cache.end_lease(lease, free_exclusive=True) == 0
    assert cache.used == 3
    cache.check_integrity([path], [], [])
    cache.release(path)
    assert cache.cached == 3


def test_a_longer_retention_takes_the_place_of_a_shorter_one() -> None:
    cache = KVCache(16, SIZE)
    leases = [Lease(seconds, ends_at=seconds) for seconds in (10, 20)]
    for lease in leases:
        path = fill(cache, tokens(1, 3))
        cache.retain(path, lease)
        cache.release(path)
    assert (len(leases[0].nodes), len(leases[1].nodes)) == (0, 3)
    assert cache.leased == 3
    assert cache.end_lease(leases[1], free_exclusive=False) == 0
    assert cache.cached == 3
    cache.check_integrity([], [], leases)


def test_a_shorter_retention_does_not_end_a_longer_one_nor_a_sessions() -> None:
    cache = KVCache(16, SIZE)
    session, long, short = Lease(5, ends_at=5, is_session=True), Lease(50, ends_at=50), Lease(20, ends_at=20)
    path = fill(cache, tokens(1, 3), session)
    for lease in (long, short):
        cache.retain(path, lease)
    cache.release(path)
    assert [len(lease.nodes) for lease in (session, long, short)] == [3, 3, 0]
    cache.check_integrity([], [], [session, long, short])


def test_a_high_priority_is_not_lost_by_a_later_low_one() -> None:
    cache = KVCache(4, SIZE)
    keep(cache, tokens(1, 2), priority=1)
    keep(cache, tokens(1, 2), priority=0)
    keep(cache, tokens(2, 2), priority=0)
    cache.give_back(cache.allocate(2, 0.0))
    assert (known(cache, tokens(1, 2)), cache.evicted_pages) == (2, 2)


def test_what_was_used_without_a_session_outlives_the_session() -> None:
    cache = KVCache(8, SIZE)
    lease = Lease(10, ends_at=10, is_session=True)
    keep(cache, tokens(1, 3), lease)
    keep(cache, tokens(1, 3))
    assert cache.end_lease(lease, free_exclusive=True) == 0
    assert known(cache, tokens(1, 3)) == 3


def test_using_the_same_pages_again_and_again_takes_no_more_memory() -> None:
    cache = KVCache(8, SIZE)
    for _ in range(1000):
        keep(cache, tokens(1, 3))
    cache.check_integrity([], [], [])
    cache.give_back(cache.allocate(8, 0.0))
    assert known(cache, tokens(1, 3)) == 0


class Mirror:
    """What a router knows: rebuilt from the events alone. Each block with the one before it."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.next_number = 0

    def follow(self, events: KvEvents | None) -> None:
        if events is not None:
            assert events.events, "no event is told as None"
            assert events.first == self.next_number, "a gap"
            self.next_number += len(events.events)
            self.apply(events.events)

    def apply(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    parent = event.parent
                    assert parent in ROOTS or parent in self.blocks
                    for block in event.blocks:
                        assert block not in self.blocks
                        self.blocks[block] = parent
                        parent = block
                case BlocksRemoved():
                    for block in event.blocks:
                        del self.blocks[block]
                case BlocksCleared():
                    raise AssertionError("the cache never forgets everything at once")

    def check(self, cache: KVCache) -> None:
        self.follow(cache.events.take())
        snapshot, rebuilt = cache.snapshot(), Mirror()
        rebuilt.apply(snapshot.events)
        assert snapshot.next_number == self.next_number
        assert rebuilt.blocks == self.blocks
        parents = set(self.blocks.values())
        assert len(snapshot.events) == sum(1 for block in self.blocks if block not in parents), "one chain per leaf"


def test_events_carry_the_names_that_a_router_computes() -> None:
    cache, mirror = KVCache(8, SIZE), Mirror()
    keep(cache, tokens(1, 3))
    mirror.check(cache)
    assert list(mirror.blocks) == block_hashes(tokens(1, 3), SIZE)
    keep(cache, tokens(1, 3), root=ALICE)
    mirror.check(cache)
    assert list(mirror.blocks)[3:] == block_hashes(tokens(1, 3), SIZE, ALICE)
    cache.give_back(cache.allocate(8, 0.0))
    mirror.check(cache)
    assert not mirror.blocks


def test_events_that_nobody_takes_are_dropped_and_the_numbers_tell() -> None:
    log = KvEventLog(max_waiting=100)
    for _ in range(1000):
        log.removed([b"a block"])
    waiting = log.take()
    assert waiting is not None
    assert 50 <= len(waiting.events) <= 100
    assert waiting.first + len(waiting.events) == log.next_number == 1000
    assert log.take() is None


def test_the_order_of_leased_leaves_holds_while_they_change() -> None:
    """At one and the same moment: leaves come and go, and their weights change, between evictions."""
    cache = KVCache(6, SIZE, lease_share=1.0)
    leases = [Lease(100, ends_at=ends_at, is_session=True) for ends_at in (30, 60, 90)]
    for number, lease in enumerate(leases):
        keep(cache, tokens(number, 2), lease)
    evicted = []
    for _ in range(2):
        cache.give_back(cache.allocate(cache.free + 1, 10.0))
        evicted.append([known(cache, tokens(number, 2)) for number in range(3)])
        leases[0].ends_at = math.inf  # a turn of it runs now, elsewhere in the tree
    assert evicted == [[1, 2, 2], [1, 1, 2]]
    keep(cache, tokens(8, 1), Lease(100, ends_at=11, is_session=True))
    cache.give_back(cache.allocate(cache.free + 1, 10.0))
    assert known(cache, tokens(8, 1)) == 0, "what came last has the least weight"


@given(st.data())
def test_integrity_whatever_happens(data: st.DataObject) -> None:  # noqa: C901, one branch an action
    cache, mirror = KVCache(12, SIZE, lease_share=data.draw(st.sampled_from([0.0, 0.3, 1.0]))), Mirror()
    leases = [Lease(10, ends_at=10, is_session=True), Lease(50, ends_at=50, is_session=True)]
    retained: list[Lease] = []
    paths: list[list[Node]] = []
    tails: list[list[int]] = []
    for now in range(data.draw(st.integers(1, 40))):
        match data.draw(st.sampled_from(["fill", "fill", "release", "tail", "give back", "end", "retain"])):
            case "fill":
                branch = data.draw(st.integers(0, 2))
                token_ids = tokens(0, data.draw(st.integers(0, 3))) + tokens(branch + 1, data.draw(st.integers(0, 3)))
                missing = len(token_ids) // SIZE
                if cache.can_allocate(missing + 3):
                    lease, priority = data.draw(st.sampled_from([None, *leases])), data.draw(st.integers(0, 1))
                    paths.append(fill(cache, token_ids, lease, now, priority, data.draw(st.sampled_from(ROOTS[:2]))))
            case "release" if paths:
                cache.release(paths.pop(data.draw(st.integers(0, len(paths) - 1))))
            case "tail" if cache.can_allocate(2):
                tails.append(cache.allocate(2, now))
            case "give back" if tails:
                cache.give_back(tails.pop())
            case "end":
                cache.end_lease(data.draw(st.sampled_from(leases)), free_exclusive=data.draw(st.booleans()))
            case "retain" if paths:
                retained.append(Lease(20, ends_at=now + data.draw(st.integers(1, 20))))
                cache.retain(data.draw(st.sampled_from(paths)), retained[-1])
        cache.check_integrity(paths, tails, [*leases, *retained])
        mirror.check(cache)
    for path in paths:
        cache.release(path)
    for tail in tails:
        cache.give_back(tail)
    assert cache.can_allocate(12), "whatever is not in use can always be had"
    cache.give_back(cache.allocate(12, 100.0))
    mirror.check(cache)
    assert not mirror.blocks


@pytest.mark.parametrize("damage", ["reference", "page twice", "lost page", "count", "lease", "leaf"])
def test_the_integrity_check_sees_damage(damage: str) -> None:
    cache, lease = KVCache(8, SIZE), Lease(10, ends_at=10, is_session=True)
    keep(cache, tokens(1, 2), lease)
    path = fill(cache, tokens(2, 2))
    keep(cache, tokens(3, 2))
    cache.check_integrity([path], [], [lease])
    match damage:
        case "reference":
            path[0].references += 1
        case "page twice":
            path[0].page = path[1].page
        case "lost page":
            cache._free.pop()
        case "count":
            cache._cached -= 1
        case "lease":
            next(iter(lease.nodes)).leases = None
        case "leaf":
            cache._plain_leaves.pop()
    with pytest.raises(AssertionError):
        cache.check_integrity([path], [], [lease])


def test_names_of_blocks_with_positions_of_images() -> None:
    """Text keeps the names that it has without images. Two images with the same low 32 bits have different names."""
    text, low = tokens(1, 2), 5
    first, second = 2**62 + low, 2**62 + 2**32 + low
    names = block_hashes([*text, first, low, low, low], SIZE)
    assert names[:2] == block_hashes(text, SIZE)
    others = [block_hashes([*text, other, low, low, low], SIZE)[2] for other in (second, low)]
    assert len({names[2], *others}) == 3
    assert names == [name for piece in block_hash_pieces([*text, first, low, low, low, 1], SIZE) for name in piece]
    assert names[2] == block_hash(names[1], [first, low, low, low])
