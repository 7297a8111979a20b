"""Fan-in: several generations of one request, at the same time, on one response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import Delta, Fault, Terminal


class ReaderLeft(PenstockError):
    """Nobody reads the response any more."""


class Production(Protocol):
    """A generation that runs. It fills its mailbox, and the last thing that it puts there is a terminal."""

    def cancel(self) -> object:
        """Stops it, wherever it is. Does nothing when it has ended."""


Producer = Callable[[Mailbox], Production]
"""Starts a generation. May raise PenstockError, which becomes the fault of its choice."""


class Arrival(NamedTuple):
    """What one choice has to say at a wake-up."""

    choice: int
    delta: Delta | None
    terminal: Terminal | None


class FanIn:
    """Runs one producer per choice, all at the same time, from `start` to `close`. It has no task of its own.

    `receive` returns what has arrived, interleaved between choices and ordered within each. It may be cancelled and called again
    without loss.
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
        """Makes `receive`, waiting now or called later, raise this: ReaderLeft when the client is gone, for instance."""
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
        """What has arrived, perhaps nothing."""
        if self._interruption is not None:
            raise self._interruption
        return [Arrival(mailbox.index, *mailbox.take()) for mailbox in self._doorbell.answer() if not mailbox.cancelled]

    def listen(self, listener: Callable[[], None]) -> None:
        """Calls this whenever there is something to take, from now on: for a reader that is no task."""
        self._doorbell.listen(listener)


def _start(producer: Producer, mailbox: Mailbox) -> Production | None:
    try:
        return producer(mailbox)
    except PenstockError as error:
        mailbox.end(error.fault if isinstance(error, GenerationFault) else Fault(type(error).__name__, str(error)))
        return None


async def all_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for them, however they end. Goes on when cancelled meanwhile, and raises that cancellation afterwards."""
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
