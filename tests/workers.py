"""Real workers, links and dispatch in one process. A test can break what is between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from penstock.backends.simulator import Simulator, Vocabulary, tokens_between
from penstock.cluster.dispatch import Dispatcher, Production
from penstock.cluster.encoders import Encoders
from penstock.cluster.links.link import HEARTBEAT_SECONDS
from penstock.cluster.links.worker_link import Generation, WorkerLink
from penstock.cluster.links.worker_server import WorkerServer
from penstock.cluster.pool import WorkerPool
from penstock.cluster.sessions.moves import SessionMoves
from penstock.cluster.sessions.sessions import KEEP_ALIVE_SECONDS, Sessions
from penstock.cluster.sessions.turn import Turn
from penstock.config.engines import SimulatorConfig
from penstock.config.front_end import DispatchLimits, RouterSettings
from penstock.media.picture import Picture
from penstock.router.affinity import AffinityStore, MemoryStore
from penstock.router.policy import Hints
from penstock.router.router import Router
from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.text.tokenizers.cache import Fetch
from penstock.wire.address import UnixAddress
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import Delta, Fault, ModelInfo, Submit, Terminal
from penstock.worker.runtime import WorkerRuntime

WORDS = range(300, 1800)
SECRET = "only for this test"


def make_model(name: str = "simulator", tokenizer: str = "words", **changes: Any) -> ModelInfo:
    fields: dict[str, Any] = {"max_batch": 1000, "capabilities": ("kv_events", "sessions"), **changes}
    return ModelInfo(name, "simulator", tokenizer, 1_000_000, 100_000, 16, **fields)


class Worker:
    """A worker on a Unix socket. Leaving the context is an orderly end."""

    def __init__(self, folder: Path, name: str, model: ModelInfo | None = None, kind: type[Simulator] = Simulator, **config: Any) -> None:
        self.name = name
        self.address = UnixAddress(str(folder / f"{name}.sock"))
        settings = SimulatorConfig(**{"step_ms": 1.0, "session_grace": 0.0, **config})
        self.simulator = kind(settings, model or make_model(), Vocabulary(WORDS, 1))
        self.runtime = WorkerRuntime(self.simulator)
        self.server = WorkerServer(self.runtime, name, self.address, SECRET)

    async def __aenter__(self) -> Self:
        await self.runtime.start()
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.close()
        await self.runtime.close()
        self.simulator.check_integrity()

    def break_links(self) -> None:
        """As if the process had died and restarted at once, without its generations."""
        for link in list(self.server.links):
            link.abort()

    async def until(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        await until(condition, seconds)


class _Mailbox(Mailbox):
    """A mailbox whose reader can wait for the terminal: it raises a fault."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        super().__init__(Doorbell())
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, terminal: Terminal) -> bool:
        if isinstance(terminal, Fault):
            self.done.set_exception(GenerationFault(terminal))
            self.done.exception()
        else:
            self.done.set_result(None)
        return super().end(terminal)


class Reader:
    """One generation as its reader sees it."""

    def __init__(self) -> None:
        self.mailbox = _Mailbox()
        self.delta: Delta | None = None
        self.terminal: Terminal | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """All tokens that have arrived, read or not."""
        return tuple(self.mailbox.history)

    def read(self) -> tuple[Delta | None, Terminal | None]:
        return self.mailbox.take()


class FrontEnd:
    """Pool, router, dispatcher and sessions, as the front end wires them."""

    def __init__(
        self,
        workers: list[Worker],
        *,
        store: AffinityStore | None = None,
        quota: int = 1000,
        stall_seconds: float = 30.0,
        router: RouterSettings | None = None,
        name: str = "test",
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        pictures: Mapping[bytes, Picture] | None = None,
        **limits: Any,
    ) -> None:
        addresses = [worker.address for worker in workers]
        self.pool = WorkerPool(addresses, name, SECRET, _prepare, stall_seconds, heartbeat_seconds=heartbeat_seconds)
        self.router = Router(router or RouterSettings())
        self.dispatcher = Dispatcher(self.pool, self.router, DispatchLimits(**{"worker_wait": 5.0, **limits}))
        self.pictures = dict(pictures or {})
        self.encoders = Encoders(self.pool, self.pictures.get)
        self.dispatcher.answer_image, self.dispatcher.on_image_transfers = self.encoders.answer, self.encoders.reported
        self.pool.listeners.append(self.encoders)
        self.store = MemoryStore() if store is None else store
        self.ended: list[str] = []
        self.sessions = Sessions(self.store, self.pool, quota=quota, on_end=self.ended.append, keep_alive_seconds=keep_alive_seconds)
        self._waits = bool(workers)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for part in (self.pool, self.sessions, self.dispatcher):
            await self._stack.enter_async_context(part)
        moves = SessionMoves(self.sessions, self.dispatcher)
        self.dispatcher.on_draining = moves.begin
        self._stack.push_async_callback(moves.close)
        if self._waits:
            async with asyncio.timeout(10):
                await self.pool.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()
        self.router.check_integrity()
        self.encoders.close()

    def turn(self, hints: Hints | None = None, owner: str = "somebody") -> Turn:
        return Turn(self.sessions, owner, hints or Hints())

    def start(self, request: Submit, turn: Turn | None = None, model: str = "simulator") -> tuple[Reader, asyncio.Task[None]]:
        reader = Reader()
        production = self.dispatcher.produce(model, turn or self.turn(), request, reader.mailbox)
        return reader, asyncio.create_task(_finished(production, reader.mailbox))

    async def run(self, request: Submit, hints: Hints | None = None, owner: str = "somebody") -> tuple[Turn, Reader]:
        """Runs one complete turn."""
        turn = self.turn(hints, owner)
        try:
            await self.sessions.begin(turn, "simulator")
            reader, task = self.start(request, turn)
            try:
                async with asyncio.timeout(20):
                    await asyncio.shield(task)
            finally:
                if not task.done():
                    # As the fan-in does it: what had not begun has, and can clean up.
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
        finally:
            self.sessions.end(turn)
        return turn, reader


async def _prepare(_: ModelInfo, __: Fetch) -> None:
    pass


async def _finished(production: Production, mailbox: _Mailbox) -> None:
    """Returns when the generation has finished; raises its fault. Cancelled, it stops the generation."""
    try:
        await asyncio.shield(mailbox.done)
    finally:
        production.cancel()


class Sent(Generation):
    """A generation on a link. `done` gets None for a Finish, or the error that ended it."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def ended(self, error: PenstockError | None) -> None:
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)
            self.done.exception()


def send(link: WorkerLink, request: Submit, mailbox: Mailbox) -> Sent:
    """Starts a generation on a link, without a dispatcher."""
    sent = Sent(mailbox)
    link.submit(request, sent)
    return sent


def submit(number: int, max_tokens: int = 16, prompt: int = 40, **fields: Any) -> Submit:
    """A request with its own prompt of `prompt` tokens."""
    ids = tuple(tokens_between(number + 1_000_000, 0, prompt, WORDS))
    return Submit(number.to_bytes(16, "big"), ids, max_tokens, seed=number, ignore_eos=True, **fields)


def expected(number: int, count: int) -> tuple[int, ...]:
    return tuple(tokens_between(number, 0, count, WORDS))


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Raises TimeoutError if the condition does not become true in time."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.001)


def fault_of(error: Any) -> Fault:
    fault: Fault = error.value.fault
    return fault
