"""POST /v1/responses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass

import msgspec
from starlette.types import Receive

from penstock.api.pipeline.detached import DetachedRun, DetachedRuns, Recorder
from penstock.api.pipeline.request import Incoming
from penstock.api.pipeline.response import Response
from penstock.api.pipeline.runner import Runner
from penstock.api.responses.dialect import ResponseDialect
from penstock.api.responses.reading import ParsedResponse, Reader
from penstock.api.responses.rows import NewResponse, ResponseState
from penstock.api.responses.saving import SavingSink
from penstock.api.responses.store import SqliteStore
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
    runner: Runner
    detached: DetachedRuns

    async def __call__(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        parsed = await self.reader.read(incoming)
        kept, store = parsed.kept, self.reader.store
        if kept is None or store is None:
            return await self.runner.run(parsed.plan, parsed.dialect, receive, response)
        if parsed.is_background:
            return await self._answer_in_background(parsed, kept, store, receive, response)
        if parsed.is_stream:
            run = ResponseRun(self.detached, kept, parsed.dialect)
            self.detached.start(run, _Work(self.runner, self.detached, store, parsed, kept).run, numbered=False)
            return await self.detached.follow(run, receive, response)
        sink = SavingSink(response, store, kept, parsed.dialect)
        return await self.runner.run(parsed.plan, parsed.dialect, receive, sink)

    async def _answer_in_background(
        self, parsed: ParsedResponse, kept: NewResponse, store: SqliteStore, receive: Receive, response: Response
    ) -> str:
        queued = parsed.dialect.snapshot()
        await store.begin(kept, ResponseState(body=queued))
        work = _Work(self.runner, self.detached, store, parsed, kept)
        run = ResponseRun(self.detached, kept, parsed.dialect)
        try:
            self.detached.start(run, work.run, numbered=False)
            await work.until_admitted()
        except BaseException:
            # No client knows about it.
            run.cancel()
            await run.ended()
            self.detached.forget(kept.id)
            await store.delete(kept.owner, kept.id)
            raise
        if parsed.is_stream:
            return await self.detached.follow(run, receive, response)
        await response.send_whole(200, msgspec.json.encode(queued))
        return "ok"


class ResponseRun(DetachedRun):
    """A response that is being made: `dialect` has its current state. In the background it needs no reader."""

    def __init__(self, runs: DetachedRuns, response: NewResponse, dialect: ResponseDialect) -> None:
        super().__init__(runs, response.id, response.owner, survives=response.is_background)
        self.dialect = dialect


class _Work:
    """Makes a response beside the connections that read it. However that ends, the store knows."""

    def __init__(self, runner: Runner, detached: DetachedRuns, store: SqliteStore, parsed: ParsedResponse, kept: NewResponse) -> None:
        self._runner = runner
        self._detached = detached
        self._store = store
        self._parsed = parsed
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

    async def run(self, receive: Receive, inner: Recorder) -> str:
        try:
            return await self._keep(receive, inner)
        finally:
            # However it ended: nobody waits for more.
            self._settled.set()

    async def _keep(self, receive: Receive, inner: Recorder) -> str:
        kept, dialect = self._kept, self._parsed.dialect
        sink = SavingSink(inner, self._store, kept, dialect, inner.recording.events, begun=kept.is_background)
        if kept.is_background:
            await sink.send_events(dialect.queue())
        outcome = await self._run(receive, sink)
        if sink.is_stored:
            # From now on the store has its events. Those who read it now go on.
            self._detached.forget(kept.id)
        return outcome

    async def _run(self, receive: Receive, sink: SavingSink) -> str:
        try:
            return await self._runner.run(self._parsed.plan, self._parsed.dialect, receive, sink, self._admitted)
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

    def _admitted(self) -> None:
        self._is_admitted = True
        self._settle(None)

    def _settle(self, refusal: Exception | None) -> None:
        self._refusal = refusal
        self._settled.set()


async def _shielded(last: Awaitable[None]) -> None:
    task = asyncio.ensure_future(last)
    await asyncio.wait([task])
    task.result()
