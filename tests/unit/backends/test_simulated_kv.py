"""The simulator's slots and links."""

from __future__ import annotations

import mmap
from collections.abc import Callable

from penstock.backends.simulated_kv import SLOT_BYTES, Link, SimulatedSlots


class Timer:
    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback = callback
        self.is_over = False

    def cancel(self) -> None:
        self.is_over = True


class Timers:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[[], None], /) -> Timer:
        self._timers.append(Timer(when, callback))
        return self._timers[-1]

    @property
    def waiting(self) -> list[float]:
        return sorted(timer.due for timer in self._timers if not timer.is_over)

    def pass_until(self, now: float) -> None:
        """Every timer runs when it is due, unless the clock is beyond it already."""
        while due := [timer for timer in self._timers if not timer.is_over and timer.due <= now]:
            first = min(due, key=lambda timer: timer.due)
            first.is_over = True
            self.now = max(self.now, first.due)
            first.callback()
        self.now = now


class Log:
    def __init__(self, timers: Timers) -> None:
        self._timers = timers
        self.entries: list[tuple[str, float]] = []

    def add(self, name: str) -> Callable[[], None]:
        return lambda: self.entries.append((name, round(self._timers.now - 100.0, 6)))


def test_a_slot_has_the_bytes_of_its_name_and_another_process_can_map_them() -> None:
    slots = SimulatedSlots(8)
    slots.fill(3, b"one" * 5)
    assert slots.holds(3, b"one" * 5)
    assert not slots.holds(3, b"two" * 5)
    assert not slots.holds(2, b"one" * 5)
    (view,) = slots.views(3)
    with mmap.mmap(slots.file, 8 * SLOT_BYTES) as other:
        assert other[3 * SLOT_BYTES : 4 * SLOT_BYTES] == bytes(view)
    checksum = slots.checksum([view])
    view[7] ^= 1
    assert slots.checksum([view]) != checksum
    assert not slots.holds(3, b"one" * 5)
    slots.close()
    assert slots.file == -1


def test_a_link_carries_one_piece_after_the_other() -> None:
    timers = Timers()
    log, link = Log(timers), Link(1000.0, timers)
    link.carry(b"a", 500, log.add("a"))
    link.carry(b"b", 1000, log.add("b"))
    link.carry(b"b", 0, log.add("end of b"))
    timers.pass_until(101.0)
    assert log.entries == [("a", 0.5)]
    timers.pass_until(110.0)
    assert log.entries == [("a", 0.5), ("b", 1.5), ("end of b", 1.5)]
    # A free link begins at once: what it did not carry before is no credit.
    link.carry(b"c", 1000, log.add("c"))
    timers.pass_until(120.0)
    assert log.entries[-1] == ("c", 11.0)
    assert not timers.waiting


def test_a_late_event_loop_does_not_slow_a_link_down() -> None:
    timers = Timers()
    log, link = Log(timers), Link(1000.0, timers)
    for name in "abc":
        link.carry(name.encode(), 1000, log.add(name))
    timers.now = 102.5
    timers.pass_until(102.5)
    assert log.entries == [("a", 2.5), ("b", 2.5)]
    timers.pass_until(110.0)
    assert log.entries[-1] == ("c", 3.0)


def test_dropped_pieces_free_the_link_at_once() -> None:
    timers = Timers()
    log, link = Log(timers), Link(1000.0, timers)
    link.carry(b"a", 1000, log.add("a"))
    link.carry(b"b", 1000, log.add("b"))
    link.carry(b"a", 1000, log.add("a"))
    timers.pass_until(100.25)
    link.drop(b"a")
    assert len(link) == 1
    timers.pass_until(110.0)
    assert log.entries == [("b", 1.25)]
    link.carry(b"a", 1000, log.add("a"))
    link.drop(b"a")
    assert not timers.waiting
