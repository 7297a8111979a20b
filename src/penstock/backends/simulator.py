"""The simulator: an engine without a model.

Continuous batching with chunked prefill, preemption, KV cache and sessions come from the embedded engine's scheduler. Time is a model: a
step takes as long as an engine's step would. Tokens are a pure function of (seed, position), so a client can compute the exact text
and prove that nothing was lost. After images, they are also a function of the pixels of all images, in order.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import struct
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from msgspec import structs

from penstock.backends.simulated_images import SimulatedEncoder, image_fingerprint, promised_seals, seed_with_images
from penstock.backends.simulated_kv import SimulatedKv
from penstock.config.engines import SimulatorConfig
from penstock.engine.scheduler import Scheduler, Sequence, Work
from penstock.kv.blocks import NAME_BYTES
from penstock.kv.cache import KVCache
from penstock.kv.features import SLOT_POSITIONS, Features
from penstock.kv.moving import KvEngine
from penstock.kv.rates import Rate
from penstock.kv.sessions import Session, Sessions
from penstock.kv.transfers import Transfers
from penstock.wire.codec import PACKED_ENTRIES, pack_logprobs
from penstock.wire.messages import (
    Delta,
    Fault,
    Fetch,
    Finish,
    FinishReason,
    KvSource,
    ModelInfo,
    PromptReport,
    Segment,
    SessionReport,
    SessionState,
    Snapshot,
    Submit,
    TokenLogprob,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import PROGRESS_SECONDS, Emit, WantImages, validate_submit, wants_none

if TYPE_CHECKING:
    from penstock.backends.simulated_tiers import SimulatedTiers

log = logging.getLogger(__name__)

# A real engine computes while its process is busy sending. So steps that start late are made up for, if they are late by more than a
# timer's inaccuracy, and by at most MAX_BEHIND seconds.
MIN_BEHIND = 0.005
MAX_BEHIND = 0.1

LOGPROB_COST = 16
"""What a prompt token with its logprobs takes of a step's budget: so 512 of them fill a step, in about 5 ms."""
# Tokens are made in runs of sixteen: one hash gives all of them.
RUN = 16
_RUN_FORMAT = struct.Struct(f"<{RUN}I")
_SEED_AND_POSITION = struct.Struct("<Qq")

_HALF = 0.6931471805599453  # the logarithm of 2

MIN_NATURAL_LENGTH = 512
MAX_NATURAL_LENGTH = 1024


@dataclass(frozen=True)
class Vocabulary:
    """What the simulator knows of the tokenizer: the ids that it may generate, and the one that ends a text."""

    token_ids: Items[int]
    end_id: int


def run_of_tokens(seed: int, run: int, vocabulary: Items[int]) -> list[int]:
    """The tokens at positions `run * RUN` to below `(run + 1) * RUN`."""
    size = len(vocabulary)
    return [vocabulary[number % size] for number in _run_of_numbers(seed, run)]


def _run_of_numbers(seed: int, run: int) -> tuple[int, ...]:
    return _RUN_FORMAT.unpack(blake2b(_hash_key(seed, run), digest_size=64).digest())


def tokens_between(seed: int, start: int, stop: int, vocabulary: Items[int]) -> list[int]:
    """The tokens at positions `start` to below `stop`."""
    first, size = start // RUN, len(vocabulary)
    numbers = [number for run in range(first, -(-stop // RUN)) for number in _run_of_numbers(seed, run)]
    return [vocabulary[number % size] for number in numbers[start - first * RUN : stop - first * RUN]]


def natural_length(seed: int) -> int:
    """The position of the end token, unless the request says `ignore_eos`."""
    number = int.from_bytes(blake2b(_hash_key(seed, -1), digest_size=8).digest())
    return MIN_NATURAL_LENGTH + number % (MAX_NATURAL_LENGTH - MIN_NATURAL_LENGTH)


def logprob_at(seed: int, position: int, token: int, top: int, vocabulary: Items[int]) -> TokenLogprob:
    """A made-up distribution: the generated token is the likeliest, and each alternative is half as likely as the one before."""
    *numbers, last = _run_of_numbers(seed ^ 0x5EED, position)
    if top >= RUN:
        numbers += _run_of_numbers(seed ^ 0x5EED, ~position)
    noise, size = last / 2**32, len(vocabulary)
    likeliest = list(dict.fromkeys([token, *[vocabulary[number % size] for number in numbers[:top]]]))[:top]
    ranked = [(other, -_HALF - noise - _HALF * rank) for rank, other in enumerate(likeliest)]
    return TokenLogprob(-_HALF - noise, tuple(ranked))


def _hash_key(seed: int, number: int) -> bytes:
    return _SEED_AND_POSITION.pack(seed & 0xFFFFFFFFFFFFFFFF, number)


class _Sequence(Sequence):
    """One generation in the simulator.

    `position` is the offset of the next token. `made` has the tokens from position `made_from` on, some of them ahead of `position`.
    `tokens` is brought up to date only when the sequence stops.
    """

    __slots__ = ("full_at", "last_position", "made", "made_from", "next_event", "position", "prompt_logprobs", "reason", "seed")

    def __init__(self, request: Submit, session: Session | None, session_state: SessionState | None) -> None:
        super().__init__(request, session, session_state)
        self.position = request.offset
        self.seed = seed_with_images(request.seed, promised_seals(request.images)) if request.images else request.seed
        self.last_position, self.reason = _end(request, self.seed)
        self.made: list[int] = []
        self.made_from = request.offset // RUN * RUN
        # The position where it needs another page, and the position where more is to do than to send the next token.
        self.full_at = request.offset
        self.next_event = request.offset
        self.prompt_logprobs: list[bytes] = []

    @property
    def skips_cache(self) -> bool:
        """Prompt logprobs are made piece by piece, as the prompt is computed."""
        return self.request.prompt_logprobs and not self.is_reported

    @property
    def token_cost(self) -> int:
        """A step that makes many logprobs would take too long."""
        return LOGPROB_COST if self.skips_cache else 1

    def start_decoding(self, page_size: int) -> None:
        """The whole prompt is computed."""
        self.full_at = self.position + (len(self.path) + len(self.tail)) * page_size - len(self.tokens) + 1
        self.next_event = self.position

    def catch_up(self) -> None:
        """The newest token has no KV yet."""
        known = self.request.offset + len(self.tokens) - len(self.request.token_ids)
        if self.position > known:
            self.tokens += self.made[known - self.made_from : self.position - self.made_from]
            self.computed = len(self.tokens) - 1


def _end(request: Submit, seed: int) -> tuple[int, FinishReason]:
    """The position after the last token, and whether the length or the natural end sets it."""
    if request.ignore_eos:
        return request.max_tokens, "length"
    natural = max(natural_length(seed), request.min_tokens) + 1
    return (natural, "stop") if natural <= request.max_tokens else (request.max_tokens, "length")


class Simulator:
    """A `worker.backend.Backend`. `clock` is for leases only: the event loop's time may be cached. `on_failure` is called when a block
    that was pulled is wrong: never, if the transport does what it must."""

    def __init__(
        self,
        config: SimulatorConfig,
        model: ModelInfo,
        vocabulary: Vocabulary,
        clock: Callable[[], float] = time.monotonic,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        made = b"" if model.images is None else image_fingerprint(model.images)
        self.model = structs.replace(model, kv_block_bytes=config.moved_block_bytes, image_fingerprint=made)
        self._vocabulary = vocabulary
        self._clock = clock
        self._now = clock()
        self._cache = KVCache(config.kv_blocks, config.block_size, config.lease_share)
        self._sessions = Sessions(self._cache, config.max_sessions, config.session_grace)
        self._transfers = Transfers(self._cache, clock, config.moved_block_bytes)
        self._encoder: SimulatedEncoder | None = None
        features = None
        if model.images is not None:
            features = Features(config.image_positions // SLOT_POSITIONS, clock)
            self._encoder = SimulatedEncoder(config, model.images, features, self._wake, self._fail, self.die)
        self._scheduler: Scheduler[_Sequence] = Scheduler(self._cache, self._sessions, config.max_batch, self._transfers, features)
        self._kv: SimulatedKv | None = None
        self._tiers: SimulatedTiers | None = None
        self._on_failure = on_failure
        self._step_seconds = config.step_ms / 1000
        self._prefill_rate = config.prefill_budget / (self._step_seconds + config.prefill_budget / config.prefill_rate)
        self._refused: list[Segment] = []
        # Set when something was asked for that the next step reports.
        self._asked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def kv(self) -> SimulatedKv:
        """What the transport of KV sees of it."""
        if self._kv is None:
            fingerprint = blake2b(repr(self._identity()).encode(), digest_size=NAME_BYTES).digest()
            self._kv = SimulatedKv(self._cache, self._transfers, self._config, fingerprint, self._asked.set, self._fail)
        return self._kv

    @property
    def features(self) -> KvEngine | None:
        """What a transport that pulls features of images sees of it."""
        return None if self._encoder is None else self._encoder.moves

    def _identity(self) -> tuple[object, ...]:
        """What gives its KV a meaning."""
        model = self.model
        return model.engine, model.tokenizer, model.vocab_size, model.block_size, model.kv_block_bytes

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        self._want = want
        if self._encoder is not None:
            self._encoder.connect()
        if self._config.host_bytes():
            self._open_tiers()
        self._task = asyncio.create_task(self._steps(emit), name="simulator steps")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._tiers is not None:
            self._tiers.close()
        if self._kv is not None:
            self._kv.memory.close()
        if self._encoder is not None:
            self._encoder.close()

    def _wake(self) -> None:
        self._asked.set()

    def _open_tiers(self) -> None:
        # Imported where it is used: most simulators have no tiers.
        from penstock.backends.simulated_tiers import SimulatedTiers

        kv, prefill = self.kv, Rate()
        prefill.measure(self._prefill_rate, 1.0, self._now)
        kv.fill()
        self._tiers = SimulatedTiers(self._config, self._cache, kv.memory, kv.fingerprint, prefill, self._clock, self._asked.set)
        self._transfers.use_tiers(self._tiers.tiers)

    def submit(self, request: Submit) -> None:
        fault = self._validate(request)
        if fault is None:
            self._scheduler.add(_Sequence(request, *self._sessions.begin_turn(request.session, request.lane)))
        else:
            self._refused.append(Segment(request.id, None, fault))
        self._asked.set()

    def _validate(self, request: Submit) -> Fault | None:
        if request.grammar is not None:
            return Fault("unsupported", "the simulator has no grammar: its tokens depend only on the seed")
        model = self.model
        fault = validate_submit(request, model.vocab_size, model.context_length, reads_images=model.images is not None)
        return fault or self._scheduler.validate(request)

    def cancel(self, generation: bytes) -> None:
        self._refused = [segment for segment in self._refused if segment.id != generation]
        if self._scheduler.cancel(generation, self._clock()):
            self._asked.set()

    def fetch(self, request: Fetch) -> None:
        self._transfers.fetch(request)
        self._asked.set()

    def end_transfer(self, transfer: bytes) -> None:
        self._transfers.end(transfer)
        if self._encoder is not None:
            self._encoder.moves.end(transfer)
        self._asked.set()

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        if self._encoder is not None:
            self._encoder.take(name, size, pixels)

    def image_at(self, name: bytes, source: KvSource) -> None:
        if self._encoder is not None:
            self._encoder.moves.pull(name, source)
            self._asked.set()

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        self._scheduler.features.refuse(name, reason, retryable=retryable)
        self._asked.set()

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        if self._sessions.close(session_id, epoch, frees=frees):
            self._asked.set()

    async def describe_sessions(self, session_ids: Items[str], *, with_tokens: bool = False) -> Items[SessionReport]:
        return self._sessions.describe(session_ids, self._clock(), with_tokens=with_tokens)

    async def snapshot(self) -> Snapshot | None:
        return self._cache.snapshot()

    def stats(self) -> WorkerStats:
        stats = self._scheduler.stats(prefill_rate=self._prefill_rate)
        return stats if self._tiers is None else self._tiers.tiers.add_stats(stats)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in one place, all holders of pages are known, and every block is in its page."""
        self._scheduler.check_integrity()
        if self._kv is not None:
            wrong = self._kv.find_wrong(self._cache.nodes())
            assert wrong is None, wrong
        if self._tiers is not None:
            self._tiers.tiers.check_integrity(self._sessions.leases)
        if self._encoder is not None:
            self._encoder.moves.check_integrity()

    def _fail(self, reason: str) -> None:
        log.critical("the simulator stops: %s", reason)
        if self._task is not None:
            self._task.cancel()
        self._on_failure()

    async def _steps(self, emit: Emit) -> None:
        """Each turn of the loop is one engine step: schedule, wait as long as the step would take, send its tokens."""
        loop = asyncio.get_running_loop()
        end_of_step = loop.time()
        while True:
            if not (self._scheduler.has_work or self._refused):
                await self._idle()
                end_of_step = loop.time()
            self._asked.clear()
            work = self._schedule()
            if self._scheduler.prefilling or self._scheduler.decoding:
                prompt_tokens = sum([item.length for item in work])
                end_of_step += self._step_seconds + prompt_tokens / self._config.prefill_rate
            now = loop.time()
            if now - end_of_step < MIN_BEHIND:
                end_of_step = max(end_of_step, now)
            end_of_step = max(end_of_step, now - MAX_BEHIND)
            while end_of_step - now > PROGRESS_SECONDS:
                await asyncio.sleep(PROGRESS_SECONDS)
                emit((), None)
                now = loop.time()
            await asyncio.sleep(end_of_step - now)
            segments, self._refused = self._refused, []
            self._prefill(work)
            if self._config.fatal_seed is not None:
                self.check_fatal()
            self._decode(segments)
            transfers: Items[TransferReport] = self._transfers.take_reports() if self._transfers.is_used else ()
            if self._encoder is not None:
                transfers = (*transfers, *self._encoder.moves.take_reports())
            emit(segments, self._cache.events.take(), transfers)

    def check_fatal(self) -> None:
        """Fault injection: dies if a generation that kills its worker has come so far."""
        fatal = [each for each in self._scheduler.decoding.values() if each.request.seed == self._config.fatal_seed]
        if any(each.position - each.request.offset >= self._config.fatal_tokens for each in fatal):
            self.die()

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    async def _idle(self) -> None:
        """Waits until something is asked for or a lease ends."""
        seconds = self._scheduler.next_expiry - self._clock()
        if self._scheduler.features.is_used and self._scheduler.features.is_awaited:
            # The front end hears that the engine is alive.
            seconds = min(seconds, PROGRESS_SECONDS)
        try:
            async with asyncio.timeout(None if seconds == math.inf else max(0.0, seconds)):
                await self._asked.wait()
        except TimeoutError:
            pass

    def _schedule(self) -> list[Work[_Sequence]]:
        """Ends expired leases, and chooses the prompt tokens of this step."""
        self._now = self._clock()
        self._scheduler.expire(self._now)
        self._cache.take_fresh()
        self._scheduler.make_way()
        work = self._scheduler.schedule_prompts(self._config.prefill_budget, self._now)
        if self._encoder is not None:
            self._refused += self._scheduler.take_lost(self._now)
            for wanted in self._encoder.features.take_asked():
                self._want(wanted)
        if self._kv is not None:
            self._check_pulled(work)
        return work

    def _check_pulled(self, work: list[Work[_Sequence]]) -> None:
        """A sequence whose KV was pulled or loaded finds it where it should be, when it starts."""
        for sequence, _ in work:
            is_new = len(sequence.path) * self._cache.page_size == sequence.cached_tokens
            is_moved = sequence.request.source is not None or self._tiers is not None
            if is_moved and is_new and (wrong := self.kv.find_wrong(sequence.path)) is not None:
                self._fail(wrong)

    def _prefill(self, work: list[Work[_Sequence]]) -> None:
        """The prompt tokens of this step have KV now, unless their sequence was cancelled meanwhile."""
        for item in work:
            sequence = item.sequence
            if self._scheduler.prefilling.get(sequence.request.id) is sequence:
                if self._encoder is not None and sequence.images:
                    start = sequence.computed
                    self._encoder.check(sequence.request.id, sequence.images, start, start + item.length)
                self._scheduler.computed(item)
                if sequence.request.prompt_logprobs and not sequence.is_reported:
                    self._make_prompt_logprobs(sequence)
                if not sequence.to_compute:
                    sequence.start_decoding(self._cache.page_size)

    def _decode(self, segments: list[Segment]) -> None:
        """The next token of every decoding sequence."""
        eventful: list[_Sequence] = []
        for generation, sequence in self._scheduler.decoding.items():
            position = sequence.position
            if position == sequence.next_event:
                eventful.append(sequence)
            else:
                sequence.position = position + 1
                segments.append(Segment(generation, Delta(position, (sequence.made[position - sequence.made_from],))))
        self._extend([sequence for sequence in eventful if sequence.position == sequence.full_at])
        for sequence in eventful:
            # An earlier one may have preempted it.
            if sequence.request.id in self._scheduler.decoding:
                self._decode_eventful(sequence, segments)

    def _extend(self, full: list[_Sequence]) -> None:
        """One more page for each of them at once, if there are enough. Otherwise each one asks for itself later."""
        if self._cache.can_allocate(len(full)):
            for sequence, page in zip(full, self._cache.allocate(len(full), self._now), strict=True):
                sequence.tail.append(page)
                sequence.full_at += self._cache.page_size

    def _decode_eventful(self, sequence: _Sequence, segments: list[Segment]) -> None:
        """The next token of a sequence that needs more: new tokens made, a page, its prompt report, logprobs, or its end."""
        position, request = sequence.position, sequence.request
        if position >= sequence.full_at:
            if not self._scheduler.extend(sequence, 1, self._now):
                return
            sequence.full_at += self._cache.page_size
        self._make_ahead(sequence)
        segment = self._segment(sequence)
        segments.append(segment)
        if segment.terminal is None:
            sequence.position = position + 1
            sequence.next_event = sequence.position if request.logprobs is not None else min(sequence.full_at, sequence.last_position - 1)
        else:
            sequence.position = max(position, sequence.last_position)
            self._scheduler.finish(sequence, self._clock())

    def _segment(self, sequence: _Sequence) -> Segment:
        """The token at the sequence's position, with all that belongs to it."""
        request, position = sequence.request, sequence.position
        report = None if sequence.is_reported else self._report(sequence)
        if position >= sequence.last_position:
            # Only the prompt was wanted, or all tokens were generated elsewhere.
            return Segment(request.id, Delta(position, (), None, report), Finish(sequence.reason))
        token, terminal = sequence.made[position - sequence.made_from], None
        if position + 1 == sequence.last_position:
            terminal = Finish(sequence.reason)
            if sequence.reason == "stop":
                token = self._vocabulary.end_id
        logprobs = None
        if request.logprobs is not None:
            logprobs = (logprob_at(sequence.seed, position, token, request.logprobs, self._vocabulary.token_ids),)
        return Segment(request.id, Delta(position, (token,), logprobs, report), terminal)

    def _report(self, sequence: _Sequence) -> PromptReport:
        request = sequence.request
        if not request.prompt_logprobs:
            return self._scheduler.report(sequence, None, self._now)
        return self._scheduler.report(sequence, tuple(sequence.prompt_logprobs), self._now)

    def _make_prompt_logprobs(self, sequence: _Sequence) -> None:
        """Those of the prompt's tokens that are computed."""
        request, packed = sequence.request, sequence.prompt_logprobs
        top, vocabulary = request.logprobs or 0, self._vocabulary.token_ids
        end = sequence.computed // PACKED_ENTRIES * PACKED_ENTRIES if sequence.to_compute else len(request.token_ids)
        for start in range(len(packed) * PACKED_ENTRIES, end, PACKED_ENTRIES):
            tokens = enumerate(request.token_ids[start : start + PACKED_ENTRIES], start)
            packed += pack_logprobs([logprob_at(0, index, token, top, vocabulary) if index else None for index, token in tokens])

    def _make_ahead(self, sequence: _Sequence) -> None:
        """Makes tokens at least up to the end of the sequence's pages, or to its own end."""
        made, seed = sequence.made, sequence.seed
        made_to = sequence.made_from + len(made)
        wanted = min(sequence.full_at, sequence.last_position)
        while made_to < wanted:
            made += run_of_tokens(seed, made_to // RUN, self._vocabulary.token_ids)
            made_to += RUN
