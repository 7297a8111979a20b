"""What a worker's KV events say is cached, put together."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.wire.messages import BlocksCleared, BlocksRemoved, BlocksStored, KvEvent


def apply_events(blocks: set[bytes], events: Sequence[KvEvent], roots: Collection[bytes] = (b"",)) -> None:
    """Fails for what cannot be: a block without the one before it, stored twice, or removed and never stored."""
    for event in events:
        match event:
            case BlocksStored():
                assert event.parent in roots or event.parent in blocks
                assert blocks.isdisjoint(event.blocks)
                blocks.update(event.blocks)
            case BlocksRemoved():
                assert blocks.issuperset(event.blocks)
                blocks.difference_update(event.blocks)
            case BlocksCleared():
                blocks.clear()
