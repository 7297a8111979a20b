"""The backend around an external engine. It does what the engines do not do themselves, in the same way for all of them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from penstock.backends.external.engine import (
    Chunk,
    EngineDied,
    EngineFacts,
    EngineRefused,
    EngineRequest,
    EventEndpoints,
    ExternalEngine,
    KvMoves,
    PromptImages,
)
from penstock.backends.external.handover import Handovers
from penstock.backends.external.images import MISMATCH, Pictures, Placeholder
from penstock.backends.external.kv_events import BlockMirror, salt_of
from penstock.config.engines import EngineSettings
from penstock.fairness import RESERVED_PART, FairBudget, Share
from penstock.grammar.compile_queue import CompileQueue
from penstock.kv.rates import Rate
from penstock.kv.sessions import Session, Sessions
from penstock.wire.codec import pack_logprobs
from penstock.wire.messages import (
    Capability,
    Delta,
    Fault,
    Fetch,
    Finish,
    KvEvents,
    KvSource,
    ModelInfo,
    PromptReport,
    Segment,
    SessionReport,
    SessionState,
    Snapshot,
    Submit,
    Terminal,
    TokenLogprob,
    TransferReport,
    WorkerStats,
)
from penstock.worker.backend import Emit, WantImages, moves_no_kv, validate_submit, wants_none

log = logging.getLogger(__name__)

# Expired sessions are ended this often. A busy engine that emits nothing is pinged this often.
WATCH_SECONDS = 1.0
MAX_SEED = 2**63 - 1
MIN_MEASURED_TOKENS = 256


class EventFeed(Protocol):
    """An engine's KV events. `mirror` has the blocks that the engine is known to have."""

    mirror: BlockMirror

    async def start(self) -> None: ...

    async def close(self) -> None: ...


MakeFeed = Callable[[EventEndpoints, int, Callable[[KvEvents], None]], EventFeed]
"""From the addresses of the events, the block size, and a callback for the events."""


class _Generation:
    """One running generation. `arrived` is the time of day when it came.

    `position` is the offset of its next token. Of the tokens that another worker generated, this engine generates `repeated` again: an
    engine can follow a grammar only from its start. `to_skip` are those that it has not generated yet.
    """

    def __init__(self, request: Submit, session: Session | None, session_state: SessionState | None, arrived: float) -> None:
        self.request = request
        self.arrived = arrived
        self.session = session
        self.session_state = session_state
        self.position = request.offset
        self.repeated = request.offset if request.grammar is not None and not self.is_complete else 0
        self.to_skip = request.token_ids[len(request.token_ids) - self.repeated :] if not self.only_prompt else ()
        self.sent_at = math.nan
        """When the engine got it; not a number if other generations ran there."""
        self.has_begun = False
        self.reported = False
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.blocks = 0
        self.pixels = Share(request.lane, request.weight)
        self.images: PromptImages | None = None
        self.task: asyncio.Task[None] | None = None

    @property
    def only_prompt(self) -> bool:
        """No token is left to generate: only the report on the prompt is wanted."""
        return self.request.max_tokens <= self.request.offset

    @property
    def is_complete(self) -> bool:
        """Another worker generated all tokens, and only the finish is missing. The engine might have no room for one more token."""
        request = self.request
        return self.only_prompt and request.offset > 0 and not request.prompt_logprobs and request.export is None


class ExternalBackend:
    """See `worker.backend.Backend`. Each generation is a task that reads the engine's chunks. The chunks of all tasks in one turn of the
    event loop are emitted together. The engine serves its generations in its own order. So if tenants share it, it gets only a few more
    generations than it computes at once; the others wait here and are sent in turn.

    When the engine dies, every generation gets one retryable fault and `on_failure` is called: the process should end and be restarted.
    """

    def __init__(
        self,
        model: ModelInfo,
        engine: ExternalEngine,
        grammars: CompileQueue[str] | None,
        make_feed: MakeFeed,
        on_failure: Callable[[], None],
        *,
        max_sessions: int,
        session_grace: float,
        kv_patience: float = EngineSettings.kv_patience,
        placeholder: Placeholder | None = None,
        pictures: Pictures | None = None,
        clock: Callable[[], float] = time.monotonic,
        time_of_day: Callable[[], float] = time.time,
    ) -> None:
        self.model = model
        self._engine = engine
        self._grammars = grammars
        self._make_feed = make_feed
        self._on_failure = on_failure
        self._clock = clock
        self._time_of_day = time_of_day
        self._placeholder = placeholder
        self._pictures = pictures or Pictures()
        self._handovers = Handovers(engine, self._report, kv_patience, clock, time_of_day)
        self._reports: list[TransferReport] = []
        self._prefill_rate = Rate()
        self._sessions = Sessions(None, max_sessions, session_grace)
        self._engine_sessions: dict[str, str] = {}
        self._feed: EventFeed | None = None
        self._facts = EngineFacts(model.context_length, model.block_size)
        self._places: FairBudget | None = None
        self._open: dict[bytes, _Generation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._segments: list[Segment] = []
        self._is_flush_due = False
        self._heard_at = clock()
        self._running = 0
        self._blocks_used = 0
        self._prompt_tokens = 0
        self._prompt_tokens_cached = 0
        self._failure: Fault | None = None
        self._has_mismatch = False
        self._is_closing = False

    async def start(self, emit: Emit, want: WantImages = wants_none) -> None:
        began = time.monotonic()
        log.info("loading %s with %s", self.model.name, self.model.engine)
        self._emit, self._pictures.want, self._loop = emit, want, asyncio.get_running_loop()
        facts = self._facts = await self._engine.start(self._fail)
        if facts.max_batch:
            self._places = FairBudget(facts.max_batch + max(1, facts.max_batch // RESERVED_PART))
        if "grammar" not in facts.capabilities:
            self._grammars = None
        if facts.events is not None:
            try:
                self._feed = self._make_feed(facts.events, facts.block_size, lambda events: self._emit((), events))
                await self._feed.start()
            except Exception:
                await self.close()
                raise
        self._handovers.moves = facts.moves
        moves = facts.moves or KvMoves("blocks", b"")
        self.model = replace(
            self.model,
            context_length=facts.context_length,
            block_size=facts.block_size,
            max_batch=facts.max_batch,
            capabilities=self._capabilities(facts),
            kv_fingerprint=moves.fingerprint,
            kv_address=moves.address,
            kv_block_bytes=moves.block_bytes,
            kv_handover=moves.handover,
            images=self.model.images if facts.reads_images else None,
        )
        self._begin(self._watch(), "engine watch")
        log.info("%s is loaded after %.1f s", self.model.name, time.monotonic() - began)

    def _capabilities(self, facts: EngineFacts) -> tuple[Capability, ...]:
        found: list[Capability] = [name for name in facts.capabilities if name != "grammar" or self._grammars is not None]
        return ("sessions", *found, *(("kv_events",) if self._feed is not None else ()))

    def submit(self, request: Submit) -> None:
        model, moves = self.model, self._handovers.moves
        reads_images = model.images is not None and self._placeholder is not None
        fault = self._failure or validate_submit(request, model.vocab_size, model.context_length, reads_images=reads_images)
        if fault is None and request.grammar is not None and self._grammars is None:
            fault = Fault("unsupported", f"{self.model.engine} has no grammar on this worker: see the worker's log or `penstock doctor`")
        if fault is None and request.root and "isolation" not in self.model.capabilities:
            fault = Fault(
                "unsupported",
                f"{self.model.engine} takes no `cache_salt`, so it cannot keep the KV of API keys apart: use --share-prefixes",
            )
        if fault is None and moves is not None and not moves.computes and request.export is None and request.source is None:
            fault = Fault(
                "unsupported",
                f"{self.model.engine} with --role prefill or decode cannot run a request alone: it needs a worker of the other role",
                retryable=True,
            )
        if fault is None and request.prompt_logprobs and moves is not None and moves.handover == "meeting":
            fault = Fault("unsupported", f"{self.model.engine} with --role prefill or decode gives no logprobs of prompts")
        if fault is None and request.images and moves is not None and moves.handover == "meeting":
            fault = Fault("unsupported", f"{self.model.engine} with --role prefill or decode reads no images")
        if fault is not None:
            self._put(Segment(request.id, None, fault))
            return
        if request.source is not None and moves is None:
            self._report(TransferReport(request.source.transfer, "failed", reason="this engine moves no KV"))
        session, state = self._sessions.begin_turn(request.session, request.lane)
        generation = self._open[request.id] = _Generation(request, session, state, self._time_of_day())
        work = self._run(generation) if self._places is None or not request.lane else self._run_in_turn(generation, self._places)
        task = generation.task = self._begin(work, f"generation {request.id.hex()}")
        # Not in a `finally` of the task: a task that is cancelled before its first step never gets there.
        task.add_done_callback(partial(self._left, generation))

    def cancel(self, generation: bytes) -> None:
        self._segments = [segment for segment in self._segments if segment.id != generation]
        cancelled = self._forget(generation)
        if cancelled is not None and cancelled.task is not None:
            cancelled.task.cancel()

    def fetch(self, request: Fetch) -> None:
        self._emit((), None, (moves_no_kv(request),))

    def end_transfer(self, transfer: bytes) -> None:
        self._handovers.end(transfer)

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        self._pictures.put(name, size, pixels)

    def image_at(self, name: bytes, source: KvSource) -> None:  # noqa: ARG002, the engine computes features itself
        self._pictures.ask_again(name, f"{self.model.engine} takes pixels only")

    def image_refused(self, name: bytes, reason: str, *, retryable: bool) -> None:
        self._pictures.refuse(name, reason, retryable=retryable)

    def close_session(self, session_id: str, epoch: int, *, frees: bool = True) -> None:
        self._sessions.close(session_id, epoch, frees=frees)
        self._end_engine_sessions()

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:  # noqa: ARG002, it has none
        return self._sessions.describe(session_ids, self._clock())

    async def snapshot(self) -> Snapshot | None:
        return None if self._feed is None else self._feed.mirror.snapshot()

    def stats(self) -> WorkerStats:
        mirror = None if self._feed is None else self._feed.mirror
        return WorkerStats(
            running=self._running,
            queued=len(self._open) - self._running,
            kv_blocks_used=self._blocks_used,
            kv_blocks_cached=0 if mirror is None else mirror.cached,
            kv_blocks_total=self._facts.kv_blocks,
            sessions=len(self._sessions),
            kv_blocks_evicted=0 if mirror is None else mirror.removed,
            prompt_tokens=self._prompt_tokens,
            prompt_tokens_cached=self._prompt_tokens_cached,
            sessions_evicted=self._sessions.evicted,
            prefill_rate=self._prefill_rate.per_second,
            pull_rate=self._handovers.rate.per_second,
            exports=self._handovers.exports,
            imports=self._handovers.imports,
            kv_host_blocks=0 if mirror is None else mirror.count("host"),
            kv_disk_blocks=0 if mirror is None else mirror.count("disk"),
        )

    async def close(self) -> None:
        self._is_closing = True
        # The end of a task may close a session, which starts another task.
        while self._tasks:
            for task in self._tasks:
                task.cancel()
            await asyncio.wait(self._tasks)
        self._handovers.close()
        if self._feed is not None:
            await self._feed.close()
        if self._grammars is not None:
            self._grammars.close()
        await self._engine.close()

    async def _run_in_turn(self, generation: _Generation, places: FairBudget) -> None:
        share = Share(generation.request.lane, generation.request.weight)
        try:
            if not places.take(share, 1):
                await places.wait(share, 1)
            await self._run(generation)
        finally:
            places.release(share)

    async def _run(self, generation: _Generation) -> None:
        """Runs one generation and gives it its terminal."""
        identity = generation.request.id
        if generation.is_complete:
            self._take(generation, Chunk((), finish="length"))
            return
        try:
            request = await self._engine_request(generation)
            if len(self._open) == 1 and request.source is None:
                generation.sent_at = self._clock()
            if request.source is None:
                made = self._engine.generate(request)
            else:
                made = self._handovers.generate(request, request.source, generation.arrived)
            async with contextlib.aclosing(made) as chunks:
                async for chunk in chunks:
                    if self._take(generation, chunk):
                        return
            terminal = Fault("no_terminal", f"{self.model.engine} ended the generation without a finish reason", retryable=True)
        except EngineRefused as refused:
            terminal = refused.fault
            self._note_mismatch(terminal)
        except EngineDied as error:
            self._fail(str(error))
            return
        except Exception as error:
            # This runs the engine's own code. Whatever it raises ends only this generation.
            log.exception("generation %s failed", identity.hex())
            terminal = Fault("engine_error", f"{self.model.engine}: {type(error).__name__}: {error}")
        if self._is_open(generation):
            self._forget(identity)
            self._put(Segment(identity, None, terminal))

    async def _engine_request(self, generation: _Generation) -> EngineRequest:
        request, session, moves = generation.request, generation.session, self._handovers.moves is not None
        lark: str | Fault | None = None
        if request.grammar is not None and self._grammars is not None and not generation.only_prompt:
            lark = await self._grammars.request(request.grammar, request.root, request.lane).wait()
        if isinstance(lark, Fault):
            raise EngineRefused(lark)
        made = request.offset - generation.repeated
        token_ids = request.token_ids[: len(request.token_ids) - generation.repeated]
        if request.images and self._placeholder is not None:
            collapsed = self._placeholder.collapse(token_ids, request.images, len(token_ids) - made)
            token_ids = self._placeholder.expand(token_ids)
            generation.images = PromptImages(collapsed, await self._pictures.get(request, generation.pixels))
        return EngineRequest(
            id=secrets.token_hex(16),
            token_ids=token_ids,
            max_tokens=max(1, request.max_tokens - made),
            seed=_engine_seed(request, made),
            min_tokens=max(0, request.min_tokens - made),
            ignore_eos=request.ignore_eos,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            sampling=request.sampling,
            stop_ids=request.stop_ids,
            logit_bias=request.logit_bias,
            lark=lark,
            session_id=None if session is None else self._engine_session(session),
            priority=request.priority,
            session_seconds=0.0 if session is None or request.session is None else request.session.timeout,
            keep_seconds=max(request.retention_seconds, *(mark.seconds for mark in request.marks), 0.0),
            salt=salt_of(request.root),
            export=request.export if moves else None,
            source=request.source if moves else None,
            images=generation.images,
        )

    def _take(self, generation: _Generation, chunk: Chunk) -> bool:
        """Emits the new part. Returns whether the generation has ended."""
        request = generation.request
        if not self._is_open(generation):
            return True
        chunk = self._skip(generation, chunk)
        self._note(generation, chunk)
        token_ids, logprobs = ((), None) if generation.only_prompt else (chunk.token_ids, chunk.logprobs)
        if not token_ids and chunk.finish is None:
            return False
        report = None
        if not generation.reported:
            generation.reported = True
            packed = None if generation.prompt_logprobs is None else pack_logprobs(generation.prompt_logprobs)
            report = PromptReport(generation.cached_tokens, packed, generation.session_state)
            self._prompt_tokens += len(request.token_ids)
            self._prompt_tokens_cached += generation.cached_tokens
        delta = Delta(generation.position, token_ids, logprobs, report) if token_ids or report is not None else None
        generation.position += len(token_ids)
        self._count_blocks(generation)
        terminal: Terminal | None = None
        if request.export is not None and chunk.finish is not None:
            self._handovers.give(request.export, chunk.ticket)
        if chunk.finish is not None or generation.only_prompt:
            terminal = Finish("length" if generation.only_prompt else chunk.finish or "length")
            self._forget(request.id)
        self._heard_at = self._clock()
        self._put(Segment(request.id, delta, terminal))
        return terminal is not None

    def _note(self, generation: _Generation, chunk: Chunk) -> None:
        """Reads what comes only once, with any chunk."""
        is_first, generation.has_begun = not generation.has_begun, True
        self._running += is_first
        if is_first and generation.images is not None:
            self._free_pixels(generation)
        if chunk.cached_tokens is not None and not generation.reported:
            generation.cached_tokens = min(chunk.cached_tokens, len(generation.request.token_ids))
        if is_first and len(self._open) == 1 and not math.isnan(generation.sent_at):
            now, computed = self._clock(), len(generation.request.token_ids) - generation.cached_tokens
            # Of a short prompt, most is not the computing.
            if computed >= MIN_MEASURED_TOKENS:
                self._prefill_rate.measure(computed, now - generation.sent_at, now)
        if chunk.prompt_logprobs is not None:
            generation.prompt_logprobs = chunk.prompt_logprobs

    def _skip(self, generation: _Generation, chunk: Chunk) -> Chunk:
        """Drops the tokens that another worker generated. Raises EngineRefused if this engine generates other ones."""
        if not generation.to_skip:
            return chunk
        expected = generation.to_skip[: len(chunk.token_ids)]
        if chunk.token_ids[: len(expected)] != expected or (chunk.finish is not None and len(generation.to_skip) > len(expected)):
            message = f"{self.model.engine} cannot continue: under the grammar it generated other tokens than the worker before it"
            raise EngineRefused(Fault("grammar_diverged", message))
        generation.to_skip = generation.to_skip[len(expected) :]
        logprobs = None if chunk.logprobs is None else chunk.logprobs[len(expected) :]
        return replace(chunk, token_ids=chunk.token_ids[len(expected) :], logprobs=logprobs)

    def _count_blocks(self, generation: _Generation) -> None:
        """Estimates how many blocks the generation uses alone."""
        tokens = len(generation.request.token_ids) + generation.position - generation.request.offset - generation.cached_tokens
        blocks = -(-tokens // self.model.block_size)
        self._blocks_used += blocks - generation.blocks
        generation.blocks = blocks

    def _is_open(self, generation: _Generation) -> bool:
        """False after a cancel, even if a new generation has the same id."""
        return self._open.get(generation.request.id) is generation

    def _forget(self, identity: bytes) -> _Generation | None:
        generation = self._open.pop(identity, None)
        if generation is not None:
            self._running -= generation.has_begun
            self._blocks_used -= generation.blocks
        return generation

    def _begin(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _left(self, generation: _Generation, _: asyncio.Task[None]) -> None:
        """The engine has ended the generation: its turn is over."""
        self._free_pixels(generation)
        session, request = generation.session, generation.request
        if session is not None:
            session.usage.count(len(request.token_ids), generation.cached_tokens, generation.position - request.offset)
            self._sessions.end_turn(session, self._clock())
            self._end_engine_sessions()

    def _note_mismatch(self, fault: Fault) -> None:
        if fault.code == MISMATCH and not self._has_mismatch:
            self._has_mismatch = True
            log.error("%s: images do not work until this is fixed. Do --engine-args change the model's processor?", fault.message)

    def _free_pixels(self, generation: _Generation) -> None:
        self._pictures.release(generation.pixels)
        if generation.images is not None:
            generation.images.pictures.clear()

    def _engine_session(self, session: Session) -> str:
        """The engine's name for the session: a hash, of fixed length and opaque."""
        name = self._engine_sessions.get(session.id)
        if name is None:
            name = self._engine_sessions[session.id] = hashlib.blake2b(session.id.encode(), digest_size=16).hexdigest()
        return name

    def _end_engine_sessions(self) -> None:
        """Closes the engine's sessions that have ended here."""
        over = [session_id for session_id in self._engine_sessions if self._sessions.get(session_id) is None]
        for session_id in over:
            self._begin(self._engine.close_session(self._engine_sessions.pop(session_id)), "closing an engine's session")

    async def _watch(self) -> None:
        """Pings an engine that is busy but says nothing, and emits a sign of life: a long prompt is not a stall."""
        while True:
            # Counted from its last word, not from the last look: it would be silent for nearly twice as long.
            left = self._heard_at + WATCH_SECONDS - self._clock()
            await asyncio.sleep(left if 0 < left < WATCH_SECONDS else WATCH_SECONDS)
            self._sessions.expire(self._clock())
            self._end_engine_sessions()
            if self._open and self._clock() - self._heard_at >= WATCH_SECONDS:
                try:
                    await self._engine.ping()
                except EngineDied as error:
                    self._fail(str(error))
                    return
                except Exception:
                    # Neither alive nor dead for sure: the front end decides how long it waits.
                    log.exception("pinging %s failed", self.model.engine)
                    continue
                self._heard_at = self._clock()
                self._emit((), None)

    def _put(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._flush_soon()

    def _report(self, report: TransferReport) -> None:
        self._reports.append(report)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        segments, self._segments = self._segments, []
        reports, self._reports = self._reports, []
        self._emit(segments, None, reports)

    def _fail(self, reason: str) -> None:
        if self._failure is not None or self._is_closing:
            return
        log.error("%s failed: %s", self.model.engine, reason)
        self._failure = Fault("engine_failed", f"the engine has failed: {reason}", retryable=True)
        for identity, generation in list(self._open.items()):
            self._forget(identity)
            self._put(Segment(identity, None, self._failure))
            assert generation.task is not None
            generation.task.cancel()
        self._on_failure()


def _engine_seed(request: Submit, position: int) -> int | None:
    """The engine's seed from this position on: at most 63 bits, because engines use signed numbers, and -1 means no seed.

    Engines sample faster if no request of a batch has a seed, so they get a seed only if the client gave one, or under a grammar: there
    another worker must be able to generate the same tokens again.
    """
    if request.is_seed_drawn and request.grammar is None:
        return None
    seed = request.seed
    if position:
        # The engine counts positions from its own start. A continued text needs other random numbers than its beginning.
        seed = int.from_bytes(hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest(), "big")
    return seed & MAX_SEED
