"""The paged KV cache: a pool of equal pages, a radix tree over the full ones, and the rule of eviction.

Every page is in one place at a time: free, in the tree, or in the tail of one running sequence or import, which fills it. A page of the
tree is in use while the path of a running sequence or of a transfer contains it. Otherwise it is cached and may be evicted.

Eviction takes unleased pages first, by priority and age, then leased ones, those with the least weight first. Leases protect at most a
share of the pool: beyond it, leased pages are evicted like unleased ones. So every page that is not in use can be allocated, and no
lease can stop a request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Protocol

from penstock.config.engines import SessionSettings
from penstock.kv.blocks import KvEventLog, block_hash
from penstock.kv.radix import Key, Lease, Node, RadixTree, Root
from penstock.lazy_heap import LazyHeap
from penstock.wire.messages import BlocksStored, Snapshot, Tier


class Below(Protocol):
    """The tiers below the device: `kv.tiers.Tiers`."""

    def demote(self, nodes: Sequence[Node]) -> None:
        """These nodes are evicted. Their pages still have their KV, and their `leases` say who held them."""

    def drop(self, nodes: Sequence[Node]) -> None:
        """These nodes are freed for good."""

    def end_lease(self, lease: Lease, *, free_exclusive: bool) -> None: ...

    def supersede(self, lease: Lease, kept: Collection[bytes]) -> None:
        """The lease holds no block any more except these."""

    def protect(self, pages: Sequence[int]) -> None:
        """Somebody else will write to these pages, at any moment."""

    def pause(self, path: Sequence[Node]) -> None:
        """These nodes will be needed again soon."""

    def tier_of(self, name: bytes) -> Tier | None: ...

    def stored_events(self) -> list[BlocksStored]: ...


class KVCache:
    """Which page holds what. The tensors are the engine's."""

    def __init__(self, pages: int, page_size: int, lease_share: float = SessionSettings.lease_share) -> None:
        self.pages = pages
        self.page_size = page_size
        self.events = KvEventLog()
        self.below: Below | None = None
        self.evicted_pages = 0
        self._max_leased = int(pages * lease_share)
        self._tree = RadixTree(page_size)
        self._free = list(range(pages - 1, -1, -1))
        self._fresh: list[int] = []
        self._by_name: dict[bytes, Node] = {}
        self._tail_pages = 0
        self._cached = 0
        self._used = 0
        self.reused = 0
        """How often a cached page that nobody used came into use again."""
        self._leased = 0
        self._clock = 0
        # All leaves that may be evicted: unleased ones by priority and age, leased ones by their weight at the time `_weighed_at`.
        self._plain_leaves: LazyHeap[Node, tuple[int, int]] = LazyHeap()
        self._leased_leaves: LazyHeap[Node, tuple[float, int, int]] = LazyHeap()
        self._weighed_at = 0.0
        self._on_stored: Callable[[Iterable[Node]], None] | None = None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that no sequence uses. They can be reused or evicted."""
        return self._cached

    @property
    def used(self) -> int:
        """Pages that running sequences use, each counted once."""
        return self._used + self._tail_pages

    @property
    def leased(self) -> int:
        return self._leased

    @property
    def protects_leases(self) -> bool:
        """Whether a lease keeps anything."""
        return self._max_leased > 0

    def root(self, name: bytes) -> Node:
        """The parent of the first blocks under this root."""
        return self._tree.root(name)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def match(self, root: bytes, token_ids: Sequence[int]) -> list[Node]:
        """The longest prefix known under this root that leaves at least one token to compute: the next token comes from its logits."""
        return self._tree.match(root, token_ids, (len(token_ids) - 1) // self.page_size)

    def match_blocks(self, root: bytes, token_ids: Sequence[int], blocks: int) -> list[Node]:
        """The longest prefix known under this root, of at most this many blocks."""
        return self._tree.match(root, token_ids, blocks)

    def find(self, name: bytes) -> Node | None:
        """The block with this name."""
        return self._by_name.get(name)

    def hold(self, path: Sequence[Node]) -> None:
        """Keeps these nodes, which begin at a root, from eviction until `release`. Nothing else about them changes."""
        for node in path:
            if not node.references:
                self._cached -= 1
                self._used += 1
                self.reused += 1
                if not node.children:
                    self._withdraw(node)
            node.references += 1

    def acquire(self, path: Sequence[Node], lease: Lease | None, priority: int = 0) -> None:
        """A sequence starts to use these nodes, with the lease of its session or without."""
        self.hold(path)
        for node in path:
            node.priority = max(node.priority, priority)
            if lease is None:
                node.is_public = True
            else:
                self._add_lease(node, lease)

    def release(self, path: Sequence[Node]) -> None:
        """A sequence or transfer has ended or is preempted. Its nodes stay cached for others with the same tokens."""
        self._clock += 1
        unused = 0
        for node in path:
            node.last_used = self._clock
            node.references -= 1
            unused += not node.references
        self._used -= unused
        self._cached += unused
        # Only the end of a path can be a leaf.
        if path:
            self._offer(path[-1])

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free) + self._cached

    def allocate(self, count: int, now: float) -> list[int]:
        """Pages for the tails of sequences. Evicts what it must; the caller has checked `can_allocate`."""
        free = self._free
        if count > len(free):
            self._evict(count - len(free), now)
        self._tail_pages += count
        pages = free[len(free) - count :]
        del free[len(free) - count :]
        self._fresh += pages
        return pages

    def reserve(self, count: int, now: float) -> list[int]:
        """Pages for an import, which overwrites all of them. So they are not fresh: wiping them later would destroy what has arrived."""
        pages = self.allocate(count, now)
        reserved = set(pages)
        self._fresh = [page for page in self._fresh if page not in reserved]
        if self.below is not None:
            self.below.protect(pages)
        return pages

    def take_fresh(self) -> list[int]:
        """The pages allocated since the last call. They still hold the KV of earlier sequences."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def give_back(self, tail: Sequence[int]) -> None:
        """Frees pages of a tail that will not be filled."""
        self._tail_pages -= len(tail)
        self._free += tail

    def commit(self, parent: Node, keys: Sequence[Key], pages: Sequence[int], lease: Lease | None, priority: int = 0) -> list[Node]:
        """Moves full pages of a tail into the tree, in use by the sequence that filled them. Returns their nodes.

        Where another sequence has committed the same block before, its page is used and ours is freed.
        """
        path = self._take_known(parent, keys, pages)
        known = len(path)
        self.acquire(path, lease, priority)
        if known < len(keys):
            path += self._grow(path[-1] if path else parent, keys[known:], pages[known:], lease, priority, is_public=lease is None)
        return path

    def adopt(self, parent: Node, keys: Sequence[Key], pages: Sequence[int]) -> list[Node]:
        """Like `commit`, for pages that an import has filled, and holds. Whoever uses them first decides whether they are a session's."""
        path = self._take_known(parent, keys, pages)
        known = len(path)
        self.hold(path)
        if known < len(keys):
            path += self._grow(path[-1] if path else parent, keys[known:], pages[known:], None, 0, is_public=False)
        return path

    def _take_known(self, parent: Node, keys: Sequence[Key], pages: Sequence[int]) -> list[Node]:
        """Those of these blocks that are in the tree already. Our pages for them are freed."""
        path: list[Node] = []
        for key in keys:
            node = parent.children.get(key)
            if node is None:
                break
            path.append(node)
            parent = node
        self.give_back(pages[: len(path)])
        return path

    def _grow(
        self, parent: Node, keys: Sequence[Key], pages: Sequence[int], lease: Lease | None, priority: int, *, is_public: bool
    ) -> list[Node]:
        """Adds a branch of new nodes behind `parent`."""
        new: list[Node] = []
        node = parent
        for key, page in zip(keys, pages, strict=True):
            child = node.children[key] = Node(key, page, node, block_hash(node.name, key), priority, is_public)
            self._by_name[child.name] = child
            new.append(child)
            node = child
        self._used += len(new)
        self._tail_pages -= len(new)
        if lease is not None:
            for node in new:
                self._add_lease(node, lease)
        self.events.stored(parent.name, [node.name for node in new])
        if self._on_stored is not None:
            self._on_stored(new)
        return new

    def retain(self, path: Sequence[Node], lease: Lease) -> None:
        """Adds a lease without a session. Of several, a node keeps the one that ends last."""
        for node in path:
            others = [other for other in node.leases or () if not other.is_session]
            if any(other.ends_at > lease.ends_at for other in others):
                continue
            for other in others:
                self._drop_lease(node, other)
            self._add_lease(node, lease)

    def end_lease(self, lease: Lease, *, free_exclusive: bool) -> int:
        """Removes the lease from its nodes. `free_exclusive` frees those at once that only this lease held. Returns how many it freed."""
        nodes = sorted(lease.nodes, key=lambda node: -node.depth)
        gone: list[Node] = []
        for node in nodes:
            self._drop_lease(node, lease)
            if free_exclusive and node.is_evictable_leaf and not node.leases and not node.is_public:
                self._remove(node)
                gone.append(node)
            else:
                self._offer(node)
        if gone:
            self.events.removed([node.name for node in gone])
        if self.below is not None:
            self.below.drop(gone)
            self.below.end_lease(lease, free_exclusive=free_exclusive)
        return len(gone)

    def demote(self, lease: Lease, kept: Collection[Node]) -> None:
        """Takes the lease from all nodes except these. Those that nobody else has used or leases are the first to be evicted."""
        for node in [node for node in lease.nodes if node not in kept]:
            self._drop_lease(node, lease)
            if not (node.leases or node.is_public or node.references):
                node.last_used = 0
            self._offer(node)
        if self.below is not None:
            self.below.supersede(lease, {node.name for node in kept})

    def tier_of(self, name: bytes) -> Tier | None:
        """The fastest tier that has this block; None if none has it."""
        if name in self._by_name:
            return "device"
        return None if self.below is None else self.below.tier_of(name)

    def watch(self, on_stored: Callable[[Iterable[Node]], None]) -> None:
        """Calls `on_stored` with all nodes of the tree, and from now on with new ones."""
        self._on_stored = on_stored
        on_stored(self._tree.nodes())

    def nodes(self) -> Iterator[Node]:
        """All nodes of the tree, parents before children."""
        return self._tree.nodes()

    def snapshot(self) -> Snapshot:
        """All blocks that are cached now. It includes events that were not taken yet: their numbers are below its `next_number`."""
        stored: list[BlocksStored] = []
        for chain in self._tree.chains():
            assert chain[0].parent is not None
            stored.append(BlocksStored(chain[0].parent.name, tuple([node.name for node in chain])))
        if self.below is not None:
            stored += self.below.stored_events()
        return Snapshot(self.events.next_number, tuple(stored))

    def check_counts(self) -> None:
        """The cheap part of `check_integrity`: the counts add up to all pages."""
        assert min(self._tail_pages, self._used, self._cached, self._leased) >= 0
        total = len(self._free) + self._tail_pages + self._used + self._cached
        assert total == self.pages, f"{total} of {self.pages} pages are accounted for"

    def check_integrity(self, paths: Iterable[Sequence[Node]], tails: Iterable[Sequence[int]], leases: Collection[Lease]) -> None:
        """Raises AssertionError unless every page is in one place and all references and leases come from these paths and leases.

        Paths and tails are those of running sequences and of transfers.
        """
        self.check_counts()
        nodes = list(self._tree.nodes())
        tail_pages = [page for tail in tails for page in tail]
        places = Counter([*self._free, *(node.page for node in nodes), *tail_pages])
        assert places == Counter(range(self.pages)), f"pages in no place or in several places: {places - Counter(range(self.pages))}"
        assert self._tail_pages == len(tail_pages), (self._tail_pages, len(tail_pages))
        references = Counter(id(node) for path in paths for node in path)
        for node in nodes:
            self._check_node(node, references[id(node)], leases)
        in_tree = set(nodes)
        assert all(node.name == name and node in in_tree for name, node in self._by_name.items()), "a name of a removed block"
        for lease in leases:
            assert lease.nodes <= in_tree, "a lease holds removed nodes"
            assert all(lease in (node.leases or ()) for node in lease.nodes)
        assert self._used == sum(1 for node in nodes if node.references)
        assert self._leased == sum(1 for node in nodes if node.leases)
        self._check_leaves(nodes)

    def _check_node(self, node: Node, references: int, leases: Collection[Lease]) -> None:
        assert node.references == references, f"{node.references} references, but {references} sequences use it"
        assert node.parent is not None
        assert node.parent.children[node.key] is node
        assert node.name in self._by_name
        assert len(node.key) == self.page_size
        if not isinstance(node.parent, Root):
            assert node.parent.references >= node.references
            assert node.parent.leases or not node.leases, "a leased node behind an unleased one"
        for lease in node.leases or ():
            assert lease in leases, "an unknown lease"
            assert node in lease.nodes

    def _check_leaves(self, nodes: Iterable[Node]) -> None:
        """Every evictable leaf is in the right heap."""
        leaves = [node for node in nodes if node.is_evictable_leaf]
        assert set(self._leased_leaves) == {node for node in leaves if node.leases}
        assert set(self._plain_leaves) == {node for node in leaves if not node.leases}
        self._leased_leaves.check_integrity()
        self._plain_leaves.check_integrity()

    def _add_lease(self, node: Node, lease: Lease) -> None:
        self._leased += not node.leases
        if node.leases is None:
            node.leases = {lease}
        else:
            node.leases.add(lease)
        lease.nodes.add(node)
        if node.is_evictable_leaf:
            self._plain_leaves.discard(node)
            self._offer(node)

    def _drop_lease(self, node: Node, lease: Lease) -> None:
        assert node.leases is not None
        node.leases.discard(lease)
        lease.nodes.discard(node)
        self._leased -= not node.leases
        if not node.leases:
            self._leased_leaves.discard(node)

    def _offer(self, node: Node) -> None:
        """Makes the node a candidate for eviction if nothing needs it any more."""
        if not node.is_evictable_leaf:
            return
        if node.leases:
            self._leased_leaves.put(node, self._weight(node))
        else:
            self._plain_leaves.put(node, (node.priority, node.last_used))

    def _withdraw(self, node: Node) -> None:
        """The node is no candidate for eviction any more."""
        (self._leased_leaves if node.leases else self._plain_leaves).discard(node)

    def _evict(self, count: int, now: float) -> None:
        gone: list[Node] = []
        while len(gone) < count:
            oldest = self._plain_leaves.least()
            node = None if oldest is None else oldest[1]
            if node is not None and not (self._leased > self._max_leased and self._leased_leaves):
                self._evict_branch(node, count, gone)
                continue
            least = self._least_leased(now)
            if node is None or (least.priority, least.last_used) < (node.priority, node.last_used):
                node = least
            self._evict_leaf(node)
            gone.append(node)
        self.evicted_pages += count
        self.events.removed([node.name for node in gone])
        if self.below is not None:
            self.below.demote(gone)

    def _evict_branch(self, node: Node, count: int, gone: list[Node]) -> None:
        """Evicts the oldest leaf, then its parents for as long as they are the oldest. They mostly are: they were used together."""
        while True:
            parent = node.parent
            assert parent is not None
            self._cut(node)
            gone.append(node)
            is_candidate = parent.is_evictable_leaf and not parent.leases
            oldest = self._plain_leaves.least()
            if not is_candidate or len(gone) == count or (oldest is not None and oldest[0] < (parent.priority, parent.last_used)):
                break
            node = parent
        self._offer(parent)

    def _evict_leaf(self, node: Node) -> None:
        leases = set(node.leases or ())
        for lease in leases:
            self._drop_lease(node, lease)
        self._remove(node)
        # Out of the tree it is only a record, for the tier below.
        node.leases = leases

    def _least_leased(self, now: float) -> Node:
        """The leased leaf of the least weight. Weights fall with time, so all leaves are weighed anew at every new `now`."""
        if self._weighed_at != now:
            self._weighed_at = now
            self._leased_leaves.reorder(self._weight)
        while True:
            least = self._leased_leaves.least()
            assert least is not None, "the caller has checked `can_allocate`"
            weight, node = least
            # A lease may have changed since.
            current = self._weight(node)
            if weight == current:
                return node
            self._leased_leaves.put(node, current)

    def _weight(self, node: Node) -> tuple[float, int, int]:
        weight = max([lease.weight(self._weighed_at) for lease in node.leases or ()])
        return weight, node.priority, node.last_used

    def _remove(self, node: Node) -> None:
        """Takes an evictable, unleased leaf out of the tree."""
        assert node.parent is not None
        self._cut(node)
        self._offer(node.parent)

    def _cut(self, node: Node) -> None:
        assert node.parent is not None
        self._plain_leaves.discard(node)
        del node.parent.children[node.key]
        if self._by_name.get(node.name) is node:
            del self._by_name[node.name]
        self._free.append(node.page)
        self._cached -= 1
