"""What a run shows: the progress bar, then the figures as JSON and as a table."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table
from rich.text import Text

from penstock.bench.load import Load, Progress
from penstock.bench.processes import Process
from penstock.bench.stream import Stream
from penstock.bench.verify import Verification

MAX_ERRORS = 5


@contextlib.contextmanager
def progress_bar(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A bar that is drawn on every call, and removed at the end."""
    # No auto-refresh: its thread would disturb the load.
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


class Spread(msgspec.Struct):
    """Percentiles, in milliseconds."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class ProcessFigures(msgspec.Struct):
    name: str
    pid: int
    cpu_seconds: float
    cpu_share: float
    """Of one core."""
    cpu_us_per_token: float | None
    rss_start_bytes: int
    rss_max_bytes: int
    rss_end_bytes: int
    ended: bool
    """Whether the process ended before the load did."""


class Requests(msgspec.Struct):
    begun: int
    succeeded: int
    failed: int
    interrupted: int


class Report(msgspec.Struct, kw_only=True):
    """All figures of a run. `tokens_estimated`: some streams had no usage, and their events were counted instead."""

    settings: dict[str, object]
    seconds: float
    requests: Requests
    tokens: int
    tokens_estimated: bool
    tokens_per_second: float
    events: int
    reads: int
    tokens_per_read: float | None
    ttft_ms: Spread | None
    chunk_gap_ms: Spread | None
    request_ms: Spread | None
    finish_reasons: dict[str, int]
    errors: dict[str, int]
    processes: list[ProcessFigures]
    verification: Verification | None

    @property
    def is_good(self) -> bool:
        """Every request succeeded, and the verification found nothing."""
        wrong = self.verification is not None and self.verification.wrong_streams > 0
        return self.requests.succeeded == self.requests.begun > 0 and not wrong

    def json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def make_report(load: Load, processes: Sequence[Process], verification: Verification | None, settings: dict[str, object]) -> Report:
    streams = load.streams
    seconds = load.ended - load.began
    tokens = sum(stream.tokens for stream in streams)
    reads = sum(len(stream.times) for stream in streams)
    complete = [stream for stream in streams if stream.is_complete]
    errors = Counter(stream.error for stream in streams if stream.error is not None)
    failed = errors.total()
    return Report(
        settings=settings,
        seconds=seconds,
        requests=Requests(len(streams), len(complete), failed, len(streams) - len(complete) - failed),
        tokens=tokens,
        tokens_estimated=any(stream.parts and stream.completion_tokens is None for stream in streams),
        tokens_per_second=tokens / seconds,
        events=sum(stream.events for stream in streams),
        reads=reads,
        tokens_per_read=tokens / reads if reads else None,
        ttft_ms=spread(first_waits(streams)),
        chunk_gap_ms=spread(gaps(streams)),
        request_ms=spread([stream.ended - stream.started for stream in complete]),
        finish_reasons=dict(Counter(stream.finish_reason for stream in streams if stream.finish_reason is not None)),
        errors=dict(errors.most_common()),
        processes=[_figures(process, seconds, tokens) for process in processes],
        verification=verification,
    )


def first_waits(streams: Iterable[Stream]) -> list[float]:
    """Seconds from sending the request, including the connect, to its first text."""
    return [stream.times[0] - stream.started for stream in streams if stream.times]


def gaps(streams: Iterable[Stream]) -> list[float]:
    """Seconds between two reads with text of the same stream."""
    return [after - before for stream in streams for before, after in pairwise(stream.times)]


def spread(seconds: Iterable[float]) -> Spread | None:
    ordered = [value * 1000 for value in sorted(seconds)]
    if not ordered:
        return None
    p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
    return Spread(len(ordered), p50, p90, p99, ordered[-1])


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of the ordered values lies, interpolated between neighbours."""
    place = share * (len(ordered) - 1)
    index = int(place)
    above = ordered[min(index + 1, len(ordered) - 1)]
    return ordered[index] + (above - ordered[index]) * (place - index)


def _figures(process: Process, seconds: float, tokens: int) -> ProcessFigures:
    cpu = process.cpu_seconds
    per_token = cpu * 1e6 / tokens if tokens else None
    memory = (process.rss_start, process.rss_max, process.rss_end)
    return ProcessFigures(process.name, process.pid, cpu, cpu / seconds, per_token, *memory, process.ended)


def print_report(report: Report, console: Console) -> None:
    console.print(_summary(report))
    console.print(_times(report))
    console.print(_processes(report))
    for line in _findings(report):
        console.print(line)


def _summary(report: Report) -> Table:
    table = Table.grid(padding=(0, 2))
    requests = report.requests
    outcome = [f"{requests.succeeded:,} succeeded"]
    outcome += [f"{requests.failed:,} failed"] if requests.failed else []
    outcome += [f"{requests.interrupted:,} interrupted"] if requests.interrupted else []
    about = "about " if report.tokens_estimated else ""
    table.add_row("requests", f"{', '.join(outcome)}, in {report.seconds:.2f} s")
    table.add_row(
        "tokens", f"{about}{report.tokens:,}, in {report.reads:,} reads with text ({_number(report.tokens_per_read)} tokens per read)"
    )
    table.add_row("throughput", Text(f"{about}{report.tokens_per_second:,.0f} tokens/s", style="bold"))
    return table


def _times(report: Report) -> Table:
    table = Table("milliseconds")
    for name in ("p50", "p90", "p99", "max"):
        table.add_column(name, justify="right")
    rows = {"time to first token": report.ttft_ms, "chunk gap": report.chunk_gap_ms, "whole request": report.request_ms}
    for title, figures in rows.items():
        values = (None,) * 4 if figures is None else (figures.p50, figures.p90, figures.p99, figures.max)
        table.add_row(title, *map(_number, values))
    return table


def _processes(report: Report) -> Table:
    table = Table("process", "pid")
    for name in ("CPU-µs/token", "CPU", "RSS at start", "max", "at end"):
        table.add_column(name, justify="right")
    for process in report.processes:
        memory = (process.rss_start_bytes, process.rss_max_bytes, process.rss_end_bytes)
        cells = [_number(process.cpu_us_per_token), f"{process.cpu_share:.0%}", *(f"{value / 2**20:,.0f} MiB" for value in memory)]
        table.add_row(process.name + (" (ended)" if process.ended else ""), str(process.pid), *cells)
    return table


def _findings(report: Report) -> list[Text]:
    """The result of the verification, and the errors."""
    lines = []
    if (checked := report.verification) is not None:
        if checked.wrong_streams:
            wrong = f"{checked.wrong_streams:,} of {checked.streams:,} streams are wrong"
            counts = f"{checked.lost:,} tokens lost, {checked.repeated:,} repeated, {checked.reordered:,} reordered"
            lines.append(Text(f"{wrong}: {counts}; {checked.usage_mismatch:,} with wrong usage", style="bold red"))
        else:
            verified = f"{checked.streams:,} streams verified: no token lost, repeated or reordered; every usage right"
            part = f" ({checked.incomplete:,} were incomplete: verified as far as they came)" if checked.incomplete else ""
            lines.append(Text(verified + part, style="bold yellow" if part else "bold green"))
    for message, count in list(report.errors.items())[:MAX_ERRORS]:
        lines.append(Text(f"{count:,} × {message}", style="red"))
    if (more := len(report.errors) - MAX_ERRORS) > 0:
        lines.append(Text(f"… and {more:,} other errors", style="red"))
    if report.tokens_estimated:
        lines.append(Text("some streams had no usage: each event with text was counted as one token", style="yellow"))
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"
