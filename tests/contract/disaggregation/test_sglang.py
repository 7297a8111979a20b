"""Two real SGLangs: one computes a prompt, the other gets its KV at the same time and continues. `make test-disaggregation` runs this.

They are worker processes, because two SGLangs do not live in one. Their kernels are replaced as in all tests of SGLang on a CPU, and NIXL
takes their memory for the machine's own: tests/engines/pairs. The order of the tests counts: the last one kills an engine.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from chat_model import chat_model, random_prompt
from contract.backends.judges import ModelJudge
from contract.backends.rig import GREEDY
from contract.backends.setups import SETUPS
from penstock.cluster.links.worker_link import WorkerLink, connect
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import UnixAddress
from penstock.wire.errors import GenerationFault, LinkBroken
from penstock.wire.messages import Export, KvSource, ModelInfo, Role, Submit
from workers import Sent, send

pytest.importorskip("nixl")
pytest.importorskip("sglang")
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:::(?!penstock)")]

SECONDS = 300.0
PATIENCE = "8"
# Of a half whose partner never came. SGLang's own are five minutes; a front end cancels both at once.
ALONE_SECONDS = "20"
FLAGS: dict[Role, str] = {
    "prefill": "--disable-overlap-schedule --enable-metrics",
    "decode": "--disable-overlap-schedule --disaggregation-decode-retraction-backup none",
}


class Half:
    """A worker process and the link to it."""

    link: WorkerLink
    model: ModelInfo

    def __init__(self, role: Role, folder: Path, core: int) -> None:
        setup, self.address, self.metrics = SETUPS["sglang"], UnixAddress(str(folder / f"{role}.sock")), folder / role
        self.metrics.mkdir()
        arguments = setup.arguments(chat_model(), "--listen", str(self.address), "--role", role, "--kv-patience", PATIENCE)
        arguments[arguments.index("--engine-args") + 1] += f" {FLAGS[role]}"
        on_loopback = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", "PROMETHEUS_MULTIPROC_DIR": str(self.metrics)}
        on_loopback["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] = ALONE_SECONDS
        started = ["taskset", "-c", str(core), sys.executable, "-m", "penstock", *arguments]
        self.worker = psutil.Popen(started, env={**os.environ, **setup.environment, **on_loopback})

    async def connected(self) -> None:
        async with asyncio.timeout(SECONDS):
            while True:
                try:
                    self.link, welcome = await connect(self.address, "test", "")
                except LinkBroken:
                    assert self.worker.poll() is None
                    await asyncio.sleep(0.1)
                else:
                    self.model = welcome.model
                    return

    @property
    def processes(self) -> list[psutil.Process]:
        return [self.worker, *self.worker.children(recursive=True)]

    def sent_megabytes(self) -> float:
        """SGLang's own count of the KV that it has sent."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.metrics))  # type: ignore[no-untyped-call]
        found = [
            sample.value for metric in registry.collect() for sample in metric.samples if sample.name == "sglang:kv_transfer_total_mb_sum"
        ]
        return sum(found)


class Halves:
    """Both, on an event loop that is kept between the tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._folder = tempfile.TemporaryDirectory(prefix="pair-")
        self.judge = ModelJudge(chat_model())
        self.judge.expected(Submit(bytes(16), (5,), 1, 0), (5,))
        self.prefill, self.decode = (Half(role, Path(self._folder.name), core) for core, role in enumerate(FLAGS))

    def connect(self) -> None:
        self.run(self.prefill.connected())
        self.run(self.decode.connected())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(work, SECONDS))

    def close(self) -> None:
        for half in (self.prefill, self.decode):
            for process in half.processes:
                process.kill()
            half.worker.wait()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
        self._folder.cleanup()

    def begin_prefill(self, prompt: tuple[int, ...], transfer: bytes) -> Sent:
        export = Export(transfer, 10.0)
        request = Submit(os.urandom(16), prompt, 0, seed=1, sampling=GREEDY, ignore_eos=True, export=export)
        return send(self.prefill.link, request, Mailbox(Doorbell()))

    def begin_decode(self, prompt: tuple[int, ...], transfer: bytes, address: str | None = None) -> tuple[Submit, Sent, Mailbox]:
        source, mailbox = KvSource(transfer, address or self.prefill.model.kv_address, waits=True), Mailbox(Doorbell())
        request = Submit(os.urandom(16), prompt, 16, seed=1, sampling=GREEDY, ignore_eos=True, source=source)
        return request, send(self.decode.link, request, mailbox), mailbox

    async def refused(self, generation: Sent) -> None:
        """Another worker can continue it."""
        with pytest.raises(GenerationFault) as caught:
            await generation.done
        assert (caught.value.fault.code, caught.value.fault.retryable) == ("transfer_failed", True)


@pytest.fixture(scope="module")
def halves() -> Iterator[Halves]:
    halves = Halves()
    try:
        halves.connect()
        yield halves
    finally:
        halves.close()


@pytest.mark.parametrize("length", [20, 600, 1500])
def test_the_tokens_are_those_of_one_engine_and_the_kv_was_moved(halves: Halves, length: int) -> None:
    async def check() -> None:
        transfer, prompt, before = os.urandom(16), random_prompt(f"moved {length}", length), halves.prefill.sent_megabytes()
        computed = halves.begin_prefill(prompt, transfer)
        request, continued, mailbox = halves.begin_decode(prompt, transfer)
        await continued.done
        await computed.done
        delta, _ = mailbox.take()
        assert delta is not None
        assert len(delta.token_ids) == 16
        assert list(delta.token_ids) == halves.judge.expected(request, delta.token_ids)
        # Two layers, two heads of 32 numbers, twice, in float32.
        expected = length * 1024 / 2**20
        while halves.prefill.sent_megabytes() - before < 0.9 * expected:
            await asyncio.sleep(0.05)

    halves.run(check())


def test_a_cancel_at_decode_ends_the_other_half(halves: Halves) -> None:
    """Only decode is told. Prefill's half ends with a fault, at last when it was left alone for too long, or it had already sent
    everything."""

    async def check() -> None:
        transfer, prompt = os.urandom(16), random_prompt("cancelled", 1500)
        request, _, _ = halves.begin_decode(prompt, transfer)
        computed = halves.begin_prefill(prompt, transfer)
        halves.decode.link.cancel(request.id)
        await asyncio.wait([computed.done])

    halves.run(check())


def test_prefill_out_of_reach(halves: Halves) -> None:
    async def check() -> None:
        _, generation, _ = halves.begin_decode(random_prompt("out of reach", 100), os.urandom(16), "tcp://127.0.0.1:9")
        await halves.refused(generation)

    halves.run(check())


def test_prefill_that_never_hears_of_it(halves: Halves) -> None:
    async def check() -> None:
        _, generation, _ = halves.begin_decode(random_prompt("alone", 100), os.urandom(16))
        await halves.refused(generation)

    halves.run(check())


def test_both_still_work(halves: Halves) -> None:
    async def check() -> None:
        transfer, prompt = os.urandom(16), random_prompt("after all that", 200)
        request, continued, mailbox = halves.begin_decode(prompt, transfer)
        halves.begin_prefill(prompt, transfer)
        await continued.done
        delta, _ = mailbox.take()
        assert delta is not None
        assert list(delta.token_ids) == halves.judge.expected(request, delta.token_ids)

    halves.run(check())


@pytest.mark.parametrize("fate", ["suspend", "kill"])
def test_prefill_that_is_frozen_or_killed(halves: Halves, fate: str) -> None:
    """The last tests: nobody thaws it."""

    async def check() -> None:
        for process in halves.prefill.processes:
            getattr(process, fate)()
        _, generation, _ = halves.begin_decode(random_prompt(fate, 100), os.urandom(16))
        await halves.refused(generation)

    halves.run(check())
