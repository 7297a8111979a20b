"""`penstock`, broken on purpose: `broken.py merge worker …` or `broken.py checks frontend …`.

`merge` keeps only the newest of several deltas, as a server of this field once did; it is for the worker, where steps merge while the
front end is busy. `checks` looks at no offset any more, so that a loss reaches the client unseen.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import penstock.api.pipeline.choice as choice
import penstock.stream.slot as slot
from penstock.cli.main import main
from penstock.wire.messages import Delta


def keep_newest(deltas: Sequence[Delta]) -> Delta:
    return deltas[-1]


def check_nothing(expected: int, delta: Delta) -> None:
    pass


if __name__ == "__main__":
    if sys.argv.pop(1) == "merge":
        slot.merge = keep_newest
    else:
        slot.check_contiguous = choice.check_contiguous = check_nothing  # type: ignore[attr-defined]
    sys.exit(main())
