"""On a GPU, pages are not slots: blocks go through slots in host memory on their way to and from a transport.

The books of transfers know pages, a transport knows slots. `Staging` is between them: it is a transport to the books, and the books to a
transport. A block that is exported is saved to a slot first, then the transport is told. A block that has arrived in a slot is loaded into
its page first, then the books are told. With too few slots, fewer blocks move, and the rest is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from penstock.kv.moving import KvTransport
from penstock.kv.tiers import PageCopies
from penstock.kv.transfers import Transfers
from penstock.wire.messages import KvSource

TOO_FEW_SLOTS = "too little host memory for transfers"


@dataclass(slots=True, eq=False)
class StagedExport:
    """`saving` saves to its slots are under way. `is_complete`: no more blocks are told. `is_over`: the transport reads no more."""

    slots: list[int] = field(default_factory=list)
    saving: int = 0
    is_complete: bool = False
    is_over: bool = False


@dataclass(slots=True, eq=False)
class StagedPull:
    """The first `loaded` blocks are in their pages, those before `started` are on their way. `failure`: how the transport has ended it."""

    pages: Sequence[int]
    slots: list[int]
    started: int = 0
    loaded: int = 0
    failure: str | None = None


class Staging:
    """Called in the engine's thread. A `KvTransport` for the books; for the transport it has the methods of a `KvEngine`."""

    def __init__(self, books: Transfers, transport: KvTransport, copies: PageCopies, slots: Iterable[int]) -> None:
        self._books = books
        self._transport = transport
        self._copies = copies
        self._free = sorted(slots, reverse=True)
        self._all = frozenset(self._free)
        self._exports: dict[bytes, StagedExport] = {}
        self._pulls: dict[bytes, StagedPull] = {}
        # Saves of these are not over, though nobody reads them any more.
        self._ending: set[StagedExport] = set()

    @property
    def pull_rate(self) -> float:
        return self._transport.pull_rate

    # The source.

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        self._books.export(transfer, names, waits=waits)

    def exported(self, transfer: bytes, first: int, pages: Sequence[int], *, is_last: bool) -> None:
        export = self._exports.setdefault(transfer, StagedExport())
        if export.is_complete:
            return
        slots = self._take(len(pages))
        export.is_complete = is_last or len(slots) < len(pages)
        export.slots += slots
        export.saving += 1
        # Saves end in order, also those of nothing.
        self._copies.save(pages[: len(slots)], slots, partial(self._saved, transfer, export, first, slots, is_last=export.is_complete))

    def _saved(self, transfer: bytes, export: StagedExport, first: int, slots: Sequence[int], *, is_last: bool) -> None:
        export.saving -= 1
        if not export.is_over:
            self._transport.exported(transfer, first, slots, is_last=is_last)
        elif not export.saving:
            self._ending.discard(export)
            self._free += export.slots

    def withdraw(self, transfer: bytes) -> None:
        self._transport.withdraw(transfer)

    def release(self, transfer: bytes) -> None:
        """The pages may be used again at once: `PageCopies.protect` sees to saves that still read them. The slots not."""
        export = self._exports.pop(transfer, None)
        if export is not None:
            export.is_over = True
            if export.saving:
                self._ending.add(export)
            else:
                self._free += export.slots
        self._books.release(transfer)

    # The target.

    def pull(self, source: KvSource, names: Sequence[bytes], pages: Sequence[int]) -> None:
        slots = self._take(len(pages))
        if not slots:
            self._books.pull_ended(source.transfer, TOO_FEW_SLOTS)
            return
        self._copies.protect(pages)
        self._pulls[source.transfer] = StagedPull(pages, slots)
        self._transport.pull(source, names[: len(slots)], slots)

    def stop(self, transfer: bytes) -> None:
        if self._pulls[transfer].failure is None:
            self._transport.stop(transfer)

    def arrived(self, transfer: bytes, blocks: int) -> None:
        pull = self._pulls.get(transfer)
        if pull is None or blocks <= pull.started:
            return
        first, pull.started = pull.started, blocks
        self._copies.load(pull.slots[first:blocks], pull.pages[first:blocks], partial(self._loaded, transfer, pull, blocks))

    def _loaded(self, transfer: bytes, pull: StagedPull, blocks: int) -> None:
        self._free += pull.slots[pull.loaded : blocks]
        pull.loaded = blocks
        self._books.arrived(transfer, blocks)
        self._end(transfer, pull)

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        pull = self._pulls.get(transfer)
        if pull is None:
            return
        if not failure:
            self.arrived(transfer, len(pull.slots))
        pull.failure = failure or (TOO_FEW_SLOTS if len(pull.slots) < len(pull.pages) else "")
        self._end(transfer, pull)

    def _end(self, transfer: bytes, pull: StagedPull) -> None:
        """The books are told when neither the transport nor a copy writes any more."""
        if pull.failure is not None and pull.loaded == pull.started:
            del self._pulls[transfer]
            self._free += pull.slots[pull.started :]
            self._books.pull_ended(transfer, pull.failure)

    def check_integrity(self) -> None:
        """Raises AssertionError unless each slot is in one place."""
        places = [*self._free]
        for export in (*self._exports.values(), *self._ending):
            places += export.slots
        for pull in self._pulls.values():
            places += pull.slots[pull.loaded :]
        assert len(places) == len(self._all), f"{len(places)} of {len(self._all)} slots are accounted for"
        assert set(places) == self._all
        assert all(export.saving for export in self._ending)

    def _take(self, count: int) -> list[int]:
        """As many slots as there are, at most `count`."""
        slots = self._free[max(0, len(self._free) - count) :]
        del self._free[len(self._free) - len(slots) :]
        return slots[::-1]
