"""POST /v1/responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec
from starlette.types import Message, Receive

from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.request import Incoming
from penstock.api.pipeline.response import Response, Sink
from penstock.api.pipeline.runner import Run
from penstock.api.responses.reading import Reader, Reading
from penstock.api.responses.saving import SavingSink
from penstock.api.responses.store import NewResponse, ResponseState, ResponseStore
from penstock.stream.fanin import ReaderLeft
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Fault

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CreateResponse:
    """Answers POST /v1/responses.

    Streams that are kept, and what runs in the background, do not depend on the connection. The rest is made on it.
    """

    reader: Reader
    runner: Run
    detached: DetachedRuns

    async def __call__(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        reading = await self.reader.read(incoming)
        try:
            return await self._answer(reading, receive, response)
        except GenerationFault as error:
            raise GenerationFault(error.fault, reading.plan.grammar_field) from error

    async def _answer(self, reading: Reading, receive: Receive, response: Response) -> str:
        kept, store = reading.kept, self.reader.store
        if kept is None or store is None:
            return await self.runner.run(reading.plan, reading.dialect, receive, response)
        if reading.is_background:
            return await self._answer_in_background(reading, kept, store, receive, response)
        if reading.is_stream:
            work = _Work(self.runner, self.detached, store, reading, kept)
            run = self.detached.start(kept.id, kept.owner, work.run, numbered=False, detail=reading.dialect)
            return await self.detached.follow(run, receive, response)
        sink = SavingSink(response, store, kept, reading.dialect)
        return await self.runner.run(reading.plan, reading.dialect, receive, sink)

    async def _answer_in_background(
        self, reading: Reading, kept: NewResponse, store: ResponseStore, receive: Receive, response: Response
    ) -> str:
        queued = reading.dialect.snapshot()
        await store.begin(kept, ResponseState(body=queued))
        work = _Work(self.runner, self.detached, store, reading, kept)
        try:
            run = self.detached.start(kept.id, kept.owner, work.run, numbered=False, survives=True, detail=reading.dialect)
            await work.until_admitted()
        except BaseException:
            # Nobody has heard of it.
            if (begun := self.detached.find(kept.owner, kept.id)) is not None:
                begun.cancel()
                await begun.ended()
                self.detached.forget(kept.id)
            await store.delete(kept.owner, kept.id)
            raise
        if reading.is_stream:
            return await self.detached.follow(run, receive, response)
        await response.send_whole(200, msgspec.json.encode(queued))
        return "ok"


class _Work:
    """Makes a response beside the connections that read it. However that ends, the store knows."""

    def __init__(self, runner: Run, detached: DetachedRuns, store: ResponseStore, reading: Reading, kept: NewResponse) -> None:
        self._runner = runner
        self._detached = detached
        self._store = store
        self._reading = reading
        self._kept = kept
        self._settled = asyncio.Event()
        """It was admitted, or refused."""
        self._is_admitted = False
        self._refusal: Exception | None = None

    async def until_admitted(self) -> None:
        """Raises what it was refused with."""
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    async def run(self, receive: Receive, inner: Sink) -> str:
        try:
            return await self._keep(receive, inner)
        finally:
            # However it ended: nobody waits for more.
            self._settled.set()

    async def _keep(self, receive: Receive, inner: Sink) -> str:
        kept, dialect = self._kept, self._reading.dialect
        run = self._detached.find(kept.owner, kept.id)
        assert run is not None, "it was started under its own id"
        sink = SavingSink(inner, self._store, kept, dialect, run.recording.events, begun=kept.is_background)
        if kept.is_background:
            await sink.send_events(dialect.queue())
        outcome = await self._run(receive, sink)
        if sink.is_stored:
            # From now on the store has its events. Those who read it now go on.
            self._detached.forget(kept.id)
        return outcome

    async def _run(self, receive: Receive, sink: SavingSink) -> str:
        try:
            return await self._runner.run(self._reading.plan, self._reading.dialect, self._noticing(receive), sink)
        except (RequestError, GenerationFault) as error:
            if not self._is_admitted or not sink.has_begun:
                # Its client is still there to be told.
                self._settle(error)
                raise
            await sink.fail(error)
            return "fault"
        except ReaderLeft:
            self._settle(None)
            await sink.cancel()
            return "cancelled"
        except asyncio.CancelledError:
            self._settle(None)
            await _shielded(sink.fail(GenerationFault(Fault("shutting_down", "the server is shutting down"))))
            raise
        except Exception as error:
            self._settle(error)
            await sink.fail(RequestError("internal error", code="internal_error", status=500))
            raise

    def _noticing(self, receive: Receive) -> Receive:
        """Whoever is admitted begins to listen for its client's leaving."""

        async def noticing() -> Message:
            self._is_admitted = True
            self._settle(None)
            return await receive()

        return noticing

    def _settle(self, refusal: Exception | None) -> None:
        self._refusal = refusal
        self._settled.set()


async def _shielded(last: Awaitable[None]) -> None:
    task = asyncio.ensure_future(last)
    await asyncio.wait([task])
    task.result()
