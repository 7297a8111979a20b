"""Which requests are admitted, which are inside, and which are cut off."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Self

from penstock.api.auth.keys import Tenant
from penstock.api.pipeline.response import Sink
from penstock.config.front_end import Limits
from penstock.fairness import FairBudget, LoopTurns, Places, Share
from penstock.metrics.frontend import BUCKETS, Tally
from penstock.wire.errors import RequestError

MAX_WAIT_SECONDS = 10.0
"""For the memory of an answer."""

TOKEN_BYTES = 40
"""What a token of a prompt takes in memory."""

MAX_OVERDRAFT = 4
"""A request may alone need this many times the memory of all answers. One that needs more never gets it."""


class Ticket:
    """One admitted request, as a context: queued until its first token, then running."""

    __slots__ = ("_admission", "_generations", "_is_running", "_lane", "arrived", "on_expel", "share", "sink", "task")

    def __init__(self, admission: Admission, generations: int, sink: Sink, lane: str) -> None:
        self.arrived = time.monotonic()
        self.sink = sink
        self.task = asyncio.current_task()
        self.on_expel: Callable[[], None] | None = None
        self.share: Share | None = None
        self._admission = admission
        self._generations = generations
        self._lane = lane
        self._is_running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._admission.leave(self, self._generations, self._lane, self._is_running)

    def first_token(self) -> None:
        """The first token is here."""
        self._is_running = True
        self._admission.start_running(time.monotonic() - self.arrived)


class Admission:
    """Admits requests within the limits, and knows those inside.

    While it drains, nothing new is admitted. `idle` is set when the last request has left. `bodies` is the budget for the bytes of requests
    that are not admitted yet. `answers` is the budget for large answers that clients have not read yet: answers without a generation, and
    the prompts in answers that repeat them with logprobs.
    """

    def __init__(self, limits: Limits, tally: Tally) -> None:
        self.limits = limits
        self.idle = asyncio.Event()
        self.idle.set()
        self.answering = 0
        """Requests whose body has been read."""
        self._tally = tally
        self.is_draining = False
        self.bodies = FairBudget(limits.body_memory, has_shares=True)
        self.answers = FairBudget(limits.answer_memory, has_shares=True)
        self.loop_turns = LoopTurns()
        self._places = Places(limits.max_generations)
        self._tickets: set[Ticket] = set()

    def admit(self, generations: int, sink: Sink, lane: str = "", weight: int = 1) -> Ticket:
        """Raises RequestError: 503 while draining, 429 when the front end is full. A request that only reads has 0 generations.

        `lane` and `weight` are those of the tenant: the last eighth of the generations is for tenants below their share.
        """
        if self.is_draining:
            raise RequestError("the server is shutting down", code="draining", status=503)
        if generations and not self._places.take(generations, lane, weight):
            raise self._full(lane)
        ticket = Ticket(self, generations, sink, lane)
        self._tickets.add(ticket)
        if generations:
            self._tally.queued += 1
        self.idle.clear()
        return ticket

    def reading(self, tenant: Tenant | None, sink: Sink, size: int) -> Ticket:
        """Admits a client that reads an answer that is there, even while draining.

        With a tenant, the answer's bytes count for it until the client has left. Raises RequestError (503) when there are too many.
        """
        ticket = Ticket(self, 0, sink, "")
        if tenant is not None:
            ticket.share = Share(tenant.lane, tenant.weight)
            if not self.answers.take(ticket.share, size):
                raise self._no_memory()
        self._tickets.add(ticket)
        self.idle.clear()
        return ticket

    async def reserve(self, ticket: Ticket, tenant: Tenant, size: int, prompt_tokens: int) -> None:
        """Waits until there is memory for the answer to an admitted request. Meanwhile its prompt takes room as a body does.

        Raises RequestError: 503 when that takes too long or too many wait, 400 when it needs too much: a tenant with nothing under way
        does not wait.
        """
        most = MAX_OVERDRAFT * self.answers.total
        if size > most:
            message = f"the logprobs of the prompts of all choices take about {size:,} bytes: expected at most {most:,} (--answer-memory)"
            raise RequestError(message, param="n", code="too_long", limit="answer_memory")
        ticket.share = share = Share(tenant.lane, tenant.weight)
        if self.answers.take(share, size):
            return
        waiting = Share(tenant.lane, tenant.weight)
        if not self.bodies.take(waiting, prompt_tokens * TOKEN_BYTES):
            raise self._no_memory()
        try:
            await self.answers.wait(share, size, MAX_WAIT_SECONDS)
        except TimeoutError as error:
            raise self._no_memory() from error
        finally:
            self.bodies.release(waiting)

    def _no_memory(self) -> RequestError:
        message = f"answers that clients have not read yet fill their memory, {self.answers.total:,} bytes (--answer-memory)"
        return RequestError(message, code="overloaded", status=503, limit="answer_memory")

    def start_running(self, waited: float) -> None:
        tally = self._tally
        tally.queued -= 1
        tally.running += 1
        tally.first_tokens[bisect_left(BUCKETS, waited)] += 1
        tally.first_token_seconds += waited

    def _full(self, lane: str) -> RequestError:
        places = self._places
        message = f"the server is full; its limit is {places.limit:,} generations at once"
        if lane and places.used < places.limit:
            message += f". The free places are for keys below their share; your key has {places.own(lane):,} generations"
        return RequestError(message, code="overloaded", status=429)

    def leave(self, ticket: Ticket, generations: int, lane: str, was_running: bool) -> None:
        self._tickets.discard(ticket)
        if ticket.share is not None:
            self.answers.release(ticket.share)
        if generations:
            self._places.give_back(generations, lane)
        if was_running:
            self._tally.running -= 1
        elif generations:
            self._tally.queued -= 1
        if not self._tickets:
            self.idle.set()

    async def watch_stalls(self) -> None:
        """Cuts off readers that take nothing for `stall_seconds`. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(min(1.0, self.limits.stall_seconds / 4))
            oldest = time.monotonic() - self.limits.stall_seconds
            for ticket in list(self._tickets):
                since = ticket.sink.sending_since
                if since is not None and since < oldest and not ticket.sink.stalled and ticket.task is not None:
                    ticket.sink.stalled = True
                    self._tally.readers_stalled += 1
                    ticket.task.cancel()

    @property
    def is_idle(self) -> bool:
        """No request is being answered, here or beside its connection. One whose body is still being read does not count."""
        return not self._tickets and not self.answering

    def expel(self) -> None:
        """Ends every request that is still inside, with a fault that its client sees."""
        for ticket in list(self._tickets):
            if ticket.on_expel is not None:
                ticket.on_expel()

    def cancel(self) -> int:
        """Cancels what is still inside, such as an answer that its client does not read. Returns how many."""
        for ticket in list(self._tickets):
            if ticket.task is not None:
                ticket.task.cancel()
        return len(self._tickets)
