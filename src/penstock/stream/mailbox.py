"""The mailbox: where a generation waits for its reader in the front end."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable

from penstock.stream.slot import Slot
from penstock.wire.messages import Delta, Terminal


class Doorbell:
    """Wakes the one reader of one or more mailboxes: a task in `wait`, or a callback given to `listen`.

    It rings once for all that arrive before the reader answers. `wait` may be cancelled at any moment: what arrived stays
    in the mailboxes, and `answer`, which is synchronous, hands it over afterwards.
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
        """Lets the reader look, also when no mailbox has anything."""
        if self._listener is not None:
            self._loop.call_soon(self._listener)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def listen(self, listener: Callable[[], None]) -> None:
        """From now on calls this, in a turn of the event loop of its own, instead of waking a task. What is there already counts."""
        self._listener = listener
        if self._ready:
            self.wake()

    def wait(self) -> Awaitable[None]:
        """Ends when a mailbox has something, or after `wake`. One reader waits at a time; cancelling it loses nothing."""
        self._waiter = waiter = self._loop.create_future()
        if self._ready:
            waiter.set_result(None)
        return waiter

    def answer(self) -> list[Mailbox]:
        """The mailboxes that have something, in the order in which they first had it."""
        ready, self._ready = self._ready, []
        return ready


class Mailbox(Slot):
    """One producer, one consumer, one slot.

    `put` and `end` never block and never drop: they merge with what waits. Out of sequence they raise, after the terminal
    they raise, after `cancel` they are a counted no-op. Taking is synchronous. Memory is bounded by the generation's own
    `max_tokens`.

    `history` has every token that was put, taken or not: with it the generation can go on elsewhere.
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
        """The reader has left: forget what waits, and ignore what still comes."""
        self.cancelled = True
        self.discard()
