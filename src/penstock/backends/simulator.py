"""The simulator: an engine that is all there but for the model.

Continuous batching with chunked prefill, the embedded engine's own KV cache and sessions, preemption, and a timing model. Its tokens are
a pure function of (seed, position), so that a client can prove that nothing was lost.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.backends.simulated_tokens import RUN, logprob_at, natural_length, run_of_tokens
from penstock.config.engines import SimulatorConfig
from penstock.kv.cache import KVCache
from penstock.kv.radix import Key, Lease, Node
from penstock.kv.sessions import Session, Sessions
from penstock.wire.messages import (
    Delta,
    Fault,
    Finish,
    FinishReason,
    ModelInfo,
    PromptReport,
    Segment,
    SessionReport,
    SessionState,
    Snapshot,
    Submit,
    WorkerStats,
)
from penstock.worker.backend import Emit
from penstock.worker.refusal import total_length, why_not

# An engine computes on while its process is busy sending, so steps that come late are made up for: beyond the few milliseconds that a
# timer may be late, and up to a tenth of a second.
LEAST_BEHIND = 0.005
MOST_BEHIND = 0.1

# How many of those that wait for another to compute what they share are passed by in a step, so that others get on.
MOST_DEFERRED = 16


@dataclass(frozen=True)
class Vocabulary:
    """What the simulator must know of the tokenizer: the ids that it may make, and the one that ends a text."""

    token_ids: Sequence[int]
    end_id: int


class _Sequence:
    """One generation in the simulator.

    `prompt` is what is prefilled: that of the request, and after a preemption also what was made until then. `position` is the offset of
    the next token to make; `made` has the tokens from `made_from` on, some ahead. Its KV is in a `path` of the tree and in a `tail` that
    only it fills; the newest token has none yet.
    """

    __slots__ = (
        "cached_tokens",
        "full_at",
        "last_position",
        "made",
        "made_from",
        "next_event",
        "path",
        "position",
        "prompt",
        "reason",
        "reported",
        "request",
        "session",
        "session_state",
        "tail",
        "to_prefill",
    )

    def __init__(self, request: Submit, session: Session | None, session_state: SessionState | None) -> None:
        self.request = request
        self.session = session
        self.session_state = session_state
        self.prompt = request.token_ids
        self.position = request.offset
        self.last_position, self.reason = _end(request)
        # Known when it is first admitted, told with its first token, and not counted again after a preemption.
        self.cached_tokens: int | None = None
        self.reported = False
        self.to_prefill = 0
        self.path: list[Node] = []
        self.tail: list[int] = []
        self.made: list[int] = []
        self.made_from = request.offset // RUN * RUN
        # The position at which it needs another block, and that at which more is to be done than to hand out the next token that is made.
        self.full_at = request.offset
        self.next_event = request.offset

    @property
    def token_count(self) -> int:
        """The prompt, and what was generated."""
        return len(self.request.token_ids) + self.position - self.request.offset

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, and what was generated."""
        start, stop = self.request.offset - self.made_from, self.position - self.made_from
        return (*self.request.token_ids, *self.made[start:stop])

    @property
    def lease(self) -> Lease | None:
        """That of its session, unless the session is over: then it is a sequence like any other."""
        return None if self.session is None or self.session.is_over else self.session.lease


def _end(request: Submit) -> tuple[int, FinishReason]:
    """The position after its last token, by its length or by its natural end, and which of them."""
    if request.ignore_eos:
        return request.max_tokens, "length"
    natural = max(natural_length(request.seed), request.min_tokens) + 1
    return (natural, "stop") if natural <= request.max_tokens else (request.max_tokens, "length")


class Simulator:
    """See the module's docstring, and `worker.backend.Backend` for what it promises.

    Sessions, leases, eviction and events are those of the embedded engine. `clock` tells when a lease ends; the event loop's is of no
    use, for it may be cached.
    """

    def __init__(
        self, config: SimulatorConfig, model: ModelInfo, vocabulary: Vocabulary, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._model = model
        self._vocabulary = vocabulary
        self._clock = clock
        self._now = clock()
        self._block_size = config.block_size
        self._cache = KVCache(config.kv_blocks, config.block_size, config.lease_share)
        self._sessions = Sessions(self._cache, config.max_sessions, config.session_grace)
        self._waiting: OrderedDict[bytes, _Sequence] = OrderedDict()
        self._prefilling: dict[bytes, _Sequence] = {}
        self._running: dict[bytes, _Sequence] = {}
        self._refused: list[Segment] = []
        self._preemptions = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        # Set when something was asked for that the next step is to tell of.
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def model(self) -> ModelInfo:
        return self._model

    async def start(self, emit: Emit) -> None:
        self._task = asyncio.create_task(self._steps(emit), name="simulator steps")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def submit(self, request: Submit) -> None:
        refusal = self._refusal(request)
        if refusal is None:
            session, state = self._sessions.begin_turn(request.session) if request.session is not None else (None, None)
            self._waiting[request.id] = _Sequence(request, session, state)
        else:
            self._refused.append(Segment(request.id, None, refusal))
        self._asked.set()

    def _refusal(self, request: Submit) -> Fault | None:
        if request.grammar is not None:
            return Fault("unsupported", "the simulator has no grammar: its tokens follow from the seed")
        if wrong := why_not(request, self._model.vocab_size, self._model.context_length):
            return wrong
        needed = self._cache.pages_for(total_length(request))
        if needed > self._cache.pages:
            return Fault("kv_too_small", f"the request needs {needed} KV blocks and the worker has {self._cache.pages}")
        return None

    def cancel(self, generation: bytes) -> None:
        self._refused = [segment for segment in self._refused if segment.id != generation]
        sequence = self._waiting.pop(generation, None) or self._take_out(generation)
        if sequence is not None:
            self._end_turn(sequence)
            self._asked.set()

    def close_session(self, session_id: str, epoch: int) -> None:
        if self._sessions.close(session_id, epoch):
            self._asked.set()

    async def describe_sessions(self, session_ids: Sequence[str]) -> Sequence[SessionReport]:
        return self._sessions.describe(session_ids, self._clock())

    async def snapshot(self) -> Snapshot | None:
        return self._cache.snapshot()

    def stats(self) -> WorkerStats:
        cache = self._cache
        return WorkerStats(
            running=len(self._prefilling) + len(self._running),
            queued=len(self._waiting),
            kv_blocks_used=cache.used,
            kv_blocks_cached=cache.cached,
            kv_blocks_total=cache.pages,
            kv_blocks_leased=cache.leased,
            sessions=len(self._sessions),
            kv_blocks_evicted=cache.evicted_pages,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError unless the cache is sound, and active sequences and known leases hold all that is held."""
        active = [*self._prefilling.values(), *self._running.values()]
        self._cache.check_integrity([sequence.path for sequence in active], [sequence.tail for sequence in active], self._sessions.leases)
        for session in self._sessions:
            turns = sum(1 for sequence in (*active, *self._waiting.values()) if sequence.session is session)
            assert session.active_turns == turns, (session.active_turns, turns)

    async def _steps(self, emit: Emit) -> None:
        """One turn is one engine step: schedule, let the time pass that it would take, hand out its tokens."""
        loop = asyncio.get_running_loop()
        end_of_step = loop.time()
        while True:
            if not (self._waiting or self._prefilling or self._running or self._refused):
                await self._idle()
                end_of_step = loop.time()
            self._asked.clear()
            prompt_tokens = self._schedule()
            if self._prefilling or self._running:
                end_of_step += self._config.step_ms / 1000 + prompt_tokens / self._config.prefill_rate
            now = loop.time()
            if now - end_of_step < LEAST_BEHIND:
                end_of_step = max(end_of_step, now)
            end_of_step = max(end_of_step, now - MOST_BEHIND)
            await asyncio.sleep(end_of_step - now)
            segments, self._refused = self._refused, []
            self._promote()
            self._decode(segments)
            emit(segments, self._cache.events.take())

    async def _idle(self) -> None:
        """Waits until something is asked for, or a lease runs out."""
        seconds = self._sessions.next_expiry - self._clock()
        try:
            async with asyncio.timeout(None if seconds == math.inf else max(0.0, seconds)):
                await self._asked.wait()
        except TimeoutError:
            pass

    def _schedule(self) -> int:
        """Ends what has run out, admits what fits, and spends the prefill budget, oldest first. Returns the prompt tokens of this step."""
        self._now = self._clock()
        self._sessions.expire(self._now)
        self._cache.take_fresh()
        budget = self._config.prefill_budget
        for sequence in self._prefilling.values():
            budget -= self._prefill(sequence, budget)
        if budget and self._waiting:
            budget = self._admit(budget)
        return self._config.prefill_budget - budget

    def _admit(self, budget: int) -> int:
        """Begins what fits into the batch, the pool and the budget; returns what is left of that."""
        in_progress = {self._next_block(sequence, sequence.path) for sequence in self._prefilling.values()} - {None}
        deferred = 0
        for generation, sequence in list(self._waiting.items()):
            if not budget or deferred == MOST_DEFERRED or len(self._running) + len(self._prefilling) >= self._config.max_batch:
                break
            path = self._cache.match(sequence.prompt)
            next_block = self._next_block(sequence, path)
            if next_block in in_progress:
                # Another computes the same now: in a moment it will be there to share.
                deferred += 1
                continue
            if not self._begin(sequence, path):
                break
            del self._waiting[generation]
            self._prefilling[generation] = sequence
            if next_block is not None:
                in_progress.add(next_block)
            budget -= self._prefill(sequence, budget)
        return budget

    def _next_block(self, sequence: _Sequence, path: list[Node]) -> tuple[Node, Key] | None:
        """The full block of its prompt that it computes next, if there is one."""
        start = len(path) * self._block_size
        if len(sequence.prompt) - start <= self._block_size:
            return None
        return path[-1] if path else self._cache.root, sequence.prompt[start : start + self._block_size]

    def _begin(self, sequence: _Sequence, path: list[Node]) -> bool:
        """Takes the blocks for its prompt, if they can be had beside one for every sequence that is active."""
        cache = self._cache
        needed = cache.pages_for(len(sequence.prompt)) - len(path)
        unused = sum([not node.references for node in path])
        if not cache.can_allocate(needed + unused + len(self._prefilling) + len(self._running)):
            return False
        cache.acquire(path, sequence.lease, sequence.request.priority)
        sequence.path = path
        sequence.tail = cache.allocate(needed, self._now)
        cached = len(path) * self._block_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = cached
        sequence.to_prefill = len(sequence.prompt) - cached
        sequence.full_at = sequence.position + (len(path) + needed) * self._block_size - len(sequence.prompt) + 1
        return True

    def _prefill(self, sequence: _Sequence, budget: int) -> int:
        tokens = min(sequence.to_prefill, budget)
        sequence.to_prefill -= tokens
        return tokens

    def _promote(self) -> None:
        """What was prefilled can be shared from now on; those whose prompt is done decode."""
        for generation, sequence in list(self._prefilling.items()):
            self._commit(sequence, sequence.prompt, len(sequence.prompt) - sequence.to_prefill)
            if not sequence.to_prefill:
                self._running[generation] = self._prefilling.pop(generation)

    def _commit(self, sequence: _Sequence, tokens: tuple[int, ...], computed: int) -> None:
        """The full blocks of these tokens, of which so many are computed, go into the tree."""
        size, path = self._block_size, sequence.path
        first, last = len(path), computed // size
        if last > first:
            keys = [tokens[start : start + size] for start in range(first * size, last * size, size)]
            full, sequence.tail = sequence.tail[: last - first], sequence.tail[last - first :]
            parent = path[-1] if path else self._cache.root
            path += self._cache.commit(parent, keys, full, sequence.lease, sequence.request.priority)

    def _decode(self, segments: list[Segment]) -> None:
        """The next token of every running sequence."""
        eventful: list[_Sequence] = []
        for generation, sequence in self._running.items():
            position = sequence.position
            if position == sequence.next_event:
                eventful.append(sequence)
            else:
                sequence.position = position + 1
                segments.append(Segment(generation, Delta(position, (sequence.made[position - sequence.made_from],))))
        self._extend([sequence for sequence in eventful if sequence.position == sequence.full_at])
        for sequence in eventful:
            # One before it in the list may have preempted it.
            if sequence.request.id in self._running:
                self._decode_eventful(sequence, segments)

    def _extend(self, full: list[_Sequence]) -> None:
        """A block for each of them at once, if there are so many; else each sees to itself."""
        if self._cache.can_allocate(len(full)):
            for sequence, page in zip(full, self._cache.allocate(len(full), self._now), strict=True):
                sequence.tail.append(page)
                sequence.full_at += self._block_size

    def _decode_eventful(self, sequence: _Sequence, segments: list[Segment]) -> None:
        """The next token where more happens than that: a new run or block, the report, logprobs, the end."""
        position, request = sequence.position, sequence.request
        if position >= sequence.full_at and not self._has_room(sequence):
            return
        self._make_ahead(sequence)
        if sequence.reported and position + 1 < sequence.last_position and request.logprobs is None:
            segments.append(Segment(request.id, Delta(position, (sequence.made[position - sequence.made_from],))))
            sequence.position = position + 1
            sequence.next_event = min(sequence.full_at, sequence.last_position - 1)
            return
        segment = self._segment(sequence)
        segments.append(segment)
        if segment.terminal is None:
            sequence.position = position + 1
            sequence.next_event = sequence.position if request.logprobs is not None else min(sequence.full_at, sequence.last_position - 1)
        else:
            sequence.position = max(position, sequence.last_position)
            self._take_out(request.id, request.retention_seconds)
            self._end_turn(sequence)

    def _has_room(self, sequence: _Sequence) -> bool:
        """Takes another block; when there is none, the newest sequence makes room, which may be itself."""
        while not self._cache.can_allocate(1):
            newest = next(reversed(self._prefilling or self._running))
            self._preempt(newest)
            if newest == sequence.request.id:
                return False
        sequence.tail += self._cache.allocate(1, self._now)
        sequence.full_at += self._block_size
        return True

    def _take_out(self, generation: bytes, retention_seconds: float = 0.0) -> _Sequence | None:
        """An active sequence gives its blocks back. What is computed stays cached for whoever comes with the same tokens."""
        sequence = self._running.pop(generation, None)
        if sequence is not None:
            self._commit(sequence, sequence.tokens, sequence.token_count - 1)
        else:
            sequence = self._prefilling.pop(generation, None)
            if sequence is None:
                return None
        self._sessions.retain(sequence.path, retention_seconds, self._now)
        self._cache.give_back(sequence.tail)
        self._cache.release(sequence.path)
        sequence.path, sequence.tail = [], []
        return sequence

    def _preempt(self, generation: bytes) -> None:
        """Gives its blocks back; it is computed anew, from its prompt and what it made, when there is room."""
        sequence = self._take_out(generation)
        assert sequence is not None
        sequence.prompt = sequence.tokens
        sequence.next_event = sequence.position
        self._preemptions += 1
        self._waiting[generation] = sequence
        self._waiting.move_to_end(generation, last=False)

    def _end_turn(self, sequence: _Sequence) -> None:
        session, request = sequence.session, sequence.request
        if session is not None:
            session.usage.count(len(request.token_ids), sequence.cached_tokens or 0, sequence.position - request.offset)
            self._sessions.end_turn(session, self._clock())

    def _segment(self, sequence: _Sequence) -> Segment:
        """The token at the sequence's position, with whatever comes with it."""
        request, position = sequence.request, sequence.position
        report = self._report(sequence)
        if position >= sequence.last_position:
            # Only the prompt was wanted, or all had been made elsewhere.
            return Segment(request.id, Delta(position, (), None, report), Finish(sequence.reason))
        token, terminal = sequence.made[position - sequence.made_from], None
        if position + 1 == sequence.last_position:
            terminal = Finish(sequence.reason)
            if sequence.reason == "stop":
                token = self._vocabulary.end_id
        logprobs = None
        if request.logprobs is not None:
            logprobs = (logprob_at(request.seed, position, token, request.logprobs, self._vocabulary.token_ids),)
        return Segment(request.id, Delta(position, (token,), logprobs, report), terminal)

    def _report(self, sequence: _Sequence) -> PromptReport | None:
        """What is known of the prompt, once."""
        if sequence.reported:
            return None
        sequence.reported = True
        request, cached = sequence.request, sequence.cached_tokens or 0
        self._prompt_tokens += len(request.token_ids)
        self._prompt_tokens_cached += cached
        if not request.prompt_logprobs:
            return PromptReport(cached, None, sequence.session_state)
        top, vocabulary = request.logprobs or 0, self._vocabulary.token_ids
        logprobs = [logprob_at(0, index, token, top, vocabulary) for index, token in enumerate(request.token_ids[1:], 1)]
        return PromptReport(cached, (None, *logprobs), sequence.session_state)

    def _make_ahead(self, sequence: _Sequence) -> None:
        """Makes tokens at least up to the end of the sequence's blocks, or to its own."""
        made, seed = sequence.made, sequence.request.seed
        made_to = sequence.made_from + len(made)
        wanted = min(sequence.full_at, sequence.last_position)
        while made_to < wanted:
            made += run_of_tokens(seed, made_to // RUN, self._vocabulary.token_ids)
            made_to += RUN
