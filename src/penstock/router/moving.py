"""What moving KV costs against computing it, in seconds: who computes a prompt, and where its blocks are pulled from. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from penstock.config.front_end import Disaggregation
from penstock.wire.messages import WorkerStats

MoveReason = Literal["prefill", "session", "peer", "drain"]
"""Why blocks are pulled: another worker computes the prompt; a session moved, or was diverted; another worker has them; it drains."""

# Assumed until a worker has measured them: prompt tokens per second, and bytes per second from another worker.
UNMEASURED_PREFILL_RATE = 5_000.0
UNMEASURED_PULL_RATE = 1e9
UNMEASURED_SECONDS = 10.0
"""A worker that has not measured its rate is not given up before it could have computed a prompt slowly."""
# What a pull takes besides its bytes: messages to both workers, and the connection between them.
PULL_SECONDS = 0.01
# A second that the streams of a worker are held up counts this much for each of them, compared with a second until a first token.
STREAM_WEIGHT = 0.5
# Moving must promise to be better than computing by this factor and this time: rates are estimates, and moving can fail.
MARGIN = 1.2
MIN_SAVED_SECONDS = 0.005
MIN_MOVED_BLOCKS = 4


class Place(Struct, frozen=True, gc=False):
    """A worker, as the costs see it. `overlap` counts the leading blocks of the prompt that it has, `waiting_tokens` those of prompts
    that it must compute first, `streams` the generations that run there."""

    name: str
    overlap: int = 0
    waiting_tokens: int = 0
    streams: int = 0
    prefill_rate: float = UNMEASURED_PREFILL_RATE
    pull_rate: float = UNMEASURED_PULL_RATE
    block_bytes: int = 0
    is_measured: bool = True

    @classmethod
    def of(cls, name: str, overlap: int, waiting_tokens: int, streams: int, block_bytes: int, stats: WorkerStats) -> Place:
        """With the rates that the worker has measured."""
        waiting = max(waiting_tokens, stats.tokens_to_compute)
        rates = stats.prefill_rate or UNMEASURED_PREFILL_RATE, stats.pull_rate or UNMEASURED_PULL_RATE
        return cls(name, overlap, waiting, streams, *rates, block_bytes, bool(stats.prefill_rate))


class Prompt(Struct, frozen=True, gc=False):
    """What is to be computed: a number of blocks of `block_size` tokens."""

    blocks: int
    block_size: int

    def lacking(self, place: Place) -> int:
        """The tokens that this worker would have to compute."""
        return max(0, self.blocks - place.overlap) * self.block_size


class Move(Struct, frozen=True, gc=False):
    """Blocks come from `worker`: it has them, or computes them if `reason` is `prefill`. `overlap` is how many of them it has now.
    `seconds`: when they should all have come, `pull_seconds` of these are for the bytes alone."""

    worker: str
    reason: MoveReason
    overlap: int
    seconds: float
    pull_seconds: float


PrefillChoice = Literal["elsewhere", "here", "cached"]
"""A prefill worker computes the prompt; the decode worker does, as that is cheaper; the decode worker has the prompt."""


def compute_cost(place: Place, tokens: int) -> float:
    """Seconds until these tokens are computed there, and what the streams that run there suffer meanwhile."""
    return (place.waiting_tokens + tokens * (1 + STREAM_WEIGHT * place.streams)) / place.prefill_rate


def pull_seconds(target: Place, blocks: int) -> float:
    return PULL_SECONDS + blocks * target.block_bytes / target.pull_rate


def choose_source(target: Place, prompt: Prompt, peers: Sequence[Place], reason: MoveReason, margin: float = MARGIN) -> Move | None:
    """The worker from which the target should pull blocks; None: it computes what it lacks."""
    here = compute_cost(target, prompt.lacking(target))
    best: tuple[float, Move] | None = None
    for peer in peers:
        gained = min(peer.overlap, prompt.blocks) - target.overlap
        if gained < MIN_MOVED_BLOCKS:
            continue
        seconds = pull_seconds(target, gained)
        cost = seconds + compute_cost(target, prompt.lacking(peer))
        if best is None or cost < best[0]:
            best = cost, Move(peer.name, reason, peer.overlap, seconds, seconds)
    return best[1] if best is not None and _is_better(best[0], here, margin) else None


def choose_prefill(target: Place, prompt: Prompt, helpers: Sequence[Place], wish: Disaggregation) -> tuple[PrefillChoice, Move | None]:
    """Whether another worker computes the prompt for the target, and which one.

    Blocks are pulled while later ones are computed. So the slower of the two counts, and the first token does not wait for the other.
    """
    lacking = max(0, prompt.blocks - target.overlap)
    if lacking < MIN_MOVED_BLOCKS and (wish != "always" or not lacking):
        return "cached", None
    if wish == "never" or not helpers:
        return "here", None
    costs = [compute_cost(helper, prompt.lacking(helper)) for helper in helpers]
    best = min(range(len(helpers)), key=costs.__getitem__)
    helper, pull = helpers[best], pull_seconds(target, lacking)
    is_better = _is_better(max(costs[best], pull) + PULL_SECONDS, compute_cost(target, prompt.lacking(target)), MARGIN)
    if wish != "always" and not is_better:
        return "here", None
    seconds = (helper.waiting_tokens + prompt.lacking(helper)) / helper.prefill_rate + pull
    if not helper.is_measured:
        seconds = max(seconds, UNMEASURED_SECONDS)
    return "elsewhere", Move(helper.name, "prefill", helper.overlap, seconds, pull)


def _is_better(moving: float, computing: float, margin: float) -> bool:
    return moving * margin + MIN_SAVED_SECONDS < computing
