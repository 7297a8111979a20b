"""The table at the end of `make test-clients`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

HEADINGS = ("client", "version", "tests", "requests", "4xx expected", "4xx unexpected", "outside", "turns", "shared prefix", "lowest turn")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per client and version: `rows` are those of `Scene.row`, one per test.

    "shared prefix" is the share of the tokens that the engine had of the turn before and that the next prompt begins with.
    "4xx" counts all refusals, those in an event of a stream, too. "outside" counts attempts to reach another machine, all refused.
    """

    def key(row: Mapping[str, Any]) -> tuple[str, str]:
        return row["client"], row["version"]

    lines = [HEADINGS, *(_line(list(group)) for _, group in groupby(sorted(rows, key=key), key))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _line(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def total(name: str) -> int:
        return sum(row[name] for row in rows)

    share = f"{total('shared') / total('reusable'):.1%}" if total("reusable") else "-"
    lowest = f"{min(row['lowest'] for row in rows if row['turns']):.1%}" if total("turns") else "-"
    counts = (len(rows), *(total(name) for name in ("requests", "expected", "unexpected", "outside", "turns")))
    return (rows[0]["client"], rows[0]["version"], *map(str, counts), share, lowest)
