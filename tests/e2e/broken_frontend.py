"""A front end that is broken on purpose, to stand in for `penstock frontend`.

Its merge keeps only the newest of several deltas, as a server of this field once did. With `--silent` first, the check on the last
hop is gone as well, so that the loss reaches the client.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import penstock.http.exchange as exchange
import penstock.stream.slot as slot
from penstock.cli.main import main
from penstock.wire.messages import Delta


def keep_newest(deltas: Sequence[Delta]) -> Delta:
    return deltas[-1]


def check_nothing(expected: int, delta: Delta) -> None:
    pass


if __name__ == "__main__":
    slot.merge = keep_newest  # type: ignore[attr-defined]
    if sys.argv[1] == "--silent":
        exchange.check_contiguous = check_nothing  # type: ignore[attr-defined]
        del sys.argv[1]
    sys.exit(main())
