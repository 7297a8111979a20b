"""One request's answer: its generations run, their tokens become text, their text becomes the response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Protocol, TypeVar

from starlette.types import Receive

from penstock.http.admission import Ticket
from penstock.http.dialect import DONE, Dialect, Usage
from penstock.http.errors import fault_body
from penstock.http.plan import Plan
from penstock.http.response import Response
from penstock.http.writer import EventWriter
from penstock.metrics.frontend import FrontEndMetrics
from penstock.stream.fanin import Arrival, FanIn, ReaderLeft, all_done
from penstock.stream.mailbox import Mailbox
from penstock.stream.merge import check_contiguous
from penstock.text.assembler import TextAssembler
from penstock.wire.errors import GenerationFault, StreamError
from penstock.wire.messages import Delta, Fault, Finish, Submit, Terminal

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


class Choice:
    """One choice of the answer, from its tokens to its text."""

    __slots__ = (
        "_assembler",
        "_dialect",
        "_index",
        "_next_offset",
        "_opening",
        "answer",
        "cached_tokens",
        "finish_reason",
        "is_whole",
        "tokens",
    )

    def __init__(self, index: int, plan: Plan, dialect: Dialect) -> None:
        self._index = index
        self._dialect = dialect
        self._assembler = TextAssembler(plan.model.tokenizer.detokenizer(), plan.stops)
        self._opening = dialect.opening(index)
        self._next_offset = 0
        self.tokens = 0
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        # Its tokens, where the session's next turn will come with them again.
        self.answer: list[int] | None = [] if plan.remembers else None
        self.is_whole = False

    def advance(self, delta: Delta | None, terminal: Terminal | None) -> tuple[str, object]:
        """The text and logprobs that a delta and a terminal add. Sets `finish_reason` at the end, be it a stop string's.

        This is the last hop, so the offset is checked once more: StreamError, rather than a loss that nobody sees.
        """
        text, self._opening = self._opening, ""
        logprobs = None
        if delta is not None:
            if delta.offset != self._next_offset:
                check_contiguous(self._next_offset, delta)
            self._next_offset += len(delta.token_ids)
            part = self._assembler.feed(delta.token_ids)
            self.tokens += part.tokens
            text = text + part.text if text else part.text
            if self.answer is not None:
                self.answer += delta.token_ids
            if delta.prompt is not None:
                self.cached_tokens = delta.prompt.cached_tokens
            if delta.logprobs is not None or delta.prompt is not None:
                logprobs = self._dialect.logprobs(self._index, delta, part.tokens)
            if part.stopped:
                self.finish_reason = "stop"
                return text, logprobs
        if isinstance(terminal, Finish):
            part = self._assembler.finish()
            text += part.text
            self.finish_reason = "stop" if part.stopped else terminal.reason
            self.is_whole = not part.stopped
        return text, logprobs


class Exchange:
    """Runs one plan and sends its answer, streamed or whole."""

    def __init__(
        self, plan: Plan, dialect: Dialect, producer: Producer[TurnType], turn: TurnType, response: Response, metrics: FrontEndMetrics
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
        self._last: tuple[int, str] | None = None
        self._writer: EventWriter | None = None

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
            self._metrics.tally.late_puts += self._fan.late_puts

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
            for arrival in arrivals:
                events.append(self._event(arrival))
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
        except GenerationFault as error:
            if not self._begun:
                raise
            # What came before the fault, then the fault; no [DONE], for it is not done.
            fault = fault_body(error.fault, self._plan.grammar_field)
            return b"".join(events) + b"data: " + fault + b"\n\n", "broken_off"
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
        event = b"" if self._last is None else self._dialect.event(self._last[0], "", None, self._last[1], self._nvext())
        return event + self._closing_events(), "ok"

    async def _collect(self, ticket: Ticket) -> str:
        texts: list[list[str]] = [[] for _ in self._choices]
        logprobs: list[list[object]] = [[] for _ in self._choices]
        arrivals = await self._fan.receive()
        self._begin(arrivals, ticket)
        while True:
            for arrival in arrivals:
                text, probs = self._advance(arrival)
                texts[arrival.choice].append(text)
                if probs is not None:
                    logprobs[arrival.choice].append(probs)
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
            if not self._open:
                break
            arrivals = await self._fan.receive()
        while (settling := self._turn.settling) is not None:
            await asyncio.wait([settling])
        parts = zip(texts, logprobs, self._choices, strict=True)
        whole = [("".join(text), probs, choice.finish_reason or "") for text, probs, choice in parts]
        await self._response.send_whole(200, self._dialect.body(whole, self._usage(), self._nvext()))
        return "ok"

    def _begin(self, arrivals: Sequence[Arrival], ticket: Ticket) -> None:
        """The first of any choice is here. Raises GenerationFault when it is only a fault: then the status can still say so."""
        if all(arrival.delta is None for arrival in arrivals):
            for arrival in arrivals:
                if arrival.terminal is not None:
                    _raise_fault(arrival.terminal)
        self._begun = True
        self._metrics.time_to_first_token.observe(ticket.first_token())

    def _event(self, arrival: Arrival) -> bytes:
        text, logprobs = self._advance(arrival)
        finish_reason = self._choices[arrival.choice].finish_reason
        if not text and logprobs is None and finish_reason is None:
            return b""
        if self._open or finish_reason is None:
            return self._dialect.event(arrival.choice, text, logprobs, finish_reason, None)
        if self._turn.settling is None:
            return self._dialect.event(arrival.choice, text, logprobs, finish_reason, self._nvext())
        # The tokens go out now, the end when it may.
        self._last = arrival.choice, finish_reason
        return self._dialect.event(arrival.choice, text, logprobs, None, None) if text or logprobs is not None else b""

    def _advance(self, arrival: Arrival) -> tuple[str, object]:
        """What an arrival adds to its choice. Raises GenerationFault when it does not follow what came before."""
        choice = self._choices[arrival.choice]
        before = choice.tokens
        try:
            added = choice.advance(arrival.delta, arrival.terminal)
        except StreamError as error:
            log.error("a choice broke its stream on the last hop: %s", error)  # noqa: TRY400, the message tells it all
            raise GenerationFault(Fault("stream_breach", f"the stream broke: {error}")) from error
        self._metrics.tally.tokens_delivered += choice.tokens - before
        if choice.finish_reason is not None:
            self._open -= 1
            if arrival.terminal is None:
                # A stop string: what the engine makes beyond it is not wanted.
                self._fan.drop(arrival.choice)
        return added

    def _closing_events(self) -> bytes:
        return (self._dialect.usage_event(self._usage()) if self._plan.include_usage else b"") + DONE

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
        completion = sum(choice.tokens for choice in self._choices)
        # Choices of one prompt share it, so its cached part is counted once, like the prompt.
        cached = sum(choice.cached_tokens for choice in self._choices) * self._plan.prompt_tokens
        total = sum(len(submit.token_ids) for submit in self._plan.submits)
        return Usage(self._plan.prompt_tokens, completion, cached // total)


def _raise_fault(terminal: Terminal) -> None:
    if isinstance(terminal, Fault):
        raise GenerationFault(terminal)
