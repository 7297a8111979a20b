"""The numbered log of what happens to cached KV, for those who route by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.engine.radix import Node, RadixTree
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent


class NumberedEvent(NamedTuple):
    number: int
    event: KvEvent


class Snapshot(NamedTuple):
    """All that is cached, as events that make it from nothing; the log goes on with `next_number`."""

    next_number: int
    events: list[KvEvent]


class KvEventLog:
    """Numbers without a gap. What is not taken in time is dropped, oldest first; the numbers then show the gap."""

    def __init__(self, most_kept: int = 4096) -> None:
        self.next_number = 0
        self._most_kept = most_kept
        self._waiting: list[NumberedEvent] = []

    def stored(self, parent: Node, nodes: Sequence[Node]) -> None:
        self._add(BlocksStored(parent.name, tuple([node.name for node in nodes])))

    def removed(self, nodes: Sequence[Node]) -> None:
        self._add(BlocksRemoved(tuple([node.name for node in nodes])))

    def cleared(self) -> None:
        self._add(BlocksCleared())

    def take(self) -> list[NumberedEvent]:
        """What has happened since the last taking."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def snapshot(self, tree: RadixTree) -> Snapshot:
        events: list[KvEvent] = [BlocksStored(node.parent.name, (node.name,)) for node in tree.nodes() if node.parent is not None]
        return Snapshot(self.next_number, events)

    def _add(self, event: KvEvent) -> None:
        self._waiting.append(NumberedEvent(self.next_number, event))
        self.next_number += 1
        if len(self._waiting) > self._most_kept:
            del self._waiting[: self._most_kept // 2]
