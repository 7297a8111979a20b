"""Server-sent events as engines write them: bytes in, the events' data out. Pure."""

from __future__ import annotations

from penstock.wire.errors import PenstockError

DONE = b"[DONE]"


class EventTooLarge(PenstockError):
    """A line, or an event, over the limit: nothing after it can be trusted."""


class EventLines:
    """Reads a stream of events that may be cut anywhere; any cut of the same bytes gives the same events.

    Lines end with LF, CRLF or CR. An event's data lines are joined with LF; comments and other fields are ignored, and so is an event
    that no blank line ended: it is not known to be whole. No more than `most_bytes` of one event are ever held.
    """

    __slots__ = ("_buffer", "_data", "_most_bytes", "_scanned", "_skips_lf")

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._buffer = bytearray()
        # What of the buffer is known to have no end of a line: a long line must not be searched again with every piece of it.
        self._scanned = 0
        self._data: list[bytes] = []
        # The last line ended with a CR that was the last byte so far: an LF that follows belongs to it.
        self._skips_lf = False

    def feed(self, data: bytes) -> list[bytes]:
        """The data of the events that these bytes complete. Raises EventTooLarge."""
        if self._skips_lf and data:
            data = data.removeprefix(b"\n")
            self._skips_lf = False
        self._buffer += data
        events: list[bytes] = []
        while (line := self._next_line()) is not None:
            if line:
                self._take(line)
            elif self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
        if len(self._buffer) + sum(map(len, self._data)) > self._most_bytes:
            raise EventTooLarge(f"an event is longer than {self._most_bytes:,} bytes")
        return events

    def _take(self, line: bytes) -> None:
        if line.startswith(b"data:"):
            self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        elif line == b"data":
            self._data.append(b"")

    def _next_line(self) -> bytes | None:
        buffer = self._buffer
        newline = buffer.find(b"\n", self._scanned)
        # No further than to the LF: with streams that have no CR, every line would be looked for to the end of all that has come.
        carriage = buffer.find(b"\r", self._scanned, len(buffer) if newline < 0 else newline)
        stop = newline if carriage < 0 else carriage
        if stop < 0:
            self._scanned = len(buffer)
            return None
        line = bytes(buffer[:stop])
        after = stop + 1
        if buffer[stop] == ord("\r"):
            self._skips_lf = after == len(buffer)
            after += buffer[after : after + 1] == b"\n"
        del buffer[:after]
        self._scanned = 0
        return line
