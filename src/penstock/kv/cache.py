"""The paged KV cache: a pool of equal pages, a radix tree over the full ones, and what goes when there is no room.

Every page is in one place at a time: free, in the tree, or in the tail of one running sequence, which is filling it. A page of the tree is
in use while a running sequence's path leads through it; else it is cached, and may be evicted.

What is evicted first: pages that nobody leases, by priority and age; then leased ones, the least weight first. Leases protect at
most a share of the pool: those beyond it are as good as unleased. So whatever is not in use can always be had, and no lease can bring
anyone to a stop.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from penstock.kv.blocks import block_hash
from penstock.kv.events import KvEventLog
from penstock.kv.lease import Lease
from penstock.kv.radix import Key, Node, RadixTree
from penstock.wire.messages import Snapshot


class KVCache:
    """Bookkeeping only; the tensors are elsewhere, indexed by page."""

    def __init__(self, pages: int, page_size: int, lease_share: float = 0.5) -> None:
        self.pages = pages
        self.page_size = page_size
        self.events = KvEventLog()
        self.evicted_pages = 0
        self._most_leased = int(pages * lease_share)
        self._tree = RadixTree(page_size)
        self._free = list(range(pages - 1, -1, -1))
        self._fresh: list[int] = []
        self._tail_pages = 0
        self._cached = 0
        self._used = 0
        self._leased = 0
        self._clock = 0
        self._offers = 0
        # Leaves that could go: unleased ones in a heap that may be out of date, leased ones (few: one a branch) in a set.
        self._plain_leaves: list[tuple[int, int, int, Node]] = []
        self._leased_leaves: set[Node] = set()
        # The leased leaves as a heap, the first to go first, as weighed at one moment; it may be out of date, but none is missing.
        self._weighed: list[tuple[float, int, int, int, Node]] = []
        self._weighed_at: float | None = None

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages that nobody uses and that could be reused, or evicted."""
        return self._cached

    @property
    def used(self) -> int:
        """Pages that running sequences use, each counted once."""
        return self._used + self._tail_pages

    @property
    def leased(self) -> int:
        return self._leased

    @property
    def root(self) -> Node:
        return self._tree.root

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def match(self, token_ids: Sequence[int]) -> list[Node]:
        """The longest known prefix that leaves at least one token to compute: its logits are what the next token comes from."""
        return self._tree.match(token_ids, (len(token_ids) - 1) // self.page_size)

    # What running sequences do.

    def acquire(self, path: Sequence[Node], lease: Lease | None, priority: int = 0) -> None:
        """A sequence begins to use these nodes, for its session's lease or for anybody."""
        for node in path:
            self._mark(node, lease, priority)
            if not node.references:
                self._cached -= 1
                self._used += 1
                self._leased_leaves.discard(node)
            node.references += 1

    def release(self, path: Sequence[Node]) -> None:
        """A sequence has ended, or is preempted: its nodes stay cached for whoever comes with the same tokens."""
        self._clock += 1
        unused = 0
        for node in path:
            node.last_used = self._clock
            node.references -= 1
            unused += not node.references
        self._used -= unused
        self._cached += unused
        # Of a path, only the end can be a leaf.
        if path:
            self._offer(path[-1])

    def can_allocate(self, count: int) -> bool:
        return count <= len(self._free) + self._cached

    def allocate(self, count: int, now: float) -> list[int]:
        """Pages for the tails of sequences. Evicts what it must; the caller has asked `can_allocate`."""
        free = self._free
        if count > len(free):
            self._evict(count - len(free), now)
        self._tail_pages += count
        pages = free[len(free) - count :]
        del free[len(free) - count :]
        self._fresh += pages
        return pages

    def take_fresh(self) -> list[int]:
        """The pages that were allocated since the last taking: they still hold what another sequence left there."""
        fresh, self._fresh = self._fresh, []
        return fresh

    def give_back(self, tail: Sequence[int]) -> None:
        """Pages of a tail that will not be filled."""
        self._tail_pages -= len(tail)
        self._free += tail

    def commit(self, parent: Node, keys: Sequence[Key], pages: Sequence[int], lease: Lease | None, priority: int = 0) -> list[Node]:
        """Full pages of a tail go into the tree, in use by the sequence that filled them. Returns their nodes.

        Where another sequence was quicker, its page is taken and ours is given back.
        """
        path: list[Node] = []
        for key in keys:
            node = parent.children.get(key)
            if node is None:
                break
            path.append(node)
            parent = node
        known = len(path)
        self.give_back(pages[:known])
        self.acquire(path, lease, priority)
        if known < len(keys):
            path += self._grow(parent, keys[known:], pages[known:], lease, priority)
        return path

    def _grow(self, parent: Node, keys: Sequence[Key], pages: Sequence[int], lease: Lease | None, priority: int) -> list[Node]:
        """A branch of new nodes behind `parent`."""
        new: list[Node] = []
        node, is_public = parent, lease is None
        for key, page in zip(keys, pages, strict=True):
            child = node.children[key] = Node(key, page, node, block_hash(node.name, key), priority, is_public)
            new.append(child)
            node = child
        self._used += len(new)
        self._tail_pages -= len(new)
        if lease is not None:
            for node in new:
                self._add_lease(node, lease)
        self.events.stored(parent, new)
        return new

    # What leases do.

    def retain(self, path: Sequence[Node], lease: Lease) -> None:
        """A lease without a session. Of several, a node keeps the one that ends last."""
        for node in path:
            others = [other for other in node.leases or () if not other.is_session]
            if any(other.ends_at > lease.ends_at for other in others):
                continue
            for other in others:
                self._drop_lease(node, other)
            self._add_lease(node, lease)

    def end_lease(self, lease: Lease, *, free_exclusive: bool) -> int:
        """Nobody wants these nodes kept any more. Frees at once, if so asked, those that only this lease held; returns how many."""
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
            self.events.removed(gone)
        return len(gone)

    def clear(self) -> None:
        """Forgets all that nobody uses."""
        gone = [node for node in self._tree.nodes() if not node.references]
        for node in reversed(gone):
            self._evict_leaf(node)
        if not self._used:
            self.events.cleared()
        elif gone:
            self.events.removed(gone)

    def snapshot(self) -> Snapshot:
        return self.events.snapshot(self._tree)

    def check_counts(self) -> None:
        """The cheap part of `check_integrity`: every page is accounted for."""
        assert min(self._tail_pages, self._used, self._cached, self._leased) >= 0
        total = len(self._free) + self._tail_pages + self._used + self._cached
        assert total == self.pages, f"{total} pages are accounted for, of {self.pages}"

    def check_integrity(self, paths: Iterable[Sequence[Node]], tails: Iterable[Sequence[int]], leases: Collection[Lease]) -> None:
        """Raises AssertionError unless every page is in one place, and references and leases add up to those who are known to hold them."""
        self.check_counts()
        nodes = list(self._tree.nodes())
        tail_pages = [page for tail in tails for page in tail]
        places = Counter([*self._free, *(node.page for node in nodes), *tail_pages])
        assert places == Counter(range(self.pages)), f"pages in no place or in several: {places - Counter(range(self.pages))}"
        assert self._tail_pages == len(tail_pages), (self._tail_pages, len(tail_pages))
        references = Counter(id(node) for path in paths for node in path)
        for node in nodes:
            self._check_node(node, references[id(node)], leases)
        in_tree = set(nodes)
        for lease in leases:
            assert lease.nodes <= in_tree, "a lease holds nodes that are gone"
            assert all(lease in (node.leases or ()) for node in lease.nodes)
        assert self._used == sum(1 for node in nodes if node.references)
        assert self._leased == sum(1 for node in nodes if node.leases)
        self._check_leaves(nodes)

    def _check_node(self, node: Node, references: int, leases: Collection[Lease]) -> None:
        assert node.references == references, f"{node.references} references, but {references} sequences use it"
        assert node.parent is not None
        assert node.parent.children[node.key] is node
        assert len(node.key) == self.page_size
        if node.parent is not self.root:
            assert node.parent.references >= node.references
            assert node.parent.leases or not node.leases, "a leased node behind one that is not"
        for lease in node.leases or ():
            assert lease in leases, "a lease that nobody holds"
            assert node in lease.nodes

    def _check_leaves(self, nodes: Iterable[Node]) -> None:
        """Whatever could go can be found."""
        leaves = [node for node in nodes if node.is_evictable_leaf]
        assert self._leased_leaves == {node for node in leaves if node.leases}
        offered = {entry for entry in self._plain_leaves if self._is_current(entry)}
        assert {entry[3] for entry in offered} == {node for node in leaves if not node.leases}

    def _mark(self, node: Node, lease: Lease | None, priority: int) -> None:
        node.priority = max(node.priority, priority)
        if lease is None:
            node.is_public = True
        else:
            self._add_lease(node, lease)

    def _add_lease(self, node: Node, lease: Lease) -> None:
        self._leased += not node.leases
        if node.leases is None:
            node.leases = {lease}
        else:
            node.leases.add(lease)
        lease.nodes.add(node)
        if node.is_evictable_leaf:
            self._add_leased_leaf(node)

    def _drop_lease(self, node: Node, lease: Lease) -> None:
        assert node.leases is not None
        node.leases.discard(lease)
        lease.nodes.discard(node)
        self._leased -= not node.leases
        if not node.leases:
            self._leased_leaves.discard(node)

    def _offer(self, node: Node) -> None:
        """If nobody needs the node any more, it can be evicted from now on."""
        if not node.is_evictable_leaf:
            return
        if node.leases:
            self._add_leased_leaf(node)
        else:
            self._offers += 1
            heapq.heappush(self._plain_leaves, (node.priority, node.last_used, self._offers, node))
            if len(self._plain_leaves) > 2 * self._cached + 64:
                # Every use of a node leaves an entry behind, and with it the node. One offered twice has two that are current; one will do.
                current = {entry[3]: entry for entry in self._plain_leaves if self._is_current(entry)}
                self._plain_leaves = list(current.values())
                heapq.heapify(self._plain_leaves)

    def _is_current(self, entry: tuple[int, int, int, Node]) -> bool:
        priority, last_used, _, node = entry
        is_same = (node.priority, node.last_used) == (priority, last_used)
        return is_same and node.is_evictable_leaf and not node.leases and node.page >= 0

    def _add_leased_leaf(self, node: Node) -> None:
        self._leased_leaves.add(node)
        if self._weighed_at is not None:
            heapq.heappush(self._weighed, _by_weight(node, self._weighed_at))
            if len(self._weighed) > 2 * len(self._leased_leaves) + 64:
                self._weighed, self._weighed_at = [], None

    def _evict(self, count: int, now: float) -> None:
        gone: list[Node] = []
        while len(gone) < count:
            node = self._oldest_plain()
            if node is not None and not (self._leased > self._most_leased and self._leased_leaves):
                self._evict_branch(node, count, gone)
                continue
            least = self._least_leased(now)
            if node is None or (least.priority, least.last_used) < (node.priority, node.last_used):
                node = least
            self._evict_leaf(node)
            gone.append(node)
        self.evicted_pages += count
        self.events.removed(gone)

    def _evict_branch(self, node: Node, count: int, gone: list[Node]) -> None:
        """The oldest leaf, and then its parents, for as long as they are the oldest: they mostly are, as they were used together."""
        leaves = self._plain_leaves
        heapq.heappop(leaves)
        while True:
            parent = node.parent
            assert parent is not None
            self._cut(node)
            gone.append(node)
            is_next = parent.is_evictable_leaf and not parent.leases
            if not is_next or len(gone) == count or (leaves and leaves[0] < (parent.priority, parent.last_used)):
                break
            node = parent
        self._offer(parent)

    def _evict_leaf(self, node: Node) -> None:
        for lease in list(node.leases or ()):
            self._drop_lease(node, lease)
        self._remove(node)

    def _oldest_plain(self) -> Node | None:
        while self._plain_leaves and not self._is_current(self._plain_leaves[0]):
            heapq.heappop(self._plain_leaves)
        return self._plain_leaves[0][3] if self._plain_leaves else None

    def _least_leased(self, now: float) -> Node:
        """The leased leaf of the least weight. Weights fall with time: their order holds for one moment, and is found anew in the next."""
        if self._weighed_at != now:
            self._weighed_at = now
            self._weighed = [_by_weight(node, now) for node in self._leased_leaves]
            heapq.heapify(self._weighed)
        while True:
            entry = self._weighed[0]
            node = entry[4]
            if node not in self._leased_leaves:
                heapq.heappop(self._weighed)
            elif entry == (current := _by_weight(node, now)):
                return node
            else:
                heapq.heapreplace(self._weighed, current)

    def _remove(self, node: Node) -> None:
        """Takes an evictable, unleased leaf out of the tree."""
        assert node.parent is not None
        self._cut(node)
        self._offer(node.parent)

    def _cut(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
        self._free.append(node.page)
        node.page = -1  # so that its entries in the heap are known to be out of date
        self._cached -= 1


def _by_weight(node: Node, now: float) -> tuple[float, int, int, int, Node]:
    return max([lease.weight(now) for lease in node.leases or ()]), node.priority, node.last_used, node.page, node
