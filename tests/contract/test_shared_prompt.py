"""Choices of one prompt: it travels to each worker once, is one object there, and is dropped with the last of them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec import structs

from penstock.backends.simulator import Simulator, tokens_between
from penstock.cluster.links.worker_link import connect
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import UnixAddress
from penstock.wire.errors import LinkBroken
from penstock.wire.messages import Submit
from proxy import Proxy
from workers import SECRET, WORDS, FrontEnd, Reader, Worker, expected, make_model, send, submit, until

PROMPT = tuple(tokens_between(5, 0, 20_000, WORDS))
PROMPT_BYTES = 3 * len(PROMPT)
"""As msgpack writes ids over 255 and below 65,536."""

Started = list[tuple[Reader, asyncio.Task[None]]]


class Seen(Simulator):
    """A simulator that keeps the prompts it was given."""

    def submit(self, request: Submit) -> None:
        self.prompts = [*getattr(self, "prompts", []), request.token_ids]
        super().submit(request)


def make_worker(folder: Path, name: str, max_batch: int = 1000) -> Worker:
    return Worker(folder, name, make_model(max_batch=max_batch), max_batch=max_batch, kv_blocks=65_536, step_ms=1.0)


def choices(count: int, max_tokens: int = 8, prompt: tuple[int, ...] = PROMPT) -> list[Submit]:
    name = (999).to_bytes(16, "big")
    return [structs.replace(submit(number, max_tokens), token_ids=prompt, prompt=name) for number in range(count)]


def start(front_end: FrontEnd, requests: list[Submit]) -> Started:
    turn = front_end.turn()
    return [front_end.start(request, turn) for request in requests]


def kept_prompts(worker: Worker) -> int:
    return sum(len(port.prompts) for port in worker.runtime.ports)


async def finish(started: Started, max_tokens: int = 8) -> None:
    async with asyncio.timeout(60):
        await asyncio.gather(*[task for _, task in started])
    assert [reader.tokens for reader, _ in started] == [expected(number, max_tokens) for number in range(len(started))]


async def behind_proxies(stack: AsyncExitStack, folder: Path, workers: list[Worker]) -> list[Proxy]:
    """The workers are reached through proxies that count."""
    proxies = [Proxy(worker.address.path, folder / f"{worker.name}.proxy") for worker in workers]
    for worker, proxy in zip(workers, proxies, strict=True):
        await stack.enter_async_context(worker)
        await stack.enter_async_context(proxy)
        worker.address = UnixAddress(proxy.path)
    return proxies


async def test_128_choices_send_their_prompt_once_to_each_worker(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [make_worker(tmp_path, name) for name in "ab"]
        proxies = await behind_proxies(stack, tmp_path, workers)
        front_end = await stack.enter_async_context(FrontEnd(workers))
        before = [proxy.bytes_forward for proxy in proxies]
        await finish(start(front_end, choices(128)))
        sent = [proxy.bytes_forward - start for proxy, start in zip(proxies, before, strict=True)]
        assert all(count < PROMPT_BYTES + 128 * 1000 for count in sent), f"a prompt of {PROMPT_BYTES:,} bytes took {sent}"
        assert sum(sent) > PROMPT_BYTES, "the prompt was sent"
        assert not front_end.dispatcher.shared_prompts
        await until(lambda: kept_prompts(workers[0]) + kept_prompts(workers[1]) == 0)


async def test_the_worker_has_one_tuple_for_all_choices(tmp_path: Path) -> None:
    worker = make_worker(tmp_path, "a")
    worker.simulator.__class__ = Seen
    async with worker, FrontEnd([worker]) as front_end:
        await finish(start(front_end, choices(10)))
        prompts = worker.simulator.prompts  # type: ignore[attr-defined]
        assert prompts[0] == PROMPT
        assert all(prompt is prompts[0] for prompt in prompts)


async def test_choices_that_waited_in_the_queue_find_the_prompt_there(tmp_path: Path) -> None:
    """The worker computes one at a time, so each is sent after the one before has ended."""
    async with AsyncExitStack() as stack:
        worker = make_worker(tmp_path, "a", max_batch=1)
        (proxy,) = await behind_proxies(stack, tmp_path, [worker])
        front_end = await stack.enter_async_context(FrontEnd([worker], worker_queue=1))
        before = proxy.bytes_forward
        started = start(front_end, choices(20))
        assert front_end.dispatcher.queued >= 18
        await finish(started)
        assert proxy.bytes_forward - before < 2 * PROMPT_BYTES
        await until(lambda: kept_prompts(worker) == 0)


async def test_cancelled_choices_free_the_prompt(tmp_path: Path) -> None:
    """Running ones, and ones that wait."""
    async with make_worker(tmp_path, "a", max_batch=2) as worker, FrontEnd([worker], worker_queue=1) as front_end:
        started = start(front_end, choices(10, max_tokens=50_000))
        await until(lambda: len(started[0][0].tokens) > 0)
        assert kept_prompts(worker) == 1
        for _, task in started[:9]:
            task.cancel()
        await asyncio.gather(*[task for _, task in started[:9]], return_exceptions=True)
        assert kept_prompts(worker) == 1, "the tenth still needs it"
        started[9][1].cancel()
        await asyncio.gather(started[9][1], return_exceptions=True)
        assert not front_end.dispatcher.shared_prompts
        await until(lambda: kept_prompts(worker) == 0 and worker.simulator.stats().running == 0)


async def test_choices_that_the_queue_refuses_free_the_prompt(tmp_path: Path) -> None:
    async with make_worker(tmp_path, "a", max_batch=1) as worker, FrontEnd([worker], worker_queue=1, max_queued=2) as front_end:
        requests = choices(4, max_tokens=50)
        started = start(front_end, requests[:3])
        turn = front_end.turn()
        with pytest.raises(Exception, match="at most 2 generations wait"):
            front_end.start(requests[3], turn)
        await finish(started, 50)
        assert not front_end.dispatcher.shared_prompts


async def test_a_migration_sends_the_prompt_once_to_the_next_worker(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        workers = [make_worker(tmp_path, name) for name in "ab"]
        proxies = await behind_proxies(stack, tmp_path, workers)
        front_end = await stack.enter_async_context(FrontEnd(workers[:1]))
        started = start(front_end, choices(40, max_tokens=300))
        await until(lambda: min(len(reader.tokens) for reader, _ in started) > 20)
        front_end.pool.discovered([workers[1].address])
        await until(lambda: len(front_end.pool.members) == 2)
        before = proxies[1].bytes_forward
        await workers[0].server.close()
        await finish(started, 300)
        sent = proxies[1].bytes_forward - before
        assert PROMPT_BYTES < sent < PROMPT_BYTES + 40 * 4000
        await until(lambda: kept_prompts(workers[1]) == 0)


async def test_a_prompt_that_was_never_sent_closes_the_link(tmp_path: Path) -> None:
    async with make_worker(tmp_path, "a") as worker:
        link, _ = await connect(worker.address, "test", SECRET)
        first, second = choices(2)
        send(link, first, Mailbox(Doorbell()))
        link.drop_prompt(first.prompt)
        link.drop_prompt(first.prompt)
        again = send(link, second, Mailbox(Doorbell()))
        await until(lambda: worker.simulator.stats().running == 2)
        worker.runtime.ports[0].prompts.clear()
        lost = send(link, structs.replace(second, id=b"3" * 16), Mailbox(Doorbell()))
        with pytest.raises(LinkBroken, match="which was not sent"):
            await lost.done
        assert again.done.done()
