"""The radix tree over blocks: which KV is there, who uses it, and who leases it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

Key = tuple[int, ...]
"""The tokens of one block."""


class Lease:
    """A wish to keep some nodes until `ends_at`. It is a preference, never a lock. Its weight falls from 1 to 0 over its `seconds`.

    While a turn of its session runs, a lease has no end and its full weight.
    """

    __slots__ = ("ends_at", "is_session", "nodes", "seconds")

    def __init__(self, seconds: float, ends_at: float = math.inf, *, is_session: bool = False) -> None:
        self.is_session = is_session
        self.seconds = seconds
        self.ends_at = ends_at
        self.nodes: set[Node] = set()

    def weight(self, now: float) -> float:
        if self.ends_at == math.inf:
            return 1.0
        return min(1.0, max(0.0, (self.ends_at - now) / self.seconds)) if self.seconds > 0 else 0.0


class Node:
    """One block, behind the block of its parent, and the page that holds its KV.

    `references` counts the running sequences whose path contains the node. A sequence that uses or leases a node also uses or leases
    its ancestors. So unused and unleased nodes can always be removed from the leaves inwards.
    """

    __slots__ = ("children", "depth", "is_public", "key", "last_used", "leases", "name", "page", "parent", "priority", "references")

    def __init__(self, key: Key, page: int, parent: Node | None, name: bytes, priority: int = 0, is_public: bool = False) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.name = name
        self.children: dict[Key, Node] = {}
        self.references = 1
        # None until the first lease: most nodes never have one, and an empty set would be the largest part of a node.
        self.leases: set[Lease] | None = None
        # A request without a session has used it, so closing a session does not free it.
        self.is_public = is_public
        self.priority = priority
        self.last_used = 0

    @property
    def is_evictable_leaf(self) -> bool:
        return not self.references and not self.children


class Root(Node):
    """The parent of the first blocks of one tenant or salt. It is no block: one reference keeps it from looking like an evictable leaf."""

    __slots__ = ("__weakref__",)

    def __init__(self, name: bytes) -> None:
        super().__init__((), -1, None, name)


class RadixTree:
    """Finds the longest known prefix of a prompt, block by block, by its tokens. Prefixes of different roots have nothing in common."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        # A root lives while a block or a sequence refers to it. Clients may choose roots freely, so empty ones must not stay.
        self._roots: WeakValueDictionary[bytes, Root] = WeakValueDictionary()

    def root(self, name: bytes) -> Root:
        root = self._roots.get(name)
        if root is None:
            root = self._roots[name] = Root(name)
        return root

    def match(self, root: bytes, token_ids: Sequence[int], max_blocks: int) -> list[Node]:
        """The nodes of the longest known prefix, at most `max_blocks`."""
        node: Node | None = self._roots.get(root)
        size = self.block_size
        path: list[Node] = []
        for start in range(0, max_blocks * size, size):
            node = None if node is None else node.children.get(tuple(token_ids[start : start + size]))
            if node is None:
                break
            path.append(node)
        return path

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before children."""
        return (node for chain in self.chains() for node in chain)

    def chains(self) -> Iterator[list[Node]]:
        """All nodes, one chain per leaf: each node follows the one before it, the first follows a root or a node of an earlier chain."""
        pending = [child for root in list(self._roots.values()) for child in root.children.values()]
        while pending:
            chain = [pending.pop()]
            while chain[-1].children:
                first, *others = chain[-1].children.values()
                pending += others
                chain.append(first)
            yield chain
