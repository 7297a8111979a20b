"""How long the front end waits for a transfer of KV."""

from __future__ import annotations

from typing import Any, cast

from penstock.cluster.pool import Member
from penstock.cluster.transfers import LEASE_SECONDS, MIN_PATIENCE_SECONDS, Owner, Transfers
from penstock.wire.messages import TransferReport
from workers import make_model


class Link:
    def end_transfers(self, ids: object) -> None: ...


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


def test_no_transfer_waits_longer_than_a_lease_for_others() -> None:
    transfers = Transfers(clock=lambda: 1000.0)
    deadlines = [transfers.begin(OWNER, A, B, "drain", 1.0).deadline for _ in range(50)]
    assert deadlines[-1] == 1000.0 + LEASE_SECONDS + 4.0
