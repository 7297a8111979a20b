"""The slot: pending tokens of one generation at any hop, and the check of its offsets."""

from __future__ import annotations

from penstock.stream.merge import check_contiguous, merge, split
from penstock.wire.errors import PutAfterTerminal
from penstock.wire.messages import Delta, Terminal

# Pending deltas are merged when they are taken. At this many they are merged in place, so that a slow reader costs the memory of its
# tokens and not of many small objects.
COMPACT_AT = 64


class Slot:
    """The pending delta and terminal of one generation.

    `put` and `end` never block and never drop; they return whether the slot was empty. A delta with a gap or overlap raises GapError
    or OverlapError; anything after the terminal raises PutAfterTerminal. After an error the slot is unchanged. The terminal is taken
    with the last pending tokens or after them, never instead of them.
    """

    __slots__ = ("_pending", "_terminal", "_terminal_taken", "next_offset")

    def __init__(self, next_offset: int = 0) -> None:
        self.next_offset = next_offset
        """The offset at which the next delta must start."""
        self._pending: list[Delta] = []
        self._terminal: Terminal | None = None
        self._terminal_taken = False

    @property
    def ended(self) -> bool:
        """Its terminal has been put, taken or not."""
        return self._terminal is not None

    @property
    def is_empty(self) -> bool:
        """There is nothing to take."""
        return not self._pending and (self._terminal is None or self._terminal_taken)

    def put(self, delta: Delta) -> bool:
        if self._terminal is not None:
            raise PutAfterTerminal(f"a delta at offset {delta.offset} came after {self._terminal}")
        if delta.offset != self.next_offset:
            check_contiguous(self.next_offset, delta)
        self.next_offset += len(delta.token_ids)
        pending = self._pending
        pending.append(delta)
        if len(pending) == 1:
            return True
        if len(pending) >= COMPACT_AT:
            self._pending = [merge(pending)]
        return False

    def end(self, terminal: Terminal) -> bool:
        if self._terminal is not None:
            raise PutAfterTerminal(f"{terminal} came after {self._terminal}")
        self._terminal = terminal
        return not self._pending

    def take(self, tokens: int | None = None) -> tuple[Delta | None, Terminal | None]:
        """Takes everything: one merged delta, and the terminal.

        With `tokens`, takes at most this many. If tokens are left, the terminal stays with them.
        """
        delta = None
        if self._pending:
            delta = merge(self._pending)
            self._pending = []
            if tokens is not None and len(delta.token_ids) > tokens:
                delta, rest = split(delta, tokens)
                self._pending = [rest]
                return delta, None
        if self._terminal is None or self._terminal_taken:
            return delta, None
        self._terminal_taken = True
        return delta, self._terminal

    def discard(self) -> None:
        """Drops the pending delta, because its reader has left. The terminal is kept."""
        self._pending = []
