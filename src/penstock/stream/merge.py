"""Merges deltas without losing a token; splits them again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from penstock.wire.errors import GapError, OverlapError, UnmergeableError
from penstock.wire.messages import Delta, PromptReport, TokenLogprob


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
