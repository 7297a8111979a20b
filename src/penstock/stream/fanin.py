"""Fan-in: the generations of one request run at the same time and share one response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import Delta, Fault, Terminal


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
    without loss. A producer that raises gives its choice a fault.
    """

    def __init__(self, producers: Sequence[Producer], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._producers = producers
        self._doorbell = Doorbell(loop)
        self._mailboxes = [Mailbox(self._doorbell, index) for index in range(len(producers))]
        self._productions: list[Production | None] = []
        self._interruption: PenstockError | None = None

    def start(self) -> None:
        for producer, mailbox in zip(self._producers, self._mailboxes, strict=True):
            self._productions.append(_start(producer, mailbox))

    def close(self) -> None:
        """Stops what still runs. Nothing arrives any more."""
        for index in range(len(self._productions)):
            self.drop(index)

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
