"""The engine: generations in, a step at a time, segments out. One thread calls it; it does no I/O and never sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from penstock.config.engines import EngineConfig
from penstock.engine.attention import KVStore
from penstock.engine.batch import BatchBuilder
from penstock.engine.model import Model
from penstock.engine.sampler import NO_TOKEN, MaskPool, Sampler, apply_mask, prompt_logprobs
from penstock.engine.scheduler import Scheduler, Work
from penstock.engine.sequence import Sequence
from penstock.grammar.compile_queue import CompileQueue, CompileRequest, wait_for_any
from penstock.grammar.grammar import GrammarCompiler, GrammarMatcher
from penstock.kv.cache import KVCache
from penstock.kv.sessions import Sessions
from penstock.wire.errors import GrammarError
from penstock.wire.messages import (
    Delta,
    Fault,
    Finish,
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
from penstock.worker.refusal import total_length, why_not

# How long a step with nothing to compute waits for a grammar that is being compiled.
COMPILE_WAIT = 0.02


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
    ) -> None:
        """`vocab_size` is the tokenizer's: rows of the model beyond it are padding and never chosen."""
        shape = model.shape
        self._config = config
        self._model = model
        self._vocab_size = min(vocab_size, shape.vocab_size)
        self._end_ids = frozenset(token for token in end_ids if 0 <= token < self._vocab_size)
        self._compile_queue = None if compiler is None else CompileQueue(compiler.compile, clock)
        self._compiling: dict[bytes, tuple[Sequence, CompileRequest[GrammarMatcher]]] = {}
        self._clock = clock
        self._cache = KVCache(config.kv_pages, config.page_size, config.lease_share)
        self._store = KVStore(shape, config.kv_pages, config.page_size, model.dtype, model.device, config.reproducible)
        self._builder = BatchBuilder(config.page_size, model.device)
        self._scheduler = Scheduler(config, self._cache)
        self._sampler = Sampler(self._end_ids)
        self._masks = MaskPool(self._vocab_size)
        self._refused: list[Segment] = []
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self.sessions = Sessions(self._cache, config.max_sessions, config.session_grace)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._refused or self._compiling)

    @property
    def next_expiry(self) -> float:
        """When a lease runs out, if nothing else happens."""
        return self.sessions.next_expiry

    def submit(self, request: Submit) -> None:
        """Queues a generation, whose id is not in use; one that can never run gets its fault with the next step."""
        fault = self._why_not(request)
        if fault is not None:
            self._refused.append(Segment(request.id, None, fault))
            return
        session, state = self.sessions.begin_turn(request.session) if request.session is not None else (None, None)
        sequence = Sequence(request, session, state)
        if request.grammar is None:
            self._scheduler.add(sequence)
        else:
            assert self._compile_queue is not None
            self._compiling[request.id] = sequence, self._compile_queue.request(request.grammar)

    def cancel(self, generation: bytes) -> None:
        """Stops a generation in any state; all that it held is free at once. One that is unknown or has ended is ignored."""
        self._refused = [segment for segment in self._refused if segment.id != generation]
        sequence = self._scheduler.remove(generation)
        if sequence is None:
            sequence, _ = self._compiling.pop(generation, (None, None))
        if sequence is not None:
            self._end_turn(sequence)

    def close_session(self, session_id: str, epoch: int) -> bool:
        return self.sessions.close(session_id, epoch)

    def clear_cache(self) -> None:
        self._cache.clear()

    def describe_sessions(self, session_ids: Iterable[str]) -> list[SessionReport]:
        """Those of these sessions that there are."""
        return self.sessions.describe(session_ids, self._clock())

    def take_events(self) -> KvEvents | None:
        """What has happened to the cached KV since the last taking; None when nothing has."""
        return self._cache.events.take()

    def snapshot(self) -> Snapshot:
        """All that is cached now, whether or not the events that tell of it were taken."""
        return self._cache.snapshot()

    def stats(self) -> WorkerStats:
        cache, scheduler = self._cache, self._scheduler
        return WorkerStats(
            running=scheduler.running,
            queued=scheduler.waiting + len(self._compiling),
            kv_blocks_used=cache.used,
            kv_blocks_cached=cache.cached,
            kv_blocks_total=cache.pages,
            kv_blocks_leased=cache.leased,
            sessions=len(self.sessions),
            kv_blocks_evicted=cache.evicted_pages,
            preemptions=scheduler.preemptions,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
        )

    def close(self) -> None:
        self._masks.close()
        if self._compile_queue is not None:
            self._compile_queue.close()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page is in one place and everything that holds one is known."""
        sequences = list(self._scheduler)
        paths, tails = [sequence.path for sequence in sequences], [sequence.tail for sequence in sequences]
        self._cache.check_integrity(paths, tails, self.sessions.leases)
        sequences += [sequence for sequence, _ in self._compiling.values()]
        for session in self.sessions:
            assert session.active_turns == sum(1 for sequence in sequences if sequence.session is session)

    def check_idle(self) -> None:
        """The cheap check, for when nothing runs: every page is accounted for, and none is in use."""
        self._cache.check_counts()
        assert self.has_work or not self._cache.used, f"{self._cache.used} pages are in use, and nothing runs"

    @torch.inference_mode()
    def step(self) -> list[Segment]:
        """Computes what the scheduler chose and returns what is new."""
        now = self._clock()
        self.sessions.expire(now)
        self._take_compiled()
        segments, self._refused = self._refused, []
        work = self._builder.order(self._scheduler.schedule(now))
        self._store.wipe(self._cache.take_fresh())
        if work:
            segments += self._compute(work, now)
        return segments

    def _why_not(self, request: Submit) -> Fault | None:
        """The reason why a request can never run."""
        if wrong := why_not(request, self._vocab_size, self._config.context_length):
            return wrong
        pages = self._cache.pages_for(total_length(request))
        if pages > self._cache.pages:
            return Fault("kv_too_small", f"the request needs {pages} KV pages and the worker has {self._cache.pages}")
        if request.grammar is not None and self._compile_queue is None:
            return Fault("unsupported", "this model's tokenizer has no grammar support")
        return None

    def _take_compiled(self) -> None:
        if not self._compiling:
            return
        if not self._scheduler.has_work:
            wait_for_any([compilation for _, compilation in self._compiling.values()], COMPILE_WAIT)
        for generation, (sequence, compilation) in list(self._compiling.items()):
            compiled = compilation.poll()
            if compiled is None:
                continue
            del self._compiling[generation]
            fault = compiled if isinstance(compiled, Fault) else _set_matcher(sequence, compiled)
            if fault is None:
                self._scheduler.add(sequence)
            else:
                self._end_turn(sequence)
                self._refused.append(Segment(generation, None, fault))

    def _compute(self, work: list[Work], now: float) -> list[Segment]:
        wanted: list[int] = []
        drawn: list[tuple[Sequence, int]] = []  # who gets a token, and from which of the wanted rows
        reports: list[tuple[Work, int]] = []  # whose prompt is asked about, and where its rows begin among the wanted
        row = 0
        for item in work:
            sequence, count = item
            row += count
            if sequence.prompt_logprobs is not None and not sequence.reported:
                reports.append((item, len(wanted)))
                wanted += range(row - count, row)
            elif sequence.to_compute == count:
                wanted.append(row - 1)
            if sequence.to_compute == count:
                drawn.append((sequence, len(wanted) - 1))
        restricted = [(sequence.matcher, index) for index, (sequence, _) in enumerate(drawn) if sequence.matcher is not None]
        # While the model computes, what the grammars allow next is found out beside it.
        self._masks.begin(restricted)
        logits = self._model.logits(self._builder.build(work, wanted), self._store)[:, : self._vocab_size]
        for item, start in reports:
            self._report_prompt(item, logits[start : start + item.length])
        for item in work:
            self._scheduler.computed(item)
        if not drawn:
            return []

        def restrict(chosen: torch.Tensor) -> None:
            apply_mask(chosen, [index for _, index in restricted], self._masks.masks())

        rows = logits if len(drawn) == len(wanted) else logits[torch.tensor([place for _, place in drawn], device=logits.device)]
        tokens, logprobs = self._sampler.sample(rows, [sequence for sequence, _ in drawn], restrict)
        made = zip(drawn, tokens, logprobs, strict=True)
        return [self._advance(sequence, token, logprob, now) for (sequence, _), token, logprob in made]

    def _report_prompt(self, work: Work, logits: torch.Tensor) -> None:
        """The logprobs of the prompt's tokens behind the first, each from the row before it."""
        sequence, count = work
        assert sequence.prompt_logprobs is not None
        known = sequence.tokens[sequence.computed + 1 : sequence.computed + count + 1]
        sequence.prompt_logprobs += prompt_logprobs(logits[: len(known)], known, sequence.request.logprobs or 0)

    def _advance(self, sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> Segment:
        """A sequence has a new token: what is told of it, and whether it is the last."""
        request, position = sequence.request, sequence.position
        report = self._report(sequence)
        if position >= request.max_tokens:
            # Only the prompt was wanted, or all had been made elsewhere.
            self._finish(sequence, now)
            return Segment(request.id, Delta(position, (), None, report), Finish("length"))
        if token == NO_TOKEN:
            self._finish(sequence, now)
            return Segment(request.id, None, Fault("invalid_logits", "the model's scores for the next token are not numbers"))
        sequence.append(token)
        terminal = self._terminal(sequence, token)
        if terminal is not None:
            self._finish(sequence, now)
        return Segment(request.id, Delta(position, (token,), None if logprob is None else (logprob,), report), terminal)

    def _terminal(self, sequence: Sequence, token: int) -> Terminal | None:
        request = sequence.request
        if sequence.matcher is not None:
            try:
                # Before all else: a grammar that has become too complex allows only an end, and says so when it is taken.
                sequence.matcher.advance(token)
            except GrammarError as error:
                return Fault("grammar_broken", f"the grammar cannot be followed any further: {error}")
            if sequence.matcher.is_finished:
                return Finish("stop")
        if (token in self._end_ids and not request.ignore_eos) or token in request.stop_ids:
            return Finish("stop")
        return Finish("length") if sequence.position >= request.max_tokens else None

    def _report(self, sequence: Sequence) -> PromptReport | None:
        if sequence.reported:
            return None
        sequence.reported = True
        cached = sequence.cached_tokens or 0
        self._prompt_tokens += len(sequence.request.token_ids)
        self._prompt_tokens_cached += cached
        logprobs = None if sequence.prompt_logprobs is None else tuple(sequence.prompt_logprobs)
        return PromptReport(cached, logprobs, sequence.session_state)

    def _finish(self, sequence: Sequence, now: float) -> None:
        self.sessions.retain(sequence.path, sequence.request.retention_seconds, now)
        self._scheduler.remove(sequence.request.id)
        self._end_turn(sequence)

    def _end_turn(self, sequence: Sequence) -> None:
        session, request = sequence.session, sequence.request
        if session is not None:
            session.usage.count(len(request.token_ids), sequence.cached_tokens or 0, sequence.position - request.offset)
            self.sessions.end_turn(session, self._clock())


def _set_matcher(sequence: Sequence, compiled: GrammarMatcher) -> Fault | None:
    """Gives the sequence a matcher of its own, advanced by the tokens that were generated elsewhere."""
    request = sequence.request
    sequence.matcher = compiled.clone()
    try:
        sequence.matcher.replay(request.token_ids[len(request.token_ids) - request.offset :])
    except GrammarError as error:
        return Fault("invalid_grammar", str(error))
    return None
