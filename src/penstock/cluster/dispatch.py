"""Dispatch: from a generation to the worker that makes it."""

from __future__ import annotations

import asyncio
from collections import Counter

from penstock.cluster.pool import Member, WorkerPool
from penstock.router.policy import WorkerView, choose
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault, LinkError
from penstock.wire.messages import Fault, Submit


class Dispatcher:
    """Produces generations on the workers of a pool. One `produce` is one generation's life."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.decisions: Counter[str] = Counter()

    async def produce(self, model: str, request: Submit, mailbox: Mailbox) -> None:
        """Fills the mailbox and returns when its finish is there. Cancelling it stops the generation on its worker.

        Raises GenerationFault when it fails. (A fault that is marked retryable could go on with another worker at
        `mailbox.next_offset`; this is where migration will do so.)
        """
        member = self._choose(model)
        try:
            generation = member.link.submit(request, mailbox)
            await generation.done
        except asyncio.CancelledError:
            member.link.cancel(request.id)
            raise
        except LinkError as error:
            message = f"worker {member.name} was lost in mid-generation"
            raise GenerationFault(Fault("worker_lost", message, retryable=True)) from error

    def _choose(self, model: str) -> Member:
        usable = {member.name: member for member in self._pool.usable(model)}
        decision = choose([WorkerView(name, member.link.active) for name, member in usable.items()])
        if decision is None:
            raise GenerationFault(Fault("no_worker", f"no worker for model {model!r} is ready", retryable=True))
        self.decisions[decision.reason] += 1
        return usable[decision.worker]
