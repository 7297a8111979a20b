"""From a worker's numbered events to the index."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.router.index import PrefixIndex
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot

MOST_KEPT = 4096
"""Events that are kept while a snapshot is awaited."""


class KvFeed:
    """Keeps the index true to one worker, over one link.

    At first nothing is known: whoever makes a feed asks for a snapshot. From then on every event is applied once, in order. A gap in the
    numbers makes `receive` say, once, that another snapshot is needed; until it comes the index stays as it was, and events are kept
    aside, for the snapshot may be older than they are.
    """

    def __init__(self, index: PrefixIndex, worker: str) -> None:
        self._index = index
        self._worker = worker
        self._next_number = 0
        self._is_waiting = True
        self._was_asked = True
        # A run of events without a gap, while waiting. It ends before `_kept_until`.
        self._kept: list[KvEvent] = []
        self._kept_until = 0

    @property
    def is_current(self) -> bool:
        """All events that were seen are in the index."""
        return not self._is_waiting

    def receive(self, batch: KvEvents) -> bool:
        """Takes events. True when a snapshot must be asked for; once, until it comes."""
        if not self._is_waiting and batch.first <= self._next_number:
            self._apply(batch.events[self._next_number - batch.first :])
            return False
        self._is_waiting = True
        self._keep(batch)
        must_ask, self._was_asked = not self._was_asked, True
        return must_ask

    def load(self, snapshot: Snapshot) -> None:
        """Replaces all that is known of the worker, and goes on with the events that were kept.

        One that is older than what is known is ignored. One too old to go on from is used, and the next `receive` asks for another.
        """
        if not self._is_waiting and snapshot.next_number < self._next_number:
            return
        self._index.replaced(self._worker, _names(snapshot.events))
        self._next_number = snapshot.next_number
        first = self._kept_until - len(self._kept)
        self._is_waiting = bool(self._kept) and first > snapshot.next_number
        self._was_asked = False
        if not self._is_waiting:
            self._apply(self._kept[snapshot.next_number - first :] if self._kept else ())
            self._kept = []

    def _apply(self, events: Sequence[KvEvent]) -> None:
        index, worker = self._index, self._worker
        for event in events:
            match event:
                case BlocksStored():
                    index.stored(worker, event.blocks)
                case BlocksRemoved():
                    index.removed(worker, event.blocks)
                case BlocksCleared():
                    index.cleared(worker)
        self._next_number += len(events)

    def _keep(self, batch: KvEvents) -> None:
        """Keeps the newest run without a gap. An older one would not help: what is missing behind it is missing still."""
        end = batch.first + len(batch.events)
        if self._kept and end <= self._kept_until:
            return
        if not self._kept or batch.first > self._kept_until:
            self._kept = list(batch.events)
        else:
            self._kept += batch.events[self._kept_until - batch.first :]
        self._kept_until = end
        if len(self._kept) > MOST_KEPT:
            del self._kept[: len(self._kept) - MOST_KEPT]


def _names(events: Sequence[KvEvent]) -> dict[bytes, None]:
    """What is cached after these events, from nothing; in their order, so that a bound would cut off ends and not beginnings."""
    names: dict[bytes, None] = {}
    for event in events:
        match event:
            case BlocksStored():
                names.update(dict.fromkeys(event.blocks))
            case BlocksRemoved():
                for name in event.blocks:
                    names.pop(name, None)
            case BlocksCleared():
                names.clear()
    return names
