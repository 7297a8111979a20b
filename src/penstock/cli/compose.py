"""The one place that wires objects together: a worker, a front end, and the two on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.backends.simulated_cache import BLOCK_SIZE
from penstock.backends.simulator import Simulator, Vocabulary
from penstock.cli.config import FrontEndSettings, ServeSettings, WorkerSettings
from penstock.cluster.dispatch import Dispatcher
from penstock.cluster.pool import WorkerPool
from penstock.cluster.supervise import ChildSpec, Supervisor
from penstock.cluster.worker_server import WorkerServer
from penstock.http.admission import Admission
from penstock.http.app import make_app
from penstock.http.models import Models
from penstock.http.server import HttpServer, open_listener, raise_file_limit
from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally
from penstock.text.load import BUILT_IN, load_tokenizer
from penstock.wire.messages import ModelInfo
from penstock.worker.backend import Backend
from penstock.worker.runtime import WorkerRuntime

log = logging.getLogger(__name__)

SIMULATED_CONTEXT = 131_072


async def run_worker(settings: WorkerSettings) -> int:
    """One worker, until SIGTERM."""
    failed = asyncio.Event()
    runtime = WorkerRuntime(make_backend(settings, failed.set))
    server = WorkerServer(runtime, settings.name, settings.listen, settings.secret)
    await runtime.start()
    await server.start()
    _tune_garbage_collection()
    with _stop_signals() as stopped, _parent_watch(settings.exit_with_parent):
        waits = [asyncio.create_task(stopped.wait()), asyncio.create_task(failed.wait())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    runtime.drain()
    await _until(lambda: runtime.is_idle, settings.grace)
    await server.close()
    await runtime.close()
    log.info("%s has ended", settings.name)
    return 1 if failed.is_set() else 0


def make_backend(settings: WorkerSettings, on_failure: Callable[[], None]) -> Backend:
    """The engine that the settings name."""
    if settings.engine == "embedded":
        # torch is heavy, and an extra.
        from penstock.cli.embedded import make_embedded

        return make_embedded(settings, on_failure)
    return _make_simulator(settings)


def _make_simulator(settings: WorkerSettings) -> Backend:
    tokenizer_name = str(settings.model.resolve()) if settings.model is not None else BUILT_IN
    tokenizer = load_tokenizer(tokenizer_name)
    model = ModelInfo(
        name=settings.served_name or (settings.model.resolve().name if settings.model is not None else settings.engine),
        engine=settings.engine,
        tokenizer=tokenizer_name,
        vocab_size=tokenizer.vocab_size,
        context_length=settings.context_length or SIMULATED_CONTEXT,
        block_size=BLOCK_SIZE,
    )
    return Simulator(settings.simulator, model, Vocabulary(tuple(tokenizer.ordinary_ids), tokenizer.end_id))


async def run_front_end(settings: FrontEndSettings) -> int:
    """One front end, until SIGTERM."""
    file_limit = raise_file_limit()
    listener = open_listener(settings.host, settings.port)
    if not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        log.warning("--host %s can be reached from other machines, and there are no API keys yet: anyone there can use it", settings.host)
    models = Models()
    tally = Tally()
    metrics = FrontEndMetrics(tally)
    admission = Admission(settings.limits, tally)
    pool = WorkerPool(settings.workers, settings.name, settings.secret, models.prepare)
    dispatcher = Dispatcher(pool)
    models.observe(lambda: [member.model for member in pool.members])
    metrics.observe(
        lambda: ClusterReading({member.name: member.link.stats for member in pool.members}, pool.links_lost, dispatcher.decisions)
    )
    server = HttpServer(make_app(models, dispatcher, admission, metrics), listener, file_limit, tally)
    host, port = listener.getsockname()[:2]
    with _stop_signals() as stopped, _parent_watch(settings.exit_with_parent):
        async with pool:
            serving = asyncio.create_task(server.serve(), name="http server")
            ready = asyncio.create_task(_announce(pool, f"http://{f'[{host}]' if ':' in host else host}:{port}"))
            stalls = asyncio.create_task(admission.watch_stalls(), name="stall watch")
            await asyncio.wait([asyncio.create_task(stopped.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
            admission.drain()
            if not await _until(admission.idle.is_set, settings.grace):
                admission.expel()
                await _until(admission.idle.is_set, 2.0)
            for task in (ready, stalls):
                task.cancel()
            server.stop()
            await asyncio.wait([serving, ready, stalls])
    log.info("%s has ended", settings.name)
    return 0 if serving.exception() is None else 1


async def run_serve(settings: ServeSettings) -> int:
    """Workers and front end on this machine, each a supervised process."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        addresses = [f"unix:{Path(directory) / f'worker-{index}.sock'}" for index in range(settings.workers)]
        base = [sys.executable, "-m", "penstock"]
        workers = [
            ChildSpec(
                f"worker-{index}",
                [*base, "worker", f"--name=worker-{index}", f"--listen={address}", "--exit-with-parent", *settings.worker_arguments],
                os.environ,
            )
            for index, address in enumerate(addresses)
        ]
        links = [f"--worker={address}" for address in addresses]
        front_end = ChildSpec("frontend", [*base, "frontend", *links, "--exit-with-parent", *settings.front_end_arguments], os.environ)
        supervisor = Supervisor(front_end, workers, settings.grace)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.request_stop)
        return await supervisor.run()


async def _announce(pool: WorkerPool, url: str) -> None:
    await pool.wait_ready()
    _tune_garbage_collection()
    names = sorted({member.model.name for member in pool.members})
    log.info("ready: %s on %s, workers: %d", ", ".join(names), url, len(pool.members))


@contextlib.contextmanager
def _stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM or Ctrl-C sets. A second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def on_signal(number: signal.Signals) -> None:
        if stopped.is_set():
            os._exit(128 + number)
        stopped.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    yield stopped


@contextlib.contextmanager
def _parent_watch(wanted: bool) -> Iterator[None]:
    """Ends the process when standard input ends: the parent holds the other end of it, and is gone then."""
    if not wanted:
        yield
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(sys.stdin.fileno(), lambda: os._exit(1) if not os.read(sys.stdin.fileno(), 1024) else None)
    try:
        yield
    finally:
        loop.remove_reader(sys.stdin.fileno())


async def _until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition came true in time."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _tune_garbage_collection() -> None:
    """What was made at start lives for ever: it is not looked at again. Cycles are rare on the token path, so looks are, too."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
