"""The outbox: where a worker's step waits for the socket of one front end."""

from __future__ import annotations

from penstock.stream.slot import Slot
from penstock.wire.messages import Delta, Finish, Segment, Terminal

# A frame holds about this many tokens at most: even with twenty logprobs each it stays below the size limit of a frame,
# however long the front end was away.
FRAME_TOKENS = 100_000


class Outbox:
    """What waits for one front end: a slot for each of its generations, merged until the socket is writable.

    `open` before the first `put`; `put` and `cancel` never block and never drop a terminal; `drain` takes what one frame holds.
    A generation leaves the outbox when its terminal is drained.
    """

    def __init__(self) -> None:
        self._slots: dict[bytes, Slot] = {}
        self._waiting: dict[bytes, Slot] = {}

    def __len__(self) -> int:
        """How many generations are open."""
        return len(self._slots)

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, generation: object) -> bool:
        """It is open, and its terminal has not been put."""
        slot = self._slots.get(generation)  # type: ignore[call-overload]
        return slot is not None and not slot.ended

    def generations(self) -> list[bytes]:
        """The ids of those that have not ended."""
        return [generation for generation, slot in self._slots.items() if not slot.ended]

    def open(self, generation: bytes, next_offset: int) -> None:
        self._slots[generation] = Slot(next_offset)

    def put(self, generation: bytes, delta: Delta | None, terminal: Terminal | None) -> None:
        """Raises KeyError for one that is not open, StreamError for one that breaks the sequence."""
        slot = self._slots[generation]
        if delta is not None:
            slot.put(delta)
        if terminal is not None:
            slot.end(terminal)
        self._waiting[generation] = slot

    def cancel(self, generation: bytes) -> None:
        """Its reader has left: what waits is dropped, and it ends."""
        slot = self._slots[generation]
        slot.discard()
        slot.end(Finish("cancelled"))
        self._waiting[generation] = slot

    def drain(self, tokens: int = FRAME_TOKENS) -> list[Segment]:
        """What waits, up to about so many tokens; `has_waiting` says whether there is more."""
        segments: list[Segment] = []
        emptied: list[bytes] = []
        for generation, slot in self._waiting.items():
            delta, terminal = slot.take(tokens)
            segments.append(Segment(generation, delta, terminal))
            if slot.is_empty:
                emptied.append(generation)
            if terminal is not None:
                del self._slots[generation]
            if delta is not None:
                tokens -= len(delta.token_ids) + len(delta.prompt_logprobs or ())
                if tokens <= 0:
                    break
        if len(emptied) == len(self._waiting):
            self._waiting = {}
        else:
            for generation in emptied:
                del self._waiting[generation]
        return segments
