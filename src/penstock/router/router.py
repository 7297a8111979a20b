"""The router: what is known about all workers, and where the next generation goes."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs

from penstock.config.front_end import Policy, RouterSettings
from penstock.router.index import KvFeed, PrefixIndex
from penstock.router.moving import MIN_MOVED_BLOCKS, UNMEASURED_PREFILL_RATE, Move, MoveReason, Place, Prompt, choose_prefill, choose_source
from penstock.router.policy import Decision, Preference, RouteRequest, WorkerView, choose
from penstock.wire.messages import KvEvents, ModelInfo, Snapshot, WorkerStats

REPEAT_SECONDS = 0.5
"""A prompt that is sent to the same worker again within this time is not predicted again."""


class Candidate(Struct, frozen=True, gc=False):
    """A worker that could take the generation. The fields mean the same as in `WorkerView`."""

    name: str
    has_room: bool = True
    is_quiet: bool = False


@dataclass(slots=True, eq=False)
class _Worker:
    """What is known about one worker."""

    model: ModelInfo
    feed: KvFeed | None
    load: WorkerLoad
    stats: WorkerStats = field(default_factory=WorkerStats)

    def saved_by_loading(self) -> tuple[float, float]:
        """The share of the time to compute a block that loading it from host memory, and from the disk, saves."""
        stats = self.stats
        compute = self.model.block_size / (stats.prefill_rate or UNMEASURED_PREFILL_RATE)
        host = self.model.kv_block_bytes / stats.host_rate if stats.host_rate else compute
        disk = host + (self.model.kv_block_bytes / stats.disk_rate if stats.disk_rate else 0.0)
        return max(0.0, 1 - host / compute), max(0.0, 1 - disk / compute)

    @property
    def kin(self) -> bytes:
        """Workers with the same value can use each other's KV. Empty: its KV does not move."""
        return self.model.kv_fingerprint if self.model.kv_address or self.model.kv_handover != "blocks" else b""


class Router:
    """Knows the workers of all models, and chooses among the candidates of a call. No method waits or does I/O.

    A worker is known from `join` to `leave`. Reports of unknown workers are ignored: a link may end at any moment. `decisions` counts
    choices by reason, `diversions` counts preferred workers that were not taken, by reason. `prefill_choices` counts, for prompts that a
    prefill worker could compute, where they were computed.
    """

    def __init__(
        self, settings: RouterSettings, clock: Callable[[], float] = time.monotonic, draw: Callable[[], float] = random.random
    ) -> None:
        self.settings = settings
        self.decisions: Counter[str] = Counter()
        self.diversions: Counter[str] = Counter()
        self.prefill_choices: Counter[str] = Counter()
        self.index = PrefixIndex()
        self._clock = clock
        self._draw = draw
        self._workers: dict[str, _Worker] = {}
        # How many workers can use each other's KV, by what they have in common.
        self._kin: Counter[bytes] = Counter()
        self._last_names: Sequence[bytes] = ()
        self._last_workers: set[str] = set()
        self._last_predicted = 0.0
        self.avoids: Callable[[str, str], bool] = lambda source, target: False  # noqa: ARG005
        """Whether the second worker should pull nothing from the first one now."""
        # A round-robin counter per model.
        self._turns: Counter[str] = Counter()

    def join(self, worker: str, model: ModelInfo) -> bool:
        """A new link to a worker. Returns True when the caller must ask for a snapshot."""
        self.leave(worker)
        has_events = "kv_events" in model.capabilities
        self.index.join(worker, self.settings.sibling_seconds if has_events else self.settings.prediction_seconds)
        joined = self._workers[worker] = _Worker(model, KvFeed(self.index, worker) if has_events else None, WorkerLoad())
        self._kin[joined.kin] += 1
        return has_events

    def leave(self, worker: str) -> None:
        """Forgets the worker. Unknown workers are ignored."""
        left = self._workers.pop(worker, None)
        if left is not None:
            self._kin[left.kin] -= 1
            self.index.leave(worker)
            self._last_workers.discard(worker)

    def leave_more(self) -> bool:
        """Goes on with forgetting those that have left. Returns whether there is more of it: then call it again soon."""
        return self.index.leave_more()

    def receive(self, worker: str, events: KvEvents) -> bool:
        """Takes a worker's events. Returns True when the caller must ask for a snapshot."""
        known = self._workers.get(worker)
        return known is not None and known.feed is not None and known.feed.receive(events)

    def load_snapshot(self, worker: str, snapshot: Snapshot) -> None:
        """Takes the complete list of a worker's cached blocks."""
        known = self._workers.get(worker)
        if known is not None and known.feed is not None:
            known.feed.load(snapshot)

    def load_more(self, worker: str) -> bool:
        """Goes on with a snapshot. Returns whether there is more of it: then call it again soon."""
        known = self._workers.get(worker)
        return known is not None and known.feed is not None and known.feed.load_more()

    def report(self, worker: str, stats: WorkerStats) -> None:
        """Takes a worker's own figures."""
        known = self._workers.get(worker)
        if known is not None:
            known.load.report(stats)
            known.stats = stats

    def choose(
        self,
        candidates: Sequence[Candidate],
        prompt: Sequence[bytes] | Callable[[], Sequence[bytes]],
        blocks: int,
        preferred: str | None = None,
        preferred_reason: Preference = "session",
        policy: Policy | None = None,
        helpers: Sequence[str] = (),
    ) -> Decision | None:
        """The worker for a prompt of `blocks` blocks, the last of which may be partly filled; None when there is no candidate.

        `prompt` is the names of its full blocks, or a function that returns them. The function is called only if the names matter: if KV
        can be moved, or if there are several candidates and the policy is `kv`. A preferred worker needs them, too: without its overlap,
        its load would be estimated too high. The decision then has the names. `helpers` are workers that could compute the prompt for
        the chosen one.
        """
        if not candidates:
            return None
        names: Sequence[bytes] = ()
        if (len(candidates) > 1 and (policy or self.settings.policy) == "kv") or self._can_move(candidates[0].name):
            names = prompt() if callable(prompt) else prompt
        overlaps = self.index.overlaps(names, self._clock()) if names else {}
        usable = self._with_tiers(names, overlaps) if names else overlaps
        view = [self._view(candidate, usable.get(candidate.name, 0)) for candidate in candidates]
        first = self._workers.get(candidates[0].name)
        model = first.model.name if first is not None else ""
        turn = self._turns[model]
        self._turns[model] = turn + 1
        request = RouteRequest(blocks, preferred, preferred_reason, policy)
        decision = choose(view, request, self.settings, turn, self._draw())
        assert decision is not None
        self.decisions[decision.reason] += 1
        if decision.diverted is not None:
            self.diversions[decision.diverted] += 1
        if not names and not self._needs_partner(decision.worker):
            return decision
        reason: MoveReason = "session" if preferred_reason == "session" and preferred not in (None, decision.worker) else "peer"
        move = self._move(decision, blocks, names, overlaps, helpers, reason) if self._can_move(decision.worker) else None
        return structs.replace(decision, names=names, move=move)

    def inherit(self, decision: Decision, source: str, blocks: int | None) -> Move | None:
        """For a generation that leaves a worker that drains: whether its new worker pulls the full blocks from there. None of `blocks`: its
        prompt was still being computed, and those count that the worker has reported."""
        known = self._workers.get(decision.worker)
        if known is None or known.model.kv_handover != "blocks" or not self._can_pull(decision.worker, source):
            return None
        if blocks is None:
            blocks = self.index.reported(source, decision.names)
        prompt, target = Prompt(blocks + 1, known.model.block_size), self._place(decision.worker, decision.overlap)
        return choose_source(target, prompt, [self._place(source, blocks)], "drain", margin=1.0)

    def _with_tiers(self, names: Sequence[bytes], overlaps: Mapping[str, int]) -> Mapping[str, int]:
        """The overlap of each worker, with the blocks that it can load from its host memory or its disk. Such a block counts as much as
        loading it saves of the time that computing it takes."""
        tiered = [(name, worker) for name, worker in self._workers.items() if worker.stats.kv_host_total]
        if not tiered:
            return overlaps
        now, usable = self._clock(), dict(overlaps)
        in_host, on_disk = self.index.overlaps(names, now, "host"), self.index.overlaps(names, now, "disk")
        for name, worker in tiered:
            device, host = overlaps.get(name, 0), in_host.get(name, 0)
            from_host, from_disk = worker.saved_by_loading()
            usable[name] = device + int((host - device) * from_host + (on_disk.get(name, 0) - host) * from_disk)
        return usable

    def _needs_partner(self, worker: str) -> bool:
        """Whether it cannot compute a prompt itself."""
        known = self._workers.get(worker)
        return known is not None and known.model.kv_handover == "meeting"

    def _can_move(self, worker: str) -> bool:
        known = self._workers.get(worker)
        return known is not None and bool(known.kin) and self._kin[known.kin] > 1

    def _can_pull(self, target: str, source: str) -> bool:
        known, peer = self._workers.get(target), self._workers.get(source)
        if target == source or known is None or peer is None or not known.kin or known.kin != peer.kin:
            return False
        return self._needs_partner(target) or not self.avoids(source, target)

    def _move(
        self,
        decision: Decision,
        blocks: int,
        names: Sequence[bytes],
        overlaps: Mapping[str, int],
        helpers: Sequence[str],
        reason: MoveReason,
    ) -> Move | None:
        """Where blocks of the prompt come from, if not from the chosen worker itself."""
        chosen = decision.worker
        model = self._workers[chosen].model
        prompt, target = Prompt(blocks, model.block_size), self._place(chosen, decision.overlap)
        able = [self._place(name, overlaps.get(name, 0)) for name in helpers if self._can_pull(chosen, name)]
        source = self._peer(prompt, target, names, overlaps, reason) if model.kv_handover == "blocks" else None
        if able:
            wish = self.settings.disaggregation
            if self._needs_partner(chosen):
                wish, target = "always", structs.replace(target, overlap=0)
            choice, move = choose_prefill(target, prompt, able, wish)
            if move is not None and source is not None and wish == "auto":
                # What it can pull from a peer need not be computed.
                instead = choose_prefill(structs.replace(target, overlap=source.overlap), prompt, able, wish)
                choice, move = instead if instead[1] is None else (choice, move)
            self.prefill_choices[choice] += 1
            if move is not None:
                return move
        return source

    def _peer(self, prompt: Prompt, target: Place, names: Sequence[bytes], overlaps: Mapping[str, int], reason: MoveReason) -> Move | None:
        """The worker that has blocks which the target should pull. Blocks that are only expected there cannot be pulled."""
        enough = target.overlap + MIN_MOVED_BLOCKS
        able = [name for name, blocks in overlaps.items() if blocks >= enough and self._can_pull(target.name, name)]
        peers = [self._place(name, self._reported(name, names, overlaps[name])) for name in able]
        return choose_source(target, prompt, peers, reason) if peers else None

    def _reported(self, worker: str, names: Sequence[bytes], expected: int) -> int:
        """How many leading blocks a worker has, as it has told; `expected` if it tells nothing."""
        return expected if self._workers[worker].feed is None else self.index.reported(worker, names)

    def _place(self, worker: str, overlap: int) -> Place:
        known = self._workers[worker]
        waiting = known.load.to_prefill * known.model.block_size
        return Place.of(worker, overlap, waiting, known.load.generations, known.model.kv_block_bytes, known.stats)

    def sent(self, decision: Decision, names: Sequence[bytes], blocks: int, now: float | None = None) -> Assignment:
        """The generation was sent. Its load counts until the assignment ends, and its blocks are expected on the worker."""
        known = self._workers.get(decision.worker)
        if known is None:
            return WorkerLoad().begin(0)
        # An engine with KV events confirms predictions soon, so blocks that it has need no new prediction.
        expected = names[decision.overlap :] if known.feed is not None else names
        now = self._clock() if now is None else now
        if expected and not self._is_repeated(decision.worker, names, now):
            self.index.predict(decision.worker, expected, now)
        return known.load.begin(max(0, blocks - decision.overlap))

    def _is_repeated(self, worker: str, names: Sequence[bytes], now: float) -> bool:
        """Whether these blocks were predicted there a moment ago. A long prompt may have a hundred choices."""
        if names is not self._last_names or now - self._last_predicted > REPEAT_SECONDS:
            self._last_names, self._last_predicted, self._last_workers = names, now, {worker}
            return False
        if worker in self._last_workers:
            return True
        self._last_workers.add(worker)
        return False

    @property
    def workers(self) -> list[str]:
        """Those that are known: encode workers are not."""
        return list(self._workers)

    def waiting_seconds(self, worker: str) -> float:
        """How long the worker takes for the prompts that it must compute already; 0 for an unknown worker."""
        if worker not in self._workers:
            return 0.0
        place = self._place(worker, 0)
        return place.waiting_tokens / place.prefill_rate

    def load_of(self, worker: str) -> float:
        """The worker's load in blocks, for metrics; 0 for an unknown worker."""
        known = self._workers.get(worker)
        return known.load.blocks if known is not None else 0.0

    def check_integrity(self) -> None:
        """Raises AssertionError unless the index and the loads are sound and have the same workers."""
        self.index.check_integrity()
        for name, worker in self._workers.items():
            self.index.held(name)
            worker.load.check_integrity()

    def _view(self, candidate: Candidate, overlap: int) -> WorkerView:
        known = self._workers.get(candidate.name)
        if known is None:
            return WorkerView(candidate.name, 0, 0.0, 0, candidate.has_room, candidate.is_quiet)
        load = known.load
        return WorkerView(candidate.name, overlap, load.blocks, load.generations, candidate.has_room, candidate.is_quiet)


@dataclass(slots=True, eq=False)
class WorkerLoad:
    """The load of one worker: blocks still to prefill plus blocks held.

    Generations of this front end count as soon as they are sent, each with its prompt minus the overlap. `beyond` is the part of the
    worker's last report that exceeds them: work of other front ends, and blocks generated since.
    """

    active: int = 0
    prefilling: int = 0
    to_prefill: int = 0
    held: int = 0
    beyond: float = 0.0
    beyond_active: int = 0

    @property
    def blocks(self) -> float:
        return self.to_prefill + self.held + self.beyond

    @property
    def generations(self) -> int:
        return self.active + self.beyond_active

    def report(self, stats: WorkerStats) -> None:
        """Takes the worker's own figures. A queued generation of others counts as much as an average running one."""
        queued = max(0, stats.queued - self.prefilling)
        average = stats.kv_blocks_used / stats.running if stats.running else 0.0
        self.beyond = max(0, stats.kv_blocks_used - self.held) + queued * average
        self.beyond_active = max(0, stats.running + stats.queued - self.active)

    def begin(self, share: int) -> Assignment:
        """A generation was sent there; `share` is the number of blocks that it adds."""
        self.active += 1
        self.prefilling += 1
        self.to_prefill += share
        self.held += share
        return Assignment(self, share)

    def check_integrity(self) -> None:
        """Raises AssertionError when the counts contradict each other."""
        assert 0 <= self.prefilling <= self.active, (self.prefilling, self.active)
        assert 0 <= self.to_prefill <= self.held, (self.to_prefill, self.held)
        assert self.active or not self.held, self.held
        assert min(self.beyond, self.beyond_active) >= 0, (self.beyond, self.beyond_active)


@dataclass(slots=True, eq=False)
class Assignment:
    """One generation's share of a worker's load. Both methods may be called again and in any order: only the first call counts."""

    load: WorkerLoad
    share: int
    _is_prefilling: bool = True
    _has_ended: bool = False

    def first_token(self) -> None:
        """The prompt is computed."""
        if self._is_prefilling:
            self._is_prefilling = False
            self.load.prefilling -= 1
            self.load.to_prefill -= self.share

    def ended(self) -> None:
        """The generation holds no blocks any more."""
        if self._has_ended:
            return
        self._has_ended = True
        self.first_token()
        load = self.load
        load.active -= 1
        load.held -= self.share
        if not load.active and not load.beyond_active:
            # An idle worker sends no reports, so the last figure would stay.
            load.beyond = 0.0
