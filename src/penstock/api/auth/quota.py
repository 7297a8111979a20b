"""What one API key may use: requests and tokens per minute, generations at once.

A request is charged before its body is read, its tokens when they are known. Each front end counts for itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from penstock.config.front_end import NO_LIMITS, QuotaLimits
from penstock.metrics.frontend import REMOVED_KEYS, Tally
from penstock.wire.errors import RequestError

Clock = Callable[[], float]
"""Seconds, monotonic."""

HeaderList = list[tuple[bytes, bytes]]

# Nobody knows when a generation ends. Clients are told to try again after this many seconds.
_CONCURRENCY_RETRY = 1.0
# A smaller shortage is a rounding error.
_ROUNDING = 1e-6


class Bucket:
    """Holds one minute's limit and refills evenly within a minute. It may be overdrawn; then it refills from below zero."""

    __slots__ = ("_as_of", "_level", "per_minute")

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._as_of = now

    def level(self, now: float) -> float:
        """What it holds. Below 0 when overdrawn."""
        self._level = min(self.per_minute, self._level + max(0.0, now - self._as_of) * self.per_minute / 60)
        self._as_of = max(now, self._as_of)
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """The seconds until it holds this amount; 0 if it does."""
        missing = amount - self.level(now)
        return missing * 60 / self.per_minute if missing > _ROUNDING else 0.0

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def resized(self, per_minute: int | None, now: float) -> Bucket | None:
        """A bucket for another limit, as full as this one: waiting times stay the same."""
        if per_minute is None:
            return None
        bucket = Bucket(per_minute, now)
        bucket.take(per_minute * (1 - self.level(now) / self.per_minute), now)
        return bucket


class Quota:
    """The limits of one key, and what it has used of them.

    Tokens are counted when they are used. The length of an answer is not known in advance, so a request is admitted if there are enough
    tokens for its prompt. Its answer may overdraw the bucket; then others wait until it has refilled. Over any period a key gets at
    most one minute's tokens, the refill of that period, and the answers that were running when the tokens ran out.
    """

    def __init__(self, name: str, limits: QuotaLimits, tally: Tally, clock: Clock = time.monotonic) -> None:
        self.name = self._label = name
        self.limits = limits
        self.running = 0
        """Generations that have not ended."""
        self._tally = tally
        self._clock = clock
        self._is_limited = limits != NO_LIMITS
        now = clock()
        self._requests = _bucket(None, limits.requests_per_minute, now)
        self._tokens = _bucket(None, limits.tokens_per_minute, now)

    def retire(self) -> None:
        """The key is removed. Its running requests are counted with those of all removed keys."""
        self._label = REMOVED_KEYS
        self._tally.forget_key(self.name)

    def change(self, limits: QuotaLimits) -> None:
        """Other limits from now on, used up to the same share."""
        now = self._clock()
        self.limits = limits
        self._is_limited = limits != NO_LIMITS
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def charge(self, generates: bool = True) -> None:
        """Charges one request, before its body is read. It is not given back, whatever becomes of the request.

        Raises RequestError, 429, and charges nothing if no request is left. If it `generates`, also if not even one generation may run, or
        no token is left: its body need not be read to know that it cannot be admitted.
        """
        if self._is_limited:
            now = self._clock()
            self._refuse_for_now(int(generates), None if generates else 0, now, requests=1)
            if self._requests is not None:
                self._requests.take(1, now)

    def admit(self, generations: int, prompt_tokens: int) -> None:
        """Admits a charged request, and counts its prompt. The caller must call `release` when it ends.

        Raises RequestError and counts nothing: 429 with the limit, its value and when to try again; 400 if the request alone exceeds a
        limit.
        """
        if self._is_limited:
            now = self._clock()
            self._refuse_impossible(generations, prompt_tokens)
            self._refuse_for_now(generations, prompt_tokens, now)
            if self._tokens is not None:
                self._tokens.take(prompt_tokens, now)
        self.running += generations

    def release(self, generations: int, prompt_tokens: int, completion_tokens: int) -> None:
        """A request has ended: its generations no longer count, and the tokens of its answer are counted."""
        self.running -= generations
        if self._tokens is not None:
            self._tokens.take(completion_tokens, self._clock())
        tally = self._tally
        tally.key_requests[self._label,] += 1
        tally.key_tokens[self._label, "prompt"] += prompt_tokens
        tally.key_tokens[self._label, "completion"] += completion_tokens

    def headers(self) -> HeaderList:
        """What is left of the limits, as OpenAI's headers. Empty without limits."""
        found: HeaderList = []
        if self._requests is None and self._tokens is None:
            return found
        now = self._clock()
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level(now) + _ROUNDING))
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.per_minute),
                    (b"x-ratelimit-remaining-" + name, b"%d" % left),
                    (b"x-ratelimit-reset-" + name, duration(bucket.wait(bucket.per_minute, now)).encode()),
                ]
        return found

    def _refuse_impossible(self, generations: int, prompt_tokens: int) -> None:
        concurrency, tokens = self.limits.concurrency, self.limits.tokens_per_minute
        if concurrency is not None and generations > concurrency:
            message = f"the request asks for {generations:,} generations; `concurrency` of key `{self.name}` allows {concurrency:,} at once"
            raise self._refusal("concurrency", message, None)
        if tokens is not None and prompt_tokens > tokens:
            message = f"the prompt has {prompt_tokens:,} tokens; `tokens_per_minute` of key `{self.name}` is {tokens:,}"
            raise self._refusal("tokens_per_minute", message, None)

    def _refuse_for_now(self, generations: int, prompt_tokens: int | None, now: float, requests: int = 0) -> None:
        """If several limits are reached, the error names the one with the longest wait. An unknown prompt has at least one token."""
        limits, wait, found = self.limits, 0.0, ("", "")
        if limits.concurrency is not None and self.running + generations > limits.concurrency:
            running = f"`concurrency` of key `{self.name}` allows {limits.concurrency:,} generations at once, of which {self.running:,} run"
            wait, found = _CONCURRENCY_RETRY, ("concurrency", running)
        if self._requests is not None and (longer := self._requests.wait(requests, now)) > wait:
            wait, found = longer, ("requests_per_minute", f"`requests_per_minute` of key `{self.name}` is {self._requests.per_minute:,}")
        if self._tokens is not None and (longer := self._tokens.wait(1 if prompt_tokens is None else prompt_tokens, now)) > wait:
            left = max(0, math.floor(self._tokens.level(now)))
            of_prompt = f"of which {left:,} are left" + ("" if prompt_tokens is None else f" for a prompt of {prompt_tokens:,}")
            message = f"`tokens_per_minute` of key `{self.name}` is {self._tokens.per_minute:,}, {of_prompt}"
            wait, found = longer, ("tokens_per_minute", message)
        if wait:
            raise self._refusal(found[0], f"{found[1]}: try again in {duration(wait)}", wait)

    def _refusal(self, limit: str, message: str, wait: float | None) -> RequestError:
        self._tally.quota_refusals[self._label, limit] += 1
        if wait is None:
            # Not 429: trying again does not help.
            return RequestError(message, code="request_too_large", status=400, limit=limit)
        return RequestError(message, code="rate_limit_exceeded", status=429, retry_after=wait, limit=limit)


def duration(seconds: float) -> str:
    """A duration as in OpenAI's headers: 250ms, 1.5s, 6m0s. Rounded up: a request that comes too early is refused."""
    milliseconds = math.ceil(seconds * 1000 - _ROUNDING)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(max(0, milliseconds), 60_000)
    hours, minutes = divmod(minutes, 60)
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + f"{rest / 1000:g}s"


def _bucket(before: Bucket | None, per_minute: int | None, now: float) -> Bucket | None:
    if before is not None:
        return before.resized(per_minute, now)
    return None if per_minute is None else Bucket(per_minute, now)
