"""KV that moves: the books of an engine about what it pulls from elsewhere, and what others pull from it.

An **import** reserves pages and has them filled, by the transport from another worker or by a tier of this one. Blocks that arrive enter
the tree in order and are held for the generation that comes. An import pulls only what the tree lacks, and waits for blocks that another
import is pulling. However an import ends, the generation computes what is missing.

An **export** holds blocks while another worker reads them: blocks in the tree, and blocks that a generation of this worker computes.

Pages that a transport may touch are never freed: a pull that is stopped, or an export that is withdrawn, keeps its pages until the
transport says that it is done. One thread calls all of this, the engine's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from penstock.kv.blocks import block_hash, block_hashes
from penstock.kv.cache import KVCache
from penstock.kv.moving import KvTransport
from penstock.kv.radix import Node
from penstock.kv.tiers import Tiers
from penstock.lazy_heap import LazyHeap
from penstock.wire.messages import Fetch, KvSource, Submit, TransferOutcome, TransferReport

MAX_SHARE = 0.75
"""Of the pool that imports may have at once, with what they hold for generations that have not come. More of a prompt is computed."""

MAX_SHORT_SECONDS = 2.0
"""How long an import waits for pages. Its generation would wait for them as well."""

HOLD_SECONDS = 10.0
"""How long the blocks of an import that a Submit began are held for it, and blocks for a worker that pulls without a Submit here."""

EXPECT_SECONDS = 2.0
"""How long a worker that pulls waits for the Submit that computes its blocks. Both were sent at the same time."""

SILENCE_SECONDS = 30.0
"""How long an import goes on while no block arrives, though its source is alive. A long queue there may take seconds."""

NAMED_AT_ONCE = 64
"""Blocks: most prompts have no block in a tier, and need only the first name."""

NO_TRANSPORT = "the worker moves no KV"
TOO_FEW_PAGES = "too few pages are free"
NOTHING_ARRIVES = "the source computes for too long"


class Place(Protocol):
    """Where blocks lie: another worker, behind the transport, or a tier. A pull ends with `Transfers.pull_ended`; see `kv.moving`."""

    def pull(self, source: KvSource, names: Sequence[bytes], slots: Sequence[int], /) -> None: ...

    def stop(self, transfer: bytes, /) -> None: ...


class Nearby(Place, Protocol):
    """The tiers of this worker: `kv.tiers.Tiers`."""

    @property
    def has_work(self) -> bool: ...

    @property
    def next_expiry(self) -> float: ...

    def plan(self, names: Iterable[bytes]) -> int:
        """How many of the first of these blocks are worth loading."""

    def keep(self, names: Iterable[bytes]) -> None:
        """These blocks will be pulled next."""

    def poll(self) -> None:
        """Goes on with what was begun. Calls `arrived` and `pull_ended`."""


@dataclass(slots=True, eq=False)
class Pull:
    """A run of an import's blocks that come from one place. `pages` are those that are not in the tree yet."""

    id: bytes
    place: Place
    of: Import
    names: Sequence[bytes]
    pages: list[int]
    is_begun: bool = False
    is_over: bool = False
    arrived: int = 0
    adopted: int = 0


@dataclass(slots=True, eq=False)
class Import:
    """The first `blocks` blocks of these tokens. `path` holds those that are here. `is_next`: its generation waits for nothing else."""

    id: bytes
    source: KvSource | None
    token_ids: Sequence[int]
    blocks: int
    root: Node
    hold_seconds: float
    is_fetch: bool
    asked_at: float
    is_next: bool = False
    state: Literal["queued", "pulling", "over"] = "queued"
    is_stopped: bool = False
    behind: Import | None = None
    is_short: bool = False
    reason: str = ""
    path: list[Node] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    reserved: int = 0
    # By generation: what is called when the import is over.
    waiting: dict[bytes, Callable[[], None]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Export:
    """`names` are what a puller asks for, and the last blocks of `path` are those of them that it was told. `kept` are all blocks of the
    generation that computed them, after its end. `is_live`: more may come. `is_open`: the transport reads."""

    id: bytes
    asked_at: float
    hold_seconds: float | None = None
    is_live: bool = False
    is_open: bool = False
    is_complete: bool = False
    names: Sequence[bytes] = ()
    told: int = 0
    path: list[Node] = field(default_factory=list)
    kept: list[Node] = field(default_factory=list)


class Transfers:
    """All transfers of one engine. `transport` is None while the worker has none; then every import fails at once."""

    def __init__(self, cache: KVCache, clock: Callable[[], float] = time.monotonic, block_bytes: int = 0) -> None:
        self._cache = cache
        self._clock = clock
        self._block_bytes = block_bytes
        self.transport: KvTransport | None = None
        self._nearby: Nearby | None = None
        self.is_used = False
        """Something has moved, or was asked to. Until then no transfer has to be asked about."""
        self._max_reserved = int(cache.pages * MAX_SHARE)
        self._reserved = 0
        self._imports: dict[bytes, Import] = {}
        self._queued: dict[bytes, Import] = {}
        self._active: dict[Import, None] = {}  # their pages may be written
        self._pulls: dict[bytes, Pull] = {}
        self._pulled: dict[bytes, Import] = {}  # by the name of each block that is pulled now
        self._exports: dict[bytes, Export] = {}
        self._withdrawn: dict[bytes, Export] = {}  # their pages may be read
        self._ends: LazyHeap[Import | Export, float] = LazyHeap()
        self._reports: list[TransferReport] = []
        self._local_pulls = 0
        self._short_of: int | None = None  # the pages that could be had when too few of them could

    def use_tiers(self, tiers: Tiers) -> None:
        """From now on what the device has no room for goes there."""
        self.nearby = self._cache.below = tiers
        tiers.listener = self

    @property
    def has_work(self) -> bool:
        """Whether the next `advance` may begin an import, or goes on with one."""
        if self.nearby is not None and self.nearby.has_work:
            return True
        if not self._queued or self._short_of == self._cache.free + self._cache.cached:
            return False
        return any(each.behind is None or each.behind.state != "pulling" for each in self._queued.values())

    @property
    def nearby(self) -> Nearby | None:
        """The tiers of this worker."""
        return self._nearby

    @nearby.setter
    def nearby(self, nearby: Nearby) -> None:
        self._nearby, self.is_used = nearby, True

    @property
    def is_loading(self) -> bool:
        """Whether a tier fills pages for a generation that waits. It will be ready soon."""
        return self.nearby is not None and any(each.source is None and each.waiting for each in self._active)

    @property
    def imports(self) -> int:
        """Imports that are not over."""
        return len(self._queued) + len(self._active)

    @property
    def exports(self) -> int:
        return len(self._exports) + len(self._withdrawn)

    @property
    def next_expiry(self) -> float:
        """When something ends if nothing else happens."""
        least = self._ends.least()
        end = math.inf if least is None else least[0]
        return end if self.nearby is None else min(end, self.nearby.next_expiry)

    @property
    def paths(self) -> Iterator[Sequence[Node]]:
        """What is held in the tree."""
        yield from (each.path for each in self._imports.values())
        for export in (*self._exports.values(), *self._withdrawn.values()):
            yield export.path
            yield export.kept

    @property
    def tails(self) -> Iterator[Sequence[int]]:
        """Pages that are being filled."""
        return (pull.pages for each in self._active for pull in each.pulls)

    @property
    def held_pages(self) -> int:
        """Pages that transfers use. Those that several of them hold are counted for each: to tell them apart would take as long as they are
        many, after every block that arrives."""
        return sum([len(held) for held in (*self.paths, *self.tails)])

    def take_reports(self) -> list[TransferReport]:
        """What has ended since the last call."""
        reports, self._reports = self._reports, []
        return reports

    def end(self, transfer: bytes) -> None:
        """The front end has ended it: what it holds is freed, at once or when the transport is done. An unknown one is ignored."""
        found = self._imports.pop(transfer, None)
        if found is not None:
            self._stop(found)
            self._ends.discard(found)
        export = self._exports.get(transfer)
        if export is not None:
            self._withdraw(export)

    def advance(self, now: float, running: int) -> None:
        """Call it first in a step. Ends what has run out, then begins imports for which there are pages, and one per running sequence."""
        if self.nearby is not None:
            self.nearby.poll()
        while (ended := self._ends.pop_due(now)) is not None:
            if isinstance(ended, Export):
                self._report(ended.id, "expired", ended.asked_at)
                self._withdraw(ended)
            elif ended.state != "over":
                self._fail(ended, TOO_FEW_PAGES if ended.state == "queued" else NOTHING_ARRIVES)
            else:
                self._let_go(ended)
                del self._imports[ended.id]
        if self._queued:
            self._begin_queued(now, running)

    def give_way(self) -> bool:
        """Lets go of what one transfer holds, the newest first. Returns False when what is left may be touched by a transport; then the
        newest of that is stopped, so that its pages come back soon."""
        held = next((each for each in reversed(self._imports.values()) if each.state == "over" and each.path), None)
        if held is not None:
            self._let_go(held)
            return True
        kept = next((each for each in reversed(self._exports.values()) if each.kept), None)
        if kept is not None:
            self._release(kept.kept)
            return True
        if not self._withdrawn and not any(each.is_stopped for each in self._active):
            self._interrupt_newest()
        return False

    # The target.

    def fetch(self, request: Fetch) -> None:
        """Pulls the blocks of a prompt before its generation comes."""
        transfer = request.source.transfer
        if transfer in self._imports or transfer in self._pulls:
            return
        if self.transport is None:
            self._report(transfer, "failed", self._clock(), reason=NO_TRANSPORT)
            return
        blocks = len(request.token_ids) // self._cache.page_size
        self._add(transfer, request.source, request.token_ids, blocks, request.root, request.lease_seconds, is_fetch=True)

    def join(self, request: Submit, wake: Callable[[], None]) -> bool:
        """A generation comes. Returns whether it has to wait for an import, which is begun if there is none; then `wake` is called when
        that is over."""
        if request.source is None:
            return False
        key = request.source.transfer
        found = self._imports.get(key)
        if found is None:
            blocks = (len(request.token_ids) - 1) // self._cache.page_size
            if key in self._pulls or not blocks or not self._can_pull(request.source):
                return False
            found = self._add(key, request.source, request.token_ids, blocks, request.root, HOLD_SECONDS, is_fetch=False)
        if found.state == "over":
            return False
        found.waiting[request.id] = wake
        return True

    def load(self, request: Submit, token_ids: Sequence[int], running: int, wake: Callable[[], None], *, is_next: bool) -> bool:
        """Loads from the tiers what is worth it of a waiting generation, if there are pages for it. Returns whether it has to wait for
        that; then `wake` is called when it is over. `is_next`: otherwise it starts now.

        It may be called again: a first load of a few blocks may have shown that more of them are worth it.
        """
        blocks = (len(token_ids) - 1) // self._cache.page_size
        earlier = self._imports.get(request.id)
        if self.nearby is None or request.source is not None or not blocks or not _may_go_on(earlier):
            return False
        root = self._cache.root(request.root)
        wanted = Import(request.id, None, token_ids, blocks, root, HOLD_SECONDS, False, self._clock(), is_next)
        self._queued[wanted.id] = wanted
        if not self._begin(wanted, self._clock(), running):
            del self._queued[wanted.id]
            return False
        if wanted.state == "over":
            self._ends.discard(wanted)
            self._let_go(wanted)
            return False
        if earlier is not None:
            self.end(earlier.id)
        self._imports[wanted.id] = wanted
        wanted.waiting[request.id] = wake
        return True

    def started(self, request: Submit) -> None:
        """The generation uses its blocks now, so that nobody else need hold them."""
        found = self._imports.get(_key(request))
        if found is None or found.state != "over":
            return
        self._let_go(found)
        if found.source is None:
            self.end(found.id)

    def leave(self, request: Submit) -> None:
        """The generation is cancelled before it has started. What only it wanted is ended."""
        key = _key(request)
        found = self._imports.get(key)
        if found is not None:
            found.waiting.pop(request.id, None)
            if not found.is_fetch and not found.waiting:
                self.end(key)

    def arrived(self, transfer: bytes, blocks: int) -> None:
        pull = self._pulls.get(transfer)
        if pull is not None and not pull.of.is_stopped:
            pull.arrived = max(pull.arrived, min(blocks, len(pull.names)))
            self._ends.put(pull.of, self._clock() + SILENCE_SECONDS)
            self._adopt(pull.of)

    def pull_ended(self, transfer: bytes, failure: str) -> None:
        pull = self._pulls.pop(transfer, None)
        if pull is None:
            return
        pull.is_over = True
        found = pull.of
        if not failure:
            pull.arrived = len(pull.names)
        if not found.is_stopped:
            self._adopt(found)
            if failure:
                found.reason = found.reason or failure
                # What comes behind the gap is of no use.
                self._stop_pulls(found.pulls[found.pulls.index(pull) + 1 :])
        if found in self._active and all(each.is_over for each in found.pulls):
            self._close(found)

    # The source.

    def expect(self, transfer: bytes, hold_seconds: float) -> None:
        """A generation of this worker computes blocks that another one pulls. A puller may have come before it."""
        self.is_used = True
        if transfer in self._withdrawn:
            return
        export = self._exports.get(transfer)
        if export is None:
            export = self._exports[transfer] = Export(transfer, self._clock())
        export.hold_seconds, export.is_live = hold_seconds, True
        self._ends.discard(export)

    def committed(self, transfer: bytes) -> None:
        """The generation has more blocks in the tree."""
        export = self._exports.get(transfer)
        if export is not None:
            self._tell(export)

    def keep(self, transfer: bytes, path: Sequence[Node]) -> None:
        """The generation ends with these blocks. They are held for the lease of the export."""
        export = self._exports.get(transfer)
        if export is not None and not export.kept:
            self._cache.hold(path)
            export.kept = list(path)

    def finish(self, transfer: bytes) -> None:
        """The generation is over: no more blocks come, and the lease begins."""
        export = self._exports.get(transfer)
        if export is not None:
            export.is_live = False
            self._tell(export)
            self._ends.put(export, self._clock() + (export.hold_seconds or 0.0))

    def export(self, transfer: bytes, names: Sequence[bytes], *, waits: bool) -> None:
        self.is_used = True
        if transfer in self._withdrawn:
            return
        export, now = self._exports.get(transfer), self._clock()
        if export is None:
            export = self._exports[transfer] = Export(transfer, now, is_live=waits)
            self._ends.put(export, now + (EXPECT_SECONDS if waits else HOLD_SECONDS))
        if not export.is_open:
            export.names, export.told, export.is_open, export.is_complete = names, 0, True, False
            self._tell(export)

    def release(self, transfer: bytes) -> None:
        export = self._withdrawn.pop(transfer, None) or self._exports.get(transfer)
        if export is None:
            return
        export.is_open, export.names = False, ()
        self._release(export.path)
        if export.hold_seconds is None and self._exports.get(transfer) is export:
            self._withdraw(export)

    def check_integrity(self) -> None:
        """Raises AssertionError unless the records agree with each other."""
        assert all(each.state == "queued" for each in self._queued.values())
        assert all(each.state == "pulling" or each.is_stopped for each in self._active)
        for each in self._imports.values():
            assert (each.state == "queued") == (self._queued.get(each.id) is each)
            assert each.state == "over" or each.pulls or self._queued.get(each.id) is each
            assert each.state != "over" or not each.waiting, "somebody waits for an import that is over"
            assert each.state != "pulling" or each in self._active
        assert set(self._pulls.values()) == {pull for each in self._active for pull in each.pulls if not pull.is_over}
        assert all(self._pulled[name].state == "pulling" for name in self._pulled)
        held = [each for each in self._imports.values() if each not in self._active]
        assert self._reserved == sum(each.reserved for each in (*self._active, *held)), "pages of imports are counted wrong"
        for export in self._withdrawn.values():
            assert export.is_open, "withdrawn, and nobody reads it"
            assert export.id not in self._exports
        self._ends.check_integrity()

    def _can_pull(self, source: KvSource | None) -> bool:
        if source is None or self.transport is not None:
            return True
        self._report(source.transfer, "failed", self._clock(), reason=NO_TRANSPORT)
        return self.nearby is not None

    def _add(
        self, key: bytes, source: KvSource | None, token_ids: Sequence[int], blocks: int, root: bytes, seconds: float, *, is_fetch: bool
    ) -> Import:
        self.is_used = True
        if source is not None and source.blocks:
            # No more is asked for than the source has.
            blocks = min(blocks, source.blocks)
        found = Import(key, source, token_ids, blocks, self._cache.root(root), seconds, is_fetch, self._clock())
        self._imports[key] = self._queued[key] = found
        return found

    def _begin_queued(self, now: float, running: int) -> None:
        """In the order in which they came. When one lacks pages, those behind it wait as well."""
        is_short = False
        self._short_of = None
        for each in list(self._queued.values()):
            if each.behind is not None and each.behind.state == "pulling":
                continue
            if is_short or not self._begin(each, now, running):
                is_short = True
                self._short_of = self._cache.free + self._cache.cached
                if not each.is_short:
                    each.is_short = True
                    self._ends.put(each, now + MAX_SHORT_SECONDS)

    def _begin(self, wanted: Import, now: float, running: int) -> bool:
        """Pulls what the tree lacks. Returns False when there are too few pages now."""
        cache, size = self._cache, self._cache.page_size
        path = cache.match_blocks(wanted.root.name, wanted.token_ids, wanted.blocks)
        first, parent = len(path), (path[-1] if path else wanted.root).name
        count = max(0, min(wanted.blocks - first, self._max_reserved))
        unused = running + sum([not node.references for node in path])
        if count:
            ahead = self._pulled.get(block_hash(parent, wanted.token_ids[first * size : (first + 1) * size]))
            if ahead is not None:
                wanted.behind = ahead
                return True
            if wanted.source is not None and not self._has_room(wanted, count, unused):
                return False
        names, runs = self._plan(wanted, _names(wanted.token_ids, size, first, count, parent))
        if wanted.source is None and not self._has_room(wanted, len(names), unused):
            return False
        cache.hold(path)
        wanted.path, wanted.state = path, "pulling"
        self._ends.put(wanted, now + SILENCE_SECONDS)
        del self._queued[wanted.id]
        self._active[wanted] = None
        self._pull(wanted, names, runs, now)
        return True

    def _has_room(self, wanted: Import, count: int, unused: int) -> bool:
        most = self._cache.pages if wanted.is_next else self._max_reserved
        return self._reserved + count <= most and self._cache.can_allocate(count + unused)

    def _plan(self, wanted: Import, names: Iterator[bytes]) -> tuple[list[bytes], list[tuple[Place, KvSource, int]]]:
        """What comes, and from where: first from the tiers, the rest from the source. Names are made only as far as somebody asks."""
        known: list[bytes] = []
        runs: list[tuple[Place, KvSource, int]] = []
        if self.nearby is not None:
            count = self.nearby.plan(_recorded(names, known))
            if count:
                self._local_pulls += 1
                runs.append((self.nearby, KvSource(b"tier" + self._local_pulls.to_bytes(12), ""), count))
            if wanted.source is None:
                return known[:count], runs
        known += names
        rest = len(known) - sum([count for _, _, count in runs])
        if rest and wanted.source is not None and self.transport is not None:
            runs.append((self.transport, wanted.source, rest))
        return known, runs

    def _pull(self, wanted: Import, names: Sequence[bytes], runs: Sequence[tuple[Place, KvSource, int]], now: float) -> None:
        wanted.reserved = sum([count for _, _, count in runs])
        self._reserved += wanted.reserved
        if self.nearby is not None and runs and runs[0][0] is self.nearby:
            # Before the pages are made free: what is evicted for them goes to the same tiers.
            self.nearby.keep(names[: runs[0][2]])
        pages = self._cache.reserve(wanted.reserved, now) if runs else []
        first = 0
        for place, source, count in runs:
            pull = Pull(source.transfer, place, wanted, names[first : first + count], pages[first : first + count])
            first += count
            wanted.pulls.append(pull)
            self._pulls[pull.id] = pull
            self._pulled.update(dict.fromkeys(pull.names, wanted))
        if not runs:
            self._close(wanted)
        # Last: a tier may call back at once.
        for pull, (place, source, _) in zip(list(wanted.pulls), runs, strict=True):
            if wanted.reason:
                self.pull_ended(pull.id, wanted.reason)
            else:
                pull.is_begun = True
                place.pull(source, pull.names, list(pull.pages))

    def _adopt(self, wanted: Import) -> None:
        """Moves blocks that have arrived into the tree, in order."""
        size = self._cache.page_size
        for pull in wanted.pulls:
            new = pull.arrived - pull.adopted
            if new:
                first = len(wanted.path)
                keys = [tuple(wanted.token_ids[start : start + size]) for start in range(first * size, (first + new) * size, size)]
                pages, pull.pages = pull.pages[:new], pull.pages[new:]
                pull.adopted += new
                wanted.path += self._cache.adopt(wanted.path[-1] if wanted.path else wanted.root, keys, pages)
            if pull.adopted < len(pull.names):
                break

    def _stop(self, wanted: Import) -> None:
        """Ends it before its time. Its pages come back when every place is done with them."""
        if wanted.state == "queued":
            del self._queued[wanted.id]
        self._let_go(wanted)
        wanted.is_stopped, was_pulling, wanted.state = True, wanted.state == "pulling", "over"
        if was_pulling:
            self._forget_names(wanted)
            self._stop_pulls(wanted.pulls)
        self._wake(wanted)

    def _stop_pulls(self, pulls: Sequence[Pull]) -> None:
        for pull in pulls:
            if pull.is_begun and not pull.is_over:
                pull.place.stop(pull.id)

    def _close(self, wanted: Import) -> None:
        """No place writes into its pages any more."""
        del self._active[wanted]
        for pull in wanted.pulls:
            self._cache.give_back(pull.pages)
            pull.pages = []
        if wanted.is_stopped:
            return
        self._forget_names(wanted)
        wanted.state = "over"
        self._report_import(wanted)
        self._ends.put(wanted, self._clock() + wanted.hold_seconds)
        self._wake(wanted)

    def _fail(self, wanted: Import, reason: str) -> None:
        """Ends it with a report. It is remembered for its lease, so that its generation does not begin another."""
        self._stop(wanted)
        wanted.reason = reason
        self._report_import(wanted)
        self._ends.put(wanted, self._clock() + wanted.hold_seconds)

    def _forget_names(self, wanted: Import) -> None:
        for pull in wanted.pulls:
            for name in pull.names:
                self._pulled.pop(name, None)

    def _wake(self, wanted: Import) -> None:
        waiting, wanted.waiting = wanted.waiting, {}
        for wake in waiting.values():
            wake()

    def _let_go(self, wanted: Import) -> None:
        """Nothing that it has pulled is held any more."""
        self._release(wanted.path)
        self._reserved -= wanted.reserved
        wanted.reserved = 0

    def _interrupt_newest(self) -> None:
        newest = next(reversed(self._active), None)
        if newest is not None:
            self._fail(newest, TOO_FEW_PAGES)
            return
        export = next((each for each in reversed(self._exports.values()) if each.path), None)
        if export is not None:
            self._withdraw(export)

    def _tell(self, export: Export) -> None:
        """Tells the transport about blocks that are there now, and holds them."""
        if self.transport is None or not export.is_open or export.is_complete:
            return
        new: list[Node] = []
        last = export.path[-1] if export.path else None
        for name in export.names[export.told :]:
            node = self._cache.find(name)
            # Names that are no chain are not followed: a path is held from its root on.
            if node is None or (last is not None and node.parent is not last):
                break
            new.append(node)
            last = node
        if new:
            held = new if export.path else [*_ancestors(new[0]), *new]
            self._cache.hold(held)
            export.path += held
        first, export.told = export.told, export.told + len(new)
        export.is_complete = not export.is_live or export.told == len(export.names)
        if new or export.is_complete:
            self.transport.exported(export.id, first, [node.page for node in new], is_last=export.is_complete)

    def _withdraw(self, export: Export) -> None:
        del self._exports[export.id]
        self._ends.discard(export)
        self._release(export.kept)
        if export.is_open and self.transport is not None:
            self._withdrawn[export.id] = export
            self.transport.withdraw(export.id)
        else:
            self._release(export.path)

    def _release(self, path: list[Node]) -> None:
        if path:
            self._cache.release(path)
            path.clear()

    def _report_import(self, wanted: Import) -> None:
        if wanted.source is not None:
            blocks = sum([pull.adopted for pull in wanted.pulls if pull.place is not self.nearby])
            outcome: TransferOutcome = "failed" if wanted.reason else "done"
            self._report(wanted.id, outcome, wanted.asked_at, blocks, wanted.reason)

    def _report(self, transfer: bytes, outcome: TransferOutcome, since: float, blocks: int = 0, reason: str = "") -> None:
        self.is_used = True
        size, seconds = blocks * self._block_bytes, self._clock() - since
        self._reports.append(TransferReport(transfer, outcome, blocks, size, seconds, reason))


def _may_go_on(earlier: Import | None) -> bool:
    """Whether a generation may load after this: it has loaded all that it wanted then."""
    return earlier is None or (earlier.state == "over" and not earlier.reason and bool(earlier.pulls))


def _names(token_ids: Sequence[int], size: int, first: int, count: int, parent: bytes) -> Iterator[bytes]:
    """The names of these blocks, some at a time."""
    for start in range(first, first + count, NAMED_AT_ONCE):
        piece = block_hashes(token_ids[start * size : min(start + NAMED_AT_ONCE, first + count) * size], size, parent)
        yield from piece
        parent = piece[-1]


def _recorded(names: Iterator[bytes], into: list[bytes]) -> Iterator[bytes]:
    for name in names:
        into.append(name)
        yield name


def _key(request: Submit) -> bytes:
    """The import of a generation: that of its source, or one of its own from a tier."""
    return request.id if request.source is None else request.source.transfer


def _ancestors(node: Node) -> list[Node]:
    """From the first block behind the root to the parent."""
    found: list[Node] = []
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
        found.append(node)
    return found[::-1]
