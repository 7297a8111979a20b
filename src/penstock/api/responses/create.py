"""POST /v1/responses: makes a response and stores it. No client sees its end before it is stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

import msgspec
from starlette.types import Receive

from penstock.api.auth.keys import Tenant
from penstock.api.pipeline.detached import DetachedRun, DetachedRuns, Recorder
from penstock.api.pipeline.request import Incoming
from penstock.api.pipeline.response import Body, Response, Sink
from penstock.api.pipeline.runner import Runner
from penstock.api.responses.answers import ResponseObject
from penstock.api.responses.dialect import TOO_LONG, ResponseDialect
from penstock.api.responses.items import images_of
from penstock.api.responses.parse import ParsedResponse, ResponseParser, TooLong
from penstock.api.responses.rows import NewResponse, ResponseState
from penstock.api.responses.store import SqliteStore
from penstock.stream.mailbox import ReaderLeft, all_done
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Fault


@dataclass(frozen=True)
class CreateResponse:
    """Answers POST /v1/responses.

    Stored streams and background responses run detached from the connection. Other responses run on it. What is wrong is a status, but a
    prompt that is too long for the model is an event of a stream.
    """

    parser: ResponseParser
    runner: Runner
    detached: DetachedRuns

    async def __call__(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        parsed = await self.parser.parse(incoming)
        incoming.drop_body()
        if isinstance(parsed, TooLong):
            self.runner.tally.limits_reached[parsed.error.limit or TOO_LONG,] += 1
            return await _refuse(response, parsed.dialect, parsed.error, f"refused_{parsed.error.status}")
        try:
            return await self._answer(parsed, receive, response)
        except GenerationFault as error:
            if error.fault.code != TOO_LONG or not parsed.is_stream or response.started:
                raise
            return await _refuse(response, parsed.dialect, error, "fault")

    async def _answer(self, parsed: ParsedResponse, receive: Receive, response: Response) -> str:
        kept, store = parsed.kept, self.parser.store
        if kept is None or store is None:
            return await self.runner.run(parsed.plan, parsed.dialect, receive, response)
        if not parsed.is_background and not parsed.is_stream:
            sink = SavingSink(response, store, kept, parsed.dialect)
            try:
                return await self.runner.run(parsed.plan, parsed.dialect, receive, sink, sink.store_images)
            finally:
                await sink.forget_unfinished()
        work = _Work(self.runner, self.detached, store, parsed, kept)
        run = ResponseRun(self.detached, kept, parsed.plan.tenant, parsed.dialect)
        if parsed.is_background:
            queued = await self._start_in_background(work, run)
            if not parsed.is_stream:
                await response.send_whole(200, msgspec.json.encode(queued))
                return "ok"
        else:
            self.detached.start(run, work.run, numbered=False)
        return await self.detached.follow(run, receive, response)

    async def _start_in_background(self, work: _Work, run: ResponseRun) -> ResponseObject:
        """Returns when it is stored and admitted."""
        queued, store, kept = run.dialect.snapshot(), work.store, work.kept
        await store.begin(kept, ResponseState(body=queued))
        kept.input.clear()
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
        return queued


async def _refuse(response: Response, dialect: ResponseDialect, error: RequestError | GenerationFault, outcome: str) -> str:
    """A prompt that is too long ends the stream. Codex shows an error status as JSON and goes on; it understands the event."""
    await response.send_events(dialect.refuse(error), last=True)
    return outcome


class ResponseRun(DetachedRun):
    """A response that is being made: `dialect` has its current state. In the background it needs no reader."""

    def __init__(self, runs: DetachedRuns, response: NewResponse, tenant: Tenant, dialect: ResponseDialect) -> None:
        super().__init__(runs, dialect, tenant, survives=response.is_background)
        self.dialect = dialect


@dataclass(eq=False)
class _Work:
    """Makes a detached response. The store gets its end, whatever it is."""

    runner: Runner
    detached: DetachedRuns
    store: SqliteStore
    parsed: ParsedResponse
    kept: NewResponse
    _settled: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the response is admitted or refused."""
    _is_admitted: bool = False
    _refusal: Exception | None = None

    async def until_admitted(self) -> None:
        """Raises the error that refused the response."""
        await self._settled.wait()
        if self._refusal is not None:
            raise self._refusal

    async def run(self, receive: Receive, inner: Recorder) -> str:
        kept, dialect = self.kept, self.parsed.dialect
        sink = SavingSink(inner, self.store, kept, dialect, inner.recording.events, has_begun=kept.is_background)
        try:
            if kept.is_background:
                await sink.send_events(dialect.queue())
            outcome = await self._run(receive, sink)
        finally:
            self._settled.set()
        if sink.is_stored:
            # The store has its events now. Readers that have the recording continue with it.
            self.detached.forget(kept.id)
        return outcome

    async def _run(self, receive: Receive, sink: SavingSink) -> str:
        try:
            return await self.runner.run(self.parsed.plan, self.parsed.dialect, receive, sink, self._admitted)
        except (RequestError, GenerationFault) as error:
            if not self._is_admitted or not sink.has_begun:
                # The client gets it as a status.
                self._settle(error)
                raise
            await sink.fail(error)
            return "broken_off"
        except ReaderLeft:
            self._settle(None)
            await sink.cancel()
            return "cancelled"
        except asyncio.CancelledError:
            self._settle(None)
            await sink.fail(GenerationFault(Fault("shutting_down", "the server is shutting down")))
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


@dataclass(eq=False)
class SavingSink:
    """A sink that stores a response before its client sees it: its start before the first event, its end before the last.

    When the start cannot be stored, the stream continues. When the end cannot be stored, a stream ends as failed, and a whole answer
    raises RequestError. If the sender is cancelled, a write that has begun is completed and its events are sent. `sent` has the events so
    far.
    """

    inner: Sink
    store: SqliteStore
    response: NewResponse
    dialect: ResponseDialect
    sent: Iterable[bytes] = ()
    has_begun: bool = False
    """A client may have seen it."""
    is_stored: bool = False
    """The store has its end."""
    _storing: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._is_known = self.has_begun
        """The store has its start."""

    @property
    def sending_since(self) -> float | None:
        return self.inner.sending_since

    @sending_since.setter
    def sending_since(self, since: float | None) -> None:
        self.inner.sending_since = since

    @property
    def stalled(self) -> bool:
        return self.inner.stalled

    @stalled.setter
    def stalled(self, stalled: bool) -> None:
        self.inner.stalled = stalled

    def store_images(self) -> None:
        """Stores the start of a response with images: until its end, which may be minutes away, nobody holds them."""
        if next(images_of(self.response.input), None) is not None:
            self._storing = asyncio.create_task(self._begin())

    async def forget_unfinished(self) -> None:
        """Deletes what `store_images` has stored if there is no end."""
        if self._storing is not None and not self.is_stored:
            await self._images_stored(self._storing)
            with contextlib.suppress(RequestError):
                await self.store.delete(self.response.owner, self.response.id)

    async def _images_stored(self, storing: asyncio.Task[None]) -> None:
        """Waits for it. If it failed, all is stored at the end."""
        await all_done([storing])
        storing.exception()

    async def send_whole(self, status: int, body: Body) -> None:
        if self._storing is not None:
            await self._images_stored(self._storing)
        await self._finish(None)
        await self.inner.send_whole(status, body)

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        if self.has_begun and not last:
            return self.inner.send_events(events)
        return self._store_and_send(events, last)

    def send_idle(self, content: bytes) -> Awaitable[None]:
        return self.inner.send_idle(content)

    async def send_blank(self) -> None:
        await self.inner.send_blank()

    async def fail(self, error: GenerationFault | RequestError) -> None:
        """Ends the response with this error. A response that no client has seen is not stored."""
        await self._end(lambda: self.dialect.fail(error))

    async def cancel(self) -> None:
        """Ends the response as cancelled. A response that no client has seen is not stored."""
        await self._end(self.dialect.cancel)

    async def _end(self, render: Callable[[], bytes]) -> None:
        if self._storing is not None:
            await all_done([self._storing])
        if self.has_begun and not self.dialect.is_over:
            await self._store_and_send(render(), last=True)

    async def _store_and_send(self, events: bytes, last: bool) -> None:
        # In its own task: after a cancelled write, nobody knows whether it was done.
        self._storing = asyncio.create_task(self._store_then_send(events, last))
        await all_done([self._storing])
        self._storing.result()

    async def _store_then_send(self, events: bytes, last: bool) -> None:
        try:
            if last:
                await self._finish(b"".join([*self.sent, events]))
            else:
                await self._begin()
        except RequestError as error:
            if last:
                events = self.dialect.fail_instead(events, error)
        self.has_begun = True
        await self.inner.send_events(events, last)

    async def _begin(self) -> None:
        await self.store.begin(self.response, ResponseState(body=self.dialect.snapshot()))
        self.response.input.clear()
        self._is_known = True

    async def _finish(self, events: bytes | None) -> None:
        state = ResponseState(body=self.dialect.snapshot(), events=events)
        await (self.store.finish if self._is_known else self.store.put)(self.response, state)
        self.is_stored = True
