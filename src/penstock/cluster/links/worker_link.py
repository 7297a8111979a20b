"""The front end's end of its link to one worker."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import ssl
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from msgspec import structs

from penstock.cluster.links.link import HANDSHAKE_TIMEOUT, HEARTBEAT_SECONDS, LinkProtocol, check_version, unexpected
from penstock.cluster.links.security import Handshake, LinkTls, check_owner, end_of, needs_protection, peer_certificate
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import Address, UnixAddress
from penstock.wire.codec import encode_frame
from penstock.wire.errors import (
    FrameMalformed,
    GenerationFault,
    HandshakeRefused,
    LinkBroken,
    LinkError,
    PeerLeft,
    PenstockError,
    StreamError,
)
from penstock.wire.messages import (
    MAX_TOKENIZER_BYTES,
    PROTOCOL_VERSION,
    TOKENIZER_PIECE_BYTES,
    Cancel,
    Challenge,
    CloseSession,
    Delta,
    Draining,
    DropPrompt,
    EndTransfer,
    Fault,
    Fetch,
    Finish,
    Hello,
    ImageRefused,
    ImagesWanted,
    Message,
    Ping,
    Pong,
    Prompt,
    PromptReport,
    Ready,
    Segment,
    SessionQuery,
    SessionReport,
    SessionReports,
    Snapshot,
    SnapshotRequest,
    Step,
    Submit,
    TokenizerPiece,
    TokenizerRequest,
    TransferReport,
    Welcome,
    WorkerStats,
)

if TYPE_CHECKING:
    from penstock.cluster.links.images import AnswerImage, ImageAnswer, ImageSender
    from penstock.wire.images import ImageSpan

log = logging.getLogger(__name__)

_READY = encode_frame(Ready())
_PING = encode_frame(Ping())
# When many requests come at once, a turn of the event loop is long. Writing after this many messages lets the worker start before its end.
MESSAGES_PER_WRITE = 8
PIECE_SECONDS = 10.0
"""A worker that takes longer for one piece of its tokenizer is not used."""

MAX_UNANSWERED_LOOKS = 2
"""An idle link that is silent at this many looks after a Ping is given up. With the look before the Ping, that is 3 s at most."""

WorkerReport = Step | Snapshot | Draining


class Generation:
    """One generation on a link: its deltas go to the mailbox, and so does a Finish. Subclasses learn of the rest."""

    __slots__ = ("has_begun", "has_ended", "mailbox")

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.has_begun = False
        self.has_ended = False

    def reported(self, report: PromptReport) -> PromptReport:
        """The worker tells about the prompt, with the first token. Returns what the reader learns of it."""
        return report

    def ended(self, error: PenstockError | None) -> None:
        """Called once. Without an error the Finish is in the mailbox; an error is not."""

    def finished(self, finish: Finish) -> None:
        """The worker has no more for it."""
        self.mailbox.end(finish)
        self.end()

    def abandon(self) -> None:
        """What still comes of it is dropped."""
        self.mailbox = Mailbox(Doorbell())
        self.mailbox.cancel()

    def begin(self, delta: Delta, report: PromptReport) -> Delta:
        """The first delta of this worker. The reader learns of the prompt once, however many workers computed it."""
        told = self.reported(report)
        return Delta(delta.offset, delta.token_ids, delta.logprobs, told if self.mailbox.next_offset == 0 else None)

    def end(self, error: PenstockError | None = None) -> None:
        if not self.has_ended:
            self.has_ended = True
            self.ended(error)


async def no_images(_: Submit, span: ImageSpan, __: str) -> ImageAnswer:
    return ImageRefused(span.name, "this front end reads no images", retryable=False)


class WorkerLink(LinkProtocol):
    """A live link to a worker, made by `connect`.

    All deltas of a frame are in their mailboxes before any of their readers runs: one wake-up per generation. A generation stays open until
    its terminal has come, even if it is cancelled; a segment for a generation that is not open closes the link.
    """

    def __init__(self, address: Address, front_end: str, secret: str, tls: LinkTls | None = None) -> None:
        super().__init__(tls)
        self._loop = loop = asyncio.get_running_loop()
        self.welcome: asyncio.Future[Welcome] = loop.create_future()
        self.lost: asyncio.Future[LinkError] = loop.create_future()
        self.stats = WorkerStats()
        self.draining = False
        self.frames = 0
        self.life_signs = 0
        """Steps that show that the worker's engine goes on."""
        self._emits = 0
        self._address = address
        self._front_end = front_end
        self._secret = secret
        self._nonce = secrets.token_bytes(32)
        self._handshake: Handshake | None = None
        self.pings = self.pongs = 0
        self._unanswered = 0
        """Looks since the first Ping on the idle link, while nothing came."""
        self._generations: dict[bytes, Generation] = {}
        # The shared prompts that the worker has.
        self._prompts: set[bytes] = set()
        self._outgoing: list[bytes] = []
        self._gathering = False
        self._queries: dict[int, asyncio.Future[Sequence[SessionReport]]] = {}
        self._next_query = 0
        self._piece: asyncio.Future[TokenizerPiece] | None = None
        self.silent_ticks = 0
        """How many looks in a row found it silent while it owed tokens. Silent: without a sign of life."""
        self.heard_at = 0.0
        """When the last sign of life came."""
        self._owes_since = 0.0
        self.unbegun = 0
        """Generations without a token so far: they wait at the worker, or their prompts are being computed."""
        self.on_report: Callable[[WorkerReport], None] = lambda _: None
        """Called with what the worker reports about itself. The segments of a Step are then in their mailboxes."""
        self.on_transfers: Callable[[Sequence[TransferReport]], None] = lambda _: None
        """Called with what the worker reports about transfers, before the segments of the same Step are delivered."""
        self.with_images: dict[bytes, Submit] = {}
        """The open generations whose prompts have images, without those that were cancelled."""
        self.answer_image: AnswerImage = no_images
        self._images: ImageSender | None = None
        self.reserved = 0
        """Generations that will come here: another worker computes their prompts now."""

    @property
    def active(self) -> int:
        """Generations without a terminal, cancelled ones included."""
        return len(self._generations)

    @property
    def is_usable(self) -> bool:
        return self.is_established and not self.lost.done() and not self.draining

    @property
    def has_died(self) -> bool:
        """Whether it was lost without a word."""
        return self.lost.done() and not self.draining and not isinstance(self.lost.result(), PeerLeft)

    @property
    def is_unanswered(self) -> bool:
        """Whether it owed nothing, was asked whether it is alive, and a look found no answer."""
        return self._unanswered > 1

    def has_spoken_since(self, moment: float) -> bool:
        """Whether its engine has gone on since then, or owed nothing."""
        return not self._generations or max(self.heard_at, self._owes_since) > moment

    def tick(self) -> None:
        """One look at whether it is silent. Counts looks, not seconds: a front end that was itself busy must not take that for silence."""
        self.silent_ticks = self.silent_ticks + 1 if self._generations else 0

    def beat(self) -> bool:
        """One look at whether the other host is still there, every HEARTBEAT_SECONDS. Returns False if it is not.

        Pings an idle link, and a link with generations on which nothing came, so that a worker always hears from its front end. On an
        idle link, silence counts from the first Ping. On a link with generations, `tick` watches the worker and `is_host_gone` its host.
        """
        if self.has_heard:
            self._unanswered = 0
        elif self._unanswered:
            self._unanswered += 1
        if self._unanswered > MAX_UNANSWERED_LOOKS or self.is_host_gone():
            return False
        if not self._generations or not self.has_heard:
            self.ping()
            if not self._generations and not self._unanswered:
                self._unanswered = 1
        self.has_heard = False
        return True

    def ping(self) -> None:
        """Asks whether the worker is alive. It is, or was when it read this, if `pongs` reaches the `pings` of now."""
        self.pings += 1
        self._write_soon(_PING)

    def write(self, message: Message) -> None:
        """Sends a message, unless the link is lost."""
        if not self.lost.done():
            self._write_soon(encode_frame(message))

    def give_up(self, error: LinkError) -> None:
        """Ends the link now, for this reason, without a goodbye: the worker no longer reacts."""
        self._error = error
        self.abort()

    def submit(self, request: Submit, generation: Generation) -> None:
        """Starts a generation. Raises LinkError when the link is lost."""
        if self.lost.done():
            raise self.lost.result()
        self._write_soon(encode_frame(self._without_prompt(request) if request.prompt else request))
        if not self._generations:
            self._owes_since = self._loop.time()
        self._generations[request.id] = generation
        self.unbegun += 1
        if request.images:
            self.with_images[request.id] = request

    def fetch(self, request: Fetch) -> None:
        """Has the worker pull KV from another one. Raises LinkError when the link is lost. For a prompt without generated tokens."""
        if self.lost.done():
            raise self.lost.result()
        if request.prompt:
            self._send_prompt(request.prompt, request.token_ids)
            request = structs.replace(request, token_ids=())
        self._write_soon(encode_frame(request))

    def end_transfers(self, ids: Sequence[bytes]) -> None:
        """These transfers are over, here as their source or as their target."""
        if not self.lost.done():
            self._write_soon(encode_frame(EndTransfer(tuple(ids))))

    def drop_prompt(self, name: bytes) -> None:
        """No generation will share this prompt any more."""
        if name in self._prompts and not self.lost.done():
            self._prompts.remove(name)
            self._write_soon(encode_frame(DropPrompt(name)))

    def cancel(self, generation_id: bytes) -> None:
        """Stops a generation that is no longer read."""
        if generation_id in self._generations and not self.lost.done():
            self._write_soon(encode_frame(Cancel((generation_id,))))
            if generation_id in self.with_images:
                self._forget_images(generation_id)

    def close_session(self, session_id: str, epoch: int, *, frees: bool) -> None:
        """Ends a session on the worker, now or when its last active turn ends. See CloseSession."""
        if not self.lost.done():
            self._write_soon(encode_frame(CloseSession(session_id, epoch, frees)))

    def request_snapshot(self) -> None:
        if not self.lost.done():
            self._write_soon(encode_frame(SnapshotRequest()))

    async def describe_sessions(self, session_ids: Sequence[str], *, with_tokens: bool = False) -> Sequence[SessionReport]:
        """The worker's reports about these sessions. Unknown ones are left out; empty when the link is lost."""
        if self.lost.done():
            return ()
        self._next_query += 1
        number = self._next_query
        answer: asyncio.Future[Sequence[SessionReport]] = self._loop.create_future()
        self._queries[number] = answer
        self._write_soon(encode_frame(SessionQuery(number, tuple(session_ids), with_tokens)))
        try:
            return await answer
        finally:
            self._queries.pop(number, None)

    async def fetch_tokenizer(self, piece_seconds: float = PIECE_SECONDS) -> bytes:
        """The worker's packed tokenizer, piece by piece. For one caller at a time. Raises LinkError when the link is lost, when a piece is
        late, and when the worker sends something else or too much."""
        data = bytearray()
        total = 0
        while not total or len(data) < total:
            piece = await self._fetch_piece(len(data), piece_seconds)
            total = total or piece.total
            if not 0 < total <= MAX_TOKENIZER_BYTES:
                raise FrameMalformed(f"the worker's tokenizer has {total:,} bytes: expected 1 to {MAX_TOKENIZER_BYTES:,}")
            expected = min(TOKENIZER_PIECE_BYTES, total - len(data))
            if (piece.offset, len(piece.data), piece.total) != (len(data), expected, total):
                raise FrameMalformed(
                    f"the worker sent {len(piece.data):,} bytes of its tokenizer at {piece.offset:,} of {piece.total:,}: expected "
                    f"{expected:,} bytes at {len(data):,} of {total:,}"
                )
            data += piece.data
        return bytes(data)

    async def _fetch_piece(self, offset: int, seconds: float) -> TokenizerPiece:
        if self.lost.done():
            raise self.lost.result()
        self._piece = self._loop.create_future()
        self._write_soon(encode_frame(TokenizerRequest(offset)))
        try:
            async with asyncio.timeout(seconds):
                return await self._piece
        except TimeoutError as error:
            raise LinkBroken(f"the worker sent no piece of its tokenizer within {seconds:g} s") from error
        finally:
            self._piece = None

    def messages_received(self, messages: list[Message]) -> None:
        for message in messages:
            if self.is_established:
                self._hear(message)
            else:
                self._greet(message)

    def _hear(self, message: Message) -> None:
        match message:
            case Step():
                self._note_life(message.emits)
                if message.transfers:
                    self.on_transfers(message.transfers)
                self._deliver(message)
                self.on_report(message)
            case Snapshot():
                self.on_report(message)
            case SessionReports():
                self._answer_query(message)
            case TokenizerPiece() if self._piece is not None and not self._piece.done():
                self._piece.set_result(message)
            case Draining():
                self.draining = True
                self.on_report(message)
            case Pong():
                self._ponged()
            case ImagesWanted():
                self._want_images(message)
            case _:
                raise unexpected(message, "Step")

    def _answer_query(self, message: SessionReports) -> None:
        answer = self._queries.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(message.reports)

    def _ponged(self) -> None:
        self.pongs += 1
        if self._images is not None:
            self._images.ponged.set()

    def _greet(self, message: Message) -> None:
        match message:
            case Challenge():
                check_version(message.version)
                self.send(self._hello(message))
            case Welcome() if self._handshake is not None:
                self._handshake.check(message.proof, self._secret, "worker", message.name)
                self.established()
                self.welcome.set_result(message)
            case _:
                raise unexpected(message, "Challenge or Welcome")

    def _hello(self, challenge: Challenge) -> Hello:
        assert self._transport is not None
        if not self._secret:
            check_owner(self._transport, os.geteuid())
        address, reached = str(self._address), end_of(self._transport, "peername")
        certificates = peer_certificate(self._transport), self.tls.certificate if self.tls is not None else b""
        self._handshake = Handshake(challenge.nonce, self._nonce, self._front_end, address, reached, *certificates)
        proof = self._handshake.proof(self._secret, "frontend")
        return Hello(PROTOCOL_VERSION, self._front_end, self._nonce, proof, address, reached)

    def link_lost(self, reason: LinkError) -> None:
        if self.tls is not None and self._handshake is None and isinstance(reason, LinkBroken):
            # The worker checks this front end's certificate when TLS is already set up here.
            reason = HandshakeRefused(self.tls.refusal(None, str(self._address)))
        if not self.welcome.done():
            self.welcome.set_exception(reason)
            self.welcome.exception()
        self.lost.set_result(reason)
        generations, self._generations = self._generations, {}
        self.with_images.clear()
        if self._images is not None:
            self._images.close()
        for generation in generations.values():
            generation.end(LinkBroken(f"the link to the worker broke: {reason}"))
        for answer in self._queries.values():
            if not answer.done():
                answer.set_result(())
        if self._piece is not None and not self._piece.done():
            self._piece.set_exception(reason)

    def _deliver(self, step: Step) -> None:
        self.stats = step.stats
        self.frames += 1
        generations = self._generations
        half = len(step.segments) // 2
        for index, segment in enumerate(step.segments):
            if index == half:
                # Runs after half of the readers that this step wakes. So the next step is under way while the other half runs, and it
                # contains all tokens that were made while the first half ran.
                self._loop.call_soon(self._write_soon, _READY)
            generation = generations.get(segment.id)
            if generation is None:
                raise FrameMalformed(f"a segment for generation {segment.id.hex()}, which is not open")
            if not generation.has_begun:
                generation.has_begun = True
                self.unbegun -= 1
            try:
                delta = segment.delta
                if delta is not None:
                    if delta.prompt is not None:
                        delta = generation.begin(delta, delta.prompt)
                    generation.mailbox.put(delta)
                if segment.terminal is not None:
                    self._end(segment, generation)
            except StreamError as error:
                self._breach(segment, generation, error)
        if not step.segments:
            self._write_soon(_READY)

    def _note_life(self, emits: int) -> None:
        """A worker whose engine hangs still answers, and reports what it is sent."""
        if not emits or emits != self._emits:
            self._emits = emits
            self.life_signs += 1
            self.silent_ticks = 0
            self.heard_at = self._loop.time()

    def _end(self, segment: Segment, generation: Generation) -> None:
        del self._generations[segment.id]
        if segment.id in self.with_images:
            self._forget_images(segment.id)
        match segment.terminal:
            case Finish() as finish:
                generation.finished(finish)
            case Fault() as fault:
                generation.end(GenerationFault(fault))

    def _breach(self, segment: Segment, generation: Generation, error: StreamError) -> None:
        """One generation's stream is broken: that generation fails, with an error in the log. The link and the others go on."""
        log.error("generation %s broke its stream: %s", segment.id.hex(), error)
        generation.end(GenerationFault(Fault("stream_breach", f"the stream from the worker broke: {error}")))
        generation.abandon()
        if segment.terminal is not None:
            self._generations.pop(segment.id, None)
        self.cancel(segment.id)
        if segment.id in self.with_images:
            self._forget_images(segment.id)

    def _want_images(self, message: ImagesWanted) -> None:
        if self._images is None:
            # Imported where it is used: most models read only text.
            from penstock.cluster.links.images import ImageSender

            self._images = ImageSender(self)
        self._images.want(message)

    def _forget_images(self, generation_id: bytes) -> None:
        del self.with_images[generation_id]
        if self._images is not None:
            self._images.forget(generation_id)

    def _without_prompt(self, request: Submit) -> Submit:
        """The request without the prompt that it shares, which is sent before it unless the worker has it."""
        length = len(request.token_ids) - request.offset
        self._send_prompt(request.prompt, request.token_ids[:length])
        return structs.replace(request, token_ids=request.token_ids[length:])

    def _send_prompt(self, name: bytes, token_ids: tuple[int, ...]) -> None:
        if name not in self._prompts:
            self._write_soon(encode_frame(Prompt(name, token_ids)))
            self._prompts.add(name)

    def _write_soon(self, frame: bytes) -> None:
        """The first frame of a turn of the event loop is written at once, the others of that turn in few writes."""
        self._outgoing.append(frame)
        if not self._gathering:
            self._gathering = True
            self._loop.call_soon(self._end_of_turn)
            self._write()
        elif len(self._outgoing) == MESSAGES_PER_WRITE:
            self._write()

    def _end_of_turn(self) -> None:
        self._gathering = False
        if self._outgoing:
            self._write()

    def _write(self) -> None:
        outgoing, self._outgoing = self._outgoing, []
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(outgoing))


async def connect(address: Address, front_end: str, secret: str, tls: LinkTls | None = None) -> tuple[WorkerLink, Welcome]:
    """Opens a link and does the handshake. Raises LinkError when that fails, and leaves nothing open."""
    if needs_protection(address, secret, tls):
        raise HandshakeRefused(f"{address} is not used: a link over TCP needs PENSTOCK_LINK_SECRET or TLS (--link-tls-cert)")
    try:
        async with asyncio.timeout(HANDSHAKE_TIMEOUT):
            link = await _open(address, front_end, secret, tls)
            try:
                return link, await asyncio.shield(link.welcome)
            except BaseException:
                link.abort()
                raise
    except TimeoutError as error:
        hint = " (does it expect TLS?)" if tls is None and not isinstance(address, UnixAddress) else ""
        raise HandshakeRefused(f"{address} did not finish its handshake within {HANDSHAKE_TIMEOUT:g} s{hint}") from error
    except OSError as error:
        if tls is not None and isinstance(error, ssl.SSLError | ConnectionAbortedError | ConnectionResetError):
            raise HandshakeRefused(tls.refusal(error, str(address))) from None
        raise LinkBroken(f"cannot connect to {address}: {error.strerror or error}") from error
    except ValueError as error:
        # A name that no host can have: it may come from the store.
        raise HandshakeRefused(f"{str(address)!r} is not used: {error}") from error


async def _open(address: Address, front_end: str, secret: str, tls: LinkTls | None) -> WorkerLink:
    loop = asyncio.get_running_loop()
    if isinstance(address, UnixAddress):
        _, link = await loop.create_unix_connection(lambda: WorkerLink(address, front_end, secret), address.path)
        return link
    _, link = await loop.create_connection(
        lambda: WorkerLink(address, front_end, secret, tls),
        address.host,
        address.port,
        ssl=None if tls is None else tls.context,
        server_hostname=None if tls is None else address.host,
        ssl_shutdown_timeout=None if tls is None else HEARTBEAT_SECONDS,
    )
    return link
