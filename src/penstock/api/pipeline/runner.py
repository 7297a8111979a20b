"""Runs plans: admits them, starts their generations, and turns their tokens into the answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from msgspec import structs
from starlette.types import Receive

from penstock.api.pipeline.admission import Admission, Ticket
from penstock.api.pipeline.choice import MAX_WEIGHT, Choice, pieces_of, token_weight, weight_of
from penstock.api.pipeline.detached import DetachedRun, DetachedRuns
from penstock.api.pipeline.dialect import Answer, ChoiceDelta, Dialect, Usage
from penstock.api.pipeline.plan import Plan
from penstock.api.pipeline.request import Incoming, PromptContext
from penstock.api.pipeline.response import ClientWatch, ClientWatches, EventWriter, Response, Sink
from penstock.cluster.sessions.sessions import Sessions
from penstock.cluster.sessions.turn import Turn
from penstock.config.front_end import Limits
from penstock.kv.blocks import ROOT
from penstock.metrics.frontend import Tally
from penstock.stream.mailbox import Arrival, FanIn, Mailbox, Production, ReaderLeft, all_done
from penstock.text.output import Part, joined
from penstock.wire.errors import GenerationFault, StreamError
from penstock.wire.messages import Fault, Mark, PromptReport, Submit, Terminal

log = logging.getLogger(__name__)

MAX_STARTED_AT_ONCE = 64
"""Generations that are sent to workers in one go: 2 to 4 ms."""

MAX_BYTES_AT_ONCE = 1 << 20
"""Of a whole answer, this much is encoded in one go. A piece, however short, counts as PIECE_BYTES."""

PIECE_BYTES = 1024

# Fewer and shorter arrivals than these are rendered in a few milliseconds.
MAX_ARRIVALS_UNWEIGHED = 16
MAX_TOKENS_UNWEIGHED = 16

MAX_TOKENS_AT_ONCE = 8192
"""Blocks of longer prompts are named in pieces, before the router needs them. It does not with one worker."""

STATUS_SECONDS = 1.0
"""A fault of a stream within this time is a status, which clients try again. Later it may be an event."""

MAX_GENERATIONS_AT_ONCE = 16
"""More are started in a turn on the event loop."""

Parse = Callable[[Incoming, PromptContext], Awaitable[tuple[Plan, Dialect]]]
"""Reads a request. Raises RequestError that names the field."""

LoopTurn = Callable[[], Awaitable[None]]
"""See LoopTurns."""

Produce = Callable[[str, Turn, Submit, Mailbox], Production]
"""Starts a generation of this model. See `Dispatcher.produce`."""


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class Runner:
    """The only place where plans are run."""

    context: PromptContext
    sessions: Sessions
    produce: Produce
    admission: Admission
    tally: Tally
    detached: DetachedRuns
    watches: ClientWatches = field(default_factory=ClientWatches)

    async def answer(self, parse: Parse, incoming: Incoming, receive: Receive, response: Response) -> str:
        """Answers a request with generations: on its connection, or detached from it if the client wants to resume."""
        plan, dialect = await parse(incoming, self.context)
        incoming.drop_body()
        if not plan.request.resumable:
            return await self.run(plan, dialect, receive, response)
        run = DetachedRun(self.detached, dialect, plan.tenant)
        self.detached.start(run, partial(self.run, plan, dialect), numbered=True)
        return await self.detached.follow(run, receive, response)

    async def run(self, plan: Plan, dialect: Dialect, receive: Receive, sink: Sink, on_admitted: Callable[[], None] = _ignore) -> str:
        """Answers into `sink`, and returns the outcome: `ok`, or `broken_off` after a fault in the middle of a stream.

        Calls `on_admitted` once the request is admitted. Raises RequestError when it is not, GenerationFault when a generation fails
        before anything was sent, and ReaderLeft when `receive` says that the client has gone.
        """
        generations, tenant = len(plan.submits), plan.tenant
        with self.admission.admit(generations, sink, tenant.lane, tenant.weight) as ticket:
            quota = tenant.quota
            quota.admit(generations, plan.prompt_tokens)
            run = None
            try:
                if plan.submits[0].prompt_logprobs:
                    await self.admission.reserve(ticket, tenant, plan.prompt_logprob_bytes, plan.prompt_tokens)
                on_admitted()
                turn = Turn(self.sessions, tenant.owner, plan.hints)
                loop_turn = partial(self.admission.loop_turns.take, tenant.lane, tenant.weight)
                if plan.prompt_tokens > MAX_TOKENS_AT_ONCE or generations > MAX_GENERATIONS_AT_ONCE:
                    await loop_turn()
                run = _Run(plan, dialect, self.produce, turn, receive, sink, self.tally, ticket, loop_turn, self.admission.limits)
                self.watches.add(run.watch)
                if plan.hints.session is None and plan.hints.affinity is None:
                    return await run.run()
                return await self._take_turn(run, plan, turn)
            except GenerationFault as error:
                raise GenerationFault(error.fault, plan.grammar_field) from error
            finally:
                quota.release(generations, plan.prompt_tokens, 0 if run is None else run.completion_tokens)
                if run is not None:
                    run.watch.close()

    async def _take_turn(self, run: _Run, plan: Plan, turn: Turn) -> str:
        """Runs a session's turn, or a request that follows a key."""
        try:
            await self.sessions.begin(turn, plan.model.info.name)
            outcome = await run.run()
            if plan.chat is not None:
                for token_ids in run.answers:
                    self.context.transcripts.record(plan.chat, token_ids)
            return outcome
        finally:
            self.sessions.end(turn)


class _Run:
    """One plan that runs: its answer is sent streamed or whole."""

    def __init__(
        self,
        plan: Plan,
        dialect: Dialect,
        produce: Produce,
        turn: Turn,
        receive: Receive,
        sink: Sink,
        tally: Tally,
        ticket: Ticket,
        loop_turn: LoopTurn,
        limits: Limits,
    ) -> None:
        self._plan = plan
        self._turn = turn
        self._dialect = dialect
        self._sink = sink
        self._tally = tally
        self._ticket = ticket
        self._loop_turn = loop_turn
        request, name = plan.request, plan.model.info.name
        self._returns_token_ids = bool(request.return_token_ids)
        self._tells_usage = request.continuous_usage
        self._fan = FanIn([partial(produce, name, turn, submit) for submit in plan.submits])
        self._choices = [Choice(index, plan, dialect) for index in range(len(plan.submits))]
        self._token_weight = token_weight(plan)
        self._open = len(self._choices)
        self._has_begun = False
        self._last: int | None = None
        """The choice whose ending waits until the session is bound."""
        self._writer: EventWriter | None = None
        self._backlog: Iterator[Arrival] | None = None
        """What was taken and is not rendered yet."""
        # Counted as tokens arrive: events may report them, and there may be thousands of choices.
        self._cached_tokens = 0
        self._written: dict[float, int] = {}
        self.completion_tokens = 0
        self._keep_alive = limits.keep_alive
        self._is_announced = False
        """Its client may have the headers of a stream, so a fault is an event."""
        self._blank: asyncio.Task[None] | None = None
        """White space that is being sent."""
        patience = min(STATUS_SECONDS, limits.keep_alive) if request.stream else limits.keep_alive and limits.whole_keep_alive
        self.watch = ClientWatch(receive, self._leave, patience, self._remind)

    @property
    def loop_label(self) -> str:
        return f"answer {self._dialect.id}"

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of the choices that the session remembers: those that no stop string has cut."""
        return [choice.answer for choice in self._choices if choice.answer is not None and choice.is_whole]

    async def run(self) -> str:
        """Returns the outcome: `ok`, or `broken_off` after a fault in a stream that has begun, which ends with an error event.

        Raises ReaderLeft when the client goes away, GenerationFault when a generation fails before that, or the answer is whole.
        """
        plan = self._plan
        try:
            self._ticket.on_expel = self._expel
            if plan.prompt_tokens > MAX_TOKENS_AT_ONCE and len(self._turn.sessions.pool.members) > 1:
                prompts = [submit.token_ids for submit in plan.submits[:: plan.candidates]]
                await self._turn.name_blocks(prompts, plan.model.info.block_size, plan.submits[0].root, self._loop_turn)
            for _ in range(0, len(plan.submits) - MAX_STARTED_AT_ONCE, MAX_STARTED_AT_ONCE):
                self._fan.start(MAX_STARTED_AT_ONCE)
                await self._loop_turn()
            self._fan.start()
            return await (self._stream() if self._plan.request.stream else self._collect())
        finally:
            # No more white space is begun.
            self.watch.close()
            self._fan.close()
            if self._blank is not None:
                self._blank.cancel()
                await all_done([self._blank])
            # Breaks a reference cycle, as the writer does.
            self._ticket.on_expel = None
            self._count()

    def _count(self) -> None:
        tally = self._tally
        tally.late_puts += self._fan.late_puts
        for choice in self._choices:
            tally.tool_calls += choice.calls
            tally.broken_tool_calls += choice.broken_calls

    def _expel(self) -> None:
        self._fan.interrupt(GenerationFault(Fault("shutting_down", "the server is shutting down")))

    def _leave(self) -> None:
        """The client has gone."""
        self._fan.interrupt(ReaderLeft())
        if self._writer is not None:
            # It may be waiting for a socket that nobody reads any more.
            self._writer.stop(ReaderLeft())

    def _remind(self) -> float:
        """Sends something if nothing was sent since the last call. Returns when to call again.

        Two such times, each of them late by the time of a look, are less than `keep_alive`: no silence is longer.
        """
        writer = self._writer
        if not self._plan.request.stream:
            if self._blank is None or self._blank.done():
                self._blank = asyncio.create_task(self._sink.send_blank())
            return 0.8 * self._keep_alive
        if writer is not None and writer.has_spoken:
            writer.has_spoken = False
        elif writer is not None:
            self._break_silence(writer)
        return 0.35 * self._keep_alive

    def _break_silence(self, writer: EventWriter) -> None:
        if not self._has_begun and not self._is_announced:
            self._is_announced = True
            writer.write(lambda: (self._dialect.announce(), None))
        if not writer.has_spoken:
            writer.send_idle(self._dialect.keep_alive())

    async def _stream(self) -> str:
        self._writer = EventWriter(self._sink, self._render)
        self._fan.listen(self._writer.wake)
        return await self._writer.run()

    def _render(self) -> tuple[bytes, str | None]:
        """The events of all that has arrived, and the outcome when they are the last."""
        if self._last is not None:
            return self._end()
        events: list[bytes] = []
        try:
            arrivals = self._take()
            if not self._has_begun and arrivals:
                self._begin(arrivals)
                events.append(self._dialect.begin(self._first_usage(arrivals[0])))
            for arrival in arrivals:
                if self._choices[arrival.choice].ending is not None:
                    # A stop string was in an earlier piece.
                    continue
                events.append(self._event(arrival))
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
        except GenerationFault as error:
            if not self._has_begun and not self._is_announced:
                raise
            # What came before the fault, then the fault; the stream is not complete.
            return b"".join(events) + self._dialect.fault(error.fault), "broken_off"
        if not self._open:
            last, outcome = self._end()
            return b"".join(events) + last, outcome
        return events[0] if len(events) == 1 else b"".join(events), None

    def _take(self) -> Sequence[Arrival]:
        """What is rendered now: all that has arrived, or a part of it if that takes long. Then the rest follows in the next turns."""
        if self._backlog is None:
            arrivals = self._fan.take()
            if len(arrivals) <= MAX_ARRIVALS_UNWEIGHED and not any(map(self._is_large, arrivals)):
                return arrivals
            self._backlog = self._pieces(arrivals)
        taken: list[Arrival] = []
        weight = 0
        for piece in self._backlog:
            taken.append(piece)
            weight += weight_of(piece, self._token_weight) + self._choices[piece.choice].opening_weight
            if weight >= MAX_WEIGHT:
                assert self._writer is not None
                asyncio.get_running_loop().call_soon(self._writer.wake)
                return taken
        self._backlog = None
        # Something may have arrived since.
        if self._writer is not None:
            asyncio.get_running_loop().call_soon(self._writer.wake)
        return taken

    def _is_large(self, arrival: Arrival) -> bool:
        """Whether it may take long to render. Nearly every delta of a stream has few tokens."""
        if self._choices[arrival.choice].opening_weight:
            return True
        delta = arrival.delta
        if delta is None:
            return False
        return len(delta.token_ids) > MAX_TOKENS_UNWEIGHED or (delta.prompt is not None and delta.prompt.logprobs is not None)

    def _pieces(self, arrivals: Sequence[Arrival]) -> Iterator[Arrival]:
        return chain.from_iterable(pieces_of(arrival, self._token_weight) for arrival in arrivals)

    def _end(self) -> tuple[bytes, str | None]:
        """The end of a stream. Empty while the session is being bound: its client may send the next turn as soon as it sees the end."""
        settling = self._turn.settling
        if settling is not None and self._last is not None:
            assert self._writer is not None
            wake = self._writer.wake
            settling.add_done_callback(lambda _: wake())
            return b"", None
        event = b""
        if self._last is not None:
            event = self._dialect.event(self._last, ChoiceDelta((), ending=self._choices[self._last].ending, nvext=self._nvext()))
        return event + self._dialect.end(self._usage()), "ok"

    async def _collect(self) -> str:
        collected = [_Collected() for _ in self._choices]
        arrivals = await self._fan.receive()
        self._begin(arrivals)
        while True:
            await self._collect_all(arrivals, collected)
            if not self._open:
                break
            arrivals = await self._fan.receive()
        while (settling := self._turn.settling) is not None:
            await asyncio.wait([settling])
        body = await self._body([self._answer(index, collected[index]) for index in self._best()])
        # From now on the response watches its client.
        self.watch.close()
        if self._blank is not None:
            # Not `all_done`: a client that takes nothing is cut off while this waits.
            await asyncio.wait([self._blank])
        await self._sink.send_whole(200, body)
        return "ok"

    async def _collect_all(self, arrivals: Sequence[Arrival], collected: Sequence[_Collected]) -> None:
        """Others go on meanwhile if it takes long."""
        weight = 0
        for piece in self._pieces(arrivals):
            if self._choices[piece.choice].ending is None:
                self._collect_one(piece, collected[piece.choice])
                weight += weight_of(piece, self._token_weight)
                if weight >= MAX_WEIGHT:
                    weight = 0
                    await self._loop_turn()

    async def _body(self, answers: Sequence[Answer]) -> list[bytes]:
        body: list[bytes] = []
        size = 0
        for piece in self._dialect.body(answers, self._usage(), self._nvext()):
            body.append(piece)
            size += len(piece) + PIECE_BYTES
            if size >= MAX_BYTES_AT_ONCE:
                size = 0
                await self._loop_turn()
        return body

    def _collect_one(self, arrival: Arrival, collected: _Collected) -> None:
        parts, logprobs, token_ids = self._advance(arrival)
        collected.parts += parts
        collected.token_ids += token_ids
        if logprobs is not None:
            collected.logprobs.append(self._dialect.kept_logprobs(logprobs))
        if arrival.terminal is not None:
            _raise_fault(arrival.terminal)

    def _answer(self, index: int, collected: _Collected) -> Answer:
        ending = self._choices[index].ending
        assert ending is not None
        token_ids = collected.token_ids if self._returns_token_ids else None
        return Answer(joined(collected.parts), collected.logprobs, ending, token_ids)

    def _best(self) -> list[int]:
        """The candidates that become choices of the answer: the likeliest of each prompt."""
        plan, choices = self._plan, self._choices
        if plan.candidates == plan.n:
            return list(range(len(choices)))
        best: list[int] = []
        for start in range(0, len(choices), plan.candidates):
            group = range(start, start + plan.candidates)
            best += sorted(group, key=lambda index: -choices[index].score)[: plan.n]
        return best

    def _begin(self, arrivals: Sequence[Arrival]) -> None:
        """The first delta of any choice is here. Raises GenerationFault if it is a fault: the HTTP status may still report it."""
        if all(arrival.delta is None for arrival in arrivals):
            for arrival in arrivals:
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
        self._has_begun = True
        self._ticket.first_token()

    def _event(self, arrival: Arrival) -> bytes:
        parts, logprobs, token_ids = self._advance(arrival)
        ending = self._choices[arrival.choice].ending
        told = token_ids if self._returns_token_ids else None
        if not parts and logprobs is None and ending is None and not told:
            return b""
        usage = self._usage_so_far() if self._tells_usage else None
        if ending is None or self._open:
            return self._dialect.event(arrival.choice, ChoiceDelta(parts, logprobs, ending, told, usage))
        if self._turn.settling is None:
            return self._dialect.event(arrival.choice, ChoiceDelta(parts, logprobs, ending, told, usage, self._nvext()))
        # The tokens are sent now, the ending when the session is bound.
        self._last = arrival.choice
        if not parts and logprobs is None and not told:
            return b""
        return self._dialect.event(arrival.choice, ChoiceDelta(parts, logprobs, None, told, usage))

    def _advance(self, arrival: Arrival) -> tuple[Sequence[Part], object, Sequence[int]]:
        """The parts, logprobs and tokens that an arrival adds to its choice. Raises GenerationFault when it is out of sequence."""
        choice = self._choices[arrival.choice]
        before, is_reported = choice.tokens, choice.report is not None
        try:
            parts, logprobs = choice.advance(arrival.delta, arrival.terminal)
        except StreamError as error:
            log.error("the tokens of a choice do not fit together inside this front end: %s", error)  # noqa: TRY400, the message tells it all
            raise GenerationFault(Fault("stream_breach", f"the stream broke: {error}")) from error
        added = choice.tokens - before
        self.completion_tokens += added
        if choice.report is not None and not is_reported:
            self._cached_tokens += choice.report.cached_tokens
            for mark in _written(choice.report):
                self._written[mark.seconds] = self._written.get(mark.seconds, 0) + mark.tokens
        self._tally.tokens_delivered += added
        if choice.ending is not None:
            self._open -= 1
            if arrival.terminal is None:
                # A stop string ended it: no more tokens are needed.
                self._fan.drop(arrival.choice)
        return parts, logprobs, () if arrival.delta is None else arrival.delta.token_ids[:added]

    def _nvext(self) -> dict[str, object] | None:
        """What the answer tells about its session and, if the client asked, about its route."""
        told: dict[str, object] = {}
        session = self._turn.describe_session()
        if session is not None:
            told["session"] = session
        if retained := self._turn.describe_retained():
            told["retained"] = retained
        if self._plan.hints.wants_route:
            # A cost contains the load that others cause.
            told["route"] = self._turn.describe_route(has_costs=self._plan.tenant.root == ROOT)
        return told or None

    def _usage(self) -> Usage:
        usage = self._usage_so_far()
        reasoning = sum([choice.reasoning_tokens for choice in self._choices])
        return structs.replace(usage, reasoning_tokens=min(reasoning, usage.completion_tokens))

    def _usage_so_far(self) -> Usage:
        # Choices of one prompt share it, so its cached part is counted once, like the prompt.
        candidates = self._plan.candidates
        written = tuple([Mark(tokens // candidates, seconds) for seconds, tokens in self._written.items()])
        return Usage(self._plan.prompt_tokens, self.completion_tokens, self._cached_tokens // candidates, written=written)

    def _first_usage(self, arrival: Arrival) -> Usage:
        report = None if arrival.delta is None else arrival.delta.prompt
        cached, written = (0, ()) if report is None else (report.cached_tokens, _written(report))
        return Usage(self._plan.prompt_tokens, 0, cached, written=written)


@dataclass(slots=True)
class _Collected:
    """What a choice of a whole answer has so far."""

    parts: list[Part] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def _written(report: PromptReport) -> tuple[Mark, ...]:
    """The tokens that were written to the cache for each time."""
    return tuple([Mark(tokens, mark.seconds) for mark, tokens in zip(report.retained, report.written, strict=False)])


def _raise_fault(terminal: Terminal) -> None:
    if isinstance(terminal, Fault):
        raise GenerationFault(terminal)
