"""Who makes the features of an image that a worker needs: an encode worker, another one if the first fails, or the worker itself.

The worker that needs the image acts: it asks, pulls, and asks again if the pull fails. When an encode worker fails, dies or is silent, the
worker's pull ends, so all these cases continue alike. A worker that has asked MAX_TRIED encode workers in vain gets the pixels.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal

from msgspec import structs

from penstock.cluster.links.images import ImageAnswer, answer_with_pixels
from penstock.cluster.links.worker_link import Generation, WorkerLink
from penstock.cluster.pool import Member, WorkerPool
from penstock.cluster.transfers import LEASE_SECONDS
from penstock.media.picture import Picture
from penstock.metrics.frontend import BUCKETS
from penstock.router.encoders import choose_encoder
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.errors import LinkError, PenstockError
from penstock.wire.images import ImageSpan, is_image_id
from penstock.wire.messages import GENERATION_ID_BYTES, TRANSFER_ID_BYTES, Export, Finish, KvSource, Submit, TransferReport

log = logging.getLogger(__name__)

MAX_TRIED = 2
"""Encode workers that one worker asks for an image. An image that kills them then meets the rules for generations that kill workers."""

LOOK_SECONDS = 0.25

Outcome = Literal["done", "failed", "lost", "cancelled"]
"""The worker has the features; the encode worker refused, or they could not be pulled; it was lost; nobody needs them any more."""


class Want:
    """An image that a worker needs, for these of its generations."""

    def __init__(self, target: Member, name: bytes) -> None:
        self.target = target
        self.name = name
        self.generations: set[bytes] = set()
        self.tried: set[WorkerLink] = set()
        self.job: Job | None = None


class Job(Generation):
    """One image at one encode worker, for one other worker. It has no tokens, so nobody reads its mailbox."""

    __slots__ = ("encoder", "encoders", "has_failed", "id", "is_computed", "positions", "source", "started", "want")

    def __init__(self, encoders: Encoders, encoder: Member, want: Want, positions: int) -> None:
        super().__init__(Mailbox(Doorbell()))
        self.encoders = encoders
        self.encoder = encoder
        self.want = want
        self.positions = positions
        self.id = secrets.token_bytes(GENERATION_ID_BYTES)
        self.source = KvSource(secrets.token_bytes(TRANSFER_ID_BYTES), encoder.model.kv_address, waits=True)
        self.started = asyncio.get_running_loop().time()
        self.is_computed = self.has_failed = False

    def submit(self, request: Submit, span: ImageSpan, ids: tuple[int, ...]) -> None:
        """Raises LinkError when the encode worker is lost."""
        alone = structs.replace(span, start=0, end=self.positions)
        export = Export(self.source.transfer, LEASE_SECONDS)
        job = Submit(self.id, ids, 0, 0, lane=request.lane, weight=request.weight, export=export, images=(alone,))
        self.encoder.link.submit(job, self)

    def finished(self, finish: Finish) -> None:  # noqa: ARG002
        self.end()

    def ended(self, error: PenstockError | None) -> None:
        self.encoders.computed(self)
        if error is not None:
            log.info("an image is not encoded by %s: %s", self.encoder.name, error)
            self.encoders.failed(self, "lost" if isinstance(error, LinkError) else "failed")


class Encoders:
    """The images that encode workers make for others, of this front end's generations. Two workers that need the same image are sent to
    the same encode worker, which encodes it once."""

    def __init__(self, pool: WorkerPool, find: Callable[[bytes], Picture | None]) -> None:
        self._pool = pool
        self._send_pixels = answer_with_pixels(find)
        self._wants: dict[tuple[WorkerLink, bytes], Want] = {}
        self._jobs: dict[bytes, Job] = {}
        """By transfer. Those that their target has not ended."""
        self._of_image: dict[bytes, list[Job]] = {}
        """The same, by the image's name."""
        self._sent: Counter[WorkerLink] = Counter()
        """Positions that each encode worker has not computed of them."""
        self._look: asyncio.TimerHandle | None = None
        self.counts: Counter[str] = Counter()
        """By outcome."""
        self.durations: list[int] = [0] * (len(BUCKETS) + 1)
        """Of those that are done, from the first message to the last byte."""
        self.seconds = 0.0

    def __len__(self) -> int:
        return len(self._jobs)

    async def answer(self, target: Member, request: Submit, span: ImageSpan, failed: str) -> ImageAnswer:
        """How a worker gets an image: see `links.images.AnswerImage`. Encode workers get pixels."""
        source = None if target.is_encoder else self._source(target, request, span, failed)
        return source or await self._send_pixels(request, span, failed)

    def _source(self, target: Member, request: Submit, span: ImageSpan, failed: str) -> KvSource | None:
        """Where the worker pulls its features; None: it makes them itself."""
        encoders = self._pool.encoders(target)
        key = target.link, span.name
        want = self._wants.get(key)
        if want is None:
            if not encoders:
                return None
            want = self._wants[key] = Want(target, span.name)
        want.generations.add(request.id)
        if want.job is not None:
            if not failed:
                return want.job.source
            log.info("%s cannot pull an image from %s: %s", target.name, want.job.encoder.name, failed)
            want.tried.add(want.job.encoder.link)
            self._end(want.job, "failed")
        job = self._begin(want, [each for each in encoders if each.link not in want.tried], request, span)
        if job is None:
            del self._wants[key]
            return None
        return job.source

    def _begin(self, want: Want, encoders: list[Member], request: Submit, span: ImageSpan) -> Job | None:
        ids = tuple([each for each in request.token_ids[span.start : span.end] if is_image_id(each)])
        while len(want.tried) < MAX_TRIED and (encoder := self._choose(encoders, span.name, len(ids))) is not None:
            job = Job(self, encoder, want, len(ids))
            try:
                job.submit(request, span, ids)
            except PenstockError as error:
                log.warning("an image is not sent to %s: %s", encoder.name, error)
                want.tried.add(encoder.link)
                encoders = [each for each in encoders if each is not encoder]
                continue
            want.job = job
            self._jobs[job.source.transfer] = job
            self._of_image.setdefault(span.name, []).append(job)
            self._sent[encoder.link] += job.positions
            self._look_soon()
            return job
        return None

    def _choose(self, encoders: list[Member], name: bytes, positions: int) -> Member | None:
        able = {each.name: each for each in encoders if each.link.is_usable and not each.is_quiet}
        for job in self._of_image.get(name, ()):
            if able.get(job.encoder.name) is job.encoder:
                return job.encoder
        chosen = choose_encoder(name, positions, {each: self._load(able[each]) for each in able})
        return None if chosen is None else able[chosen]

    def _load(self, encoder: Member) -> int:
        """The positions that it must encode, as it has said, or as this front end has sent since."""
        return max(self._sent[encoder.link], encoder.link.stats.image_positions_to_encode)

    def reported(self, member: Member, reports: Iterable[TransferReport]) -> None:
        """What a worker says of transfers, of which some are of images."""
        for report in reports:
            job = self._jobs.get(report.id)
            if job is None or job.want.target is not member or report.outcome is None:
                continue
            if report.outcome == "done":
                seconds = asyncio.get_running_loop().time() - job.started
                self.durations[bisect_left(BUCKETS, seconds)] += 1
                self.seconds += seconds
            # Without the features, nobody waits for them there any more.
            self._end(job, "done" if report.outcome == "done" else "cancelled")
            del self._wants[member.link, job.want.name]

    def computed(self, job: Job) -> None:
        """The encode worker has no more to do for it."""
        if not job.is_computed:
            job.is_computed = True
            self._sent[job.encoder.link] -= job.positions
            if not self._sent[job.encoder.link]:
                del self._sent[job.encoder.link]

    def failed(self, job: Job, outcome: Outcome) -> None:
        """The encode worker has failed. Its target hears that the transfer is over, and asks again."""
        if job.source.transfer in self._jobs:
            job.has_failed = True
            self.counts[outcome] += 1
            job.want.target.link.end_transfers([job.source.transfer])

    def joined(self, member: Member) -> None: ...

    def left(self, member: Member) -> None:
        """This worker was lost: nobody needs what it asked for. Jobs of an encode worker are ended by its link."""
        for want in [want for (link, _), want in self._wants.items() if link is member.link]:
            self._drop(want)

    def close(self) -> None:
        if self._look is not None:
            self._look.cancel()

    def check_integrity(self) -> None:
        """Raises AssertionError unless the records agree with each other."""
        open_jobs = {want.job for want in self._wants.values() if want.job is not None}
        assert open_jobs == set(self._jobs.values()) == {job for jobs in self._of_image.values() for job in jobs}
        assert self._sent.total() == sum(job.positions for job in self._jobs.values() if not job.is_computed)
        assert all(want.generations for want in self._wants.values())

    def _end(self, job: Job, outcome: Outcome) -> None:
        """Both workers let go of what it holds."""
        self.counts[outcome] += not job.has_failed
        self.computed(job)
        del self._jobs[job.source.transfer]
        self._of_image[job.want.name].remove(job)
        if not self._of_image[job.want.name]:
            del self._of_image[job.want.name]
        job.want.job = None
        job.encoder.link.cancel(job.id)
        for member in (job.encoder, job.want.target):
            member.link.end_transfers([job.source.transfer])

    def _drop(self, want: Want) -> None:
        if want.job is not None:
            self._end(want.job, "cancelled")
        del self._wants[want.target.link, want.name]

    def _look_soon(self) -> None:
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(LOOK_SECONDS, self._look_at_all)

    def _look_at_all(self) -> None:
        """Ends what no generation needs any more: they were cancelled, or have ended."""
        self._look = None
        for want in list(self._wants.values()):
            want.generations = {each for each in want.generations if each in want.target.link.with_images}
            if not want.generations:
                self._drop(want)
        if self._wants:
            self._look_soon()
