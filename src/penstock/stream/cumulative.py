"""Engines that repeat everything from the start with every chunk, made disjoint at the edge."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.wire.errors import OverlapError
from penstock.wire.messages import Delta, TokenLogprob


class CumulativeReader:
    """Turns cumulative chunks of one generation into disjoint deltas, by offset.

    Each chunk is copied, so an engine may go on growing the list that it handed out. A chunk shorter than what was seen, or
    with another token at the seam, raises: such an engine cannot be read without loss.
    """

    def __init__(self, offset: int = 0) -> None:
        self._offset = offset
        self._seen = 0
        self._last: int | None = None

    def read(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None = None) -> Delta | None:
        """What is new in this chunk; None when nothing is."""
        if len(token_ids) < self._seen:
            raise OverlapError(f"a cumulative chunk of {len(token_ids)} tokens came after one of {self._seen}")
        if self._seen and token_ids[self._seen - 1] != self._last:
            raise OverlapError(f"a cumulative chunk has token {token_ids[self._seen - 1]} where {self._last} came before")
        new = tuple(token_ids[self._seen :])
        if not new:
            return None
        delta = Delta(self._offset + self._seen, new, None if logprobs is None else tuple(logprobs[self._seen : self._seen + len(new)]))
        self._seen += len(new)
        self._last = new[-1]
        return delta
