"""Two real vLLMs: one computes a prompt, the other gets its KV and goes on. `make test-disaggregation` runs this; one engine start each."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from contract.disaggregation.pair import Pair, running_pair
from penstock.backends.external.handover import Ticket, unpack_ticket
from penstock.backends.external.in_process import free_port
from penstock.backends.vllm.handover import Whereabouts
from penstock.kv.blocks import block_hashes, tenant_root

pytest.importorskip("nixl")
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore:::(?!penstock)")]


class Running:
    """A pair on an event loop that is kept between the tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._context = running_pair("vllm")
        self.pair: Pair = self.loop.run_until_complete(self._context.__aenter__())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    def close(self) -> None:
        self.loop.run_until_complete(self._context.__aexit__(None, None, None))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


@pytest.mark.parametrize("length", [20, 600, 1500, 1024])
def test_the_tokens_are_those_of_one_engine_and_the_kv_was_moved(running: Running, length: int) -> None:
    """vLLM's own counter has the bytes of every block of the prompt."""

    async def check(pair: Pair) -> None:
        transfer, prompt = os.urandom(16), pair.prompt(f"moved {length}", length)
        ticket = await pair.ticket(prompt, transfer)
        generation = await pair.finish(pair.decode, pair.decoded(prompt, 16, transfer, ticket))
        generation.check()
        assert pair.is_right(generation)
        report, model = pair.decode.report(transfer), pair.decode.backend.model
        assert report is not None
        assert (report.outcome, report.blocks) == ("done", -(-length // model.block_size))
        assert report.size == report.blocks * model.kv_block_bytes

    running.run(check(running.pair))


def test_a_ticket_is_not_used_after_its_lease(running: Running) -> None:
    """The prefill engine has given the memory to other prompts. With a ticket that lies about its age, vLLM reads them and goes on with
    wrong tokens, without an error; so if this test passes, the age of the ticket is what saves us."""

    async def check(pair: Pair) -> None:
        transfer, alice, prompt = os.urandom(16), tenant_root("alice"), pair.prompt("stale", 600)
        ticket = await pair.ticket(prompt, transfer, root=alice)
        names = block_hashes(prompt, pair.prefill.backend.model.block_size, alice)
        await pair.until(lambda: pair.prefill.cached.issuperset(names))
        fillers = 0
        while pair.prefill.cached.intersection(names):
            fillers += 1
            await pair.finish(pair.prefill, pair.request(pair.prompt(f"filler {fillers}", 1500), 1))
        assert pair.prefill.report(transfer, lambda report: report.outcome == "expired") is not None
        late = await pair.finish(pair.decode, pair.decoded(prompt, 16, transfer, ticket, root=tenant_root("bob")))
        late.check()
        assert pair.is_right(late)
        assert "old" in pair.failure(transfer)
        lie, young = os.urandom(16), replace(unpack_ticket(ticket), made=time.time()).pack()
        wrong = await pair.finish(pair.decode, pair.decoded(prompt, 16, lie, young, root=tenant_root("carol")))
        wrong.check()
        assert not pair.is_right(wrong)
        assert pair.outcome(lie) == "done"

    running.run(check(running.pair))


def test_an_engine_that_cannot_be_reached(running: Running) -> None:
    async def check(pair: Pair) -> None:
        transfer, prompt = os.urandom(16), pair.prompt("unreachable", 300)
        ticket = unpack_ticket(await pair.ticket(prompt, transfer))
        where = msgspec.msgpack.decode(ticket.body, type=Whereabouts)
        elsewhere = replace(where, remote_port=free_port("127.0.0.1"), remote_engine_id="another")
        await _recovered(pair, prompt, transfer, replace(ticket, body=msgspec.msgpack.encode(elsewhere)))

    running.run(check(running.pair))


@pytest.mark.parametrize("tampered", [{"remote_block_ids": [[1]]}, {"remote_block_ids": [list(range(11))]}], ids=["few", "many"])
def test_a_ticket_that_would_end_the_engine_is_refused(running: Running, tampered: dict[str, Any]) -> None:
    async def check(pair: Pair) -> None:
        transfer, prompt = os.urandom(16), pair.prompt("tampered", 300)
        ticket = unpack_ticket(await pair.ticket(prompt, transfer))
        body = msgspec.msgpack.encode(msgspec.msgpack.decode(ticket.body) | tampered)
        await _recovered(pair, prompt, transfer, replace(ticket, body=body))
        assert "blocks" in pair.failure(transfer)

    running.run(check(running.pair))


def test_an_engine_that_is_frozen(running: Running) -> None:
    async def check(pair: Pair) -> None:
        transfer, prompt = os.urandom(16), pair.prompt("frozen", 300)
        ticket = unpack_ticket(await pair.ticket(prompt, transfer))
        pair.prefill.freeze()
        try:
            await _recovered(pair, prompt, transfer, ticket)
        finally:
            pair.prefill.thaw()

    running.run(check(running.pair))


def test_an_engine_that_is_killed(running: Running) -> None:
    """The last test: the engine is gone."""

    async def check(pair: Pair) -> None:
        transfer, prompt = os.urandom(16), pair.prompt("killed", 300)
        ticket = unpack_ticket(await pair.ticket(prompt, transfer))
        pair.prefill.process.kill()
        await pair.until(lambda: pair.prefill.failures == 1)
        await _recovered(pair, prompt, transfer, ticket)
        assert pair.decode.failures == 0

    running.run(check(running.pair))


async def _recovered(pair: Pair, prompt: tuple[int, ...], transfer: bytes, ticket: Ticket) -> None:
    """The decode engine has computed the prompt itself."""
    generation = await pair.finish(pair.decode, pair.decoded(prompt, 16, transfer, ticket.pack()))
    generation.check()
    assert pair.is_right(generation)
    assert pair.outcome(transfer) == "failed"
