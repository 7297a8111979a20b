"""KV that one external engine hands to another: tickets, how long they are valid, and what happens when no KV comes.

An engine that has computed a prompt for another one keeps the KV for a lease, then uses its memory for something else. vLLM does not notice
a later read: the reader would continue with the KV of another prompt, without an error. So no engine here begins to read after a third of
the lease, and KV that has not come after three quarters of it is not used.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Callable
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.backends.external.engine import Chunk, EngineDied, EngineRefused, EngineRequest, ExternalEngine, KvMoves
from penstock.kv.rates import Rate
from penstock.wire.errors import PenstockError
from penstock.wire.messages import Export, Fault, KvSource, TransferReport

log = logging.getLogger(__name__)

MAX_TICKET_BYTES = 2**20
USABLE_PART = 1 / 3
CERTAIN_PART = 3 / 4
# Of what is left until then, this much is waited: a wait that ends later than it should must not look like a read that came too late.
WAITED_PART = 0.8
# How far the clock of the source may be ahead of ours.
MAX_CLOCK_SECONDS = 1.0
# Engines that work on a prompt at the same time: the target also waits while the source computes, at this rate or faster.
MIN_PREFILL_RATE = 500.0


class HandoverFailed(PenstockError):
    """The KV did not come from the other engine, for this reason."""


class Ticket(Struct, frozen=True, array_like=True, gc=False):
    """What an engine needs to get a prompt's KV from another one. `made` is the time of day at the source when its lease began. `body` is
    in the engines' own words."""

    made: float
    lease_seconds: Annotated[float, Meta(gt=0, le=3600)]
    body: bytes

    def pack(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def usable_until(self) -> float:
        """Until then, an engine may begin to read."""
        return self.made + self.lease_seconds * USABLE_PART

    @property
    def certain_until(self) -> float:
        """Until then, what an engine reads is certainly the KV of the prompt."""
        return self.made + self.lease_seconds * CERTAIN_PART


_DECODER = msgspec.msgpack.Decoder(Ticket)


def unpack_ticket(packed: bytes) -> Ticket:
    """Raises HandoverFailed for bytes that are not a ticket."""
    if len(packed) > MAX_TICKET_BYTES:
        raise HandoverFailed(f"its ticket has {len(packed)} bytes: expected at most {MAX_TICKET_BYTES}")
    try:
        return _DECODER.decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise HandoverFailed(f"its ticket cannot be read: {error}") from error


def read_ticket(packed: bytes, arrived: float, now: float) -> Ticket:
    """Raises HandoverFailed also for a ticket that is too old, or that came from the future: then the clocks differ, and its age is
    unknown, however long it has waited here."""
    ticket = unpack_ticket(packed)
    if not (ticket.made - MAX_CLOCK_SECONDS <= min(arrived, now) and now < ticket.usable_until):
        usable = ticket.lease_seconds * USABLE_PART
        raise HandoverFailed(
            f"its ticket is {now - ticket.made:.1f} s old: expected 0 to {usable:.1f} s; the clocks of both machines must agree"
        )
    return ticket


class Handovers:
    """The prompts whose KV an engine keeps for others, and those whose KV it gets from others. `report` tells the front end."""

    def __init__(
        self,
        engine: ExternalEngine,
        report: Callable[[TransferReport], None],
        patience: float,
        clock: Callable[[], float],
        time_of_day: Callable[[], float],
    ) -> None:
        self.moves: KvMoves | None = None
        """Known after the engine's start."""
        self.imports = 0
        self.rate = Rate()
        self._engine = engine
        self._report = report
        self._patience = patience
        self._clock = clock
        self._time_of_day = time_of_day
        self._leases: dict[bytes, asyncio.TimerHandle] = {}
        self._reported_bytes = 0

    @property
    def exports(self) -> int:
        return len(self._leases)

    def give(self, export: Export, ticket: bytes) -> None:
        """The engine has computed a prompt for another one."""
        if not ticket:
            if self.moves is None or self.moves.handover == "ticket":
                self._report(TransferReport(export.transfer, "failed", reason="the engine gave no ticket"))
            return
        self.end(export.transfer)
        usable = unpack_ticket(ticket).lease_seconds * USABLE_PART
        self._leases[export.transfer] = asyncio.get_running_loop().call_later(usable, self._expire, export.transfer)
        self._report(TransferReport(export.transfer, ticket=ticket))

    def end(self, transfer: bytes) -> None:
        """The front end has ended it. The engine itself keeps the KV until it was read, or its lease is over."""
        lease = self._leases.pop(transfer, None)
        if lease is not None:
            lease.cancel()

    def close(self) -> None:
        for transfer in list(self._leases):
            self.end(transfer)

    async def generate(self, request: EngineRequest, source: KvSource, arrived: float) -> AsyncGenerator[Chunk, None]:
        """The chunks of a generation whose KV comes from another engine. If it does not come in time, the engine computes it. `arrived`:
        the time of day when the generation came to this worker, perhaps long before its turn.

        Raises EngineDied if the engine may have read what was no longer the prompt's: it would also cache it.
        """
        assert self.moves is not None
        began, ticket = self._clock(), None
        try:
            if self.moves.handover == "ticket":
                ticket = read_ticket(source.ticket, arrived, self._time_of_day())
            async with contextlib.aclosing(self._engine.generate(request)) as chunks:
                first = await self._first_chunk(chunks, self._seconds(request, ticket))
                self._check_certain(ticket)
                self._report_done(source, began)
                yield first
                async for chunk in chunks:
                    yield chunk
        except HandoverFailed as failed:
            self._note_failure(source, began, failed)
        else:
            return
        self._check_certain(ticket)
        async with contextlib.aclosing(self._engine.generate(replace(request, id=secrets.token_hex(16), source=None))) as chunks:
            async for chunk in chunks:
                yield chunk

    async def _first_chunk(self, chunks: AsyncGenerator[Chunk, None], seconds: float) -> Chunk:
        """Raises HandoverFailed if it does not come in time, or the engine gives up."""
        self.imports += 1
        try:
            async with asyncio.timeout(seconds):
                return await anext(chunks)
        except TimeoutError:
            raise HandoverFailed(f"no token came within {seconds:.1f} s") from None
        except (EngineRefused, StopAsyncIteration) as error:
            raise HandoverFailed(f"the engine gave up: {error}") from error
        finally:
            self.imports -= 1

    def _note_failure(self, source: KvSource, began: float, failed: HandoverFailed) -> None:
        """Raises EngineRefused if the engine cannot compute the prompt itself."""
        log.warning("the KV of a prompt did not come from another worker: %s", failed)
        self._report(TransferReport(source.transfer, "failed", seconds=self._clock() - began, reason=str(failed)))
        assert self.moves is not None
        if not self.moves.computes:
            raise EngineRefused(Fault("transfer_failed", f"no KV came from the other worker: {failed}", retryable=True)) from failed

    def _seconds(self, request: EngineRequest, ticket: Ticket | None) -> float:
        """How long the first token may take."""
        if ticket is None:
            return self._patience + len(request.token_ids) / MIN_PREFILL_RATE
        return min(self._patience, WAITED_PART * (ticket.certain_until - self._time_of_day()))

    def _check_certain(self, ticket: Ticket | None) -> None:
        """Only a process that was stopped for seconds gets here too late."""
        if ticket is not None and self._time_of_day() >= ticket.certain_until:
            raise EngineDied("it may have read KV of another worker after its lease, and cached it")

    def _report_done(self, source: KvSource, began: float) -> None:
        assert self.moves is not None
        pulled, self._reported_bytes = self._engine.pulled_bytes() - self._reported_bytes, self._engine.pulled_bytes()
        blocks = pulled // self.moves.block_bytes if self.moves.block_bytes else 0
        now = self._clock()
        self.rate.measure(pulled, now - began, now)
        self._report(TransferReport(source.transfer, "done", blocks, pulled, now - began))

    def _expire(self, transfer: bytes) -> None:
        del self._leases[transfer]
        self._report(TransferReport(transfer, "expired"))
