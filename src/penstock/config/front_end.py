"""The settings of the front end's parts: limits, routing, stored responses, API keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from penstock.config.setting import setting

Policy = Literal["kv", "round-robin", "least-loaded", "random"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
MIB = 2**20
MAX_QUOTA = 10**12


@dataclass(frozen=True)
class Limits:
    """What a client may ask of the front end."""

    GROUP: ClassVar[str] = "limits"

    max_generations: int = setting(16_384, "generations at once; further ones get status 429", unit="N", minimum=1)
    max_body_bytes: int = setting(32 * MIB, "largest request body; a larger one gets status 413", unit="BYTES", minimum=1)
    stall_seconds: float = setting(
        60.0, "close the connection of a client that reads nothing for this long", name="stall_timeout", unit="SECONDS", above=0
    )


@dataclass(frozen=True)
class DispatchLimits:
    """How many generations wait, and for how long. Those that wait at the front end can still go to any worker."""

    GROUP: ClassVar[str] = "limits"

    worker_queue: int = setting(
        4096, "generations that wait at one worker for their first token; further ones wait at the front end", unit="N", minimum=1
    )
    max_queued: int = setting(
        8192, "generations that wait at the front end until a worker has room; further ones get status 429", unit="N", minimum=0
    )
    worker_wait: float = setting(30.0, "how long a generation waits for a worker if its model has none", unit="SECONDS", minimum=0)


@dataclass(frozen=True)
class RouterSettings:
    """How to choose a worker. Its cost is `overlap_weight` × blocks to prefill there + `load_weight` × its load in blocks.

    The default of `load_weight` comes from bench/routing.py: a higher one loses cache hits, and zero lets one worker queue. A long prefix
    that every request has would still outweigh any load. So a worker with more than `max_lead` generations above the worker with the
    fewest, and half as many again, is left out of the choice by cost; another worker computes that prefix once and has it from then on.

    A preferred worker is overloaded when its load is more than `overload_blocks` above the load of the least loaded worker, and more than
    `overload_factor` times the load that the least loaded worker would have with this prompt added. So a longer prompt, which is more
    expensive to compute elsewhere, tolerates more load; and small loads, whose ratios mean little, move nothing.

    Predictions last `sibling_seconds` for engines that report what they cache, long enough for requests that arrive together to find each
    other, and `prediction_seconds` for engines that do not.
    """

    GROUP: ClassVar[str] = "routing"

    policy: Policy = setting("kv", "how a worker is chosen; kv: by cached prefix and load", name="router", choices=POLICIES)
    overlap_weight: float = setting(1.0, "cost of one block to prefill", unit="WEIGHT", minimum=0)
    load_weight: float = setting(0.05, "cost of one block of load on a worker", unit="WEIGHT", minimum=0)
    temperature: float = setting(
        0.0, "above 0: draw the worker at random, cheap ones more often", name="router_temperature", unit="NUMBER", minimum=0
    )
    prediction_seconds: float = setting(
        120.0,
        "how long a prompt counts as cached where it was sent, for engines that do not report their cache",
        name="router_prediction_seconds",
        unit="SECONDS",
        minimum=0,
    )
    sibling_seconds: float = setting(
        10.0,
        "the same for engines that report it, until they do, so that requests with a new common prefix go to one worker",
        name="router_sibling_seconds",
        unit="SECONDS",
        minimum=0,
    )
    max_lead: int = setting(
        64,
        "a worker with this many generations more than the worker with the fewest gets no more for its cached prefixes",
        name="router_max_lead",
        unit="N",
        minimum=0,
    )
    overload_blocks: float = setting(
        4096.0,
        "a session leaves its worker when the worker's load is this many blocks above the least loaded worker's",
        name="router_overload_blocks",
        unit="BLOCKS",
        minimum=0,
    )
    overload_factor: float = setting(
        8.0,
        "and this many times the load that the least loaded worker would have with the prompt added",
        name="router_overload_factor",
        unit="FACTOR",
        minimum=1,
    )


@dataclass(frozen=True)
class ResumeLimits:
    """`memory` is for all resumable answers together, in bytes."""

    GROUP: ClassVar[str] = "resumable streams"

    grace: float = setting(60.0, "how long a resumable answer continues without a reader", name="resume_grace", unit="SECONDS", minimum=0)
    keep: float = setting(300.0, "how long it can be read again after its end", name="resume_keep", unit="SECONDS", minimum=0)
    memory: int = setting(1024 * MIB, "memory for the events of all of them", name="resume_memory", unit="MIB", above=0, scale=MIB)


@dataclass(frozen=True)
class StoreLimits:
    """How long and how much the store of responses keeps. `bytes` is for all of it together."""

    GROUP: ClassVar[str] = "stored responses"

    seconds: float = setting(
        30 * 86_400.0,
        "how long a response is kept after it was made, and a conversation after its last use",
        name="response_ttl",
        unit="SECONDS",
        above=0,
    )
    bytes: int = setting(
        1024 * MIB,
        "size of the file; when it is full, the oldest are deleted first",
        name="response_store_size",
        unit="MIB",
        minimum=1,
        scale=MIB,
    )


@dataclass(frozen=True)
class QuotaLimits:
    """What one API key may use. None: unlimited."""

    GROUP: ClassVar[str] = "API keys"

    requests_per_minute: int | None = setting(
        None, "limit of each key that has none of its own in the key file", unit="N", minimum=1, maximum=MAX_QUOTA, unset="no limit"
    )
    tokens_per_minute: int | None = setting(
        None, "the same for tokens, of prompts and answers together", unit="N", minimum=1, maximum=MAX_QUOTA, unset="no limit"
    )
    concurrency: int | None = setting(
        None, "the same for generations at once", name="key_concurrency", unit="N", minimum=1, maximum=MAX_QUOTA, unset="no limit"
    )

    def or_else(self, defaults: QuotaLimits) -> QuotaLimits:
        """These limits, and the defaults where these are None."""
        return QuotaLimits(
            defaults.requests_per_minute if self.requests_per_minute is None else self.requests_per_minute,
            defaults.tokens_per_minute if self.tokens_per_minute is None else self.tokens_per_minute,
            defaults.concurrency if self.concurrency is None else self.concurrency,
        )


NO_LIMITS = QuotaLimits()
