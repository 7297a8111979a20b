"""Prompts with images in the scheduler that the embedded engine and the simulator share: who waits for features, and who holds them."""

from __future__ import annotations

import random
from collections import Counter
from hashlib import blake2b
from typing import Any

import pytest

from penstock.engine.scheduler import Scheduler, Sequence, Work
from penstock.kv.cache import KVCache
from penstock.kv.features import ANSWER_SECONDS, Features, Image
from penstock.kv.sessions import Sessions
from penstock.wire.images import ImageSpan, image_ids, is_image_id
from penstock.wire.messages import Fault, Segment, Submit

SIZE = 4


def name(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


class FreshSequence(Sequence):
    """Computes its whole prompt, even where KV is cached."""

    __slots__ = ()

    @property
    def skips_cache(self) -> bool:
        return True


class Steps:
    """A scheduler with a pool of features, and an engine that makes the same token for everyone. It fails when a position of an image is
    computed without its features."""

    def __init__(self, pages: int = 256, slots: int = 8, max_batch: int = 64, budget: int = 512) -> None:
        self.now = 0.0
        self.features = Features(slots, lambda: self.now)
        self.cache = KVCache(pages, SIZE)
        self.scheduler: Scheduler[Sequence] = Scheduler(self.cache, Sessions(self.cache, 10, 0.0), max_batch, features=self.features)
        self.budget = budget
        self.written: dict[int, bytes] = {}
        self.computed: Counter[bytes] = Counter()
        self.ended: list[str] = []
        self.faults: dict[str, Fault] = {}
        self.asked: list[bytes] = []

    def add(self, who: str, *parts: str | int, max_tokens: int = 1, kind: type[Sequence] = Sequence, **fields: Any) -> Sequence:
        """A number is that many tokens of text, a string an image of 16 positions, `x2` at its end makes it twice as long."""
        tokens: list[int] = []
        spans: list[ImageSpan] = []
        for part in parts:
            if isinstance(part, int):
                tokens += range(part)
                continue
            positions = 32 if part.endswith("x2") else 16
            spans.append(ImageSpan(name(part), len(tokens), len(tokens) + positions, (4, positions // 4), (8, 8)))
            tokens += image_ids(name(part), positions)
        sequence = kind(Submit(who.encode(), tuple(tokens), max_tokens, seed=0, images=tuple(spans), **fields))
        if (fault := self.scheduler.validate(sequence.request)) is not None:
            self.faults[who] = fault
        else:
            self.scheduler.add(sequence)
        return sequence

    def cancel(self, who: str) -> bool:
        return self.scheduler.cancel(who.encode(), self.now)

    def make(self, *texts: str) -> None:
        """Pixels come, and the tower encodes them."""
        for text in texts:
            image = self.features.begin(name(text))
            assert image is not None, f"nobody wants {text}"
            self.finish(image)

    def make_all(self) -> None:
        while self.listen():
            asked, self.asked = self.asked, []
            for each in asked:
                if (image := self.features.begin(each)) is not None:
                    self.finish(image)

    def finish(self, image: Image) -> None:
        self.written.update(dict.fromkeys(image.slots, image.name))
        self.features.complete(image.name)

    def has_work(self) -> bool:
        return self.scheduler.has_work

    def listen(self) -> list[bytes]:
        self.asked += [each for wanted in self.features.take_asked() for each in wanted.names]
        return self.asked

    def step(self, *, is_checked: bool = True) -> list[Segment]:
        scheduler = self.scheduler
        scheduler.expire(self.now)
        scheduler.make_way()
        work = scheduler.schedule_decodes(self.now)
        work += scheduler.schedule_prompts(self.budget, self.now)
        if is_checked:
            scheduler.check_integrity()
        lost = scheduler.take_lost(self.now)
        for segment in lost:
            assert isinstance(segment.terminal, Fault)
            self.faults[segment.id.decode()] = segment.terminal
        for item in work:
            self.compute(item)
        if is_checked:
            scheduler.check_integrity()
        return lost

    def compute(self, item: Work[Sequence]) -> None:
        sequence, start = item.sequence, item.sequence.computed
        for image in sequence.images:
            places = range(max(start, image.first), min(start + item.length, image.last + 1))
            if any(is_image_id(sequence.tokens[place]) for place in places):
                slots = self.features.slots_held(sequence.request.id, image.span.name)
                assert {self.written[slot] for slot in slots} == {image.span.name}, "the slots have another image"
                self.computed[image.span.name] += len(places)
        is_last = sequence.to_compute == item.length
        self.scheduler.computed(item)
        if is_last:
            if not sequence.is_reported:
                self.scheduler.report(sequence, None, self.now)
            sequence.tokens.append(1)
            if len(sequence.tokens) - len(sequence.request.token_ids) >= sequence.request.max_tokens:
                self.scheduler.finish(sequence, self.now)
                self.ended.append(sequence.request.id.decode())

    def run(self, *, is_checked: bool = True) -> None:
        for _ in range(1000):
            if self.scheduler.is_empty:
                break
            self.step(is_checked=is_checked)
            self.make_all()
        assert self.scheduler.is_empty, "they wait for each other"


def test_a_prompt_waits_for_its_image_and_text_does_not() -> None:
    steps = Steps()
    steps.add("picture", 3, "cat", 5)
    steps.add("text", 20)
    steps.step()
    assert steps.ended == ["text"]
    assert steps.has_work() is False, "there is nothing to compute before the image comes"
    assert steps.listen() == [name("cat")]
    steps.make("cat")
    assert steps.has_work()
    steps.step()
    assert steps.ended == ["text", "picture"]
    assert steps.features.used == 1, "the features stay, for the next one"


def test_what_is_cached_needs_no_image() -> None:
    steps = Steps()
    steps.add("first", 4, "cat", 5)
    steps.run()
    steps.features = steps.scheduler.features = Features(1)
    steps.add("second", 4, "cat", 9)
    steps.step()
    assert steps.ended == ["first", "second"]
    steps.add("another", 4, "dog", 9)
    steps.step()
    assert steps.listen() == [name("dog")], "another picture shares nothing"


def test_what_is_cached_waits_for_nobodys_slots() -> None:
    steps = Steps(slots=1)
    steps.add("first", 4, "cat", 5)
    steps.run()
    steps.add("holds", 1, "dog")
    steps.add("waits", 2, "bird")
    steps.step()
    cached = steps.add("cached", 4, "cat", 9)
    steps.step()
    assert steps.ended == ["first", "cached"]
    assert cached.cached_tokens == 24
    assert not steps.features.is_known(b"cached")
    steps.run()


def test_a_piece_of_an_image_that_is_not_cached_needs_it() -> None:
    """The cached prefix ends in the middle of an image."""
    steps = Steps(budget=8)
    steps.add("first", 4, "cat", 5, max_tokens=100)
    steps.step()
    steps.make_all()
    steps.step()
    assert steps.computed[name("cat")] == 4
    steps.cancel("first")
    steps.features = steps.scheduler.features = Features(1)
    second = steps.add("second", 4, "cat", 9)
    steps.step()
    assert steps.listen() == [name("cat")]
    steps.run()
    assert second.cached_tokens == 8


def test_prompts_are_cut_through_an_image() -> None:
    steps = Steps(budget=6)
    steps.add("picture", 3, "cat", 5)
    steps.run()
    assert steps.computed[name("cat")] == 16


def test_two_with_the_same_image_encode_it_once_and_compute_it_once() -> None:
    steps = Steps(budget=10)
    steps.add("first", 4, "cat", 5)
    steps.add("second", 4, "cat", 9)
    steps.run()
    assert steps.features.encoded == 1
    assert steps.computed[name("cat")] == 16, "the second follows the first"


def test_features_are_let_go_when_the_prompt_is_computed() -> None:
    steps = Steps(slots=1)
    steps.add("first", 4, "cat", max_tokens=50)
    steps.add("second", 4, "dog", max_tokens=50)
    steps.step()
    assert steps.listen() == [name("cat")]
    steps.make("cat")
    steps.step()
    assert steps.listen()[-1] == name("dog"), "the first decodes, and needs no features"
    steps.make("dog")
    steps.step()
    assert steps.ended == []


def test_a_preempted_one_asks_again() -> None:
    """Its KV was evicted meanwhile, and so were its features."""
    steps = Steps(pages=14, slots=1, budget=64)
    steps.add("old", 4, max_tokens=48)
    steps.add("new", 1, "cat", 3, max_tokens=30)
    steps.step()
    steps.make_all()
    for _ in range(40):
        steps.step()
    assert steps.scheduler.stats().preemptions
    assert steps.listen() == [], "its features were still here"
    steps.run()
    assert sorted(steps.ended) == ["new", "old"]
    assert steps.features.reused


@pytest.mark.parametrize("phase", ["asked", "queued", "making", "ready", "running", "waiting for slots"])
def test_cancel_in_every_phase(phase: str) -> None:
    steps = Steps(slots=1, budget=8)
    if phase == "waiting for slots":
        steps.add("before", 4, "dog")
        steps.step()
    steps.add("picture", 3, "cat", 5)
    steps.step()
    if phase == "queued":
        steps.features.queued(name("cat"))
    elif phase == "making":
        steps.features.begin(name("cat"))
    elif phase in ("ready", "running"):
        steps.make("cat")
    if phase == "running":
        steps.step()
        assert steps.computed[name("cat")]
    assert steps.cancel("picture")
    steps.scheduler.check_integrity()
    assert not steps.features.is_known(b"picture")
    if phase == "making":
        steps.features.complete(name("cat"))
    assert not steps.cancel("picture")
    steps.run()
    steps.add("after", 3, "cow", 5)
    steps.run()
    assert "after" in steps.ended
    assert steps.cache.used == 0


@pytest.mark.parametrize("how", ["refused", "broken", "late"])
def test_a_lost_image_is_a_fault_of_those_that_need_it(how: str) -> None:
    steps = Steps()
    steps.add("picture", 3, "cat", 5)
    steps.add("both", 3, "cat", 2, "dog", 5)
    steps.add("other", 3, "dog", 5)
    steps.step()
    if how == "refused":
        steps.features.refuse(name("cat"), "the client left", retryable=True)
    elif how == "broken":
        steps.features.begin(name("cat"))
        steps.features.broken(name("cat"), "not a number")
    else:
        steps.make("dog")
        steps.now = ANSWER_SECONDS
        assert steps.scheduler.next_expiry == steps.now
    if how != "late":
        assert steps.has_work(), "a step must tell"
    steps.step()
    assert steps.faults.keys() == {"picture", "both"}
    assert all(fault.code == "image_lost" and fault.retryable for fault in steps.faults.values())
    steps.run()
    assert steps.ended == ["other"]


def test_a_cancelled_one_gets_no_fault() -> None:
    steps = Steps()
    steps.add("picture", 3, "cat", 5)
    steps.step()
    steps.features.refuse(name("cat"), "gone", retryable=True)
    steps.cancel("picture")
    assert steps.step() == []


def test_more_images_than_have_room_are_computed_in_rounds() -> None:
    steps = Steps(slots=3, budget=512)
    sequence = steps.add("album", 2, *[part for index in range(9) for part in (f"photo {index}", 7)], max_tokens=3)
    steps.run()
    assert steps.ended == ["album"]
    assert steps.features.encoded == 9, "no image was encoded twice"
    assert sequence.cached_tokens == 0
    assert steps.scheduler.stats().preemptions == 0


@pytest.mark.parametrize("parts", [("map x2", "plan x2"), ("a", 20, "b", 20, "c", 20, "d")], ids=["in one block", "many"])
@pytest.mark.parametrize("kind", [Sequence, FreshSequence])
def test_rounds_compute_nothing_twice(parts: tuple[str | int, ...], kind: type[Sequence]) -> None:
    """Also where the images of two rounds share a block, and where nothing cached may be used."""
    steps = Steps(slots=3)
    steps.add("one", 2, *parts, 5, kind=kind)
    steps.run()
    assert steps.ended == ["one"]
    images = [part for part in parts if isinstance(part, str)]
    assert steps.computed == {name(image): 32 if image.endswith("x2") else 16 for image in images}
    assert steps.features.encoded == len(images)


@pytest.mark.parametrize(("pages", "slots"), [(32, 2), (36, 2), (32, 3), (44, 3), (60, 3)])
def test_rounds_of_several_tenants_do_not_undo_each_other(pages: int, slots: int) -> None:
    """There are pages for one or two of them. Each keeps what it has computed, however many others want pages and features."""
    steps = Steps(pages=pages, slots=slots)
    for who in "abc":
        steps.add(who, 2, *[part for number in range(4) for part in (f"{who} {number}", 9)], lane=who, max_tokens=2)
    steps.run()
    assert sorted(steps.ended) == ["a", "b", "c"]
    assert steps.scheduler.stats().preemptions == 0
    assert set(steps.computed.values()) == {16}, "a position was computed twice"


@pytest.mark.parametrize("is_here", [True, False], ids=["has its image", "waits for its image"])
def test_one_that_pauses_goes_on_before_all_that_have_not_started(is_here: bool) -> None:
    """The other has slots and waits for pages. The one that pauses has these pages and waits for these slots."""
    steps = Steps(pages=32, slots=3)
    steps.add("album", 2, "a x2", 9, "b x2", 9, "c", 9, max_tokens=2)
    steps.add("other", 40, "cat", 40, lane="other")
    steps.step()
    steps.make("a x2")
    if is_here:
        steps.make("cat")
    steps.step()
    assert steps.scheduler.is_paused
    steps.listen()
    assert set(steps.asked[-2:]) == {name("b x2"), name("c")}
    steps.step()
    assert not steps.has_work(), "nothing can go on before the images are here"
    steps.add("text", 3)
    steps.step()
    assert steps.ended == ["text"], "it runs beside one that pauses"
    steps.add("long text", 100)
    steps.step()
    assert not steps.has_work(), "what is ready needs pages of the one that pauses"
    steps.run()
    assert steps.ended[:2] == ["text", "album"]
    assert sorted(steps.ended[2:]) == ["long text", "other"]
    assert steps.scheduler.stats().preemptions == 0


def test_one_that_pauses_takes_only_the_slots_that_it_needs() -> None:
    steps = Steps(pages=36, slots=5)
    steps.add("album", 2, "a x2", 9, "b x2", 9, "c x2", 9)
    steps.add("other", 40, "cat", 40, lane="other")
    steps.step()
    steps.make("a x2", "b x2")
    steps.step()
    assert steps.scheduler.is_paused
    assert steps.features.has_slots(b"other")
    steps.run()


def test_one_that_pauses_gets_the_next_free_slots() -> None:
    """Before one that asked for them earlier, and that would then wait for its pages."""
    steps = Steps(pages=32, slots=3)
    steps.add("album", 2, "a x2", 9, "b x2", 9, "c", 9)
    steps.add("gone", 2, "cow", 2)
    steps.step()
    cow = steps.features.begin(name("cow"))
    assert cow is not None
    steps.cancel("gone")
    steps.make("a x2")
    steps.step()
    assert steps.scheduler.is_paused
    steps.add("other", 40, "cat", 40, lane="other")
    steps.step()
    steps.finish(cow)
    steps.run()
    assert steps.ended == ["album", "other"]


@pytest.mark.parametrize("how", ["cancelled", "refused", "late", "preempted"])
def test_the_end_of_one_that_pauses(how: str) -> None:
    steps = Steps(pages=20, slots=1)
    if how == "preempted":
        steps.add("old", 3, max_tokens=60)
    steps.add("album", 2, "a", 9, "b", 9, max_tokens=2)
    steps.step()
    steps.make_all()
    steps.step()
    assert steps.scheduler.is_paused
    assert steps.listen() == [name("b")]
    if how == "cancelled":
        steps.cancel("album")
    elif how == "refused":
        steps.features.refuse(name("b"), "gone", retryable=True)
    elif how == "late":
        steps.now = ANSWER_SECONDS
    while how == "preempted" and not steps.scheduler.stats().preemptions:
        steps.step()
    steps.step()
    assert set(steps.faults) == ({"album"} if how in ("refused", "late") else set())
    steps.run()
    assert sorted(steps.ended) == (["album", "old"] if how == "preempted" else [])
    assert steps.cache.used == 0
    assert not steps.features.is_known(b"album")


def test_an_image_larger_than_the_pool_is_refused() -> None:
    steps = Steps(slots=1)
    steps.add("one", 2, "map x2", 5)
    assert steps.faults["one"].code == "image_too_large"


def test_features_of_a_thousand_prompts_stay_within_their_memory() -> None:
    steps = Steps(pages=64, slots=5)
    for number in range(1000):
        steps.add(str(number), 2, f"photo {number}", 3, lane=str(number % 7))
    steps.run(is_checked=False)
    assert len(steps.ended) == 1000
    assert steps.features.encoded == 1000
    assert steps.features.used == 5
    assert max(steps.written) == 4
    steps.scheduler.check_integrity()


@pytest.mark.parametrize("seed", range(12))
def test_random_schedules(seed: int) -> None:
    """Images, cancels, preemptions, evictions and failures: nothing is lost, nobody waits for ever, nobody computes without features."""
    draw = random.Random(seed)
    steps = Steps(pages=draw.randint(40, 80), slots=draw.randint(4, 8), max_batch=draw.randint(2, 8), budget=draw.choice([5, 16, 64]))
    names = [f"{index}{draw.choice(['', ' x2'])}" for index in range(7)]
    alive: list[str] = []
    for number in range(150):
        if len(alive) < 12:
            parts = [part for each in draw.choices(names, k=draw.randint(0, 3)) for part in (each, draw.randint(5, 9))]
            steps.add(str(number), draw.randint(1, 9), *parts, max_tokens=draw.randint(1, 20), lane=draw.choice("xy"))
            alive.append(str(number))
        for each in draw.sample(steps.listen(), len(steps.asked) // 2):
            steps.asked.remove(each)
            _answer(steps, each, draw)
        if draw.random() < 0.1:
            steps.cancel(draw.choice(alive))
        steps.step()
        alive = [who for who in alive if who not in steps.ended and who not in steps.faults]
    steps.run()
    assert steps.cache.used == 0
    assert steps.ended


def _answer(steps: Steps, each: bytes, draw: random.Random) -> None:
    kind = draw.random()
    if kind < 0.1:
        steps.features.refuse(each, "gone", retryable=True)
    elif (image := steps.features.begin(each, is_pulled=kind < 0.3)) is not None:
        if kind < 0.2:
            steps.features.pull_failed(each, "no route")
        elif kind < 0.25:
            steps.features.broken(each, "not a number")
        else:
            steps.finish(image)
