"""Which worker a session or an affinity key is bound to, and for how long."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from msgspec import Struct

from penstock.lazy_heap import LazyHeap

MAX_AFFINITIES = 65_536
"""Keys without an owner that the memory store remembers. Clients choose these keys freely, so there must be a bound."""


class Binding(Struct, frozen=True):
    """The worker that a key belongs to. `session` is the client's id, empty for an affinity key; `opened` is wall-clock time."""

    session: str
    worker: str
    model: str
    epoch: int
    timeout: float
    opened: float


class Claim(NamedTuple):
    """Who holds the key now. `won`: the caller does. No binding: nobody does, because the owner is over its quota."""

    binding: Binding | None
    won: bool


class AffinityStore(Protocol):
    """Bindings. Each expires a given time after its last claim, rebind or renewal; the time is positive and finite. Every method is atomic.

    With an `owner` the binding is a session: its key is `session_key(owner, binding.model, binding.session)`, it counts for the
    quota, and it is listed.

    A store that cannot be reached never fails or delays a request: it answers at once as if the caller were alone, and
    `is_available` is False.
    """

    @property
    def is_available(self) -> bool: ...

    async def get(self, key: str) -> Binding | None: ...

    async def claim(self, key: str, binding: Binding, seconds: float, owner: str | None = None, quota: int | None = None) -> Claim:
        """Binds the key, unless it is bound already or the owner has `quota` sessions. An existing binding is not prolonged."""

    async def rebind(self, key: str, old_epoch: int, binding: Binding, seconds: float, owner: str | None = None) -> Binding:
        """Replaces a binding whose worker is gone. Returns ours if the epoch was still `old_epoch` or the key was free, else the
        binding of somebody else.

        No quota: the session was within it before. `owner` is used only if the key was free; else its owner stays.
        """

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        """The binding ends this many seconds from now. False: it is gone, or has another epoch."""

    async def release(self, key: str, epoch: int) -> bool:
        """Ends the binding now. False: it is gone, or has another epoch."""

    async def list_sessions(self, owner: str, limit: int, after: str = "") -> list[Binding]:
        """The first `limit` live sessions after the id `after`, ordered by id and model. Fewer than `limit`: there are no more."""

    async def next_epoch(self) -> int:
        """Greater than any before, even after a restart of the front end: microseconds since 1970, or one more than the last."""

    async def close(self) -> None: ...


def session_key(owner: str, model: str, session: str) -> str:
    """The name of a session in the store and on the workers. Opaque hash."""
    return _digest(b"session", owner, model, session)


def affinity_key(owner: str, model: str, key: str) -> str:
    """The name of an affinity key in the store. Never equal to a session's."""
    return _digest(b"affinity", owner, model, key)


def owner_key(owner: str) -> str:
    """The name of an owner in the store. Opaque hash."""
    return _digest(b"owner", owner)


def _digest(kind: bytes, *parts: str) -> str:
    lengths = "".join(f"{len(part)}:" for part in parts)
    return blake2b((lengths + "".join(parts)).encode(), digest_size=16, person=kind).hexdigest()


class _Entry(NamedTuple):
    owner: str | None
    binding: Binding


@dataclass(eq=False)
class MemoryStore:
    """The store of a single front end. Nothing blocks. A binding that has ended is gone before the next call.

    A call takes O(log n), except for the sorted list of an owner's sessions, which takes one move of its tail. Memory follows the
    number of live bindings.
    """

    clock: Callable[[], float] = time.monotonic
    wall_ns: Callable[[], int] = time.time_ns
    max_affinities: int = MAX_AFFINITIES
    is_available = True

    def __post_init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._ends: LazyHeap[str, float] = LazyHeap()
        self._names: dict[str, list[tuple[str, str]]] = {}
        # Affinity keys, least recently used first.
        self._recent: OrderedDict[str, None] = OrderedDict()
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._entries)

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
            self._remove(key)
        self._add(key, owner, binding, seconds)
        return binding

    async def renew(self, key: str, epoch: int, seconds: float) -> bool:
        entry = self._find(key)
        if entry is None or entry.binding.epoch != epoch:
            return False
        self._ends.put(key, self.clock() + seconds)
        return True

    async def release(self, key: str, epoch: int) -> bool:
        entry = self._find(key)
        if entry is None or entry.binding.epoch != epoch:
            return False
        self._remove(key)
        return True

    async def list_sessions(self, owner: str, limit: int, after: str = "") -> list[Binding]:
        self._expire()
        names = self._names.get(owner, [])
        first = bisect_right(names, after, key=lambda name: name[0]) if after else 0
        page = names[first : first + limit]
        return [self._entries[session_key(owner, model, session)].binding for session, model in page]

    async def next_epoch(self) -> int:
        self._epoch = max(self._epoch + 1, self.wall_ns() // 1000)
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
        self._entries[key] = _Entry(owner, binding)
        self._ends.put(key, self.clock() + seconds)
        if owner is not None:
            assert key == session_key(owner, binding.model, binding.session)
            insort(self._names.setdefault(owner, []), (binding.session, binding.model))
            return
        self._recent[key] = None
        if len(self._recent) > self.max_affinities:
            self._remove(next(iter(self._recent)))

    def _remove(self, key: str) -> None:
        owner, binding = self._entries.pop(key)
        self._ends.discard(key)
        if owner is None:
            del self._recent[key]
            return
        names = self._names[owner]
        del names[bisect_left(names, (binding.session, binding.model))]
        if not names:
            del self._names[owner]

    def _expire(self) -> None:
        now = self.clock()
        while (key := self._ends.pop_due(now)) is not None:
            self._remove(key)

    def check_integrity(self) -> None:
        """Raises AssertionError unless entries, ends and indexes agree and every bound is kept."""
        self._ends.check_integrity()
        assert set(self._ends) == self._entries.keys()
        owned = sorted((owner, (binding.session, binding.model)) for owner, binding in self._entries.values() if owner is not None)
        assert owned == sorted((owner, name) for owner, names in self._names.items() for name in names)
        assert all(names and names == sorted(names) for names in self._names.values())
        assert self._recent.keys() == {key for key, entry in self._entries.items() if entry.owner is None}
        assert len(self._recent) <= self.max_affinities
