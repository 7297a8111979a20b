"""Features that move from one pool to another: whole, checked, and nothing is held afterwards, however it ends."""

from __future__ import annotations

from hashlib import blake2b

import pytest

from kv_engine import MemorySlots
from moving import Hub
from penstock.kv.feature_moves import EXPECT_SECONDS, NO_TRANSPORT, FeatureMoves
from penstock.kv.features import Features, PlacedImage, slot_names
from penstock.wire.images import ImageSpan
from penstock.wire.messages import KvSource

TRANSFER = b"t" * 16
LEASE = 10.0


def name(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def image(text: str, slots: int) -> PlacedImage:
    return PlacedImage(ImageSpan(name(text), 0, 16 * slots, (4, 4 * slots), (8, 8)), 16 * slots, 0, 16 * slots - 1)


class Side:
    """A pool of features at one worker, and what it moves."""

    def __init__(self, hub: Hub, address: str, slots: int = 4, *, is_connected: bool = True) -> None:
        self.now = 0.0
        self.books = Features(slots, lambda: self.now)
        self.memory = MemorySlots(slots)
        self.moves = FeatureMoves(self.books, b"equal", self.memory, lambda call: call(), lambda: self.now)
        self.woken: list[bytes] = []
        if is_connected:
            self.moves.connect(hub.add(address, self.moves))

    def want(self, text: str, slots: int, key: bytes = b"k") -> None:
        self.books.want(key, [image(text, slots)], "", 1, 0, lambda: self.woken.append(key), lambda reason, retryable: None)
        self.books.take_asked()

    def make(self, text: str, slots: int) -> None:
        """Encodes an image, which stays in the pool."""
        self.want(text, slots)
        made = self.books.begin(name(text))
        assert made is not None
        for slot, slot_name in zip(made.slots, slot_names(name(text), slots), strict=True):
            self.memory.fill(slot, slot_name)
        self.books.complete(name(text))
        self.books.leave(b"k")

    def is_free(self) -> bool:
        """Whether nothing is held."""
        self.books.check_integrity()
        self.moves.check_integrity()
        return not self.moves.exports and all(not each.readers for each in [self.books.find(slot_names(name("cat"), 1)[0])] if each)


class Pair:
    def __init__(self) -> None:
        self.hub = Hub()
        self.source, self.target = Side(self.hub, "source"), Side(self.hub, "target")

    def pull(self, text: str = "cat", slots: int = 3) -> None:
        self.target.want(text, slots)
        self.target.moves.pull(name(text), KvSource(TRANSFER, "source", waits=True))

    def settle(self) -> None:
        while self.hub.move():
            pass


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.mark.parametrize("order", ["made first", "puller first", "puller in between"])
def test_an_image_is_pulled_in_any_order_of_events(pair: Pair, order: str) -> None:
    steps = {"make": lambda: pair.source.make("cat", 3), "pull": pair.pull}
    if order == "puller first":
        steps["pull"]()
        pair.settle()
    pair.source.moves.expect(TRANSFER, LEASE)
    if order == "puller in between":
        steps["pull"]()
        pair.settle()
    steps["make"]()
    pair.source.moves.offer(TRANSFER, name("cat"))
    if order == "made first":
        steps["pull"]()
    pair.settle()
    assert pair.target.woken == [b"k"]
    slots = pair.target.books.slots_held(b"k", name("cat"))
    assert all(pair.target.memory.holds(slot, each) for slot, each in zip(slots, slot_names(name("cat"), 3), strict=True))
    (report,) = pair.target.moves.take_reports()
    assert (report.id, report.outcome, report.blocks, report.size) == (TRANSFER, "done", 3, 3 * 8192)
    assert pair.source.is_free()
    assert pair.target.books.encoded == 0


def test_an_image_under_the_names_of_another_is_not_given(pair: Pair) -> None:
    pair.source.make("cat", 3)
    pair.source.moves.expect(TRANSFER, LEASE)
    pair.source.moves.offer(TRANSFER, name("cat"))
    pair.pull("dog")
    pair.settle()
    assert not pair.target.woken
    assert pair.target.books.take_asked()[0].failed
    assert pair.source.is_free()


def test_a_puller_without_a_submit_is_sent_away_in_time(pair: Pair) -> None:
    pair.pull()
    pair.settle()
    pair.source.now = EXPECT_SECONDS
    pair.source.moves.expire(pair.source.now)
    pair.settle()
    assert pair.target.books.take_asked()[0].failed
    assert pair.source.is_free()


def test_what_nobody_pulls_is_held_for_its_lease_and_no_longer(pair: Pair) -> None:
    pair.source.make("cat", 3)
    pair.source.moves.expect(TRANSFER, LEASE)
    pair.source.moves.offer(TRANSFER, name("cat"))
    pair.source.want("dog", 2, b"other")
    assert name("cat") in pair.source.books
    assert not pair.source.books.holds(b"other")
    assert pair.source.moves.next_expiry == LEASE
    pair.source.moves.expire(LEASE)
    assert [report.outcome for report in pair.source.moves.take_reports()] == ["expired"]
    assert name("cat") not in pair.source.books, "it was evicted for the one that waits"
    assert pair.source.is_free()


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_pull_that_takes_longer_than_the_lease_goes_on(pair: Pair, comes_first: bool) -> None:
    """The transport knows whether the puller is alive. The lease is for one that does not come."""
    pair.source.moves.expect(TRANSFER, LEASE)
    pair.source.make("cat", 3)
    if not comes_first:
        pair.source.moves.offer(TRANSFER, name("cat"))
    pair.pull()
    assert pair.hub.move()
    if comes_first:
        pair.source.moves.offer(TRANSFER, name("cat"))
    pair.source.now = 2 * LEASE
    pair.source.moves.expire(pair.source.now)
    pair.settle()
    assert pair.target.woken == [b"k"]
    assert pair.source.is_free()


@pytest.mark.parametrize("when", ["expected", "open", "offered"])
def test_an_export_that_is_ended_holds_nothing(pair: Pair, when: str) -> None:
    pair.source.make("cat", 3)
    pair.source.moves.expect(TRANSFER, LEASE)
    if when != "expected":
        pair.pull()
        pair.settle()
    if when == "offered":
        pair.source.moves.offer(TRANSFER, name("cat"))
    pair.source.moves.end(TRANSFER)
    pair.settle()
    assert pair.source.is_free()
    assert when == "expected" or pair.target.books.take_asked()[0].failed


def test_a_pull_that_is_ended_frees_its_slots_when_the_transport_is_done(pair: Pair) -> None:
    pair.source.moves.expect(TRANSFER, LEASE)
    pair.pull()
    pair.settle()
    pair.target.books.leave(b"k")
    pair.target.moves.end(TRANSFER)
    assert pair.target.books.used == 3, "the transport may still write"
    pair.settle()
    assert pair.target.books.used == 0
    assert pair.target.books.take_asked() == []


def test_a_source_that_is_gone_is_a_failed_pull_and_the_image_is_asked_for_again(pair: Pair) -> None:
    del pair.hub.transports["source"]
    pair.pull()
    pair.settle()
    (asked,) = pair.target.books.take_asked()
    assert asked.failed == "the source is gone"
    assert pair.target.moves.take_reports() == []


def test_a_damaged_slot_is_never_used(pair: Pair) -> None:
    pair.hub.on_copy = lambda source, block: "damaged" if block == 2 else ""
    pair.source.make("cat", 3)
    pair.source.moves.expect(TRANSFER, LEASE)
    pair.source.moves.offer(TRANSFER, name("cat"))
    pair.pull()
    pair.settle()
    assert not pair.target.woken
    assert pair.target.books.take_asked()[0].failed == "damaged"
    assert pair.source.is_free()


def test_without_a_transport_a_pull_fails_at_once() -> None:
    alone = Side(Hub(), "alone", is_connected=False)
    alone.want("cat", 3)
    alone.moves.pull(name("cat"), KvSource(TRANSFER, "source", waits=True))
    assert alone.books.take_asked()[0].failed == NO_TRANSPORT
