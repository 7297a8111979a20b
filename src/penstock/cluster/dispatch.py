"""Dispatch: sends a generation to a worker, and to another one when that fails."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Self

from msgspec import structs

from penstock.cluster.links.worker_link import WorkerLink
from penstock.cluster.pool import Member, WorkerPool
from penstock.cluster.sessions.turn import Turn
from penstock.cluster.waiting import Attempt, Waiter, WaitingQueue
from penstock.config.front_end import DispatchLimits
from penstock.router.policy import Decision
from penstock.router.router import Candidate, Router
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault, LinkError
from penstock.wire.messages import GENERATION_ID_BYTES, Fault, PromptReport, Snapshot, Step, Submit

log = logging.getLogger(__name__)

# How many times in a row a generation may change its worker without a new token.
MAX_FRUITLESS_MIGRATIONS = 3
# The pause before a generation goes back to a worker that just failed it, because there is no other. Doubles each time.
PAUSE_SECONDS = 0.05
WATCH_SECONDS = 0.25
# Assumed for a worker that does not say how many generations it computes at once.
UNKNOWN_BATCH = 4096


class Production:
    """One generation: its request, its reader and its turn. `failed` holds the links that failed it since its last token."""

    __slots__ = ("failed", "mailbox", "model", "request", "turn")

    def __init__(self, model: str, request: Submit, mailbox: Mailbox, turn: Turn) -> None:
        self.model = model
        self.request = request
        self.mailbox = mailbox
        self.turn = turn
        self.failed: set[WorkerLink] = set()

    def next_request(self, generation_id: bytes) -> Submit:
        """The request from the next offset on, with the tokens so far added to its prompt."""
        request, history = self.request, self.mailbox.history
        if not history:
            return request if generation_id == request.id else structs.replace(request, id=generation_id)
        return structs.replace(
            request,
            id=generation_id,
            token_ids=(*request.token_ids, *history),
            offset=request.offset + len(history),
            prompt_logprobs=False,
        )


class Dispatcher:
    """Runs generations on the workers of a pool, while it is entered as a context. One call of `produce` is one generation.

    Delivery: a generation whose worker is lost, stalls, drains or gives a retryable fault continues on another worker from the next
    offset, so no token is lost or repeated. It may do so without limit as long as every worker adds tokens, and at most
    MAX_FRUITLESS_MIGRATIONS times in a row without one. It waits in a queue while no worker has room, and at most `worker_wait`
    seconds while its model has no worker at all.
    """

    def __init__(self, pool: WorkerPool, router: Router, limits: DispatchLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._router = router
        self._limits = limits
        self._clock = clock
        self._queues: dict[str, WaitingQueue] = {}
        # When a model with waiting generations lost its last worker.
        self._deserted: dict[str, float] = {}
        self._watch: asyncio.Task[None] | None = None
        self.migrations: Counter[str] = Counter()
        pool.listeners.append(self)

    @property
    def queued(self) -> int:
        """Generations that wait until a worker has room."""
        return sum(len(queue) for queue in self._queues.values())

    async def __aenter__(self) -> Self:
        self._watch = asyncio.create_task(self._watch_deserted(), name="wait for workers")
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._watch is not None
        self._watch.cancel()
        await asyncio.wait([self._watch])

    def produce(self, model: str, request: Submit, mailbox: Mailbox, turn: Turn) -> Coroutine[None, None, None]:
        """Sends the request, at once if a worker has room, and returns a coroutine that ends when the generation has ended.

        Its deltas go to the mailbox. Cancelling the coroutine stops the generation, in the queue or on its worker. Both the call and
        the coroutine raise GenerationFault when the generation fails for good.
        """
        production = Production(model, request, mailbox, turn)
        attempt = None if len(self._queue(model)) else self._try_send(production, request.id)
        if attempt is not None:
            return self._run_to_completion(production, attempt)
        if self.queued >= self._limits.max_queued:
            message = f"{self.queued:,} generations are waiting for a worker; the limit is {self._limits.max_queued:,}"
            raise GenerationFault(Fault("queue_full", message))
        return self._run_to_completion(production, self._enqueue(production, request.id, is_new=True))

    # Called by the pool and by its links.

    def joined(self, member: Member) -> None:
        member.link.observer = _Observer(self, member)
        if self._router.join(member.name, member.model):
            member.link.request_snapshot()
        self.pump(member.model.name)

    def left(self, member: Member) -> None:
        self._router.leave(member.name)

    def stepped(self, member: Member, step: Step) -> None:
        self._router.report(member.name, step.stats)
        if step.events is not None and self._router.receive(member.name, step.events):
            log.info("KV events of %s were missed: asking for a snapshot", member.name)
            member.link.request_snapshot()
        self.pump(member.model.name)

    def snapshot_received(self, member: Member, snapshot: Snapshot) -> None:
        self._router.load_snapshot(member.name, snapshot)

    def draining(self, member: Member) -> None:
        log.info("worker %s is draining and gets no new generations", member.name)

    def pump(self, model: str) -> None:
        """Sends waiting generations if a worker has room now."""
        queue = self._queues.get(model)
        if queue:
            queue.send()

    async def _run_to_completion(self, production: Production, sent: Attempt | Waiter) -> None:
        """Waits for the terminal, on as many workers as it takes."""
        mailbox, fruitless = production.mailbox, 0
        while True:
            attempt = await sent.wait() if isinstance(sent, Waiter) else sent
            begun_at = mailbox.next_offset
            try:
                await attempt.generation.done
            except asyncio.CancelledError:
                attempt.cancel()
                raise
            except GenerationFault as error:
                if not error.fault.retryable:
                    raise
                fault = error.fault
            except LinkError as error:
                fault = Fault("worker_lost", f"worker {attempt.member.name} was lost during the generation: {error}", retryable=True)
            else:
                return
            finally:
                attempt.assignment.ended()
            if mailbox.next_offset > begun_at:
                fruitless = 0
                production.failed.clear()
            else:
                fruitless += 1
            production.failed.add(attempt.member.link)
            if fruitless > MAX_FRUITLESS_MIGRATIONS:
                message = f"{fruitless} attempts in a row failed without a token; the last one: {fault.message}"
                raise GenerationFault(Fault(fault.code, message))
            self.migrations[fault.code] += 1
            if fruitless and not self._others(production) and self._pool.usable(production.model):
                # Only workers that just failed it are left. They may need a moment.
                await asyncio.sleep(PAUSE_SECONDS * 2**fruitless)
            again = secrets.token_bytes(GENERATION_ID_BYTES)
            sent = self._try_send(production, again) or self._enqueue(production, again, is_new=False)

    def _others(self, production: Production) -> list[Member]:
        """The workers that have not just failed it. A worker that was connected again counts as another."""
        return [member for member in self._pool.usable(production.model) if member.link not in production.failed]

    def _enqueue(self, production: Production, generation_id: bytes, *, is_new: bool) -> Waiter:
        try_send = partial(self._try_send, production, generation_id)
        return self._queue(production.model).add(try_send, production.request.priority, is_new=is_new)

    def _try_send(self, production: Production, generation_id: bytes) -> Attempt | None:
        """Sends it to the worker that the router chooses; None when no worker has room. Workers that failed it are the last resort.

        Waiting generations try again with every frame that a worker sends.
        """
        members = self._pool.usable(production.model)
        if production.failed:
            # It lost a worker before. Do not spend an attempt on one that may be dead, too.
            members = [member for member in self._others(production) or members if member.link.has_just_spoken]
        usable = {member.name: member for member in members}
        candidates = [Candidate(name, self._has_room(member), member.is_quiet) for name, member in usable.items()]
        if not any(candidate.has_room for candidate in candidates):
            return None
        turn = production.turn
        preferred, why = turn.preference
        block_size = next(iter(usable.values())).model.block_size
        blocks = -(-len(production.request.token_ids) // block_size)
        names = partial(turn.block_names, production.request.token_ids, block_size)
        decision = self._router.choose(candidates, names, blocks, preferred, why, turn.hints.router)
        if decision is None:
            return None
        member = usable[decision.worker]
        return self._send(production, generation_id, member, decision, blocks)

    def _send(self, production: Production, generation_id: bytes, member: Member, decision: Decision, blocks: int) -> Attempt:
        request = production.next_request(generation_id)
        session = production.turn.sent(production.mailbox.index, decision)
        if session is not None:
            request = structs.replace(request, session=session)
        assignment = self._router.sent(decision, decision.names, blocks)

        def on_report(report: PromptReport) -> None:
            assignment.first_token()
            production.turn.reported(member.name, session, report)

        return Attempt(member, generation_id, member.link.submit(request, production.mailbox, on_report), assignment)

    def _has_room(self, member: Member) -> bool:
        """A quiet worker has no room: it would not begin before it speaks again."""
        link, batch = member.link, member.model.max_batch or UNKNOWN_BATCH
        return link.unbegun < self._limits.worker_queue and link.active < batch + self._limits.worker_queue and not member.is_quiet

    def _queue(self, model: str) -> WaitingQueue:
        queue = self._queues.get(model)
        if queue is None:
            queue = self._queues[model] = WaitingQueue(self._clock)
        return queue

    async def _watch_deserted(self) -> None:
        """Ends the wait for workers that do not come."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            now = self._clock()
            for model, queue in self._queues.items():
                if not len(queue) or self._pool.usable(model):
                    self._deserted.pop(model, None)
                    continue
                since = self._deserted.setdefault(model, now)
                if now - since >= self._limits.worker_wait:
                    message = f"no worker for model {model!r} came within {self._limits.worker_wait:g} s"
                    queue.fail(now - self._limits.worker_wait, partial(GenerationFault, Fault("no_worker", message)))


class _Observer:
    """Passes the reports of one worker's link to the dispatcher, with the worker."""

    def __init__(self, dispatcher: Dispatcher, member: Member) -> None:
        self._dispatcher = dispatcher
        self._member = member

    def stepped(self, step: Step) -> None:
        self._dispatcher.stepped(self._member, step)

    def snapshot_received(self, snapshot: Snapshot) -> None:
        self._dispatcher.snapshot_received(self._member, snapshot)

    def draining(self) -> None:
        self._dispatcher.draining(self._member)
