"""The numbered log of what happens to cached KV, for those who route by it."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.kv.radix import Node, RadixTree
from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent, KvEvents, Snapshot

# Far more than a step makes: only what nobody takes at all is ever dropped.
MOST_KEPT = 65_536


class KvEventLog:
    """Numbers without a gap. What is not taken in time is dropped, oldest first; the numbers then show the gap."""

    def __init__(self, most_kept: int = MOST_KEPT) -> None:
        self.next_number = 0
        self._most_kept = most_kept
        self._waiting: list[KvEvent] = []

    def stored(self, parent: Node, nodes: Sequence[Node]) -> None:
        self._add(BlocksStored(parent.name, tuple([node.name for node in nodes])))

    def removed(self, nodes: Sequence[Node]) -> None:
        self._add(BlocksRemoved(tuple([node.name for node in nodes])))

    def cleared(self) -> None:
        self._add(BlocksCleared())

    def take(self) -> KvEvents | None:
        """What has happened since the last taking; None when nothing has."""
        if not self._waiting:
            return None
        taken = KvEvents(self.next_number - len(self._waiting), tuple(self._waiting))
        self._waiting = []
        return taken

    def snapshot(self, tree: RadixTree) -> Snapshot:
        """What is cached now. Events that were not taken yet are in it, too: their numbers are below its `next_number`."""
        events: list[KvEvent] = []
        for chain in tree.chains():
            assert chain[0].parent is not None
            events.append(BlocksStored(chain[0].parent.name, tuple([node.name for node in chain])))
        return Snapshot(self.next_number, tuple(events))

    def _add(self, event: KvEvent) -> None:
        self._waiting.append(event)
        self.next_number += 1
        if len(self._waiting) > self._most_kept:
            del self._waiting[: self._most_kept // 2]
