"""Links over real sockets: handshake, streaming, named errors, and either end dying."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import pytest

from hand_driven import HandDriven
from penstock.backends.simulator import Simulator, Vocabulary, tokens_between
from penstock.cluster.links.security import Handshake
from penstock.cluster.links.worker_link import WorkerLink, connect
from penstock.cluster.links.worker_server import WorkerServer
from penstock.config.engines import SimulatorConfig
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import Address, TcpAddress, UnixAddress, parse_address
from penstock.wire.codec import MAX_FRAME_BYTES, FrameReader, encode_frame
from penstock.wire.errors import ConfigError, GenerationFault, HandshakeRefused, LinkBroken
from penstock.wire.messages import (
    PROTOCOL_VERSION,
    TOKENIZER_PIECE_BYTES,
    Cancel,
    Challenge,
    Delta,
    Fault,
    Finish,
    Goodbye,
    Hello,
    Message,
    ModelInfo,
    Ready,
    Segment,
    Step,
    Submit,
    TokenizerRequest,
    TransferReport,
    Welcome,
    WorkerStats,
)
from penstock.worker.runtime import WorkerRuntime
from workers import send, until

WORDS = range(300, 1800)
MODEL = ModelInfo("simulator", "simulator", "words", 1842, 100_000, 16)
SECRET = "only for this test"


class Worker:
    """A real worker in this process."""

    def __init__(self, address: Address, step_ms: float = 0.5) -> None:
        self.address = address
        self.simulator = Simulator(SimulatorConfig(step_ms=step_ms, kv_blocks=16_384), MODEL, Vocabulary(WORDS, 1))
        self.runtime = WorkerRuntime(self.simulator)
        self.server = WorkerServer(self.runtime, "worker-0", address, SECRET)

    async def __aenter__(self) -> Self:
        await self.runtime.start()
        await self.server.start()
        if isinstance(self.address, TcpAddress):
            self.address = TcpAddress(self.address.host, self.server.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()
        await self.runtime.close()
        self.simulator.check_integrity()

    async def until_stats(self, running: int) -> WorkerStats:
        async with asyncio.timeout(10):
            while self.simulator.stats().running != running:
                await asyncio.sleep(0.001)
        return self.simulator.stats()


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    return UnixAddress(str(tmp_path / "worker.sock")) if request.param == "unix" else TcpAddress("127.0.0.1", 0)


@asynccontextmanager
async def linked(worker: Worker) -> AsyncIterator[tuple[WorkerLink, Welcome]]:
    link, welcome = await connect(worker.address, "test", SECRET)
    try:
        yield link, welcome
    finally:
        link.abort()
        await link.lost


@asynccontextmanager
async def raw(worker: Worker) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, Challenge]]:
    """A connection on which the test writes the frames itself."""
    if isinstance(worker.address, UnixAddress):
        reader, writer = await asyncio.open_unix_connection(worker.address.path)
    else:
        reader, writer = await asyncio.open_connection(worker.address.host, worker.address.port)
    try:
        (challenge,) = await receive(reader, 1)
        assert isinstance(challenge, Challenge)
        yield reader, writer, challenge
    finally:
        writer.close()
        await asyncio.wait([asyncio.ensure_future(writer.wait_closed())])


async def receive(reader: asyncio.StreamReader, count: int) -> list[Message]:
    messages: list[Message] = []
    frames = FrameReader()
    async with asyncio.timeout(10):
        while len(messages) < count:
            data = await reader.readexactly(4)
            messages += frames.feed(data + await reader.readexactly(int.from_bytes(data)))
    return messages


def greet(worker: Worker, challenge: Challenge, version: int = PROTOCOL_VERSION, secret: str = SECRET) -> bytes:
    address = str(worker.address)
    reached = address if isinstance(worker.address, TcpAddress) else ""
    handshake = Handshake(challenge.nonce, b"n" * 32, "by hand", address, reached)
    return encode_frame(Hello(version, "by hand", b"n" * 32, handshake.proof(secret, "frontend"), address, reached))


def submit(name: int, max_tokens: int = 50) -> Submit:
    return Submit(name.to_bytes(16), tuple(range(20)), max_tokens, seed=name, ignore_eos=True)


async def read_all(doorbell: Doorbell, mailbox: Mailbox) -> tuple[int, ...]:
    tokens: list[int] = []
    async with asyncio.timeout(10):
        while True:
            await doorbell.wait()
            for ready in doorbell.answer():
                delta, terminal = ready.take()
                tokens += delta.token_ids if delta is not None else ()
                if terminal is not None:
                    assert isinstance(terminal, Finish)
                    return tuple(tokens)


async def test_a_generation_arrives_complete(address: Address) -> None:
    async with Worker(address) as worker, linked(worker) as (link, welcome):
        assert welcome.model == worker.runtime.model
        doorbell = Doorbell()
        mailbox = Mailbox(doorbell)
        generation = send(link, submit(7, 300), mailbox)
        assert await read_all(doorbell, mailbox) == tuple(tokens_between(7, 0, 300, WORDS))
        await generation.done
        assert link.active == 0


async def test_many_generations_share_one_link(address: Address) -> None:
    async with Worker(address) as worker, linked(worker) as (link, _):
        bells = [Doorbell() for _ in range(200)]
        boxes = [Mailbox(bell) for bell in bells]
        for name, box in enumerate(boxes):
            send(link, submit(name, 40), box)
        texts = await asyncio.gather(*(read_all(bell, box) for bell, box in zip(bells, boxes, strict=True)))
        assert texts == [tuple(tokens_between(name, 0, 40, WORDS)) for name in range(200)]
        assert link.frames < 200 * 40 / 20, "steps were not shared"


async def test_a_cancel_frees_the_worker_and_is_answered(address: Address) -> None:
    async with Worker(address) as worker, linked(worker) as (link, _):
        mailbox = Mailbox(Doorbell())
        generation = send(link, submit(1, 10_000), mailbox)
        await worker.until_stats(running=1)
        mailbox.cancel()
        link.cancel((1).to_bytes(16))
        async with asyncio.timeout(5):
            await generation.done
        assert worker.simulator.stats().running == 0
        assert worker.simulator.stats().kv_blocks_used == 0


async def test_the_front_end_dying_aborts_its_generations_and_no_others(address: Address) -> None:
    async with Worker(address) as worker, linked(worker) as (other, _):
        link, _welcome = await connect(worker.address, "dying", SECRET)
        send(link, submit(1, 10_000), Mailbox(Doorbell()))
        send(other, submit(2, 10_000), Mailbox(Doorbell()))
        await worker.until_stats(running=2)
        link.abort()
        await link.lost
        await worker.until_stats(running=1)


async def test_the_worker_dying_fails_what_it_owed_at_once(address: Address) -> None:
    async with Worker(address) as worker:
        link, _ = await connect(worker.address, "test", SECRET)
        mailbox = Mailbox(Doorbell())
        generation = send(link, submit(1, 10_000), mailbox)
        await worker.until_stats(running=1)
        for peer in worker.server.links:
            peer.abort()
        with pytest.raises(LinkBroken):
            async with asyncio.timeout(5):
                await generation.done
        assert not mailbox.ended, "the fault is the dispatcher's to tell, which could go on elsewhere"
        with pytest.raises(LinkBroken):
            send(link, submit(2), mailbox)


async def test_steps_are_merged_while_the_front_end_is_busy(address: Address) -> None:
    async with Worker(address) as worker, raw(worker) as (reader, writer, challenge):
        writer.write(greet(worker, challenge))
        await receive(reader, 2)  # the welcome, and a step with the worker's figures
        writer.write(encode_frame(submit(1, 100)))
        await worker.until_stats(running=1)
        await worker.until_stats(running=0)
        tokens: list[int] = []
        frames = 0
        while len(tokens) < 100:
            writer.write(encode_frame(Ready()))
            (step,) = await receive(reader, 1)
            assert isinstance(step, Step)
            for segment in step.segments:
                assert segment.delta is not None
                assert segment.delta.offset == len(tokens)
                tokens += segment.delta.token_ids
            frames += 1
        assert tokens == tokens_between(1, 0, 100, WORDS)
        assert frames <= 2


async def test_a_worker_ends_although_a_front_end_reads_nothing(tmp_path: Path) -> None:
    async with Worker(UnixAddress(str(tmp_path / "worker.sock"))) as worker, raw(worker) as (reader, writer, challenge):
        worker.server.tokenizer = bytes(8 * TOKENIZER_PIECE_BYTES)
        writer.write(greet(worker, challenge))
        await receive(reader, 2)
        writer.write(encode_frame(TokenizerRequest(0)) * 4 + encode_frame(submit(1)))
        await worker.until_stats(running=1)
        async with asyncio.timeout(20):
            await worker.server.close()
        assert not worker.server.links


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ((MAX_FRAME_BYTES + 1).to_bytes(4), "frame_too_large"),
        ((5).to_bytes(4) + b"hello", "frame_malformed"),
        (encode_frame(Step([], WorkerStats())), "frame_malformed"),
        (encode_frame(Submit(b"short", (1,), 1, 1)), "frame_malformed"),
        (encode_frame(Challenge(1, b"")), "frame_malformed"),
    ],
)
async def test_an_invalid_frame_closes_only_its_own_link_and_names_the_reason(address: Address, said: bytes, code: str) -> None:
    async with Worker(address) as worker, linked(worker) as (other, _):
        doorbell = Doorbell()
        mailbox = Mailbox(doorbell)
        send(other, submit(3, 300), mailbox)
        async with raw(worker) as (reader, writer, challenge):
            writer.write(greet(worker, challenge))
            await receive(reader, 1)
            writer.write(said)
            goodbye = await until_goodbye(reader)
            assert goodbye.code == code
            assert await reader.read() == b""
        assert await read_all(doorbell, mailbox) == tuple(tokens_between(3, 0, 300, WORDS))


async def until_goodbye(reader: asyncio.StreamReader) -> Goodbye:
    while True:
        (message,) = await receive(reader, 1)
        if isinstance(message, Goodbye):
            return message


async def test_before_the_hello_only_small_frames_are_taken(address: Address) -> None:
    async with Worker(address) as worker, raw(worker) as (reader, writer, _):
        writer.write((1_000_000).to_bytes(4))
        assert (await until_goodbye(reader)).code == "frame_too_large"


async def test_work_before_the_hello_is_refused(address: Address) -> None:
    async with Worker(address) as worker, raw(worker) as (reader, writer, _):
        writer.write(encode_frame(Cancel(())))
        assert (await until_goodbye(reader)).code == "frame_malformed"


async def test_another_version_is_refused_by_name(address: Address) -> None:
    async with Worker(address) as worker, raw(worker) as (reader, writer, challenge):
        writer.write(greet(worker, challenge, version=99))
        goodbye = await until_goodbye(reader)
        assert goodbye.code == "handshake_refused"
        assert "version 99" in goodbye.message


async def test_a_wrong_secret_is_refused_on_both_sides(address: Address) -> None:
    async with Worker(address) as worker:
        async with raw(worker) as (reader, writer, challenge):
            writer.write(greet(worker, challenge, secret="a guess"))
            assert (await until_goodbye(reader)).code == "handshake_refused"
        with pytest.raises(HandshakeRefused, match="does not know this link's secret"):
            await connect(worker.address, "test", "a guess")


async def test_a_worker_that_does_not_know_the_secret_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "false.sock")
    connections: list[asyncio.StreamWriter] = []

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(encode_frame(Challenge(PROTOCOL_VERSION, b"n" * 32)))
        await receive(reader, 1)
        writer.write(encode_frame(Welcome("impostor", b"no proof", MODEL)))

    async with await asyncio.start_unix_server(impostor, path):
        with pytest.raises(HandshakeRefused, match="secret"):
            await connect(UnixAddress(path), "test", SECRET)
        for writer in connections:
            writer.close()


def test_tcp_needs_a_secret() -> None:
    runtime = WorkerRuntime(Simulator(SimulatorConfig(), MODEL, Vocabulary(WORDS, 1)))
    with pytest.raises(ConfigError, match=r"tcp://0.0.0.0:7000.*PENSTOCK_LINK_SECRET"):
        WorkerServer(runtime, "w", TcpAddress("0.0.0.0", 7000), "")


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/w.sock", UnixAddress("/run/w.sock")),
        ("tcp://10.0.0.1:7000", TcpAddress("10.0.0.1", 7000)),
        ("tcp://[::1]:7000", TcpAddress("::1", 7000)),
    ],
)
def test_addresses(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert parse_address(str(address)) == address


@pytest.mark.parametrize("text", ["", "unix:", "tcp://", "tcp://host", "tcp://host:x", "tcp://host:70000", "http://host:1", "host:1"])
def test_a_bad_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected unix:/path or tcp://host:port"):
        parse_address(text)


async def test_only_this_user_can_reach_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    async with Worker(UnixAddress(str(path))):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("end", [None, Finish("stop")])
async def test_a_gap_from_the_worker_fails_only_that_generation(tmp_path: Path, end: Finish | None) -> None:
    """The test's worker skips a token: that generation fails, the link and the other generation go on."""
    path = str(tmp_path / "skips.sock")
    connections: list[asyncio.StreamWriter] = []
    first, second = (1).to_bytes(16), (2).to_bytes(16)

    async def skips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        writer.write(encode_frame(Challenge(PROTOCOL_VERSION, b"n" * 32)))
        (hello,) = await receive(reader, 1)
        assert isinstance(hello, Hello)
        writer.write(encode_frame(Welcome("skips", Handshake.of(b"n" * 32, hello).proof(SECRET, "worker", "skips"), MODEL)))
        await receive(reader, 2)
        writer.write(encode_frame(Step([Segment(first, Delta(0, (5,))), Segment(second, Delta(0, (5,)))], WorkerStats())))
        writer.write(
            encode_frame(Step([Segment(first, Delta(2, (7,)), end), Segment(second, Delta(1, (6,)), Finish("stop"))], WorkerStats()))
        )

    async with await asyncio.start_unix_server(skips, path):
        link, _ = await connect(UnixAddress(path), "test", SECRET)
        doorbell = Doorbell()
        whole = Mailbox(doorbell)
        broken = send(link, submit(1), Mailbox(Doorbell()))
        send(link, submit(2), whole)
        with pytest.raises(GenerationFault, match="expected the token at offset 1"):
            await broken.done
        assert await read_all(doorbell, whole) == (5, 6)
        active = link.active
        link.abort()
        await link.lost
        for writer in connections:
            writer.close()
    assert active == (1 if end is None else 0), "it is open until the worker has ended it"


@asynccontextmanager
async def hand_driven_link(folder: Path) -> AsyncIterator[tuple[WorkerLink, WorkerRuntime, HandDriven]]:
    backend = HandDriven()
    runtime, address = WorkerRuntime(backend), UnixAddress(str(folder / "worker.sock"))
    await runtime.start()
    server = WorkerServer(runtime, "worker-0", address, SECRET)
    await server.start()
    link, _ = await connect(address, "test", SECRET)
    try:
        yield link, runtime, backend
    finally:
        link.abort()
        await link.lost
        await server.close()
        await runtime.close()


async def test_only_what_an_engine_does_shows_that_it_lives(tmp_path: Path) -> None:
    """Every request changes the figures of a worker, which it reports though its engine hangs."""
    async with hand_driven_link(tmp_path) as (link, runtime, backend):
        send(link, submit(0), Mailbox(Doorbell()))
        await until(lambda: len(backend.active) == 1)
        backend.step(Segment((0).to_bytes(16), Delta(0, (5,))))
        await until(lambda: link.unbegun == 0)
        heard_at, life_signs = link.heard_at, link.life_signs
        for number in range(1, 5):
            link.tick()
            frames = link.frames
            send(link, submit(number), Mailbox(Doorbell()))
            await until(lambda: link.frames > frames)  # noqa: B023
        backend.step(Segment((4).to_bytes(16), None, Fault("unsupported", "not here")))
        await until(lambda: link.active == 4)
        runtime.ports[0].transfers.append(TransferReport(b"t" * 16, "failed"))
        backend.step(transfers=[TransferReport(b"t" * 16, "failed")])
        reports = asyncio.create_task(link.describe_sessions(["s"]))
        await until(lambda: bool(backend.questions))
        backend.questions[0].set_result([])
        await reports
        assert (link.silent_ticks, link.heard_at, link.life_signs) == (4, heard_at, life_signs)
        backend.step(Segment((1).to_bytes(16), Delta(0, (5,))))
        await until(lambda: link.silent_ticks == 0)
        assert (link.heard_at > heard_at, link.life_signs) == (True, life_signs + 1)
