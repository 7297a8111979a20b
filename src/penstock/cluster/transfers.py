"""The records of KV that moves between two workers, for the generations of this front end: one per transfer, and none after it."""

from __future__ import annotations

import secrets
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.cluster.pool import Member
from penstock.cluster.sessions.turn import Turn
from penstock.metrics.frontend import BUCKETS
from penstock.router.moving import MoveReason
from penstock.wire.messages import TRANSFER_ID_BYTES, KvSource, TransferReport

Ending = Literal["cancelled", "lost", "stalled", "failed", "expired"]
"""How a transfer ends on which the target has not reported: its generation is over; a worker was lost; it took too long; the source has
failed, or its lease is over."""

LEASE_SECONDS = 10.0
"""How long the source keeps blocks after its generation, and the target pulled blocks before theirs. Both are told when it is over, so
this counts only if this front end is lost or cut off."""

# A transfer is given up after this many times the time that it should take, or if the engine of its source shows no life at this many
# looks while it computes. There are four a second. Our own engines speak twice a second. Engines of others are asked after a second of
# silence, and answer after their step, which may be long.
PATIENCE_FACTOR = 4.0
MIN_PATIENCE_SECONDS = 1.0
SILENT_LOOKS = {"blocks": 4, "ticket": 24, "meeting": 24}
# A worker answers a Ping also while its engine is in a long step. After half of these looks without a word from it, it gets one.
MUTE_LOOKS = 8

MAX_AVOIDED_SECONDS = 60.0


class Owner(Protocol):
    """The generation of a transfer."""

    turn: Turn

    def can_give_up(self, transfer: Transfer) -> bool:
        """Whether it can go on without this transfer."""

    def transfer_was_late(self) -> None:
        """It was given up."""


@dataclass(slots=True)
class Silence:
    """How many looks in a row found a count as it was at the look before."""

    looks: int = 0
    _before: int = -1

    def look(self, count: int) -> None:
        self.looks = self.looks + 1 if count == self._before else 0
        self._before = count


@dataclass(slots=True, eq=False)
class Transfer:
    """Blocks on their way from one worker to another. `waits`: the source computes them at this moment."""

    id: bytes
    owner: Owner
    source: Member
    target: Member
    reason: MoveReason
    started: float
    deadline: float
    waits: bool = False
    ticket: bytes = b""
    blocks: int = 0
    has_arrived: bool = False
    """The target has reported its end. The source knows, and the target keeps the blocks for the generation."""
    is_used: bool = False
    """The generation has begun at the target."""
    pull_seconds: float = 0.0
    """What it should take when the source has computed everything."""
    _engine: Silence = field(default_factory=Silence)
    _worker: Silence = field(default_factory=Silence)

    @property
    def message(self) -> KvSource:
        return KvSource(self.id, self.source.model.kv_address, self.waits, self.ticket, self.blocks)

    def is_late(self, now: float) -> bool:
        """One look at it. Two engines that work at the same time may have to wait for their turn: that is no delay."""
        handover = self.source.model.kv_handover
        is_over = now >= self.deadline and not (self.waits and handover == "meeting")
        return is_over or (self.waits and self._is_silent(SILENT_LOOKS[handover]))

    def _is_silent(self, most: int) -> bool:
        link = self.source.link
        self._engine.look(link.life_signs)
        self._worker.look(link.frames + link.pongs)
        if self._worker.looks == MUTE_LOOKS // 2:
            link.ping()
        return self._engine.looks >= most or self._worker.looks >= MUTE_LOOKS


def patience(expected_seconds: float) -> float:
    """How long something may take that should take `expected_seconds`."""
    return max(MIN_PATIENCE_SECONDS, PATIENCE_FACTOR * expected_seconds)


@dataclass(eq=False)
class Transfers:
    """The transfers that have not ended. Whatever ends one, both workers are told, and its outcome is counted once."""

    clock: Callable[[], float] = time.monotonic
    open: dict[bytes, Transfer] = field(default_factory=dict)
    counts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    """By reason and outcome."""
    bytes_moved: Counter[str] = field(default_factory=Counter)
    """By reason."""
    durations: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    """Those on which the target has reported, by their length."""
    seconds: float = 0.0
    _relayed: dict[bytes, Transfer] = field(default_factory=dict)
    """Those whose generation is at the source. The transfer may end before that: the target may have failed, or be lost."""
    _busy_until: dict[str, float] = field(default_factory=dict)
    """By worker: when it should have sent and received all that was begun."""
    _failed: dict[tuple[str, str], tuple[int, float]] = field(default_factory=dict)
    """By the names of source and target: how many times in a row they failed, and until when they are avoided."""

    def begin(
        self, owner: Owner, source: Member, target: Member, reason: MoveReason, expected_seconds: float, name: bytes = b"", blocks: int = 0
    ) -> Transfer:
        """`name` is an id that the source knows already, `blocks` what it has; 0: it computes them."""
        now = self.clock()
        identity = name or secrets.token_bytes(TRANSFER_ID_BYTES)
        waits = reason == "prefill"
        deadline = now + patience(expected_seconds) if waits else self._deadline(source, target, expected_seconds)
        transfer = Transfer(identity, owner, source, target, reason, now, deadline, waits, blocks=blocks)
        self.open[identity] = transfer
        if waits:
            self._relayed[identity] = transfer
        return transfer

    def reported(self, member: Member, reports: Iterable[TransferReport]) -> None:
        for report in reports:
            transfer = self.open.get(report.id)
            if transfer is None or transfer.has_arrived:
                continue
            if transfer.source is member:
                transfer.ticket = report.ticket
                if report.outcome is not None and report.outcome != "done":
                    self.end(transfer, report.outcome)
            elif transfer.target is member and report.outcome is not None:
                self._arrived(transfer, report)

    def was_computed(self, transfer: Transfer) -> None:
        """The source has computed all blocks: this is what is left of the transfer."""
        transfer.waits = False
        if not transfer.has_arrived:
            transfer.deadline = self._deadline(transfer.source, transfer.target, transfer.pull_seconds)

    def has_left(self, transfer: Transfer) -> None:
        """Its generation waits for the source no more."""
        self._relayed.pop(transfer.id, None)

    def _deadline(self, source: Member, target: Member, expected_seconds: float) -> float:
        """Transfers of one worker share its link: those before it take their time first. A drain begins hundreds at once."""
        now = self.clock()
        begins = min(now + LEASE_SECONDS, max(now, *[self._busy_until.get(worker.name, now) for worker in (source, target)]))
        self._busy_until[source.name] = self._busy_until[target.name] = begins + expected_seconds
        return begins + patience(expected_seconds)

    def avoids(self, source: str, target: str) -> bool:
        """Whether transfers between these have just failed: a network that lets front ends through may stop workers."""
        return (source, target) in self._failed and self.clock() < self._failed[source, target][1]

    def _note_failure(self, transfer: Transfer) -> None:
        source, target = transfer.source.name, transfer.target.name
        if not self.avoids(source, target):
            streak = min(self._failed.get((source, target), (0, 0.0))[0] + 1, 16)
            self._failed[source, target] = streak, self.clock() + min(MAX_AVOIDED_SECONDS, 2.0**streak)

    def use(self, transfer: Transfer) -> None:
        """Its generation has begun at the target, which reports the end of the transfer before that, or together with it."""
        transfer.is_used = True
        if transfer.has_arrived:
            self.end(transfer)

    def end(self, transfer: Transfer, ending: Ending = "cancelled") -> None:
        """Ends it at both workers. Does nothing when it has ended."""
        if self.open.pop(transfer.id, None) is None:
            return
        if not transfer.has_arrived:
            self.counts[transfer.reason, ending] += 1
            if ending == "failed" or (ending == "stalled" and not transfer.waits):
                self._note_failure(transfer)
            transfer.source.link.end_transfers([transfer.id])
        transfer.target.link.end_transfers([transfer.id])

    def left(self, member: Member) -> list[Owner]:
        """This worker was lost. What it moved is ended at the other end, which computes instead. Returns the owners of what it pulled: they
        may have killed it. A source that died while it was read had computed those prompts before."""
        self._busy_until.pop(member.name, None)
        self._failed = {pair: known for pair, known in self._failed.items() if member.name not in pair}
        lost = [each for each in self.open.values() if each.target is member or (each.source is member and not each.has_arrived)]
        for transfer in lost:
            self.end(transfer, "lost")
        return [transfer.owner for transfer in lost if transfer.target is member]

    def tick(self) -> None:
        """Ends those that take too long."""
        now = self.clock()
        watched = [each for each in self.open.values() if not each.has_arrived and each.id not in self._relayed]
        for transfer in [each for each in (*self._relayed.values(), *watched) if each.is_late(now)]:
            if transfer.owner.can_give_up(transfer):
                self.end(transfer, "stalled")
                transfer.owner.transfer_was_late()

    def _arrived(self, transfer: Transfer, report: TransferReport) -> None:
        transfer.has_arrived = True
        if report.outcome == "done":
            self._failed.pop((transfer.source.name, transfer.target.name), None)
        else:
            self._note_failure(transfer)
        transfer.source.link.end_transfers([transfer.id])
        if transfer.is_used:
            self.end(transfer)
        self.counts[transfer.reason, report.outcome or ""] += 1
        self.bytes_moved[transfer.reason] += report.size
        self.durations[bisect_left(BUCKETS, report.seconds)] += 1
        self.seconds += report.seconds
