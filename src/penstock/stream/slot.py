"""The slot: what waits of one generation, at any hop, the ledger of its offsets, and how its deltas merge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from penstock.wire.errors import GapError, OverlapError, PutAfterTerminal, UnmergeableError
from penstock.wire.messages import Delta, PromptReport, Terminal, TokenLogprob

# Pending deltas are merged when they are taken. At this many the newest are merged in place, so that a slow reader costs the memory of
# its tokens and not of many small objects.
COMPACT_AT = 64


class Slot:
    """The pending delta and terminal of one generation.

    `put` and `end` never block and never drop; they return whether the slot was empty. A delta with a gap or overlap raises GapError
    or OverlapError, one that cannot be merged with what waits UnmergeableError; anything after the terminal raises PutAfterTerminal.
    After an error the slot is unchanged. What was put can be taken: `take` does not raise. The terminal is taken with the last
    pending tokens or after them, never instead of them.
    """

    __slots__ = ("_pending", "_terminal", "_terminal_taken", "next_offset")

    def __init__(self, next_offset: int = 0) -> None:
        self.next_offset = next_offset
        """The offset at which the next delta must start."""
        self._pending: list[Delta] = []
        self._terminal: Terminal | None = None
        self._terminal_taken = False

    @property
    def ended(self) -> bool:
        """Its terminal has been put, taken or not."""
        return self._terminal is not None

    @property
    def is_empty(self) -> bool:
        """There is nothing to take."""
        return not self._pending and (self._terminal is None or self._terminal_taken)

    def put(self, delta: Delta) -> bool:
        if self._terminal is not None:
            raise PutAfterTerminal(f"a delta at offset {delta.offset} came after {self._terminal}")
        if delta.offset != self.next_offset:
            check_contiguous(self.next_offset, delta)
        pending = self._pending
        if not pending:
            pending.append(delta)
            self.next_offset += len(delta.token_ids)
            return True
        if delta.prompt is not None or (delta.logprobs is None) is not (pending[0].logprobs is None):
            merge([pending[-1], delta])  # raises what is wrong
        pending.append(delta)
        self.next_offset += len(delta.token_ids)
        if len(pending) >= COMPACT_AT:
            compact(pending)
        return False

    def end(self, terminal: Terminal) -> bool:
        if self._terminal is not None:
            raise PutAfterTerminal(f"{terminal} came after {self._terminal}")
        self._terminal = terminal
        return not self._pending

    def take(self, tokens: int | None = None) -> tuple[Delta | None, Terminal | None]:
        """Takes everything: one merged delta, and the terminal.

        With `tokens`, takes at most this many. If tokens are left, the terminal stays with them.
        """
        delta = None
        if self._pending:
            delta = merge(self._pending)
            self._pending = []
            if tokens is not None and len(delta.token_ids) > tokens:
                delta, rest = split(delta, tokens)
                self._pending = [rest]
                return delta, None
        if self._terminal is None or self._terminal_taken:
            return delta, None
        self._terminal_taken = True
        return delta, self._terminal

    def discard(self) -> None:
        """Drops the pending delta, because its reader has left. The terminal is kept."""
        self._pending = []


def check_contiguous(expected: int, delta: Delta) -> None:
    """Raises GapError or OverlapError unless `delta` starts at `expected`."""
    if delta.offset == expected:
        return
    kind = GapError if delta.offset > expected else OverlapError
    raise kind(f"expected the token at offset {expected}, got a delta of {len(delta.token_ids)} tokens at offset {delta.offset}")


def merge(deltas: Sequence[Delta]) -> Delta:
    """One delta from several consecutive ones. Associative. Linear in the number of tokens.

    Raises GapError or OverlapError if they are not consecutive, UnmergeableError if their fields cannot be merged.
    """
    if len(deltas) == 1:
        return deltas[0]
    expected = deltas[0].offset
    for delta in deltas:
        if delta.offset != expected:
            check_contiguous(expected, delta)
        expected += len(delta.token_ids)
    return Delta(*[rule(deltas) for rule in MERGE_RULES.values()])  # type: ignore[arg-type]


def compact(deltas: list[Delta]) -> None:
    """Merges the newest of these consecutive deltas, in place.

    A delta is left alone if it has more than twice the tokens of all that follow it. So each token is merged a logarithmic number of
    times, however many puts nobody takes, and few deltas are left.
    """
    start = len(deltas) - 1
    tokens = len(deltas[start].token_ids)
    while start and len(deltas[start - 1].token_ids) <= 2 * tokens:
        start -= 1
        tokens += len(deltas[start].token_ids)
    deltas[start:] = [merge(deltas[start:])]


def split(delta: Delta, count: int) -> tuple[Delta, Delta]:
    """The first `count` tokens, and the rest: `merge(split(delta, count)) == delta`."""
    if not 0 <= count <= len(delta.token_ids):
        raise ValueError(f"cannot split {count} tokens off a delta of {len(delta.token_ids)}")
    probs = delta.logprobs
    head = Delta(delta.offset, delta.token_ids[:count], probs and probs[:count], delta.prompt)
    return head, Delta(delta.offset + count, delta.token_ids[count:], probs and probs[count:])


def _offset(deltas: Sequence[Delta]) -> int:
    return deltas[0].offset


def _token_ids(deltas: Sequence[Delta]) -> tuple[int, ...]:
    return tuple(chain.from_iterable([delta.token_ids for delta in deltas]))


def _logprobs(deltas: Sequence[Delta]) -> tuple[TokenLogprob, ...] | None:
    present = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    if not present:
        return None
    if len(present) != len(deltas):
        raise UnmergeableError("some of the deltas have logprobs and some do not")
    return tuple(chain.from_iterable(present))


def _prompt(deltas: Sequence[Delta]) -> PromptReport | None:
    if any([delta.prompt is not None for delta in deltas[1:]]):  # noqa: C419, a list is faster for a few items
        raise UnmergeableError("only the first delta may have a prompt report")
    return deltas[0].prompt


# One rule per field, in the order of the fields. A test fails when a field has no rule.
MERGE_RULES: dict[str, Callable[[Sequence[Delta]], object]] = {
    "offset": _offset,
    "token_ids": _token_ids,
    "logprobs": _logprobs,
    "prompt": _prompt,
}
