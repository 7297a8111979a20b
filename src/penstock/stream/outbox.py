"""The outbox: a worker's tokens that wait for one front end."""

from __future__ import annotations

from penstock.stream.slot import Slot
from penstock.wire.codec import PACKED_ENTRIES
from penstock.wire.messages import Delta, Finish, Segment, Terminal

# A frame has about this many tokens at most. Even with twenty logprobs per token it stays below the size limit of a frame.
FRAME_TOKENS = 100_000


class Outgoing(Slot):
    """The slot of one generation in an outbox. It adds itself to the outbox's list when it has something."""

    __slots__ = ("_outbox", "generation")

    def __init__(self, outbox: Outbox, generation: bytes, next_offset: int) -> None:
        super().__init__(next_offset)
        self.generation = generation
        self._outbox = outbox

    def put(self, delta: Delta) -> bool:
        was_empty = super().put(delta)
        if was_empty:
            self._outbox.waiting.append(self)
        return was_empty

    def end(self, terminal: Terminal) -> bool:
        was_empty = super().end(terminal)
        if was_empty:
            self._outbox.waiting.append(self)
        return was_empty

    def cancel(self) -> None:
        """Drops what waits and ends the generation, because its reader has left."""
        listed = not self.is_empty
        self.discard()
        super().end(Finish("cancelled"))
        if not listed:
            self._outbox.waiting.append(self)


class Outbox:
    """Everything that waits for one front end, merged until it is taken.

    `open` gives a generation its slot. Putting there never blocks and never drops. `drain` takes as much as one frame holds.
    """

    def __init__(self) -> None:
        self.waiting: list[Outgoing] = []

    def open(self, generation: bytes, next_offset: int = 0) -> Outgoing:
        return Outgoing(self, generation, next_offset)

    def drain(self, tokens: int = FRAME_TOKENS) -> list[Segment]:
        """Takes about `tokens` tokens at most. The rest stays, in front of later tokens."""
        segments: list[Segment] = []
        waiting, self.waiting = self.waiting, []
        for index, slot in enumerate(waiting):
            delta, terminal = slot.take(tokens)
            segments.append(Segment(slot.generation, delta, terminal))
            if delta is not None:
                tokens -= len(delta.token_ids)
                if delta.prompt is not None:
                    tokens -= PACKED_ENTRIES * len(delta.prompt.logprobs or ())
                if tokens <= 0:
                    self.waiting = waiting[index if not slot.is_empty else index + 1 :]
                    break
        return segments
