"""The choice of a worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerView:
    """What the router knows of one worker at the moment of the choice."""

    name: str
    active: int
    """Generations sent to it that have not ended."""


@dataclass(frozen=True)
class Decision:
    """The worker, and why."""

    worker: str
    reason: str


def choose(view: Sequence[WorkerView]) -> Decision | None:
    """The least loaded worker, the first of equals; None when there is none."""
    if not view:
        return None
    if len(view) == 1:
        return Decision(view[0].name, "only")
    return Decision(min(view, key=lambda worker: worker.active).name, "least_loaded")
