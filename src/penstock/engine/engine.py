"""The engine: generations in, one step at a time, segments out. One thread calls it; it does no I/O."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable

import msgspec
import torch

from penstock.config.engines import EngineConfig
from penstock.engine.attention import KVStore
from penstock.engine.batch import BatchBuilder
from penstock.engine.fingerprint import kv_fingerprint
from penstock.engine.host_slots import HostSlots
from penstock.engine.memory import StepBudget, is_out_of_memory, release_unused, smaller
from penstock.engine.model import Model
from penstock.engine.page_copies import PageCopies
from penstock.engine.sampler import NO_TOKEN, MaskPool, Sampled, Sampler, apply_mask, prompt_logprobs
from penstock.engine.scheduler import Scheduler, Work
from penstock.engine.sequence import SampledSequence
from penstock.engine.vision.images import EngineImages
from penstock.grammar.compile_queue import CompileQueue, CompileRequest, wait_for_any
from penstock.grammar.grammar import GrammarCompiler, GrammarMatcher
from penstock.kv.cache import KVCache
from penstock.kv.features import place_images
from penstock.kv.moving import KvTransport, SlotMemory
from penstock.kv.rates import Rate
from penstock.kv.sessions import Sessions
from penstock.kv.staging import Staging
from penstock.kv.tiers import BlockFiles, HostTier, Tiers
from penstock.kv.transfers import Transfers
from penstock.wire.codec import pack_logprobs
from penstock.wire.errors import GrammarError
from penstock.wire.messages import (
    Delta,
    Fault,
    Finish,
    ImagesWanted,
    KvEvents,
    PromptReport,
    Segment,
    SessionReport,
    Snapshot,
    Submit,
    Terminal,
    TokenLogprob,
    WorkerStats,
)
from penstock.worker.backend import validate_submit

# How long a step with nothing to compute waits for a grammar that is being compiled.
COMPILE_WAIT_SECONDS = 0.02
# Prompt logprobs need a row of logits per token, each as wide as the vocabulary: those of 8,192 rows would take gigabytes.
MAX_LOGPROB_ROWS = 256
# A step with fewer tokens of prompts is not measured: reading the weights takes most of its time.
MIN_MEASURED_TOKENS = 64
# Copies that are queued at a time, between pages and host memory: about 15 ms on a CPU, 20 ms on a GPU.
CPU_COPY_BYTES = 64 * 2**20
GPU_COPY_BYTES = 2**30
NOT_NUMBERS = Fault("invalid_logits", "the model's logits for the next token are not numbers")

log = logging.getLogger(__name__)


class Engine:
    """Every submitted generation gets exactly one terminal from `step`, except a cancelled one, which gets none."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        end_ids: frozenset[int],
        vocab_size: int,
        compiler: GrammarCompiler | None,
        clock: Callable[[], float],
        images: EngineImages | None = None,
    ) -> None:
        """`vocab_size` is the tokenizer's: rows of the model beyond it are padding and never chosen. `images` None: it reads only text."""
        shape = model.shape
        self._config = config
        self.model = model
        self._vocab_size = min(vocab_size, shape.vocab_size)
        self._end_ids = frozenset(token for token in end_ids if 0 <= token < self._vocab_size)
        self._compile_queue = None if compiler is None else CompileQueue(compiler.compile, clock)
        self._compiling: dict[bytes, tuple[SampledSequence, CompileRequest[GrammarMatcher]]] = {}
        self._clock = clock
        self._cache = KVCache(config.kv_pages, config.page_size, config.lease_share)
        self._store = KVStore(shape, config.kv_pages, config.page_size, model.dtype, model.device, config.reproducible)
        self.images = images
        features, store = (None, None) if images is None else (images.features, images.maker.store)
        self._builder = BatchBuilder(config.page_size, model.device, features, store, has_axes=bool(shape.rope_axes))
        self.sessions = Sessions(self._cache, config.max_sessions, config.session_grace)
        slots = config.host_slots + config.staging_slots
        self.copies = None if not slots else PageCopies(self._store, HostSlots(self._store, slots))
        """Between pages and host memory; None without host memory."""
        self.memory: SlotMemory | None = self._store.memory if self.copies is None or not config.staging_slots else self.copies.slots
        """What a transport may touch; None if it may not."""
        self.transfers = Transfers(self._cache, clock, 0 if self.memory is None else self.memory.layout.slot_bytes)
        self.moves: Transfers | Staging = self.transfers
        """What a transport speaks to."""
        self._scheduler: Scheduler[SampledSequence] = Scheduler(self._cache, self.sessions, config.max_batch, self.transfers, features)
        self._sampler = Sampler(self._end_ids)
        self._masks = MaskPool(self._vocab_size)
        self._refused: list[Segment] = []
        self._budget = StepBudget(config.token_budget, config.page_size)
        self._memory_failures = 0
        self.prefill_rate = Rate()
        """Tokens of prompts per second."""
        self.tiers: Tiers | None = None
        self._files: BlockFiles | None = None
        # How long the last step took, by the bits of its number of rows.
        self._step_seconds: dict[int, float] = {}

    @property
    def has_work(self) -> bool:
        has_news = self.images is not None and self.images.has_news
        is_copying = self.copies is not None and self.copies.is_busy
        return self._scheduler.has_work or bool(self._refused or self._compiling) or has_news or is_copying

    @property
    def awaits_images(self) -> bool:
        """Whether others are to send images. While the tower here encodes, it says itself that it goes on."""
        return self.images is not None and self.images.features.is_awaited and not self.images.is_encoding

    @property
    def next_expiry(self) -> float:
        """When the next lease ends, if nothing else happens."""
        return self._scheduler.next_expiry

    def fingerprint(self) -> bytes:
        """Engines with the same one can use each other's KV."""
        images = b"" if self.images is None else self.images.maker.fingerprint
        return kv_fingerprint(self.model, self._config.page_size, is_reproducible=self._config.reproducible, images=images)

    def pages_of(self, names: Iterable[bytes]) -> list[int]:
        """The pages of those of these blocks that are cached."""
        return [node.page for name in names if (node := self._cache.find(name)) is not None]

    def use_tiers(self, files: BlockFiles | None) -> None:
        """From now on KV that the device has no room for goes to host memory, and from there to these files."""
        assert self.copies is not None
        # The others are for transfers.
        memory = self.copies.slots.first(self._config.host_slots)
        size = memory.layout.slot_bytes
        # On a CPU a step makes all copies that are queued. A GPU makes them beside its steps.
        copying = (CPU_COPY_BYTES if self.model.device.type == "cpu" else GPU_COPY_BYTES) // size
        host = HostTier(self.copies, memory, max(1, copying))
        self._files = files
        config, events = self._config, self._cache.events
        self.tiers = Tiers(host, files, events, self.prefill_rate, config.page_size, size, self._clock, config.lease_share)
        self.transfers.use_tiers(self.tiers)

    def on_news(self, wake: Callable[[], None]) -> None:
        """`wake` is called, in another thread, when a step can go on with what the disk has read or written, or the tower has made."""
        if self._files is not None:
            self._files.on_done = wake
        if self.images is not None:
            self.images.on_done = wake

    def connect(self, transport: KvTransport) -> None:
        """From now on KV can move."""
        self.transfers.transport = transport
        if self._config.staging_slots and self.copies is not None:
            first = self._config.host_slots
            staging = Staging(self.transfers, transport, self.copies, range(first, first + self._config.staging_slots))
            self.moves = self.transfers.transport = staging

    def submit(self, request: Submit) -> None:
        """Queues a generation, whose id is not in use. One that can never run gets its fault with the next step."""
        fault = self._validate(request)
        if fault is not None:
            self._refused.append(Segment(request.id, None, fault))
            return
        sequence = SampledSequence(request, *self.sessions.begin_turn(request.session, request.lane))
        if request.grammar is None:
            self._scheduler.add(sequence)
        else:
            assert self._compile_queue is not None
            if request.export is not None:
                # A puller waits only for the Submit, which is here: compiling may take longer.
                self.transfers.expect(request.export.transfer, request.export.lease_seconds)
            self._compiling[request.id] = sequence, self._compile_queue.request(request.grammar, request.root, request.lane)

    def cancel(self, generation: bytes) -> None:
        """Stops a generation in any state and frees all that it held at once. An unknown or ended one is ignored."""
        self._refused = [segment for segment in self._refused if segment.id != generation]
        now = self._clock()
        if not self._scheduler.cancel(generation, now) and generation in self._compiling:
            sequence, _ = self._compiling.pop(generation)
            self._scheduler.end_turn(sequence, now)

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> bool:
        return self.sessions.close(session_id, epoch, frees=frees)

    def describe_sessions(self, session_ids: Iterable[str], *, with_tokens: bool = False) -> list[SessionReport]:
        """Reports on the known ones of these sessions."""
        return self.sessions.describe(session_ids, self._clock(), with_tokens=with_tokens)

    def take_events(self) -> KvEvents | None:
        """The KV events since the last call; None when there are none."""
        return self._cache.events.take()

    def snapshot(self) -> Snapshot:
        """All blocks that are cached now, whether or not their events were taken."""
        return self._cache.snapshot()

    def take_asked(self) -> list[ImagesWanted]:
        """The images that are needed since the last call, and are not here."""
        return [] if self.images is None else self.images.features.take_asked()

    def stats(self) -> WorkerStats:
        stats = self._scheduler.stats(len(self._compiling))
        stats = msgspec.structs.replace(stats, memory_failures=self._memory_failures, prefill_rate=self.prefill_rate.per_second)
        return stats if self.tiers is None else self.tiers.add_stats(stats)

    def close(self) -> None:
        if self._files is not None:
            # Before the memory is gone that it reads and writes.
            self._files.close()
        if self.copies is not None:
            self.copies.close()
        if self.images is not None:
            self.images.close()
        self._masks.close()
        if self._compile_queue is not None:
            self._compile_queue.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in one place and all holders of pages are known."""
        self._scheduler.check_integrity(sequence for sequence, _ in self._compiling.values())
        self.moves.check_integrity()
        if self.tiers is not None:
            self.tiers.check_integrity(self.sessions.leases)

    def check_idle(self) -> None:
        """The cheap check, for when nothing can go on: the counts add up, and only transfers and what is paused use pages."""
        self._cache.check_counts()
        in_transfer = self.transfers.held_pages
        is_busy = self.has_work or self._scheduler.is_paused
        assert is_busy or self._cache.used <= in_transfer, f"{self._cache.used} pages are in use, at most {in_transfer} of them in transfer"

    @torch.inference_mode()
    def step(self) -> list[Segment]:
        """Computes what the scheduler chooses and returns what is new."""
        now = self._clock()
        if self.copies is not None:
            self.copies.poll()
        if self.images is not None:
            self.images.poll()
        self._scheduler.expire(now)
        self._take_compiled(now)
        segments, self._refused = self._refused, []
        work = self._builder.order(self._schedule(now))
        segments += self._scheduler.take_lost(now)
        self._wipe(self._cache.take_fresh())
        if work:
            segments += self._run(work)
            self._budget.succeeded()
            self._measure(work, self._clock() - now)
            self._step_seconds[_bits(work)] = self._clock() - now
        elif self.copies is not None:
            self.copies.wait()
        return segments

    def _wipe(self, pages: list[int]) -> None:
        if self.copies is not None:
            self.copies.protect(pages)
        self._store.wipe(pages)

    def _validate(self, request: Submit) -> Fault | None:
        """The fault of a request that can never run."""
        limits = self._vocab_size, self._config.context_length
        fault = validate_submit(request, *limits, reads_images=self.images is not None) or self._scheduler.validate(request)
        if fault is None and self.images is not None and (wrong := self.images.wrong(place_images(request.token_ids, request.images))):
            return Fault("invalid_images", wrong)
        if fault is None and request.grammar is not None and self._compile_queue is None:
            return Fault("unsupported", "this model's tokenizer has no grammar support")
        return fault

    def _measure(self, work: list[Work[SampledSequence]], seconds: float) -> None:
        """How fast prompts are computed: by steps that compute many of their tokens, and little else."""
        tokens = sum([item.length for item in work if item.length > 1])
        if tokens >= max(MIN_MEASURED_TOKENS, len(work)):
            self.prefill_rate.measure(tokens, seconds, self._clock())

    def _schedule(self, now: float) -> list[Work[SampledSequence]]:
        self._scheduler.make_way()
        work = self._scheduler.schedule_decodes(now)
        # Prompts progress, if slowly, even when more sequences decode than the budget has tokens.
        budget = max(self._budget.tokens - len(work), self._cache.page_size)
        return work + self._scheduler.schedule_prompts(budget, now)

    def _take_compiled(self, now: float) -> None:
        if not self._compiling:
            return
        if not self._scheduler.has_work:
            wait_for_any([compilation for _, compilation in self._compiling.values()], COMPILE_WAIT_SECONDS)
        for generation, (sequence, compilation) in list(self._compiling.items()):
            compiled = compilation.poll()
            if compiled is None:
                continue
            del self._compiling[generation]
            fault = compiled if isinstance(compiled, Fault) else _set_matcher(sequence, compiled)
            if fault is None:
                self._scheduler.add(sequence)
            else:
                self._scheduler.end_turn(sequence, now)
                self._refused.append(Segment(generation, None, fault))

    def _run(self, work: list[Work[SampledSequence]]) -> list[Segment]:
        """Computes this work, in smaller steps where memory runs out."""
        try:
            return self._compute(work)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).partition("\n")[0]
        # Not before the error is gone: its frames hold the tensors of the step.
        rows = sum(item.length for item in work)
        log.warning("out of memory in a step of %d tokens, which is tried again in smaller ones: %s", rows, reason)
        self._memory_failures += 1
        self._budget.failed(rows)
        release_unused(self.model.device)
        parts = smaller(work, self._cache.page_size)
        if not parts:
            why = "the worker has too little memory to compute this request, even alone and in the smallest step"
            return [self._fail(work[0].sequence, Fault("out_of_memory", why, retryable=True))]
        return [segment for part in parts for segment in self._run(part)]

    def _compute(self, work: list[Work[SampledSequence]]) -> list[Segment]:
        """One step. Nothing but unused pages changes until all of it is computed, so a step that fails can be tried again."""
        ends = list(itertools.accumulate(item.length for item in work))
        drawn = [(item.sequence, end - 1) for item, end in zip(work, ends, strict=True) if item.sequence.to_compute == item.length]
        restricted = [(sequence.matcher, index) for index, (sequence, _) in enumerate(drawn) if sequence.matcher is not None]
        # The masks are filled in threads while the model computes.
        self._masks.begin(restricted)
        batch = self._builder.build(work)
        if self.copies is not None:
            self.copies.start(self._step_seconds.get(_bits(work), 0.0))
        hidden = self.model.forward(batch, self._store)
        # What is not a number in a row's keys or values, in any layer, is in its last state, too.
        are_finite = hidden.sum(-1, dtype=torch.float32).isfinite()
        reports = [self._prompt_logprobs(item, hidden[end - item.length : end]) for item, end in zip(work, ends, strict=True)]

        def restrict(chosen: torch.Tensor) -> None:
            apply_mask(chosen, [index for _, index in restricted], self._masks.masks())

        sampled = Sampled([], [])
        if drawn:
            rows = hidden if len(drawn) == len(hidden) else hidden[torch.tensor([row for _, row in drawn], device=hidden.device)]
            logits = self.model.logits(rows)[:, : self._vocab_size]
            sampled = self._sampler.sample(logits, [sequence for sequence, _ in drawn], restrict)
        # Asked for last: drawing has waited for the device already.
        broken = set() if are_finite.all() else _broken(work, are_finite.tolist())
        segments = [self._fail(sequence, NOT_NUMBERS) for sequence in broken]
        for item, report in zip(work, reports, strict=True):
            if item.sequence not in broken:
                item.sequence.add_prompt_logprobs(report)
                self._scheduler.computed(item)
        now = self._clock()
        made = zip(drawn, *sampled, strict=True)
        return segments + [self._advance(sequence, token, logprob, now) for (sequence, _), token, logprob in made if sequence not in broken]

    def _prompt_logprobs(self, work: Work[SampledSequence], hidden: torch.Tensor) -> list[TokenLogprob | None]:
        """If they are asked for: the logprobs of the prompt's tokens after the first, each from the row before it."""
        sequence, count = work
        if sequence.prompt_logprobs is None or sequence.is_reported:
            return []
        known = sequence.tokens[sequence.computed + 1 : sequence.computed + count + 1]
        found: list[TokenLogprob | None] = []
        for start in range(0, len(known), MAX_LOGPROB_ROWS):
            some = known[start : start + MAX_LOGPROB_ROWS]
            logits = self.model.logits(hidden[start : start + len(some)])[:, : self._vocab_size]
            found += prompt_logprobs(logits, some, sequence.request.logprobs or 0)
        return found

    def _fail(self, sequence: SampledSequence, fault: Fault) -> Segment:
        """Ends a running sequence. What this step has computed of it is dropped."""
        self._scheduler.finish(sequence, self._clock())
        return Segment(sequence.request.id, None, fault)

    def _advance(self, sequence: SampledSequence, token: int, logprob: TokenLogprob | None, now: float) -> Segment:
        """Adds a token to a sequence. Returns its segment, with a terminal if it is the last."""
        request, position = sequence.request, sequence.position
        report = self._report(sequence, now)
        if position >= request.max_tokens:
            # Only the prompt was wanted, or all tokens were generated elsewhere.
            self._scheduler.finish(sequence, now)
            return Segment(request.id, Delta(position, (), None, report), Finish("length"))
        if token == NO_TOKEN:
            return self._fail(sequence, NOT_NUMBERS)
        sequence.append(token)
        terminal = self._terminal(sequence, token)
        if terminal is not None:
            self._scheduler.finish(sequence, now)
        return Segment(request.id, Delta(position, (token,), None if logprob is None else (logprob,), report), terminal)

    def _terminal(self, sequence: SampledSequence, token: int) -> Terminal | None:
        request = sequence.request
        if sequence.matcher is not None:
            try:
                # First of all: a grammar that has become too complex allows only an end, and raises when it is taken.
                sequence.matcher.advance(token)
            except GrammarError as error:
                return Fault("grammar_broken", f"the grammar cannot be followed any longer: {error}")
            if sequence.matcher.is_finished:
                return Finish("stop")
        if (token in self._end_ids and not request.ignore_eos) or token in request.stop_ids:
            return Finish("stop")
        return Finish("length") if sequence.position >= request.max_tokens else None

    def _report(self, sequence: SampledSequence, now: float) -> PromptReport | None:
        if sequence.is_reported:
            return None
        packed = None if sequence.prompt_logprobs is None else pack_logprobs(sequence.prompt_logprobs)
        return self._scheduler.report(sequence, packed, now)


def _bits(work: list[Work[SampledSequence]]) -> int:
    """Steps of the same bits take a similar time."""
    return sum(item.length for item in work).bit_length()


def _set_matcher(sequence: SampledSequence, compiled: GrammarMatcher) -> Fault | None:
    """Gives the sequence a matcher of its own, advanced by the tokens that were generated elsewhere."""
    request = sequence.request
    sequence.matcher = compiled.clone()
    try:
        sequence.matcher.replay(request.token_ids[len(request.token_ids) - request.offset :])
    except GrammarError as error:
        return Fault("invalid_grammar", str(error))
    return None


def _broken(work: Iterable[Work[SampledSequence]], are_finite: list[bool]) -> set[SampledSequence]:
    """The sequences with a row that is not finite."""
    rows = iter(are_finite)
    return {sequence for sequence, count in work if not all(list(itertools.islice(rows, count)))}
