"""How long the front end waits for a transfer of KV."""

from __future__ import annotations

from typing import Any, cast

from penstock.cluster.pool import Member
from penstock.cluster.transfers import LEASE_SECONDS, MIN_PATIENCE_SECONDS, Owner, Transfers
from workers import make_model

OWNER = cast(Owner, None)
A, B, C, D = [Member(name, make_model(), cast(Any, None)) for name in "abcd"]


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


def test_no_transfer_waits_longer_than_a_lease_for_others() -> None:
    transfers = Transfers(clock=lambda: 1000.0)
    deadlines = [transfers.begin(OWNER, A, B, "drain", 1.0).deadline for _ in range(50)]
    assert deadlines[-1] == 1000.0 + LEASE_SECONDS + 4.0
