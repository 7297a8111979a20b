"""The transport of KV between workers over sockets: a thread with its own event loop. It implements `kv.moving.KvTransport`."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence

from penstock.cluster.kv.faults import Faults
from penstock.cluster.kv.handshake import Credentials, Dialog, Offer, welcome_puller
from penstock.cluster.kv.puller import Patience, Puller
from penstock.cluster.kv.shared_memory import read_only
from penstock.cluster.kv.source import Source
from penstock.cluster.links.link import HANDSHAKE_TIMEOUT, tune
from penstock.cluster.links.security import needs_protection, reason_of
from penstock.cluster.links.worker_server import bind_unix
from penstock.kv.moving import KvEngine
from penstock.wire.address import Address, TcpAddress, UnixAddress
from penstock.wire.errors import ConfigError, HandshakeRefused, LinkError
from penstock.wire.messages import KvSource

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""Of pullers that have proved themselves."""
MAX_OPENING = 64
"""Connections in their handshake. Others wait in the backlog until one of these has ended, or is old and gives way."""
OLD_SECONDS = 0.5
"""A handshake that takes longer gives way: those that say nothing keep no puller out. It is half of the time that pullers wait."""
STREAMS = 4
"""Connections over TCP to one source."""
LOOKS_PER_KEEP_ALIVE = 2


class SocketTransport:
    """Listens for other workers that pull, and pulls from them. Without an address it only pulls.

    `start` binds and returns the address under which others reach it. `close` ends all transfers, each with its call of the engine. Calls
    of the engine come from the transport's thread; those after `close` from the caller's.
    """

    def __init__(
        self,
        engine: KvEngine,
        credentials: Credentials,
        address: Address | None,
        *,
        advertised_host: str = "",
        streams: int = STREAMS,
        patience: Patience | None = None,
        faults: Faults | None = None,
    ) -> None:
        if address is not None and needs_protection(address, credentials.secret, credentials.source_tls):
            raise ConfigError(f"--kv-listen {address}: KV over TCP needs PENSTOCK_LINK_SECRET or TLS (--link-tls-cert)")
        self.address = address
        self._advertised_host = advertised_host
        self._engine = engine
        self._credentials = credentials
        self._streams = streams
        self._patience = patience or Patience()
        self._faults = faults or Faults()
        self._lock = threading.Lock()
        self._inbox: deque[Callable[[], None]] = deque()
        self._is_woken = False
        self._is_closed = False
        self._failure: OSError | None = None
        self._started: threading.Event = threading.Event()
        self._thread = threading.Thread(target=self._run, name="KV transport", daemon=True)
        self._opening: dict[asyncio.Task[None], float] = {}  # since when, the oldest first
        self._file = -1
        self._listener: socket.socket | None = None

    def start(self) -> str:
        """Raises ConfigError when it cannot listen, or its thread cannot begin."""
        try:
            self._listener = self._bind()
        except OSError as error:
            raise ConfigError(f"--kv-listen {self.address}: {error.strerror or error}") from error
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            if self._listener is not None:
                self._listener.close()
            raise ConfigError(f"the thread that moves KV cannot begin: {reason_of(self._failure)}") from self._failure
        if self.address is None:
            return ""
        log.info("KV is pulled at %s", self.address)
        return str(self.address)

    def close(self) -> None:
        """Blocks until its thread has ended."""
        if not self._started.is_set():
            return
        self._ask(self._stopping.set)
        self._thread.join()

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        if not self._ask(lambda: self._puller.pull(source, names, slots)):
            self._engine.pull_ended(source.transfer, "this worker is stopping")

    def stop(self, transfer: bytes) -> None:
        self._ask(lambda: self._puller.stop(transfer))

    def exported(self, transfer: bytes, first: int, slots: Sequence[int], *, is_last: bool) -> None:
        self._ask(lambda: self._source.exported(transfer, first, slots, is_last))

    def withdraw(self, transfer: bytes) -> None:
        self._ask(lambda: self._source.withdraw(transfer))

    @property
    def pull_rate(self) -> float:
        """Bytes per second, measured while blocks come. 0: not yet known."""
        return self._puller.rate.per_second

    @property
    def bytes_pulled(self) -> int:
        return self._puller.bytes_pulled

    @property
    def seconds_pulling(self) -> float:
        return self._puller.seconds_pulling

    @property
    def bytes_sent(self) -> int:
        return self._source.bytes_sent

    def check_integrity(self) -> None:
        """For tests, while nothing is under way."""
        self._puller.check_integrity()
        self._source.check_integrity()
        assert self._puller.is_idle
        assert self._source.is_idle

    def _bind(self) -> socket.socket | None:
        if self.address is None:
            return None
        if isinstance(self.address, UnixAddress):
            listener = bind_unix(self.address.path)
            listener.listen(MAX_CONNECTIONS)
        else:
            listener = _bind_tcp(self.address)
            self.address = TcpAddress(self._advertised_host or self.address.host, listener.getsockname()[1])
        listener.setblocking(False)
        return listener

    def _ask(self, call: Callable[[], None]) -> bool:
        """Has the thread do this. Returns False when it has ended."""
        with self._lock:
            if self._is_closed:
                return False
            self._inbox.append(call)
            if not self._is_woken:
                self._is_woken = True
                self._loop.call_soon_threadsafe(self._answer)
        return True

    def _answer(self) -> None:
        self._is_woken = False
        self._busy.set()
        while self._inbox:
            self._inbox.popleft()()

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.get_loop()
                runner.run(self._serve())
        except OSError as error:
            if self._started.is_set():
                raise
            self._failure, self._is_closed = error, True
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping, self._busy = asyncio.Event(), asyncio.Event()
        self._puller = Puller(self._engine, self._credentials, self._patience, self._streams)
        self._source = Source(self._engine, self._faults, self._busy.set)
        self._file = read_only(self._engine.memory.file) if isinstance(self.address, UnixAddress) else -1
        self._listen(self._listener)
        looking = asyncio.create_task(self._look(), name="looks at KV transfers")
        self._started.set()
        try:
            await self._stopping.wait()
        finally:
            await self._end(looking)

    async def _end(self, looking: asyncio.Task[None]) -> None:
        error = LinkError(f"{self._credentials.name} is stopping")
        if self._listener is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        tasks = [looking, *self._opening]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        with self._lock:
            self._is_closed = True
        self._answer()
        await self._puller.close(error)
        self._source.close(error)
        if self._file >= 0:
            os.close(self._file)

    async def _look(self) -> None:
        """Wakes up only while something is under way."""
        looks = 0
        while True:
            if self._puller.is_idle and self._source.is_idle:
                self._busy.clear()
                await self._busy.wait()
            await asyncio.sleep(self._patience.look_seconds)
            looks += 1
            self._puller.look()
            if looks % LOOKS_PER_KEEP_ALIVE == 0:
                self._source.keep_alive()

    def _listen(self, listener: socket.socket | None) -> None:
        if listener is not None and self.address is not None and listener.fileno() >= 0:
            self._loop.add_reader(listener.fileno(), self._accept, listener, self.address)

    def _listen_later(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener.fileno())
        self._loop.call_later(seconds, self._listen, listener)

    def _accept(self, listener: socket.socket, address: Address) -> None:
        if len(self._opening) >= MAX_OPENING and (seconds := self._until_one_is_old()) > 0:
            self._listen_later(listener, seconds)
            return
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # It has left again; or this process may open no more files, then a pause keeps this thread from spinning.
            log.warning("a connection for KV was not accepted: %s", error.strerror)
            self._listen_later(listener, self._patience.look_seconds)
            return
        if len(self._source.connections) >= MAX_CONNECTIONS:
            log.warning("a connection for KV was refused: %d are open, the maximum", MAX_CONNECTIONS)
            connection.close()
            return
        if len(self._opening) >= MAX_OPENING:
            log.warning("a connection for KV was closed: its handshake takes longer than %g s, and %d are open", OLD_SECONDS, MAX_OPENING)
            oldest = next(iter(self._opening))
            del self._opening[oldest]
            oldest.cancel()
        dialog = Dialog(connection)
        task = asyncio.create_task(self._welcome(dialog, address), name="handshake for KV")
        self._opening[task] = self._loop.time()
        task.add_done_callback(lambda task: self._opening.pop(task, None))
        task.add_done_callback(lambda _: self._listen(listener))
        # One that is cancelled before its first step closes nothing itself.
        task.add_done_callback(lambda task: dialog.close() if task.cancelled() else None)

    def _until_one_is_old(self) -> float:
        """Seconds."""
        return next(iter(self._opening.values())) + OLD_SECONDS - self._loop.time()

    async def _welcome(self, dialog: Dialog, address: Address) -> None:
        tune(dialog.socket)
        memory = self._engine.memory
        offer = Offer(self._engine.fingerprint, memory.layout, self._file)
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT):
                hello = await welcome_puller(dialog, self._credentials, address, offer)
        except (LinkError, OSError) as error:
            log.warning("a connection for KV was refused: %s", error)
            dialog.refuse(error if isinstance(error, LinkError) else HandshakeRefused(str(error)))
            return
        except BaseException:
            dialog.close()
            raise
        log.info("%s pulls KV", hello.name)
        self._source.connected(dialog.socket, is_shared=self._file >= 0)


def _bind_tcp(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family, backlog=MAX_CONNECTIONS)
