"""Two workers' transports over real sockets: what arrives, who holds what, and when both ends know that it is over."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kv_engine import DictEngine, names_of
from kv_workers import QUICK, Workers, source_of
from penstock.wire.errors import ConfigError
from penstock.wire.messages import KvSource


def test_blocks_arrive_in_order_and_both_ends_know_of_the_end(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine()
    names = names_of(40)
    there.store(names)
    source = source_of(workers.start(there))
    slots = list(range(63, 23, -1))
    workers.start(here).pull(source, names, slots)
    assert here.until_ended(source.transfer) == ""
    there.until_released(source.transfer)
    assert all(here.memory.holds(slot, name) for slot, name in zip(slots, names, strict=True))
    progress = here.progress[source.transfer]
    assert progress == sorted(progress)
    assert progress[-1] == 40


def test_blocks_flow_while_later_ones_are_computed(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine(is_manual=True)
    names = names_of(10)
    slots = there.store(names)
    there_transport, here_transport = workers.start(there), workers.start(here)
    source = source_of(there_transport, waits=True)
    here_transport.pull(source, names, list(range(10)))
    there.until(lambda: source.transfer in there.exports)
    for done in range(0, 10, 2):
        there_transport.exported(source.transfer, done, slots[done : done + 2], is_last=False)
        here.until(lambda: here.progress.get(source.transfer, [0])[-1] == done + 2)  # noqa: B023 - called at once
    assert here.until_ended(source.transfer) == ""
    there.until_released(source.transfer)


def test_a_source_that_waits_for_its_engine_is_waited_for(workers: Workers) -> None:
    """Four times as long as the patience: keep-alives say that it goes on."""
    here, there = DictEngine(), DictEngine(is_manual=True)
    slots = there.store(names_of(1))
    there_transport, here_transport = workers.start(there), workers.start(here)
    source = source_of(there_transport, waits=True)
    here_transport.pull(source, names_of(1), [0])
    there.until(lambda: source.transfer in there.exports)
    here.until_quiet(4 * QUICK.look_seconds * QUICK.silent_looks)
    assert here.ended == []
    there_transport.exported(source.transfer, 0, slots, is_last=True)
    assert here.until_ended(source.transfer) == ""


def test_a_block_that_the_source_lacks_ends_the_pull_behind_those_before_it(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine()
    names = names_of(10)
    there.store(names[:6])
    source = source_of(workers.start(there))
    workers.start(here).pull(source, names, list(range(10)))
    assert here.until_ended(source.transfer) == "the source has 6 of 10 blocks"
    assert here.progress[source.transfer][-1] == 6
    there.until_released(source.transfer)


def test_a_pull_that_is_stopped_writes_no_more_and_frees_the_source(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine(is_manual=True)
    slots = there.store(names_of(20))
    there_transport, here_transport = workers.start(there), workers.start(here)
    source = source_of(there_transport, waits=True)
    here_transport.pull(source, names_of(20), list(range(20)))
    there.until(lambda: source.transfer in there.exports)
    there_transport.exported(source.transfer, 0, slots[:5], is_last=False)
    here.until(lambda: here.progress.get(source.transfer, [0])[-1] == 5)
    here_transport.stop(source.transfer)
    assert here.until_ended(source.transfer) == "stopped"
    there.until_released(source.transfer)
    for slot in range(20):
        here.memory.fill(slot, b"another")
    there_transport.exported(source.transfer, 5, slots[5:], is_last=True)
    # The next transfer on the same connection comes after all that was sent before it.
    there.is_manual = False
    other = source_of(there_transport, 2)
    here_transport.pull(other, names_of(1), [30])
    assert here.until_ended(other.transfer) == ""
    assert all(here.memory.holds(slot, b"another") for slot in range(20))


def test_a_source_that_takes_its_export_back_is_told_when_nobody_reads_it(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine(is_manual=True)
    slots = there.store(names_of(20))
    there_transport, here_transport = workers.start(there), workers.start(here)
    source = source_of(there_transport, waits=True)
    here_transport.pull(source, names_of(20), list(range(20)))
    there.until(lambda: source.transfer in there.exports)
    there_transport.exported(source.transfer, 0, slots[:5], is_last=False)
    here.until(lambda: here.progress.get(source.transfer, [0])[-1] == 5)
    there_transport.withdraw(source.transfer)
    there_transport.withdraw(source.transfer)
    there.until_released(source.transfer)
    assert here.until_ended(source.transfer) == "the source took it back"


def test_a_source_that_goes_ends_all_its_pulls_at_once_and_is_found_again(workers: Workers) -> None:
    here, there, other = DictEngine(), DictEngine(is_manual=True), DictEngine()
    other.store(names_of(3))
    there_transport, other_transport, here_transport = workers.start(there), workers.start(other), workers.start(here)
    sources = [source_of(there_transport, number, waits=True) for number in range(1, 6)]
    for slot, source in enumerate(sources):
        here_transport.pull(source, names_of(1), [slot])
    there.until(lambda: len(there.exports) == 5)
    there_transport.close()
    for source in sources:
        assert "worker-0 is stopping" in here.until_ended(source.transfer)
        there.until_released(source.transfer)
    elsewhere = source_of(other_transport, 9)
    here_transport.pull(elsewhere, names_of(3), [10, 11, 12])
    assert here.until_ended(elsewhere.transfer) == ""


def test_a_puller_that_goes_frees_what_it_pulled(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine(is_manual=True)
    there_transport, here_transport = workers.start(there), workers.start(here)
    sources = [source_of(there_transport, number, waits=True) for number in range(1, 6)]
    for source in sources:
        here_transport.pull(source, names_of(1), [0])
    there.until(lambda: len(there.exports) == 5)
    here_transport.close()
    for source in sources:
        there.until_released(source.transfer)
        assert here.until_ended(source.transfer) == "worker-1 is stopping"
    late = source_of(there_transport, 7)
    here_transport.pull(late, names_of(1), [0])
    assert here.until_ended(late.transfer) == "this worker is stopping"


def test_a_thread_that_cannot_begin_ends_the_start(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    failures: list[ConfigError] = []

    def start() -> None:
        try:
            workers.start(DictEngine())
        except ConfigError as error:
            failures.append(error)

    monkeypatch.setattr(asyncio.events, "new_event_loop", fail)
    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    starting.join(10)
    assert [str(error) for error in failures] == ["the thread that moves KV cannot begin: Too many open files"]


def test_nobody_listens_there(workers: Workers, tmp_path: Path) -> None:
    here = DictEngine()
    workers.patience = replace(QUICK, retry_seconds=60.0, max_retry_seconds=60.0)
    transport = workers.start(here)
    source = KvSource(b"1" * 16, f"unix:{tmp_path}/nobody.kv" if workers.kind == "unix" else "tcp://127.0.0.1:1")
    transport.pull(source, names_of(1), [0])
    assert "cannot connect" in here.until_ended(source.transfer)
    # No storm: the next one does not even try.
    again = KvSource(b"2" * 16, source.address)
    transport.pull(again, names_of(1), [0])
    assert "the next is tried in" in here.until_ended(again.transfer)


def test_names_that_hang_stop_neither_other_pulls_nor_the_end(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are more than the threads of an event loop. Each name is looked up once, however often it is tried."""
    look_up, hanging, released = socket.getaddrinfo, [], threading.Event()

    def hang(host: str, *args: int, **settings: int) -> list[object]:
        if host.endswith(".invalid") and not settings.get("flags"):
            hanging.append(host)
            released.wait()
        return list(look_up(host, *args, **settings))

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    workers.patience = replace(QUICK, silent_looks=1000, connect_seconds=0.3, retry_seconds=0.01, max_retry_seconds=0.01)
    here, there = DictEngine(), DictEngine()
    there.store(names_of(3))
    there_transport, here_transport = workers.start(there), workers.start(here)
    lost = [KvSource(number.to_bytes(16), f"tcp://{number % 40}.invalid:1") for number in range(1000, 1080)]
    try:
        for some in (lost[:40], lost[40:]):
            for source in some:
                here_transport.pull(source, names_of(1), [0])
            for source in some:
                assert "did not finish its handshake within 0.3 s" in here.until_ended(source.transfer)
            here.until_quiet(0.05)
        failure = "none was tried"
        # A busy machine may not finish a handshake in so short a time, either.
        while failure and len(here.ended) < 100:
            source = source_of(there_transport, len(here.ended))
            here_transport.pull(source, names_of(3), [0, 1, 2])
            failure = here.until_ended(source.transfer)
            here.until_quiet(0.05)
        assert failure == ""
        closing = threading.Thread(target=here_transport.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
    finally:
        released.set()
    assert sorted(hanging) == sorted({f"{number}.invalid" for number in range(40)})


def test_another_fingerprint_is_refused(workers: Workers) -> None:
    here, there = DictEngine(fingerprint=b"one"), DictEngine(fingerprint=b"another")
    there.store(names_of(3))
    source = source_of(workers.start(there))
    workers.start(here).pull(source, names_of(3), [0, 1, 2])
    assert "another fingerprint" in here.until_ended(source.transfer)
    assert there.exports == {}


def test_other_slots_are_refused(workers: Workers) -> None:
    here, there = DictEngine(strip_bytes=4096), DictEngine(strip_bytes=8192)
    source = source_of(workers.start(there))
    workers.start(here).pull(source, names_of(3), [0, 1, 2])
    assert "do not fit here" in here.until_ended(source.transfer)


def test_another_secret_is_refused(workers: Workers) -> None:
    here, there = DictEngine(), DictEngine()
    source = source_of(workers.start(there))
    workers.secret = "another"
    workers.start(here).pull(source, names_of(3), [0, 1, 2])
    assert "does not know this link's secret" in here.until_ended(source.transfer)
    assert there.exports == {}


def test_transfers_take_turns(workers: Workers) -> None:
    """A short transfer behind two long ones ends before them. Those end in the order in which they began: none waits for the other."""
    here, there = DictEngine(500, 16_384), DictEngine(500, 16_384)
    first, second, short = names_of(200), names_of(200, "second"), names_of(10, "short")
    there.store([*first, *second, *short])
    there_transport, here_transport = workers.start(there), workers.start(here, streams=1)
    sources = [source_of(there_transport, number) for number in range(3)]
    for source, names, start in zip(sources, (first, second, short), (0, 200, 400), strict=True):
        here_transport.pull(source, names, list(range(start, start + len(names))))
    for source in sources:
        assert here.until_ended(source.transfer) == ""
    assert [transfer for transfer, _ in here.ended] == [sources[2].transfer, sources[0].transfer, sources[1].transfer]
    assert all(here.memory.holds(slot, name) for slot, name in enumerate([*first, *second, *short]))
