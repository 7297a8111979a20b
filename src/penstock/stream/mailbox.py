"""The mailbox: where a generation waits for its reader in the front end."""

from __future__ import annotations

import asyncio

from penstock.stream.slot import Slot
from penstock.wire.messages import Delta, Terminal


class Doorbell:
    """Wakes the one reader of one or more mailboxes.

    It rings once for all that arrive before the reader answers. `wait` may be cancelled at any moment: what arrived stays
    in the mailboxes, and `answer`, which is synchronous, hands it over afterwards.
    """

    __slots__ = ("_ready", "_waiter")

    def __init__(self) -> None:
        self._ready: list[Mailbox] = []
        self._waiter: asyncio.Future[None] | None = None

    def ring(self, mailbox: Mailbox) -> None:
        self._ready.append(mailbox)
        self.wake()

    def wake(self) -> None:
        """Lets the reader look, also when no mailbox has anything."""
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Returns when a mailbox has something, or after `wake`."""
        if self._ready:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def answer(self) -> list[Mailbox]:
        """The mailboxes that have something, in the order in which they first had it."""
        ready, self._ready = self._ready, []
        return ready


class Mailbox:
    """One producer, one consumer, one slot.

    `put` and `end` never block and never drop: they merge with what waits. Out of sequence they raise, after the terminal
    they raise, after `cancel` they are a counted no-op. Taking is synchronous. Memory is bounded by the generation's own
    `max_tokens`.
    """

    __slots__ = ("_doorbell", "_slot", "cancelled", "index", "late_puts")

    def __init__(self, doorbell: Doorbell, index: int = 0) -> None:
        self.index = index
        self.cancelled = False
        self.late_puts = 0
        self._doorbell = doorbell
        self._slot = Slot()

    @property
    def ended(self) -> bool:
        """Its terminal has been put, taken or not."""
        return self._slot.ended

    @property
    def next_offset(self) -> int:
        """How many tokens have been put: where another producer would have to go on."""
        return self._slot.next_offset

    def put(self, delta: Delta) -> None:
        if self.cancelled:
            self.late_puts += 1
            return
        slot = self._slot
        was_empty = slot.is_empty
        slot.put(delta)
        if was_empty:
            self._doorbell.ring(self)

    def end(self, terminal: Terminal) -> None:
        if self.cancelled:
            self.late_puts += 1
            return
        was_empty = self._slot.is_empty
        self._slot.end(terminal)
        if was_empty:
            self._doorbell.ring(self)

    def take(self) -> tuple[Delta | None, Terminal | None]:
        """What waits, as one delta, and the terminal when it came."""
        return self._slot.take()

    def cancel(self) -> None:
        """The reader has left: forget what waits, and ignore what still comes."""
        self.cancelled = True
        self._slot.discard()
