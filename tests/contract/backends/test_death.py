"""The engine dies in the middle of everything: every generation gets one fault that another worker can go on from.

These come last, for what was killed is of no use any more.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from contract.backends.rig import Generation, Rig
from contract.backends.setups import MAX_BATCH
from penstock.cluster.links.worker_link import WorkerLink, connect
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.address import UnixAddress
from penstock.wire.errors import LinkBroken
from penstock.wire.messages import Fault
from workers import send

SECRET = ""
SOURCES = Path(__file__).parents[3] / "src"


def test_the_engine_dies(rig: Rig) -> None:
    if rig.setup.engine == "simulator":
        rig.run(_kill_the_worker(rig))
    elif rig.lacks("own process"):
        _break_a_copy(rig)
    else:
        _check_death(rig, lambda: _engine_process(rig).kill())


def _engine_process(rig: Rig) -> psutil.Process:
    """The process in which the engine computes."""
    assert rig.setup.process is not None
    children = psutil.Process().children(recursive=True)
    (found,) = [child for child in children if rig.setup.process in " ".join([child.name(), *child.cmdline()])]
    return found


def _check_death(rig: Rig, kill: Callable[[], object]) -> None:
    """Some run, some are queued, some ended before: those that had not get their fault, once, and so does whoever comes later."""

    async def die() -> None:
        (ended,) = await rig.finish([rig.request(rig.prompt("ended before", 20), 5)])
        requests = [rig.request(rig.prompt(f"to die {number}", 20 + number), 1900) for number in range(MAX_BATCH + 4)]
        dying = [rig.begin(request) for request in requests]
        await rig.until(lambda: sum(generation.made > 0 for generation in dying) >= 4)
        kill()
        await rig.until(lambda: rig.failures > 0)
        await rig.ended(*dying)
        for generation in dying:
            _check_fault(generation)
        rig.check_exact(*dying)
        ended.check()
        late = rig.begin(rig.request(rig.prompt("too late", 20), 5))
        await rig.ended(late)
        _check_fault(late)
        assert not late.tokens
        stats = rig.backend.stats()
        assert isinstance(stats.running, int)
        assert not await rig.backend.describe_sessions(["nobody"])
        await rig.until(lambda: rig.failures == 1)
        assert rig.failures == 1

    rig.run(die())


def _check_fault(generation: Generation) -> None:
    assert isinstance(generation.terminal, Fault), generation.terminal
    assert (generation.terminal.code, generation.terminal.retryable) == ("engine_failed", True)


def _break_a_copy(rig: Rig) -> None:
    """The embedded engine has no process to kill. One more of it, whose model breaks when it is told to."""
    from penstock.backends.embedded import EmbeddedBackend

    class Broken(Exception):
        pass

    broken: list[None] = []
    with Rig(rig.setup) as copy:
        backend = copy.backend
        assert isinstance(backend, EmbeddedBackend)

        def break_model() -> None:
            def step(engine: object) -> None:
                raise Broken

            backend.ask(step)
            broken.append(None)

        _check_death(copy, break_model)
    assert broken


async def _connected(rig: Rig, address: UnixAddress) -> WorkerLink:
    """As soon as the worker listens."""
    while True:
        try:
            link, _ = await connect(address, "test", SECRET)
        except LinkBroken:
            await rig.breathe()
        else:
            return link


async def _kill_the_worker(rig: Rig) -> None:
    """The simulator has no engine apart from its worker: the link breaks, once for each generation, and with all that had come."""
    address = rig.folder / "killed.sock"
    arguments = rig.setup.arguments(rig.directory, "--listen", f"unix:{address}", "--step-ms", "5")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCES), os.environ.get("PYTHONPATH")]))}
    worker = await asyncio.create_subprocess_exec(sys.executable, "-m", "penstock", *arguments, env=environment)
    try:
        link = await _connected(rig, UnixAddress(str(address)))
        requests = [rig.request(rig.prompt(f"to die {number}", 20 + number), 1900) for number in range(MAX_BATCH + 4)]
        mailboxes = [Mailbox(Doorbell()) for _ in requests]
        begun = [send(link, request, mailbox) for request, mailbox in zip(requests, mailboxes, strict=True)]
        await rig.until(lambda: sum(bool(mailbox.next_offset) for mailbox in mailboxes) >= MAX_BATCH)
        worker.kill()
        await asyncio.wait([generation.done for generation in begun])
        await link.lost
        for request, mailbox, generation in zip(requests, mailboxes, begun, strict=True):
            assert isinstance(generation.done.exception(), LinkBroken)
            delta, terminal = mailbox.take()
            assert terminal is None
            made = () if delta is None else delta.token_ids
            assert list(made) == rig.judge.expected(request, made)
    finally:
        if worker.returncode is None:
            worker.kill()
        await worker.wait()
