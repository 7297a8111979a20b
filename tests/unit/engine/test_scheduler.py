"""The scheduler that the embedded engine and the simulator share, without either: prompts in pieces, followers, preemption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.scheduler import MAX_BLOCKS_MATCHED, Scheduler, Sequence, Work
from penstock.kv.cache import KVCache
from penstock.kv.radix import Node
from penstock.kv.sessions import Sessions
from penstock.wire.messages import Submit

SIZE = 4


class CountingCache(KVCache):
    """The real cache. Counts how often a prompt is matched."""

    matches = 0

    def match(self, root: bytes, token_ids: Items[int]) -> list[Node]:
        self.matches += 1
        return super().match(root, token_ids)


class SlowSequence(Sequence):
    """Computes its prompt in small pieces, so that the budget is never used up."""

    __slots__ = ()

    @property
    def max_piece(self) -> int:
        return 2 * SIZE


class FreshSequence(SlowSequence):
    """Computes its whole prompt, even where KV is cached."""

    __slots__ = ()

    @property
    def skips_cache(self) -> bool:
        return True


class CostlySequence(Sequence):
    """Each of its prompt tokens takes much of the budget."""

    __slots__ = ()

    @property
    def token_cost(self) -> int:
        return 8


class Steps:
    """A scheduler, and an engine that makes the same token for everyone."""

    def __init__(self, pages: int = 4096, page_size: int = SIZE, max_batch: int = 256, budget: int = 512) -> None:
        self.cache = CountingCache(pages, page_size)
        self.scheduler: Scheduler[Sequence] = Scheduler(self.cache, Sessions(self.cache, 10, 0.0), max_batch)
        self.budget = budget
        self.ended: list[int] = []

    def add(self, number: int, prompt: Items[int], max_tokens: int = 1, kind: type[Sequence] = Sequence, **fields: Any) -> Sequence:
        sequence = kind(Submit(number.to_bytes(16), tuple(prompt), max_tokens, seed=0, **fields))
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, number: int) -> bool:
        return self.scheduler.cancel(number.to_bytes(16), 0.0)

    def step(self, *, is_checked: bool = True) -> dict[int, int]:
        """One step. Returns how many tokens of each sequence it computes."""
        self.scheduler.make_way()
        work: list[Work[Sequence]] = self.scheduler.schedule_decodes(0.0)
        work += self.scheduler.schedule_prompts(max(self.budget - len(work), 1), 0.0)
        for item in work:
            has_room_for = len(item.sequence.pages) * self.cache.page_size
            assert has_room_for >= item.sequence.computed + item.length, "every token of a step has a page"
        for item in work:
            sequence = item.sequence
            self.scheduler.computed(item)
            if not sequence.to_compute:
                sequence.tokens.append(7)
                if len(sequence.tokens) - len(sequence.request.token_ids) >= sequence.request.max_tokens:
                    self.scheduler.finish(sequence, 0.0)
                    self.ended.append(int.from_bytes(sequence.request.id))
        if is_checked:
            self.scheduler.check_integrity()
        return {int.from_bytes(item.sequence.request.id): item.length for item in work}

    def run(self, max_steps: int = 1000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"work is left after {max_steps} steps: {self.scheduler.stats()}")


def test_a_thousand_waiting_prompts_with_one_prefix_are_not_matched_in_every_step() -> None:
    steps = Steps(pages=20_000, page_size=16, budget=8192)
    prefix = range(8000)
    steps.add(0, [*prefix, 1], kind=SlowSequence)
    followers = [steps.add(number, [*prefix, *[number] * 20]) for number in range(1, 1001)]
    steps.step()
    assert steps.cache.matches == 1001, "each was looked at once"
    for _ in range(8000 // (2 * SIZE) - 2):
        assert list(steps.step(is_checked=False)) == [0]
    assert steps.cache.matches == 1001, "not again while the prefix is computed"
    while steps.scheduler.has_work:
        steps.step(is_checked=False)
    steps.scheduler.check_integrity()
    assert steps.cache.matches == 2001, "once more when it is there"
    assert {sequence.cached_tokens for sequence in followers} == {8000}


def test_a_prompt_that_lacked_pages_starts_when_others_use_its_prefix() -> None:
    """Nobody used the prefix when it was its turn, so it needed these pages, too."""
    steps, prefix = Steps(pages=19), range(8 * SIZE)
    steps.add(0, [*prefix, 1])
    steps.run()
    steps.add(1, range(100, 100 + 5 * SIZE), max_tokens=4, lane="first")
    steps.step()
    steps.add(2, [*prefix, *range(200, 200 + 5 * SIZE)], lane="first")
    assert 2 not in steps.step(), "it lacks pages"
    steps.add(3, [*prefix, 3], max_tokens=100, lane="second")
    assert 3 in steps.step()
    while 1 not in steps.ended:
        assert 2 not in steps.step()
    assert steps.step()[2] == 5 * SIZE
    assert 3 not in steps.ended


def test_a_step_does_not_look_up_too_many_blocks() -> None:
    """Prompts that are cached as a whole cost no budget, but finding them takes time."""
    steps = Steps(pages=10_000, page_size=16, budget=8192)
    prompt = range(64_000)
    steps.add(0, prompt)
    steps.run()
    for number in range(1, 129):
        steps.add(number, prompt)
    started = steps.step(is_checked=False)
    assert len(started) == MAX_BLOCKS_MATCHED // 4000 + 1
    while steps.scheduler.has_work:
        steps.step(is_checked=False)
    assert sorted(steps.ended) == list(range(129))
    steps.scheduler.check_integrity()


def test_costly_tokens_take_more_of_the_budget() -> None:
    steps = Steps(budget=100)
    steps.add(0, prompt_of(0, 24), kind=CostlySequence)
    steps.add(1, prompt_of(1, 90))
    assert steps.step() == {0: 13}, "less than one token of the budget is left"
    assert steps.step() == {0: 11, 1: 12}
    steps.run()
    assert sorted(steps.ended) == [0, 1]


def test_a_follower_starts_when_the_leader_has_computed_what_they_share() -> None:
    steps = Steps()
    leader = steps.add(0, range(100), kind=SlowSequence)
    partner = steps.add(1, [*range(40), *range(500, 530)])
    stranger = steps.add(2, range(900, 930))
    started = [{number for number in steps.step() if number} for _ in range(12)]
    assert started.index({2}) == 0, "who shares nothing does not wait"
    assert started.index({1}) == 40 // (2 * SIZE)
    assert (leader.cached_tokens, partner.cached_tokens, stranger.cached_tokens) == (0, 40, 0)


def test_nobody_follows_a_leader_of_another_root() -> None:
    """Whoever waited for it would learn that it computes the same prompt."""
    steps = Steps()
    steps.add(0, range(100), kind=SlowSequence, root=b"alice")
    own = steps.add(1, range(100), root=b"alice")
    guess = steps.add(2, range(100), root=b"mallory")
    wrong = steps.add(3, range(500, 600), root=b"mallory")
    assert steps.step() == {0: 2 * SIZE, 2: 100, 3: 100}
    steps.run()
    assert (own.cached_tokens, guess.cached_tokens, wrong.cached_tokens) == (96, 0, 0)


@pytest.mark.parametrize("how", ["cancelled", "finished"])
def test_followers_go_on_when_their_leader_is_gone(how: str) -> None:
    steps = Steps()
    steps.add(0, range(100), kind=SlowSequence)
    followers = [steps.add(number, [*range(100), 50, number, *range(60, 70)]) for number in range(1, 4)]
    for _ in range(5):
        steps.step()
    assert steps.scheduler.stats().queued == 3
    if how == "cancelled":
        assert steps.cancel(0)
        assert list(steps.step()) == [1], "the first of them leads now"
    steps.run()
    assert sorted(steps.ended) == ([1, 2, 3] if how == "cancelled" else [0, 1, 2, 3])
    assert sorted(sequence.cached_tokens or 0 for sequence in followers) == [40, 100, 100] if how == "cancelled" else [100] * 3


def test_a_leader_stays_one_when_another_that_computes_the_same_block_ends() -> None:
    steps = Steps()
    steps.add(0, range(100), kind=SlowSequence)
    steps.add(1, range(100), kind=FreshSequence)
    steps.step()
    assert steps.cancel(1)
    steps.add(2, [*range(100), 5])
    assert list(steps.step()) == [0]
    steps.run()
    assert steps.ended == [0, 2]


def test_a_follower_that_is_cancelled_is_gone() -> None:
    steps = Steps()
    steps.add(0, range(100), kind=SlowSequence)
    steps.add(1, [*range(100), 5])
    steps.step()
    assert steps.cancel(1)
    assert not steps.cancel(1)
    steps.run()
    assert steps.ended == [0]


def test_followers_keep_their_place_in_the_queue() -> None:
    steps = Steps(max_batch=2)
    steps.add(0, range(40), kind=SlowSequence)
    steps.add(1, range(41))
    steps.add(2, range(500, 510), max_tokens=60)
    steps.add(3, range(600, 610))
    while steps.ended != [0]:
        steps.step()
    assert 1 in steps.step(), "before the one that came later"


def test_a_sequence_starts_only_if_it_leaves_a_page_for_each_that_runs() -> None:
    steps = Steps(pages=8)
    steps.add(0, range(3 * SIZE), max_tokens=3)
    steps.add(1, range(100, 100 + 5 * SIZE))
    assert list(steps.step()) == [0], "both prompts would fill all pages"
    steps.run()
    assert steps.ended == [0, 1]
    assert not steps.scheduler.stats().preemptions


def test_the_newest_is_preempted_and_starts_again_before_those_that_wait() -> None:
    steps = Steps(pages=12)
    for number in range(3):
        steps.add(number, range(number * 100, number * 100 + 12), max_tokens=20)
    while not steps.scheduler.stats().preemptions:
        steps.step()
    assert steps.scheduler.stats().queued
    steps.run()
    assert steps.ended == [0, 1, 2]


def test_a_sequence_that_is_preempted_is_not_in_the_step() -> None:
    """The older one decodes later, because it computes its prompt in small pieces. When it needs a page, the newer one has its work."""
    steps = Steps(pages=9)
    steps.add(0, range(12), max_tokens=20, kind=SlowSequence)
    steps.add(1, range(100, 106), max_tokens=20)
    steps.step()
    assert [int.from_bytes(each) for each in steps.scheduler.decoding] == [1]
    steps.run()
    assert steps.scheduler.stats().preemptions
    assert steps.ended == [0, 1]


@given(st.data())
def test_everything_ends_whatever_happens(data: st.DataObject) -> None:
    steps = Steps(pages=data.draw(st.integers(12, 30)), max_batch=data.draw(st.integers(1, 5)), budget=data.draw(st.integers(1, 40)))
    expected: set[int] = set()
    for number in range(data.draw(st.integers(1, 25))):
        shared, own = data.draw(st.integers(0, 16)), data.draw(st.integers(1, 12))
        prompt = [*range(shared), *range(100 * data.draw(st.integers(1, 3)), 1000)][: shared + own]
        steps.add(number, prompt, data.draw(st.integers(1, 12)), data.draw(st.sampled_from([Sequence, SlowSequence])))
        expected.add(number)
        if data.draw(st.booleans()):
            steps.step()
        if data.draw(st.integers(0, 4)) == 0:
            steps.cancel(data.draw(st.integers(0, number)))
    steps.run(3000)
    assert len(steps.ended) == len(set(steps.ended))
    assert set(steps.ended) <= expected
    assert steps.cache.used == 0


def prompt_of(number: int, length: int = SIZE) -> list[int]:
    return [number * 100 + index for index in range(length)]


def lanes_of(numbers: Items[int]) -> str:
    """Sequences from 1000 on belong to the tenant b, the others to a."""
    return "".join("b" if number >= 1000 else "a" for number in numbers)


def test_tenants_that_wait_start_in_turn() -> None:
    steps = Steps(max_batch=1)
    for number in range(50):
        steps.add(number, prompt_of(number), lane="a")
    for number in range(1000, 1004):
        steps.add(number, prompt_of(number), lane="b")
    for _ in range(12):
        steps.step()
    assert lanes_of(steps.ended) == "abababab" + "aaaa"


def test_a_tenant_of_three_times_the_weight_starts_three_times_as_often() -> None:
    steps = Steps(max_batch=1)
    for number in range(50):
        steps.add(number, prompt_of(number), lane="a", weight=3)
        steps.add(1000 + number, prompt_of(1000 + number), lane="b")
    for _ in range(40):
        steps.step()
    assert Counter(lanes_of(steps.ended)) == {"a": 30, "b": 10}


def test_long_prompts_cost_their_tenant_more_turns() -> None:
    steps = Steps(max_batch=1)
    for number in range(50):
        steps.add(number, prompt_of(number, 31), lane="a")
        steps.add(1000 + number, prompt_of(1000 + number, 7), lane="b")
    for _ in range(50):
        steps.step()
    assert Counter(lanes_of(steps.ended)) == {"a": 10, "b": 40}


def test_a_late_tenant_gets_a_place_though_another_fills_the_batch() -> None:
    steps = Steps(max_batch=16)
    flood = [steps.add(number, prompt_of(number), max_tokens=1000, lane="a") for number in range(40)]
    for _ in range(5):
        steps.step()
    for number in range(1000, 1005):
        steps.add(number, prompt_of(number), max_tokens=3, lane="b")
    for _ in range(30):
        steps.step()
        running = Counter(sequence.request.lane for sequence in (*steps.scheduler.decoding.values(), *steps.scheduler.prefilling.values()))
        assert running["a"] >= 14, "an eighth of the batch"
    assert lanes_of(steps.ended) == "bbbbb"
    assert all(sequence.request.id in steps.scheduler.decoding for sequence in flood[:14]), "the newest make way"
    assert steps.scheduler.stats().preemptions == 2
    assert steps.scheduler.stats().running == 16


def test_an_eighth_of_the_batch_is_for_the_others_even_if_it_is_not_their_turn() -> None:
    steps = Steps(max_batch=16)
    for number in range(40):
        steps.add(number, prompt_of(number), max_tokens=1000, lane="a")
    steps.step()
    for number in range(1000, 1004):
        # Each costs so much that the other tenant's turn would come first.
        steps.add(number, prompt_of(number, 90), max_tokens=1000, lane="b")
    for _ in range(10):
        steps.step()
    assert Counter(sequence.request.lane for sequence in steps.scheduler.decoding.values()) == {"a": 14, "b": 2}
    assert steps.scheduler.stats().preemptions == 2


def test_tenants_without_a_place_each_get_one_and_then_nobody_makes_way() -> None:
    steps = Steps(max_batch=4)
    for number in range(20):
        steps.add(number, prompt_of(number), max_tokens=1000, lane="a")
    steps.step()
    for number in range(1000, 1010):
        steps.add(number, prompt_of(number), max_tokens=1000, lane=f"b{number % 2}")
    for _ in range(50):
        steps.step()
    assert steps.scheduler.stats().preemptions == 2
    running = Counter(sequence.request.lane for sequence in steps.scheduler.decoding.values())
    assert running == {"a": 2, "b0": 1, "b1": 1}


def test_what_made_way_continues_before_its_tenant_s_other_generations() -> None:
    steps = Steps(max_batch=2)
    for number in range(4):
        steps.add(number, prompt_of(number), max_tokens=8, lane="a")
    steps.step()
    steps.add(1000, prompt_of(1000), max_tokens=2, lane="b")
    while steps.scheduler.has_work:
        steps.step()
    assert steps.ended == [1000, 0, 1, 2, 3]


def test_without_tenants_nobody_makes_way() -> None:
    steps = Steps(max_batch=2)
    for number in range(6):
        steps.add(number, prompt_of(number), max_tokens=4)
    while steps.scheduler.has_work:
        steps.step()
    assert steps.ended == [0, 1, 2, 3, 4, 5]
    assert steps.scheduler.stats().preemptions == 0


def test_a_long_prompt_leaves_a_share_of_each_step_to_other_tenants() -> None:
    steps = Steps(budget=64)
    steps.add(1, prompt_of(1, 1000), lane="a")
    assert steps.step() == {1: 64}
    steps.add(1001, prompt_of(1001, 20), lane="b")
    assert steps.step() == {1: 44, 1001: 20}, "what the other does not need is not lost"
    steps.add(1002, prompt_of(1002, 1000), lane="b")
    steps.add(1003, prompt_of(1003, 1000), lane="b")
    done = steps.step()
    assert (done[1], done[1002]) == (32, 32)
    assert 1003 not in done, "prompts of one tenant are computed one after the other"
    steps.cancel(1002)
    steps.cancel(1003)
    assert steps.step()[1] == 64


def test_shares_of_a_step_follow_the_weights_and_are_not_too_small() -> None:
    steps = Steps(budget=64)
    for number in range(3):
        steps.add(number, prompt_of(number, 1000), lane="a", weight=3)
    steps.add(1000, prompt_of(1000, 1000), lane="b")
    steps.step()
    assert steps.step() == {0: 48, 1000: 16}
    for number in range(30):
        steps.add(2000 + number, prompt_of(2000 + number, 1000), lane=f"c{number}")
    for _ in range(5):
        done = steps.step()
        assert sum(done.values()) == 64
        assert len(done) <= 9
        assert {0, 1000} <= done.keys()


def test_costly_prompts_leave_a_share_too() -> None:
    steps = Steps(budget=64)
    steps.add(1, prompt_of(1, 1000), kind=CostlySequence, lane="a")
    assert steps.step() == {1: 8}
    steps.add(1001, prompt_of(1001, 100), lane="b")
    assert steps.step() == {1: 4, 1001: 32}


def test_a_tenant_that_has_used_up_its_share_does_not_keep_another_from_starting() -> None:
    steps = Steps(budget=64)
    steps.add(1000, prompt_of(1000, 1200), lane="b")
    steps.run()
    for number in range(3):
        steps.add(number, prompt_of(number, 1000), lane="a")
    assert steps.step() == {0: 64}
    # The other has had more so far, so the next turn is not its own.
    steps.add(1001, prompt_of(1001, 20), lane="b")
    assert steps.step() == {0: 44, 1001: 20}
    steps.run()
    assert steps.ended == [1000, 1001, 0, 1, 2]


def test_a_tenant_gets_the_place_that_another_leaves_though_its_share_is_used_up() -> None:
    steps = Steps(max_batch=16, budget=80)
    for number in range(40):
        steps.add(number, prompt_of(number), max_tokens=1000, lane="a")
    steps.step()
    steps.add(1000, prompt_of(1000, 1000), max_tokens=1000, lane="b")
    steps.add(1001, prompt_of(1001, 1000), max_tokens=1000, lane="b")
    for _ in range(5):
        steps.step()
        assert steps.scheduler.stats().running == 16
    assert steps.scheduler.stats().preemptions == 2
    assert Counter(sequence.request.lane for sequence in steps.scheduler.prefilling.values()) == {"b": 2}
