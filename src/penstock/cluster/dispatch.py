"""Dispatch: from a generation to the worker that makes it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine

from penstock.cluster.pool import Member, WorkerPool
from penstock.cluster.worker_link import Generation
from penstock.router.policy import WorkerView, choose
from penstock.stream.mailbox import Mailbox
from penstock.wire.errors import GenerationFault, LinkError
from penstock.wire.messages import Fault, Submit


class Dispatcher:
    """Produces generations on the workers of a pool. One `produce` is one generation's life."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self.decisions: Counter[str] = Counter()

    def produce(self, model: str, request: Submit, mailbox: Mailbox) -> Coroutine[None, None, None]:
        """Sends the request to a worker, at once, and returns what waits for its finish.

        Its deltas go to the mailbox meanwhile. Cancelling what waits stops the generation on its worker. Both raise GenerationFault
        when it fails. (A fault that is marked retryable could go on with another worker at `mailbox.next_offset`: `_finish` is where
        migration will do so.)
        """
        member = self._choose(model)
        return self._finish(member, request, member.link.submit(request, mailbox))

    async def _finish(self, member: Member, request: Submit, generation: Generation) -> None:
        try:
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
