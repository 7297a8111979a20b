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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.api.app import Services, make_app
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.models import Models
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.runner import Runner
from penstock.api.responses.store import SqliteStore
from penstock.api.server import HttpServer, open_listener, raise_file_limit
from penstock.backends.simulator import Simulator, Vocabulary
from penstock.cli.settings import API_KEY_VARIABLE, ENGINES_OF_OTHERS, FrontEndSettings, ServeSettings, WorkerSettings
from penstock.cluster.dispatch import Dispatcher
from penstock.cluster.links.worker_server import WorkerServer
from penstock.cluster.pool import WorkerPool
from penstock.cluster.sessions.sessions import Sessions
from penstock.cluster.supervise import ChildSpec, Supervisor
from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally
from penstock.router.affinity import AffinityStore, MemoryStore
from penstock.router.router import Router
from penstock.text.encoding import Encoder
from penstock.text.tokenizers.cache import TokenizerCache, default_directory
from penstock.text.tokenizers.source import PackedTokenizer, pack_tokenizer
from penstock.text.transcript import Transcripts
from penstock.wire.errors import ConfigError
from penstock.wire.messages import ModelInfo
from penstock.worker.backend import Backend
from penstock.worker.runtime import WorkerRuntime

if TYPE_CHECKING:
    from penstock.cluster.redis_store import RedisStore

log = logging.getLogger(__name__)

SIMULATED_CONTEXT = 131_072
# How long a worker that ends waits for its front ends to take what it hands over.
HAND_OVER_SECONDS = 2.0
# How long an engine that is told to end while it loads may take for that.
ABANDON_SECONDS = 5.0


async def run_worker(settings: WorkerSettings) -> int:
    """One worker, until SIGTERM."""
    failed = asyncio.Event()
    backend, tokenizer = make_backend(settings, failed.set)
    runtime = WorkerRuntime(backend)
    server = WorkerServer(runtime, settings.name, settings.listen, settings.secret, tokenizer.data)
    async with contextlib.AsyncExitStack() as stack:
        store = None if settings.store is None else await _open_redis(settings.store, stack)
        with _stop_signals() as stopped, _parent_watch(settings.exit_with_parent):
            try:
                if not await _load(runtime, stopped):
                    return 0
                await server.start()
            except BaseException:
                # What the engine has started would outlive the mistake: threads and processes that nobody is left to end.
                await runtime.close()
                raise
            _tune_garbage_collection()
            if store is not None:
                from penstock.cluster.membership import Registration

                registration = await stack.enter_async_context(Registration(store, settings.name, settings.advertise))
            waits = [asyncio.create_task(stopped.wait()), asyncio.create_task(failed.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        runtime.drain()
        if store is not None:
            await registration.leave()
        if not await _until(lambda: runtime.is_idle, settings.grace):
            runtime.hand_over()
            await _until(lambda: runtime.is_idle, HAND_OVER_SECONDS)
        await server.close()
        await runtime.close()
    log.info("%s has ended", settings.name)
    return 1 if failed.is_set() else 0


async def _load(runtime: WorkerRuntime, stopped: asyncio.Event) -> bool:
    """Whether the engine runs now; not where the worker is told to end before that: nobody waits for a load that may take minutes."""
    loading = asyncio.create_task(runtime.start(), name="loading")
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        stopping.cancel()
        await loading
        return True
    log.info("told to end before the engine was loaded")
    loading.cancel()
    try:
        async with asyncio.timeout(ABANDON_SECONDS):
            await asyncio.wait([loading])
            await runtime.close()
    except TimeoutError:
        # A thread that reads a large model cannot be stopped. There is nothing yet that could be lost.
        os._exit(0)
    return False


def make_backend(settings: WorkerSettings, on_failure: Callable[[], None]) -> tuple[Backend, PackedTokenizer]:
    """The engine that the settings name, and the tokenizer of its model."""
    if settings.engine == "embedded":
        if settings.embedded.reproducible:
            _ask_for_equal_rounding()
        # torch is heavy, and an extra.
        from penstock.cli.embedded import make_embedded

        return make_embedded(settings, on_failure)
    if settings.engine in ENGINES_OF_OTHERS:
        # So are the engines of others, and what is needed to speak with them.
        from penstock.cli.engines import make_external

        return make_external(settings, on_failure)
    return _make_simulator(settings)


def _ask_for_equal_rounding() -> None:
    """Tells the matrix library, before it is loaded, to round a row the same way whatever rows are computed with it."""
    instructions = "AVX512" if " avx512f " in Path("/proc/cpuinfo").read_text(encoding="utf-8") else "AVX2"
    os.environ.setdefault("MKL_CBWR", f"{instructions},STRICT")


def _make_simulator(settings: WorkerSettings) -> tuple[Backend, PackedTokenizer]:
    packed = pack_tokenizer(settings.model)
    tokenizer = packed.load()
    tool_parser, reasoning_parser = settings.parsers.resolve(tokenizer)
    model = ModelInfo(
        name=settings.served_name or (settings.model.resolve().name if settings.model is not None else settings.engine),
        engine=settings.engine,
        tokenizer=packed.fingerprint,
        vocab_size=tokenizer.vocab_size,
        context_length=settings.context_length or SIMULATED_CONTEXT,
        block_size=settings.simulator.block_size,
        max_batch=settings.simulator.max_batch,
        capabilities=("kv_events", "sessions", "logprobs", "prompt_logprobs"),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
    )
    return Simulator(settings.simulator, model, Vocabulary(tuple(tokenizer.ordinary_ids), tokenizer.end_id)), packed


async def run_front_end(settings: FrontEndSettings) -> int:
    """One front end, until SIGTERM."""
    file_limit = raise_file_limit()
    listener = open_listener(settings.host, settings.port)
    is_exposed = not ipaddress.ip_address(listener.getsockname()[0]).is_loopback and not settings.keys.are_needed
    if is_exposed:
        _warn_of_everyone(settings.host)
    models = Models(settings.dispatch.worker_wait, cache=TokenizerCache(default_directory()))
    tally = Tally()
    metrics = FrontEndMetrics(tally)
    keyring = Keyring(settings.keys, tally)
    if not keyring.is_open:
        log.info("API keys that may come in: %d", len(keyring))
    admission = Admission(settings.limits, tally)
    encoder = Encoder()
    transcripts = Transcripts(int(settings.transcript_memory * 2**20), encoder)
    pool = WorkerPool(settings.workers, settings.name, settings.secret, models.prepare, settings.worker_stall)
    router = Router(settings.router)
    dispatcher = Dispatcher(pool, router, settings.dispatch)
    pool.listeners.append(models)
    models.observe(lambda: [member.model for member in pool.members])
    host, port = listener.getsockname()[:2]
    with _stop_signals() as stopped, _parent_watch(settings.exit_with_parent):
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(encoder.close)
            redis = None if settings.store is None else await _open_redis(settings.store, stack)
            store = MemoryStore() if redis is None else redis
            await stack.enter_async_context(pool)
            if redis is not None:
                from penstock.cluster.membership import Discovery

                await stack.enter_async_context(Discovery(redis.members, pool.discovered))
            sessions = Sessions(store, pool, quota=settings.sessions_per_key, on_end=transcripts.forget)
            await stack.enter_async_context(sessions)
            await stack.enter_async_context(dispatcher)
            responses = await _open_response_store(settings, stack)
            metrics.observe(partial(_read_cluster, pool, router, dispatcher, sessions, transcripts, store, responses))
            context = PromptContext(models, transcripts)
            detached = DetachedRuns(settings.resume, admission)
            runner = Runner(context, sessions, dispatcher.produce, admission, metrics, detached)
            stack.push_async_callback(detached.close)
            app = make_app(Services(context, runner, detached, sessions, admission, metrics, responses))
            server = HttpServer(Gate(app, keyring, tally, settings.cors_origins), listener, file_limit, tally)
            serving = asyncio.create_task(server.serve(), name="http server")
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            ready = asyncio.create_task(_announce(pool, url, partial(_warn_of_everyone, settings.host) if is_exposed else None))
            stalls = asyncio.create_task(admission.watch_stalls(), name="stall watch")
            keys = asyncio.create_task(keyring.watch(), name="key file watch")
            await asyncio.wait([asyncio.create_task(stopped.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
            admission.drain()
            if not await _until(admission.idle.is_set, settings.grace):
                admission.expel()
                await _until(admission.idle.is_set, 2.0)
            for task in (ready, stalls, keys):
                task.cancel()
            server.stop()
            await asyncio.wait([serving, ready, stalls, keys])
    log.info("%s has ended", settings.name)
    return 0 if serving.exception() is None else 1


async def _open_response_store(settings: FrontEndSettings, stack: contextlib.AsyncExitStack) -> SqliteStore | None:
    """Where responses are kept, open until the stack is left. None: they are not."""
    if settings.responses is None:
        return None
    try:
        return await stack.enter_async_context(SqliteStore(settings.responses.path, settings.responses.limits))
    except ConfigError as error:
        if settings.responses.is_chosen:
            raise
        log.warning("%s; responses are not kept", error)
        return None


async def _open_redis(url: str, stack: contextlib.AsyncExitStack) -> RedisStore:
    """The store that several front ends share, open until the stack is left."""
    try:
        # An extra, like the library that it is made of.
        from penstock.cluster.redis_store import RedisStore
    except ImportError as missing:
        raise ConfigError(f"--store needs the package {missing.name!r}: pip install 'penstock[redis]'") from missing
    store = RedisStore(url)
    await store.start()
    stack.push_async_callback(store.close)
    return store


def _read_cluster(
    pool: WorkerPool,
    router: Router,
    dispatcher: Dispatcher,
    sessions: Sessions,
    transcripts: Transcripts,
    store: AffinityStore,
    responses: SqliteStore | None,
) -> ClusterReading:
    return ClusterReading(
        workers={member.name: member.link.stats for member in pool.members},
        links_lost=pool.links_lost,
        stalls=pool.stalls,
        decisions=router.decisions,
        diversions=router.diversions,
        load={member.name: router.load_of(member.name) for member in pool.members},
        index_blocks={member.name: sum(router.index.held(member.name)) for member in pool.members},
        queued=dispatcher.queued,
        migrations=dispatcher.migrations,
        sessions=len(sessions),
        session_events=sessions.counts,
        transcript_tokens={"reused": transcripts.tokens_reused, "encoded": transcripts.tokens_encoded},
        transcript_bytes=transcripts.bytes,
        store_is_available=store.is_available,
        tasks=len(asyncio.all_tasks()),
        responses_stored=0 if responses is None else responses.stored,
        response_store_bytes=0 if responses is None else responses.size,
    )


async def run_serve(settings: ServeSettings) -> int:
    """Workers and front end on this machine, each a supervised process."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        addresses = [f"unix:{Path(directory) / f'worker-{index}.sock'}" for index in range(settings.workers)]
        base = [sys.executable, "-m", "penstock"]
        # Workers have no use for the keys.
        environment = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
        workers = [
            ChildSpec(
                f"worker-{index}",
                [*base, "worker", f"--name=worker-{index}", f"--listen={address}", "--exit-with-parent", *settings.worker_arguments],
                environment,
            )
            for index, address in enumerate(addresses)
        ]
        links = [f"--worker={address}" for address in addresses]
        command = [*base, "frontend", *links, "--exit-with-parent", *settings.front_end_arguments]
        front_end = ChildSpec("frontend", command, {**environment, **settings.front_end_environment})
        supervisor = Supervisor(front_end, workers, settings.grace)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.request_stop)
        return await supervisor.run()


async def _announce(pool: WorkerPool, url: str, warn: Callable[[], None] | None) -> None:
    """Says that it is ready, and then what must not be overlooked: the last lines are those that people see."""
    await pool.wait_ready()
    _tune_garbage_collection()
    names = sorted({member.model.name for member in pool.members})
    log.info("ready: %s on %s, workers: %d", ", ".join(names), url, len(pool.members))
    if warn is not None:
        warn()


def _warn_of_everyone(host: str) -> None:
    rule = "!" * 78
    log.warning("%s", rule)
    log.warning("ANYONE CAN USE THIS SERVER: --host %s is reached from other machines, and it asks for no API key.", host)
    log.warning("Make a key with `penstock key new NAME --file PATH` and give --key-file PATH; or give --api-key KEY,")
    log.warning("better by the environment: %s=KEY. Or listen on this machine alone: --host 127.0.0.1", API_KEY_VARIABLE)
    log.warning("%s", rule)


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
