"""Features of images that move: those that this worker pulls from an encode worker, and those that others pull from it.

To the transport, the slots of an image are blocks: this is the `KvEngine` of a pool of features, see `kv.moving`. An image arrives whole
or not at all. All calls come from the thread that owns the books, except those of the transport, which `ask` hands to that thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.kv.features import Features, Image, slot_names
from penstock.kv.moving import KvTransport, SlotMemory
from penstock.lazy_heap import LazyHeap
from penstock.wire.messages import KvSource, TransferOutcome, TransferReport

EXPECT_SECONDS = 2.0
"""How long a worker that pulls waits for the Submit that makes the features. Both were sent at the same time."""

NO_TRANSPORT = "this worker pulls no features"


@dataclass(slots=True, eq=False)
class Export:
    """An image that another worker pulls. `image`: it is here, and held. `names`: the puller has come for these slots."""

    transfer: bytes
    asked_at: float
    hold_seconds: float | None = None
    image: Image | None = None
    names: Sequence[bytes] | None = None
    is_withdrawn: bool = False


class FeatureMoves:
    """A `kv.moving.KvEngine`. Without a transport every pull fails at once. `ask` has the thread that owns the books do something."""

    def __init__(
        self,
        features: Features,
        fingerprint: bytes,
        memory: SlotMemory,
        ask: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fingerprint = fingerprint
        self.memory = memory
        self._features = features
        self._ask = ask
        self._clock = clock
        self._transport: KvTransport | None = None
        self._pulls: dict[bytes, tuple[Image, float]] = {}
        self._exports: dict[bytes, Export] = {}
        self._ends: LazyHeap[Export, float] = LazyHeap()
        self._reports: list[TransferReport] = []

    @property
    def exports(self) -> int:
        return len(self._exports)

    @property
    def next_expiry(self) -> float:
        """When something ends if nothing else happens."""
        least = self._ends.least()
        return math.inf if least is None else least[0]

    def take_reports(self) -> list[TransferReport]:
        """What has ended since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def end(self, transfer: bytes) -> None:
        """The front end has ended it. What it holds is freed when the transport is done. An unknown one is ignored."""
        if transfer in self._pulls and self._transport is not None:
            self._transport.stop(transfer)
        if (export := self._exports.get(transfer)) is not None:
            self._withdraw(export)

    def expire(self, now: float) -> None:
        """Ends exports whose time is over."""
        while (export := self._ends.pop_due(now)) is not None:
            self._report(export.transfer, "expired", export.asked_at)
            self._withdraw(export)

    # As the side that pulls.

    def pull(self, name: bytes, source: KvSource) -> None:
        """Gets an image that was asked for. If that fails, it is asked for again."""
        image = self._features.begin(name, is_pulled=True) if source.transfer not in self._pulls else None
        if image is None:
            return
        if self._transport is None:
            self._features.pull_failed(name, NO_TRANSPORT)
            return
        self._pulls[source.transfer] = image, self._clock()
        self._transport.pull(source, slot_names(name, len(image.slots)), list(image.slots))

    def _pulled(self, transfer: bytes, failure: str) -> None:
        image, asked_at = self._pulls.pop(transfer)
        if failure:
            self._features.pull_failed(image.name, failure)
        else:
            self._features.complete(image.name)
            self._report(transfer, "done", asked_at, len(image.slots))

    # As the side that is pulled from.

    def expect(self, transfer: bytes, hold_seconds: float) -> None:
        """A Submit makes an image, which another worker pulls under this id. That one may have come before it."""
        export = self._exports.get(transfer)
        if export is None:
            export = self._exports[transfer] = Export(transfer, self._clock())
        if not export.is_withdrawn:
            export.hold_seconds = hold_seconds
            self._ends.discard(export)

    def offer(self, transfer: bytes, name: bytes) -> None:
        """The image is here. It is held until it was pulled; if the puller has not come, for the time that the Submit has said."""
        export = self._exports.get(transfer)
        if export is None or export.is_withdrawn or export.image is not None:
            return
        export.image = self._features.hold(transfer, name)
        if export.names is None:
            self._ends.put(export, self._clock() + (export.hold_seconds or 0.0))
        self._tell(export)

    def _export(self, transfer: bytes, names: Sequence[bytes], waits: bool) -> None:
        export = self._exports.get(transfer)
        if export is None:
            export = self._exports[transfer] = Export(transfer, self._clock())
            self._ends.put(export, self._clock() + (EXPECT_SECONDS if waits else 0.0))
        export.names = names
        if export.image is not None:
            # The transport ends it if the puller is gone.
            self._ends.discard(export)
        if export.is_withdrawn and self._transport is not None:
            self._transport.withdraw(transfer)
        else:
            self._tell(export)

    def _tell(self, export: Export) -> None:
        if export.image is None or export.names is None or self._transport is None:
            return
        slots = export.image.slots
        # Nobody gets one image under the names of another.
        is_same = list(export.names) == slot_names(export.image.name, len(slots))
        self._transport.exported(export.transfer, 0, slots if is_same else (), is_last=True)

    def _withdraw(self, export: Export) -> None:
        if export.names is None or self._transport is None:
            self._drop(export)
        elif not export.is_withdrawn:
            export.is_withdrawn = True
            self._ends.discard(export)
            self._transport.withdraw(export.transfer)

    def _released(self, transfer: bytes) -> None:
        if (export := self._exports.get(transfer)) is not None:
            self._drop(export)

    def _drop(self, export: Export) -> None:
        del self._exports[export.transfer]
        self._ends.discard(export)
        if export.image is not None:
            self._features.let_go(export.transfer, export.image.name)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the records agree with the books."""
        assert all(image.state == "making" and image.is_pulled for image, _ in self._pulls.values())
        assert all(each.transfer in each.image.readers for each in self._exports.values() if each.image is not None)
        self._ends.check_integrity()

    def _report(self, transfer: bytes, outcome: TransferOutcome, asked_at: float, slots: int = 0) -> None:
        size = slots * self.memory.layout.slot_bytes
        self._reports.append(TransferReport(transfer, outcome, slots, size, self._clock() - asked_at))

    def _connect(self, transport: KvTransport) -> None:
        self._transport = transport

    # Called by the transport, in its own thread.

    def connect(self, transport: KvTransport) -> None:
        self._ask(lambda: self._connect(transport))

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        self._ask(lambda: self._export(transfer, names, waits))

    def release(self, transfer: bytes) -> None:
        self._ask(lambda: self._released(transfer))

    def arrived(self, transfer: bytes, blocks: int) -> None:
        """Nothing begins before all of an image is here."""

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        self._ask(lambda: self._pulled(transfer, failure))
