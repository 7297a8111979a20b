"""Copies between pages of KV and host slots, beside the steps of the model.

The KV of a page lies in 2 × layers strips, far apart; a slot is one strip. So several pages at a time are gathered into a buffer on the
device, in the order of a slot, and then copied. A load goes the other way. Gathering is one kernel and takes a twentieth of the time.

On a GPU each direction has a stream of its own. What could go wrong, and what prevents it:

- A save could read a page before the model has written it: the save's stream waits for all earlier work of the model.
- The model could overwrite a page before its save has read it: `protect` makes the model's stream wait. So the owner of a page may give
  it away as soon as it has called `save`.
- The model could read a page before its load is complete: the owner uses the page only after it is told that the load has ended.
- A step could wait for copies: its own small copies, of inputs and tokens, queue behind ours in the GPU's copy engine. So ours start when
  the inputs are on their way and end before the tokens come back: `start` is told how long the step takes.
"""

from __future__ import annotations

import ctypes
import sys
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.engine.attention import KVStore
from penstock.engine.host_slots import HostSlots

# Bytes of the buffer on a GPU, for each direction, and the part of the KV memory that it may be. All that a step has room for fits in.
MAX_STAGING_BYTES = 256 * 2**20
MAX_STAGING_PART = 1 / 64
# The part of the time of steps that saves may take: nobody waits for them. They are still faster than an H200 computes prompts.
SAVE_SHARE = 0.1
# Saves wait until they may take this long: starting them takes the engine's thread a third of a millisecond.
SAVE_SECONDS = 0.0025
# The part of a step that loads may take. A request waits for them.
LOAD_SHARE = 0.5
# An engine with nothing to compute starts copies for this long at once. A step that comes then waits no longer for its inputs.
IDLE_SECONDS = 0.005

MEASUREMENTS = 4

Mark = torch.cuda.Event | None
"""A point in a stream; None on a CPU, where it is always passed."""


@dataclass(eq=False)
class _Copy:
    """One call of `save` or `load`."""

    pages: Sequence[int]
    slots: Sequence[int]
    on_end: Callable[[], None]
    started: int = 0


@dataclass(frozen=True, eq=False)
class _Piece:
    """What was started at once: parts of copies, and whole ones. `on_end` are those of the copies that end with it."""

    pages: list[int]
    on_end: list[Callable[[], None]]
    is_read: Mark
    is_done: Mark


Numbers = NDArray[numpy.int64]
BatchCopy = Callable[[Numbers, Numbers, Numbers, torch.cuda.Stream], None]
"""Copies between memory: to these addresses, from these, with the number of bytes of each."""


def _find_batch_copy() -> BatchCopy | None:
    """CUDA's call for many copies at once, since version 13. Without it each copy takes torch 11 µs of the engine's thread."""
    major = int((torch.version.cuda or "0").partition(".")[0])
    try:
        function = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpyBatchAsync if major >= 13 else None
    except (OSError, AttributeError):
        function = None
    if function is None:
        return None
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function.argtypes = [pointer, pointer, pointer, size, pointer, pointer, size, pointer]
    # One set of attributes, from the first copy on: sources are read in the order of the stream, no hints of where memory is, no flags.
    attributes, first = (ctypes.c_int * 6)(1, 0, 0, 0, 0, 0), size(0)

    def copy(targets: Numbers, sources: Numbers, sizes: Numbers, stream: torch.cuda.Stream) -> None:
        arrays = (targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data)
        status = function(*arrays, len(targets), attributes, ctypes.byref(first), 1, stream.cuda_stream)
        if status:
            raise RuntimeError(f"copying KV failed: CUDA error {status}")

    return copy


class Pace:
    """How many pages may be started in a step: as many as take a share of its time. Less than `least_seconds` is saved up for a later one.

    `seconds_per_page` is measured at the start.
    """

    def __init__(self, share: float, least_seconds: float = 0.0) -> None:
        self._share, self._least_seconds = share, least_seconds
        self._saved_up = 0.0
        self.seconds_per_page = 0.0

    def room(self, step_seconds: float, under_way: int) -> int:
        """`under_way` pages were started before and have not ended. If there are none, there is room for one at least, sooner or later."""
        seconds = max(step_seconds * self._share, min(self._saved_up + step_seconds * self._share, self._least_seconds))
        if seconds < self._least_seconds:
            self._saved_up = seconds
            return 0
        self._saved_up = 0.0
        return max(int(seconds / self.seconds_per_page) - under_way, 0 if under_way else 1)


class _Lane:
    """The copies of one direction, in the order of their calls. `pages` and `slots` are [number, strips of a page, words]."""

    is_save: bool

    def __init__(self, pages: Tensor, slots: Tensor, piece: int, pace: Pace) -> None:
        self._pages, self._slots, self._piece, self.pace = pages, slots, piece, pace
        self._stream = torch.cuda.Stream(pages.device) if pages.is_cuda else None  # type: ignore[no-untyped-call]
        self._staging = torch.empty((piece, *pages.shape[1:]), dtype=pages.dtype, device=pages.device) if pages.is_cuda else None
        self._copy_many = _find_batch_copy() if pages.is_cuda else None
        # Marks of pieces that have ended, to be used again.
        self._marks: list[torch.cuda.Event] = []
        self.queue: deque[_Copy] = deque()
        self.running: deque[_Piece] = deque()

    def start(self, most: int) -> None:
        """Starts copies of at most `most` pages."""
        if not self.queue or most <= 0:
            return
        if self._stream is None:
            self._launch_all(most)
            return
        ready = self._mark(torch.cuda.current_stream(self._pages.device))
        assert ready is not None
        self._stream.wait_event(ready)
        self._marks.append(ready)
        with torch.cuda.stream(self._stream):
            self._launch_all(most)

    def start_in(self, step_seconds: float) -> None:
        """Starts what fits into a step of this length; on a CPU, all."""
        if self.queue:
            under_way = sum([len(piece.pages) for piece in self.running])
            self.start(sys.maxsize if self._stream is None else self.pace.room(step_seconds, under_way))

    def take_ended(self) -> Iterator[_Piece]:
        while self.running and _is_passed(self.running[0].is_done):
            piece = self.running.popleft()
            self._marks += [mark for mark in (piece.is_read, piece.is_done) if mark is not None]
            yield piece

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _launch_all(self, most: int) -> None:
        while self.queue and most > 0:
            most -= self._launch(min(most, self._piece))

    def _launch(self, most: int) -> int:
        """Starts one piece. Its pages are in the order of their slots: neighbours are copied together."""
        pages: list[int] = []
        slots: list[int] = []
        on_end: list[Callable[[], None]] = []
        while self.queue and len(pages) < most:
            copy = self.queue[0]
            first, copy.started = copy.started, min(copy.started + most - len(pages), len(copy.pages))
            pages += copy.pages[first : copy.started]
            slots += copy.slots[first : copy.started]
            if copy.started == len(copy.pages):
                on_end.append(copy.on_end)
                self.queue.popleft()
        numbers = numpy.array(slots, numpy.int64)
        order = numbers.argsort()
        # The driver has taken what it needs of this memory when the call returns: it is not pinned.
        index = torch.from_numpy(numpy.array(pages, numpy.int64)[order]).to(self._pages.device, non_blocking=True)
        is_read = self._move(index, numbers[order])
        self.running.append(_Piece(pages, on_end, is_read, self._mark(self._stream)))
        return len(pages)

    @abstractmethod
    def _move(self, index: Tensor, slots: Numbers) -> Mark:
        """Copies these pages. Returns the point from which on their source may be overwritten."""

    def _copy_buffer(self, buffer: Tensor, slots: Numbers) -> None:
        """Copies between the buffer on the GPU and these slots, neighbours at once."""
        firsts, lasts = _runs(slots)
        if self._copy_many is None or self._stream is None or len(firsts) < 2:
            for first, last, slot in _each(slots):
                on_host = self._slots[slot : slot + last - first]
                source, target = (buffer[first:last], on_host) if self.is_save else (on_host, buffer[first:last])
                target.copy_(source, non_blocking=True)
            return
        size = self._slots[0].nbytes
        places = buffer.data_ptr() + size * firsts, self._slots.data_ptr() + size * slots[firsts]
        sources, targets = places if self.is_save else places[::-1]
        self._copy_many(targets, sources, size * (lasts - firsts), self._stream)

    def _mark(self, stream: torch.cuda.Stream | None) -> Mark:
        """The point that this stream has reached."""
        if stream is None:
            return None
        mark = self._marks.pop() if self._marks else torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record(stream)
        return mark


class _Saves(_Lane):
    is_save = True

    def _move(self, index: Tensor, slots: Numbers) -> Mark:
        if self._staging is None:
            for first, last, slot in _each(slots):
                torch.index_select(self._pages, 0, index[first:last], out=self._slots[slot : slot + last - first])
            return None
        gathered = torch.index_select(self._pages, 0, index, out=self._staging[: len(index)])
        is_read = self._mark(self._stream)
        self._copy_buffer(gathered, slots)
        return is_read


class _Loads(_Lane):
    is_save = False

    def _move(self, index: Tensor, slots: Numbers) -> Mark:
        if self._staging is None:
            for first, last, slot in _each(slots):
                self._pages.index_copy_(0, index[first:last], self._slots[slot : slot + last - first])
            return None
        buffer = self._staging[: len(index)]
        self._copy_buffer(buffer, slots)
        self._pages.index_copy_(0, index, buffer)
        return None


class PageCopies:
    """Saves pages to slots and loads them back. The engine's thread calls it, in each step: `protect`, `start`, `poll`.

    While a copy is under way, nobody else writes its slots; while it is a save, nobody else reads them.
    """

    def __init__(self, store: KVStore, slots: HostSlots) -> None:
        self.slots = slots
        self._device = store.device
        pages = store.strips.transpose(0, 1)
        staging = min(MAX_STAGING_BYTES, int(pages.nbytes * MAX_STAGING_PART))
        piece = max(1, min(staging // slots.layout.slot_bytes, len(pages), slots.layout.slots))
        self._saves = _Saves(pages, slots.tensor, piece, Pace(SAVE_SHARE, SAVE_SECONDS))
        self._loads = _Loads(pages, slots.tensor, piece, Pace(LOAD_SHARE))
        self._measure(range(piece))

    @property
    def is_busy(self) -> bool:
        return any(lane.queue or lane.running for lane in (self._loads, self._saves))

    @property
    def load_rate(self) -> float:
        """Bytes per second, measured at the start."""
        return self.slots.layout.slot_bytes / self._loads.pace.seconds_per_page

    def save(self, pages: Sequence[int], slots: Sequence[int], on_end: Callable[[], None]) -> None:
        """Queues a copy of each page to the slot at the same place. `on_end` is called by `poll`."""
        self._saves.queue.append(_Copy(pages, slots, on_end))

    def load(self, slots: Sequence[int], pages: Sequence[int], on_end: Callable[[], None]) -> None:
        """Queues a copy of each slot to the page at the same place. The model may read the pages after `poll` has called `on_end`."""
        self._loads.queue.append(_Copy(pages, slots, on_end))

    def protect(self, pages: Iterable[int]) -> None:
        """Call it before these pages are written anew: saves that still read them come first."""
        saves = self._saves
        if not saves.queue and not saves.running:
            return
        wanted = set(pages)
        # Up to the last copy that has one of them: saves run in order.
        last = max((at for at, copy in enumerate(saves.queue) if not wanted.isdisjoint(copy.pages)), default=-1)
        saves.start(sum(len(copy.pages) - copy.started for copy in list(saves.queue)[: last + 1]))
        readers = [piece.is_read for piece in saves.running if piece.is_read is not None and not wanted.isdisjoint(piece.pages)]
        if readers:
            torch.cuda.current_stream(self._device).wait_event(readers[-1])

    def start(self, step_seconds: float) -> None:
        """Starts as many of the queued copies as a step of this length has room for; on a CPU, all of them.

        Call it when the step's inputs are on their way to the device, and after pages that were allocated are wiped.
        """
        self._loads.start_in(step_seconds)
        self._saves.start_in(step_seconds)

    def poll(self) -> None:
        """Calls `on_end` of all copies that have ended."""
        for lane in (self._loads, self._saves):
            for piece in lane.take_ended():
                for on_end in piece.on_end:
                    on_end()

    def wait(self) -> None:
        """Starts copies and waits on the host for a part of them. For an engine that has nothing to compute."""
        self._loads.start_in(IDLE_SECONDS / LOAD_SHARE)
        self._saves.start_in(IDLE_SECONDS / SAVE_SHARE)
        for lane in (self._loads, self._saves):
            if lane.running and (mark := lane.running[0].is_done) is not None:
                mark.synchronize()
                return

    def close(self) -> None:
        """Drops what is queued and waits for what is under way. The slots are gone then."""
        self._loads.synchronize()
        self._saves.synchronize()
        self.slots.close()

    def _measure(self, numbers: Sequence[int]) -> None:
        """Copies some pages to slots and back, a few times. The fastest counts: the first time is slower, as is any that was disturbed."""
        for _ in range(MEASUREMENTS):
            for lane in (self._saves, self._loads):
                lane.queue.append(_Copy(numbers, numbers, lambda: None))
                lane.synchronize()
                began = time.perf_counter()
                lane.start(len(numbers))
                lane.synchronize()
                seconds = max(1e-9, time.perf_counter() - began) / len(numbers)
                lane.pace.seconds_per_page = min(lane.pace.seconds_per_page or seconds, seconds)
                list(lane.take_ended())


def _is_passed(mark: Mark) -> bool:
    return mark is None or bool(mark.query())  # type: ignore[no-untyped-call]


def _runs(slots: Numbers) -> tuple[Numbers, Numbers]:
    """Neighbours among these sorted slots: the place of the first of each run, and the place behind the last."""
    is_first = numpy.ones(len(slots), bool)
    is_first[1:] = slots[1:] != slots[:-1] + 1
    firsts = is_first.nonzero()[0]
    return firsts, numpy.append(firsts, len(slots))[1:]


def _each(slots: Numbers) -> Iterator[tuple[int, int, int]]:
    """The runs with their first slots."""
    firsts, lasts = _runs(slots)
    return zip(firsts.tolist(), lasts.tolist(), slots[firsts].tolist(), strict=True)
