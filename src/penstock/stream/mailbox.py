"""The mailbox: tokens of one generation that wait for its reader in the front end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

from penstock.stream.slot import Slot
from penstock.wire.messages import Delta, Terminal


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
        self.history.extend(delta.token_ids)
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
