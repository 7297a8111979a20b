"""Answers that outlive the connection that asked for them: recorded, followed, resumed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Message, Receive

from penstock.api.auth.keys import Tenant
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.dialect import Dialect
from penstock.api.pipeline.request import Incoming
from penstock.api.pipeline.response import KEEP_ALIVE, MAX_PIECE_BYTES, Body, ClientWatch, EventWriter, Response
from penstock.config.front_end import ResumeLimits
from penstock.metrics.frontend import Tally
from penstock.stream.mailbox import ReaderLeft, all_done
from penstock.wire.errors import GenerationFault, RequestError
from penstock.wire.messages import Fault

log = logging.getLogger(__name__)

LAST_EVENT_ID = b"last-event-id"
_END_OF_EVENT = b"\n\n"


class Recording:
    """Events in the order in which they were made, numbered from 0. Its readers wake when there are more, and when it is closed."""

    def __init__(self, events: Iterable[bytes] = (), closed: bool = False) -> None:
        self.events: list[bytes] = list(events)
        self.size = sum(map(len, self.events))
        self.closed = closed
        self.outcome = "ok"
        self.failure: Exception | None = None
        """Why it was closed without any event."""
        self.body: bytes | None = None
        """The whole answer, if it is not a stream."""
        self.readers: set[EventWriter] = set()
        self.has_idled = False
        """A reader may have its headers, though there is no event yet."""

    def append(self, events: Iterable[bytes]) -> None:
        added = list(events)
        self.events += added
        self.size += sum(map(len, added))
        self._wake()

    def close(self, outcome: str, failure: Exception | None = None) -> None:
        """Nothing more will come."""
        self.closed = True
        self.outcome = outcome
        # With events, their end tells it. The error would keep the whole request in memory.
        self.failure = None if self.events else failure
        self._wake()

    def send_idle(self, content: bytes) -> None:
        """Sends this to the readers of now. It is not recorded."""
        self.has_idled = True
        for reader in list(self.readers):
            reader.send_idle(content)

    def _wake(self) -> None:
        for reader in list(self.readers):
            reader.wake()


class Recorder:
    """A sink that records and never waits. With `numbered`, every event carries its number as its SSE id.

    `has_ended`: it got the last event, a finish or a fault.
    """

    def __init__(self, recording: Recording, numbered: bool, on_growth: Callable[[int], None]) -> None:
        self.recording = recording
        self._numbered = numbered
        self._on_growth = on_growth
        self.has_ended = False
        self.sending_since: float | None = None
        self.stalled = False

    async def send_whole(self, status: int, body: Body) -> None:  # noqa: ARG002, a whole answer is always a success
        self.has_ended = True
        self.recording.body = whole = body if isinstance(body, bytes) else b"".join(body)
        self._on_growth(len(whole))

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:
        self.has_ended |= last
        before = self.recording.size
        split = [event + _END_OF_EVENT for event in events.split(_END_OF_EVENT)[:-1]]
        if self._numbered:
            first = len(self.recording.events)
            split = [b"id: %d\n%b" % (number, event) for number, event in enumerate(split, first)]
        self.recording.append(split)
        self._on_growth(self.recording.size - before)
        return _DONE

    def send_idle(self, content: bytes) -> Awaitable[None]:
        self.recording.send_idle(content)
        return _DONE

    async def send_blank(self) -> None:
        """Nobody waits for a whole answer that is recorded."""


class _Done:
    """An awaitable that is done at once."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_DONE = _Done()

Work = Callable[[Receive, Recorder], Awaitable[str]]
"""Makes an answer, records it, and returns its outcome. Stops when `receive` says that the client has gone."""


class DetachedRun:
    """One answer. `cancel` stops it; `follow` sends its events, past and future, to a client.

    Its events always end with a finish or a fault, however it ends. With `survives` it goes on without any reader. An endpoint that needs
    to find more with the run's id makes a subclass.
    """

    def __init__(self, runs: DetachedRuns, dialect: Dialect, tenant: Tenant, survives: bool = False) -> None:
        self._runs = runs
        self._dialect: Dialect | None = dialect
        self.id = dialect.id
        self.tenant = tenant
        self.recording = Recording()
        self.cancelled = False
        self._survives = survives
        self._followers = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Work, numbered: bool) -> None:
        recorder = Recorder(self.recording, numbered, partial(self._runs.grown, self))
        self._task = asyncio.create_task(self._run(work, recorder), name=f"detached {self.id}")
        self._left_alone()

    @property
    def is_over(self) -> bool:
        return self.recording.closed

    def cancel(self) -> None:
        """Stops it as if its client had gone. `ended` waits for its end."""
        self.cancelled = True
        self._gone.set()

    async def ended(self) -> None:
        """Waits until it is over."""
        if self._task is not None:
            await all_done([self._task])

    async def follow(self, receive: Receive, response: Response, after: int = -1) -> str:
        """Sends the events after number `after`: those that exist, then new ones. Returns the outcome.

        Raises the error of an answer that failed before its first event, and ReaderLeft when the client goes away.
        """
        follower = _Follower(self.recording, response, after)
        self._followers += 1
        self._cancel_deadline()
        try:
            return await follower.run(receive)
        finally:
            self._followers -= 1
            self._left_alone()

    def _left_alone(self) -> None:
        if self._followers or self._survives or self.is_over:
            return
        self._cancel_deadline()
        self._deadline = asyncio.get_running_loop().call_later(self._runs.limits.grace, self.cancel)

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    async def _run(self, work: Work, recorder: Recorder) -> None:
        outcome = "cancelled"
        failure: Exception | None = None
        try:
            outcome = await work(self._receive, recorder)
        except ReaderLeft:
            message = f"the answer was cancelled: nobody read it for {self._runs.limits.grace:g} seconds (--resume-grace)"
            failure = GenerationFault(Fault("cancelled", message))
        except asyncio.CancelledError:
            failure = GenerationFault(Fault("shutting_down", "the server is shutting down"))
            raise
        except (RequestError, GenerationFault) as error:
            outcome, failure = "fault", error
        except Exception as error:
            log.exception("a detached answer failed")
            outcome, failure = "failed", error
        finally:
            self._cancel_deadline()
            self._end(recorder, outcome, failure)

    def _end(self, recorder: Recorder, outcome: str, failure: Exception | None) -> None:
        """Closes the recording. If its last event is missing, a fault is the last: a client that comes back must see an end."""
        try:
            if (self.recording.events or self.recording.has_idled) and not recorder.has_ended and self._dialect is not None:
                outcome = "broken_off" if outcome == "fault" else outcome
                recorder.send_events(self._dialect.last_fault(_fault_of(failure), len(self.recording.events)), last=True)
        finally:
            # The events are kept and counted. The dialect may have the whole prompt.
            self._dialect = None
            self.recording.close(outcome, failure)
            self._runs.over(self)

    async def _receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    def abort(self) -> None:
        """Stops it because the server ends. `ended` waits for its end."""
        self._cancel_deadline()
        if self._task is not None:
            self._task.cancel()


class _Follower:
    """One client that reads a recording."""

    def __init__(self, recording: Recording, response: Response, after: int) -> None:
        self._recording = recording
        self._position = after + 1
        self._writer = EventWriter(response, self._render)

    async def run(self, receive: Receive) -> str:
        recording = self._recording
        watch = ClientWatch(receive, self._leave)
        watch.start()
        recording.readers.add(self._writer)
        try:
            if 0 < len(recording.events) <= self._position and not recording.closed:
                # It has all there is. Its headers need not wait for the next event: an event will tell it how the answer ends.
                self._writer.send_idle(KEEP_ALIVE)
            return await self._writer.run()
        finally:
            recording.readers.discard(self._writer)
            watch.close()

    def _leave(self) -> None:
        self._writer.stop(ReaderLeft())

    def _render(self) -> tuple[bytes, str | None]:
        recording = self._recording
        end, size = self._position, 0
        while end < len(recording.events) and size < MAX_PIECE_BYTES:
            size += len(recording.events[end])
            end += 1
        events = recording.events[self._position : end]
        self._position = end
        if end < len(recording.events):
            # The rest follows when the client has taken these: it may never read, and there may be many such clients.
            asyncio.get_running_loop().call_soon(self._writer.wake)
            return b"".join(events), None
        if not recording.closed:
            return b"".join(events), None
        if not recording.events and recording.failure is not None:
            raise recording.failure
        return b"".join(events), recording.outcome


@dataclass(eq=False)
class _Lane:
    """What one tenant has: how many answers, their bytes, and those that are over, oldest first, each with the timer that removes it."""

    weight: int
    runs: int = 0
    bytes: int = 0
    ended: dict[str, asyncio.TimerHandle] = field(default_factory=dict)


class DetachedRuns:
    """All detached answers of a front end. Their memory is bounded, and shared by weight between the tenants that have answers.

    When it is full, the tenant who is most above its share loses its oldest answers that are over, and begins no more. A tenant below its
    share loses nothing and may begin: then answers that still run take more memory for a while.
    """

    def __init__(self, limits: ResumeLimits, admission: Admission, tally: Tally) -> None:
        self.limits = limits
        self._admission = admission
        self._tally = tally
        self._runs: dict[str, DetachedRun] = {}
        self._lanes: dict[str, _Lane] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._runs)

    def start(self, run: DetachedRun, work: Work, *, numbered: bool) -> None:
        """Begins an answer. Raises RequestError (429) when there is no memory for more."""
        tenant = run.tenant
        lane = self._lanes.get(tenant.lane) or _Lane(tenant.weight)
        others = sum([each.weight for each in self._lanes.values() if each is not lane])
        if self.bytes >= self.limits.memory and lane.bytes * (others + tenant.weight) >= self.limits.memory * tenant.weight:
            message = f"the resumable answers fill their memory, {self.limits.memory:,} bytes (--resume-memory)"
            raise RequestError(message, code="overloaded", status=429)
        self._runs[run.id] = run
        self._lanes[tenant.lane] = lane
        lane.weight = tenant.weight
        lane.runs += 1
        run.start(work, numbered)

    def find(self, owner: str, run_id: str) -> DetachedRun | None:
        """The owner's answer with this id; None if there is none, or if it belongs to another owner."""
        run = self._runs.get(run_id)
        return run if run is not None and run.tenant.owner == owner else None

    async def follow(self, run: DetachedRun, receive: Receive, response: Response, after: int = -1) -> str:
        """`run.follow`, cut off like any reader that takes nothing. Raises RequestError (503) while draining."""
        with self._admission.admit(0, response):
            return await run.follow(receive, response, after)

    async def replay(self, events: Iterable[bytes], tenant: Tenant, receive: Receive, response: Response) -> str:
        """Sends the events of an answer that has ended, as `follow` does. Raises RequestError (503) when there is no memory for them."""
        recording = Recording(events, closed=True)
        with self._admission.reading(tenant, response, recording.size):
            return await _Follower(recording, response, -1).run(receive)

    def forget(self, run_id: str) -> None:
        """Forgets its events."""
        run = self._runs.pop(run_id, None)
        if run is None:
            return
        name = run.tenant.lane
        lane = self._lanes[name]
        timer = lane.ended.pop(run_id, None)
        if timer is not None:
            timer.cancel()
        size = run.recording.size + len(run.recording.body or b"")
        self.bytes -= size
        lane.bytes -= size
        lane.runs -= 1
        if not lane.runs:
            del self._lanes[name]

    def grown(self, run: DetachedRun, size: int) -> None:
        """A recording has grown by `size` bytes."""
        if self._runs.get(run.id) is not run:
            return  # forgotten meanwhile, and not counted
        self.bytes += size
        self._lanes[run.tenant.lane].bytes += size
        while self.bytes > self.limits.memory and (lane := self._most_above_share()) is not None:
            self._tally.streams_evicted += 1
            self.forget(next(iter(lane.ended)))

    def _most_above_share(self) -> _Lane | None:
        """The tenant to lose an answer. None: those above their share have none that is over."""
        weights = sum([lane.weight for lane in self._lanes.values()])
        above = [lane for lane in self._lanes.values() if lane.ended and lane.bytes * weights >= self.bytes * lane.weight]
        return max(above, key=lambda lane: lane.bytes / lane.weight, default=None)

    def over(self, run: DetachedRun) -> None:
        if self._runs.get(run.id) is not run:
            return
        if run.recording.events:
            self._lanes[run.tenant.lane].ended[run.id] = asyncio.get_running_loop().call_later(self.limits.keep, self.forget, run.id)
        else:
            # There is nothing to resume, and the error would keep the whole request in memory.
            self.forget(run.id)

    async def close(self) -> None:
        """Stops what still runs, and forgets everything."""
        runs = list(self._runs.values())
        for run in runs:
            run.abort()
        for run in runs:
            await run.ended()
            self.forget(run.id)


@dataclass(frozen=True)
class Resume:
    """Sends the events of a resumable stream after the one in `Last-Event-ID`, and goes on live."""

    detached: DetachedRuns
    tally: Tally

    async def __call__(self, incoming: Incoming, receive: Receive, response: Response) -> str:
        stream_id = incoming.path["id"]
        after = _last_event(incoming)
        run = self.detached.find(incoming.owner, stream_id)
        if run is None:
            # The same error whether another key has this stream or nobody: ids cannot be guessed.
            message = f"there is no stream `{stream_id[:256]}` to resume: it ended too long ago, or was not `stream_options.resumable`"
            raise RequestError(message, param="id", code="stream_not_found", status=404)
        if after >= len(run.recording.events):
            message = f"`Last-Event-ID` is {after}: the stream has events up to {len(run.recording.events) - 1}"
            raise RequestError(message, param="Last-Event-ID")
        self.tally.streams_resumed += 1
        return await self.detached.follow(run, receive, response, after)


def _fault_of(failure: Exception | None) -> Fault:
    """The fault that tells a client about an error of any type."""
    if isinstance(failure, GenerationFault):
        return failure.fault
    if isinstance(failure, RequestError):
        return Fault(failure.code or "failed", failure.message)
    return Fault("internal_error", "internal error")


def _last_event(incoming: Incoming) -> int:
    """The number of the last event that the client has; -1 without one."""
    value = dict(incoming.headers).get(LAST_EVENT_ID, b"").strip()
    if not value:
        return -1
    if not value.isdigit() or len(value) > 15:
        shown = value[:80].decode(errors="replace")
        raise RequestError(f"`Last-Event-ID` is {shown!r}: expected the id of an event of this stream", param="Last-Event-ID")
    return int(value)
