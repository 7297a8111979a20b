"""Reads server-sent events: bytes in, the data of each event out. Pure."""

from __future__ import annotations

from penstock.wire.errors import PenstockError

DONE = b"[DONE]"
"""The data of the last event, in OpenAI's streams."""

MAX_EVENT_BYTES = 64 * 2**20


class EventTooLarge(PenstockError):
    """An event is larger than the limit. The rest of the stream cannot be read."""


class EventReader:
    """Reads events from bytes that may be cut anywhere; the cuts never change the events.

    Lines end with LF, CRLF or CR. The data lines of an event are joined with LF. Comments and other fields are ignored. An event without
    a blank line after it is incomplete, and ignored, too. Holds at most `max_bytes` of an event.
    """

    __slots__ = ("_after_cr", "_data", "_data_bytes", "_line", "_line_bytes", "_max_bytes")

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        # The pieces of the unfinished line. They are joined once, so a long line in many pieces is not copied again and again.
        self._line: list[bytes] = []
        self._line_bytes = 0
        self._data: list[bytes] = []
        self._data_bytes = 0
        self._after_cr = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete. Raises EventTooLarge."""
        if self._after_cr or b"\r" in data:
            data = self._with_lf(data)
        *lines, rest = data.split(b"\n")
        events: list[bytes] = []
        if lines:
            lines[0] = b"".join((*self._line, lines[0]))
            self._line.clear()
            self._line_bytes = 0
        for line in lines:
            if line.startswith(b"data:"):
                self._add_data(line[6:] if line.startswith(b"data: ") else line[5:])
            elif line == b"data":
                self._add_data(b"")
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._data_bytes = 0
        if rest:
            self._line.append(rest)
            self._line_bytes += len(rest)
        if self._line_bytes + self._data_bytes > self._max_bytes:
            raise EventTooLarge(f"an event is longer than {self._max_bytes:,} bytes")
        return events

    def _add_data(self, data: bytes) -> None:
        self._data.append(data)
        # One more for the line end: else empty lines are free, and their number has no limit.
        self._data_bytes += len(data) + 1

    def _with_lf(self, data: bytes) -> bytes:
        """Replaces every line end by LF. A CR ends its line at once; an LF right after it, perhaps in the next bytes, is dropped."""
        if self._after_cr and data:
            data = data.removeprefix(b"\n")
            self._after_cr = False
        if data:
            self._after_cr = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
