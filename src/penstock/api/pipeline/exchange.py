"""One request's answer: its generations run, their tokens become text, their text becomes the response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Protocol, TypeVar

from starlette.types import Receive

from penstock.api.pipeline.admission import Ticket
from penstock.api.pipeline.choice import Choice
from penstock.api.pipeline.dialect import Answer, ChoiceDelta, Dialect, Usage
from penstock.api.pipeline.plan import Plan
from penstock.api.pipeline.response import Sink
from penstock.api.pipeline.writer import EventWriter
from penstock.metrics.frontend import FrontEndMetrics
from penstock.stream.fanin import Arrival, FanIn, ReaderLeft, all_done
from penstock.stream.mailbox import Mailbox
from penstock.text.output import Part, joined
from penstock.wire.errors import GenerationFault, StreamError
from penstock.wire.messages import Fault, Submit, Terminal

log = logging.getLogger(__name__)


class Turn(Protocol):
    """One request on its way to the workers, and what can be told of that."""

    @property
    def settling(self) -> asyncio.Future[None] | None:
        """What the end of the answer has to wait for: a session is bound before its client can come with the next turn. None: nothing."""

    def describe_session(self) -> dict[str, object] | None:
        """What became of the session that it is a turn of; None without."""

    def describe_route(self) -> list[dict[str, object]]:
        """How its workers were chosen."""


TurnType = TypeVar("TurnType", bound=Turn, contravariant=True)


class Producer(Protocol[TurnType]):
    """Where generations come from."""

    def produce(self, model: str, request: Submit, mailbox: Mailbox, turn: TurnType) -> Coroutine[None, None, None]:
        """Begins a generation and returns what waits for its finish; raises GenerationFault; cancelling stops it."""


class Exchange:
    """Runs one plan and sends its answer, streamed or whole."""

    def __init__(
        self, plan: Plan, dialect: Dialect, producer: Producer[TurnType], turn: TurnType, response: Sink, metrics: FrontEndMetrics
    ) -> None:
        self._plan = plan
        self._turn = turn
        self._dialect = dialect
        self._response = response
        self._metrics = metrics
        name = plan.model.info.name
        self._fan = FanIn([partial(producer.produce, name, submit, turn=turn) for submit in plan.submits])
        self._choices = [Choice(index, plan, dialect) for index in range(len(plan.submits))]
        self._open = len(self._choices)
        self._begun = False
        self._last: int | None = None
        self._writer: EventWriter | None = None
        # Counted as they come: events may say them, and there may be thousands of choices.
        self._cached_tokens = 0
        self.completion_tokens = 0

    @property
    def answers(self) -> list[list[int]]:
        """The tokens of the choices that no stop string has cut, where they are to be remembered."""
        return [choice.answer for choice in self._choices if choice.answer is not None and choice.is_whole]

    async def run(self, receive: Receive, ticket: Ticket) -> str:
        """Returns the outcome: `ok`, or `broken_off` after a fault in mid-stream, which became an error event and the end.

        Raises ReaderLeft when the client goes away, GenerationFault when a generation fails before the answer has begun.
        """
        try:
            async with self._fan:
                ticket.on_expel = self._expel
                watcher = asyncio.create_task(self._watch(receive))
                try:
                    return await (self._stream(ticket) if self._plan.stream else self._collect(ticket))
                finally:
                    watcher.cancel()
                    await all_done([watcher])
        finally:
            tally = self._metrics.tally
            tally.late_puts += self._fan.late_puts
            for choice in self._choices:
                tally.tool_calls += choice.calls
                tally.broken_tool_calls += choice.broken_calls

    def _expel(self) -> None:
        self._fan.interrupt(GenerationFault(Fault("shutting_down", "the server is shutting down")))

    async def _watch(self, receive: Receive) -> None:
        """Tells the fan-in at once when the client goes away."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._fan.interrupt(ReaderLeft())
        if self._writer is not None:
            # It may be waiting for a socket that nobody will read any more.
            self._writer.stop(ReaderLeft())

    async def _stream(self, ticket: Ticket) -> str:
        self._writer = EventWriter(self._response, partial(self._render, ticket))
        self._fan.listen(self._writer.wake)
        return await self._writer.run()

    def _render(self, ticket: Ticket) -> tuple[bytes, str | None]:
        """The events of all that has arrived, and the outcome when they are the last."""
        if self._last is not None:
            return self._end()
        events: list[bytes] = []
        try:
            arrivals = self._fan.take()
            if not self._begun and arrivals:
                self._begin(arrivals, ticket)
                events.append(self._dialect.begin(Usage(self._plan.prompt_tokens, 0, _cached(arrivals))))
            for arrival in arrivals:
                events.append(self._event(arrival))
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
        except GenerationFault as error:
            if not self._begun:
                raise
            # What came before the fault, then the fault; it is not done.
            return b"".join(events) + self._dialect.fault(error.fault), "broken_off"
        if not self._open:
            last, outcome = self._end()
            return b"".join(events) + last, outcome
        return events[0] if len(events) == 1 else b"".join(events), None

    def _end(self) -> tuple[bytes, str | None]:
        """The end of a stream; nothing as long as it has to wait."""
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

    async def _collect(self, ticket: Ticket) -> str:
        collected = [_Collected() for _ in self._choices]
        arrivals = await self._fan.receive()
        self._begin(arrivals, ticket)
        while True:
            for arrival in arrivals:
                self._collect_one(arrival, collected[arrival.choice])
            if not self._open:
                break
            arrivals = await self._fan.receive()
        while (settling := self._turn.settling) is not None:
            await asyncio.wait([settling])
        answers = [self._answer(index, collected[index]) for index in self._best()]
        await self._response.send_whole(200, self._dialect.body(answers, self._usage(), self._nvext()))
        return "ok"

    def _collect_one(self, arrival: Arrival, collected: _Collected) -> None:
        parts, logprobs, token_ids = self._advance(arrival)
        collected.parts += parts
        collected.token_ids += token_ids
        if logprobs is not None:
            collected.logprobs.append(logprobs)
        if arrival.terminal is not None:
            _raise_fault(arrival.terminal)

    def _answer(self, index: int, collected: _Collected) -> Answer:
        ending = self._choices[index].ending
        assert ending is not None
        token_ids = collected.token_ids if self._plan.return_token_ids else None
        return Answer(joined(collected.parts), collected.logprobs, ending, token_ids)

    def _best(self) -> list[int]:
        """The candidates that are the answer's choices: of each prompt the likeliest."""
        plan, choices = self._plan, self._choices
        if plan.candidates == plan.n:
            return list(range(len(choices)))
        best: list[int] = []
        for start in range(0, len(choices), plan.candidates):
            group = range(start, start + plan.candidates)
            best += sorted(group, key=lambda index: -choices[index].score)[: plan.n]
        return best

    def _begin(self, arrivals: Sequence[Arrival], ticket: Ticket) -> None:
        """The first of any choice is here. Raises GenerationFault when it is only a fault: then the status can still say so."""
        if all(arrival.delta is None for arrival in arrivals):
            for arrival in arrivals:
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
        self._begun = True
        self._metrics.time_to_first_token.observe(ticket.first_token())

    def _event(self, arrival: Arrival) -> bytes:
        parts, logprobs, token_ids = self._advance(arrival)
        ending = self._choices[arrival.choice].ending
        plan = self._plan
        told = token_ids if plan.return_token_ids else None
        if not parts and logprobs is None and ending is None and not told:
            return b""
        usage = self._usage_so_far() if plan.continuous_usage else None
        if ending is None or self._open:
            return self._dialect.event(arrival.choice, ChoiceDelta(parts, logprobs, ending, told, usage))
        if self._turn.settling is None:
            return self._dialect.event(arrival.choice, ChoiceDelta(parts, logprobs, ending, told, usage, self._nvext()))
        # The tokens go out now, the end when it may.
        self._last = arrival.choice
        if not parts and logprobs is None and not told:
            return b""
        return self._dialect.event(arrival.choice, ChoiceDelta(parts, logprobs, None, told, usage))

    def _advance(self, arrival: Arrival) -> tuple[Sequence[Part], object, Sequence[int]]:
        """What an arrival adds to its choice, and the tokens of that. Raises GenerationFault when it does not follow what came before."""
        choice = self._choices[arrival.choice]
        before, cached_before = choice.tokens, choice.cached_tokens
        try:
            parts, logprobs = choice.advance(arrival.delta, arrival.terminal)
        except StreamError as error:
            log.error("a choice broke its stream on the last hop: %s", error)  # noqa: TRY400, the message tells it all
            raise GenerationFault(Fault("stream_breach", f"the stream broke: {error}")) from error
        added = choice.tokens - before
        self.completion_tokens += added
        self._cached_tokens += choice.cached_tokens - cached_before
        self._metrics.tally.tokens_delivered += added
        if choice.ending is not None:
            self._open -= 1
            if arrival.terminal is None:
                # A stop string: what the engine makes beyond it is not wanted.
                self._fan.drop(arrival.choice)
        return parts, logprobs, () if arrival.delta is None else arrival.delta.token_ids[:added]

    def _nvext(self) -> dict[str, object] | None:
        """What the answer says of its session, and, if the client asked, of its route."""
        told: dict[str, object] = {}
        session = self._turn.describe_session()
        if session is not None:
            told["session"] = session
        if self._plan.hints.wants_route:
            told["route"] = self._turn.describe_route()
        return told or None

    def _usage(self) -> Usage:
        usage = self._usage_so_far()
        reasoning = sum(choice.reasoning_tokens for choice in self._choices)
        return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, min(reasoning, usage.completion_tokens))

    def _usage_so_far(self) -> Usage:
        # Choices of one prompt share it, so its cached part is counted once, like the prompt.
        return Usage(self._plan.prompt_tokens, self.completion_tokens, self._cached_tokens // self._plan.candidates)


class _Collected:
    """What a choice of a whole answer has so far."""

    __slots__ = ("logprobs", "parts", "token_ids")

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.logprobs: list[object] = []
        self.token_ids: list[int] = []


def _cached(arrivals: Sequence[Arrival]) -> int:
    """How much of its prompt the first arrival found cached."""
    delta = arrivals[0].delta
    return 0 if delta is None or delta.prompt is None else delta.prompt.cached_tokens


def _raise_fault(terminal: Terminal) -> None:
    if isinstance(terminal, Fault):
        raise GenerationFault(terminal)
