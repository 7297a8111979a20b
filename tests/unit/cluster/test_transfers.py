"""How long the front end waits for a transfer of KV."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.cluster.pool import Member
from penstock.cluster.transfers import LEASE_SECONDS, MIN_PATIENCE_SECONDS, Owner, Transfer, Transfers
from penstock.wire.messages import KvHandover, TransferReport
from workers import make_model


class Link:
    def __init__(self) -> None:
        self.life_signs = self.frames = self.pongs = self.pings = 0

    def ping(self) -> None:
        self.pings += 1

    def end_transfers(self, ids: object) -> None: ...


class Waiting:
    """A generation whose prompt is computed elsewhere."""

    turn = cast(Any, None)
    can_leave = True
    was_late = False

    def can_give_up(self, _: Transfer) -> bool:
        return self.can_leave

    def transfer_was_late(self) -> None:
        self.was_late = True


def waiting(handover: KvHandover) -> tuple[Transfers, Link, Waiting]:
    transfers, link, owner = Transfers(clock=lambda: 0.0), Link(), Waiting()
    transfers.begin(owner, Member("source", make_model(kv_handover=handover), cast(Any, link)), TARGET, "prefill", 1.0)
    transfers.tick()
    return transfers, link, owner


OWNER = cast(Owner, None)
A, B, C, D = [Member(name, make_model(), cast(Any, None)) for name in "abcd"]
SOURCE, TARGET = [Member(name, make_model(), cast(Any, Link())) for name in ("source", "target")]


def test_transfers_that_share_a_link_wait_for_each_other() -> None:
    transfers = Transfers(clock=lambda: 1000.0)
    deadlines = [transfers.begin(OWNER, A, B, "drain", 0.125).deadline for _ in range(20)]
    assert deadlines == [1000.0 + 0.125 * before + MIN_PATIENCE_SECONDS for before in range(20)]
    assert transfers.begin(OWNER, C, B, "peer", 0.125).deadline == 1002.5 + MIN_PATIENCE_SECONDS, "the target is busy"
    assert transfers.begin(OWNER, A, D, "peer", 0.125).deadline == 1002.5 + MIN_PATIENCE_SECONDS, "the source is busy"
    assert Transfers(clock=lambda: 1000.0).begin(OWNER, C, D, "peer", 0.125).deadline == 1000.0 + MIN_PATIENCE_SECONDS


def test_a_prompt_that_is_computed_waits_for_links_only_when_it_is() -> None:
    transfers = Transfers(clock=lambda: 1000.0)
    for _ in range(20):
        transfers.begin(OWNER, A, B, "drain", 0.125)
    prefill = transfers.begin(OWNER, A, B, "prefill", 0.5)
    assert prefill.deadline == 1002.0
    prefill.pull_seconds = 0.125
    transfers.was_computed(prefill)
    assert prefill.deadline == 1002.5 + MIN_PATIENCE_SECONDS


def test_a_pair_whose_transfers_fail_is_left_alone_for_longer_and_longer() -> None:
    now = [0.0]
    transfers = Transfers(clock=lambda: now[0])
    for seconds in (2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        # Those that fail together are one failure.
        for transfer in [transfers.begin(OWNER, SOURCE, TARGET, "peer", 0.125) for _ in range(3)]:
            transfers.reported(TARGET, [TransferReport(transfer.id, "failed")])
            transfers.end(transfer)
        assert transfers.avoids("source", "target")
        assert not transfers.avoids("target", "source")
        now[0] += seconds
        assert not transfers.avoids("source", "target")
    transfer = transfers.begin(OWNER, SOURCE, TARGET, "peer", 0.125)
    transfers.reported(TARGET, [TransferReport(transfer.id, "done")])
    transfers.end(transfer)
    transfers.end(transfers.begin(OWNER, SOURCE, TARGET, "peer", 0.125), "cancelled")
    assert not transfers.avoids("source", "target")
    transfers.end(transfers.begin(OWNER, SOURCE, TARGET, "peer", 0.125), "stalled")
    now[0] += 2.0
    assert not transfers.avoids("source", "target"), "a success is the end of the row"
    transfers.end(transfers.begin(OWNER, SOURCE, TARGET, "peer", 0.125), "stalled")
    assert transfers.avoids("source", "target")
    transfers.left(TARGET)
    assert not transfers.avoids("source", "target"), "it may come back as another one"


def test_a_prompt_that_is_computed_for_too_long_says_nothing_about_the_network() -> None:
    transfers = Transfers(clock=lambda: 0.0)
    transfer = transfers.begin(OWNER, SOURCE, TARGET, "prefill", 0.125)
    transfers.end(transfer, "stalled")
    assert not transfers.avoids("source", "target")
    transfer = transfers.begin(OWNER, SOURCE, TARGET, "prefill", 0.125)
    transfers.was_computed(transfer)
    transfers.end(transfer, "stalled")
    assert transfers.avoids("source", "target"), "only the bytes were missing"


@pytest.mark.parametrize(("handover", "looks"), [("blocks", 4), ("ticket", 24), ("meeting", 24)])
def test_a_source_whose_engine_shows_no_life_is_given_up(handover: KvHandover, looks: int) -> None:
    """An engine of others says nothing in a step, and its worker answers meanwhile."""
    transfers, link, owner = waiting(handover)
    for _ in range(3):
        for _ in range(looks - 1):
            link.pongs = link.pings
            link.frames += 1
            transfers.tick()
        link.life_signs += 1
        transfers.tick()
    assert not owner.was_late
    for _ in range(looks):
        assert not owner.was_late
        link.frames += 1
        transfers.tick()
    assert (owner.was_late, transfers.counts) == (True, {("prefill", "stalled"): 1})


@pytest.mark.parametrize("handover", ["ticket", "meeting"])
@pytest.mark.parametrize("answers", [False, True])
def test_a_worker_that_answers_nothing_is_given_up_soon(handover: KvHandover, answers: bool) -> None:
    transfers, link, owner = waiting(handover)
    for _ in range(8):
        assert not owner.was_late
        transfers.tick()
        if answers:
            link.pongs = link.pings
    assert (link.pings, owner.was_late) == (1, not answers)


def test_a_source_without_which_nothing_goes_on_is_not_given_up() -> None:
    transfers, link, owner = waiting("meeting")
    owner.can_leave = False
    for _ in range(50):
        transfers.tick()
    assert (owner.was_late, len(transfers.open)) == (False, 1)
    link.life_signs = link.frames = 1
    owner.can_leave = True
    transfers.tick()
    assert not owner.was_late, "it has spoken"
    for _ in range(8):
        transfers.tick()
    assert owner.was_late


def test_no_transfer_waits_longer_than_a_lease_for_others() -> None:
    transfers = Transfers(clock=lambda: 1000.0)
    deadlines = [transfers.begin(OWNER, A, B, "drain", 1.0).deadline for _ in range(50)]
    assert deadlines[-1] == 1000.0 + LEASE_SECONDS + 4.0
