"""What an engine and the transport of KV ask of each other.

A worker pulls blocks from another one in four steps. The target's engine reserves slots and asks its transport to `pull`. The transport
asks the source's transport, which asks its engine to `export`. The source's engine tells its transport which slots are `exported`, as they
are computed. The target's transport copies and checks them, and tells its engine what has `arrived`.

A **slot** is a place for one block's KV in memory that this process can read and write. On a CPU it is the page itself. On a GPU it is a
place in pinned memory, from which the engine copies to the page.

Each side runs in a thread of its own. Every call returns at once, and may come from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct

from penstock.wire.messages import KvSource


class SlotLayout(Struct, frozen=True, array_like=True):
    """Where slots are in their memory. A slot is `strip_bytes` at each of `starts`, plus its number times `strip_bytes`."""

    slots: int
    strip_bytes: int
    starts: tuple[int, ...]

    @property
    def slot_bytes(self) -> int:
        return self.strip_bytes * len(self.starts)


class SlotMemory(Protocol):
    """The bytes of all slots. `file` is a memfd that holds them, from which a worker on the same machine copies; -1: there is none. If it
    may be sealed (MFD_ALLOW_SEALING), the transport seals it against shrinking and against new mappings that write, and others map it."""

    file: int
    layout: SlotLayout

    def views(self, slot: int) -> Sequence[memoryview]:
        """The strips of a slot, in order, as writable bytes."""

    def checksum(self, strips: Sequence[memoryview]) -> int:
        """64 bits over the bytes of a slot, in this memory or in another worker's."""


class KvEngine(Protocol):
    """The engine's side, as the transport sees it. `fingerprint` says what gives its KV a meaning: blocks move between equal ones only."""

    fingerprint: bytes

    @property
    def memory(self) -> SlotMemory: ...

    def connect(self, transport: KvTransport) -> None:
        """From now on KV can move. Called once, on the event loop, before the first request."""

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        """Another worker wants this chain of blocks. The engine holds those that it has and answers with `KvTransport.exported`. `waits`:
        those that are missing are being computed, under a Submit with this transfer; each is exported when it is computed. A transfer is
        exported once: what the engine says of it later cannot be taken for another chain of blocks."""

    def release(self, transfer: bytes) -> None:
        """The transport reads the slots of this export no more: all were sent, the puller is gone, or it was withdrawn."""

    def arrived(self, transfer: bytes, blocks: int) -> None:
        """The first `blocks` blocks of this pull are in their slots, checked."""

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        """The transport writes into the slots of this pull no more. Without a failure all blocks have arrived. Called once per pull."""


@runtime_checkable
class MovesKv(Protocol):
    """A backend whose KV may move."""

    @property
    def kv(self) -> KvEngine | None:
        """None: not with these settings. Known when the backend has started."""


@runtime_checkable
class MovesFeatures(Protocol):
    """A backend that may pull features of images from encode workers."""

    @property
    def features(self) -> KvEngine | None:
        """None: its model reads only text. Known when the backend has started."""


class KvTransport(Protocol):
    """The transport's side, as the engine sees it. `cluster/kv/` has the one over sockets. Another one, such as over NIXL, implements this
    and is chosen in `cli/kv.py`; engines and books stay as they are."""

    @property
    def pull_rate(self) -> float:
        """Bytes per second from other workers, measured while blocks come. 0: unknown."""

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        """Copies this chain of blocks from the source into these slots, in order. It ends with `KvEngine.pull_ended`, at the latest when
        the source has been silent for the transport's patience."""

    def stop(self, transfer: bytes) -> None:
        """Ends a pull before it is complete. The slots may be used again only after `KvEngine.pull_ended`."""

    def exported(self, transfer: bytes, first: int, slots: Sequence[int], *, is_last: bool) -> None:
        """The blocks of an export from its block `first` on are in these slots. `is_last`: no more will come."""

    def withdraw(self, transfer: bytes) -> None:
        """Ends an export. The slots may be used again only after `KvEngine.release`."""
