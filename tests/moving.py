"""A transport of KV between engines in one process, which the test moves by hand. It is real: bytes are copied and checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.kv.moving import KvEngine
from penstock.wire.messages import KvSource

Fault = str


@dataclass
class Pulling:
    """A pull, at its target. `slots` are the source's, as far as it has said them."""

    source: KvSource
    names: Sequence[bytes]
    into: Sequence[int]
    slots: list[int] = field(default_factory=list)
    arrived: int = 0
    is_asked: bool = False
    is_last: bool = False
    is_stopped: bool = False


class Hub:
    """All transports of a test, by address. `on_copy` may change what is copied, or raise nothing and say that a copy failed."""

    def __init__(self) -> None:
        self.transports: dict[str, MemoryTransport] = {}
        self.copied = 0
        self.is_eager = False
        """A pull is over before it returns. In a thread of its own, a transport may be as fast."""
        self.on_copy: Callable[[KvSource, int], Fault] = lambda source, block: ""

    def add(self, address: str, engine: KvEngine) -> MemoryTransport:
        self.transports[address] = MemoryTransport(self, engine)
        return self.transports[address]

    def move(self) -> bool:
        """Everything that can happen now. Returns whether something did."""
        moved = [transport.move() for transport in list(self.transports.values())]
        return any(moved)


class MemoryTransport:
    """A `kv.moving.KvTransport`. `pulls` are those at this target, `exports` those of this source, with the target of each."""

    pull_rate = 0.0

    def __init__(self, hub: Hub, engine: KvEngine) -> None:
        self.hub = hub
        self.engine = engine
        self.pulls: dict[bytes, Pulling] = {}
        self.exports: dict[bytes, MemoryTransport] = {}
        self.withdrawn: set[bytes] = set()

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int]) -> None:
        assert source.transfer not in self.pulls
        assert len(names) == len(slots)
        self.pulls[source.transfer] = Pulling(source, tuple(names), tuple(slots))
        while self.hub.is_eager and source.transfer in self.pulls:
            assert self.move_one(source.transfer)

    def stop(self, transfer: bytes) -> None:
        self.pulls[transfer].is_stopped = True

    def exported(self, transfer: bytes, first: int, slots: Sequence[int], *, is_last: bool) -> None:
        if transfer in self.exports and transfer in self.exports[transfer].pulls:
            pulling = self.exports[transfer].pulls[transfer]
            assert first == len(pulling.slots)
            pulling.slots += slots
            pulling.is_last = is_last

    def withdraw(self, transfer: bytes) -> None:
        self.withdrawn.add(transfer)

    def move(self) -> bool:
        moved = [self.move_one(transfer) for transfer in list(self.pulls)]
        for transfer in list(self.withdrawn):
            self.leave_source(transfer)
        return any(moved)

    def move_one(self, transfer: bytes, most: int = 1_000_000) -> bool:
        """Goes on with one pull, by at most `most` blocks. Returns whether something happened."""
        pulling = self.pulls[transfer]
        source = self.hub.transports.get(pulling.source.address)
        if pulling.is_stopped:
            return self.end(transfer, "stopped")
        if source is None:
            return self.end(transfer, "the source is gone")
        if not pulling.is_asked:
            pulling.is_asked = True
            if transfer in source.exports:
                return self.end(transfer, "another worker pulls it")
            source.exports[transfer] = self
            source.engine.export(transfer, pulling.names, waits=pulling.source.waits)
            return True
        if transfer in source.withdrawn:
            return self.end(transfer, "withdrawn")
        count = min(most, len(pulling.slots) - pulling.arrived)
        first, failure = pulling.arrived, ""
        while pulling.arrived < first + count and not failure:
            failure = self.copy(source.engine, pulling, pulling.arrived)
            pulling.arrived += not failure
        if pulling.arrived > first:
            self.engine.arrived(transfer, pulling.arrived)
        if failure:
            return self.end(transfer, failure)
        if pulling.is_last and pulling.arrived == len(pulling.slots):
            return self.end(transfer, "" if pulling.arrived == len(pulling.names) else "the source lacks blocks")
        return bool(count)

    def copy(self, source: KvEngine, pulling: Pulling, index: int) -> Fault:
        memory, other = self.engine.memory, source.memory
        theirs = other.views(pulling.slots[index])
        checksum = other.checksum(theirs)
        ours = memory.views(pulling.into[index])
        for target, strip in zip(ours, theirs, strict=True):
            target[:] = strip
        if failure := self.hub.on_copy(pulling.source, index):
            ours[0][0] ^= 1
            assert memory.checksum(ours) != checksum, failure
            return failure
        assert memory.checksum(ours) == checksum
        self.hub.copied += 1
        return ""

    def end(self, transfer: bytes, failure: str) -> bool:
        """The pull is over at its target, and so at its source."""
        pulling = self.pulls.pop(transfer)
        self.engine.pull_ended(transfer, failure)
        source = self.hub.transports.get(pulling.source.address)
        if source is not None and source.exports.get(transfer) is self:
            source.leave_source(transfer)
        return True

    def leave_source(self, transfer: bytes) -> None:
        """Nobody reads this export any more."""
        self.withdrawn.discard(transfer)
        target = self.exports.pop(transfer, None)
        if target is not None and transfer in target.pulls:
            target.pulls[transfer].is_stopped = True
        self.engine.release(transfer)
