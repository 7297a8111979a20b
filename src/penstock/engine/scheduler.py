"""Which sequences compute how many tokens in the next step, and who must make room.

Those that have begun come first, the oldest before the newest. Every one that generates gets its token in every step; what the
token budget leaves is for prompts, in pieces. A sequence is begun when there is room for its whole prompt. When the pool is
short, the newest gives its pages back and is computed anew later; so the oldest always gets on, and nobody waits for ever.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from penstock.config.engines import EngineConfig
from penstock.engine.sequence import Sequence
from penstock.kv.cache import KVCache
from penstock.kv.radix import Key, Node

# Rows whose logits are all wanted take the whole vocabulary each: 8,192 of them would be gigabytes.
MOST_REPORTED = 512


class Work(NamedTuple):
    """`length` tokens of a sequence, from the first that has no KV."""

    sequence: Sequence
    length: int


class Scheduler:
    def __init__(self, config: EngineConfig, cache: KVCache) -> None:
        self._config = config
        self._cache = cache
        self._waiting: OrderedDict[bytes, Sequence] = OrderedDict()
        self._running: dict[bytes, Sequence] = {}
        self.preemptions = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self._running.values()
        yield from self._waiting.values()

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.request.id] = sequence

    def remove(self, generation: bytes) -> Sequence | None:
        """Takes a sequence out, in whatever state, and gives back all that it held."""
        sequence = self._waiting.pop(generation, None)
        if sequence is None:
            sequence = self._running.pop(generation, None)
            if sequence is not None:
                self._release(sequence)
        return sequence

    def schedule(self, now: float) -> list[Work]:
        """The next step."""
        budget = self._config.token_budget
        work: list[Work] = []
        for sequence in list(self._running.values()):
            # One before it may have preempted it.
            if sequence.to_compute == 1 and sequence.request.id in self._running and self._make_room(sequence, now):
                work.append(Work(sequence, 1))  # noqa: PERF401, for making room is no mere condition
        # Prompts get on, however little, even when the budget is too small for all that generate.
        budget = max(budget - len(work), self._cache.page_size)
        for sequence in list(self._running.values()):
            if sequence.to_compute > 1 and budget:
                budget -= self._add_prompt(sequence, budget, work)
        self._admit(budget, work, now)
        return work

    def computed(self, work: Work) -> None:
        """The KV of these tokens is there: pages that are full can be shared from now on."""
        sequence = work.sequence
        sequence.computed += work.length
        size = self._cache.page_size
        first, last = len(sequence.path), sequence.computed // size
        if last > first:
            keys = [tuple(sequence.tokens[page * size : (page + 1) * size]) for page in range(first, last)]
            full, sequence.tail = sequence.tail[: last - first], sequence.tail[last - first :]
            parent = sequence.path[-1] if sequence.path else self._cache.root
            sequence.path += self._cache.commit(parent, keys, full, sequence.lease, sequence.request.priority)

    def _add_prompt(self, sequence: Sequence, budget: int, work: list[Work]) -> int:
        most = budget if sequence.prompt_logprobs is None else min(budget, MOST_REPORTED)
        count = min(sequence.to_compute, most)
        work.append(Work(sequence, count))
        return count

    def _make_room(self, sequence: Sequence, now: float) -> bool:
        """A page for its next token; when there is none, the newest makes room, which may be itself."""
        needed = self._cache.pages_for(len(sequence.tokens)) - len(sequence.path) - len(sequence.tail)
        while needed > 0 and not self._cache.can_allocate(needed):
            newest = next(reversed(self._running))
            self._preempt(newest)
            if newest == sequence.request.id:
                return False
        if needed > 0:
            sequence.tail += self._cache.allocate(needed, now)
        return True

    def _preempt(self, generation: bytes) -> None:
        sequence = self._running.pop(generation)
        self._release(sequence)
        self.preemptions += 1
        self._waiting[generation] = sequence
        self._waiting.move_to_end(generation, last=False)

    def _release(self, sequence: Sequence) -> None:
        self._cache.give_back(sequence.tail)
        self._cache.release(sequence.path)
        sequence.forget_pages()

    def _admit(self, budget: int, work: list[Work], now: float) -> None:
        in_progress = {key for sequence in self._running.values() if (key := self._next_page(sequence, sequence.path)) is not None}
        for generation, sequence in list(self._waiting.items()):
            if not budget or len(self._running) >= self._config.max_batch:
                break
            path = [] if sequence.request.prompt_logprobs and not sequence.reported else self._cache.match(sequence.tokens)
            next_page = self._next_page(sequence, path)
            if next_page in in_progress:
                # Another computes the same now: in a moment it will be there to share.
                continue
            if not self._begin(sequence, path, now):
                break
            del self._waiting[generation]
            self._running[generation] = sequence
            if next_page is not None:
                in_progress.add(next_page)
            budget -= self._add_prompt(sequence, budget, work)

    def _next_page(self, sequence: Sequence, path: list[Node]) -> tuple[Node, Key] | None:
        """The full page of its prompt that it computes next, if there is one."""
        size = self._cache.page_size
        start = len(path) * size
        if len(sequence.tokens) - start <= size:
            return None
        return path[-1] if path else self._cache.root, tuple(sequence.tokens[start : start + size])

    def _begin(self, sequence: Sequence, path: list[Node], now: float) -> bool:
        """Takes the pages for all its tokens, if they can be had beside a page for every one that runs."""
        needed = self._cache.pages_for(len(sequence.tokens)) - len(path)
        cached = sum(1 for node in path if not node.references)
        if not self._cache.can_allocate(needed + len(self._running) + cached):
            return False
        self._cache.acquire(path, sequence.lease, sequence.request.priority)
        sequence.path = path
        sequence.tail = self._cache.allocate(needed, now)
        sequence.computed = len(path) * self._cache.page_size
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
        return True
