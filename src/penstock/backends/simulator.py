"""The simulator: an engine that is all there but for the model.

Continuous batching with chunked prefill, a KV cache with prefix reuse and preemption, and a timing model. Its tokens are
a pure function of (seed, position), so that a client can prove that nothing was lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from penstock.backends.simulated_cache import BLOCK_SIZE, SimulatedCache
from penstock.backends.simulated_tokens import RUN, logprob_at, natural_length, run_of_tokens
from penstock.wire.blocks import block_hashes
from penstock.wire.messages import Delta, Fault, Finish, ModelInfo, PromptReport, Segment, Submit, WorkerStats
from penstock.worker.backend import Emit

# An engine computes on while its process is busy sending, so steps that come late are made up for: beyond the few milliseconds that a
# timer may be late, and up to a tenth of a second.
LEAST_BEHIND = 0.005
MOST_BEHIND = 0.1


@dataclass(frozen=True)
class SimulatorConfig:
    """The timing model: a step takes `step_ms`, and `1 / prefill_rate` seconds more for each prompt token in it."""

    step_ms: float = 10.0
    prefill_rate: float = 1_000_000.0
    max_batch: int = 8192
    kv_blocks: int = 262_144
    prefill_budget: int = 8192


@dataclass(frozen=True)
class Vocabulary:
    """What the simulator must know of the tokenizer: the ids that it may make, and the one that ends a text."""

    token_ids: Sequence[int]
    end_id: int


class _Sequence:
    """One generation in the simulator.

    `position` is the offset of the next token to make; `made` has the tokens from `made_from` on, a run ahead at most. It
    holds one shared block for each hash of its prompt, and `private` blocks for the rest and for what it generates.
    """

    __slots__ = (
        "cached_tokens",
        "hashes",
        "last_position",
        "made",
        "made_from",
        "next_event",
        "position",
        "private",
        "request",
        "to_prefill",
        "was_preempted",
    )

    def __init__(self, request: Submit) -> None:
        self.request = request
        self.position = request.offset
        self.last_position = _last_position(request)
        self.hashes = block_hashes(request.token_ids, BLOCK_SIZE)
        # Known when it is first admitted, told with its first token, and not counted again after a preemption.
        self.cached_tokens: int | None = None
        self.was_preempted = False
        self.to_prefill = 0
        self.private = 1
        self.made: list[int] = []
        self.made_from = request.offset // RUN * RUN
        # The position at which more is to be done than to hand out the next token that is made.
        self.next_event = request.offset

    @property
    def token_count(self) -> int:
        """How many tokens its KV covers: the prompt, and what was generated."""
        return len(self.request.token_ids) + self.position - self.request.offset

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt, and what was generated."""
        start, stop = self.request.offset - self.made_from, self.position - self.made_from
        return (*self.request.token_ids, *self.made[start:stop])


def _last_position(request: Submit) -> int:
    """The position after its last token, by its length or by its natural end."""
    if request.ignore_eos:
        return request.max_tokens
    return min(request.max_tokens, max(natural_length(request.seed), request.min_tokens) + 1)


class Simulator:
    """See the module's docstring, and `worker.backend.Backend` for what it promises."""

    def __init__(self, config: SimulatorConfig, model: ModelInfo, vocabulary: Vocabulary) -> None:
        self._config = config
        self._model = model
        self._vocabulary = vocabulary
        self._cache = SimulatedCache(config.kv_blocks)
        self._waiting: OrderedDict[bytes, _Sequence] = OrderedDict()
        self._prefilling: dict[bytes, _Sequence] = {}
        self._running: dict[bytes, _Sequence] = {}
        self._refused: list[Segment] = []
        self._work = asyncio.Event()
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
            self._waiting[request.id] = _Sequence(request)
        else:
            self._refused.append(Segment(request.id, None, refusal))
        self._work.set()

    def _refusal(self, request: Submit) -> Fault | None:
        if request.grammar is not None:
            return Fault("unsupported", "the simulator has no grammar: its tokens follow from the seed")
        needed = (len(request.token_ids) + request.max_tokens - request.offset) // BLOCK_SIZE + 1
        if needed > self._cache.total:
            return Fault("kv_too_small", f"the request needs {needed} KV blocks and the worker has {self._cache.total}")
        return None

    def cancel(self, generation: bytes) -> None:
        if self._waiting.pop(generation, None) is not None:
            return
        sequence = self._prefilling.pop(generation, None) or self._running.pop(generation, None)
        if sequence is not None:
            self._release(sequence)

    def stats(self) -> WorkerStats:
        cache = self._cache
        return WorkerStats(len(self._prefilling) + len(self._running), len(self._waiting), cache.used, cache.cached, cache.total)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the cache is sound and is used by the active sequences alone."""
        self._cache.check_integrity()
        active = [*self._prefilling.values(), *self._running.values()]
        shared = {block for sequence in active for block in sequence.hashes}
        private = sum(sequence.private for sequence in active)
        assert self._cache.used == len(shared) + private, (self._cache.used, len(shared), private)

    async def _steps(self, emit: Emit) -> None:
        """One turn is one engine step: schedule, let the time pass that it would take, hand out its tokens."""
        loop = asyncio.get_running_loop()
        end_of_step = loop.time()
        while True:
            if not (self._waiting or self._prefilling or self._running or self._refused):
                self._work.clear()
                await self._work.wait()
                end_of_step = loop.time()
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
            emit(segments)

    def _schedule(self) -> int:
        """Admits what fits and spends the prefill budget, oldest first. Returns the prompt tokens of this step."""
        budget = self._config.prefill_budget
        for sequence in self._prefilling.values():
            budget -= self._prefill(sequence, budget)
        while budget and self._waiting and len(self._running) + len(self._prefilling) < self._config.max_batch:
            sequence = next(iter(self._waiting.values()))
            if not self._cache.can_allocate(sequence.hashes, 1):
                break
            del self._waiting[sequence.request.id]
            self._admit(sequence)
            budget -= self._prefill(sequence, budget)
        return self._config.prefill_budget - budget

    def _admit(self, sequence: _Sequence) -> None:
        length = len(sequence.request.token_ids)
        # The last token is always computed: its logits are what the first new token comes from.
        cached = min(self._cache.matched(sequence.hashes) * BLOCK_SIZE, length - 1)
        self._cache.allocate(sequence.hashes, 1)
        if not sequence.was_preempted:
            sequence.cached_tokens = cached
        sequence.to_prefill = length - cached
        self._prefilling[sequence.request.id] = sequence

    def _prefill(self, sequence: _Sequence, budget: int) -> int:
        tokens = min(sequence.to_prefill, budget)
        sequence.to_prefill -= tokens
        return tokens

    def _promote(self) -> None:
        """Those whose prompt is done decode from now on."""
        done = [generation for generation, sequence in self._prefilling.items() if not sequence.to_prefill]
        for generation in done:
            self._running[generation] = self._prefilling.pop(generation)

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
        for sequence in eventful:
            # One before it in the list may have preempted it.
            if sequence.request.id in self._running:
                self._decode_eventful(sequence, segments)

    def _decode_eventful(self, sequence: _Sequence, segments: list[Segment]) -> None:
        """The next token where more happens than that: a new run or block, logprobs, the end."""
        request = sequence.request
        position = sequence.position
        if not self._has_room(sequence):
            return
        self._make_ahead(sequence)
        segments.append(self._segment(sequence))
        sequence.position = position + 1
        if sequence.position >= sequence.last_position:
            del self._running[request.id]
            self._release(sequence)
            return
        sequence.next_event = self._following_event(sequence)

    def _has_room(self, sequence: _Sequence) -> bool:
        """Takes another block when its blocks are full; when there is none, the newest sequence makes room."""
        if sequence.token_count < (len(sequence.hashes) + sequence.private) * BLOCK_SIZE:
            return True
        while not self._cache.can_allocate((), 1):
            newest = next(reversed(self._prefilling or self._running))
            self._preempt(newest)
            if newest == sequence.request.id:
                return False
        self._cache.allocate((), 1)
        sequence.private += 1
        return True

    def _release(self, sequence: _Sequence) -> None:
        """Gives its blocks back. What it generated stays cached, under its hashes, for whoever comes with the same tokens."""
        parent = sequence.hashes[-1] if sequence.hashes else b""
        generated = block_hashes(sequence.tokens[len(sequence.hashes) * BLOCK_SIZE :], BLOCK_SIZE, parent)
        self._cache.release(sequence.hashes, generated, sequence.private)

    def _preempt(self, generation: bytes) -> None:
        """Gives its blocks back; it is computed anew, from its prompt and what it made, when there is room."""
        sequence = self._prefilling.pop(generation, None) or self._running.pop(generation)
        self._release(sequence)
        again = _Sequence(structs.replace(sequence.request, token_ids=sequence.tokens, offset=sequence.position))
        again.cached_tokens = sequence.cached_tokens
        again.was_preempted = True
        self._waiting[generation] = again
        self._waiting.move_to_end(generation, last=False)

    def _segment(self, sequence: _Sequence) -> Segment:
        """The token at the sequence's position, with whatever comes with it."""
        request, position = sequence.request, sequence.position
        report = self._report(sequence)
        if request.max_tokens == 0:
            return Segment(request.id, Delta(0, (), None, report), Finish("length"))
        token, terminal = sequence.made[position - sequence.made_from], None
        if position + 1 == sequence.last_position:
            stopped = not request.ignore_eos and position >= max(natural_length(request.seed), request.min_tokens)
            token = self._vocabulary.end_id if stopped else token
            terminal = Finish("stop" if stopped else "length")
        logprobs = None
        if request.logprobs is not None:
            logprobs = (logprob_at(request.seed, position, token, request.logprobs, self._vocabulary.token_ids),)
        return Segment(request.id, Delta(position, (token,), logprobs, report), terminal)

    def _report(self, sequence: _Sequence) -> PromptReport | None:
        """What is known of the prompt, once."""
        cached, sequence.cached_tokens = sequence.cached_tokens, None
        if cached is None:
            return None
        request = sequence.request
        if not request.prompt_logprobs:
            return PromptReport(cached)
        top, vocabulary = request.logprobs or 0, self._vocabulary.token_ids
        logprobs = [logprob_at(0, index, token, top, vocabulary) for index, token in enumerate(request.token_ids[1:], 1)]
        return PromptReport(cached, (None, *logprobs))

    def _make_ahead(self, sequence: _Sequence) -> None:
        """Makes tokens at least up to the end of the sequence's blocks."""
        made = sequence.made
        while sequence.made_from + len(made) < sequence.position + BLOCK_SIZE:
            made += run_of_tokens(sequence.request.seed, (sequence.made_from + len(made)) // RUN, self._vocabulary.token_ids)

    def _following_event(self, sequence: _Sequence) -> int:
        position = sequence.position
        if sequence.request.logprobs is not None:
            return position
        next_block = position + (len(sequence.hashes) + sequence.private) * BLOCK_SIZE - sequence.token_count
        return min(next_block, sequence.last_position - 1)
