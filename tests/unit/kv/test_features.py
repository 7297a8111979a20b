"""The books of image features: slots, holders, turns, and every way in which an image does not come."""

from __future__ import annotations

import random
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import pytest

from penstock.kv.features import ANSWER_SECONDS, MAX_FAILED_PULLS, Features, PlacedImage, place_images, slot_names
from penstock.wire.images import ImageSpan, image_ids
from penstock.wire.messages import ImagesWanted


def name(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def image(text: str, slots: int = 1) -> PlacedImage:
    span = ImageSpan(name(text), 0, 16 * slots, (4, 4 * slots), (8, 8))
    return PlacedImage(span, 16 * slots, 0, 16 * slots - 1)


class Pool:
    """Books, and what they told each generation."""

    def __init__(self, slots: int = 4) -> None:
        self.now = 0.0
        self.books = Features(slots, lambda: self.now)
        self.woken: list[str] = []
        self.failed: list[tuple[str, str, bool]] = []
        self.arrivals = 0

    def want(self, who: str, *images: PlacedImage, lane: str = "") -> bool:
        self.arrivals += 1

        def fail(reason: str, retryable: bool) -> None:
            self.failed.append((who, reason, retryable))

        return self.books.want(who.encode(), images, lane, 1, self.arrivals, lambda: self.woken.append(who), fail)

    def leave(self, who: str) -> None:
        self.books.leave(who.encode())

    def asked(self) -> dict[str, set[bytes]]:
        return {each.generation.decode(): set(each.names) for each in self.books.take_asked()}

    def make(self, *texts: str) -> None:
        for text in texts:
            assert self.books.queued(name(text)) is not None
            assert self.books.begin(name(text)) is not None
            self.books.complete(name(text))
        self.books.check_integrity()


def test_an_image_is_asked_for_made_and_kept() -> None:
    pool = Pool()
    assert not pool.want("a", image("cat", 2))
    assert pool.asked() == {"a": {name("cat")}}
    assert pool.books.positions_to_encode == 32
    pool.make("cat")
    assert pool.woken == ["a"]
    assert len(pool.books.slots_held(b"a", name("cat"))) == 2
    pool.leave("a")
    assert name("cat") in pool.books
    assert pool.want("b", image("cat", 2)), "it is still here"
    assert pool.asked() == {}
    assert (pool.books.encoded, pool.books.reused, pool.books.evicted) == (1, 1, 0)


def test_two_that_need_the_same_image_wait_for_one_tower() -> None:
    pool = Pool()
    pool.want("a", image("cat"))
    pool.want("b", image("cat"), image("dog"))
    assert pool.asked() == {"a": {name("cat")}, "b": {name("cat"), name("dog")}}, "each asks: one of them may leave"
    pool.make("cat")
    assert pool.woken == ["a"]
    pool.make("dog")
    assert pool.woken == ["a", "b"]
    assert pool.books.encoded == 2


def test_the_least_recently_used_is_evicted_and_nothing_that_is_held() -> None:
    pool = Pool(3)
    pool.want("a", image("cat"), image("dog"), image("hen"))
    pool.make("cat", "dog", "hen")
    pool.leave("a")
    assert pool.want("b", image("cat"))
    assert not pool.want("c", image("pig"))
    assert name("dog") not in pool.books
    assert name("cat") in pool.books
    assert name("hen") in pool.books
    pool.want("d", image("cow", 2))
    assert pool.asked().keys() == {"c"}, "the pool is full of what is held"
    pool.leave("b")
    assert pool.asked().keys() == {"d"}
    assert pool.books.evicted == 3
    pool.books.check_integrity()


def test_all_slots_or_none() -> None:
    """Two prompts that need three of four slots each never hold two of them each."""
    pool = Pool(4)
    pool.want("a", image("a1"), image("a2"), image("a3"))
    pool.want("b", image("b1"), image("b2"), image("b3"))
    assert pool.asked().keys() == {"a"}
    pool.make("a1", "a2", "a3")
    assert pool.woken == ["a"]
    assert pool.asked() == {}
    pool.leave("a")
    assert pool.asked().keys() == {"b"}
    pool.make("b1", "b2", "b3")
    assert pool.woken == ["a", "b"]


def test_a_large_one_is_not_passed_for_ever() -> None:
    pool = Pool(2)
    pool.want("a", image("cat"))
    pool.want("large", image("map", 2))
    pool.want("b", image("dog"))
    assert pool.asked().keys() == {"a"}, "the dog would fit, but the map was first"
    pool.make("cat")
    pool.leave("a")
    assert pool.asked().keys() == {"large"}


def test_tenants_take_turns() -> None:
    pool = Pool(1)
    pool.want("first", image("0"), lane="many")
    for index in range(3):
        pool.want(f"many {index}", image(f"m{index}"), lane="many")
    pool.want("few", image("f"), lane="few")
    pool.leave("first")
    pool.leave("many 0")
    assert "few" in pool.asked(), "it does not wait for all of the other tenant"


def test_an_image_that_nobody_wants_any_more_is_forgotten() -> None:
    pool = Pool()
    pool.want("a", image("cat"))
    pool.leave("a")
    assert pool.books.used == 0
    assert pool.books.queued(name("cat")) is None, "its pixels are of no use"
    pool.want("a", image("cat"))
    assert pool.books.queued(name("cat")) is not None
    pool.leave("a")
    assert pool.books.begin(name("cat")) is None, "the tower need not encode it"
    assert pool.books.used == 0
    pool.want("a", image("cat"))
    assert pool.books.begin(name("cat")) is not None
    pool.leave("a")
    assert pool.books.used == 1, "its slots are being written"
    pool.books.complete(name("cat"))
    assert pool.want("b", image("cat"))
    pool.books.check_integrity()


def test_a_failed_pull_is_asked_for_again() -> None:
    pool = Pool()
    pool.want("a", image("cat"))
    pool.want("b", image("cat"))
    pool.asked()
    assert pool.books.begin(name("cat"), is_pulled=True) is not None
    pool.books.pull_failed(name("cat"), "the encode worker died")
    assert pool.books.take_asked() == [ImagesWanted(who, (name("cat"),), "the encode worker died") for who in (b"a", b"b")]
    pool.make("cat")
    assert sorted(pool.woken) == ["a", "b"]


def test_pulls_that_always_fail_end() -> None:
    pool = Pool()
    pool.want("a", image("cat"))
    for _ in range(MAX_FAILED_PULLS):
        assert pool.books.begin(name("cat"), is_pulled=True) is not None
        pool.books.pull_failed(name("cat"), "no route")
    assert pool.failed == [("a", "no route", True)]
    assert pool.books.used == 0
    pool.books.check_integrity()


def test_what_is_pulled_for_nobody_and_fails_is_gone() -> None:
    pool = Pool()
    pool.want("a", image("cat"))
    pool.books.begin(name("cat"), is_pulled=True)
    pool.leave("a")
    pool.books.pull_failed(name("cat"), "no route")
    assert pool.books.used == 0
    assert pool.failed == []
    pool.books.check_integrity()


@pytest.mark.parametrize("how", ["refused", "broken", "late"])
def test_those_that_wait_for_a_lost_image_fail_and_nobody_else(how: str) -> None:
    pool = Pool(3)
    pool.want("a", image("cat"), image("dog"))
    pool.want("b", image("dog"))
    pool.want("c", image("cow", 2))
    pool.make("dog")
    assert pool.woken == ["b"]
    if how == "refused":
        pool.books.refuse(name("cat"), "gone", retryable=False)
    elif how == "broken":
        pool.books.begin(name("cat"))
        pool.books.broken(name("cat"), "gone", retryable=False)
    else:
        pool.now = ANSWER_SECONDS
        assert pool.books.next_expiry == pool.now
        pool.books.expire(pool.now)
    assert [who for who, _, _ in pool.failed] == ["a"]
    assert pool.books.holds(b"b")
    assert "c" in pool.asked(), "its slots are free for who waits"
    pool.books.check_integrity()


def test_two_numbers_of_positions_for_one_name_never_share_slots() -> None:
    pool = Pool()
    pool.want("a", image("cat", 2))
    assert not pool.want("b", image("cat", 1))
    assert [who for who, _, _ in pool.failed] == ["b"]
    pool.books.check_integrity()


def test_an_image_larger_than_the_pool_is_refused_with_the_setting() -> None:
    books = Pool(2).books
    assert books.too_large([image("small", 2)]) is None
    assert books.too_large([]) is None
    assert "--image-memory" in str(books.too_large([image("small"), image("large", 3)]))


def test_a_reader_keeps_an_image() -> None:
    pool = Pool(1)
    pool.want("a", image("cat"))
    assert pool.books.hold(b"t", name("cat")) is None, "it is not here yet"
    pool.make("cat")
    found = pool.books.find(slot_names(name("cat"), 1)[0])
    assert found is not None
    assert pool.books.hold(b"t", found.name) is found
    pool.leave("a")
    pool.asked()
    pool.want("b", image("dog"))
    assert pool.asked() == {}
    pool.books.let_go(b"t", name("cat"))
    assert pool.asked().keys() == {"b"}
    pool.books.check_integrity()


def test_where_the_positions_of_an_image_are() -> None:
    """Ordinary tokens stand before its positions, and between them."""
    span = ImageSpan(name("cat"), 2, 9, (1, 2), (8, 8))
    ids = image_ids(span.name, 4)
    assert place_images((7, 7, 1, *ids[:2], 2, *ids[2:], 3, 7), [span]) == (PlacedImage(span, 4, 3, 7),)


class Disorder:
    """Generations come and leave, images come, fail or are late, in a random order."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.pool = Pool(self.draw.randint(3, 8))
        self.images = [image(str(index), self.draw.randint(1, 3)) for index in range(8)]
        self.waiting: set[str] = set()
        self.asked: set[bytes] = set()
        self.moving: dict[bytes, bool] = {}

    def step(self, number: int) -> None:
        self.come(str(number))
        self.listen()
        for each in self.some(self.asked, 0.3):
            self.asked.discard(each)
            self.answer(each)
        for each in self.some(self.moving, 0.3):
            self.end(each, is_pulled=self.moving.pop(each))
        for who in self.some(self.waiting, 0.1):
            self.go(who)
        self.waiting -= {who for who, _, _ in self.pool.failed}
        self.pool.books.check_integrity()

    def some(self, of: Iterable[Any], chance: float) -> list[Any]:
        return [each for each in sorted(of) if self.draw.random() < chance]

    def come(self, who: str) -> None:
        wanted = self.draw.sample(self.images, self.draw.randint(1, 3))
        if sum(each.slots for each in wanted) <= self.pool.books.slots and len(self.waiting) < 8:
            self.pool.want(who, *wanted, lane=self.draw.choice("xy"))
            self.waiting.add(who)

    def go(self, who: str) -> None:
        self.pool.leave(who)
        self.waiting.discard(who)

    def listen(self) -> None:
        self.asked.update(*[each.names for each in self.pool.books.take_asked()])

    def answer(self, each: bytes) -> None:
        books, kind = self.pool.books, self.draw.choice(["pixels", "pull", "refuse", "late"])
        if kind == "refuse":
            books.refuse(each, "gone", retryable=True)
        elif kind == "late":
            self.pool.now += ANSWER_SECONDS
            books.expire(self.pool.now)
        elif (kind == "pull" or books.queued(each) is not None) and books.begin(each, is_pulled=kind == "pull") is not None:
            self.moving[each] = kind == "pull"

    def end(self, each: bytes, *, is_pulled: bool) -> None:
        if self.draw.random() < 0.7:
            self.pool.books.complete(each)
        elif is_pulled:
            self.pool.books.pull_failed(each, "no route")
        else:
            self.pool.books.broken(each, "not a number")

    def settle(self) -> None:
        """Everything comes now. Then some generation can go on."""
        self.listen()
        while self.asked or self.moving:
            for each in {*self.asked, *self.moving}:
                if each in self.moving or self.pool.books.begin(each) is not None:
                    self.pool.books.complete(each)
            self.asked, self.moving = set(), {}
            self.listen()
        ready = {who for who in self.waiting if self.pool.books.holds(who.encode())}
        assert ready, "nobody can go on"
        for who in ready:
            self.go(who)


@pytest.mark.parametrize("seed", range(20))
def test_random_orders_lose_nothing(seed: int) -> None:
    disorder = Disorder(seed)
    for number in range(300):
        disorder.step(number)
    while disorder.waiting:
        disorder.settle()
    disorder.pool.books.check_integrity()
