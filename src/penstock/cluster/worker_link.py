"""The front end's end of its link to one worker."""

from __future__ import annotations

import asyncio
import logging
import secrets

from penstock.cluster.address import Address, UnixAddress
from penstock.cluster.link import HANDSHAKE_TIMEOUT, LinkProtocol, check_proof, check_version, proof, unexpected
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.codec import encode_frame
from penstock.wire.errors import FrameMalformed, GenerationFault, HandshakeRefused, LinkBroken, LinkError, StreamError
from penstock.wire.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Challenge,
    Draining,
    Fault,
    Finish,
    Hello,
    Message,
    Ready,
    Segment,
    Step,
    Submit,
    Welcome,
    WorkerStats,
)

log = logging.getLogger(__name__)

_READY = encode_frame(Ready())
# A turn of the loop can be long when many requests come at once, and a worker should not wait for its end to begin.
MESSAGES_A_WRITE = 8


class Generation:
    """One generation on a link: where its deltas go, and how it ends.

    `done` gets None for a Finish, which is in the mailbox then, or the error that ended it, which is not.
    """

    __slots__ = ("done", "mailbox")

    def __init__(self, mailbox: Mailbox, done: asyncio.Future[None]) -> None:
        self.mailbox = mailbox
        self.done = done

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            self.done.exception()  # whoever awaits it sees it; if nobody does any more, that is no leak to report


class WorkerLink(LinkProtocol):
    """A live link to a worker. Made by `connect`.

    All the deltas of a frame are in their mailboxes before any of their readers runs: one wake-up a generation.
    Every generation stays known until its terminal has come, also a cancelled one; a segment of an unknown one is a breach.
    """

    def __init__(self, front_end: str, secret: str) -> None:
        super().__init__()
        self._loop = loop = asyncio.get_running_loop()
        self.welcome: asyncio.Future[Welcome] = loop.create_future()
        self.lost: asyncio.Future[LinkError] = loop.create_future()
        self.stats = WorkerStats()
        self.draining = False
        self.frames = 0
        self._front_end = front_end
        self._secret = secret
        self._nonce = secrets.token_bytes(32)
        self._generations: dict[bytes, Generation] = {}
        self._outgoing: list[bytes] = []
        self._gathering = False

    @property
    def active(self) -> int:
        """Generations without a terminal, cancelled ones included."""
        return len(self._generations)

    @property
    def is_usable(self) -> bool:
        return self.is_established and not self.lost.done() and not self.draining

    def submit(self, request: Submit, mailbox: Mailbox) -> Generation:
        """Begins a generation; its deltas go to the mailbox."""
        if self.lost.done():
            raise self.lost.result()
        generation = Generation(mailbox, self._loop.create_future())
        self._write_soon(encode_frame(request))
        self._generations[request.id] = generation
        return generation

    def cancel(self, generation_id: bytes) -> None:
        """Stops a generation that nobody reads any more."""
        if generation_id in self._generations and not self.lost.done():
            self._write_soon(encode_frame(Cancel((generation_id,))))

    def messages_received(self, messages: list[Message]) -> None:
        for message in messages:
            match message:
                case Step() if self.is_established:
                    self._deliver(message)
                case Draining() if self.is_established:
                    self.draining = True
                case Challenge() if not self.is_established:
                    self._answer(message)
                case Welcome() if not self.is_established:
                    self._accept(message)
                case _:
                    raise unexpected(message, "Step" if self.is_established else "Challenge or Welcome")

    def link_lost(self, reason: LinkError) -> None:
        if not self.welcome.done():
            self.welcome.set_exception(reason)
            self.welcome.exception()
        self.lost.set_result(reason)
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation.fail(LinkBroken(f"the link to the worker broke: {reason}"))

    def _deliver(self, step: Step) -> None:
        self.stats = step.stats
        self.frames += 1
        generations = self._generations
        half = len(step.segments) // 2
        for index, segment in enumerate(step.segments):
            if index == half:
                # It runs when half of the readers woken by this step have: so the next step is on its way while the
                # other half runs, and still holds all that was made while the first half did.
                self._loop.call_soon(self._write_soon, _READY)
            generation = generations.get(segment.id)
            if generation is None:
                raise FrameMalformed(f"a segment for generation {segment.id.hex()}, which is not open")
            try:
                if segment.delta is not None:
                    generation.mailbox.put(segment.delta)
                if segment.terminal is not None:
                    self._end(segment, generation)
            except StreamError as error:
                self._breach(segment, generation, error)
        if not step.segments:
            self._write_soon(_READY)

    def _end(self, segment: Segment, generation: Generation) -> None:
        del self._generations[segment.id]
        match segment.terminal:
            case Finish() as finish:
                generation.mailbox.end(finish)
                if not generation.done.done():
                    generation.done.set_result(None)
            case Fault() as fault:
                generation.fail(GenerationFault(fault))

    def _breach(self, segment: Segment, generation: Generation, error: StreamError) -> None:
        """One generation's stream is broken: it fails, loudly; the link and the others go on."""
        log.error("generation %s broke its stream: %s", segment.id.hex(), error)
        generation.fail(GenerationFault(Fault("stream_breach", f"the stream from the worker broke: {error}")))
        generation.mailbox = Mailbox(Doorbell())
        generation.mailbox.cancel()
        self.cancel(segment.id)

    def _answer(self, challenge: Challenge) -> None:
        check_version(challenge.version)
        self.send(Hello(PROTOCOL_VERSION, self._front_end, self._nonce, proof(self._secret, "frontend", challenge.nonce)))

    def _accept(self, welcome: Welcome) -> None:
        check_proof(self._secret, "worker", self._nonce, welcome.proof)
        self.established()
        self.welcome.set_result(welcome)

    def _write_soon(self, frame: bytes) -> None:
        """The first that is said in a turn of the loop goes out at once, the rest of that turn in few writes."""
        self._outgoing.append(frame)
        if not self._gathering:
            self._gathering = True
            self._loop.call_soon(self._end_of_turn)
            self._write()
        elif len(self._outgoing) == MESSAGES_A_WRITE:
            self._write()

    def _end_of_turn(self) -> None:
        self._gathering = False
        if self._outgoing:
            self._write()

    def _write(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))


async def connect(address: Address, front_end: str, secret: str) -> tuple[WorkerLink, Welcome]:
    """Opens a link and shakes hands. Raises LinkError when that fails; nothing is left open then."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            if isinstance(address, UnixAddress):
                _, link = await loop.create_unix_connection(lambda: WorkerLink(front_end, secret), address.path)
            else:
                _, link = await loop.create_connection(lambda: WorkerLink(front_end, secret), address.host, address.port)
            try:
                return link, await asyncio.shield(link.welcome)
            except BaseException:
                link.abort()
                raise
    except TimeoutError as error:
        raise HandshakeRefused(f"{address} did not finish its handshake within {HANDSHAKE_TIMEOUT:g} s") from error
    except OSError as error:
        raise LinkBroken(f"cannot connect to {address}: {error.strerror or error}") from error
