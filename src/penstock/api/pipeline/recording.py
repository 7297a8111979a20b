"""The events of an answer, kept so that a client that was cut off can have what it missed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterable
from typing import Any

_END_OF_EVENT = b"\n\n"


class Recording:
    """Events in the order in which they were made, numbered from 0. Its readers are called whenever there is more, or it is closed."""

    def __init__(self, events: Iterable[bytes] = (), closed: bool = False) -> None:
        self.events: list[bytes] = list(events)
        self.size = sum(map(len, self.events))
        self.closed = closed
        self.body: bytes | None = None
        """The whole answer, where it is not a stream."""
        self._readers: set[Callable[[], None]] = set()

    def append(self, events: Iterable[bytes]) -> None:
        added = list(events)
        self.events += added
        self.size += sum(map(len, added))
        self._wake()

    def close(self) -> None:
        """Nothing more will come."""
        self.closed = True
        self._wake()

    def listen(self, reader: Callable[[], None]) -> None:
        self._readers.add(reader)

    def leave(self, reader: Callable[[], None]) -> None:
        self._readers.discard(reader)

    def _wake(self) -> None:
        for reader in list(self._readers):
            reader()


class Recorder:
    """A sink that records, and never makes anybody wait. With `numbered`, every event carries its number as its SSE id."""

    def __init__(self, recording: Recording, numbered: bool, on_growth: Callable[[int], None]) -> None:
        self._recording = recording
        self._numbered = numbered
        self._on_growth = on_growth
        self.sending_since: float | None = None
        self.stalled = False

    async def send_whole(self, status: int, body: bytes) -> None:  # noqa: ARG002, whole answers are never anything but a success
        self._recording.body = body
        self._on_growth(len(body))

    def send_events(self, events: bytes, last: bool = False) -> Awaitable[None]:  # noqa: ARG002, it is closed by whoever runs it
        before = self._recording.size
        split = [event + _END_OF_EVENT for event in events.split(_END_OF_EVENT)[:-1]]
        if self._numbered:
            first = len(self._recording.events)
            split = [b"id: %d\n%b" % (number, event) for number, event in enumerate(split, first)]
        self._recording.append(split)
        self._on_growth(self._recording.size - before)
        return _DONE


class _Done:
    """Awaited, it is over at once."""

    def __await__(self) -> Generator[Any, Any, None]:
        return
        yield


_DONE = _Done()
