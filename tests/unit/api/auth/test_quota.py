"""What a key may use: every limit on a clock of the test's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.auth.quota import Bucket, Quota, duration
from penstock.api.errors import error_headers
from penstock.config.front_end import NO_LIMITS, QuotaLimits
from penstock.metrics.frontend import Tally
from penstock.wire.errors import RequestError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A quota with a clock that only the test moves."""

    def __init__(self, **limits: int) -> None:
        self.clock, self.tally = Clock(), Tally()
        self.quota = Quota("alice", QuotaLimits(**limits), self.tally, self.clock)

    def admit(self, generations: int = 1, prompt_tokens: int = 1) -> Callable[[int], None]:
        """Charges and admits a request. Returns what ends it, with the tokens of its answer."""
        self.quota.charge()
        self.quota.admit(generations, prompt_tokens)
        return partial(self.quota.release, generations, prompt_tokens)

    def refused(self, generations: int = 1, prompt_tokens: int = 1) -> RequestError:
        with pytest.raises(RequestError) as caught:
            self.admit(generations, prompt_tokens)
        return caught.value

    def header(self, name: str) -> str:
        return dict(self.quota.headers())[f"x-ratelimit-{name}".encode()].decode()


def test_requests_a_minute_refill_evenly() -> None:
    bench = Bench(requests_per_minute=6)
    for _ in range(6):
        bench.admit()(0)
    error = bench.refused()
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.message == "`requests_per_minute` of key `alice` is 6: try again in 10s"
    assert error.retry_after == pytest.approx(10)
    bench.clock.now += 9.9
    assert bench.refused().retry_after == pytest.approx(0.1)
    bench.clock.now += 0.1
    bench.admit()
    bench.refused()
    bench.clock.now += 3600
    for _ in range(6):
        bench.admit()
    bench.refused()
    assert bench.tally.quota_refusals == {("alice", "requests_per_minute"): 4}


def test_who_comes_when_it_was_told_gets_in() -> None:
    bench = Bench(requests_per_minute=7, tokens_per_minute=1_000)
    for _ in range(100):
        try:
            bench.admit(prompt_tokens=137)
        except RequestError as error:
            assert error.retry_after is not None
            bench.clock.now += error.retry_after
            bench.admit(prompt_tokens=137)


def test_tokens_are_those_of_prompt_and_answer() -> None:
    bench = Bench(tokens_per_minute=600)
    end = bench.admit(prompt_tokens=100)
    end(200)
    assert bench.header("remaining-tokens") == "300"
    error = bench.refused(prompt_tokens=400)
    assert error.message == "`tokens_per_minute` of key `alice` is 600, of which 300 are left for a prompt of 400: try again in 10s"
    assert error.retry_after == pytest.approx(10)
    bench.clock.now += 10
    bench.admit(prompt_tokens=400)
    assert bench.header("remaining-tokens") == "0"


def test_an_answer_may_overdraw_and_then_others_wait() -> None:
    bench = Bench(tokens_per_minute=60)
    bench.admit(prompt_tokens=10)(110)
    assert bench.header("remaining-tokens") == "0"
    assert bench.refused(prompt_tokens=1).retry_after == pytest.approx(61)
    bench.clock.now += 60
    assert bench.refused(prompt_tokens=1).retry_after == pytest.approx(1)
    bench.clock.now += 1
    bench.admit(prompt_tokens=1)


def test_time_in_which_the_bucket_was_full_is_no_credit() -> None:
    bench = Bench(tokens_per_minute=60)
    end = bench.admit(prompt_tokens=0)
    bench.clock.now += 3600
    end(60)
    assert bench.header("remaining-tokens") == "0"


def test_concurrency_is_given_back_at_the_end() -> None:
    bench = Bench(concurrency=4)
    end_first, end_second = bench.admit(3), bench.admit(1)
    error = bench.refused(1)
    assert error.message == "`concurrency` of key `alice` allows 4 generations at once, of which 4 run: try again in 1s"
    assert (error.status, error.retry_after) == (429, 1.0)
    end_second(0)
    assert bench.quota.running == 3
    bench.refused(2)
    end_first(0)
    assert bench.quota.running == 0
    bench.admit(4)


@pytest.mark.parametrize(
    ("limits", "generations", "prompt_tokens", "message"),
    [
        ({"tokens_per_minute": 100}, 1, 101, "the prompt has 101 tokens; `tokens_per_minute` of key `alice` is 100"),
        ({"concurrency": 2}, 3, 1, "the request asks for 3 generations; `concurrency` of key `alice` allows 2 at once"),
    ],
)
def test_what_can_never_fit_is_not_to_be_tried_again(limits: dict[str, int], generations: int, prompt_tokens: int, message: str) -> None:
    bench = Bench(**limits)
    error = bench.refused(generations, prompt_tokens)
    assert (error.status, error.code, error.retry_after, error.message) == (400, "request_too_large", None, message)
    assert bench.tally.quota_refusals == {("alice", next(iter(limits))): 1}


def test_what_fits_exactly_fits() -> None:
    bench = Bench(tokens_per_minute=100, concurrency=3)
    bench.admit(3, 100)


def test_the_longest_wait_is_told() -> None:
    bench = Bench(requests_per_minute=60, tokens_per_minute=120, concurrency=1)
    bench.admit(prompt_tokens=120)
    assert "concurrency" in bench.refused().message, "a token comes within half a second"
    with pytest.raises(RequestError, match="tokens_per_minute"):
        bench.quota.admit(1, 30)
    bench.quota.release(1, 120, 120)
    assert bench.refused().message == "`tokens_per_minute` of key `alice` is 120, of which 0 are left: try again in 1m0.5s"


def test_a_request_that_is_charged_costs_one_request_whatever_becomes_of_it() -> None:
    bench = Bench(requests_per_minute=3, tokens_per_minute=100)
    bench.refused(prompt_tokens=101)
    bench.admit(prompt_tokens=60)
    bench.refused(prompt_tokens=60)
    assert (bench.header("remaining-requests"), bench.header("remaining-tokens")) == ("0", "40")
    assert "requests_per_minute" in bench.refused().message


def test_what_does_not_generate_needs_a_request_and_nothing_else() -> None:
    bench = Bench(requests_per_minute=3, tokens_per_minute=100, concurrency=1)
    bench.admit(prompt_tokens=100)
    bench.quota.charge(generates=False)
    bench.refused()
    bench.quota.charge(generates=False)
    with pytest.raises(RequestError, match="requests_per_minute"):
        bench.quota.charge(generates=False)


def test_a_refusal_books_nothing() -> None:
    bench = Bench(requests_per_minute=2, tokens_per_minute=100, concurrency=1)
    end = bench.admit(prompt_tokens=60)
    before = bench.quota.headers()
    for generations, prompt_tokens in ((1, 50), (1, 1), (2, 1), (1, 101)):
        bench.refused(generations, prompt_tokens)
    assert bench.quota.headers() == before
    assert bench.quota.running == 1
    end(0)
    bench.admit(prompt_tokens=40)


def test_usage_is_counted_by_name() -> None:
    bench = Bench()
    end = bench.admit(prompt_tokens=5)
    assert not bench.tally.key_requests, "it has not ended yet"
    end(7)
    assert bench.tally.key_requests == {("alice",): 1}
    assert bench.tally.key_tokens == {("alice", "prompt"): 5, ("alice", "completion"): 7}


def test_headers() -> None:
    bench = Bench(requests_per_minute=10, tokens_per_minute=6_000)
    bench.admit(prompt_tokens=250)
    assert bench.quota.headers() == [
        (b"x-ratelimit-limit-requests", b"10"),
        (b"x-ratelimit-remaining-requests", b"9"),
        (b"x-ratelimit-reset-requests", b"6s"),
        (b"x-ratelimit-limit-tokens", b"6000"),
        (b"x-ratelimit-remaining-tokens", b"5750"),
        (b"x-ratelimit-reset-tokens", b"2.5s"),
    ]
    bench.clock.now += 2.4
    assert bench.header("reset-tokens") == "100ms"
    assert Bench(concurrency=5).quota.headers() == []
    assert Bench().quota.headers() == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.25, "250ms"),
        (1, "1s"),
        (1.5, "1.5s"),
        (59.9999, "1m0s"),
        (90, "1m30s"),
        (360, "6m0s"),
        (7265, "2h1m5s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_header_has_whole_seconds_and_none_too_early() -> None:
    assert dict(error_headers(429, 1.2))[b"retry-after"] == b"2"
    assert dict(error_headers(429, 0.01))[b"retry-after"] == b"1"
    assert dict(error_headers(429))[b"retry-after"] == b"1"
    assert b"retry-after" not in dict(error_headers(400))


def test_other_limits_are_used_up_to_the_same_extent() -> None:
    bench = Bench(requests_per_minute=10)
    for _ in range(5):
        bench.admit()
    bench.quota.change(QuotaLimits(requests_per_minute=100, tokens_per_minute=50, concurrency=5))
    assert bench.header("remaining-requests") == "50"
    assert bench.header("remaining-tokens") == "50"
    assert "concurrency" in bench.refused().message, "what runs counts"
    bench.quota.change(NO_LIMITS)
    assert bench.quota.headers() == []
    bench.admit(100, 10**9)


def test_limits_of_ones_own_come_first() -> None:
    defaults = QuotaLimits(1, 2, 3)
    assert QuotaLimits(None, 20, None).or_else(defaults) == QuotaLimits(1, 20, 3)
    assert NO_LIMITS.or_else(defaults) == defaults


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 50), st.integers(0, 50)), max_size=60),
)
def test_over_any_time_a_key_gets_no_more_than_its_limit(per_minute: int, requests: list[tuple[float, int, int]]) -> None:
    """All that is used fits into a full bucket, what has flowed in, and one answer: here each ends before the next comes."""
    clock, used = Clock(), 0
    quota = Quota("alice", QuotaLimits(tokens_per_minute=per_minute), Tally(), clock)
    began = clock.now
    for pause, prompt_tokens, completion_tokens in requests:
        clock.now += pause
        try:
            quota.admit(1, prompt_tokens)
        except RequestError:
            continue
        quota.release(1, prompt_tokens, completion_tokens)
        assert used + prompt_tokens <= per_minute * (1 + (clock.now - began) / 60) + 1e-3
        used += prompt_tokens + completion_tokens


def test_a_clock_that_stands_still_or_goes_back_gives_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(90.0) == 0
    assert bucket.level(101.0) == pytest.approx(1)
