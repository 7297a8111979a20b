"""A front end that takes nothing for a while loses nothing: what it missed comes merged, in one delta."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contract.backends.rig import Generation, Rig
from penstock.cluster.links.worker_link import WorkerLink, connect
from penstock.cluster.links.worker_server import WorkerServer
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import UnixAddress
from penstock.wire.messages import Cancel, Finish, Message, Ready, Segment, Step, Submit
from penstock.worker.runtime import FrontEndPort
from workers import send

SECRET = "only for this test"


class FrontEnd:
    """One that is attached to the runtime, and says that it is ready only when the test does."""

    def __init__(self, rig: Rig) -> None:
        self._runtime = rig.runtime
        self.steps: list[Step] = []
        self.port: FrontEndPort = rig.runtime.attach("the front end of a test", self._send)

    def _send(self, message: Message) -> bool:
        if isinstance(message, Step):
            self.steps.append(message)
        return True

    def say(self, message: Message) -> None:
        self._runtime.handle(self.port, message)
        self._runtime.flush()

    def read(self) -> list[Segment]:
        """What comes when it is ready for one step."""
        self.say(Ready())
        steps, self.steps = self.steps, []
        return [segment for step in steps for segment in step.segments]

    def leave(self) -> None:
        self._runtime.detach(self.port)


def _owed(rig: Rig) -> bool:
    """The engine still has something to do."""
    stats = rig.backend.stats()
    return bool(stats.running or stats.queued)


def _made_for(front_end: FrontEnd, request: Submit) -> int:
    """How far what waits for it goes."""
    return next((slot.next_offset for slot in front_end.port.outbox.waiting if slot.generation == request.id), 0)


def _collected(request: Submit, segments: list[Segment]) -> Generation:
    generation = Generation(request)
    for segment in segments:
        if segment.id == request.id:
            generation.take(segment)
    return generation


def test_all_that_a_stalled_front_end_missed_comes_in_one_delta(rig: Rig) -> None:
    requests = [rig.request(rig.prompt(f"stalled {number}", 20 + number), 150, logprobs=2) for number in range(4)]

    async def stalled() -> list[Segment]:
        front_end = FrontEnd(rig)
        front_end.port.ready = False
        try:
            for request in requests:
                front_end.say(request)
            await rig.until(lambda: not front_end.port.open_generations)
            assert not front_end.steps or not any(step.segments for step in front_end.steps), "sent to one that is not ready"
            return front_end.read()
        finally:
            front_end.leave()

    segments = rig.run(stalled())
    assert len(segments) == len(requests)
    for request in requests:
        generation = _collected(request, segments)
        generation.check()
        assert len(generation.deltas) == 1
        rig.check_exact(generation)
        rig.judge.check_logprobs(request, generation.tokens, generation.logprobs)


def test_a_front_end_that_stalls_now_and_then(rig: Rig) -> None:
    request = rig.request(rig.prompt("now and then", 30), 160, logprobs=1)

    async def now_and_then() -> list[Segment]:
        front_end = FrontEnd(rig)
        front_end.port.ready = False
        got: list[Segment] = []
        try:
            front_end.say(request)
            for count in (1, 2, 30, 31, 100, 160):
                await rig.until(lambda count=count: _made_for(front_end, request) >= count)  # type: ignore[misc]
                got += front_end.read()
            await rig.until(lambda: not front_end.port.open_generations)
            return got + front_end.read()
        finally:
            front_end.leave()

    generation = _collected(request, rig.run(now_and_then()))
    generation.check()
    rig.check_exact(generation)
    rig.judge.check_logprobs(request, generation.tokens, generation.logprobs)


def test_cancelling_while_stalled_gives_the_end_and_nothing_else(rig: Rig) -> None:
    cancelled, other = (rig.request(rig.prompt(f"cancelled while stalled {number}", 25), 300) for number in range(2))

    async def stalled() -> list[Segment]:
        front_end = FrontEnd(rig)
        front_end.port.ready = False
        try:
            front_end.say(cancelled)
            front_end.say(other)
            await rig.until(lambda: len(front_end.port.outbox.waiting) == 2)
            front_end.say(Cancel((cancelled.id,)))
            await rig.until(lambda: not front_end.port.open_generations)
            return front_end.read()
        finally:
            front_end.leave()

    segments = rig.run(stalled())
    assert [segment for segment in segments if segment.id == cancelled.id] == [Segment(cancelled.id, None, Finish("cancelled"))]
    generation = _collected(other, segments)
    generation.check()
    rig.check_exact(generation)


def test_a_front_end_that_leaves_takes_its_generations_along(rig: Rig) -> None:
    requests = [rig.request(rig.prompt(f"left {number}", 25), 1500) for number in range(12)]

    async def leave() -> None:
        front_end = FrontEnd(rig)
        for request in requests:
            front_end.say(request)
        await rig.until(lambda: bool(front_end.port.outbox.waiting))
        front_end.leave()
        await rig.until(lambda: not _owed(rig))

    rig.run(leave())
    rig.check_exact(rig.say(rig.prompt("after the leaving", 25), 20))


@asynccontextmanager
async def _linked(rig: Rig) -> AsyncIterator[WorkerLink]:
    """A front end's link to a worker with this engine, over a Unix socket."""
    address = UnixAddress(str(rig.folder / "stream.sock"))
    server = WorkerServer(rig.runtime, "worker-0", address, SECRET)
    await server.start()
    link, welcome = await connect(address, "test", SECRET)
    try:
        assert welcome.model == rig.model
        yield link
    finally:
        link.abort()
        await link.lost
        await server.close()


async def _read(mailbox: Mailbox, doorbell: Doorbell, request: Submit) -> Generation:
    """As a reader does that takes whatever there is, as soon as it comes."""
    generation = Generation(request)
    while generation.terminal is None:
        await doorbell.wait()
        doorbell.answer()
        delta, terminal = mailbox.take()
        generation.take(Segment(request.id, delta, terminal))
    return generation


def test_readers_at_the_other_end_of_a_socket(rig: Rig) -> None:
    requests = [rig.request(rig.prompt(f"socket {number}", 10 + 3 * number), 60 + number, logprobs=1) for number in range(16)]

    async def read() -> list[Generation]:
        async with _linked(rig) as link:
            readers = []
            for request in requests:
                doorbell = Doorbell()
                mailbox = Mailbox(doorbell)
                send(link, request, mailbox)
                readers.append(_read(mailbox, doorbell, request))
            return list(await asyncio.gather(*readers))

    for generation in rig.run(read()):
        generation.check()
        rig.check_exact(generation)
        rig.judge.check_logprobs(generation.request, generation.tokens, generation.logprobs)


def test_a_socket_that_nobody_reads_for_a_while(rig: Rig) -> None:
    """The frames that are on their way fill it; the rest waits at the worker, and comes merged. Readers take it all at once."""
    requests = [rig.request(rig.prompt(f"unread {number}", 15 + number), 200, logprobs=3) for number in range(8)]

    async def stall() -> list[Generation]:
        async with _linked(rig) as link:
            mailboxes = [Mailbox(Doorbell()) for _ in requests]
            begun = [send(link, request, mailbox) for request, mailbox in zip(requests, mailboxes, strict=True)]
            await rig.until(lambda: all(mailbox.next_offset for mailbox in mailboxes))
            transport = link._transport
            assert transport is not None
            transport.pause_reading()
            frames = link.frames
            await rig.until(lambda: not _owed(rig))
            assert link.frames == frames
            transport.resume_reading()
            await asyncio.wait([generation.done for generation in begun])
            assert link.frames - frames <= 4, "what waited came in pieces"
            collected = [Generation(request) for request in requests]
            for generation, mailbox in zip(collected, mailboxes, strict=True):
                generation.take(Segment(generation.request.id, *mailbox.take()))
            return collected

    for generation in rig.run(stall()):
        generation.check()
        assert len(generation.deltas) == 1
        rig.check_exact(generation)
        rig.judge.check_logprobs(generation.request, generation.tokens, generation.logprobs)
