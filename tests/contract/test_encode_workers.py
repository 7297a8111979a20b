"""Encode workers beside others, over real links and transports: whoever dies, freezes, is cancelled or comes back, every stream is exact,
and nothing is held afterwards."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec import structs

from penstock.api.models import Models
from penstock.backends.encode import MAX_PIXELS_AT_ONCE, EncodeBackend
from penstock.backends.simulated_images import SimulatedTower
from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links.images import ImageAnswer
from penstock.cluster.links.worker_link import WorkerLink
from penstock.cluster.links.worker_server import WorkerServer
from penstock.config.engines import SimulatorConfig, parse_fault
from penstock.router import encoders
from penstock.wire.address import UnixAddress
from penstock.wire.errors import RequestError, WorkerStalled
from penstock.wire.images import ImageSpan, image_ids
from penstock.wire.messages import Export, Fault, Segment, Submit, WorkerStats
from penstock.worker.runtime import WorkerRuntime
from simulated_pictures import POSITIONS, RULES, expected_with, picture, submit_with
from workers import SECRET, FrontEnd, Reader, Worker, make_model, until

CAT, DOG, COW = PICTURES = [picture(number) for number in range(3)]
MANY = [picture(100 + number) for number in range(20)]
LARGE = picture(9, (512, 512))
BY_NAME = {each.name: each for each in (*PICTURES, *MANY, LARGE)}

Started = tuple[Reader, asyncio.Task[None]]


class HeldTower(SimulatedTower):
    """A tower that a test can stop, and that fails if it is told to."""

    failure: Exception | None = None
    is_stuck = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.may_go = threading.Event()
        self.may_go.set()
        self.begun: list[bytes] = []

    def encode(self, span: ImageSpan, pixels: bytes, slots: Sequence[int]) -> None:
        self.begun.append(span.name)
        while not self.may_go.wait(0.02):
            if not self.is_stuck:
                self._on_progress()
        if self.failure is not None:
            raise self.failure
        super().encode(span, pixels, slots)


class EncodeWorker:
    """An encode worker on Unix sockets. `die` ends all its connections at once, as if the process were gone."""

    def __init__(self, folder: Path, name: str, *, images: int = 64, fault: str = "") -> None:
        self.name = name
        self.address = UnixAddress(str(folder / f"{name}.sock"))
        self.config = SimulatorConfig(encode_ms=0.0, image_positions=images * 32)
        self.towers: list[HeldTower] = []
        self.failures: list[None] = []
        self._faults = Faults(parse_fault(f"transfer:{fault}=1.0") if fault else None)
        model = make_model(roles=("encode",), images=RULES)
        self.backend = EncodeBackend(model, self._make, lambda: self.failures.append(None))
        self.runtime = WorkerRuntime(self.backend)
        self.server = WorkerServer(self.runtime, name, self.address, SECRET)
        self._place = UnixAddress(str(folder / f"{name}.kv"))

    def _make(self, on_progress: Callable[[], None]) -> HeldTower:
        self.towers.append(HeldTower(self.config, RULES, on_progress))
        return self.towers[0]

    @property
    def tower(self) -> HeldTower:
        return self.towers[0]

    @property
    def encoded(self) -> int:
        return self.backend.stats().images_encoded

    @property
    def is_settled(self) -> bool:
        stats = self.backend.stats()
        held = stats.running or stats.queued or stats.exports or (stats.kv_blocks_used and not self.failures)
        held = held or self.runtime.wanted_images or self.runtime.open_transfers
        return not held and self.runtime.is_idle

    async def __aenter__(self) -> Self:
        await self.runtime.start()
        self.transport = SocketTransport(self.backend.kv, Credentials(self.name, SECRET), self._place, faults=self._faults)
        self.runtime.move_kv(self.transport.start(), b"", 64)
        self.backend.kv.connect(self.transport)
        await self.server.start()
        return self

    async def die(self) -> None:
        """The links and the transport end. What runs is not waited for."""
        await self.server.close()
        await asyncio.to_thread(self.transport.close)

    async def __aexit__(self, *_: object) -> None:
        self.tower.may_go.set()
        await self.die()
        await asyncio.sleep(0)
        await self.runtime.close()
        self.backend.check_integrity()


class SeeingWorker(Worker):
    """A simulator that reads images and pulls their features, or makes them itself."""

    def __init__(self, folder: Path, name: str, *, pulls: bool = True, **config: Any) -> None:
        super().__init__(folder, name, make_model(images=RULES), **{"kv_blocks": 4096, "encode_ms": 0.0, **config})
        self._pulls = pulls

    @property
    def encoded(self) -> int:
        return self.simulator.stats().images_encoded

    @property
    def is_settled(self) -> bool:
        stats = self.simulator.stats()
        held = stats.running or stats.queued or stats.image_positions_to_encode
        return not (held or self.runtime.wanted_images or self.runtime.open_transfers)

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        features = self.simulator.features
        assert features is not None
        self.transport = SocketTransport(features, Credentials(self.name, SECRET), None)
        if self._pulls:
            self.transport.start()
            features.connect(self.transport)
        return self

    async def __aexit__(self, *arguments: object) -> None:
        await asyncio.to_thread(self.transport.close)
        await asyncio.sleep(0)
        await super().__aexit__(*arguments)


def memory_files() -> int:
    """Files of this process that only memory has."""
    return sum("memfd" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


@pytest.fixture(autouse=True)
def no_memory_is_left() -> Iterator[None]:
    # The records of pytest hold errors, and these hold everything.
    logging.disable()
    before = memory_files()
    yield
    logging.disable(logging.NOTSET)
    gc.collect()
    assert memory_files() <= before


class Cluster:
    def __init__(self, front_end: FrontEnd, workers: list[SeeingWorker], encoders: list[EncodeWorker]) -> None:
        self.front_end = front_end
        self.workers = workers
        self.encoders = encoders
        self.counts = front_end.encoders.counts

    def start(self, number: int, *pictures: Any, tokens: int = 16) -> Started:
        return self.front_end.start(submit_with(number, pictures, tokens))

    async def check(self, number: int, *pictures: Any) -> None:
        """This prompt gives its tokens."""
        async with asyncio.timeout(20):
            _, reader = await self.front_end.run(submit_with(number, pictures))
        assert reader.tokens == expected_with(number, pictures, 16)

    @property
    def is_settled(self) -> bool:
        alive = {member.name for member in self.front_end.pool.members}
        settled = {each.name: each.is_settled for each in self.workers} | {each.name: each.is_settled for each in self.encoders}
        return not self.front_end.encoders and all(settled[name] for name in alive)


@asynccontextmanager
async def cluster(
    folder: Path, workers: int = 1, encoders: int = 1, images: int = 64, fault: str = "", **config: Any
) -> AsyncIterator[Cluster]:
    """At the end nothing is held."""
    async with AsyncExitStack() as stack:
        seeing = [await stack.enter_async_context(SeeingWorker(folder, f"worker-{index}", **config)) for index in range(workers)]
        sizes: dict[str, Any] = {"images": images, "fault": fault}
        encoding = [await stack.enter_async_context(EncodeWorker(folder, f"encode-{index}", **sizes)) for index in range(encoders)]
        places: list[Any] = [*seeing, *encoding]
        front_end = await stack.enter_async_context(FrontEnd(places, pictures=BY_NAME, trial_seconds=60.0))
        made = Cluster(front_end, seeing, encoding)
        yield made
        await until(lambda: made.is_settled)
        front_end.encoders.check_integrity()


async def finish(started: Started, number: int, *pictures: Any, tokens: int = 16) -> None:
    reader, task = started
    async with asyncio.timeout(20):
        await task
    assert reader.tokens == expected_with(number, pictures, tokens)


async def test_an_encode_worker_makes_the_images_and_the_other_makes_the_text(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await made.check(1, *PICTURES)
        await made.check(2, CAT, LARGE)
        (worker,), (encoder,) = made.workers, made.encoders
        assert (worker.encoded, encoder.encoded) == (0, 4)
        await until(lambda: made.counts["done"] == 4)
        assert sum(made.front_end.encoders.durations) == 4


async def test_an_encode_worker_gets_no_generation_and_alone_serves_nothing(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        models = Models()
        for member in made.front_end.pool.members:
            if member.is_encoder:
                models.joined(member)
        assert models.all() == []
        with pytest.raises(RequestError, match="no worker is ready"):
            models.find("simulator")
        assert [member.name for member in made.front_end.pool.usable("simulator")] == ["worker-0"]
        for number in range(8):
            await made.check(number)
        assert made.encoders[0].backend.stats().images_encoded == 0


@pytest.fixture
def own_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """No image goes past its own encode worker, however much waits there."""
    monkeypatch.setattr(encoders, "SPARE_IMAGES", 1000)


@pytest.mark.usefixtures("own_encoder")
async def test_many_generations_on_two_workers_have_each_image_encoded_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, workers=2, encoders=2) as made:
        mine = {number: [MANY[number % 20], CAT, MANY[(7 * number) % 20]] for number in range(40)}
        started = {number: made.start(number, *mine[number]) for number in mine}
        for number, each in started.items():
            await finish(each, number, *mine[number])
        assert [worker.encoded for worker in made.workers] == [0, 0]
        assert sum(encoder.encoded for encoder in made.encoders) == 21
        assert all(encoder.encoded for encoder in made.encoders)


@pytest.mark.usefixtures("own_encoder")
async def test_two_front_ends_ask_the_same_encode_worker(tmp_path: Path) -> None:
    async with cluster(tmp_path, workers=2, encoders=2) as made:
        places: list[Any] = [*made.workers, *made.encoders]
        async with FrontEnd(places, pictures=BY_NAME, name="other") as other:
            first = [made.start(number, picture) for number, picture in enumerate(MANY)]
            second = [other.start(submit_with(100 + number, [picture])) for number, picture in enumerate(MANY)]
            for number, picture in enumerate(MANY):
                await finish(first[number], number, picture)
                await finish(second[number], 100 + number, picture)
            await until(lambda: not other.encoders)
        assert sum(encoder.encoded for encoder in made.encoders) == len(MANY)
        assert [worker.encoded for worker in made.workers] == [0, 0]


@pytest.mark.parametrize("encoders", [1, 2])
async def test_an_encode_worker_that_dies_while_it_computes_is_replaced(tmp_path: Path, encoders: int) -> None:
    """By the other one, or by the worker itself."""
    async with cluster(tmp_path, encoders=encoders) as made:
        for encoder in made.encoders:
            encoder.tower.may_go.clear()
        started = made.start(1, CAT)
        await until(lambda: any(encoder.tower.begun for encoder in made.encoders))
        (dead,) = [encoder for encoder in made.encoders if encoder.tower.begun]
        for encoder in made.encoders:
            if encoder is not dead:
                encoder.tower.may_go.set()
        await dead.die()
        await finish(started, 1, CAT)
        assert made.workers[0].encoded == (encoders == 1)
        assert made.counts["lost"] + made.counts["failed"] == 1


async def test_one_that_dies_while_it_is_pulled_from_is_replaced(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        await made.check(1, CAT)
        # The features are there, and the transport is not: the pull fails after the job has finished.
        await asyncio.to_thread(encoder.transport.close)
        await made.check(2, CAT, DOG)
        assert made.workers[0].encoded == 1
        await until(lambda: encoder.is_settled)


async def test_a_tower_that_is_stuck_is_left_when_the_worker_is_silent(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        encoder.tower.may_go.clear()
        started = made.start(1, CAT)
        await until(lambda: bool(encoder.tower.begun))
        member = made.front_end.pool.find("encode-0")
        assert member is not None
        # As the pool does after --worker-stall.
        member.link.give_up(WorkerStalled("it has sent nothing"))
        await finish(started, 1, CAT)
        assert made.workers[0].encoded == 1
        encoder.tower.may_go.set()


async def test_a_tower_that_is_stuck_is_silent_also_while_jobs_come_and_leave(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        encoder.tower.is_stuck = True
        encoder.tower.may_go.clear()
        member = made.front_end.pool.find("encode-0")
        assert member is not None
        (port,) = encoder.runtime.ports
        started = [made.start(0, MANY[0])]
        await until(lambda: bool(encoder.tower.begun))
        await answered(member.link)
        frames = member.link.frames
        for number in range(1, 4):
            started.append(made.start(number, MANY[number]))
            await until(lambda: port.open_generations == len(started))
        _, leaving = started.pop()
        leaving.cancel()
        await until(lambda: port.open_generations == len(started))
        await answered(member.link)
        assert member.link.frames == frames + 1, "only that one has ended"
        member.link.give_up(WorkerStalled("it has sent nothing"))
        for number, each in enumerate(started):
            await finish(each, number, MANY[number])
        encoder.tower.may_go.set()


async def answered(link: WorkerLink) -> None:
    """What the worker had sent before is here."""
    link.ping()
    pings = link.pings
    await until(lambda: link.pongs >= pings)


async def test_a_worker_that_waits_for_an_encode_worker_is_not_silent(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        encoder.tower.may_go.clear()
        started = made.start(1, CAT)
        await until(lambda: bool(encoder.tower.begun))
        for member in made.front_end.pool.members:
            await until(lambda link=member.link, frames=member.link.frames: link.frames > frames + 2)  # type: ignore[misc]
        encoder.tower.may_go.set()
        await finish(started, 1, CAT)


@pytest.mark.parametrize("name", ["worker-0", "encode-0"])
async def test_a_worker_that_waits_for_a_front_end_is_not_silent(tmp_path: Path, name: str) -> None:
    """It may have asked another one, which hangs."""
    async with cluster(tmp_path) as made:
        member = made.front_end.pool.find(name)
        assert member is not None
        link, answer, may_answer = member.link, member.link.answer_image, asyncio.Event()

        async def late(request: Submit, span: ImageSpan, failed: str) -> ImageAnswer:
            await may_answer.wait()
            return await answer(request, span, failed)

        link.answer_image = late
        started = made.start(1, CAT)
        runtime = made.workers[0].runtime if name == "worker-0" else made.encoders[0].runtime
        await until(lambda: runtime.wanted_images == 1)
        frames = link.frames
        await until(lambda: link.frames > frames + 2)
        may_answer.set()
        await finish(started, 1, CAT)


async def test_a_tenant_with_many_images_does_not_keep_another_waiting(tmp_path: Path) -> None:
    """All have room in the pool. The other one's image comes after those whose pixels were asked for already."""
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        (port,) = encoder.runtime.ports
        encoder.tower.may_go.clear()
        many = [made.front_end.start(submit_with(number, [each], lane="many")) for number, each in enumerate(MANY)]
        await until(lambda: port.open_generations == len(MANY))
        other = made.front_end.start(submit_with(50, [CAT], lane="other"))
        await until(lambda: port.open_generations == len(MANY) + 1)
        encoder.tower.may_go.set()
        await finish(other, 50, CAT)
        for number, each in enumerate(MANY):
            await finish(many[number], number, each)
        assert encoder.tower.begun.index(CAT.name) == 1 + MAX_PIXELS_AT_ONCE


@pytest.mark.parametrize("fault", ["drop", "stall", "corrupt"])
async def test_features_that_do_not_come_or_are_damaged_are_never_used(tmp_path: Path, fault: str) -> None:
    """One that is silent is as good as frozen."""
    async with cluster(tmp_path, encoders=2, fault=fault) as made:
        await made.check(1, CAT)
        assert made.workers[0].encoded == 1
        assert made.counts["failed"] == 2
        assert sum(encoder.encoded for encoder in made.encoders) == 2


async def test_a_tower_that_refuses_a_picture_is_not_the_last_word(tmp_path: Path) -> None:
    """The worker's own tower says whether it can be read."""
    async with cluster(tmp_path, encoders=3) as made:
        for encoder in made.encoders:
            encoder.tower.failure = MemoryError("too large")
        await made.check(1, CAT)
        assert made.workers[0].encoded == 1
        assert sum(len(encoder.tower.begun) for encoder in made.encoders) == 2, "two are asked, not three"
        assert made.counts["failed"] == 2
        assert not any(encoder.failures for encoder in made.encoders)


async def test_a_tower_that_breaks_ends_its_worker_and_nothing_else(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        encoder.tower.failure = RuntimeError("broken")
        await made.check(1, CAT)
        assert encoder.failures == [None]
        await made.check(2, DOG)


async def test_one_that_comes_back_with_an_empty_pool_is_used_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await made.check(1, CAT)
        await made.encoders[0].die()
        await until(lambda: len(made.front_end.pool.members) == 1)
        async with EncodeWorker(tmp_path, "encode-0") as again:
            await until(lambda: len(made.front_end.pool.members) == 2)
            await made.check(2, DOG)
            assert again.encoded == 1
            assert made.workers[0].encoded == 0
            await until(lambda: again.is_settled)


async def test_a_worker_that_cannot_pull_makes_its_images_itself(tmp_path: Path) -> None:
    async with cluster(tmp_path, encoders=2, pulls=False) as made:
        await made.check(1, CAT)
        assert made.workers[0].encoded == 1
        assert made.counts["failed"] == 2


async def test_encode_workers_of_another_tower_are_not_used(tmp_path: Path) -> None:
    async with cluster(tmp_path, encoders=1) as made:
        (member,) = [each for each in made.front_end.pool.members if each.is_encoder]
        (target,) = [each for each in made.front_end.pool.members if not each.is_encoder]
        assert made.front_end.pool.encoders(target) == [member]
        other = type(target)(target.name, make_model(images=RULES, image_fingerprint=b"another"), target.link)
        assert made.front_end.pool.encoders(other) == []
        text_only = type(target)(target.name, make_model(), target.link)
        assert made.front_end.pool.encoders(text_only) == []


@pytest.mark.parametrize("phase", ["queued", "computing", "exported"])
async def test_a_cancel_in_any_phase_leaves_nothing(tmp_path: Path, phase: str) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        encoder.tower.may_go.clear()
        before = made.start(1, DOG)
        await until(lambda: encoder.tower.begun == [DOG.name])
        if phase != "queued":
            encoder.tower.may_go.set()
            await finish(before, 1, DOG)
            encoder.tower.may_go.clear()
        reader, task = made.start(2, CAT)
        if phase == "queued":
            await until(lambda: encoder.backend.stats().queued == 1)
        else:
            await until(lambda: CAT.name in encoder.tower.begun)
        if phase == "exported":
            # Made, and the worker that pulls it does not know yet.
            encoder.tower.may_go.set()
            await until(lambda: encoder.encoded == 2)
        task.cancel()
        if phase == "queued":
            await until(lambda: encoder.backend.stats().queued == 0)
            encoder.tower.may_go.set()
            await finish(before, 1, DOG)
            assert encoder.tower.begun == [DOG.name]
        encoder.tower.may_go.set()
        await until(lambda: made.is_settled)
        assert len(reader.tokens) < 16
        await made.check(3, CAT)


async def test_an_image_that_is_cancelled_for_one_still_comes_for_another(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        (encoder,) = made.encoders
        encoder.tower.may_go.clear()
        _, first = made.start(1, CAT)
        await until(lambda: bool(encoder.tower.begun))
        second = made.start(2, CAT)
        await until(lambda: made.workers[0].simulator.stats().queued == 2)
        first.cancel()
        encoder.tower.may_go.set()
        await finish(second, 2, CAT)
        assert encoder.tower.begun == [CAT.name]


async def test_an_image_that_is_larger_than_the_pool_is_made_elsewhere(tmp_path: Path) -> None:
    """With a clear fault in between."""
    async with cluster(tmp_path, images=2) as made:
        await made.check(1, LARGE)
        assert made.workers[0].encoded == 1
        assert made.counts["failed"] == 1
        await made.check(2, CAT)
        assert made.workers[0].encoded == 1


async def test_a_full_pool_makes_others_wait_and_nobody_for_ever(tmp_path: Path) -> None:
    """Room for one image. Those that are pulled, or wait to be, are held meanwhile."""
    async with cluster(tmp_path, workers=2, images=1) as made:
        started = [made.start(number, picture) for number, picture in enumerate(MANY)]
        for number, picture in enumerate(MANY):
            await finish(started[number], number, picture)
        assert made.encoders[0].encoded == len(MANY)
        assert [worker.encoded for worker in made.workers] == [0, 0]


async def test_a_worker_that_drains_finishes_its_images(tmp_path: Path) -> None:
    async with cluster(tmp_path, encoders=2) as made:
        for encoder in made.encoders:
            encoder.tower.may_go.clear()
        started = made.start(1, CAT)
        await until(lambda: any(encoder.tower.begun for encoder in made.encoders))
        (busy,) = [encoder for encoder in made.encoders if encoder.tower.begun]
        (other,) = [encoder for encoder in made.encoders if encoder is not busy]
        busy.runtime.drain()
        await until(lambda: len(made.front_end.pool.encoders(made.front_end.pool.members[0])) == 1)
        other.tower.may_go.set()
        await made.check(2, *MANY[:6])
        busy.tower.may_go.set()
        await finish(started, 1, CAT)
        assert (busy.encoded, other.encoded) == (1, 6)


async def test_one_that_hands_over_is_replaced_at_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, encoders=2) as made:
        for encoder in made.encoders:
            encoder.tower.may_go.clear()
        started = made.start(1, CAT)
        await until(lambda: any(encoder.tower.begun for encoder in made.encoders))
        (busy,) = [encoder for encoder in made.encoders if encoder.tower.begun]
        (other,) = [encoder for encoder in made.encoders if encoder is not busy]
        other.tower.may_go.set()
        busy.runtime.drain()
        busy.runtime.hand_over()
        await finish(started, 1, CAT)
        assert other.encoded == 1
        assert made.workers[0].encoded == 0
        busy.tower.may_go.set()


# What it says to requests that no front end should send.

ALONE = submit_with(1, [CAT])
IDS = ALONE.token_ids[ALONE.images[0].start : ALONE.images[0].end]
JOB = Submit(b"1" * 16, IDS, 0, 0, export=Export(b"t" * 16, 10.0), images=(ImageSpan(CAT.name, 0, len(IDS), CAT.layout.grid, CAT.size),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_tokens": 4}, "only makes features"),
        ({"images": ()}, "only makes features"),
        ({"export": None}, "only makes features"),
        ({"token_ids": IDS[:-1]}, "image 0 is at 0 to 24"),
        ({"token_ids": (*IDS[:-1], IDS[0])}, "do not carry its name"),
    ],
)
async def test_a_request_that_is_not_a_job_is_refused(changes: dict[str, Any], says: str) -> None:
    said: list[Segment] = []
    backend = EncodeBackend(make_model(images=RULES), lambda go_on: SimulatedTower(SimulatorConfig(), RULES, go_on), lambda: None)
    await backend.start(lambda segments, *_: said.extend(segments))
    backend.submit(structs.replace(JOB, **changes))
    (segment,) = said
    assert isinstance(segment.terminal, Fault)
    assert says in segment.terminal.message
    backend.check_integrity()
    await backend.close()


async def test_an_image_is_not_late_before_it_is_asked_for() -> None:
    """However long the queue is. Those that were asked for and do not come fail, and others are asked for."""
    said: list[Segment] = []
    asked: list[bytes] = []
    backend = EncodeBackend(make_model(images=RULES), lambda go_on: SimulatedTower(SimulatorConfig(), RULES, go_on), lambda: None)
    await backend.start(lambda segments, *_: said.extend(segments), lambda wanted: asked.append(wanted.generation))
    jobs = [number.to_bytes(16) for number in range(MAX_PIXELS_AT_ONCE + 3)]
    for job, each in zip(jobs, MANY, strict=False):
        ids = image_ids(each.name, POSITIONS)
        span = ImageSpan(each.name, 0, POSITIONS, each.layout.grid, each.size)
        backend.submit(structs.replace(JOB, id=job, token_ids=ids, images=(span,), export=Export(job, 10.0)))
    backend.check_integrity()
    assert asked == jobs[:MAX_PIXELS_AT_ONCE]
    backend.books.expire(time.monotonic() + 1000.0)
    backend.end_transfer(b"not known")
    assert [segment.id for segment in said] == jobs[:MAX_PIXELS_AT_ONCE]
    assert asked == jobs
    for job in jobs:
        backend.cancel(job)
    backend.check_integrity()
    assert backend.stats() == WorkerStats(kv_blocks_total=backend.books.slots)
    await backend.close()


YIELDING = """
import os, threading
from pathlib import Path
from penstock.backends.encode import NICE, yield_to_others

before = os.nice(0)
tower = threading.Thread(target=yield_to_others)
tower.start()
tower.join()
group = Path("/proc/self/autogroup")
assert os.nice(0) == before, "only the thread that encodes"
assert not group.exists() or group.read_text().endswith(f"nice {NICE}\\n"), group.read_text()
"""


def test_the_tower_yields_to_other_processes_and_not_to_its_own_loop() -> None:
    done = subprocess.run([sys.executable, "-c", YIELDING], start_new_session=True, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
