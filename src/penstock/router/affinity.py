"""Where a session, or whoever would like to meet the same cache again, goes: what is remembered, and for how long."""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from msgspec import Struct

MOST_AFFINITIES = 65_536
"""How many keys without an owner the memory store remembers. Clients choose them freely, so there must be a bound."""


class Binding(Struct, frozen=True):
    """To which worker a key belongs. `session` is the client's id, empty for a mere affinity; `opened` is wall-clock time."""

    session: str
    worker: str
    model: str
    epoch: int
    timeout: float
    opened: float


class Claim(NamedTuple):
    """Who holds the key now: `won` says whether it is the claimant. No binding: nobody does, and the owner is over quota."""

    binding: Binding | None
    won: bool


class AffinityStore(Protocol):
    """Bindings, each for some positive, finite seconds from its last claim, rebind or renewal. Every method is atomic.

    With an `owner` it is a session: its key is `session_key(owner, binding.model, binding.session)`, it counts for the quota, and it
    is listed.

    A store that cannot be reached never fails or delays a request: it answers at once as if the caller were alone, and
    `is_available` says so.
    """

    @property
    def is_available(self) -> bool: ...

    async def get(self, key: str) -> Binding | None: ...

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        """Ours, unless somebody holds the key already, or the owner holds `quota` sessions. An existing binding is not prolonged."""

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        """For when the worker is gone: ours if the epoch is still `old_epoch` or nobody holds the key, else what somebody else bound.

        Keeps to no quota, for the session was within it. `owner` is as in the claim; a binding that is there keeps the one it has.
        """

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        """It ends so many seconds from now. False: it is gone, or of another epoch."""

    async def release(self, key: str, epoch: int) -> bool:
        """Ends it now. False: it is gone, or of another epoch."""

    async def list_sessions(self, owner: str, limit: int, after: str = "") -> list[Binding]:
        """The first live ones, by session id and model, of those whose id comes after `after`. Fewer than `limit`: there are no more."""

    async def next_epoch(self) -> int:
        """Greater than any before, also across restarts of a front end: microseconds since 1970, or one more than the last."""

    async def close(self) -> None: ...


def session_key(owner: str, model: str, session: str) -> str:
    """The name of a session beyond its owner's name space: in the store, and on the workers. It tells nothing of what it is made of."""
    return _digest(b"session", owner, model, session)


def affinity_key(owner: str, model: str, key: str) -> str:
    """The same for a key that is no session. Never equal to the key of a session."""
    return _digest(b"affinity", owner, model, key)


def owner_key(owner: str) -> str:
    """Names an owner without telling who."""
    return _digest(b"owner", owner)


def _digest(kind: bytes, *parts: str) -> str:
    lengths = "".join(f"{len(part)}:" for part in parts)
    return blake2b((lengths + "".join(parts)).encode(), digest_size=16, person=kind).hexdigest()


@dataclass(eq=False, slots=True)
class _Entry:
    key: str
    owner: str | None
    binding: Binding
    ends: float
    ticket: int = 0
    """That of its one item in the heap; 0 when it is gone."""
    due: float = 0.0
    """When that item comes up: never after `ends`."""


class MemoryStore:
    """The store of a single front end. Nothing blocks; whatever has ended is gone before the next call sees anything.

    A call is O(log n), but for the list of an owner's names, in which a place is found by bisection and made by moving the rest.
    Memory follows the number of live bindings.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
        most_affinities: int = MOST_AFFINITIES,
    ) -> None:
        self._clock = clock
        self._wall_ns = wall_ns
        self._most_affinities = most_affinities
        self._entries: dict[str, _Entry] = {}
        self._names: dict[str, list[tuple[str, str]]] = {}
        self._recent: OrderedDict[str, None] = OrderedDict()
        # (due, ticket, entry): one that counts for each entry, and some of entries that are gone.
        self._heap: list[tuple[float, int, _Entry]] = []
        self._tickets = 0
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_available(self) -> bool:
        return True

    async def get(self, key: str) -> Binding | None:
        entry = self._find(key)
        return entry.binding if entry is not None else None

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        held = self._find(key)
        if held is not None:
            return Claim(held.binding, won=False)
        if owner is not None and quota is not None and len(self._names.get(owner, ())) >= quota:
            return Claim(None, won=False)
        self._add(key, owner, binding, seconds)
        return Claim(binding, won=True)

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        held = self._find(key)
        if held is not None and held.binding.epoch != old_epoch:
            return held.binding
        if held is not None:
            owner = held.owner
            self._remove(held)
        self._add(key, owner, binding, seconds)
        return binding

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        entry = self._find(key)
        if entry is None or entry.binding.epoch != epoch:
            return False
        entry.ends = self._clock() + seconds
        # A later end is seen when the item comes up; an earlier one needs an earlier item.
        if entry.ends < entry.due:
            self._schedule(entry)
        return True

    async def release(self, key: str, epoch: int) -> bool:
        entry = self._find(key)
        if entry is None or entry.binding.epoch != epoch:
            return False
        self._remove(entry)
        return True

    async def list_sessions(self, owner: str, limit: int, after: str = "") -> list[Binding]:
        self._expire()
        names = self._names.get(owner, [])
        first = bisect_right(names, after, key=lambda name: name[0]) if after else 0
        page = names[first : first + limit]
        return [self._entries[session_key(owner, model, session)].binding for session, model in page]

    async def next_epoch(self) -> int:
        self._epoch = max(self._epoch + 1, self._wall_ns() // 1000)
        return self._epoch

    async def close(self) -> None:
        pass

    def _find(self, key: str) -> _Entry | None:
        self._expire()
        entry = self._entries.get(key)
        if entry is not None and entry.owner is None:
            self._recent.move_to_end(key)
        return entry

    def _add(self, key: str, owner: str | None, binding: Binding, seconds: float) -> None:
        entry = self._entries[key] = _Entry(key, owner, binding, self._clock() + seconds)
        self._schedule(entry)
        if owner is not None:
            assert key == session_key(owner, binding.model, binding.session)
            insort(self._names.setdefault(owner, []), (binding.session, binding.model))
            return
        self._recent[key] = None
        if len(self._recent) > self._most_affinities:
            self._remove(self._entries[next(iter(self._recent))])

    def _remove(self, entry: _Entry) -> None:
        entry.ticket = 0
        del self._entries[entry.key]
        if entry.owner is None:
            del self._recent[entry.key]
        else:
            names = self._names[entry.owner]
            del names[bisect_left(names, (entry.binding.session, entry.binding.model))]
            if not names:
                del self._names[entry.owner]
        self._shrink()

    def _schedule(self, entry: _Entry) -> None:
        """From now on this item is the one that counts for the entry."""
        self._tickets += 1
        entry.ticket = self._tickets
        entry.due = entry.ends
        heapq.heappush(self._heap, (entry.due, entry.ticket, entry))
        self._shrink()

    def _shrink(self) -> None:
        """Rebuilds the heap when most of it no longer counts: seldom enough that it costs every call a constant."""
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = [item for item in self._heap if item[2].ticket == item[1]]
            heapq.heapify(self._heap)

    def _expire(self) -> None:
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, ticket, entry = heapq.heappop(self._heap)
            if entry.ticket != ticket:
                continue
            if entry.ends <= now:
                self._remove(entry)
            else:
                self._schedule(entry)

    def check_integrity(self) -> None:
        """Raises AssertionError when the indexes and the entries do not tell the same."""
        counting = [(due, entry) for due, ticket, entry in self._heap if entry.ticket == ticket]
        assert len(counting) == len(self._entries)
        assert all(self._entries[entry.key] is entry and due == entry.due <= entry.ends for due, entry in counting)
        assert len(self._heap) <= 2 * len(self._entries) + 64
        owned = sorted(
            (entry.owner, (entry.binding.session, entry.binding.model)) for entry in self._entries.values() if entry.owner is not None
        )
        assert owned == sorted((owner, name) for owner, names in self._names.items() for name in names)
        assert all(names and names == sorted(names) for names in self._names.values())
        assert self._recent.keys() == {key for key, entry in self._entries.items() if entry.owner is None}
        assert len(self._recent) <= self._most_affinities
