"""Where the tokens of a prompt with images are, for models whose positions have three axes: time, row and column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.wire.images import ImageSpan

Positions = tuple[list[int], list[int], list[int]]
"""Of each token, by axis."""


def positions_of(images: Sequence[ImageSpan], start: int, count: int) -> Positions:
    """The positions of the tokens from `start` on. `images` are those of the prompt, in order.

    A token of text has the same number on all axes. All positions of an image have the same time; they differ by row and column. What
    follows an image goes on behind its longer side.
    """
    end = start + count
    times: list[int] = []
    rows: list[int] = []
    columns: list[int] = []

    def add_text(first: int, last: int, shift: int) -> None:
        """The part of the tokens from `first` to below `last` that is wanted."""
        plain = range(max(first, start) + shift, min(last, end) + shift)
        for axis in (times, rows, columns):
            axis.extend(plain)

    behind = shift = 0
    for first, (height, width), next_shift in _places(images):
        add_text(behind, first, shift)
        behind, origin = first + height * width, first + shift
        wanted = range(max(first, start) - first, min(behind, end) - first)
        times.extend([origin] * len(wanted))
        rows.extend([origin + index // width for index in wanted])
        columns.extend([origin + index % width for index in wanted])
        shift = next_shift
    add_text(behind, end, shift)
    return times, rows, columns


def shift_behind(images: Sequence[ImageSpan]) -> int:
    """What follows the last image has its index and this number as its position, on all axes. It is 0 or negative."""
    return sum(max(span.grid) - span.grid[0] * span.grid[1] for span in images)


def _places(images: Sequence[ImageSpan]) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Of each image: the index of its first position, its grid, and the shift of what follows it."""
    shift = 0
    for span in images:
        rows, columns = span.grid
        count = rows * columns
        # A span may include a token before and a token behind the positions.
        first = span.start + (span.end - span.start - count) // 2
        shift += max(rows, columns) - count
        yield first, span.grid, shift
