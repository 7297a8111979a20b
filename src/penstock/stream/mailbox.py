"""Mailboxes: where generations wait for their reader in the front end, and the fan-in of those that belong to one response."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from penstock.stream.slot import Slot
from penstock.wire.errors import GenerationFault, PenstockError, StreamError
from penstock.wire.messages import Delta, Fault, Terminal


class Doorbell:
    """Wakes the one reader of one or more mailboxes: a task in `wait`, or a callback given to `listen`.

    It wakes the reader once for everything that arrives before the reader answers. `wait` may be cancelled at any moment and loses
    nothing: what arrived stays in the mailboxes until the synchronous `answer`.
    """

    __slots__ = ("_listener", "_loop", "_ready", "_waiter")

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._ready: list[Mailbox] = []
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None

    def ring(self, mailbox: Mailbox) -> None:
        self._ready.append(mailbox)
        if len(self._ready) == 1:
            self.wake()

    def wake(self) -> None:
        """Wakes the reader, even if no mailbox has anything."""
        if self._listener is not None:
            self._loop.call_soon(self._listener)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls this from now on instead of waking a task, each time in its own turn of the event loop. Called for what is there, too."""
        self._listener = listener
        if self._ready:
            self.wake()

    def wait(self) -> Awaitable[None]:
        """Ends when a mailbox has something, or after `wake`. One reader at a time."""
        self._waiter = waiter = self._loop.create_future()
        if self._ready:
            waiter.set_result(None)
        return waiter

    def answer(self) -> list[Mailbox]:
        """The mailboxes that have something, in the order of arrival."""
        ready, self._ready = self._ready, []
        return ready


class Mailbox(Slot):
    """One producer, one consumer, one slot.

    `put` and `end` never block and never drop: they merge with what waits. They raise when out of sequence and after the terminal.
    After `cancel` they do nothing and are counted in `late_puts`. Taking is synchronous. Memory is bounded by the generation's
    `max_tokens`.

    `history` has every token that was put, taken or not. With it the generation can continue on another worker.
    """

    __slots__ = ("_doorbell", "cancelled", "history", "index", "late_puts")

    def __init__(self, doorbell: Doorbell, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.cancelled = False
        self.late_puts = 0
        self.history = array("I")
        self._doorbell = doorbell

    def put(self, delta: Delta) -> bool:
        if self.cancelled:
            self.late_puts += 1
            return False
        was_empty = super().put(delta)
        try:
            self.history.extend(delta.token_ids)
        except OverflowError:
            # Nothing that waits with it is read, so that its terminal wakes the reader.
            self.discard()
            raise StreamError(f"a token at offset {delta.offset} has an id that no model makes") from None
        if was_empty:
            self._doorbell.ring(self)
        return was_empty

    def end(self, terminal: Terminal) -> bool:
        if self.cancelled:
            self.late_puts += 1
            return False
        was_empty = super().end(terminal)
        if was_empty:
            self._doorbell.ring(self)
        return was_empty

    def cancel(self) -> None:
        """The reader has left: drops what waits and ignores what still comes."""
        self.cancelled = True
        self.discard()


class ReaderLeft(PenstockError):
    """The client no longer reads the response."""


class Production(Protocol):
    """A running generation. It fills its mailbox and ends with exactly one terminal there."""

    def cancel(self) -> object:
        """Stops it, queued or running. Does nothing when it has ended."""


Producer = Callable[[Mailbox], Production]
"""Starts a generation. May raise PenstockError, which becomes the fault of its choice."""


class Arrival(NamedTuple):
    """What has arrived for one choice."""

    choice: int
    delta: Delta | None
    terminal: Terminal | None


class FanIn:
    """Runs one producer per choice, all at the same time, from `start` to `close`. It has no task of its own.

    `receive` returns what has arrived, interleaved between choices and in order within each. It may be cancelled and called again
    without loss. A producer that raises PenstockError gives its choice a fault. Any other error stops all that were started.
    """

    def __init__(self, producers: Sequence[Producer], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._producers = producers
        self._doorbell = Doorbell(loop)
        self._mailboxes = [Mailbox(self._doorbell, index) for index in range(len(producers))]
        self._productions: list[Production | None] = []
        self._interruption: PenstockError | None = None

    def start(self, count: int | None = None) -> None:
        """Starts the next `count` producers, or all that are left."""
        first = len(self._productions)
        last = len(self._producers) if count is None else first + count
        try:
            for producer, mailbox in zip(self._producers[first:last], self._mailboxes[first:last], strict=True):
                self._productions.append(_start(producer, mailbox))
        except BaseException as error:
            if (another := self._stop_all()) is not None:
                error.add_note(f"while the others were stopped: {another!r}")
            raise

    def close(self) -> None:
        """Stops what still runs. Nothing arrives any more. An error while one is stopped is raised when all are stopped."""
        if (error := self._stop_all()) is not None:
            raise error

    def _stop_all(self) -> Exception | None:
        error: Exception | None = None
        for index in range(len(self._productions)):
            try:
                self.drop(index)
            except Exception as raised:  # noqa: BLE001, the callers raise it
                error = raised
        return error

    @property
    def late_puts(self) -> int:
        """How many puts came after the reader had left."""
        return sum([mailbox.late_puts for mailbox in self._mailboxes])

    def interrupt(self, error: PenstockError) -> None:
        """Makes the current and every later `receive` raise this error, such as ReaderLeft."""
        self._interruption = error
        self._doorbell.wake()

    def drop(self, index: int) -> None:
        """Stops one choice that needs no more. Nothing more arrives for it."""
        self._mailboxes[index].cancel()
        production = self._productions[index]
        if production is not None:
            production.cancel()

    async def receive(self) -> list[Arrival]:
        """Waits until something has arrived and returns all of it: one arrival per choice."""
        while True:
            arrivals = self.take()
            if arrivals:
                return arrivals
            await self._doorbell.wait()

    def take(self) -> list[Arrival]:
        """What has arrived; may be empty. Raises the error of `interrupt`."""
        if self._interruption is not None:
            raise self._interruption
        return [Arrival(mailbox.index, *mailbox.take()) for mailbox in self._doorbell.answer() if not mailbox.cancelled]

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls this whenever there is something to take. For a reader that is not a task."""
        self._doorbell.listen(listener)


def _start(producer: Producer, mailbox: Mailbox) -> Production | None:
    try:
        return producer(mailbox)
    except PenstockError as error:
        mailbox.end(error.fault if isinstance(error, GenerationFault) else Fault(type(error).__name__, str(error)))
        return None


async def all_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for all tasks, however they end. If it is cancelled, it still waits for them and then raises the cancellation."""
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        while not task.done():
            # asyncio.wait costs four times as much.
            ended: asyncio.Future[None] = task.get_loop().create_future()
            task.add_done_callback(partial(_set, ended))
            try:
                await ended
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled


def _set(future: asyncio.Future[None], _: object) -> None:
    if not future.done():
        future.set_result(None)
