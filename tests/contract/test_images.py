"""Prompts with images on real workers, links and dispatch: every stream is exact, whatever breaks, and nothing is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import pytest
from msgspec import structs

from penstock.backends.simulator import Simulator
from penstock.cluster import suspects
from penstock.cluster.kv.handshake import Credentials
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links import images as sending
from penstock.config.engines import ImageFaults
from penstock.config.front_end import RouterSettings
from penstock.media.picture import Picture
from penstock.router.policy import Hints, SessionWish
from penstock.wire.address import UnixAddress
from penstock.wire.errors import GenerationFault
from penstock.wire.messages import Role, Submit
from simulated_pictures import RULES, expected_with, picture, submit_with
from workers import SECRET, FrontEnd, Reader, Worker, expected, fault_of, make_model, submit, until

CAT, DOG, COW = PICTURES = [picture(number) for number in range(3)]
LARGE = picture(9, (1024, 768))
BY_NAME = {each.name: each for each in (*PICTURES, LARGE)}

Started = tuple[Reader, asyncio.Task[None]]


class Recording(Simulator):
    """A simulator that remembers what it got, and may hold images back or die of one."""

    poison = b""
    is_held = False

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.submits: list[Submit] = []
        self.got: list[bytes] = []
        self.held: list[tuple[bytes, tuple[int, int], bytes]] = []
        self.worker: Worker | None = None

    def submit(self, request: Submit) -> None:
        self.submits.append(request)
        super().submit(request)

    def image(self, name: bytes, size: tuple[int, int], pixels: bytes) -> None:
        self.got.append(name)
        if name == self.poison and self.worker is not None:
            asyncio.get_running_loop().call_soon(self.worker.break_links)
        elif self.is_held:
            self.held.append((name, size, pixels))
        else:
            super().image(name, size, pixels)

    def let_go(self) -> None:
        self.is_held, held, self.held = False, self.held, []
        for each in held:
            super().image(*each)


class SeeingWorker(Worker):
    simulator: Recording

    def __init__(self, folder: Path, name: str, role: Role = "aggregated", **config: Any) -> None:
        super().__init__(folder, name, make_model(images=RULES, roles=(role,)), Recording, **{"kv_blocks": 4096, **config})
        self.simulator.worker = self

    @property
    def encoded(self) -> int:
        return self.simulator.stats().images_encoded

    @property
    def is_settled(self) -> bool:
        stats = self.simulator.stats()
        return not (stats.running or stats.queued or stats.image_positions_to_encode or self.runtime.wanted_images)


class MovingWorker(SeeingWorker):
    """Its KV moves."""

    async def __aenter__(self) -> Self:
        self.transport = SocketTransport(self.simulator.kv, Credentials(self.name, SECRET), UnixAddress(f"{self.address.path}.kv"))
        await self.runtime.start()
        self.runtime.move_kv(str(self.transport.start()), self.simulator.kv.fingerprint, 64)
        self.simulator.kv.connect(self.transport)
        await self.server.start()
        return self

    async def __aexit__(self, *errors: object) -> None:
        await asyncio.to_thread(self.transport.close)
        await super().__aexit__(*errors)


@asynccontextmanager
async def moving(folder: Path, names: str, **router: Any) -> AsyncIterator[tuple[FrontEnd, dict[str, MovingWorker]]]:
    """Workers by name: p… are prefill workers, d… decode workers, others neither. Their prompts take long, so that KV is worth moving."""
    roles: dict[str, Role] = {"p": "prefill", "d": "decode"}
    pace: dict[str, Any] = {"prefill_rate": 5000.0, "kv_block_bytes": 64}
    async with AsyncExitStack() as stack:
        workers = {name: MovingWorker(folder, name, roles.get(name[0], "aggregated"), **pace) for name in names.split()}
        for worker in workers.values():
            await stack.enter_async_context(worker)
        front_end = FrontEnd(list(workers.values()), router=RouterSettings(**router), pictures=BY_NAME)
        yield await stack.enter_async_context(front_end), workers
        await until(lambda: all(worker.is_settled and not worker.runtime.open_transfers for worker in workers.values()))


@asynccontextmanager
async def cluster(folder: Path, count: int = 2, pictures: Sequence[Picture] = (), **config: Any) -> AsyncIterator[tuple[FrontEnd, Any]]:
    """At the end the workers hold nothing but caches."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(SeeingWorker(folder, f"worker-{index}", **config)) for index in range(count)]
        known = {**BY_NAME, **{each.name: each for each in pictures}}
        yield await stack.enter_async_context(FrontEnd(list(workers), pictures=known, trial_seconds=60.0)), workers
        await until(lambda: all(worker.is_settled for worker in workers))


async def finish(started: Sequence[Started]) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*[task for _, task in started])


async def test_the_text_depends_on_the_images_and_each_is_encoded_once(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as (front_end, (worker,)):
        _, reader = await front_end.run(submit_with(1, PICTURES, 16, 60))
        assert reader.tokens == expected_with(1, PICTURES, 16)
        assert reader.tokens != expected(1, 16)
        assert len({expected_with(1, order, 16) for order in ([CAT, DOG], [DOG, CAT], [CAT], [CAT, CAT])}) == 4
        # Its KV is cached: nothing is asked for. Another prompt reuses the features.
        _, reader = await front_end.run(submit_with(1, PICTURES, 20, 60))
        assert reader.tokens == expected_with(1, PICTURES, 20)
        _, reader = await front_end.run(submit_with(2, [DOG, LARGE]))
        assert reader.tokens == expected_with(2, [DOG, LARGE], 16)
        assert (worker.encoded, worker.simulator.got) == (4, [*[each.name for each in PICTURES], LARGE.name])
        assert worker.simulator.stats().images_reused == 1
        _, reader = await front_end.run(submit(3))
        assert reader.tokens == expected(3, 16)


async def test_many_at_once_with_the_same_and_other_images(tmp_path: Path) -> None:
    pictures = [picture(100 + number) for number in range(30)]
    async with cluster(tmp_path, 2, pictures, image_positions=24 * 16) as (front_end, workers):
        mine = {number: [pictures[number % 30], CAT, pictures[(7 * number) % 30]] for number in range(60)}
        started = {number: front_end.start(submit_with(number, mine[number])) for number in mine}
        await finish(list(started.values()))
        assert {number: reader.tokens for number, (reader, _) in started.items()} == {
            number: expected_with(number, mine[number], 16) for number in mine
        }
        assert all(worker.encoded for worker in workers)


async def test_a_generation_goes_on_elsewhere_with_its_images(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (front_end, workers):
        reader, task = front_end.start(submit_with(1, PICTURES, 300))
        await until(lambda: len(reader.tokens) > 20)
        first, second = sorted(workers, key=lambda worker: -worker.encoded)
        first.break_links()
        await finish([(reader, task)])
        assert reader.tokens == expected_with(1, PICTURES, 300)
        (old,), (new,) = first.simulator.submits, second.simulator.submits
        assert (old.images, new.images, new.offset > 20) == (new.images, old.images, True)
        assert new.token_ids[: len(old.token_ids)] == old.token_ids
        assert (first.encoded, second.encoded) == (3, 3)


async def test_a_worker_that_dies_while_an_image_is_on_its_way(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (front_end, workers):
        for worker in workers:
            worker.simulator.is_held = True
        reader, task = front_end.start(submit_with(1, [CAT, LARGE], 30))
        await until(lambda: any(worker.simulator.held for worker in workers))
        first, second = sorted(workers, key=lambda worker: -len(worker.simulator.held))
        first.break_links()
        await until(lambda: len(second.simulator.held) == 2)
        first.simulator.let_go()
        second.simulator.let_go()
        await finish([(reader, task)])
        assert (reader.tokens, second.encoded) == (expected_with(1, [CAT, LARGE], 30), 2)


async def test_choices_share_the_images_of_their_prompt(tmp_path: Path) -> None:
    async with cluster(tmp_path, 1) as (front_end, (worker,)):
        prompt = submit_with(0, PICTURES)
        turn = front_end.turn()
        requests = [structs.replace(prompt, id=n.to_bytes(16), seed=n, prompt=b"p" * 16) for n in range(6)]
        started = [front_end.start(request, turn) for request in requests]
        await finish(started)
        assert [reader.tokens for reader, _ in started] == [expected_with(n, PICTURES, 16) for n in range(6)]
        assert (worker.encoded, len(worker.simulator.got)) == (3, 3)


async def test_a_cancel_leaves_nothing_of_an_image_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The large one stops between its pieces, and the other one comes."""
    monkeypatch.setattr(sending, "PIECES_PER_PING", 1)
    async with cluster(tmp_path, 1) as (front_end, (worker,)):
        production = front_end.dispatcher.produce("simulator", front_end.turn(), submit_with(1, [LARGE]), Reader().mailbox)
        await until(lambda: worker.runtime.wanted_images == 1)
        production.cancel()
        (member,) = front_end.pool.members
        assert (member.link.active, member.link.with_images) == (1, {}), "it would be sent to its end"
        reader, other = front_end.start(submit_with(2, [CAT]))
        await finish([(reader, other)])
        assert (reader.tokens, worker.encoded) == (expected_with(2, [CAT], 16), 1)


@pytest.mark.parametrize("is_waiting", [True, False])
async def test_a_cancel_while_it_waits_for_the_encoder(tmp_path: Path, is_waiting: bool) -> None:
    async with cluster(tmp_path, 1, encode_ms=20_000.0 if is_waiting else 20.0) as (front_end, (worker,)):
        _, task = front_end.start(submit_with(1, [CAT, DOG], 2000))
        await until(lambda: worker.simulator.stats().image_positions_to_encode > 0 if is_waiting else worker.encoded == 2)
        task.cancel()
        await until(lambda: not worker.simulator.stats().queued and not worker.simulator.stats().running)


async def test_a_picture_that_is_gone_ends_its_generation_and_no_other(tmp_path: Path) -> None:
    async with cluster(tmp_path, 2) as (front_end, _):
        gone = picture(55)
        started = front_end.start(submit_with(1, [CAT, DOG], 100))
        with pytest.raises(GenerationFault) as caught:
            await front_end.run(submit_with(2, [CAT, gone]))
        assert (fault_of(caught).code, fault_of(caught).retryable) == ("image_lost", False)
        await finish([started])
        assert started[0].tokens == expected_with(1, [CAT, DOG], 100)


async def test_an_image_that_kills_its_worker_is_found_and_its_neighbours_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "HOLD_SECONDS", 0.5)
    async with cluster(tmp_path, 3) as (front_end, workers):
        for worker in workers:
            worker.simulator.poison = COW.name
        neighbours = {number: front_end.start(submit_with(number, [CAT, DOG], 200)) for number in range(12)}
        _, poisoned = front_end.start(submit_with(99, [CAT, COW], 200))
        with pytest.raises(GenerationFault) as caught:
            async with asyncio.timeout(30):
                await poisoned
        assert fault_of(caught).code == "kills_workers"
        await finish(list(neighbours.values()))
        assert all(reader.tokens == expected_with(number, [CAT, DOG], 200) for number, (reader, _) in neighbours.items())
        assert sum(worker.simulator.got.count(COW.name) for worker in workers) == 2


def next_turn(number: int, before: Submit, answer: Sequence[int]) -> Submit:
    """The turn after this one, with 10 more tokens of text."""
    ids = (*before.token_ids, *answer, *expected(1000 + number, 10))
    return structs.replace(submit(number), token_ids=ids, images=before.images)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_session_that_moves_takes_its_images_along(tmp_path: Path, leaves: bool) -> None:
    """Its worker drains. The other one gets KV and no image, also when the front end has the pictures no more."""
    async with moving(tmp_path, "a b") as (front_end, workers):
        request, hints = submit_with(1, PICTURES, 40, 800), Hints(SessionWish("s"))
        turn, reader = await front_end.run(request, hints)
        home, other = (workers[turn.worker or ""], workers[{"a": "b", "b": "a"}[turn.worker or ""]])
        if leaves:
            front_end.pictures.clear()
        home.runtime.drain()
        await until(lambda: other.simulator.stats().sessions == 1 and not home.simulator.stats().sessions)
        await until(lambda: front_end.sessions.is_idle)
        again = next_turn(2, request, reader.tokens)
        turn, reader = await front_end.run(again, hints)
        assert (turn.worker, reader.tokens) == (other.name, expected_with(2, PICTURES, 16))
        assert (home.encoded, other.encoded, other.simulator.got) == (3, 0, [])
        delta, _ = reader.read()
        assert delta is not None
        assert delta.prompt is not None
        assert delta.prompt.cached_tokens >= 0.95 * len(again.token_ids)


async def test_one_worker_computes_a_prompt_with_images_and_another_continues(tmp_path: Path) -> None:
    async with moving(tmp_path, "p d", disaggregation="always") as (front_end, workers):
        _, reader = await front_end.run(submit_with(1, PICTURES, 40, 800))
        assert reader.tokens == expected_with(1, PICTURES, 40)
        (first,), (second,) = workers["p"].simulator.submits, workers["d"].simulator.submits
        assert (first.images, second.images, second.offset) == (second.images, first.images, 1)
        assert (workers["p"].encoded, workers["d"].encoded) == (3, 0)


async def test_a_prompt_that_waits_for_its_images_stays_where_it_is_computed(tmp_path: Path) -> None:
    """It takes longer than its tokens do, and its worker says that it is alive."""
    async with moving(tmp_path, "p d", disaggregation="always") as (front_end, workers):
        # Then it is known how fast it computes.
        await front_end.run(submit(9, 4, 800))
        simulator = workers["p"].simulator
        simulator.is_held = True
        started = front_end.start(submit_with(1, PICTURES, 40, 800))
        await until(lambda: len(simulator.held) == 3)
        member = front_end.pool.find("p")
        assert member is not None
        frames = member.link.frames
        await until(lambda: member.link.frames > frames + 4)
        simulator.let_go()
        await finish([started])
        assert started[0].tokens == expected_with(1, PICTURES, 40)
        assert (workers["p"].encoded, workers["d"].encoded, front_end.dispatcher.migrations.total()) == (3, 0, 0)


async def test_a_generation_leaves_a_worker_that_drains_with_its_images(tmp_path: Path) -> None:
    async with moving(tmp_path, "a b") as (front_end, workers):
        reader, task = front_end.start(submit_with(1, PICTURES, 200, 800))
        await until(lambda: len(reader.tokens) > 20)
        home, other = (workers["a"], workers["b"]) if workers["a"].simulator.submits else (workers["b"], workers["a"])
        home.runtime.drain()
        home.runtime.hand_over()
        await finish([(reader, task)])
        assert (reader.tokens, other.encoded, other.simulator.got) == (expected_with(1, PICTURES, 200), 0, [])


async def test_chaos_with_images(tmp_path: Path) -> None:
    """Links break by turns, and images are lost: every stream is exact."""
    pictures = [picture(200 + number) for number in range(40)]
    fault = ImageFaults(lose=0.05, seed=3)
    async with cluster(tmp_path, 3, pictures, image_fault=fault, image_positions=24 * 20) as (front_end, workers):
        mine = {number: [pictures[(number * step) % 40] for step in (1, 3, 7)] for number in range(60)}
        started = {number: front_end.start(submit_with(number, mine[number], 120)) for number in mine}
        for turn in range(12):
            await asyncio.sleep(0.03)
            workers[turn % 3].break_links()
        await finish(list(started.values()))
        wrong = [number for number, (reader, _) in started.items() if reader.tokens != expected_with(number, mine[number], 120)]
        assert wrong == []
        assert sum(front_end.dispatcher.migrations.values()) > 12
