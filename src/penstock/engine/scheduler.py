"""Which generations compute how many tokens in the next step, and which of them must give their pages back.

The embedded engine and the simulator share it. It knows tokens, pages and sessions, but no model.

Generations that have started come first, the oldest before the newest. Each one that decodes gets one token per step. The rest
of the token budget is for prompts, in pieces. A generation starts when there are enough pages for its whole prompt. When pages run out,
the newest generation gives its pages back and is computed again later. So the oldest always progresses, and none waits forever.

Waiting tenants are served in turn, by weight and by the cost of their generations. If others fill the batch, a waiting tenant still gets a
few places soon: for these, the newest generations of the tenant with the most places are preempted.

If a running generation computes the block that a waiting one needs next, the waiting one follows this leader, to share its pages later.
It waits until the leader has computed all that they share, or has stopped. A generation whose KV is pulled from elsewhere waits until the
pull is over. A generation that must compute images waits until it has their features. If there is no room for all of them at once, it
computes as far as its features go, then pauses: it keeps its pages, and its next features come before those of other generations.
Generations that have not started give their features back for it, so that no two generations wait for each other.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, TypeVar, cast

from penstock.fairness import RESERVED_PART, FairQueue, cost_of
from penstock.kv.cache import KVCache
from penstock.kv.features import Features, PlacedImage, place_images
from penstock.kv.radix import Key, Lease, Node
from penstock.kv.sessions import Session, Sessions
from penstock.kv.transfers import Transfers
from penstock.lazy_heap import LazyHeap
from penstock.wire.messages import Fault, Mark, PromptReport, Segment, SessionState, Submit, WorkerStats
from penstock.worker.backend import image_fault, total_length

MAX_SHARES = 8
"""So many tenants have a share of a step's prompt tokens, if their weights are equal. More would make the pieces too small."""

MAX_BLOCKS_MATCHED = 16_384
"""In one step. More cached prompts start in the next ones: matching 10,000 blocks takes some milliseconds."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One generation as the scheduler sees it.

    `tokens` is the prompt and what was generated; the first `computed` of them have KV. Their pages are a `path` in the tree, then a
    `tail` that only this sequence fills.
    """

    request: Submit
    session: Session | None = None
    session_state: SessionState | None = None
    # How many turns of its session had ended when it began.
    since: int = field(init=False)
    tokens: list[int] = field(init=False)
    computed: int = 0
    path: list[Node] = field(default_factory=list)
    tail: list[int] = field(default_factory=list)
    # Set when it first starts, and reported with its first token. A preemption does not change it.
    cached_tokens: int | None = None
    is_reported: bool = False
    # Its place in the queue, whether it goes before all tenants, and what it waits for.
    place: int = 0
    is_urgent: bool = False
    leader: Sequence | None = None
    is_importing: bool = False
    is_awaiting_images: bool = False
    # How many pages it lacked when it was its turn, those of its path that nobody used included, plus all pages that had come into use
    # again by then. 0: it has not tried.
    lacked: int = 0
    # Its images, and up to which position it may compute with the features that it holds.
    images: tuple[PlacedImage, ...] = ()
    features_until: int = sys.maxsize
    # What is added to the positions behind its images, for models whose positions have three axes.
    position_shift: int = 0
    # The block of its prompt that it computes now, and those who wait for it, by the number of blocks they share with it.
    computing: tuple[Node, Key] | None = None
    followers: LazyHeap[Sequence, int] | None = None

    def __post_init__(self) -> None:
        # The choices of a request share their prompt until they start: copying 128 long prompts at once takes long.
        self.tokens = cast("list[int]", self.request.token_ids)
        self.since = 0 if self.session is None else self.session.ended_turns
        if self.request.images:
            self.images = place_images(self.request.token_ids, self.request.images)

    @property
    def to_compute(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def pages(self) -> list[int]:
        return [*[node.page for node in self.path], *self.tail]

    @property
    def lease(self) -> Lease | None:
        """The lease of its session. When the session is over, it has none."""
        return None if self.session is None or self.session.is_over else self.session.lease

    @property
    def skips_cache(self) -> bool:
        """Whether its whole prompt is computed, even where KV is cached."""
        return False

    @property
    def token_cost(self) -> int:
        """What a token of its prompt takes of a step's budget."""
        return 1

    @property
    def max_piece(self) -> int:
        """How many tokens of its prompt a step may compute."""
        return sys.maxsize

    def catch_up(self) -> None:
        """Brings `tokens` and `computed` up to date, where a subclass does not do so with every token."""

    def forget_pages(self) -> None:
        """Its pages were given back: everything must be computed again."""
        self.path, self.tail, self.computed = [], [], 0


S = TypeVar("S", bound=Sequence)


class Work(NamedTuple, Generic[S]):
    """`length` tokens of a sequence, from the first one without KV."""

    sequence: S
    length: int


class Scheduler(Generic[S]):
    """Sequences wait, then run: first they prefill their prompt, then they decode."""

    def __init__(
        self,
        cache: KVCache,
        sessions: Sessions,
        max_batch: int,
        transfers: Transfers | None = None,
        features: Features | None = None,
    ) -> None:
        self.cache = cache
        self.sessions = sessions
        self.features = Features() if features is None else features
        self.transfers = Transfers(cache) if transfers is None else transfers
        self.prefilling: dict[bytes, S] = {}
        self.decoding: dict[bytes, S] = {}
        self._max_batch = max_batch
        self._running: dict[bytes, S] = {}  # both of the above, oldest first
        self._paused: set[bytes] = set()  # those prefilling that wait for the features of their next images
        self._waiting: dict[bytes, S] = {}
        self._ready: FairQueue[S] = FairQueue()  # those waiting that follow nobody, import nothing and await no images
        self._lost: list[tuple[bytes, Fault]] = []  # those waiting whose images cannot be had
        self._is_stuck = False  # all that run are paused, and what is ready needs pages that they have, or that a transport may touch
        self._places: dict[str, int] = {}  # how many run, by lane
        self._first_place = self._last_place = 0
        self._leaders: dict[tuple[Node, Key], S] = {}  # by the block that they compute
        self._to_compute = 0  # tokens of what waits or prefills
        self._preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0

    @property
    def has_work(self) -> bool:
        """Whether a step can do something. What waits for a transfer or an image needs no step before that comes."""
        can_run = len(self._running) > len(self._paused) or bool(self._lost or (self._ready and not self._is_stuck))
        return can_run or (self.transfers.is_used and self.transfers.has_work)

    @property
    def is_paused(self) -> bool:
        """Whether somebody has pages and waits for the features of its next images."""
        return bool(self._paused)

    @property
    def is_empty(self) -> bool:
        """Whether nothing runs or waits, for pages or for a transfer."""
        return not (self._running or self._waiting)

    @property
    def next_expiry(self) -> float:
        """When the next lease ends, or somebody has waited for too long, if nothing else happens."""
        first = self.sessions.next_expiry
        for each in (self.features, self.transfers):
            if each.is_used:
                first = min(first, each.next_expiry)
        return first

    def expire(self, now: float) -> None:
        """Call it first in a step. Ends leases and patience that have run out, and begins imports that wait for pages."""
        self.sessions.expire(now)
        if self.features.is_used:
            self.features.expire(now)
        if self.transfers.is_used:
            self.transfers.advance(now, len(self._running))

    def validate(self, request: Submit) -> Fault | None:
        """The fault of a request that needs more pages than there are, or has an image that needs more memory than there is."""
        pages = self.cache.pages_for(total_length(request))
        if pages > self.cache.pages:
            return Fault("kv_too_small", f"the request needs {pages} KV pages and the worker has {self.cache.pages}")
        if request.images and (reason := self.features.too_large(place_images(request.token_ids, request.images))):
            return Fault("image_too_large", reason)
        return None

    def add(self, sequence: S) -> None:
        """Puts a sequence at the end of the queue. If its KV is pulled from elsewhere, it waits for that."""
        request = sequence.request
        if request.export is not None:
            self.transfers.expect(request.export.transfer, request.export.lease_seconds)
        if not sequence.skips_cache:
            is_pulled = request.source is not None and self.transfers.join(request, partial(self._end_import, sequence))
            sequence.is_importing = is_pulled or self._load(sequence, is_next=False)
        self._last_place += 1
        self._wait(sequence, self._last_place)

    def cancel(self, generation: bytes, now: float) -> bool:
        """Ends a sequence in any state and frees all that it held. Returns whether it was there."""
        sequence = self._waiting.pop(generation, None)
        path: list[Node] = []
        if sequence is not None:
            self._to_compute -= sequence.to_compute
            self._ready.discard(sequence)
            if sequence.images:
                self.features.leave(generation)
            if self.transfers.is_used:
                self.transfers.leave(sequence.request)
            if sequence.leader is not None and sequence.leader.followers is not None:
                sequence.leader.followers.discard(sequence)
        else:
            sequence = self._running.get(generation)
            if sequence is None:
                return False
            path = self._stop(sequence)
            if sequence.is_reported:
                # A stop string of the client ends a generation like this.
                self._retain_marked(sequence, path, now)
        self.end_turn(sequence, now, path)
        return True

    def take_lost(self, now: float) -> list[Segment]:
        """Ends those whose images cannot be had. Call it in each step, after its work was chosen."""
        lost, self._lost = self._lost, []
        return [Segment(generation, None, fault) for generation, fault in lost if self.cancel(generation, now)]

    def finish(self, sequence: S, now: float) -> None:
        """Ends a running sequence. Its KV stays cached, and leased for as long as the request asks."""
        path = self._stop(sequence, sequence.request.retention_seconds, now)
        self._retain_marked(sequence, path, now)
        self.end_turn(sequence, now, path)

    def end_turn(self, sequence: S, now: float, path: Items[Node] = ()) -> None:
        """`path` is what it had computed."""
        session, request = sequence.session, sequence.request
        if request.export is not None:
            self.transfers.finish(request.export.transfer)
        if session is not None:
            if len(path) >= max(1, len(request.token_ids) // self.cache.page_size):
                others = [] if session.active_turns == 1 else [each.path for each in self._running.values() if each.session is session]
                self.sessions.supersede(session, sequence.since, path, others)
                session.images = request.images
            generated = len(sequence.tokens) - len(request.token_ids)
            session.usage.count(len(request.token_ids), sequence.cached_tokens or 0, generated)
            self.sessions.end_turn(session, now)

    def schedule_decodes(self, now: float) -> list[Work[S]]:
        """The next token of every sequence that decodes. Preempts the newest sequences when there are too few pages.

        The oldest come first, which is not the order in which they began to decode. So what is preempted has no work in this step.
        """
        work: list[Work[S]] = []
        for generation, sequence in list(self._running.items()):
            # An earlier one may have preempted it.
            if generation in self.decoding:
                needed = self.cache.pages_for(len(sequence.tokens)) - len(sequence.path) - len(sequence.tail)
                if self.extend(sequence, needed, now):
                    work.append(Work(sequence, 1))
        return work

    def schedule_prompts(self, budget: int, now: float) -> list[Work[S]]:
        """Pieces of prompts, at most `budget` tokens, oldest first; then starts what waits.

        While prompts of several tenants are to be computed, each tenant takes its share of the budget before one takes what is left: a
        prompt of 100,000 tokens does not keep the prompt of another tenant waiting.
        """
        work: dict[bytes, Work[S]] = {}
        shares = self._prompt_shares(budget)
        for sequence in self.prefilling.values():
            if not budget:
                break
            budget -= _add_share(work, sequence, budget, shares)
        matched = 0
        self._is_stuck = False
        # Nothing is looked up before the first is asked for.
        others = self._ready.first_of_each(lane for lane, share in shares.items() if share)
        while budget and len(self._running) < self._max_batch and (first := self._next_to_start(shares, others)) is not None:
            if matched > MAX_BLOCKS_MATCHED:
                break
            sequence = first
            if self._still_lacks(sequence):
                self._is_stuck = len(self._running) == len(self._paused)
                break
            path = [] if sequence.skips_cache else self.cache.match(sequence.request.root, sequence.tokens)
            matched += len(path)
            block = self._next_block(sequence, path)
            if self._steps_aside(sequence, path, block):
                self._ready.discard(sequence)
                continue
            is_new = sequence.cached_tokens is None
            if not self._start(sequence, path, block, now):
                self._is_stuck = len(self._running) == len(self._paused)
                break
            self._ready.serve(sequence, cost_of(sequence.to_compute, sequence.request.max_tokens if is_new else 0))
            budget -= _add_share(work, sequence, budget, shares)
        if shares:
            for sequence in self.prefilling.values():
                budget -= _add_piece(work, sequence, budget)
        return list(work.values())

    def _still_lacks(self, sequence: S) -> bool:
        """Whether it would find too few pages again. Looking up a long prompt in each step, also in the tiers, would hold up those that
        run."""
        # Each page that came into use again since then may be of its path: then it lacks one less, and there is one less for it.
        if not sequence.lacked or self.cache.can_allocate(sequence.lacked - self.cache.reused + len(self._running)):
            return False
        return bool(self._running or self.transfers.is_loading)

    def _steps_aside(self, sequence: S, path: list[Node], block: tuple[Node, Key] | None) -> bool:
        """Whether it has to wait for a leader, for its KV, or for the features of its images, and not for its turn."""
        if not sequence.skips_cache:
            leader = None if block is None else self._leaders.get(block)
            if leader is not None:
                self._follow(sequence, leader, len(path))
                return True
            sequence.is_importing = self._load(sequence, is_next=True)
        return sequence.is_importing or (bool(sequence.images) and not self._has_features(sequence, len(path) * self.cache.page_size))

    def _prompt_shares(self, budget: int) -> dict[str, int]:
        """How much of the budget each tenant with prompts may take at first; nothing when there is only one such tenant.

        A share is at least an eighth: many small pieces are slow to compute.
        """
        weights = {sequence.request.lane: sequence.request.weight for sequence in self.prefilling.values()}
        if not weights or (len(weights) == 1 and not self._ready.lanes):
            return {}
        for lane in self._ready.lanes:
            if lane not in weights and (first := self._ready.first_of(lane)) is not None:
                weights[lane] = first.request.weight
        if len(weights) == 1:
            return {}
        total = sum(weights.values())
        return {lane: math.ceil(budget * max(weight / total, 1 / MAX_SHARES)) for lane, weight in weights.items()}

    def _next_to_start(self, shares: dict[str, int], others: Iterator[S]) -> S | None:
        """Whose turn it is. If that tenant has used up its share, one of each of the `others` is next, unless they made way for it."""
        first = self._ready.first()
        if first is None or first.is_urgent or shares.get(first.request.lane) != 0 or self._ready.is_hurried(first.request.lane):
            return first
        return next(others, None)

    def make_way(self) -> None:
        """Call it first in a step. Frees one place of a full batch for a tenant that waits and has too few.

        The tenant with the most places leaves an eighth of the batch to all others together, and at least one place to each.
        """
        places = self._places
        if len(self._running) < self._max_batch or not self._ready.lanes:
            return
        poorest = min(self._ready.lanes, key=lambda lane: places.get(lane, 0))
        richest = max(places, key=places.__getitem__)
        others = len(places.keys() | set(self._ready.lanes)) - 1
        least = max(1, self._max_batch // RESERVED_PART // max(1, others))
        if places.get(poorest, 0) < min(least, places[richest] - 1):
            newest = next(sequence for sequence in reversed(self._running.values()) if sequence.request.lane == richest)
            self._preempt(newest, is_urgent=False)
            self._ready.hurry(poorest)

    def computed(self, work: Work[S]) -> None:
        """These tokens have KV now: full blocks can be shared from now on."""
        sequence = work.sequence
        sequence.computed += work.length
        self._commit(sequence)
        generation = sequence.request.id
        if generation in self.prefilling:
            self._to_compute -= work.length
            if sequence.to_compute:
                self._lead(sequence)
                if sequence.computed >= sequence.features_until:
                    self._pause(sequence)
            else:
                self.decoding[generation] = self.prefilling.pop(generation)
                self._stop_leading(sequence)
                if sequence.images:
                    self.features.leave(generation)

    def extend(self, sequence: S, count: int, now: float) -> bool:
        """Gives a running sequence more pages. Transfers give way for it first, then the newest sequences are preempted. Returns False if
        it was preempted itself."""
        while not self.cache.can_allocate(count):
            if self.transfers.give_way():
                continue
            newest = next(reversed(self._running.values()))
            self._preempt(newest, is_urgent=True)
            if newest is sequence:
                return False
        if count > 0:
            sequence.tail += self.cache.allocate(count, now)
        return True

    def report(self, sequence: S, logprobs: tuple[bytes, ...] | None, now: float) -> PromptReport:
        """The report about the prompt, for the client, with its packed logprobs. Sent once, with the first token.

        From now on what the marks ask for is leased, however the sequence ends: the client is told so.
        """
        sequence.is_reported = True
        cached, request = sequence.cached_tokens or 0, sequence.request
        self._prompt_tokens += len(request.token_ids)
        self._prompt_tokens_cached += cached
        retained, written = self._retain_marked(sequence, sequence.path, now), []
        known = cached
        for mark in retained:
            written.append(max(0, mark.tokens - known))
            known = max(known, mark.tokens)
        is_leased = bool(retained) or request.retention_seconds > 0 or sequence.lease is not None
        return PromptReport(cached, logprobs, sequence.session_state, retained, tuple(written), "device" if is_leased else None)

    def _retain_marked(self, sequence: S, path: Items[Node], now: float) -> tuple[Mark, ...]:
        """Leases what the marks ask for, in whole blocks. Returns what that is: nothing where leases protect nothing."""
        size, retained = self.cache.page_size, []
        if not self.cache.protects_leases:
            return ()
        for mark in sequence.request.marks:
            blocks = min(mark.tokens // size, len(path))
            self.sessions.retain(path[:blocks], mark.seconds, now)
            retained.append(Mark(blocks * size, mark.seconds))
        return tuple(retained)

    def stats(self, queued_elsewhere: int = 0, prefill_rate: float = 0.0) -> WorkerStats:
        cache, transfers = self.cache, self.transfers
        return WorkerStats(
            running=len(self._running),
            queued=len(self._waiting) + queued_elsewhere,
            kv_blocks_used=cache.used,
            kv_blocks_cached=cache.cached,
            kv_blocks_total=cache.pages,
            kv_blocks_leased=cache.leased,
            sessions=len(self.sessions),
            kv_blocks_evicted=cache.evicted_pages,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            sessions_evicted=self.sessions.evicted,
            prefill_rate=prefill_rate,
            pull_rate=0.0 if transfers.transport is None else transfers.transport.pull_rate,
            tokens_to_compute=self._to_compute,
            exports=transfers.exports if transfers.is_used else 0,
            imports=transfers.imports if transfers.is_used else 0,
            images_encoded=self.features.encoded,
            images_reused=self.features.reused,
            image_positions_to_encode=self.features.positions_to_encode,
        )

    def check_integrity(self, waiting_elsewhere: Iterable[Sequence] = ()) -> None:
        """Raises AssertionError unless pages, sessions and the queue are consistent: see `KVCache.check_integrity`."""
        running = list(self._running.values())
        assert self._running.keys() == self.prefilling.keys() | self.decoding.keys()
        assert self._places == Counter(sequence.request.lane for sequence in running)
        self._ready.check_integrity()
        paths, tails = [each.path for each in running], [each.tail for each in running]
        self.cache.check_integrity([*paths, *self.transfers.paths], [*tails, *self.transfers.tails], self.sessions.leases)
        self.transfers.check_integrity()
        assert self._to_compute == sum(each.to_compute for each in (*self._waiting.values(), *self.prefilling.values()))
        sequences: list[Sequence] = [*running, *self._waiting.values(), *waiting_elsewhere]
        for session in self.sessions:
            assert session.active_turns == sum(1 for sequence in sequences if sequence.session is session)
        for sequence in self._waiting.values():
            leader = sequence.leader
            reasons = (leader is not None) + sequence.is_importing + sequence.is_awaiting_images
            assert reasons == (0 if sequence in self._ready else 1), "it waits for several things, or for nothing"
            lost = any(generation == sequence.request.id for generation, _ in self._lost)
            assert not sequence.is_awaiting_images or self.features.is_waiting(sequence.request.id) or lost, "it waits for no image"
            assert leader is None or (leader in self.prefilling.values() and leader.followers and sequence in leader.followers)
        assert all(leader in running and leader.computing == block for block, leader in self._leaders.items())
        self.features.check_integrity()
        assert self._paused <= self.prefilling.keys()
        for sequence in self.prefilling.values():
            names = {image.span.name for image in sequence.images if sequence.computed <= image.last < sequence.features_until}
            assert not names or self.features.holds(sequence.request.id, names), "it computes an image without features"
        assert not any(self.features.is_known(generation) for generation in self.decoding), "features are held for a prompt with KV"

    def _wait(self, sequence: S, place: int, *, is_urgent: bool = False) -> None:
        sequence.place, sequence.is_urgent = place, is_urgent
        self._waiting[sequence.request.id] = sequence
        self._to_compute += sequence.to_compute
        if not sequence.is_importing:
            self._make_ready(sequence)

    def _load(self, sequence: S, *, is_next: bool) -> bool:
        """Begins to load from the tiers what is worth it. Returns whether the sequence has to wait for that."""
        if not self.transfers.is_used or self.transfers.nearby is None:
            return False
        wake = partial(self._end_import, sequence)
        return self.transfers.load(sequence.request, sequence.tokens, len(self._running), wake, is_next=is_next)

    def _end_import(self, sequence: S) -> None:
        """What a waiting sequence could get from elsewhere is here. It computes the rest."""
        sequence.is_importing = False
        self._make_ready(sequence)

    def _has_features(self, sequence: S, start: int) -> bool:
        """Whether it holds the features of its images from `start` on, or of as many as have room. Otherwise it waits for them, beside
        the queue."""
        images, sequence.features_until = self.features.next_images(sequence.images, start)
        if not images:
            # Its KV is here. In the queue for slots it would wait for those before it.
            self.features.leave(sequence.request.id)
            return True
        sequence.is_awaiting_images = not self._want(sequence, images, partial(self._end_images, sequence))
        return not sequence.is_awaiting_images

    def _want(self, sequence: S, images: Items[PlacedImage], wake: Callable[[], None], *, is_urgent: bool = False) -> bool:
        request, fail = sequence.request, partial(self._lose, sequence)
        turn = request.lane, request.weight, sequence.place
        return self.features.want(request.id, images, *turn, wake, fail, is_urgent=is_urgent)

    def _end_images(self, sequence: S) -> None:
        """A waiting sequence holds the features that it needs."""
        sequence.is_awaiting_images = False
        self._make_ready(sequence)

    def _pause(self, sequence: S) -> None:
        """A running sequence has computed as far as its features go. Those that wait, perhaps for its pages, give theirs back for its next
        ones."""
        generation = sequence.request.id
        self._paused.add(generation)
        images, until = self.features.next_images(sequence.images, sequence.computed)
        go_on = partial(self._go_on, sequence, until)
        if self._want(sequence, images, go_on, is_urgent=True):
            go_on()
        for other in self._waiting.values():
            if self.features.has_slots(generation):
                break
            if self.features.is_known(other.request.id):
                self.features.leave(other.request.id)
                other.lacked = 0
                if other.is_awaiting_images:
                    self._end_images(other)

    def _go_on(self, sequence: S, until: int) -> None:
        self._paused.discard(sequence.request.id)
        sequence.features_until = until

    def _lose(self, sequence: S, reason: str, retryable: bool) -> None:
        """It stays beside the queue until a step ends it."""
        self._lost.append((sequence.request.id, image_fault(reason, retryable=retryable)))

    def _make_ready(self, sequence: S) -> None:
        request, sequence.lacked = sequence.request, 0
        if sequence.is_urgent:
            self._ready.put_first(sequence, sequence.place)
        else:
            self._ready.put(sequence, request.lane, request.weight, sequence.place)

    def _start(self, sequence: S, path: list[Node], block: tuple[Node, Key] | None, now: float) -> bool:
        """Takes the pages for all tokens of a waiting sequence, if one page per running sequence is left."""
        needed = self.cache.pages_for(len(sequence.tokens)) - len(path)
        unused = sum([not node.references for node in path])
        while not self.cache.can_allocate(needed + unused + len(self._running)):
            # While others run, or load what they need, it waits for them. Otherwise transfers give way for it.
            if self._running or self.transfers.is_loading or not self.transfers.give_way():
                sequence.lacked = needed + unused + self.cache.reused
                return False
            unused = sum([not node.references for node in path])
        self.cache.acquire(path, sequence.lease, sequence.request.priority)
        sequence.path = path
        sequence.tail = self.cache.allocate(needed, now)
        sequence.computed = len(path) * self.cache.page_size
        self._to_compute -= sequence.computed
        if self.transfers.is_used:
            self.transfers.started(sequence.request)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
            sequence.tokens = list(sequence.request.token_ids)
        generation = sequence.request.id
        del self._waiting[generation]
        self._running[generation] = self.prefilling[generation] = sequence
        lane = sequence.request.lane
        self._places[lane] = self._places.get(lane, 0) + 1
        if block is not None:
            sequence.computing = block
            self._leaders.setdefault(block, sequence)
        return True

    def _preempt(self, sequence: S, *, is_urgent: bool) -> None:
        self._preemptions += 1
        self._wait_again(sequence, is_urgent=is_urgent)

    def _wait_again(self, sequence: S, *, is_urgent: bool = False) -> None:
        """It gives its pages back and waits before all others of its tenant; if it is urgent, before all others."""
        self._stop(sequence, is_over=False)
        self._first_place -= 1
        self._wait(sequence, self._first_place, is_urgent=is_urgent)

    def _stop(self, sequence: S, retention_seconds: float = 0.0, now: float = 0.0, *, is_over: bool = True) -> list[Node]:
        """A running sequence gives its pages back. Full blocks stay cached, also for a worker that pulls them. Returns their path."""
        generation, lane = sequence.request.id, sequence.request.lane
        del self._running[generation]
        self._places[lane] -= 1
        if not self._places[lane]:
            del self._places[lane]
        if self.decoding.pop(generation, None) is None:
            del self.prefilling[generation]
            self._paused.discard(generation)
            self._to_compute -= sequence.to_compute
        if sequence.images:
            self.features.leave(generation)
        sequence.catch_up()
        self._commit(sequence)
        path = sequence.path
        self.sessions.retain(path, retention_seconds, now)
        if is_over and self.cache.below is not None and path and path[0].leases:
            # A session pauses here, or somebody wants the KV to be kept.
            self.cache.below.pause(path)
        if is_over and sequence.request.export is not None:
            self.transfers.keep(sequence.request.export.transfer, path)
        self.cache.give_back(sequence.tail)
        self.cache.release(path)
        sequence.forget_pages()
        self._stop_leading(sequence)
        return path

    def _commit(self, sequence: S) -> None:
        """Moves full pages of the tail into the tree."""
        size, path, tokens = self.cache.page_size, sequence.path, sequence.tokens
        first, last = len(path), sequence.computed // size
        if last > first:
            keys = [tuple(tokens[start : start + size]) for start in range(first * size, last * size, size)]
            full, sequence.tail = sequence.tail[: last - first], sequence.tail[last - first :]
            parent = path[-1] if path else self.cache.root(sequence.request.root)
            path += self.cache.commit(parent, keys, full, sequence.lease, sequence.request.priority)
            if sequence.request.export is not None:
                self.transfers.committed(sequence.request.export.transfer)

    def _next_block(self, sequence: S, path: list[Node]) -> tuple[Node, Key] | None:
        """The full block of its prompt that it computes after `path`, if there is one."""
        size = self.cache.page_size
        start = len(path) * size
        if len(sequence.tokens) - start <= size:
            return None
        return path[-1] if path else self.cache.root(sequence.request.root), tuple(sequence.tokens[start : start + size])

    def _lead(self, sequence: S) -> None:
        """The sequence goes on to its next block. Followers that share no more with it are tried again."""
        self._leave_block(sequence)
        sequence.computing = self._next_block(sequence, sequence.path)
        if sequence.computing is not None:
            self._leaders.setdefault(sequence.computing, sequence)
        self._wake_followers(sequence, len(sequence.path))

    def _stop_leading(self, sequence: S) -> None:
        self._leave_block(sequence)
        self._wake_followers(sequence, sys.maxsize)

    def _leave_block(self, sequence: S) -> None:
        block, sequence.computing = sequence.computing, None
        if block is not None and self._leaders.get(block) is sequence:
            del self._leaders[block]

    def _follow(self, sequence: S, leader: S, known: int) -> None:
        sequence.leader = leader
        if leader.followers is None:
            leader.followers = LazyHeap()
        shared = _shared_blocks(sequence.request.token_ids, leader.request.token_ids, self.cache.page_size, known)
        leader.followers.put(sequence, shared)

    def _wake_followers(self, leader: S, computed_blocks: int) -> None:
        while leader.followers is not None and (follower := leader.followers.pop_due(computed_blocks)) is not None:
            follower.leader = None
            self._make_ready(self._waiting[follower.request.id])


def _add_share(work: dict[bytes, Work[S]], sequence: S, budget: int, shares: dict[str, int]) -> int:
    """`_add_piece`, with at most what is left of its tenant's share. Without shares it may take all."""
    lane = sequence.request.lane
    if lane not in shares:
        return _add_piece(work, sequence, budget)
    taken = _add_piece(work, sequence, min(budget, shares[lane]))
    shares[lane] -= taken
    return taken


def _add_piece(work: dict[bytes, Work[S]], sequence: S, budget: int) -> int:
    """Adds the next piece of a prompt, or makes its piece longer. Returns what it takes of the budget."""
    cost, planned = sequence.token_cost, work.get(sequence.request.id)
    length = 0 if planned is None else planned.length
    most = min(sequence.max_piece, sequence.features_until - sequence.computed)
    count = min(sequence.to_compute - length, -(-budget // cost), most - length)
    if count <= 0:
        return 0
    work[sequence.request.id] = Work(sequence, length + count)
    return min(count * cost, budget)


def _shared_blocks(first: Items[int], second: Items[int], size: int, low: int) -> int:
    """How many leading full blocks two prompts share, given that they share at least `low`. Binary search: it compares each token once."""
    high = min(len(first), len(second)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if first[low * size : middle * size] == second[low * size : middle * size]:
            low = middle
        else:
            high = middle - 1
    return low
