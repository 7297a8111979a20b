"""The one place that wires objects together, and ends them in order: a worker, a front end, and the two on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.api.app import Services, make_app, make_metrics_app
from penstock.api.auth.gate import Gate
from penstock.api.auth.keys import Keyring
from penstock.api.metrics_server import MetricsServer
from penstock.api.models import Models
from penstock.api.pipeline.admission import Admission
from penstock.api.pipeline.detached import DetachedRuns
from penstock.api.pipeline.request import PromptContext
from penstock.api.pipeline.runner import Runner
from penstock.api.responses.store import SqliteStore
from penstock.api.server import HttpServer, open_listener, raise_file_limit
from penstock.cli.engines import make_backend
from penstock.cli.kv import open_transports
from penstock.cluster.dispatch import Dispatcher
from penstock.cluster.encoders import Encoders
from penstock.cluster.kv.transport import SocketTransport
from penstock.cluster.links.security import LinkTls
from penstock.cluster.links.worker_server import WorkerServer
from penstock.cluster.pool import Member, WorkerPool
from penstock.cluster.sessions.moves import SessionMoves
from penstock.cluster.sessions.sessions import Sessions
from penstock.cluster.supervise import ChildSpec, Supervisor
from penstock.config.commands import FrontEndSettings, ServeSettings, WorkerSettings
from penstock.config.front_end import API_KEY_VARIABLE, KeySettings, StoreSettings
from penstock.config.media import MediaSettings
from penstock.config.resolve import Resolved
from penstock.media.families.make import read_rules
from penstock.media.fetch import HttpFetcher
from penstock.media.reader import MediaReader
from penstock.metrics.frontend import ClusterReading, FrontEndMetrics, Tally
from penstock.router.affinity import AffinityStore, MemoryStore
from penstock.router.router import Router
from penstock.text.encoding import Encoder
from penstock.text.tokenizers.cache import TokenizerCache, default_directory
from penstock.text.transcript import Transcripts
from penstock.wire.address import TcpAddress, is_loopback
from penstock.wire.errors import ConfigError
from penstock.wire.messages import Role
from penstock.worker.runtime import WorkerRuntime

if TYPE_CHECKING:
    from penstock.cluster.redis_store import RedisStore

log = logging.getLogger(__name__)

# A worker that ends waits this long for its front ends to take over its generations, and then for other workers to pull their KV.
HAND_OVER_SECONDS = 2.0
KV_HAND_OVER_SECONDS = 5.0
# How long each step may take when a front end ends. All steps and the clean-up take less than a second after the grace time.
EXPEL_SECONDS = 0.15  # requests end with a fault
CANCEL_SECONDS = 0.1  # those that cannot are cancelled
CLOSE_SECONDS = 0.05  # granian sends what it has: the last time after the grace time
CUT_SECONDS = 0.2  # granian notices that its connections are cut
EXIT_SECONDS = 0.05  # threads end
# Before the end of the grace time, connections are cut when none has had anything to send for this long.
QUIET_SECONDS = 0.25
# What a clean-up may take whose store or peer does not answer.
CLEAN_UP_SECONDS = 5.0
# An engine that must stop while it loads may take this long.
ABANDON_SECONDS = 5.0


async def run_worker(settings: WorkerSettings) -> int:
    """One worker, until SIGTERM."""
    assert settings.listen is not None
    # Hundreds of other workers may pull KV from this one, on several connections each.
    raise_file_limit()
    failed = asyncio.Event()
    backend, tokenizer = make_backend(settings, failed.set)
    runtime = WorkerRuntime(backend)
    tls = LinkTls.load(settings.link_tls, "worker")
    server = WorkerServer(runtime, settings.name, settings.listen, settings.secret, tokenizer.data, advertised=settings.advertise, tls=tls)
    async with contextlib.AsyncExitStack() as stack:
        store = None if settings.store is None else await _open_redis(settings.store, stack)
        with _stop_signals() as stop, _parent_watch(settings.exit_with_parent):
            transports: list[SocketTransport] = []
            try:
                if not await _load(runtime, stop.requested):
                    return 0
                transports = open_transports(settings, backend, runtime, tls)
                await server.start()
            except BaseException:
                # Else the engine's threads and processes outlive the worker.
                await _close(runtime, transports)
                raise
            _tune_garbage_collection()
            _say_unencrypted(settings)
            if store is not None:
                from penstock.cluster.membership import Registration

                registration = await stack.enter_async_context(Registration(store, settings.name, settings.advertise or settings.listen))
            waits = [asyncio.create_task(stop.requested.wait()), asyncio.create_task(failed.wait())]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        runtime.drain()
        if store is not None:
            await registration.leave()
        await _until(lambda: runtime.is_idle or stop.is_cut, settings.grace)
        if not runtime.is_idle:
            runtime.hand_over()
            await _until(lambda: runtime.is_idle, HAND_OVER_SECONDS)
        # Those who take over pull the KV from here.
        await _until(lambda: not (runtime.owes_kv or runtime.has_sessions) or stop.is_cut, KV_HAND_OVER_SECONDS)
        await server.close()
        await _close(runtime, transports)
    log.info("%s has ended", settings.name)
    return 1 if failed.is_set() else stop.status


async def _close(runtime: WorkerRuntime, transports: Sequence[SocketTransport]) -> None:
    for transport in transports:
        # In a thread: it tells the engine, on this event loop, how each transfer has ended.
        await asyncio.to_thread(transport.close)
    await runtime.close()


async def _load(runtime: WorkerRuntime, stopped: asyncio.Event) -> bool:
    """Loads the engine. Returns False if the worker must stop meanwhile: a load may take minutes, so it is not awaited."""
    loading = asyncio.create_task(runtime.start(), name="loading")
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait([loading, stopping], return_when=asyncio.FIRST_COMPLETED)
    if loading.done():
        stopping.cancel()
        await loading
        return True
    log.info("stopped before the engine was loaded")
    loading.cancel()
    try:
        async with asyncio.timeout(ABANDON_SECONDS):
            await asyncio.wait([loading])
            await runtime.close()
    except TimeoutError:
        # A thread that reads a large model cannot be stopped. Nothing can be lost yet.
        os._exit(0)
    return False


async def run_front_end(settings: FrontEndSettings) -> int:
    """One front end, until SIGTERM."""
    file_limit = raise_file_limit()
    # Twice the stall time, so that our own watch cuts off a slow reader first and counts it.
    listener = open_listener(settings.host, settings.port, 2 * settings.limits.stall_seconds)
    host, port = listener.getsockname()[:2]
    is_exposed = not ipaddress.ip_address(host).is_loopback and not settings.keys.are_needed
    if is_exposed:
        _warn_of_everyone(settings.host)
    _say_unencrypted(settings)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    with _stop_signals() as stop, _parent_watch(settings.exit_with_parent):
        async with contextlib.AsyncExitStack() as stack:
            front_end = await _open_front_end(settings, listener, file_limit, stack)
            announcement = _announce(front_end.pool, url, partial(_warn_of_everyone, settings.host) if is_exposed else None)
            serving = await _serve_until(stop, front_end, announcement, settings.grace)
    log.info("%s has ended", settings.name)
    if not serving.done():
        # Its threads would call into a Python that ends.
        os._exit(stop.status)
    status = 1 if serving.exception() is not None else stop.status
    _exit_after(EXIT_SECONDS, status)
    return status


@dataclass(frozen=True)
class FrontEnd:
    """The parts of a front end that its process drives."""

    server: HttpServer
    pool: WorkerPool
    admission: Admission
    detached: DetachedRuns
    keyring: Keyring


async def _open_front_end(
    settings: FrontEndSettings, listener: socket.socket, file_limit: int, stack: contextlib.AsyncExitStack
) -> FrontEnd:
    """All parts, open until the stack is left."""
    tally = Tally()
    metrics = FrontEndMetrics(tally)
    if settings.stall_log:
        stack.callback(metrics.loop.log_stalls(settings.stall_log))
    keyring = Keyring(settings.keys, tally)
    if not keyring.is_open:
        log.info("API keys that are accepted: %d", len(keyring))
    admission = Admission(settings.limits, tally)
    models = Models(settings.dispatch.worker_wait, cache=TokenizerCache(default_directory(), settings.tokenizer))
    encoder = Encoder()
    stack.callback(encoder.close)
    transcripts = Transcripts(settings.transcript_memory, encoder)
    media = _open_media(settings.media, stack)
    cluster = await _open_cluster(settings, models, transcripts, media, stack)
    responses = await _open_response_store(settings.responses, settings.keys.are_needed, stack)
    metrics.observe(partial(_read_cluster, cluster, admission, transcripts, responses, keyring, media))
    context = PromptContext(models, transcripts, media, settings.media.drop_images)
    detached = DetachedRuns(settings.resume, admission, tally)
    runner = Runner(context, cluster.sessions, cluster.dispatcher.produce, admission, tally, detached)
    stack.push_async_callback(detached.close)
    services = Services(
        context, runner, detached, cluster.sessions, admission, metrics, responses, shows_keys=settings.metrics_key is not None
    )
    app = make_app(services, has_metrics=settings.metrics_address is None)
    if settings.metrics_address is not None:
        await _open_metrics(settings, settings.metrics_address, services, tally, stack)
    max_body_bytes, hosts = settings.limits.max_body_bytes, _allowed_hosts(settings)
    gate = Gate(app, keyring, tally, settings.cors_origins, max_body_bytes, hosts, settings.metrics_key)
    server = HttpServer(gate, listener, file_limit, tally)
    return FrontEnd(server, cluster.pool, admission, detached, keyring)


def _open_media(settings: MediaSettings, stack: contextlib.AsyncExitStack) -> MediaReader:
    """The reader of images, until the stack is left."""
    media = MediaReader(settings, HttpFetcher(settings) if settings.hosts else None)
    stack.callback(media.close)
    return media


async def _open_metrics(
    settings: FrontEndSettings, address: TcpAddress, services: Services, tally: Tally, stack: contextlib.AsyncExitStack
) -> None:
    """The metrics on their own address, until the stack is left. Where only this machine can reach them, no web page can, either."""
    hosts = settings.allowed_hosts if is_loopback(address.host) and settings.metrics_key is None else None
    gate = Gate(make_metrics_app(services), Keyring(KeySettings(), tally), tally, hosts=hosts, metrics_key=settings.metrics_key)
    server = await stack.enter_async_context(MetricsServer(gate, address))
    log.info("metrics on %s", server.url)


class SharingWatch:
    """Warns of workers that would share KV between API keys. They refuse every request."""

    def joined(self, member: Member) -> None:
        if "isolation" not in member.model.capabilities:
            engine = member.model.engine
            log.warning(
                "worker %s refuses requests: engine %s cannot keep the KV of API keys apart; see --share-prefixes", member.name, engine
            )

    def left(self, member: Member) -> None:
        pass


@dataclass(frozen=True)
class Cluster:
    """The front end's view of its workers and sessions."""

    pool: WorkerPool
    router: Router
    dispatcher: Dispatcher
    sessions: Sessions
    store: AffinityStore
    encoders: Encoders


async def _open_cluster(
    settings: FrontEndSettings, models: Models, transcripts: Transcripts, media: MediaReader, stack: contextlib.AsyncExitStack
) -> Cluster:
    tls = LinkTls.load(settings.link_tls, "frontend")
    pool = WorkerPool(settings.workers, settings.name, settings.secret, models.prepare, settings.worker_stall, tls=tls)
    router = Router(settings.router)
    dispatcher = Dispatcher(pool, router, settings.dispatch)
    encoders = Encoders(pool, media.find)
    dispatcher.answer_image, dispatcher.on_image_transfers = encoders.answer, encoders.reported
    stack.callback(encoders.close)
    pool.listeners += [models, encoders]
    if not settings.keys.shares_prefixes:
        pool.listeners.append(SharingWatch())
    redis = None if settings.store is None else await _open_redis(settings.store, stack)
    store = MemoryStore() if redis is None else redis
    await stack.enter_async_context(pool)
    if redis is not None:
        from penstock.cluster.membership import Discovery

        await stack.enter_async_context(Discovery(redis.members, pool.discovered))
    sessions = Sessions(store, pool, quota=settings.sessions_per_key, on_end=transcripts.forget)
    await stack.enter_async_context(sessions)
    await stack.enter_async_context(dispatcher)
    moves = SessionMoves(sessions, dispatcher)
    dispatcher.on_draining = moves.begin
    stack.push_async_callback(moves.close)
    return Cluster(pool, router, dispatcher, sessions, store, encoders)


async def _serve_until(stop: Stop, front_end: FrontEnd, announcement: Coroutine[None, None, None], grace: float) -> asyncio.Task[None]:
    """Serves until a signal, then lets running requests finish for `grace` seconds. Returns granian's task, which may not have ended."""
    serving = asyncio.create_task(front_end.server.serve(), name="http server")
    watches = [
        asyncio.create_task(announcement, name="announcement"),
        asyncio.create_task(front_end.admission.watch_stalls(), name="stall watch"),
        asyncio.create_task(front_end.keyring.watch(), name="key file watch"),
    ]
    await asyncio.wait([asyncio.create_task(stop.requested.wait()), serving], return_when=asyncio.FIRST_COMPLETED)
    deadline = time.monotonic() + grace
    _exit_after(grace + CLEAN_UP_SECONDS, 1, "it did not stop within %g s: leaving without the rest of the clean-up")
    await _drain(stop, front_end, grace)
    for watch in watches:
        watch.cancel()
    await asyncio.wait(watches)
    front_end.server.stop()
    await _send_rest(stop, front_end.server, serving, deadline)
    if not serving.done():
        # Half a request, or an answer that nobody reads.
        front_end.server.cut()
        await asyncio.wait([serving], timeout=CUT_SECONDS)
    return serving


async def _send_rest(stop: Stop, server: HttpServer, serving: asyncio.Task[None], deadline: float) -> None:
    """Lets clients take the ends of their answers until the deadline: requests have ended, but granian may still have the last bytes."""
    last_sent = time.monotonic()
    while not serving.done():
        await asyncio.wait([serving], timeout=CLOSE_SECONDS)
        now = time.monotonic()
        if server.is_sending:
            last_sent = now
        if stop.is_cut or now >= deadline or now - last_sent >= QUIET_SECONDS:
            return


async def _drain(stop: Stop, front_end: FrontEnd, grace: float) -> None:
    """Lets running requests finish for `grace` seconds, ends the others with a fault, and cancels those that cannot even take that."""
    admission = front_end.admission
    admission.is_draining = True
    await _until(lambda: admission.is_idle or stop.is_cut, grace)
    if not admission.is_idle:
        admission.expel()
        await _until(lambda: admission.is_idle, EXPEL_SECONDS)
        if cancelled := admission.cancel():
            log.warning("cut off requests that did not end within %g s: %d", grace, cancelled)
            await _until(lambda: admission.is_idle, CANCEL_SECONDS)
    # Recordings end before connections are cut, so that clients that follow an answer see its end.
    await front_end.detached.close()


async def _open_response_store(settings: StoreSettings, by_owner: bool, stack: contextlib.AsyncExitStack) -> SqliteStore | None:
    """Where responses are kept, open until the stack is left. None: they are not kept."""
    path = settings.location(os.environ)
    if path is None:
        return None
    try:
        return await stack.enter_async_context(SqliteStore(path, settings.limits, by_owner=by_owner))
    except ConfigError as error:
        if settings.path is not None:
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


def _key_generations(keyring: Keyring, dispatcher: Dispatcher) -> dict[tuple[str, ...], float]:
    """By name of the key and state. A single key has no lane of its own in the queue."""
    found: dict[tuple[str, ...], float] = {}
    running = keyring.running()
    for name, unfinished in running.items():
        waiting = dispatcher.waiting_of(name if len(running) > 1 else "")
        found |= {(name, "waiting"): waiting, (name, "running"): max(0, unfinished - waiting)}
    return found


def _read_cluster(
    cluster: Cluster, admission: Admission, transcripts: Transcripts, responses: SqliteStore | None, keyring: Keyring, media: MediaReader
) -> ClusterReading:
    pool, router, sessions, transfers = cluster.pool, cluster.router, cluster.sessions, cluster.dispatcher.transfers
    encoders = cluster.encoders
    return ClusterReading(
        workers={member.name: member.link.stats for member in pool.members},
        links_lost=pool.links_lost,
        stalls=pool.stalls,
        decisions=router.decisions,
        diversions=router.diversions,
        load={name: router.load_of(name) for name in router.workers},
        index_blocks={name: sum(router.index.held(name)) for name in router.workers},
        queued=cluster.dispatcher.queued,
        key_generations=_key_generations(keyring, cluster.dispatcher),
        migrations=cluster.dispatcher.migrations,
        prefill_choices=router.prefill_choices,
        transfers=transfers.counts,
        transfers_open=len(transfers.open),
        transfer_bytes=transfers.bytes_moved,
        transfer_durations=transfers.durations,
        transfer_seconds=transfers.seconds,
        encode_jobs=encoders.counts,
        encode_jobs_open=len(encoders),
        encode_durations=encoders.durations,
        encode_seconds=encoders.seconds,
        stopped=cluster.dispatcher.suspects.stopped,
        suspects=len(cluster.dispatcher.suspects),
        sessions=len(sessions),
        session_events=sessions.counts,
        transcript_tokens={"reused": transcripts.tokens_reused, "encoded": transcripts.tokens_encoded},
        transcript_bytes=transcripts.bytes,
        store_is_available=cluster.store.is_available,
        tasks=len(asyncio.all_tasks()),
        body_bytes=admission.bodies.used,
        answer_bytes=admission.answers.used,
        bodies_waiting=admission.bodies.waiting,
        turns_waiting=transcripts.encoder.turns.waiting,
        responses_stored=0 if responses is None else responses.stored,
        responses_evicted={} if responses is None else responses.evicted,
        response_store_bytes=0 if responses is None else responses.size,
        media=media.observe(),
    )


async def run_serve(settings: ServeSettings, resolved: Resolved) -> int:
    """Workers and a front end on this machine, each a supervised process. They get the effective settings as flags."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        encoders: list[Role] = ["encode"] * encode_workers(settings)
        roles = [*settings.roles, *encoders]
        names = worker_names(roles)
        addresses = [f"unix:{Path(directory) / name}.sock" for name in names]
        base = [sys.executable, "-P", "-m", "penstock"]
        arguments = worker_arguments(settings, resolved)
        environment = resolved.environment_for(WorkerSettings, os.environ)
        workers = [
            ChildSpec(
                name,
                [*base, "worker", f"--name={name}", f"--role={role}", f"--listen={address}", "--exit-with-parent", *arguments],
                environment,
            )
            for name, role, address in zip(names, roles, addresses, strict=True)
        ]
        links = [f"--worker={address}" for address in addresses]
        command = [*base, "frontend", *links, "--exit-with-parent", *resolved.arguments_for(FrontEndSettings)]
        front_end = ChildSpec("frontend", command, resolved.environment_for(FrontEndSettings, os.environ))
        supervisor = Supervisor(front_end, workers, settings.front_end.grace)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, supervisor.request_stop)
        return await supervisor.run()


def worker_names(roles: Sequence[Role]) -> list[str]:
    """worker-0, worker-1, …; with roles prefill-0, …, decode-0, …"""
    seen: Counter[str] = Counter()
    names = []
    for role in roles:
        kind = "worker" if role == "aggregated" else role
        names.append(f"{kind}-{seen[kind]}")
        seen[kind] += 1
    return names


def worker_arguments(settings: ServeSettings, resolved: Resolved) -> tuple[str, ...]:
    """The flags of each worker. Several workers of the embedded engine share the cores that one alone would use."""
    arguments = resolved.arguments_for(WorkerSettings)
    workers = len(settings.roles)
    if workers > 1 and settings.worker.engine == "embedded" and settings.worker.embedded.threads is None:
        arguments += (f"--threads={max(1, (os.cpu_count() or 1) // workers)}",)
    return arguments


def encode_workers(settings: ServeSettings) -> int:
    """How many workers make features of images. Raises ConfigError if they are asked for and the model reads no images."""
    wanted, worker = settings.encode_workers, settings.worker
    if worker.engine == "simulator":
        if wanted and not worker.simulator.images:
            raise ConfigError(f"--encode-workers {wanted}, but the simulator reads no images: give --images, or leave it out")
        return wanted or 0
    if not wanted and (wanted == 0 or worker.engine != "embedded" or not runs_on_cpu(worker.embedded.device)):
        return 0
    rules = read_rules(worker.model) if worker.model is not None and worker.model.is_dir() else None
    if rules is None and wanted:
        raise ConfigError(f"--encode-workers {wanted}, but the model {worker.model or 'that is installed'} reads no images: leave it out")
    return wanted or int(rules is not None)


def runs_on_cpu(device: str) -> bool:
    """Without torch, which takes seconds to load. A GPU that torch cannot use makes the tower run in the worker itself."""
    return device == "cpu" or (device == "auto" and not Path("/proc/driver/nvidia/version").exists())


async def _announce(pool: WorkerPool, url: str, warn: Callable[[], None] | None) -> None:
    """Logs that the server is ready. The warning comes last, where people see it."""
    await pool.wait_ready()
    _tune_garbage_collection()
    names = sorted({member.model.name for member in pool.members})
    log.info("ready: %s on %s, workers: %d", ", ".join(names), url, len(pool.members))
    if warn is not None:
        warn()


def _allowed_hosts(settings: FrontEndSettings) -> list[str] | None:
    """The names by which clients may reach the server, besides addresses and localhost. None: any."""
    if settings.keys.are_needed and not settings.allowed_hosts:
        return None
    names = [*settings.allowed_hosts, settings.host.lower()]
    if not is_loopback(settings.host):
        own = socket.gethostname().lower()
        names += [own, own.partition(".")[0], f"{own.partition('.')[0]}.local"]
    return names


def _say_unencrypted(settings: FrontEndSettings | WorkerSettings) -> None:
    for each in settings.unencrypted():
        log.warning("not encrypted: %s", each)


def _warn_of_everyone(host: str) -> None:
    rule = "!" * 78
    log.warning("%s", rule)
    log.warning("ANYONE CAN USE THIS SERVER: other machines can reach --host %s, and no API key is needed.", host)
    log.warning("Make a key with `penstock key new NAME --file PATH` and give --key-file PATH; or set")
    log.warning("%s=KEY in the environment (or give --api-key KEY). Or listen on this machine only: --host 127.0.0.1", API_KEY_VARIABLE)
    log.warning("%s", rule)


class Stop:
    """SIGTERM and Ctrl-C. The first sets `requested`, the second `is_cut`: nothing is waited for. A third ends the process at once."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self.is_cut = False
        self.status = 0
        """The exit status: 0 after one signal, 128 and its number after a second."""

    def on_signal(self, number: signal.Signals) -> None:
        if self.is_cut:
            os._exit(128 + number)
        if self.requested.is_set():
            log.warning("a second signal: running requests are cut off now")
            self.is_cut = True
            self.status = 128 + number
        self.requested.set()


@contextlib.contextmanager
def _stop_signals() -> Iterator[Stop]:
    loop, stop = asyncio.get_running_loop(), Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    yield stop


def _exit_after(seconds: float, status: int, message: str | None = None) -> None:
    """Ends the process after `seconds` if it still runs: Python would wait for a thread that never ends."""

    def leave() -> None:
        if message is not None:
            log.error(message, seconds)
        os._exit(status)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()


@contextlib.contextmanager
def _parent_watch(wanted: bool) -> Iterator[None]:
    """Ends the process when standard input ends: the parent, which holds its other end, has died."""
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
    """Waits for the condition. Returns False if it is not true within `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _tune_garbage_collection() -> None:
    """Leaves objects made so far out of collections, and collects rarely: cycles are rare on the token path."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
