"""Fan-in: several generations of one request, at the same time, on one response."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from penstock.stream.mailbox import Doorbell, Mailbox
from penstock.wire.errors import GenerationFault, PenstockError
from penstock.wire.messages import Delta, Fault, Terminal

log = logging.getLogger(__name__)

Producer = Callable[[Mailbox], Coroutine[None, None, None]]
"""Begins a generation, and returns what fills its mailbox and ends as soon as the terminal is there. Cancelling that stops it.

It is called when the fan-in is entered: what it does by itself waits for no other task.
"""


class ReaderLeft(PenstockError):
    """Nobody reads the response any more."""


class Arrival(NamedTuple):
    """What one choice has to say at a wake-up."""

    choice: int
    delta: Delta | None
    terminal: Terminal | None


class FanIn:
    """Runs one producer a choice, all at the same time, as an async context.

    `receive` gives what has arrived, interleaved between choices and ordered within each; it may be cancelled and called
    again without loss. Leaving the context cancels the producers that still run, and awaits them all.
    A producer that fails, is cancelled from outside or returns without a terminal gives its choice a fault.
    """

    def __init__(self, producers: Sequence[Producer], loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._producers = producers
        self._doorbell = Doorbell(self._loop)
        self._mailboxes = [Mailbox(self._doorbell, index) for index in range(len(producers))]
        self._tasks: list[asyncio.Task[None]] = []
        self._interruption: PenstockError | None = None

    async def __aenter__(self) -> Self:
        for producer, mailbox in zip(self._producers, self._mailboxes, strict=True):
            self._tasks.append(self._loop.create_task(_produce(_begin(producer, mailbox), mailbox)))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for mailbox in self._mailboxes:
            mailbox.cancel()
        # In the next turn of the loop: those that are about to end have ended then, and those that had not begun have, and can clean up.
        self._loop.call_soon(self._cancel_all)
        await all_done(self._tasks)

    def _cancel_all(self) -> None:
        for task in self._tasks:
            task.cancel()

    @property
    def late_puts(self) -> int:
        """What came after the reader had left."""
        return sum(mailbox.late_puts for mailbox in self._mailboxes)

    def interrupt(self, error: PenstockError) -> None:
        """Makes `receive`, waiting now or called later, raise this: ReaderLeft when the client is gone, for instance."""
        self._interruption = error
        self._doorbell.wake()

    def drop(self, index: int) -> None:
        """Stops one choice that needs no more; nothing more arrives of it. Leaving the context awaits its producer."""
        self._mailboxes[index].cancel()
        self._tasks[index].cancel()

    async def receive(self) -> list[Arrival]:
        """Waits until something has arrived and returns all of it: one arrival a choice."""
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


def _begin(producer: Producer, mailbox: Mailbox) -> Coroutine[None, None, None]:
    """Calls the producer; if it refuses to begin, whoever awaits it hears of it."""
    try:
        return producer(mailbox)
    except PenstockError as error:
        return _refuse(error)


async def _refuse(error: PenstockError) -> None:
    raise error


async def _produce(producing: Coroutine[None, None, None], mailbox: Mailbox) -> None:
    """Sees to it that the mailbox gets exactly one terminal, however the producer ends."""
    try:
        await producing
    except asyncio.CancelledError:
        _end_if_open(mailbox, Fault("producer_cancelled", "the generation was cancelled before it ended", retryable=True))
        raise
    except GenerationFault as error:
        _end_if_open(mailbox, error.fault)
    except PenstockError as error:
        _end_if_open(mailbox, Fault(type(error).__name__, str(error)))
    except Exception as error:
        # Nobody awaits this task for its result, so the error is reported here, and becomes the choice's fault.
        log.exception("a producer failed")
        _end_if_open(mailbox, Fault("internal_error", f"{type(error).__name__} while generating"))
    else:
        _end_if_open(mailbox, Fault("no_terminal", "the generation stopped without saying why", retryable=True))


def _end_if_open(mailbox: Mailbox, fault: Fault) -> None:
    if not mailbox.ended and not mailbox.cancelled:
        mailbox.end(fault)


async def all_done(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits for them, however they end; does so even when cancelled meanwhile, and passes that cancellation on afterwards."""
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        while not task.done():
            # asyncio.wait would do, at four times the cost, and this is done for every request.
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
