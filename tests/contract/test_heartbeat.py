"""A host that is gone is noticed on an idle link, from both ends. A worker that is only busy is not taken for one."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from contract.test_dispatch import MuteWorker
from penstock.backends.simulator import Simulator, Vocabulary
from penstock.cluster.links.link import DEAD_HOST_SECONDS, HEARTBEAT_SECONDS
from penstock.cluster.links.worker_link import MAX_UNANSWERED_LOOKS
from penstock.cluster.links.worker_server import MAX_SILENT_LOOKS, WorkerServer
from penstock.config.engines import SimulatorConfig
from penstock.wire.address import TcpAddress
from penstock.wire.codec import encode_frame
from penstock.wire.messages import Ping, Pong
from penstock.worker.runtime import WorkerRuntime
from relay import Relay
from workers import SECRET, WORDS, FrontEnd, Worker, expected, make_model, submit, until

PING, PONG = encode_frame(Ping()), encode_frame(Pong())


class Distant:
    """A real worker behind a relay, which its front ends take for it."""

    def __init__(self, stack: AsyncExitStack, step_ms: float = 1.0, heartbeat_seconds: float = HEARTBEAT_SECONDS) -> None:
        self.simulator = Simulator(SimulatorConfig(step_ms=step_ms), make_model(), Vocabulary(WORDS, 1))
        self.runtime = WorkerRuntime(self.simulator)
        listen = TcpAddress("127.0.0.1", 0)
        self.server = WorkerServer(self.runtime, "distant", listen, SECRET, heartbeat_seconds=heartbeat_seconds)
        self._stack = stack

    async def start(self) -> Relay:
        await self.runtime.start()
        self._stack.push_async_callback(self.runtime.close)
        await self.server.start()
        self._stack.push_async_callback(self.server.close)
        relay = await self._stack.enter_async_context(Relay(TcpAddress("127.0.0.1", self.server.port)))
        self.server.advertised = relay.address
        return relay


def test_three_seconds_are_enough() -> None:
    """The worst case: the worker dies right after its answer, which the next look still finds."""
    assert (MAX_UNANSWERED_LOOKS + 1) * HEARTBEAT_SECONDS <= 3
    assert HEARTBEAT_SECONDS + DEAD_HOST_SECONDS <= 3, "a busy link: the kernel's time, and the look after it"


async def test_a_host_that_is_gone_is_noticed_on_an_idle_link_and_found_again(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        distant = Distant(stack)
        wire = await distant.start()
        near = await stack.enter_async_context(Worker(tmp_path, "near"))
        front_end = await stack.enter_async_context(FrontEnd([near]))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 2)
        await until(lambda: wire.seen.count(PONG) > 0)
        wire.is_dark = True
        await until(lambda: [member.name for member in front_end.pool.members] == ["near"], seconds=30)
        assert 1 <= b"".join(wire.swallowed).count(PING) <= MAX_UNANSWERED_LOOKS + 1, "looks, of a second each"
        assert front_end.pool.links_lost == 1
        for number in range(10):
            turn, reader = await front_end.run(submit(number))
            assert (turn.worker, reader.tokens) == ("near", expected(number, 16))
        assert not front_end.dispatcher.migrations
        wire.is_dark = False
        await until(lambda: len(front_end.pool.members) == 2, seconds=30)


async def test_a_worker_frees_the_generations_of_a_front_end_that_is_gone() -> None:
    async with AsyncExitStack() as stack:
        distant = Distant(stack, heartbeat_seconds=0.02)
        wire = await distant.start()
        front_end = await stack.enter_async_context(FrontEnd([], heartbeat_seconds=0.01))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 1)
        _, task = front_end.start(submit(1, 50_000))
        await until(lambda: distant.simulator.stats().running == 1)
        wire.is_dark = True
        await until(lambda: distant.simulator.stats().running == 0)
        assert distant.simulator.stats().kv_blocks_used == 0
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a packet filter, and the kernel's word about acknowledgements")
async def test_a_host_that_is_gone_is_noticed_on_a_busy_link_from_both_ends() -> None:
    async with AsyncExitStack() as stack:
        distant = Distant(stack)
        wire = await distant.start()
        front_end = await stack.enter_async_context(FrontEnd([]))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 1)
        (silent,) = distant.server.links
        reader, task = front_end.start(submit(1, 2_000))
        await until(lambda: len(reader.tokens) > 10)
        wire.cut_power()
        await until(lambda: silent not in distant.server.links, seconds=20)
        async with asyncio.timeout(20):
            await task
        assert reader.tokens == expected(1, 2_000)
        assert (front_end.pool.links_lost, front_end.pool.stalls) == (1, 0), "the engine was not to blame"


async def test_a_worker_that_reads_nothing_for_seconds_is_not_taken_for_a_host_that_is_gone() -> None:
    """Its process is busy and long prompts fill its buffers. Its kernel says so, which is a sign of life."""
    async with AsyncExitStack() as stack:
        distant = Distant(stack)
        wire = await distant.start()
        front_end = await stack.enter_async_context(FrontEnd([], stall_seconds=16))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 1)
        (member,) = front_end.pool.members
        wire.flows.clear()
        long = range(90_000)
        started = [front_end.start(replace(submit(number), token_ids=tuple(long))) for number in range(20)]
        await until(lambda: member.link.silent_ticks >= 3 * DEAD_HOST_SECONDS or member.link.lost.done(), seconds=30)
        wire.flows.set()
        async with asyncio.timeout(30):
            await asyncio.gather(*[task for _, task in started])
        assert [reader.tokens for reader, _ in started] == [expected(number, 16) for number in range(20)]
        assert front_end.pool.links_lost == 0


async def test_a_worker_that_gives_up_a_busy_front_end_has_not_died(tmp_path: Path) -> None:
    """It says so: its generations go on elsewhere, and none is suspected to have killed it."""
    async with AsyncExitStack() as stack:
        distant = Distant(stack, heartbeat_seconds=0.01)
        wire = await distant.start()
        front_end = await stack.enter_async_context(FrontEnd([]))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 1)
        reader, task = front_end.start(submit(1, 2_000))
        await until(lambda: len(reader.tokens) > 10)
        wire.flows.clear()
        await until(lambda: not distant.server.links)
        near = await stack.enter_async_context(Worker(tmp_path, "near"))
        front_end.pool.discovered([near.address])
        wire.flows.set()
        async with asyncio.timeout(30):
            await task
        assert reader.tokens == expected(1, 2_000)
        assert sum(front_end.dispatcher.migrations.values()) == 1
        assert front_end.dispatcher.suspects.deaths == 0


async def test_a_step_that_takes_long_is_not_a_dead_worker() -> None:
    """Its engine says nothing for hundreds of looks of both ends. Its link answers meanwhile."""
    async with AsyncExitStack() as stack:
        distant = Distant(stack, step_ms=400, heartbeat_seconds=0.002)
        wire = await distant.start()
        front_end = await stack.enter_async_context(FrontEnd([], heartbeat_seconds=0.001))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 1)
        reader, task = front_end.start(submit(1, 3))
        async with asyncio.timeout(20):
            await task
        assert reader.tokens == expected(1, 3)
        assert front_end.pool.links_lost == 0
        assert wire.seen.count(PONG) > 10 * MAX_SILENT_LOOKS, "both ends have looked often enough to give up"


async def test_a_busy_link_has_no_heartbeat_and_an_idle_one_has() -> None:
    async with AsyncExitStack() as stack:
        distant = Distant(stack, step_ms=1)
        wire = await distant.start()
        front_end = await stack.enter_async_context(FrontEnd([], heartbeat_seconds=0.1))
        front_end.pool.discovered([wire.address])
        await until(lambda: len(front_end.pool.members) == 1)
        reader, task = front_end.start(submit(1, 2000))
        await until(lambda: len(reader.tokens) > 100)
        wire.seen.clear()
        await until(lambda: len(reader.tokens) > 1500)
        assert PING not in wire.seen
        await task
        await until(lambda: wire.seen.count(PONG) >= 3)


class Hung(MuteWorker):
    """Its process works and its engine hangs: it answers the heartbeat, and nothing else."""

    answers = True


async def test_a_worker_that_only_answers_the_heartbeat_still_stalls(tmp_path: Path) -> None:
    async with Hung(tmp_path, "hung") as hung, FrontEnd([hung], stall_seconds=0.2, heartbeat_seconds=0.01) as front_end:
        reader, task = front_end.start(submit(1, 50))
        await until(lambda: len(hung.submits) == 1)
        async with Worker(tmp_path, "sound") as sound:
            front_end.pool.discovered([sound.address])
            async with asyncio.timeout(10):
                await task
        assert reader.tokens == expected(1, 50)
        assert front_end.pool.stalls >= 1


async def test_an_idle_worker_that_hangs_loses_its_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with MuteWorker(tmp_path, "mute") as mute, FrontEnd([mute], heartbeat_seconds=0.01) as front_end:
        await until(lambda: front_end.pool.links_lost > 0)
        assert "worker mute has not answered for 0.02 s: its host is gone or hangs" in caplog.text


async def test_a_front_end_that_was_busy_does_not_take_that_for_silence(tmp_path: Path) -> None:
    """Looks are counted, not seconds: the loop runs once after a long pause, and finds the answer that waits in the socket."""
    async with Worker(tmp_path, "a") as worker, FrontEnd([worker], heartbeat_seconds=3600) as front_end:
        link = front_end.pool.members[0].link
        for _ in range(100):
            assert link.beat()
            await until(lambda: link.has_heard)
        assert [link.beat() for _ in range(3)] == [True, True, False], "two looks without an answer, after the one that asked"


async def test_a_busy_worker_is_not_judged_by_its_heartbeat(tmp_path: Path) -> None:
    """Its event loop may be held up for a while, and its generations would be lost. `--worker-stall` decides."""
    async with MuteWorker(tmp_path, "mute") as mute, FrontEnd([mute], heartbeat_seconds=3600) as front_end:
        link = front_end.pool.members[0].link
        _, task = front_end.start(submit(1))
        await until(lambda: len(mute.submits) == 1)
        assert all(link.beat() for _ in range(100))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
