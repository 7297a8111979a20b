"""What goes wrong between workers: processes that are killed or frozen, hosts that are gone, and the faults that a source injects."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kv_engine import DictEngine, names_of
from kv_workers import QUICK, Workers, source_of
from penstock.cluster.kv.faults import Faults
from penstock.config.commands import LinkTlsSettings
from penstock.config.engines import TransferFaults
from penstock.wire.address import TcpAddress
from penstock.wire.messages import KvSource
from relay import cut_power

TESTS = Path(__file__).parents[2]
CERTIFICATES = TESTS / "certificates"
BLOCKS = 12


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("drop", "an injected fault"), ("stall", "the source is silent"), ("corrupt", "was corrupted on its way")],
)
def test_an_injected_fault_spoils_one_transfer_and_no_other(workers: Workers, kind: str, failure: str) -> None:
    here, there = DictEngine(), DictEngine()
    there.store(names_of(BLOCKS))
    chances = TransferFaults(**{kind: 0.5}, seed=11)
    fates = [fate.kind for faults in [Faults(chances)] for fate in [faults.draw(BLOCKS) for _ in range(8)]]
    assert {kind, None} == set(fates)
    there_transport, here_transport = workers.start(there, faults=Faults(chances)), workers.start(here)
    for number, fate in enumerate(fates):
        source = source_of(there_transport, number)
        here_transport.pull(source, names_of(BLOCKS), list(range(BLOCKS)))
        ended = here.until_ended(source.transfer)
        assert (failure in ended) if fate else (ended == "")
        there.until_released(source.transfer)


def test_a_source_that_lives_and_does_not_name_a_pull_has_given_it_up(workers: Workers) -> None:
    """The puller does not wait for the silence of a whole second: the source says which pulls go on. One that waits is named."""
    workers.patience = replace(QUICK, silent_looks=1_000_000)
    here, there = DictEngine(), DictEngine()
    there.store(names_of(BLOCKS))
    there_transport, here_transport = workers.start(there, faults=Faults(TransferFaults(stall=1.0))), workers.start(here)
    waiting, stalled = source_of(there_transport, 1, waits=True), source_of(there_transport, 2)
    here_transport.pull(waiting, [b"not computed yet"], [BLOCKS])
    here_transport.pull(stalled, names_of(BLOCKS), list(range(BLOCKS)))
    assert here.until_ended(stalled.transfer) == "the source is silent"
    assert [transfer for transfer, _ in here.ended] == [stalled.transfer], "the one that waits goes on"
    here_transport.stop(waiting.transfer)
    assert "stopped" in here.until_ended(waiting.transfer)


def test_an_injected_death(workers: Workers) -> None:
    here, there, died = DictEngine(), DictEngine(), []
    there.store(names_of(BLOCKS))
    transport = workers.start(there, faults=Faults(TransferFaults(kill=1.0), lambda: died.append(True)))
    source = source_of(transport)
    here_transport = workers.start(here)
    here_transport.pull(source, names_of(BLOCKS), list(range(BLOCKS)))
    there.until(lambda: died, poll=True)
    assert here.ended == []
    here_transport.stop(source.transfer)
    there.until_released(source.transfer)


@contextmanager
def source_process(workers: Workers) -> Iterator[tuple[subprocess.Popen[str], KvSource]]:
    """A worker in another process that exports 5 of 12 blocks, and then goes on computing."""
    address = f"unix:{workers.directory}/other.kv" if workers.kind == "unix" else "tcp://127.0.0.1:0"
    command = [sys.executable, str(TESTS / "kv_process.py"), address, str(BLOCKS), "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, KvSource(b"1" * 16, process.stdout.readline().strip(), waits=True)
        finally:
            process.kill()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_source_that_is_killed_or_frozen(workers: Workers, how: signal.Signals) -> None:
    here = DictEngine()
    transport = workers.start(here)
    with source_process(workers) as (process, source):
        transport.pull(source, names_of(BLOCKS), list(range(BLOCKS)))
        here.until(lambda: here.progress.get(source.transfer, [0])[-1] == 5)
        os.kill(process.pid, how)
        failure = here.until_ended(source.transfer)
        assert ("the source is silent" in failure) == (how == signal.SIGSTOP)
        assert all(here.memory.holds(slot, name) for slot, name in enumerate(names_of(5)))
    assert here.progress[source.transfer][-1] == 5


def test_a_worker_that_was_itself_busy_does_not_blame_its_source(workers: Workers) -> None:
    """Its thread does nothing for three times its patience: that is one look, not silence."""
    here, there = DictEngine(), DictEngine(is_manual=True)
    slots = there.store(names_of(2))
    there_transport, here_transport = workers.start(there), workers.start(here)
    source = source_of(there_transport, waits=True)
    here.busy_seconds = 3 * QUICK.look_seconds * QUICK.silent_looks
    here_transport.pull(source, names_of(2), [0, 1])
    there.until(lambda: there.exports)
    there_transport.exported(source.transfer, 0, slots[:1], is_last=False)
    here.until(lambda: here.progress)
    there_transport.exported(source.transfer, 1, slots[1:], is_last=False)
    assert here.until_ended(source.transfer) == ""


def test_both_ends_notice_that_the_other_host_is_gone(tmp_path: Path) -> None:
    """No packet comes through any more, and nothing is closed."""
    workers = Workers(tmp_path, "tcp")
    here, there = DictEngine(), DictEngine(is_manual=True)
    there_transport, here_transport = workers.start(there), workers.start(here)
    source = source_of(there_transport, waits=True)
    here_transport.pull(source, names_of(1), [0])
    there.until(lambda: there.exports)
    assert isinstance(there_transport.address, TcpAddress)
    cut_power({there_transport.address.port})
    assert here.until_ended(source.transfer) == "the source is silent"
    there.until_released(source.transfer)
    workers.close()


# TLS.


@pytest.fixture
def over_tls(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path, "tcp")
    started.secret = ""
    started.tls = tls("worker")
    yield started
    started.close()


def tls(name: str) -> LinkTlsSettings:
    return LinkTlsSettings(CERTIFICATES / f"{name}.pem", CERTIFICATES / f"{name}.pem", CERTIFICATES / "ca.pem")


@pytest.mark.parametrize("strip_bytes", [64, 4096, 1 << 18])
def test_blocks_over_tls(over_tls: Workers, strip_bytes: int) -> None:
    here, there = DictEngine(64, strip_bytes), DictEngine(64, strip_bytes)
    names = names_of(40)
    there.store(names)
    source = source_of(over_tls.start(there))
    over_tls.tls = tls("front_end")
    over_tls.start(here).pull(source, names, list(range(20, 60)))
    assert here.until_ended(source.transfer) == ""
    assert all(here.memory.holds(slot, name) for slot, name in zip(range(20, 60), names, strict=True))
    there.until_released(source.transfer)


def test_an_injected_fault_over_tls_on_one_connection(over_tls: Workers) -> None:
    """The connection has only a message to send in the place of blocks."""
    here, there = DictEngine(), DictEngine()
    there.store(names_of(BLOCKS))
    source = source_of(over_tls.start(there, faults=Faults(TransferFaults(drop=1.0))))
    over_tls.tls = tls("front_end")
    over_tls.start(here, streams=1).pull(source, names_of(BLOCKS), list(range(BLOCKS)))
    assert here.until_ended(source.transfer) == "an injected fault"


@pytest.mark.parametrize(("certificate", "why"), [("stranger", "broke"), ("expired", "broke")], ids=["signed by another", "expired"])
def test_a_puller_with_a_wrong_certificate_gets_nothing(over_tls: Workers, certificate: str, why: str) -> None:
    here, there = DictEngine(), DictEngine()
    source = source_of(over_tls.start(there))
    over_tls.tls = tls(certificate)
    over_tls.start(here).pull(source, names_of(1), [0])
    assert why in here.until_ended(source.transfer)
    assert there.exports == {}


def test_a_source_with_the_certificate_of_another_host_is_not_used(over_tls: Workers) -> None:
    here, there = DictEngine(), DictEngine()
    over_tls.tls = tls("elsewhere")
    source = source_of(over_tls.start(there))
    over_tls.tls = tls("worker")
    over_tls.start(here).pull(source, names_of(1), [0])
    assert "does not accept the certificate" in here.until_ended(source.transfer)
    assert there.exports == {}


def test_a_puller_without_tls_is_refused(over_tls: Workers) -> None:
    here, there = DictEngine(), DictEngine()
    source = source_of(over_tls.start(there))
    over_tls.tls, over_tls.secret = None, "a secret"
    over_tls.start(here).pull(source, names_of(1), [0])
    assert here.until_ended(source.transfer)
    assert there.exports == {}
