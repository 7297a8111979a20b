"""What the worker runtime asks of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.wire.messages import KvEvents, ModelInfo, Segment, SessionReport, Snapshot, Submit, WorkerStats

Emit = Callable[[Sequence[Segment], KvEvents | None], None]
"""Takes what one engine step made, for all its generations at once, and what it did to the cached KV. Called on the event loop after every
step, also when nothing is new; never blocks."""


class Backend(Protocol):
    """An engine in the worker's process.

    Every submitted generation gets exactly one terminal through `emit`, except a cancelled one, which gets none. Deltas of a
    generation are disjoint and in order, and start at the `offset` of its Submit.
    """

    @property
    def model(self) -> ModelInfo: ...

    async def start(self, emit: Emit) -> None:
        """Gets ready to take work. Raises ConfigError when it cannot."""

    def submit(self, request: Submit) -> None:
        """Queues a generation. What can never run gets its Fault through `emit`."""

    def cancel(self, generation: bytes) -> None:
        """Stops a generation, begun or queued, and frees what it held at once. An unknown or ended one is ignored."""

    def close_session(self, session_id: str, epoch: int) -> None:
        """Ends a session, now or when its last active turn ends. An unknown one, or one of another epoch, is ignored."""

    async def describe_sessions(self, session_ids: Sequence[str]) -> Sequence[SessionReport]:
        """Those of these sessions that there are."""

    async def snapshot(self) -> Snapshot | None:
        """All that is cached now; None from an engine that tells no events."""

    def stats(self) -> WorkerStats: ...

    async def close(self) -> None:
        """Stops and awaits everything that it started."""
