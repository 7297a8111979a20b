"""Where a worker listens for others that pull its KV, and the faults that it is told to inject."""

from __future__ import annotations

from typing import cast

import pytest

from penstock.cli.compose import worker_arguments
from penstock.cli.kv import kv_place
from penstock.cli.main import load
from penstock.cluster.kv.faults import Fate, Faults
from penstock.config.commands import WorkerSettings
from penstock.config.engines import TransferFaults, parse_fault
from penstock.wire.address import parse_address
from penstock.wire.errors import ConfigError


def worker(*arguments: str) -> WorkerSettings:
    return cast(WorkerSettings, load(["worker", "--engine=simulator", *arguments], {}).settings)


@pytest.mark.parametrize(
    ("flags", "address", "host"),
    [
        ("--listen=unix:/tmp/w.sock", "unix:/tmp/w.sock.kv", ""),
        ("--listen=tcp://10.0.0.7:7000", "tcp://10.0.0.7:0", "10.0.0.7"),
        ("--listen=tcp://0.0.0.0:7000 --advertise=tcp://gpu1:7000", "tcp://0.0.0.0:0", "gpu1"),
        ("--listen=tcp://[::]:7000 --advertise=tcp://gpu1:7000", "tcp://[::]:0", "gpu1"),
        ("--listen=tcp://10.0.0.7:7000 --advertise=tcp://gpu1:7000", "tcp://10.0.0.7:0", "gpu1"),
        ("--listen=tcp://10.0.0.7:7000 --advertise=tcp://gpu1:7000 --kv-listen=tcp://10.1.0.7:1", "tcp://10.1.0.7:1", "10.1.0.7"),
        ("--listen=tcp://0.0.0.0:7000 --kv-listen=tcp://10.1.0.7:7001", "tcp://10.1.0.7:7001", "10.1.0.7"),
        ("--listen=tcp://10.0.0.7:7000 --kv-listen=unix:/tmp/kv", "unix:/tmp/kv", ""),
    ],
)
def test_where_kv_is_pulled(flags: str, address: str, host: str) -> None:
    assert kv_place(worker(*flags.split())) == (parse_address(address), host)


def test_a_host_that_means_all_is_no_place_to_pull_from() -> None:
    with pytest.raises(ConfigError, match=r"--listen tcp://0.0.0.0:7000 has no host that other workers can use.*--advertise"):
        kv_place(worker("--listen=tcp://0.0.0.0:7000"))
    with pytest.raises(ConfigError, match=r"--kv-listen tcp://0.0.0.0:1"):
        kv_place(worker("--listen=unix:/tmp/w.sock", "--kv-listen=tcp://0.0.0.0:1"))


def test_kv_in_the_clear_is_named() -> None:
    assert any(
        "KV on --kv-listen tcp://10.0.0.7:1" in each for each in worker("--listen=unix:/w", "--kv-listen=tcp://10.0.0.7:1").unencrypted()
    )
    assert worker("--listen=unix:/w", "--kv-listen=tcp://127.0.0.1:1").unencrypted() == []


def test_faults_reach_the_workers_of_serve() -> None:
    given = TransferFaults(drop=0.05, stall=0.05, corrupt=0.05, kill=0.01, seed=3)
    loaded = load(["serve", "--engine=simulator", f"--fault={given}"], {})
    (argument,) = [each for each in worker_arguments(loaded.settings, loaded.resolved) if each.startswith("--fault")]
    assert worker("--listen=unix:/tmp/w.sock", argument).simulator.fault == given


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected transfer:KIND=CHANCE"),
        ("transfer:", "expected transfer:KIND=CHANCE"),
        ("disk:drop=0.1", "expected transfer:KIND=CHANCE"),
        ("transfer:lose=0.1", "'lose=0.1' is unknown or given twice: expected drop, stall, corrupt, kill or seed"),
        ("transfer:drop=0.1,drop=0.2", "'drop=0.2' is unknown or given twice"),
        ("transfer:drop=often", "'drop=often' is not a number: expected drop=0.05"),
        ("transfer:drop", "is not a number"),
        ("transfer:drop=nan", "is not a probability"),
        ("transfer:drop=1.5", "'drop=1.5' is not a probability: expected 0 to 1"),
        ("transfer:drop=0.6,stall=0.6", "the probabilities are 1.2 together"),
        ("transfer:drop=0.6,seed=x", "'seed=x' is not a number"),
    ],
)
def test_faults_that_make_no_sense(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        worker("--listen=unix:/tmp/w.sock", f"--fault={text}")


def test_faults_come_as_often_as_they_should_and_the_same_way_again() -> None:
    chances = parse_fault("transfer:drop=0.1,stall=0.2,corrupt=0.3,kill=0.05,seed=5")
    fates = [Faults(chances).draw(10) for _ in range(1)] + [fate for faults in [Faults(chances)] for fate in map(faults.draw, [10] * 4000)]
    assert fates[0] == fates[1]
    kinds = [fate.kind for fate in fates]
    for kind, chance in (*chances.by_kind(), (None, 0.35)):
        assert abs(kinds.count(kind) / len(kinds) - chance) < 0.03
    assert {fate.block for fate in fates} == set(range(10))
    assert {Faults().draw(10) for _ in range(10)} == {Fate()}
