"""Runs the plans of requests: admitted, in their session's turn, answered in their dialect."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.types import Receive

from penstock.api.pipeline.admission import Admission, Ticket
from penstock.api.pipeline.dialect import Dialect
from penstock.api.pipeline.exchange import Exchange, Producer, Turn
from penstock.api.pipeline.plan import Plan
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.response import Sink
from penstock.metrics.frontend import FrontEndMetrics
from penstock.router.policy import Hints

TurnType = TypeVar("TurnType", bound=Turn)


class Turns(Protocol[TurnType]):
    """Who knows where a request would like to go, because of the session, or the key, that it comes with."""

    def turn(self, owner: str, hints: Hints) -> TurnType: ...

    def begin(self, turn: TurnType, model: str) -> Awaitable[None]:
        """Looks up what the turn's session or key is bound to. To be followed by `end`."""

    def end(self, turn: TurnType) -> None:
        """The turn is over, however it went."""


class Run(Protocol):
    """What runs a plan: the part of a `Runner` that its callers need, whatever its turns are."""

    async def run(self, plan: Plan, dialect: Dialect, receive: Receive, response: Sink) -> str: ...


@dataclass(frozen=True)
class Runner(Generic[TurnType]):
    """Where plans are run."""

    context: PromptContext
    turns: Turns[TurnType]
    producer: Producer[TurnType]
    admission: Admission
    metrics: FrontEndMetrics

    async def run(self, plan: Plan, dialect: Dialect, receive: Receive, response: Sink) -> str:
        """Answers into `response`, and returns the outcome: `ok`, or `broken_off` after a fault in mid-stream.

        Raises RequestError when it is not admitted, GenerationFault when a generation fails before anything was sent, and ReaderLeft when
        `receive` says that the client has gone.
        """
        generations = len(plan.submits)
        admitted = self.admission.admit(generations, response)
        with plan.tenant.quota.admit(generations, plan.prompt_tokens) as charge, admitted as ticket:
            turn = self.turns.turn(plan.tenant.owner, plan.hints)
            exchange = Exchange(plan, dialect, self.producer, turn, response, self.metrics)
            try:
                return await self._take_turn(plan, exchange, turn, receive, ticket)
            finally:
                charge.spend(exchange.completion_tokens)

    async def _take_turn(self, plan: Plan, exchange: Exchange, turn: TurnType, receive: Receive, ticket: Ticket) -> str:
        if plan.hints.session is None and plan.hints.affinity is None:
            return await exchange.run(receive, ticket)
        try:
            await self.turns.begin(turn, plan.model.info.name)
            outcome = await exchange.run(receive, ticket)
            if plan.chat is not None:
                for token_ids in exchange.answers:
                    self.context.transcripts.record(plan.chat, token_ids)
            return outcome
        finally:
            self.turns.end(turn)
