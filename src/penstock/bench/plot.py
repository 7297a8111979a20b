"""The plot of a run: latencies, and tokens per second over time."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.bench.load import Load
from penstock.bench.report import Report, Spread, first_waits, gaps
from penstock.bench.stream import Stream

COLOR = "#1f6f8b"
MAX_POINTS = 2000
MAX_BINS = 120
MIN_BIN_SECONDS = 0.1


def write_plot(path: Path, load: Load, report: Report) -> None:
    # It logs about its font cache at the first run.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    first, second, third = figure.subplots(1, 3)
    _draw_shares(first, "Time to first token", first_waits(load.streams), report.ttft_ms)
    _draw_shares(second, "Gap between chunks", gaps(load.streams), report.chunk_gap_ms)
    _draw_rate(third, load, report)
    settings = report.settings
    figure.suptitle(
        f"{settings['model']}, {settings['endpoint']}: {settings['concurrency']:,} streams at a time, "
        f"{report.requests.begun:,} requests of {settings['max_tokens']:,} tokens"
    )
    figure.savefig(path, format="png", dpi=110)


def _draw_shares(axes: Any, title: str, seconds: Sequence[float], figures: Spread | None) -> None:
    """Draws the cumulative distribution."""
    axes.set(title=title, xlabel="milliseconds", ylabel="share", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if figures is None:
        return
    ordered = [value * 1000 for value in sorted(seconds)]
    step = max(1, len(ordered) // MAX_POINTS)
    places = [*range(0, len(ordered), step), len(ordered) - 1]
    axes.step([ordered[place] for place in places], [(place + 1) / len(ordered) for place in places], where="post", color=COLOR)
    axes.set_xlim(left=0)
    for name, value, style in (("p50", figures.p50, "-"), ("p90", figures.p90, "--"), ("p99", figures.p99, ":")):
        axes.axvline(value, color="#888888", linestyle=style, linewidth=1, label=f"{name}  {value:,.1f} ms")
    axes.legend(loc="lower right")


def _draw_rate(axes: Any, load: Load, report: Report) -> None:
    edges, rates = token_rates(load.streams, load.began, load.ended)
    axes.set(title="Throughput", xlabel="seconds", ylabel="tokens/s")
    axes.grid(alpha=0.3)
    axes.stairs(rates, edges, fill=True, color=COLOR, alpha=0.35)
    axes.stairs(rates, edges, color=COLOR)
    axes.axhline(report.tokens_per_second, color="#888888", linewidth=1, label=f"mean  {report.tokens_per_second:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlim(0, edges[-1])
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def token_rates(streams: Sequence[Stream], began: float, ended: float) -> tuple[list[float], list[float]]:
    """The edges of equal time bins, in seconds from the start, and the tokens per second in each bin.

    Only the server knows how many tokens a read had, so a stream's tokens are spread over its reads by their characters.
    """
    bins = max(1, min(MAX_BINS, int((ended - began) / MIN_BIN_SECONDS)))
    width = (ended - began) / bins
    rates = [0.0] * bins
    for stream in streams:
        share = stream.tokens / (sum(stream.sizes) or 1) / width
        for moment, characters in zip(stream.times, stream.sizes, strict=True):
            rates[min(bins - 1, int((moment - began) / width))] += characters * share
    return [width * index for index in range(bins + 1)], rates
