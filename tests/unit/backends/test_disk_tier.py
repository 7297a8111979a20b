"""KV on disk: what is read is what was written, or nothing."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.backends.disk_stores import left_over
from penstock.backends.disk_tier import DiskTier
from penstock.kv.tiers import Done
from penstock.wire.errors import ConfigError

BYTES = 4096
SLOTS = 8
SIZE = SLOTS * (BYTES + 64)
MODEL = bytes(range(16))


class Disk:
    """A disk tier whose answers are awaited."""

    def __init__(self, directory: Path, fingerprint: bytes = MODEL, size: int = SIZE) -> None:
        self.tier = DiskTier(directory, fingerprint, BYTES, size)
        self.changed = threading.Event()
        self.tier.on_done = self.changed.set
        self.number = 0

    def done(self) -> Done:
        while not (done := self.tier.take_done()):
            assert self.changed.wait(10)
            self.changed.clear()
        assert [each.number for each in done] == [self.number]
        return done[0]

    def write(self, slot: int, text: bytes) -> str:
        self.number += 1
        self.tier.write(self.number, slot, name(text), b"p" * 16, memoryview(text.ljust(BYTES, text)))
        return self.done().failure

    def read(self, slot: int, text: bytes) -> str:
        """The failure, if it is not this text."""
        self.number += 1
        data = bytearray(BYTES)
        self.tier.read(self.number, slot, name(text), memoryview(data))
        done = self.done()
        assert done.failure or data == text.ljust(BYTES, text)
        assert done.seconds > 0
        return done.failure


def name(text: bytes) -> bytes:
    return text.ljust(16, b".")


@contextmanager
def opened(directory: Path, fingerprint: bytes = MODEL, size: int = SIZE) -> Iterator[Disk]:
    disk = Disk(directory, fingerprint, size)
    try:
        yield disk
    finally:
        disk.tier.close()


def store(directory: Path) -> Path:
    return directory / MODEL.hex() / "0"


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory in which three blocks were written."""
    with opened(tmp_path) as disk:
        assert [disk.write(slot, text) for slot, text in ((0, b"a"), (5, b"b"), (3, b"c"))] == ["", "", ""]
    return tmp_path


def test_a_restart_finds_what_was_written_the_oldest_first(filled: Path) -> None:
    with opened(filled) as disk:
        assert disk.tier.recovered() == [(0, name(b"a"), b"p" * 16), (5, name(b"b"), b"p" * 16), (3, name(b"c"), b"p" * 16)]
        assert [disk.read(slot, text) for slot, text in ((0, b"a"), (5, b"b"), (3, b"c"))] == ["", "", ""]
        assert disk.write(5, b"d") == ""
        assert disk.read(5, b"b") == "corrupt", "another block is there now"
    with opened(filled) as disk:
        assert [slot for slot, _, _ in disk.tier.recovered()] == [0, 3], "what was asked for under a wrong name is not trusted"


def test_only_its_user_can_read_it(filled: Path) -> None:
    for path in (filled / MODEL.hex(), store(filled)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in store(filled).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_directory_that_others_could_use_is_closed_to_them(filled: Path) -> None:
    for path in (filled / MODEL.hex(), store(filled), *store(filled).iterdir()):
        path.chmod(0o777)
    with opened(filled) as disk:
        assert len(disk.tier.recovered()) == 3
    test_only_its_user_can_read_it(filled)


@pytest.mark.parametrize("name", ["", "0", "0/lock", "0/index", "0/blocks"])
def test_links_are_not_followed(filled: Path, name: str) -> None:
    """Whoever could write to the directory before would choose which file is truncated, and read KV in it."""
    path, elsewhere = filled / MODEL.hex() / name, filled / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match=r"--kv-disk .* cannot be used: "):
        Disk(filled)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "0", "0/index"])
def test_what_belongs_to_another_user_is_refused(filled: Path, name: str) -> None:
    os.chown(filled / MODEL.hex() / name, 12345, -1)
    with pytest.raises(ConfigError, match="of this user"):
        Disk(filled)


def test_a_disk_that_hangs_does_not_hold_up_the_end(filled: Path) -> None:
    disk, begun, released = Disk(filled), threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        released.wait(60)

    disk.tier.on_done = hang
    disk.tier.write(1, 0, name(b"f"), b"p" * 16, memoryview(bytes(BYTES)))
    assert begun.wait(10)
    disk.tier.close(0.01)
    with opened(filled) as other:
        assert other.tier.recovered() == [], "the first store is still in use"
    released.set()


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("offset", [0, 1000, BYTES - 1])
def test_a_flipped_bit_is_found(filled: Path, offset: int) -> None:
    flip(store(filled) / "blocks", 5 * BYTES + offset)
    with opened(filled) as disk:
        assert disk.read(5, b"b") == "corrupt"
        assert disk.read(3, b"c") == ""
    with opened(filled) as disk:
        assert [slot for slot, _, _ in disk.tier.recovered()] == [0, 3], "it is not found again"


@pytest.mark.parametrize("offset", range(0, 52, 7))
def test_a_record_with_a_flipped_bit_is_dropped(filled: Path, offset: int) -> None:
    flip(store(filled) / "index", 6 * 64 + offset)
    with opened(filled) as disk:
        assert [slot for slot, _, _ in disk.tier.recovered()] == [0, 3]
        assert disk.tier.dropped == 1


def test_a_torn_block_is_found(filled: Path) -> None:
    """The record was written, and only half of the data."""
    os.truncate(store(filled) / "blocks", 5 * BYTES + 100)
    with opened(filled) as disk:
        assert [disk.read(0, b"a"), disk.read(3, b"c"), disk.read(5, b"b")] == ["", "", "corrupt"]


def test_a_block_whose_data_was_replaced_before_a_crash_is_found(filled: Path) -> None:
    """The data of the next block was written, and not its record."""
    with (store(filled) / "blocks").open("r+b") as file:
        file.seek(3 * BYTES)
        file.write(b"x" * BYTES)
    with opened(filled) as disk:
        assert disk.read(3, b"c") == "corrupt"


def test_a_torn_index_keeps_what_is_whole(filled: Path) -> None:
    os.truncate(store(filled) / "index", 64 + 3 * 64 + 20)
    with opened(filled) as disk:
        assert [slot for slot, _, _ in disk.tier.recovered()] == [0]
        assert disk.tier.dropped == 1


def test_a_broken_header_begins_anew(filled: Path) -> None:
    flip(store(filled) / "index", 3)
    with opened(filled) as disk:
        assert disk.tier.recovered() == []
        assert disk.tier.dropped == 6
        assert disk.write(0, b"e") == ""
    with opened(filled) as disk:
        assert len(disk.tier.recovered()) == 1


def test_two_models_share_a_directory_and_nothing_else(filled: Path) -> None:
    with opened(filled, bytes(16)) as other:
        assert other.tier.recovered() == []
    with opened(filled) as disk:
        assert len(disk.tier.recovered()) == 3


def test_a_worker_that_starts_while_another_looks_has_its_store(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts when the other has the lock, and the other goes on when this one waits for it or has started."""
    locked, waits, looked = fcntl.flock, threading.Event(), threading.Event()
    found: list[int] = []

    def start() -> None:
        with opened(filled) as disk:
            found.append(len(disk.tier.recovered()))
        waits.set()

    def wait(_: float) -> None:
        waits.set()
        assert looked.wait(10)

    def lock(file: int, kind: int) -> None:
        locked(file, kind)
        if threading.current_thread() is threading.main_thread():
            starting.start()
            assert waits.wait(10)

    starting = threading.Thread(target=start, daemon=True)
    monkeypatch.setattr(time, "sleep", wait)
    monkeypatch.setattr(fcntl, "flock", lock)
    assert len(left_over(filled, OTHERS[0], 0.0)) == 1
    looked.set()
    starting.join(10)
    assert found == [3]


OTHERS = [bytes([number]) * 16 for number in (1, 2)]


def bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_the_size_bounds_what_all_models_have_in_the_directory(tmp_path: Path) -> None:
    """What others have left over leaves when the room is needed, the oldest first."""
    for age, model in enumerate(OTHERS):
        with opened(tmp_path, model) as disk:
            assert [disk.write(slot, b"a") for slot in range(3)] == [""] * 3
        for path in (tmp_path / model.hex() / "0").iterdir():
            os.utime(path, (1000 + age, 1000 + age))
    with opened(tmp_path) as disk:
        assert disk.write(0, b"a") == ""
        assert len(list(tmp_path.rglob("blocks"))) == 3, "all have room"
        assert [disk.write(slot, b"a") for slot in range(1, 4)] == [""] * 3
        assert not (tmp_path / OTHERS[0].hex() / "0" / "blocks").exists()
        assert (tmp_path / OTHERS[1].hex() / "0" / "blocks").exists()
        assert [disk.write(slot, b"a") for slot in range(4, SLOTS)] == [""] * 4
        assert bytes_in(tmp_path) <= SIZE + 64
    with opened(tmp_path, OTHERS[0]) as disk:
        assert disk.write(0, b"a") == ""
        assert bytes_in(tmp_path) <= SIZE + 64


@pytest.mark.parametrize("missing", ["index", "blocks"])
def test_what_an_interrupted_deletion_left_leaves_too(filled: Path, missing: str) -> None:
    (store(filled) / missing).unlink()
    with opened(filled, OTHERS[0]) as disk:
        assert [disk.write(slot, b"a") for slot in range(SLOTS)] == [""] * SLOTS
        assert bytes_in(filled) <= SIZE + 64
    assert [path.name for path in store(filled).iterdir()] == ["lock"]


def test_a_store_that_is_in_use_does_not_leave(tmp_path: Path) -> None:
    """Nor one of a worker of the same model that may be starting again. Each of them has a size of its own."""
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path, OTHERS[0]) as other:
        assert {each.write(slot, bytes([97 + slot])) for each in (first, second, other) for slot in range(SLOTS)} == {""}
    with opened(tmp_path) as disk, opened(tmp_path, OTHERS[0]):
        assert [disk.write(slot, bytes([107 + slot])) for slot in range(SLOTS)] == [""] * SLOTS
    with opened(tmp_path) as first, opened(tmp_path) as second, opened(tmp_path, OTHERS[0]) as other:
        assert [len(each.tier.recovered()) for each in (first, second, other)] == [SLOTS] * 3


def test_only_stores_are_deleted(filled: Path) -> None:
    kept = [filled / "notes" / "0" / "blocks", filled / OTHERS[0].hex() / "mine" / "blocks", filled / OTHERS[0].hex() / "1" / "blocks"]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(SIZE))
    (filled / OTHERS[1].hex()).symlink_to(filled / MODEL.hex())
    with opened(filled, bytes(16)) as disk:
        assert [disk.write(slot, b"a") for slot in range(SLOTS)] == [""] * SLOTS
    assert all(path.exists() for path in kept)


def test_a_full_disk_at_the_start_stores_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with file_limit(10), opened(tmp_path) as disk:
        assert disk.tier.slots == 0
        assert disk.tier.recovered() == []
    assert caplog.messages[-1] == f"the disk of --kv-disk {tmp_path} is full: this worker stores no KV there"
    with opened(tmp_path) as disk:
        assert disk.write(0, b"a") == ""


def test_what_is_left_over_makes_room_on_a_full_disk(filled: Path) -> None:
    with opened(filled, OTHERS[0]) as disk:
        with file_limit(100):
            assert disk.write(0, b"a") == "full"
        assert not (store(filled) / "blocks").exists()


def test_a_smaller_size_drops_what_is_beyond(filled: Path) -> None:
    with opened(filled, size=4 * (BYTES + 64)) as disk:
        assert disk.tier.slots == 4
        assert [slot for slot, _, _ in disk.tier.recovered()] == [0, 3]
    assert (store(filled) / "blocks").stat().st_size <= 4 * BYTES
    with pytest.raises(ConfigError, match="--kv-disk-size is 100 bytes: expected at least"):
        Disk(filled, size=100)


def test_a_block_that_was_forgotten_does_not_come_back(filled: Path) -> None:
    with opened(filled) as disk:
        disk.tier.forget(0)
    with opened(filled) as disk:
        assert [slot for slot, _, _ in disk.tier.recovered()] == [5, 3]


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_costs_the_block_and_is_left_alone_for_a_while(filled: Path) -> None:
    with opened(filled) as disk:
        with file_limit(6 * BYTES + 100):
            assert disk.write(6, b"d") == "full"
        assert disk.write(1, b"e") == "full", "not tried again at once"
        assert disk.read(0, b"a") == ""
        assert disk.read(6, b"d") == "corrupt"
    with opened(filled) as disk:
        assert [slot for slot, _, _ in disk.tier.recovered()] == [0, 5, 3]
        assert disk.write(1, b"e") == ""


@pytest.mark.parametrize("slot", [0, 5])
def test_a_block_that_gave_way_for_one_that_could_not_be_written_does_not_come_back(filled: Path, slot: int) -> None:
    """The books have forgotten it: nobody would take it out when its session is closed. One slot is written in vain, one not at all."""
    with opened(filled) as disk:
        with file_limit(5 * BYTES + 100):
            assert disk.write(5, b"d") == "full"
        assert disk.write(0, b"e") == "full"
    with opened(filled) as disk:
        assert slot not in [slot for slot, _, _ in disk.tier.recovered()]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_disk_that_fails_costs_the_block(filled: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with opened(filled) as disk:
        for system_call in ("pwritev", "preadv"):
            monkeypatch.setattr(os, system_call, fail)
        assert disk.write(6, b"d") == "error"
        assert disk.read(0, b"a") == "error"
        monkeypatch.undo()
        assert disk.write(6, b"d") == ""
        assert disk.read(6, b"d") == ""


def test_a_disk_that_fails_is_told_once_until_it_works_again(
    filled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with opened(filled) as disk:
        for _ in range(2):
            with monkeypatch.context() as patched:
                for system_call in ("pwritev", "preadv"):
                    patched.setattr(os, system_call, fail)
                assert [disk.write(6, b"d") for _ in range(3)] == ["error"] * 3
                assert [disk.read(0, b"a") for _ in range(3)] == ["error"] * 3
            assert disk.write(0, b"a") == disk.read(0, b"a") == ""
    assert caplog.messages == [f"a KV block could not be {what}: Input/output error" for what in ("written", "read")] * 2


def test_workers_that_share_a_directory_have_a_store_each(filled: Path) -> None:
    holder = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from penstock.backends.disk_tier import DiskTier
        tier = DiskTier(Path(sys.argv[1]), bytes(range(16)), 4096, 40_000)
        print(len(tier.recovered()), flush=True)
        sys.stdin.read()
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", holder, str(filled)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "3\n"
        with opened(filled) as disk:
            assert disk.tier.recovered() == [], "the other process has the first store"
            assert disk.write(0, b"f") == ""
        process.kill()
    with opened(filled) as disk:
        assert len(disk.tier.recovered()) == 3, "a lock does not outlive its process"


def not_a_directory(path: Path) -> None:
    path.write_text("a file")


def not_writable(path: Path) -> None:
    path.symlink_to("/proc/penstock")


@pytest.mark.parametrize("spoil", [not_a_directory, not_writable])
def test_a_directory_that_cannot_be_used_is_an_error_at_the_start(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    spoil(tmp_path / "kv")
    with pytest.raises(ConfigError, match=r"--kv-disk .*kv cannot be used: "):
        Disk(tmp_path / "kv")
