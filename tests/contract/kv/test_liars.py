"""Peers that lie, stall, speak garbage or leave: the other end stays right, says why, and frees everything."""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kv_engine import DictEngine, MemorySlots, names_of
from kv_peers import SECRET, ByHand, LyingSource, connected_by_hand, puller_by_hand, say_hello
from kv_workers import Workers, source_of
from penstock.cluster.kv import transport as sockets
from penstock.cluster.kv.frames import MAX_NAMES, MAX_OPEN_PULLS, Blocks, Ended, Join, Pull, SourceWelcome, Stop, Waiting, encode
from penstock.cluster.kv.shared_memory import MIN_READ_BYTES, PeerSlots, read_only
from penstock.cluster.kv.transport import MAX_OPENING
from penstock.kv.moving import SlotLayout
from penstock.wire.errors import FrameMalformed
from penstock.wire.messages import PROTOCOL_VERSION, Challenge, Goodbye, KvSource

LAYOUT = MemorySlots(64).layout
SIZE = LAYOUT.slot_bytes
NAMES = names_of(3)


def body(number: int) -> bytes:
    """The bytes of a block."""
    slots = MemorySlots(1)
    slots.fill(0, NAMES[number])
    return b"".join(slots.views(0))


def checksum(number: int) -> int:
    slots = MemorySlots(1)
    slots.fill(0, NAMES[number])
    return slots.checksum(slots.views(0))


def block(asked: Pull, number: int, *, first: int | None = None, name: bytes = b"") -> Blocks:
    return Blocks(asked.number, number if first is None else first, name or NAMES[number], (checksum(number),))


def honest(peer: ByHand, asked: Pull) -> None:
    for number in range(asked.blocks):
        peer.send(block(asked, number), body(number))


def garbage(peer: ByHand, asked: Pull) -> None:
    peer.send((5).to_bytes(4) + b"hello")


def too_long(peer: ByHand, asked: Pull) -> None:
    peer.send((1 << 30).to_bytes(4))


def not_for_pullers(peer: ByHand, asked: Pull) -> None:
    peer.send(asked)


def another_name(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), block(asked, 1, name=NAMES[2]), body(1))


def behind_the_end(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), block(asked, 2, first=3), body(2))


def before_the_start(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), block(asked, 2, first=-1), body(2))


def twice(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), block(asked, 0), body(0))


def parts_that_do_not_fit(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), Blocks(asked.number, 1, NAMES[1], (checksum(1), checksum(2))), body(1))


def no_blocks(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), Blocks(asked.number, 1, b"", ()))


def slots_that_are_not_shared(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), Blocks(asked.number, 1, NAMES[1], (checksum(1),), (1,)))


def one_bit(peer: ByHand, asked: Pull) -> None:
    wrong = bytearray(body(1))
    wrong[SIZE // 2] ^= 1
    peer.send(block(asked, 0), body(0), block(asked, 1), bytes(wrong), block(asked, 2), body(2))


def half_a_block(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), block(asked, 1), body(1)[: SIZE // 2])
    raise ConnectionError("it leaves")


def half_a_block_and_silence(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), block(asked, 1), body(1)[: SIZE // 2])
    peer.until_closed()


def keep_alives_for_others(peer: ByHand, asked: Pull) -> None:
    """The connection lives, but this pull does not go on."""
    peer.send(block(asked, 0), body(0))
    stopped = threading.Event()

    def chatter() -> None:
        while not stopped.wait(0.02):
            peer.send(Waiting((asked.number + 1,)))

    talking = threading.Thread(target=chatter)
    talking.start()
    peer.read(Stop)
    stopped.set()
    talking.join()


def goodbye(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), Goodbye("link_error", "it had enough"))


def an_end_without_reason(peer: ByHand, asked: Pull) -> None:
    peer.send(block(asked, 0), body(0), Ended(asked.number, ""))


LIES: list[tuple[Callable[[ByHand, Pull], None], int, str]] = [
    (garbage, 0, "is not a message"),
    (too_long, 0, "announced a frame of 1,073,741,824 bytes"),
    (not_for_pullers, 0, "expected blocks, got Pull"),
    (another_name, 1, "under other names"),
    (behind_the_end, 1, "sent blocks 3 to 4 of 3"),
    (before_the_start, 1, "sent blocks -1 to 0 of 3"),
    (twice, 1, "sent some twice"),
    (parts_that_do_not_fit, 1, "do not fit together"),
    (no_blocks, 1, "do not fit together"),
    (slots_that_are_not_shared, 1, "has not shared them"),
    (one_bit, 1, "block 1 was corrupted on its way"),
    (half_a_block, 1, "closed the connection"),
    (half_a_block_and_silence, 1, "the source is silent"),
    (keep_alives_for_others, 1, "the source is silent"),
    (goodbye, 1, "it had enough"),
    (an_end_without_reason, 1, "the source ended it"),
]


@pytest.mark.parametrize(("lie", "arrived", "why"), LIES, ids=[lie.__name__ for lie, _, _ in LIES])
def test_a_source_that_lies(workers: Workers, lie: Callable[[ByHand, Pull], None], arrived: int, why: str) -> None:
    here = DictEngine()
    transport = workers.start(here, streams=1)
    source = LyingSource(workers.directory, workers.kind, LAYOUT, lie)
    with source.running():
        pulled = KvSource(b"1" * 16, str(source.address))
        transport.pull(pulled, NAMES, [7, 8, 9])
        assert why in here.until_ended(pulled.transfer)
        assert here.progress.get(pulled.transfer, [0])[-1] == arrived
        transport.close()
    assert here.progress.get(pulled.transfer, [0])[-1] == arrived


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": PROTOCOL_VERSION + 1}, "speaks version"),
        ({"secret": "a guess"}, "does not know this link's secret"),
        ({"fingerprint": b"other"}, "another fingerprint"),
        ({"layout": SlotLayout(64, 4096, (0,))}, "do not fit here"),
        ({"is_shared": True}, "but no file came"),
    ],
)
def test_a_source_that_lies_about_itself(workers: Workers, changes: dict[str, object], why: str) -> None:
    here = DictEngine()
    transport = workers.start(here, streams=1)
    source = LyingSource(workers.directory, workers.kind, LAYOUT, honest)
    for name, value in changes.items():
        setattr(source, name, value)
    with source.running():
        pulled = KvSource(b"1" * 16, str(source.address))
        transport.pull(pulled, NAMES, [7, 8, 9])
        assert why in here.until_ended(pulled.transfer)
        transport.close()
    assert source.asked == []


def test_the_honest_one_of_these_sources_is_believed(workers: Workers) -> None:
    here = DictEngine()
    transport = workers.start(here, streams=1)
    source = LyingSource(workers.directory, workers.kind, LAYOUT, honest)
    with source.running():
        pulled = KvSource(b"1" * 16, str(source.address))
        transport.pull(pulled, NAMES, [7, 8, 9])
        assert here.until_ended(pulled.transfer) == ""
        assert all(here.memory.holds(slot, name) for slot, name in zip([7, 8, 9], NAMES, strict=True))
        transport.close()


def test_a_connection_that_was_silent_is_not_used_again(workers: Workers) -> None:
    here = DictEngine()
    transport = workers.start(here, streams=1)

    def once_silent(peer: ByHand, asked: Pull) -> None:
        if source.connections == 1:
            peer.until_closed()
        honest(peer, asked)

    source = LyingSource(workers.directory, workers.kind, LAYOUT, once_silent)
    with source.running():
        first, second = KvSource(b"1" * 16, str(source.address)), KvSource(b"2" * 16, str(source.address))
        transport.pull(first, NAMES, [7, 8, 9])
        assert here.until_ended(first.transfer) == "the source is silent"
        transport.pull(second, NAMES, [7, 8, 9])
        assert here.until_ended(second.transfer) == ""
        transport.close()


def test_nothing_is_written_into_slots_of_a_pull_that_has_ended(workers: Workers) -> None:
    """Half of a block has come when the pull is stopped. The other half comes later, and is not written anywhere."""
    here = DictEngine()

    def late(peer: ByHand, asked: Pull) -> None:
        if asked.number == 1:
            peer.send(block(asked, 0), body(0), block(asked, 1), body(1)[: SIZE // 2])
            peer.read(Stop)
            peer.send(body(1)[SIZE // 2 :], block(asked, 2), body(2))
        else:
            honest(peer, asked)

    transport = workers.start(here, streams=1)
    source = LyingSource(workers.directory, workers.kind, LAYOUT, late)
    with source.running():
        first, second = KvSource(b"1" * 16, str(source.address)), KvSource(b"2" * 16, str(source.address))
        transport.pull(first, NAMES, [7, 8, 9])
        here.until(lambda: here.progress.get(first.transfer) == [1])
        here.until(lambda: bytes(here.memory.views(8)[0]) == body(1)[: SIZE // 2], poll=True)
        transport.stop(first.transfer)
        assert here.until_ended(first.transfer) == "stopped"
        for slot in (7, 8, 9):
            here.memory.fill(slot, b"mine")
        transport.pull(second, NAMES, [17, 18, 19])
        assert here.until_ended(second.transfer) == ""
        assert all(here.memory.holds(slot, b"mine") for slot in (7, 8, 9))
        transport.close()


def test_a_source_that_comes_back_is_used_again(workers: Workers) -> None:
    """No storm while it is away: one connection, then none until the time of the next attempt."""
    here = DictEngine()
    transport = workers.start(here, streams=1)
    source = LyingSource(workers.directory, workers.kind, LAYOUT, honest)
    source.fingerprint = b"other"
    with source.running():
        for number in range(50):
            pulled = KvSource(number.to_bytes(16), str(source.address))
            transport.pull(pulled, NAMES, [7, 8, 9])
            assert here.until_ended(pulled.transfer)
            if number == 0:
                assert source.connections == 1
        assert source.connections < 10
        source.fingerprint = b"equal"
        for number in range(100, 10_000):
            pulled = KvSource(number.to_bytes(16), str(source.address))
            transport.pull(pulled, NAMES, [7, 8, 9])
            if here.until_ended(pulled.transfer) == "":
                break
            here.until_quiet(0.05)
        assert here.ended[-1] == (pulled.transfer, "")
        transport.close()


# Pullers that lie.


def asked(number: int = 1, transfer: int = 1, names: bytes = b"".join(NAMES)) -> Pull:
    return Pull(number, transfer.to_bytes(16), names, True)


def joined(workers: Workers, there: DictEngine) -> ByHand:
    peer = puller_by_hand(workers.start(there).address)
    assert peer.read(SourceWelcome).fingerprint == there.fingerprint
    return peer


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ((5).to_bytes(4) + b"hello", "is not a message"),
        ((1 << 30).to_bytes(4), "announced a frame"),
        (encode(asked()), "expected a request of a puller, got Pull"),
        (encode(Join(b"short")), "expected a request of a puller, got Join"),
        (encode(Join(b"s" * 16)) * 2, "got Join"),
        (encode(Join(b"s" * 16)) + encode(Ended(1, "")), "got Ended"),
        (encode(Join(b"s" * 16)) + encode(Pull(1, b"short", NAMES[0], True)), "under an id of 5 bytes"),
        (encode(Join(b"s" * 16)) + encode(asked(names=b"")), "asks for 0 bytes of names"),
        (encode(Join(b"s" * 16)) + encode(asked(names=b"17 bytes of names")), "asks for 17 bytes of names"),
        (encode(Join(b"s" * 16)) + encode(asked(names=bytes(16 * (MAX_NAMES + 1)))), "bytes of names"),
        (encode(Join(b"s" * 16)) + encode(asked(1)) + encode(asked(1, 2)), "is open already"),
    ],
)
def test_a_puller_that_lies(workers: Workers, said: bytes, why: str) -> None:
    """Its connection is closed, its exports are freed, and others are served on."""
    there = DictEngine(is_manual=True)
    peer = joined(workers, there)
    try:
        peer.send(said)
        assert why in peer.read(Goodbye).message
    except ConnectionError:
        pass  # It was closed before all was read; then the reason may be lost.
    peer.until_closed()
    there.until(lambda: sorted(there.released) == sorted(there.exports))
    there.is_manual = False
    there.store(NAMES)
    here = DictEngine()
    source = source_of(workers.transports[0], 99_999)
    workers.start(here).pull(source, NAMES, [0, 1, 2])
    assert here.until_ended(source.transfer) == ""


@pytest.mark.parametrize(("version", "secret", "why"), [(PROTOCOL_VERSION + 1, SECRET, "version"), (PROTOCOL_VERSION, "a guess", "secret")])
def test_a_puller_of_another_version_or_secret_gets_nothing(workers: Workers, version: int, secret: str, why: str) -> None:
    peer = puller_by_hand(workers.start(DictEngine()).address, version=version, secret=secret)
    assert why in peer.read(Goodbye).message
    peer.until_closed()


def test_the_same_transfer_is_exported_once(workers: Workers) -> None:
    there = DictEngine()
    there.store(NAMES)
    here, other = DictEngine(), DictEngine()
    source = source_of(workers.start(there))
    workers.start(here).pull(source, NAMES, [0, 1, 2])
    assert here.until_ended(source.transfer) == ""
    workers.start(other).pull(source, NAMES, [0, 1, 2])
    assert other.until_ended(source.transfer) == "this transfer was pulled before"


def test_what_is_taken_back_is_not_read_any_more_though_its_puller_reads_nothing(workers: Workers) -> None:
    """The puller reads nothing, so most of the block waits in its slot. After the release the slot gets other bytes, which are not sent."""
    there = DictEngine(4, 1 << 21, is_manual=True)
    there.memory.file = -1  # Over a unix socket, too, the bytes are sent.
    slots = there.store(NAMES)
    peer = joined(workers, there)
    transport = workers.transports[0]
    peer.send(Join(b"s" * 16), asked())
    there.until(lambda: there.exports)
    transport.exported((1).to_bytes(16), 0, slots, is_last=True)
    message = peer.read(Blocks)
    got = peer.read_bytes(1000)
    transport.withdraw((1).to_bytes(16))
    there.until_released((1).to_bytes(16))
    for slot in slots:
        for strip in there.memory.views(slot):
            strip[:] = b"\xee" * len(strip)
    got += peer.read_bytes(there.memory.layout.slot_bytes - 1000)
    assert len(message.checksums) == 1
    assert b"\xee" not in got[-(1 << 20) :]
    assert set(got[-(1 << 20) :]) == {0}
    assert peer.read(Ended).reason == "the source took it back"
    peer.socket.close()


def test_a_puller_on_a_slow_link_hears_that_its_pulls_go_on(tmp_path: Path) -> None:
    """No block comes through. Messages have a connection of their own, and name a pull until the puller has all of it."""
    workers = Workers(tmp_path, "tcp")
    there = DictEngine(64, 1 << 15)
    names = names_of(64)
    there.store(names)
    messages = joined(workers, there)
    messages.send(Join(b"s" * 16, only_messages=True), asked(1, 1, b"".join(names[:1])))
    there.until(lambda: there.exports)
    blocks = puller_by_hand(workers.transports[0].address)
    blocks.read(SourceWelcome)
    blocks.send(Join(b"s" * 16))
    there.until_released((1).to_bytes(16))  # All of it is in the kernel.
    messages.send(asked(2, 2, b"".join(names)), asked(3, 3, b"".join(names)))
    while set(messages.read(Waiting).numbers) != {1, 2, 3}:
        pass
    messages.send(Stop(1), Stop(3))
    while messages.read(Waiting).numbers != (2,):
        pass
    assert blocks.read(Blocks).number == 1
    for peer in (messages, blocks):
        peer.socket.close()
    there.until_released((2).to_bytes(16))
    workers.close()


# Files that are not what they should be. Only over unix sockets.


@pytest.fixture
def on_unix(tmp_path: Path) -> Iterator[Workers]:
    started = Workers(tmp_path, "unix")
    yield started
    started.close()


def offer(peer: ByHand, asked: Pull) -> None:
    """Says that the blocks are in slots 0, 1 and 70."""
    names, sums = b"".join(NAMES), tuple(checksum(number) for number in range(3))
    peer.send(Blocks(asked.number, 0, names[:32], sums[:2], (0, 1)), Blocks(asked.number, 2, names[32:], sums[2:], (70,)))


def test_a_slot_that_is_not_in_the_file(on_unix: Workers) -> None:
    here, shared = DictEngine(), MemorySlots(64)
    for slot, name in enumerate(NAMES):
        shared.fill(slot, name)
    source = LyingSource(on_unix.directory, "unix", shared.layout, offer)
    source.file, source.is_shared = shared.file, True
    transport = on_unix.start(here)
    with source.running():
        pulled = KvSource(b"1" * 16, str(source.address))
        transport.pull(pulled, NAMES, [7, 8, 9])
        assert here.until_ended(pulled.transfer) == "the source has no slot 70"
        assert here.progress[pulled.transfer] == [2]
        transport.close()


def test_a_slot_that_was_used_again_too_early_is_found_out(on_unix: Workers) -> None:
    here, shared = DictEngine(), MemorySlots(64)
    shared.fill(0, NAMES[0])
    shared.fill(1, b"another block")
    source = LyingSource(on_unix.directory, "unix", shared.layout, offer)
    source.file, source.is_shared = shared.file, True
    transport = on_unix.start(here)
    with source.running():
        pulled = KvSource(b"1" * 16, str(source.address))
        transport.pull(pulled, NAMES, [7, 8, 9])
        assert here.until_ended(pulled.transfer) == "block 1 was corrupted on its way"
        transport.close()


@pytest.mark.parametrize("said", [Goodbye("left\n", "\r\n\x1b[31mWARNING forged" * 3000), {"type": "x\nWARNING forged" * 3000}])
def test_who_has_not_proved_itself_writes_no_lines_into_the_log(workers: Workers, said: object, caplog: pytest.LogCaptureFixture) -> None:
    body = msgspec.msgpack.encode(said)
    peer = connected_by_hand(workers.start(DictEngine()).address)
    peer.read(Challenge)
    peer.send(len(body).to_bytes(4) + body)
    peer.until_closed()
    (line,) = [message for message in caplog.messages if message.startswith("a connection for KV was refused")]
    assert "WARNING forged" in line
    assert line.isprintable()
    assert len(line) < 3000


def test_a_pull_too_many_ends_alone(workers: Workers) -> None:
    there = DictEngine(is_manual=True)
    peer = joined(workers, there)
    pulls = [encode(asked(number, number, NAMES[0])) for number in range(MAX_OPEN_PULLS + 1)]
    peer.send(encode(Join(b"s" * 16)) + b"".join(pulls))
    ended = peer.read(Ended)
    assert (ended.number, ended.reason, ended.blocks) == (MAX_OPEN_PULLS, "4,096 other pulls are open, the maximum", 0)
    # Its place is free when another one has ended.
    peer.send(Stop(7), asked(MAX_OPEN_PULLS + 1, MAX_OPEN_PULLS + 1, NAMES[0]))
    there.until(lambda: (MAX_OPEN_PULLS + 1).to_bytes(16) in there.exports)
    assert there.released == [(7).to_bytes(16)]
    assert len(there.exports) == MAX_OPEN_PULLS + 1
    peer.socket.close()
    there.until(lambda: len(there.released) == len(there.exports))


def test_silent_connections_keep_no_puller_out(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest give way to newer ones, and only those that have proved themselves count to the limit."""
    here, there = DictEngine(), DictEngine()
    there.store(NAMES)
    address = workers.start(there).address
    monkeypatch.setattr(sockets, "MAX_CONNECTIONS", 8)
    silent = [connected_by_hand(address) for _ in range(MAX_OPENING + 1)]
    for peer in silent:
        peer.read(Challenge)
    # Only the oldest is closed.
    silent[0].until_closed()
    assert [peer for peer in silent[1:] if select.select([peer.socket], [], [], 0)[0]] == []
    source = KvSource(b"1" * 16, str(address))
    workers.start(here).pull(source, NAMES, [7, 8, 9])
    assert here.until_ended(source.transfer) == ""
    for peer in silent:
        peer.socket.close()


def test_many_pullers_at_once_keep_nobody_out(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them gives way to newer ones: these wait until it has proved itself."""
    monkeypatch.setattr(sockets, "OLD_SECONDS", 60.0)
    address = workers.start(DictEngine()).address
    pullers = [connected_by_hand(address) for _ in range(MAX_OPENING + 8)]
    for peer in pullers:
        say_hello(peer, address)
        peer.read(SourceWelcome)
    for peer in pullers:
        peer.socket.close()


def test_a_puller_that_passes_a_file(on_unix: Workers) -> None:
    """It is closed: nobody here would do so."""
    reading, writing = os.pipe()
    peer = puller_by_hand(on_unix.start(DictEngine()).address, files=[writing])
    assert "the puller passed a file" in peer.read(Goodbye).message
    peer.until_closed()
    os.close(writing)
    assert os.read(reading, 1) == b""
    os.close(reading)


@pytest.mark.parametrize("passed", ["pipe", "short", "shrinks", "empty"])
def test_a_file_that_is_none(on_unix: Workers, passed: str) -> None:
    here, shared = DictEngine(), MemorySlots(64, can_seal=passed == "empty")
    reading, writing = os.pipe()

    def shrink(peer: ByHand, asked: Pull) -> None:
        os.ftruncate(shared.file, 100)
        offer(peer, asked)

    source = LyingSource(on_unix.directory, "unix", shared.layout, shrink)
    source.file, source.is_shared = reading if passed == "pipe" else shared.file, True
    if passed == "short":
        source.layout = SlotLayout(65, LAYOUT.strip_bytes, LAYOUT.starts)
    if passed == "empty":
        os.ftruncate(shared.file, 0)
        fcntl.fcntl(shared.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        source.layout = SlotLayout(0, LAYOUT.strip_bytes, (0, 0))
    transport = on_unix.start(here)
    with source.running():
        pulled = KvSource(b"1" * 16, str(source.address))
        transport.pull(pulled, NAMES, [7, 8, 9])
        why = {
            "pipe": "not a file in memory",
            "short": "does not hold its 65 slots",
            "shrinks": "has become shorter",
            "empty": "which does not hold its 0 slots",
        }
        assert why[passed] in here.until_ended(pulled.transfer)
        transport.close()
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize(("strip_bytes", "can_seal"), [(4096, True), (4096, False), (MIN_READ_BYTES, True)])
def test_slots_are_mapped_if_that_is_safe_and_read_otherwise(on_unix: Workers, strip_bytes: int, can_seal: bool) -> None:
    here, there = DictEngine(8, strip_bytes), DictEngine(8, strip_bytes, can_seal=can_seal)
    names = names_of(5)
    there.store(names)
    source = source_of(on_unix.start(there))
    on_unix.start(here).pull(source, names, [7, 6, 5, 4, 3])
    assert here.until_ended(source.transfer) == ""
    assert all(here.memory.holds(slot, name) for slot, name in zip([7, 6, 5, 4, 3], names, strict=True))
    is_sealed = bool(fcntl.fcntl(there.memory.file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    assert is_sealed == can_seal
    if can_seal:
        with pytest.raises(PermissionError):
            os.ftruncate(there.memory.file, 100)


@pytest.mark.parametrize("can_seal", [True, False])
def test_the_memory_of_a_source_that_has_gone_is_given_back(can_seal: bool) -> None:
    slots = MemorySlots(8, can_seal=can_seal)
    slots.fill(3, NAMES[0])
    peer = PeerSlots(read_only(slots.file), slots.layout)
    peer.open()
    assert peer.is_mapped == can_seal
    copy = MemorySlots(1)
    peer.copy(3, copy.views(0))
    assert copy.holds(0, NAMES[0])
    with pytest.raises(FrameMalformed, match="no slot 8"):
        peer.copy(8, copy.views(0))
    before = descriptors_of(slots.file)
    peer.close()
    peer.close()
    # A mapping has a descriptor of its own.
    assert descriptors_of(slots.file) == before - (2 if can_seal else 1)
    assert not peer.is_mapped


def descriptors_of(file: int) -> int:
    """How many descriptors of this process lead to this file."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them is closed by now
            found += os.path.samestat(entry.stat(), os.fstat(file))
    return found


def test_a_file_that_was_passed_cannot_be_written() -> None:
    slots = MemorySlots(8)
    passed = read_only(slots.file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(passed, b"mine", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(passed, 100, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(passed)


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 1), reason="this kernel has no such seal")
def test_nor_when_it_is_opened_again() -> None:
    """Whoever has a descriptor of the same user's file can open it for writing, by way of /proc."""
    slots = MemorySlots(8, can_seal=True)
    passed = read_only(slots.file)
    again = os.open(f"/proc/self/fd/{passed}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"mine", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(again, 100)
    # The owner's mapping was there before.
    slots.fill(3, NAMES[0])
    assert slots.holds(3, NAMES[0])
    for file in (again, passed):
        os.close(file)
