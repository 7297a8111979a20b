"""The progress bar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from penstock.bench.load import Progress


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar that is drawn when it is told to, and gone afterwards."""
    # No thread of its own: it would take its turns from the load.
    bar = Bar(
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]:,} running, {task.fields[events]:,} events, {task.fields[failed]:,} failed"),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
    )
    with bar:
        task = bar.add_task("requests", total=total, running=0, events=0, failed=0)

        def show(progress: Progress) -> None:
            counts: dict[str, Any] = {"running": progress.running, "events": progress.events, "failed": progress.failed}
            bar.update(task, completed=progress.finished, refresh=True, **counts)

        yield show
