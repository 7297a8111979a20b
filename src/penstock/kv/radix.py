"""The radix tree over pages: which KV is there, who uses it, and who would like it kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.kv.blocks import ROOT
from penstock.kv.lease import Lease

Key = tuple[int, ...]
"""The tokens of one page."""


class Node:
    """One full page of KV, behind the page of its parent. The sequence that filled it uses it.

    `references` counts the running sequences whose path leads through it. Those who use a node use its ancestors, too, and those
    who lease it lease them; so whatever is unused, or unleased, can be taken away from the leaves inwards.
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
        # None until the first: most nodes never have one, and an empty set is the largest part of a node.
        self.leases: set[Lease] | None = None
        # Somebody without a session has used it, so it is no session's alone.
        self.is_public = is_public
        self.priority = priority
        self.last_used = 0

    @property
    def is_evictable_leaf(self) -> bool:
        return not self.references and not self.children


class RadixTree:
    """Finds the longest known prefix of a prompt, page by page."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        # Always in use, so that it never looks like a leaf that could go.
        self.root = Node((), -1, None, ROOT)

    def match(self, token_ids: Sequence[int], most_pages: int) -> list[Node]:
        """The nodes of the longest known prefix, at most so many."""
        node, size = self.root, self.page_size
        path: list[Node] = []
        for start in range(0, most_pages * size, size):
            child = node.children.get(tuple(token_ids[start : start + size]))
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def nodes(self) -> Iterator[Node]:
        """All of them, parents before children."""
        pending = list(self.root.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()

    def chains(self) -> Iterator[list[Node]]:
        """All of them, as one chain a leaf: each node behind the one before it, the first behind a node of an earlier chain or the root."""
        pending = list(self.root.children.values())
        while pending:
            chain = [pending.pop()]
            while chain[-1].children:
                first, *others = chain[-1].children.values()
                pending += others
                chain.append(first)
            yield chain
